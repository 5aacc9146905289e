"""Mamba-2 in the engine, as files hold it, and in training: with one group and with two, before and
beside attention, in layers that lack either half; and experts of a latent, without gates.
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jpaged
from jpaged import LLM, ConfigError, ModelConfig, Params, RequestOutput, SamplingParams
from jpaged.checkpoint.tensors import flat
from jpaged.errors import UnsupportedError
from jpaged.models.forward import bind
from jpaged.models.kv_groups import kv_groups, kv_places
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.parallel_mixer import ParallelMixerConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.models.lora import merged, targets
from jpaged.models.params import param_specs
from jpaged.models.quantized import is_quantized
from jpaged.models.served import served_config
from kernels_cpu.library import unavailable
from tests.golden.mambas import MAMBAS
from tests.test_states import with_bits_of_requests_alone
from tests.tiny import (
    EOS,
    assert_idle,
    by_name,
    dense_greedy,
    dense_logprobs,
    engine,
    make_params,
    make_prompts,
)

ONE_GROUP = MambaConfig(num_heads=4, head_dim=12, state_dim=8)
TWO_GROUPS = MambaConfig(
    num_heads=4,
    head_dim=8,
    state_dim=16,
    num_groups=2,
    conv_width=3,
    conv_bias=False,
    bias=True,
    norm="before",
)
WITHOUT_NORM = dataclasses.replace(
    ONE_GROUP, norm=None, multipliers=(0.8, 1.2, 0.7, 1.1, 0.9), conv_width=2
)
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16)
MLP = MLPConfig(intermediate_size=24)
EXPERTS = ExpertsConfig(
    num_experts=6, experts_per_token=2, expert_size=12, shared_expert_size=24, shared_gate=False
)
OF_LATENT = dataclasses.replace(
    EXPERTS,
    activation="relu2",
    latent_size=20,
    router=RouterConfig(score="sigmoid", has_bias=True, num_groups=3, chosen_groups=2),
)
BESIDE = ParallelMixerConfig(
    attention=ATTENTION,
    mamba=WITHOUT_NORM,
    attention_in_multiplier=1.2,
    attention_out_multiplier=0.9,
    mamba_in_multiplier=1.1,
    mamba_out_multiplier=0.7,
)
UNGATED = MLPConfig(intermediate_size=24, activation="relu2", multiplier=0.8)
MODEL = ModelConfig(
    family="granitemoehybrid",
    vocab_size=97,
    hidden_size=32,
    layers=(
        LayerConfig(mixer=ONE_GROUP, ffn=EXPERTS),
        LayerConfig(mixer=ATTENTION, ffn=MLP),
        LayerConfig(mixer=TWO_GROUPS, ffn=None),
        LayerConfig(mixer=None, ffn=OF_LATENT),
        LayerConfig(mixer=BESIDE, ffn=UNGATED),
    ),
    max_position_embeddings=64,
    eos_token_ids=(EOS,),
)
PARAMS = make_params(0, MODEL)
PROMPTS = make_prompts(5, 21, 40, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Too few blocks for the prompts at once.
CROWDED = engine(num_blocks=24, max_num_seqs=12, seq_buckets=(12,), max_logprobs=12)


@functools.cache
def dense(prompt: tuple[int, ...], count: int) -> list[int]:
    params = Params(PARAMS, dataclasses.replace(MODEL, eos_token_ids=()))
    tokens = list(prompt)
    for _ in range(count):
        tokens += dense_greedy(params, tokens, 1)
    return tokens[len(prompt) :]


def check(prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    """Tokens and logprobs of every completion are the dense model's."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            tokens = completion.token_ids
            assert tokens == dense(tuple(prompt), len(tokens))
            expected = dense_logprobs(PARAMS, prompt + tokens)[len(prompt) - 1 : -1]
            wanted = expected[range(len(tokens)), tokens]
            np.testing.assert_allclose(completion.token_logprobs, wanted, atol=1e-4)


