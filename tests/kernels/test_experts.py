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
from jpaged.models.quantized import FORMS, MXFP4, QuantizedWeight, dequantized, quantized
from kernels_pallas.experts import IMPLEMENTATIONS, megablox, mosaic_gpu, tiles, triton
from kernels_pallas.experts.interface import ExpertWeights, Shapes
from tests.kernels import aot_cuda, aot_quantized

GLU = functools.partial(gated, "silu")
TRITON: Any = functools.partial(triton.experts, interpret=True)
WAYS = {
    "definition": every_expert,
    "tiles": tiles.experts,
    "megablox": functools.partial(megablox.experts, interpret=True),
    "triton": TRITON,
}


def make(
    T: int, X: int, A: int, dtype: Any, bias: bool = True, width: int = 128, embed: int = 128
) -> Any:
    """x, choices and their weights, and the experts; the last token of three is padding."""
    rng, E = np.random.default_rng(T * X + A), embed

    def normal(*shape: int) -> jax.Array:
        return jax.device_put((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype))

    chosen = np.stack([rng.permutation(X)[:A] for _ in range(T)]).astype(np.int32)
    if T >= 3:
        chosen[-1] = X
    weight = jax.device_put(rng.uniform(0.1, 1, (T, A)).astype(np.float32))
    biases = jax.device_put(rng.standard_normal((X, 2, width)).astype(dtype)) if bias else None
    weights = ExpertWeights(
        gate_up=normal(X, 2, width, E), gate_up_bias=biases, down=normal(X, E, width)
    )
    x = jax.device_put(rng.standard_normal((T, E)).astype(dtype))
    return x, jax.device_put(chosen), weight, weights


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


@pytest.mark.parametrize("way", WAYS)
def test_experts_without_gates(way: str) -> None:
    """They have up alone, whose relu is squared."""
    x, chosen, weight, weights = make(24, 6, 2, jnp.float32, bias=False)
    up = weights.gate_up[:, 1:]
    found = WAYS[way](
        *(x, chosen, weight, dataclasses.replace(weights, gate_up=up)),
        functools.partial(gated, "relu2"),
    )
    wanted = np.zeros(x.shape)
    rows, ups, downs = (np.asarray(a, np.float64) for a in (x, up[:, 0], weights.down))
    for t, a in np.argwhere(np.asarray(chosen) < len(downs)):
        e = int(chosen[t, a])
        wanted[t] += float(weight[t, a]) * (downs[e] @ np.maximum(ups[e] @ rows[t], 0) ** 2)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


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


