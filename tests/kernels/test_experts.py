"""The experts of a mixture: every implementation against a loop in float64."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import (
    interpret_pallas_call as interpreter,  # jax has no public name for it
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jpaged.models.layers.experts import every_expert
from jpaged.models.layers.mlp import gated
from kernels_pallas.experts import IMPLEMENTATIONS, megablox, mosaic_gpu, tiles
from kernels_pallas.experts.interface import ExpertWeights, Shapes
from tests.kernels import aot_cuda

GLU = functools.partial(gated, "silu")
WAYS = {
    "definition": every_expert,
    "tiles": tiles.experts,
    "megablox": functools.partial(megablox.experts, interpret=True),
}


def make(T: int, X: int, A: int, dtype: Any, bias: bool = True) -> Any:
    """x, choices and their weights, and the experts; the last token of three is padding."""
    rng, E, width = np.random.default_rng(T * X + A), 128, 128

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype)

    chosen = np.stack([rng.permutation(X)[:A] for _ in range(T)]).astype(np.int32)
    if T >= 3:
        chosen[-1] = X
    weight = jnp.asarray(rng.uniform(0.1, 1, (T, A)), jnp.float32)
    biases = jnp.asarray(rng.standard_normal((X, 2, width)), dtype) if bias else None
    weights = ExpertWeights(
        gate_up=normal(X, 2, width, E), gate_up_bias=biases, down=normal(X, E, width)
    )
    x = jnp.asarray(rng.standard_normal((T, E)), dtype)
    return x, jnp.asarray(chosen), weight, weights


def exact(x: Any, chosen: Any, weight: Any, weights: ExpertWeights) -> np.ndarray:
    """A token and an expert at a time."""
    x, weight, up, down = (
        np.asarray(a).astype(np.float64) for a in (x, weight, weights.gate_up, weights.down)
    )
    biases = weights.gate_up_bias
    bias = np.zeros(up.shape[:3]) if biases is None else np.asarray(biases).astype(np.float64)
    y = np.zeros(x.shape)
    for t, row in enumerate(np.asarray(chosen)):
        for a, e in enumerate(row):
            if e < len(up):
                gate, rise = (up[e, i] @ x[t] + bias[e, i] for i in (0, 1))
                y[t] += weight[t, a] * (down[e] @ (gate / (1 + np.exp(-gate)) * rise))
    return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("T", "X", "A"), [(1, 4, 2), (8, 6, 3), (40, 4, 1), (24, 3, 3)], ids=str)
def test_f32_is_the_loop(way: str, T: int, X: int, A: int) -> None:
    args = make(T, X, A, jnp.float32, bias=A != 1)
    found = WAYS[way](*args, GLU)
    assert found.dtype == jnp.float32 and found.shape == (T, 128)
    np.testing.assert_allclose(found, exact(*args), atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_accumulates_in_f32(way: str) -> None:
    args = make(24, 6, 2, jnp.bfloat16)
    wanted = exact(*args)
    assert np.abs(np.asarray(WAYS[way](*args, GLU)) - wanted).max() < 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize("way", WAYS)
def test_no_token_is_dropped(way: str) -> None:
    """All of them want one expert, the last or the first."""
    x, chosen, weight, weights = make(70, 5, 1, jnp.float32, bias=False)
    for expert in (0, 4):
        args = (x, jnp.full_like(chosen, expert), weight, weights)
        np.testing.assert_allclose(WAYS[way](*args, GLU), exact(*args), atol=2e-5)


def test_tiles_read_drawn_experts_alone() -> None:
    """The others may be anything."""
    x, _, weight, weights = make(8, 6, 2, jnp.float32, bias=False)
    chosen = jnp.tile(jnp.asarray([[1, 4]], jnp.int32), (8, 1))
    drawn = jnp.zeros(6, bool).at[jnp.asarray([1, 4])].set(True)
    broken = jax.tree.map(
        lambda w: jnp.where(drawn.reshape((6,) + (1,) * (w.ndim - 1)), w, jnp.nan), weights
    )
    found = tiles.experts(x, chosen, weight, broken, GLU)
    np.testing.assert_array_equal(found, tiles.experts(x, chosen, weight, weights, GLU))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_a_rows_bits_do_not_depend_on_the_others(dtype: Any) -> None:
    """Of batches whose tiles are of one size."""
    x, chosen, weight, weights = make(48, 8, 2, dtype)
    run = jax.jit(functools.partial(tiles.experts, glu=GLU))
    whole = np.asarray(run(x, chosen, weight, weights))
    assert tiles.tile_rows(48 * 2, 8) == tiles.tile_rows(8 * 2, 8)
    for rows in (slice(0, 8), slice(20, 44), slice(40, 47)):
        part = np.asarray(run(x[rows], chosen[rows], weight[rows], weights))
        np.testing.assert_array_equal(part, whole[rows])


def test_the_definition_is_differentiable() -> None:
    x, chosen, weight, weights = make(8, 4, 2, jnp.float32)

    def loss(weight: jax.Array, weights: ExpertWeights) -> jax.Array:
        return jnp.sum(jnp.sin(every_expert(x, chosen, weight, weights, GLU)))

    grads = jax.grad(loss, argnums=(0, 1))(weight, weights)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(
        lambda w: jnp.asarray(rng.standard_normal(w.shape), jnp.float32), (weight, weights)
    )
    moved = [
        jax.tree.map(lambda w, d, step=step: w + step * d, (weight, weights), direction)
        for step in (1e-3, -1e-3)
    ]
    numeric = (loss(*moved[0]) - loss(*moved[1])) / 2e-3
    slope = sum(
        jnp.sum(g * d)
        for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(slope, numeric, rtol=2e-2)


@pytest.mark.middle
@pytest.mark.parametrize(("T", "X", "A"), [(70, 5, 2), (300, 2, 1)], ids=str)
def test_mosaic_gpu_interpreted(T: int, X: int, A: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax's grouped product on two SMs that are not there, by tiles of few rows and of many, of
    which experts share some: it adds up what it must, without a race.
    """
    kernel, interpret = plgpu.kernel, plgpu.InterpretGPUParams(detect_races=True)

    def interpreted(body: Any, *, grid: Any, compiler_params: Any, **how: Any) -> Any:
        del grid, compiler_params
        return kernel(body, grid=(2,), interpret=interpret, **how)

    watched = types.SimpleNamespace(**vars(plgpu) | {"kernel": interpreted})
    monkeypatch.setattr(ragged_dot_mgpu, "plgpu", watched)
    args = make(T, X, A, jnp.bfloat16)
    run = functools.partial(mosaic_gpu.experts, glu=GLU)
    found, wanted = np.asarray(run(*args)), exact(*args)
    races = interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()
    assert not races
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


