"""Mixtures of experts in the decoder: each layer's routing, gradients, and splits over a mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import ConfigError, ModelConfig, SamplingParams
from jpaged.engine.shapes import Shape
from jpaged.kept import sessions as kept_sessions
from jpaged.models.forward import bind
from jpaged.runtime.footprint import bound
from kernels_cpu import library
from tests.tiny import (
    CONFIG,
    dense_greedy,
    dense_logprobs,
    engine,
    make_params,
    make_prompts,
    routed,
    tokens_of,
)

MIXTURE = dataclasses.replace(
    CONFIG,
    family="qwen2_moe",
    num_experts=5,
    experts_per_token=2,
    expert_size=24,
    shared_expert_size=16,
    norm_topk_prob=True,
)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = make_prompts(3, 17, 33)


def test_dense_layers_among_others() -> None:
    params = make_params(0, dataclasses.replace(MIXTURE, dense_layers=(0,)))
    mlps = [set(params["layers"][str(i)]["mlp"]) for i in range(2)]
    assert mlps == [{"gate_up", "down"}, {"router", "experts", "shared", "shared_gate"}]


def test_every_weight_has_a_gradient() -> None:
    params = make_params(0, MIXTURE)
    tokens = jnp.asarray(make_prompts(24, 24))

    def loss(tree: Any) -> jax.Array:
        model = bind(MIXTURE, tree)
        logits = model.logits(model(tokens)[0])
        return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 7])

    grads = jax.jit(jax.grad(loss))(dict(params))
    for path, grad in jax.tree.leaves_with_path(grads):
        assert np.isfinite(grad).all() and np.abs(grad).max() > 1e-7, jax.tree_util.keystr(path)


SPLITS: dict[str, tuple[dict[str, Any], int]] = {
    "experts and shared": ({}, 1),
    "experts alone": ({"shared_expert_size": 15}, 1),
    "shared alone": ({"expert_size": 25}, 1),
    "none": ({"expert_size": 25, "shared_expert_size": 15}, 0),
    "without shared": ({"shared_expert_size": 0}, 1),
}


@pytest.mark.parametrize(
    "name",
    [n if n == "experts and shared" else pytest.param(n, marks=pytest.mark.middle) for n in SPLITS],
)
def test_split_over_two_devices(name: str) -> None:
    """The tokens of one device, at one all-reduce for all experts of a layer."""
    change, exchanges = SPLITS[name]
    model = dataclasses.replace(MIXTURE, num_layers=1, **change)
    params, mesh = make_params(0, model), Mesh(np.array(jax.devices()[:2]), ("tp",))
    settings = engine(num_blocks=64)
    outputs = jpaged.generate(params, PROMPTS, GREEDY, mesh=mesh, engine_config=settings)
    assert tokens_of(outputs) == [dense_greedy(params, prompt, 8) for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        dense = dense_logprobs(params, prompt + tokens)[len(prompt) - 1 : -1]
        found = output.outputs[0].token_logprobs
        np.testing.assert_allclose(found, dense[range(len(tokens)), tokens], atol=1e-4)
    steps = kept_sessions()[-1].runner.compiled
    bucket = next(b for b in steps.seconds if isinstance(b, Shape) and b.phase == "prefill")
    lines = steps[bucket].as_text().splitlines()
    found = [line for line in lines if " all-reduce(" in line and "/mlp/" in line]
    assert len(found) == exchanges


# Of widths that the C++ kernels take, with biases of the experts.
WHOLE = dataclasses.replace(
    MIXTURE,
    family="gpt_oss",
    head_dim=32,
    expert_size=64,
    shared_expert_size=0,
    expert_bias=True,
    qk_norm=False,
)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [pytest.param(routed(MIXTURE), "float32", marks=pytest.mark.middle), (WHOLE, "bfloat16")],
    ids=["pinned", "native"],
)
def test_deterministic_in_any_company(model: ModelConfig, dtype: str) -> None:
    """A prompt alone, among others, and scored: the same bits; with the C++ kernels in steps of
    any size.
    """
    params = make_params(0, model, dtype)
    settings = engine(num_blocks=96, deterministic=True, seq_buckets=None, token_buckets=None)
    llm = jpaged.LLM(params, **dataclasses.asdict(settings))
    is_free = dtype == "bfloat16" and library.unavailable() is None
    assert llm.session.engine_config.pinned != is_free
    llm.close()
    (alone,) = jpaged.generate(params, PROMPTS[1], GREEDY, engine_config=settings)
    among = jpaged.generate(params, PROMPTS, GREEDY, engine_config=settings)[1]
    assert alone.outputs[0].token_ids == among.outputs[0].token_ids
    logprobs = alone.outputs[0].token_logprobs
    np.testing.assert_array_equal(logprobs, among.outputs[0].token_logprobs)
    tokens = PROMPTS[1] + alone.outputs[0].token_ids
    scored: Any = jpaged.score(params, [tokens], engine_config=settings)
    np.testing.assert_array_equal(scored[0][len(PROMPTS[1]) - 1 :], logprobs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experts_per_token": 6}, "experts_per_token=6 of num_experts=5"),
        ({"expert_size": 0}, "expert_size=0"),
    ],
)
def test_sizes_that_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(MIXTURE, **change)


def test_the_bound_counts_experts() -> None:
    """A step holds one expert's weights more than once, and the pairs of tokens and experts."""
    wide = dataclasses.replace(MIXTURE, expert_size=1 << 14)
    settings = engine().resolve(wide)
    few, many = (bound(model, settings, jnp.float32).total for model in (MIXTURE, wide))
    assert many - few >= 3 * (wide.expert_size - MIXTURE.expert_size) * 4 * CONFIG.hidden_size
