"""A model whose layers differ in all that the cache is grouped by: widths, KV heads, windows,
values of another width, keys as values, layers that read others' keys; with per-layer embeddings
and experts beside an MLP. Whatever happens to a sequence, its tokens are the dense model's.
"""

import collections
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import (
    LLM,
    ModelConfig,
    SamplingParams,
    initial_lora,
    merged,
)
from jpaged.engine.shapes import PrefillShape
from jpaged.errors import ConfigError
from jpaged.models.forward import bind
from jpaged.models.kv_groups import kv_groups, kv_places
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.norm import NormConfig
from jpaged.models.layers.parallel_ffn import ParallelFFNConfig
from jpaged.models.layers.per_layer import PerLayerConfig
from jpaged.models.layers.rope import RopeConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.runtime.choices import choose
from jpaged.runtime.kv_cache import pool_specs
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from kernels_cpu.library import unavailable
from tests.tiny import (
    EOS,
    Compared,
    assert_idle,
    dense_logprobs,
    dense_tokens,
    make_params,
    make_prompts,
)
from tests.tiny import engine as engine_config

NORM = NormConfig(in_f32=True)
MLP = MLPConfig(intermediate_size=24, activation="gelu_tanh")
BESIDE = ParallelFFNConfig(
    mlp=MLP,
    experts=ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        expert_size=12,
        router=RouterConfig(normalized=True, norm=NORM, has_expert_scales=True),
    ),
    norm=NORM,
)
LOCAL = AttentionConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=7,
    rope=RopeConfig(dim=16),
    multiplier=0.4,
    qk_norm="head",
    norm=NORM,
    value_norm=True,
)
FULL = dataclasses.replace(
    LOCAL, num_kv_heads=1, head_dim=32, window=None, rope=RopeConfig(dim=8), value_is_key=True
)
NARROW = dataclasses.replace(
    LOCAL, num_kv_heads=4, value_dim=8, value_norm=False, value_scale=0.7, qkv_bias=True, sinks=True
)


def _reads(mixer: AttentionConfig, layer: int) -> AttentionConfig:
    """A mixer that attends to the keys of another layer."""
    return dataclasses.replace(mixer, keys_of=layer, value_is_key=False, value_norm=False)


def _layer(mixer: AttentionConfig, ffn: MLPConfig | ParallelFFNConfig = MLP) -> LayerConfig:
    return LayerConfig(
        mixer=mixer,
        ffn=ffn,
        norms="both",
        norm=NORM,
        per_layer=PerLayerConfig(size=20, norm=NORM),
        has_scalar=True,
    )