SWAP: dict[str, Any] = {"swap_space_gib": 0.01, "swap_min_tokens": 0}
PLACES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "recomputed": ({}, {}),
    "swapped": ({}, SWAP),
    "tp 2": ({"tp": 2}, {}),
    "dp 2": ({"dp": 2}, {"data_parallel_size": 2, "num_blocks": 16}),
}


@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_the_dense_models(place: str) -> None:
    """Chunks, preemptions, forks, and a second time over the blocks that the first has left."""
    axes, settings = PLACES[place]
    mesh = Mesh(np.array(jax.devices()[:2]), tuple(axes)) if axes else None
    llm = LLM(PARAMS, mesh=mesh, **vars(dataclasses.replace(CROWDED, **settings)))
    check(PROMPTS, llm.generate(PROMPTS, dataclasses.replace(GREEDY, n=2), use_tqdm=False))
    kind = "preemptions_swapped" if place == "swapped" else "preemptions_recomputed"
    stats = llm.stats()
    assert stats[kind] > 0
    assert (stats["mamba2"], stats["short_conv"], stats["gated_delta"]) == ("xla", "xla", None)
    outputs = [llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0] for _ in range(2)]
    check([PROMPTS[2]] * 2, outputs)
    assert outputs[1].num_cached_tokens > 0
    assert_idle(llm)
    llm.close()