def in_form(plain: jax.Array, form: str, num_outputs: int, group: int | None) -> QuantizedWeight:
    """A weight of experts. group: inputs that share a scale; int4 has zeros then, fp8 blocks."""
    rng = np.random.default_rng(plain.shape[-1])
    if form == "mxfp4":
        shape = (*plain.shape[:-1], plain.shape[-1] // 2)
        scales = 2.0 ** rng.integers(-9, -4, (*plain.shape[:-1], plain.shape[-1] // 32))
        made = {"values": jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)}
        made["scales"] = jnp.asarray(scales, jnp.float32)
        return QuantizedWeight(
            **made, form=MXFP4, num_outputs=num_outputs, dtype=jnp.dtype(jnp.bfloat16)
        )
    made = quantized(plain, form, num_outputs)
    if group is None:
        return made
    scales = rng.uniform(0.01, 0.05, (*plain.shape[:-1], plain.shape[-1] // group))
    zeros = rng.integers(-8, 8, scales.shape) if form == "int4" else None
    zeros = None if zeros is None else jnp.asarray(zeros, jnp.float32)
    scales = jnp.asarray(scales, jnp.float32)
    return dataclasses.replace(made, scales=scales, zeros=zeros)


def quantised(
    T: int, X: int, A: int, form: str, width: int, embed: int, group: int | None
) -> tuple[Any, Any]:
    """Arguments in bf16, and the same with plain f32 experts that the others stand for."""
    x, chosen, weight, weights = make(T, X, A, jnp.bfloat16, width=width, embed=embed)
    up = in_form(weights.gate_up, form, 3, group)
    down = in_form(weights.down, form, 2, group)
    plain = dataclasses.replace(weights, gate_up=up.whole(), down=down.whole())
    held = dataclasses.replace(weights, gate_up=up, down=down)
    return (x, chosen, weight, held), (x, chosen, weight, plain)


@pytest.mark.parametrize(
    ("form", "group"),
    [
        *(("int8", None), ("fp8", None), ("int4", None), ("mxfp4", None)),
        *(("fp8", 32), ("int4", 32), ("int8", 96)),
        *(pytest.param(*more, marks=pytest.mark.middle) for more in (("fp8", 64), ("int4", 96))),
    ],
)
@pytest.mark.parametrize(
    ("T", "X", "A", "width", "embed"),
    [(9, 3, 2, 192, 192), pytest.param(70, 2, 1, 192, 192, marks=pytest.mark.middle)],
    ids=str,
)
def test_triton_takes_weights_in_8_and_4_bits(
    T: int, X: int, A: int, width: int, embed: int, form: str, group: int | None
) -> None:
    """Widths that are no whole tiles, rows that fill several: what scales of groups are rounded to
    is nearer than what bf16 makes of the rest.
    """
    held, plain = quantised(T, X, A, form, width, embed, group)
    found, wanted = np.asarray(TRITON(*held, GLU)), exact(*plain)
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()
    assert (
        np.abs(np.asarray(tiles.experts(*held, glu=GLU)) - found).max() < 0.01 * np.abs(found).max()
    )


@pytest.mark.parametrize("form", ["int8", "fp8", "plain"])
def test_triton_stops_where_rows_end(form: str) -> None:
    """Of widths that no step divides, with scales of outputs, or none."""
    if form == "plain":
        held = plain = make(9, 5, 2, jnp.bfloat16, width=96, embed=160)
    else:
        held, plain = quantised(9, 5, 2, form, 96, 160, None)
    found, wanted = np.asarray(TRITON(*held, GLU)), exact(*plain)
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


def test_triton_stores_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of its tiles: a card has none."""
    (*args, weights), _ = quantised(40, 5, 2, "int8", 64, 64, None)
    wanted, table = TRITON(*args, weights, GLU), triton.tile_table

    def turned(*of: Any) -> Any:
        return tuple(x[::-1] for x in table(*of))

    monkeypatch.setattr(triton, "tile_table", turned)
    np.testing.assert_array_equal(TRITON(*args, weights, GLU), wanted)


def test_triton_reads_drawn_experts_alone() -> None:
    (x, _, weight, weights), _ = quantised(8, 6, 2, "int8", 64, 64, None)
    chosen = jnp.tile(jnp.asarray([[1, 4]], jnp.int32), (8, 1))
    drawn = jnp.zeros(6, bool).at[jnp.asarray([1, 4])].set(True)[:, None, None, None]
    scales = jnp.where(drawn, weights.gate_up.scales, jnp.nan)
    broken = dataclasses.replace(
        weights, gate_up=dataclasses.replace(weights.gate_up, scales=scales)
    )
    args = (chosen, weight)
    np.testing.assert_array_equal(TRITON(x, *args, broken, GLU), TRITON(x, *args, weights, GLU))


@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "mxfp4"])
def test_triton_widens_every_value(form: Any) -> None:
    """All 256 bytes, but for what is no number; in groups of 32 as they lie."""
    held = np.arange(256, dtype=np.uint8).reshape(1, 256)
    kinds = {"int8": np.int8, "fp8": jnp.float8_e4m3fn}
    values = jnp.asarray(held.view(kinds.get(form, np.uint8)))
    scales = jnp.ones((1, 1 if form in kinds else 16), jnp.float32)
    meant = np.asarray(dequantized(values, scales, FORMS[form]))
    bits = jnp.asarray(held.view(np.int8)) if form == "fp8" else values
    numbers = triton._numbers(bits, form)
    if len(numbers) == 2:
        meant = np.stack([half.reshape(-1) for half in np.moveaxis(meant.reshape(16, 2, 16), 1, 0)])
    found, known = np.concatenate(numbers), ~np.isnan(meant)
    np.testing.assert_array_equal(found[known], meant[known])
    assert known.sum() >= 254


@pytest.mark.parametrize("sizes", [(5, 0, 40, 3), (0, 0, 48, 0), (1, 1, 1, 1), (16, 16, 16, 0)])
def test_every_row_is_in_one_tile_of_its_expert(sizes: tuple[int, ...]) -> None:
    P, owner = sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
    expert, first, end = map(np.asarray, triton.tile_table(jnp.asarray(sizes), P, 16))
    rows = [
        (row, at)
        for at, begin, stop in zip(expert, first, end, strict=True)
        if at < len(sizes)
        for row in range(begin, min(begin + 16, stop))
    ]
    assert sorted(rows) == list(enumerate(owner))


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
        ("triton", {"dtype": jnp.dtype(jnp.float32)}, "dtype float32"),
    ],
)
def test_what_cannot_run_says_why(name: str, change: dict[str, Any], said: str) -> None:
    module = IMPLEMENTATIONS[name].module()
    assert module.unsupported(SHAPES, None) is None
    assert said in module.unsupported(dataclasses.replace(SHAPES, **change), None)


def test_who_takes_experts_on_a_card() -> None:
    """Before Hopper, or of widths that are no whole tiles: Triton."""

    def names(capability: str, **changes: Any) -> list[str]:
        device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        shapes, there = dataclasses.replace(SHAPES, **changes), IMPLEMENTATIONS.items()
        ours = ((name, each) for name, each in there if "gpu" in (each.platforms or ["gpu"]))
        return [name for name, each in ours if each.module().unsupported(shapes, device) is None]

    assert names("9.0") == names("9.0", is_plain=False) == ["mosaic_gpu", "triton", "tiles"]
    assert names("9.0", is_plain=False, expert_size=2880)[0] == "mosaic_gpu"
    assert names("9.0", expert_size=2880) == ["triton", "tiles"]
    assert names("9.0", is_plain=False, expert_size=96) == ["triton", "tiles"]
    for capability in ("8.0", "10.0", "12.0"):  # Blackwell has no wgmma
        assert names(capability, is_plain=False) == names(capability) == ["triton", "tiles"]
    assert names("7.5") == ["tiles"]


def abstract(T: int, X: int = 128, A: int = 8) -> Any:
    """A layer of Qwen3-30B-A3B, or one of fewer experts."""
    bf16, f32 = jnp.bfloat16, jnp.float32
    gate_up: Any = jax.ShapeDtypeStruct((X, 2, 768, 2048), bf16)
    down: Any = jax.ShapeDtypeStruct((X, 2048, 768), bf16)
    weights = ExpertWeights(gate_up=gate_up, gate_up_bias=None, down=down)
    rows = jax.ShapeDtypeStruct((T, 2048), bf16)
    chosen = jax.ShapeDtypeStruct((T, A), jnp.int32)
    return rows, chosen, jax.ShapeDtypeStruct((T, A), f32), weights


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


@pytest.mark.parametrize(("T", "A"), [(1, 2), (7, 6)], ids=str)
def test_mosaic_gpu_takes_any_number_of_pairs(T: int, A: int) -> None:
    """TMA alone would take whole eights."""
    text = aot_cuda.lower(functools.partial(mosaic_gpu.experts, glu=GLU), *abstract(T, X=4, A=A))
    assert text.count("mosaic_gpu") >= 2


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("form", ["plain", "int8", "fp8", "int4", "mxfp4"])
def test_triton_lowers_for_cuda(form: str) -> None:
    args = abstract(8) if form == "plain" else aot_quantized.mixture(form)
    text = aot_cuda.lower(functools.partial(triton.experts, glu=GLU), *args)
    assert text.count("@__gpu$xla.gpu.triton(") == 2