LAYERS = (
    _layer(LOCAL),
    _layer(FULL, BESIDE),
    _layer(NARROW),
    _layer(_reads(LOCAL, 0)),
    _layer(_reads(FULL, 1)),
)
MODEL = ModelConfig(
    family="gemma4_text",
    vocab_size=97,
    hidden_size=32,
    layers=LAYERS,
    max_position_embeddings=64,
    scaled_embedding=True,
    final_logit_softcapping=15.0,
    eos_token_ids=(EOS,),
)
# Too few blocks for the prompts below at once.
CROWDED = engine_config(num_blocks=24, max_num_seqs=12, seq_buckets=(12,), max_logprobs=12)
COMPARED = Compared(MODEL, CROWDED)
PARAMS, llm_of, check = COMPARED.params, COMPARED.llm, COMPARED.check
# Short ones are admitted with a block each, of which they need more later.
SHORT = make_prompts(3, 2, 4, 3, 1, 2)
PROMPTS = make_prompts(5, 21, 40, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_groups() -> None:
    groups = kv_groups(MODEL)
    form = [(g.layers, g.window, g.num_kv_heads, g.head_dim, g.value_dim) for g in groups]
    assert form == [((0,), 7, 2, 16, 16), ((1,), None, 1, 32, 32), ((2,), 7, 4, 16, 8)]
    assert kv_places(MODEL) == [((i, 0),) for i in (0, 1, 2, 0, 1)]


def test_pools_hold_values_at_their_width() -> None:
    """A block in 8 bits has K keys and K values of a token, each as wide as it is, and scales."""
    settings = CROWDED.resolve(MODEL)
    for kv_dtype, size, of_scales in ((None, 4, 0), ("int8", 1, 4)):
        config = dataclasses.replace(settings, kv_cache_dtype=kv_dtype)
        place = Placement(mesh=None, axis=None, device=jax.devices()[0])
        kernels = choose(MODEL, config, place, jnp.float32).attention
        pools = pool_specs(MODEL, config, place, kernels, 24, jnp.float32)
        heads = ((2, 16, 16), (1, 32, 32), (4, 16, 8))
        tokens = [k * (size * (d + v) + 2 * of_scales) for k, d, v in heads]
        assert [x.block_bytes for x in pools] == [settings.block_size * n for n in tokens]


def test_layers_that_cannot_read_others_keys() -> None:
    """A layer reads the last keys of its own kind, so that training, which holds those alone, is
    the same model.
    """
    for wrong in (_reads(LOCAL, 1), _reads(FULL, 0), _reads(LOCAL, 4)):
        with pytest.raises(ConfigError, match="keys_of="):
            dataclasses.replace(MODEL, layers=(*LAYERS, _layer(wrong)))
    between = (*LAYERS, _layer(LOCAL), _layer(_reads(LOCAL, 0)))
    with pytest.raises(ConfigError, match="is layer 5"):
        dataclasses.replace(MODEL, layers=between)


@pytest.mark.parametrize("is_swapped", [False, True], ids=["recomputed", "in host memory"])
def test_the_dense_models_tokens(is_swapped: bool) -> None:
    """Chunks of 16 tokens, preemptions, prefix hits, samples that share a prompt."""
    store: dict[str, Any] = {"swap_space_gib": 0.01, "swap_min_tokens": 0}
    llm = llm_of(**store if is_swapped else {})
    prompts = [*SHORT, *PROMPTS]
    check(prompts, llm.generate(prompts, GREEDY, use_tqdm=False))
    kind = "preemptions_swapped" if is_swapped else "preemptions_recomputed"
    assert llm.stats()[kind] > 0
    (again,) = llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False)
    (again,) = llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False)
    check(PROMPTS[2:3], [again])
    assert again.num_cached_tokens > 0
    four = llm.generate(PROMPTS[1:2], dataclasses.replace(GREEDY, n=4), use_tqdm=False)
    assert len(four[0].outputs) == 4
    check(PROMPTS[1:2], four)
    for prompt, scores in zip(PROMPTS[:3], llm.score(PROMPTS[:3]), strict=True):
        expected = dense_logprobs(PARAMS, prompt)[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert_idle(llm)
    llm.close()


# Layers of widths that C++ kernels take, the last two of which read the keys of others.
ALIKE = dataclasses.replace(
    MODEL,
    layers=[
        dataclasses.replace(
            layer, ffn=MLPConfig(intermediate_size=32), per_layer=PerLayerConfig(size=32)
        )
        for layer in (
            _layer(dataclasses.replace(LOCAL, head_dim=32, value_norm=False)),
            _layer(dataclasses.replace(FULL, head_dim=64, value_norm=False)),
            _layer(_reads(dataclasses.replace(LOCAL, head_dim=32), 0)),
            _layer(_reads(dataclasses.replace(FULL, head_dim=64), 1)),
        )
    ],
)


def test_readers_compute_the_last_tokens_alone() -> None:
    """The last two of four layers, for 12 of 64 tokens, where nobody wants the states of others."""
    settings = engine_config(max_num_seqs=12, seq_buckets=(12,), token_buckets=(64,)).resolve(ALIKE)
    place = Placement(mesh=None, axis=None, device=jax.devices()[0])
    runner = Runner(ALIKE, settings, place, bind(ALIKE, make_params(0, ALIKE)))
    shape = PrefillShape(tokens=64, rows=12, tables=2, blocks=16)

    def products(shape: PrefillShape) -> dict[int, int]:
        """How many products with an MLP's weights there are for so many tokens."""
        text = runner.compiled.lower(shape).as_text()
        found = re.findall(r"dot_general.*tensor<(\d+)x32xf32>, tensor<64x32xf32>", text)
        return dict(collections.Counter(map(int, found)))

    layers, both = products(dataclasses.replace(shape, keeps_states=True)), products(shape)
    assert set(layers) == {64} and set(both) == {64, 12}, (layers, both)


@pytest.mark.middle
def test_the_bits_of_a_prompt_that_is_scored() -> None:
    """Also of a step with guesses, which draws after several tokens of a row: bits are those of the
    steps that compute every token in every layer.
    """
    params, store = make_params(0, ALIKE, jnp.bfloat16), {"swap_space_gib": 0.01}
    guesses = {"method": "ngram", "num_tokens": 4, "adaptive": False}
    settings = dataclasses.replace(CROWDED, deterministic=unavailable() is None, **store)
    prompts = [*PROMPTS, [7, 8, 9, 10] * 5]
    found = []
    for speculative in (None, guesses):
        llm = LLM(params, **vars(dataclasses.replace(settings, speculative=speculative)))
        for scores in (None, 0):
            asked = dataclasses.replace(GREEDY, prompt_logprobs=scores)
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            done = [output.outputs[0] for output in outputs]
            bits = [x.token_logprobs.tobytes() if settings.deterministic else 0 for x in done]
            found.append([(x.token_ids, y) for x, y in zip(done, bits, strict=True)])
            llm.reset_prefix_cache()
        assert speculative is None or llm.stats()["accepted_tokens"] > 0
        llm.close()
    assert all(others == found[0] for others in found[1:])


def test_on_four_devices() -> None:
    """Two replicas of two devices: the one KV head of full layers is repeated, the experts and the
    table of per-layer embeddings are split.
    """
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    llm = llm_of(mesh, data_parallel_size=2, tensor_parallel_size=2, num_blocks=16)
    check(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    check(PROMPTS[2:3], llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False))
    llm.close()


def test_adapters() -> None:
    """Every weight that takes an adapter has one, also where parts differ by layer."""
    parts = [f"attention.{x}" for x in ("q", "k", "v", "out")] + ["mlp.gate", "mlp.up", "mlp.down"]
    lora = initial_lora(MODEL, 3, jax.random.key(0), parts=parts)
    keys = jax.random.key(1)
    lora = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(keys, x.shape), lora)
    config = dataclasses.replace(CROWDED, max_loras=1, max_lora_rank=3)
    outputs = jpaged.generate(PARAMS, PROMPTS[:2], GREEDY, lora=lora, engine_config=config)
    jpaged.release()
    changed = merged(PARAMS, lora)
    for prompt, output in zip(PROMPTS[:2], outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == dense_tokens(changed, prompt, len(tokens))
        assert tokens != COMPARED.dense(prompt, len(tokens)), "it changes nothing"


def test_keys_in_8_bits() -> None:
    """Each group has scales; where rounding turns a choice of experts, a token is far off."""
    llm = llm_of(kv_cache_dtype="int8")
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        expected = dense_logprobs(PARAMS, prompt + tokens)[len(prompt) - 1 : -1]
        expected = expected[range(len(tokens)), tokens]
        assert np.median(np.abs(output.outputs[0].token_logprobs - expected)) < 0.05
    llm.close()