def test_hits_and_scores() -> None:
    """A prompt is found again up to where a chunk of it ended: at its last whole block, and where
    another prompt parted from it.
    """
    llm, (prompt,) = LLM(PARAMS, **vars(engine())), make_prompts(32, seed=1)
    hits = []
    for shared in (32, 24, 20, 12, 4):
        for other in (91, 92):  # the first leaves a state where it parts, the second finds it
            tokens = prompt[:shared] + [other] * (40 - shared)
            (output,) = llm.generate([tokens], GREEDY, use_tqdm=False)
            check([tokens], [output])
            hits.append(output.num_cached_tokens)
    assert hits[0] == 0 and hits[1::2] == [32, 24, 20, 12, 4]
    for prompt, scores in zip(PROMPTS, llm.score(PROMPTS), strict=True):
        expected = dense_logprobs(PARAMS, prompt)[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    llm.close()


def test_guesses() -> None:
    """A step over guesses keeps what the scan takes of each, and steps over those that were right.

    The bias makes streams that a drafter guesses, and breaks off.
    """
    often = dataclasses.replace(GREEDY, max_tokens=36, logit_bias={7: 9.0})
    found, accepted = [], 0
    for guesses in (None, {"method": "ngram", "num_tokens": 3, "adaptive": False}):
        llm = LLM(PARAMS, **vars(engine(speculative=guesses)))
        outputs = llm.generate(PROMPTS, often, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        accepted = llm.stats().get("accepted_tokens", 0)
        llm.close()
    assert found[0] == found[1] and accepted > 0
    assert len({token for tokens in found[0] for token in tokens}) > 5


def test_adapters_on_two_devices() -> None:
    """Every weight that can have an adapter has one: the model with them merged is served."""
    rng = np.random.default_rng(4)
    pairs: dict[str, Any] = {}
    for name, target in targets(MODEL).items():
        outputs, inputs = target.sides
        pairs[name] = {
            "a": jnp.asarray(rng.standard_normal((3, *inputs)), jnp.float32) / 8,
            "b": jnp.asarray(rng.standard_normal((*outputs, 3)), jnp.float32) / 8,
        }
    assert {f"layers.0.mamba.{x}" for x in ("z", "x", "b", "c", "dt", "out")} <= pairs.keys()
    assert {"layers.3.mlp.latent_in", "layers.4.mlp.up", "layers.4.mamba.z"} <= pairs.keys()
    assert "layers.4.mlp.gate" not in pairs
    adapter = jpaged.Adapter(pairs)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    llm = LLM(PARAMS, mesh=mesh, **vars(engine(max_loras=1, max_lora_rank=4)))
    llm.add_adapter("tuned", adapter)
    tuned = {"prompt_token_ids": PROMPTS[0], "adapter": "tuned"}
    answers = llm.generate([tuned, PROMPTS[1]], GREEDY, use_tqdm=False)
    whole = merged(PARAMS, adapter)
    for prompt, output, params in zip(PROMPTS, answers, (whole, PARAMS), strict=False):
        tokens = output.outputs[0].token_ids
        expected = dense_logprobs(params, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(1).tolist()
        wanted = expected[range(len(tokens)), tokens]
        np.testing.assert_allclose(output.outputs[0].token_logprobs, wanted, atol=1e-4)
    llm.close()


def test_heads_are_split_and_one_group_is_not() -> None:
    specs = param_specs(MODEL, "tp", 2)["layers"]
    one, two = specs["0"]["mamba"], specs["2"]["mamba"]
    by_head = ("zx", "dt", "conv_x", "log_decay", "dt_bias", "skip")
    assert all(layer[name] == PartitionSpec("tp") for layer in (one, two) for name in by_head)
    assert one["out"] == PartitionSpec(None, "tp")
    assert [layer["bc"] for layer in (one, two)] == [PartitionSpec(None), PartitionSpec("tp")]
    records = [group.record for group in kv_groups(MODEL) if group.record.per == "block"]
    splits = {tuple(field.split for field in record.fields) for record in records}
    assert splits == {(0, 1, None), (0, 1, 1)}
    # The keys of both layers with attention lie in one group, and come before a layer's state.
    groups, places = kv_groups(MODEL), kv_places(MODEL)
    assert [group.layers for group in groups] == [(0,), (1, 4), (2,), (4,)]
    assert places == [((0, 0),), ((1, 0),), ((2, 0),), (), ((1, 1), (3, 0))]


def test_heads_and_groups_have_to_divide() -> None:
    with pytest.raises(ConfigError, match="4 heads of Mamba-2 do not divide over 3 devices"):
        served_config(MODEL, 3)
    with pytest.raises(ConfigError, match="2 groups of Mamba-2 do not divide over 4 devices"):
        TWO_GROUPS.served(4)
    assert (ONE_GROUP.served(4).share(4).num_heads, ONE_GROUP.share(4).num_groups) == (1, 1)
    changes: dict[str, dict[str, Any]] = {
        "num_heads=4 of Mamba-2 is not a multiple of num_groups=3": {"num_groups": 3},
        "3 ssm_multipliers: Mamba-2 has five": {"multipliers": (1.0, 1.0, 1.0)},
        r"ssm_multipliers\[2\]=0.0": {"multipliers": (1.0, 1.0, 0.0, 1.0, 1.0)},
        "conv_width=1": {"conv_width": 1},
        "state_dim=0": {"state_dim": 0},
    }
    for message, fields in changes.items():
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(ONE_GROUP, **fields)


WIDE = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32)


@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_bits_are_those_of_a_request_alone() -> None:
    """deterministic=True by the C++ kernel, with every form of norm and of groups, alone and beside
    attention: in a batch, preempted, from a state that was kept, and in chunks of 7; and the bits
    of a prompt's scores are those of draws.
    """
    of_kernel = [
        dataclasses.replace(mixer, head_dim=head_dim, state_dim=state_dim)
        for mixer, head_dim, state_dim in (
            (ONE_GROUP, 24, 32),
            (TWO_GROUPS, 8, 16),
            (WITHOUT_NORM, 16, 16),
        )
    ]
    beside = dataclasses.replace(BESIDE, attention=WIDE, mamba=of_kernel[2])
    mlp = MLPConfig(intermediate_size=64)
    layers = [LayerConfig(mixer=x, ffn=mlp) for x in (*of_kernel[:2], WIDE, beside)]
    params = make_params(0, dataclasses.replace(MODEL, layers=layers), jnp.bfloat16)
    llm, alone = with_bits_of_requests_alone(params, PROMPTS)
    assert llm.stats()["mamba2"] == "native"
    tokens = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    whole = [p + out.outputs[0].token_ids for p, out in zip(PROMPTS, tokens, strict=True)]
    scores = [np.asarray(x[-12:], np.float32) for x in llm.score(whole)]
    assert [x.tobytes() for x in scores] == alone
    llm.close()


def test_chunks_are_no_deterministic_form() -> None:
    """Where no tile of the C++ kernel divides a state, XLA computes chunks."""
    with pytest.raises(UnsupportedError, match=r"deterministic=True: the states of this model"):
        LLM(PARAMS, **vars(dataclasses.replace(CROWDED, deterministic=True)))


def test_what_stays_plain_and_in_f32() -> None:
    """quantization= takes the large products alone; A_log, dt_bias and D stay in f32."""
    params = make_params(2, MODEL, jnp.bfloat16)
    llm = LLM(params, **vars(engine(quantization="int8")))
    (output,) = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
    leaves = by_name(params.config, llm.session.runner.params)
    of_mamba = {name: leaf for name, leaf in leaves.items() if ".0.mamba." in name}
    names = {name.rpartition(".")[2] for name, leaf in of_mamba.items() if is_quantized(leaf)}
    assert names == {"zx", "bc", "out"}
    plain = {name: leaf for name, leaf in of_mamba.items() if not is_quantized(leaf)}
    f32 = {name.rpartition(".")[2] for name, leaf in plain.items() if leaf.dtype == jnp.float32}
    assert f32 == {"log_decay", "dt_bias", "skip"}
    llm.close()


def test_configs_that_are_not_supported() -> None:
    cases: dict[str, dict[str, Any]] = {
        r"layer_types \['sliding_attention'\] are not": {"layer_types": ["sliding_attention"] * 4},
        "none is 'full_attention'": {"layer_types": ["mamba"] * 4},
        "must be equal to the number of `layer_types`": {"layer_types": ["mamba", "attention"]},
        r"time_step_limit=\[0.01, 1.0\] is not supported": {"time_step_limit": [0.01, 1.0]},
    }
    nemotron: dict[str, dict[str, Any]] = {
        "mlp_hidden_act='silu' is not supported": {"mlp_hidden_act": "silu"},
        "mlp_bias=True is not supported": {"mlp_bias": True},
        "none is 'full_attention'": {"hybrid_override_pattern": "MEME-"},
        r"time_step_limit=\[0.01, 1.0\] is not supported": {"time_step_limit": [0.01, 1.0]},
    }
    falcon: dict[str, dict[str, Any]] = {
        "projectors_bias=True: must be mamba_proj_bias=False": {"projectors_bias": True},
        "must be five numbers": {"ssm_multipliers": [1.0, 1.0]},
        "ssm_out_multiplier=0.0": {"ssm_out_multiplier": 0.0},
    }
    tables = {
        "granite_hybrid_h6_p24_n16": cases,
        "nemotron_h_mlps_g3": nemotron,
        "falcon_h1_p24_n16": falcon,
    }
    for name, table in tables.items():
        for message, changes in table.items():
            with pytest.raises(ConfigError, match=message):
                ModelConfig.from_hf(MAMBAS[name] | changes)


@pytest.mark.parametrize("name", MAMBAS)
def test_a_config_is_written_back(name: str) -> None:
    config = ModelConfig.from_hf(MAMBAS[name])
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.train
def test_a_hybrid_learns_a_text() -> None:
    tokens = jnp.asarray(make_prompts(24, seed=5))
    optimizer = optax.adam(1e-2)

    def loss_of(params: Params) -> Any:
        model = bind(MODEL, dict(params))
        hidden, _ = model(tokens[:, :-1])
        logits = jax.nn.log_softmax(model.logits(hidden))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    @jax.jit
    def step(params: Params, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    params, state = PARAMS, optimizer.init(PARAMS)
    params, state, first, grads = step(params, state)
    # A choosing bias weighs nothing, and experts are chosen by an order.
    still = {name for name, g in flat(grads).items() if not float(jnp.abs(g).max()) > 0}
    assert still == {"layers.3.mlp.choosing_bias"}
    losses = [float(first)]
    for _ in range(60):
        params, state, loss, _ = step(params, state)
        losses.append(float(loss))
    assert losses[0] > 2 and losses[-1] < 0.1
    assert [int(t) for t in dense_greedy(params, tokens[0, :8].tolist(), 16)] == tokens[
        0, 8:
    ].tolist()
