"""Layers of every kind over a thousand tokens: what generate draws, what `score` says of it and
what `logprobs(exact=True)` says have the same bits.

Decode, prefill and the trainer's forward pass are three programs, of tokens in other shapes. Where
one of them rounds, adds up or takes an exponential in another way, some of these tokens see it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import ModelConfig
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.conv import ConvConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.kda import KimiDeltaConfig
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.layers.parallel_mixer import ParallelMixerConfig
from jpaged.models.layers.router import RouterConfig
from kernels_cpu.library import unavailable
from tests.tiny import ENGINE, config, make_params, make_prompts

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

PLAIN = config(
    hidden_size=64,
    num_layers=2,
    head_dim=32,
    intermediate_size=96,
    eos_token_ids=(),
    max_position_embeddings=256,
)
ATTENTION = PLAIN.layers[0].mixer
assert isinstance(ATTENTION, AttentionConfig)
GATED = dataclasses.replace(ATTENTION, gate=True)
DELTA = DeltaConfig(num_key_heads=2, num_value_heads=6, key_dim=24, value_dim=32)
BY_CHANNEL = KimiDeltaConfig(
    num_key_heads=4, num_value_heads=4, key_dim=32, value_dim=32, gate_rank=32
)
MAMBA = MambaConfig(num_heads=4, head_dim=32, state_dim=16)
NORM_FIRST = dataclasses.replace(
    MAMBA, num_groups=2, conv_width=3, conv_bias=False, bias=True, norm="before"
)
BESIDE = ParallelMixerConfig(
    attention=ATTENTION,
    mamba=dataclasses.replace(MAMBA, norm=None, multipliers=(0.8, 1.2, 0.7, 1.1, 0.9)),
    attention_in_multiplier=1.2,
    attention_out_multiplier=0.9,
    mamba_in_multiplier=1.1,
    mamba_out_multiplier=0.7,
)
EXPERTS = ExpertsConfig(
    num_experts=6, experts_per_token=3, expert_size=32, shared_expert_size=32, shared_gate=True
)
BY_SIGMOIDS = dataclasses.replace(
    EXPERTS,
    router=RouterConfig(score="sigmoid", has_bias=True, normalized=True, eps=1e-20, scale=2.5),
)
NORMED = dataclasses.replace(ATTENTION, qk_norm="whole")
CAPPED = dataclasses.replace(ATTENTION, soft_cap=20.0, value_scale=0.7)


def of(*layers: Any, family: str = PLAIN.family) -> ModelConfig:
    """The plain model with these mixers, or mixers and feed-forward parts, in its layers."""
    plain, made = PLAIN.layers[0], []
    for layer in layers:
        mixer, ffn = layer if isinstance(layer, tuple) else (layer, plain.ffn)
        made.append(dataclasses.replace(plain, mixer=mixer, ffn=ffn))
    return dataclasses.replace(PLAIN, family=family, layers=tuple(made))


MODELS = {
    "delta rule": of(DELTA, GATED, dataclasses.replace(DELTA, allows_negative=True)),
    "delta rule by channel": of(BY_CHANNEL, dataclasses.replace(BY_CHANNEL, gate_rank=None)),
    "Mamba-2": of(MAMBA, ATTENTION, NORM_FIRST),
    "Mamba-2 beside attention": of(BESIDE, BESIDE),
    "short convolutions": of(ConvConfig(channels=64), ConvConfig(channels=64), ATTENTION),
    "experts": of((ATTENTION, EXPERTS), (ATTENTION, BY_SIGMOIDS), family="qwen3_moe"),
    "norms of whole rows, caps": of(NORMED, CAPPED),
}
PROMPTS = make_prompts(3, 150, 64, 65, 20, 128, 7, 90, 33)
SAMPLING = jpaged.SamplingParams(
    n=3, max_tokens=40, temperature=0.7, logprobs_mode="tempered", ignore_eos=True
)
SETTINGS = dataclasses.replace(
    ENGINE,
    deterministic=True,
    max_model_len=200,
    max_num_batched_tokens=128,
    num_blocks=600,
    token_buckets=(16, 128),
)


@pytest.mark.parametrize("name", MODELS)
def test_one_set_of_bits(name: str) -> None:
    params = make_params(0, MODELS[name], jnp.bfloat16)
    outs = jpaged.generate(params, PROMPTS, SAMPLING, engine_config=SETTINGS, seed=3)
    arrays = jpaged.to_arrays(outs, max_prompt_len=150, max_completion_len=40)
    rolled = arrays["logprobs"]
    assert arrays["completion_mask"].all() and np.abs(rolled).max() > 0

    rows = [[*out.prompt_token_ids, *one.token_ids] for out in outs for one in out.outputs]
    scores: Any = jpaged.score(params, rows, temperature=0.7, engine_config=SETTINGS)
    for scored, row in zip(scores, rolled, strict=True):
        np.testing.assert_array_equal(np.asarray(scored)[-len(row) :], row)

    exact = functools.partial(jpaged.logprobs, temperature=0.7, exact=True)
    np.testing.assert_array_equal(jax.jit(exact)(params, arrays), rolled)