SHAPES = Shapes(dtype=jnp.dtype(jnp.bfloat16), hidden_size=2048, expert_size=768)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("megablox", {"expert_size": 96}, "expert_size 96 is not a multiple of 128"),
        ("megablox", {"dtype": jnp.dtype(jnp.float16)}, "dtype float16"),
        ("mosaic_gpu", {"hidden_size": 1000}, "hidden_size 1000"),
        ("mosaic_gpu", {"dtype": jnp.dtype(jnp.float32)}, "dtype float32"),
    ],
)
def test_what_cannot_run_says_why(name: str, change: dict[str, Any], said: str) -> None:
    module = IMPLEMENTATIONS[name].module()
    assert module.unsupported(SHAPES, None) is None
    assert said in module.unsupported(dataclasses.replace(SHAPES, **change), None)


def abstract(T: int) -> Any:
    """A layer of Qwen3-30B-A3B."""
    bf16, f32 = jnp.bfloat16, jnp.float32
    gate_up: Any = jax.ShapeDtypeStruct((128, 2, 768, 2048), bf16)
    down: Any = jax.ShapeDtypeStruct((128, 2048, 768), bf16)
    weights = ExpertWeights(gate_up=gate_up, gate_up_bias=None, down=down)
    rows = jax.ShapeDtypeStruct((T, 2048), bf16)
    chosen = jax.ShapeDtypeStruct((T, 8), jnp.int32)
    return rows, chosen, jax.ShapeDtypeStruct((T, 8), f32), weights


@pytest.mark.parametrize("T", [8, 512])
def test_megablox_lowers_for_tpu(T: int) -> None:
    run = jax.jit(functools.partial(megablox.experts, glu=GLU))
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(*abstract(T)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call(") == 2


@pytest.mark.parametrize("T", [8, 4096])
def test_mosaic_gpu_lowers_for_hopper(T: int) -> None:
    text = aot_cuda.lower(functools.partial(mosaic_gpu.experts, glu=GLU), *abstract(T))
    assert text.count("mosaic_gpu") >= 2
