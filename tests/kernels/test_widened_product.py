"""Experts with weights in 8 and 4 bits by Mosaic: interpreted, and which weights it refuses. The
emulator executes what is compiled (test_emulated.py).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import (
    interpret_pallas_call as interpreter,  # jax has no public name for it
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.models.quantized import FORMS, dequantized
from kernels_pallas.experts import mosaic_gpu, triton, widened_product
from kernels_pallas.experts.interface import sort
from kernels_pallas.experts.row_tiles import whole_tiles
from kernels_pallas.experts.widened_product import Weight, refused
from tests.kernels import aot_cuda, aot_quantized
from tests.kernels.test_experts import GLU, exact, make, quantised

EXPERTS: Any = mosaic_gpu.experts


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two thread blocks take turns, and nothing fall back to Triton unseen."""

    def elsewhere(*args: Any, **options: Any) -> Any:
        raise AssertionError("Triton was called")

    monkeypatch.setattr(widened_product, "multiprocessors", lambda: 2)
    monkeypatch.setattr(mosaic_gpu.triton, "experts", elsewhere)


def checked(held: Any, plain: Any, interpret: Any = True) -> None:
    """Hold interpreted experts to a loop in float64."""
    found = np.asarray(EXPERTS(*held, GLU, interpret=interpret))
    wanted = exact(*plain)
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("form", "group", "width", "embed"),
    [
        ("int8", None, 128, 128),
        ("fp8", 32, 128, 128),  # fewer scales than are turned over at a time
        ("int4", 96, 192, 192),  # zeros; tiles of 32 places; outputs that are computed twice
        ("mxfp4", None, 64, 128),
    ],
)
def test_experts_are_the_loop_over_them(
    form: str, group: int | None, width: int, embed: int
) -> None:
    is_once = embed % 128 == 0  # what is computed twice is the same, but a race
    interpret = plgpu.InterpretGPUParams(detect_races=is_once)
    checked(*quantised(5, 3, 1, form, width, embed, group), interpret)
    if is_once:
        assert not interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()


def test_many_rows_take_two_strips_of_outputs() -> None:
    checked(*quantised(64, 1, 1, "int8", 128, 256, None))


def test_drawn_experts_alone_are_read() -> None:
    (x, _, weight, weights), _ = quantised(3, 4, 1, "int8", 64, 128, None)
    chosen = jnp.asarray([[1], [3], [1]], jnp.int32)
    drawn = jnp.zeros(4, bool).at[jnp.asarray([1, 3])].set(True)[:, None, None, None]
    scales = jnp.where(drawn, weights.gate_up.scales, jnp.nan)
    up = dataclasses.replace(weights.gate_up, scales=scales)
    run = functools.partial(mosaic_gpu.experts, x, chosen, weight, glu=GLU, interpret=True)
    np.testing.assert_array_equal(run(dataclasses.replace(weights, gate_up=up)), run(weights))


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_every_byte_stands_for_two_numbers(form: str) -> None:
    """Interpreted; test_emulated.py has the same of what is compiled."""
    held = np.arange(256, dtype=np.uint8)
    signed = jnp.asarray(held.view(np.int8)).reshape(2, 128)
    halves, unit = widened_product._numbers(signed, form, interpret=True)
    found = np.stack([np.asarray(half, np.float32).reshape(-1) * unit for half in halves])
    meant = dequantized(jnp.asarray(held)[None], jnp.ones((1, 16)), FORMS[form])
    meant = np.moveaxis(np.asarray(meant).reshape(16, 2, 16), 1, 0).reshape(2, -1)
    np.testing.assert_array_equal(found, meant)


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_every_pair_has_a_row_in_a_tile_of_its_expert(rows: int) -> None:
    T, X, A = 41, 6, 2
    _, chosen, *_ = make(T, X, A, jnp.float32)
    chosen = chosen.at[:20, 0].set(2)
    tiles = whole_tiles(chosen, X, rows)
    taken = []
    for (token, a), expert in np.ndenumerate(np.asarray(chosen)):
        if expert < X:
            row = int(tiles.row_TA[token, a])
            taken.append(row)
            assert tiles.token_R[row] == token
            assert row // rows < tiles.count_1[0] and tiles.expert_I[row // rows] == expert
    assert len(set(taken)) == len(taken)
    assert int(tiles.count_1[0]) == sum(-(-int(n) // rows) for n in sort(chosen, X).sizes_X)


def weight_of(form: str, N: int, W: int, S: int, *, has_zeros: bool = False) -> Weight:
    dtype = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(form, jnp.uint8)
    scales: Any = jax.ShapeDtypeStruct((4, N, S), jnp.float32)
    values: Any = jax.ShapeDtypeStruct((4, N, W), dtype)
    return Weight(form, values, scales, scales if has_zeros else None)


@pytest.mark.parametrize(
    ("weight", "inputs", "said"),
    [
        (weight_of("int8", 128, 64, 1), 64, None),
        (weight_of("mxfp4", 2880, 1440, 90), 2880, None),
        (weight_of("nf4", 128, 64, 4), 128, "the form nf4"),
        (weight_of("int8", 64, 64, 1), 64, "64 outputs of 64 places"),
        (weight_of("int8", 160, 64, 1), 64, "160 outputs"),
        (weight_of("int8", 128, 80, 1), 80, "80 places"),
        (weight_of("int8", 128, 96, 12), 96, "12 scales for 96 places"),
        (weight_of("int8", 128, 64, 1, has_zeros=True), 64, "zeros beside one scale"),
        (weight_of("int4", 128, 1 << 13, 512, has_zeros=True), 1 << 14, "no room"),
        (weight_of("int8", 1 << 15, 1 << 14, 1), 1 << 14, "2147483648 places"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_says_why(weight: Weight, inputs: int, said: str | None) -> None:
    reason = refused(weight, 16, inputs)
    assert reason is None if said is None else said in str(reason)


def test_triton_takes_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def experts(*args: Any, interpret: bool) -> Any:
        taken.append(interpret)
        return "Triton's"

    monkeypatch.setattr(triton, "experts", experts)
    held, _ = quantised(9, 3, 2, "int8", 64, 64, None)  # of down, 64 outputs
    assert EXPERTS(*held, GLU, interpret=True) == "Triton's" and taken == [True]


def test_shorter_tiles_leave_room_for_many_scales() -> None:
    """Tiles of 128 rows would leave too few stages beside 224 scales of an output."""
    weight = weight_of("int4", 4096, 3584, 224)
    assert "no room" in str(refused(weight, 128, 7168)) and refused(weight, 64, 7168) is None
    assert mosaic_gpu._rows([weight, weight], (7168, 7168), 128) == 64


@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "mxfp4"])
def test_lowers_for_hopper(form: str) -> None:
    """A layer of GPT-OSS 20B, whose widths are no whole tiles of 64 places in 4 bits."""
    run = functools.partial(mosaic_gpu.experts, glu=GLU)
    assert aot_cuda.lower(run, *aot_quantized.mixture(form)).count("@mosaic_gpu") >= 2
