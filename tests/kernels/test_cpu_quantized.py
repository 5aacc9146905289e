"""The C++ products with weights in 8 and 4 bits, against the definition in float64: in every
arithmetic that has a name, which is the same on every processor.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.quantized import QuantizedWeight, dequantized, quantized
from kernels_cpu import quantized as native
from kernels_cpu.library import unavailable
from kernels_cpu.quantized import ACTIVATIONS

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"the CPU kernels: {unavailable()}"
)
by_name = pytest.mark.parametrize("activations", ACTIVATIONS)
FORMS = ("int8", "int4", "fp8")
# Rows of x and of the weight that fill tiles and blocks of any processor, and that do not.
SHAPES = [
    (1, 1, 32),
    (3, 4, 64),
    (4, 13, 96),
    (33, 50, 160),
    (70, 26, 64),
    (127, 12, 64),
    (18, 7, 1056),
    (540, 7, 1056),
    (60, 1300, 288),  # several groups of outputs to an item of work
]


def arrays(T: int, N: int, E: int, form: Any) -> tuple[Any, QuantizedWeight]:
    rng = np.random.default_rng(T + N)
    x, w = rng.standard_normal((T, E)), rng.standard_normal((N, E)) / E**0.5
    w[0] *= 1e4
    return x.astype(jnp.bfloat16), quantized(jnp.asarray(w, jnp.bfloat16), form, 1)


def in_product(weight: Any, activations: str) -> np.ndarray:
    """A weight with scales of groups, in f32, as it is multiplied: rounded to bf16 in "plain"."""
    return np.asarray(weight.astype(jnp.bfloat16) if activations == "plain" else weight, np.float64)


def meant(w: QuantizedWeight, activations: str) -> np.ndarray:
    """A weight of `quantized` as it is multiplied: never rounded if it has one scale a row, which
    comes after the sum.
    """
    whole = dequantized(w.values, w.scales, w.form)
    return (
        in_product(whole, activations) if w.form.name == "int4" else np.asarray(whole, np.float64)
    )


def as_taken(x: Any, form: str, activations: str) -> np.ndarray:
    """x as it is multiplied: in integers each 32 inputs in whole steps of a 127th of the largest of
    them, or each 256 of a 32767th.
    """
    if form == "fp8" or activations == "plain":
        return x.astype(np.float64)
    T, E = x.shape
    size, most = (256, 32767) if activations == "int16" else (32, 127)
    blocks = np.zeros((T, -(-E // size) * size), np.float32)
    blocks[:, :E] = x
    blocks = blocks.reshape(T, -1, size)
    largest = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest < 1e-30, np.float32(0), np.float32(most) / largest)
    taken = np.rint(blocks * inverse) * (largest / np.float32(most)).astype(np.float64)
    # Half a step, and what f32 rounds off numbers of up to 32767 steps.
    assert (np.abs(taken - blocks) <= largest * (0.505 / most) + 1e-30).all()
    return taken.reshape(T, -1)[:, :E]


def product(x: Any, w: QuantizedWeight, count: int, activations: str) -> np.ndarray:
    parts = (w.values, w.scales, w.form.name)
    return np.asarray(native.linear(x, *parts, count, activations=activations))


@by_name
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("T", "N", "E"), SHAPES)
def test_equals_the_definition(T: int, N: int, E: int, form: str, activations: str) -> None:
    x, w = arrays(T, N, E, form)
    exact = as_taken(x, form, activations) @ meant(w, activations).T
    allowed = 1e-5 * np.abs(exact).max(0) + 1e-6
    assert (np.abs(product(x, w, T, activations) - exact) <= allowed).all()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_names_differ(form: str) -> None:
    """By what each rounds: a test that took one for another would fail."""
    x, w = arrays(33, 50, 160, form)
    plain, bytes_, words = (product(x, w, 33, name) for name in ACTIVATIONS)
    scale = np.abs(plain).max()
    assert 1e-4 * scale < np.abs(bytes_ - words).max() < 0.02 * scale
    assert (np.abs(plain - words).max() > 1e-6 * scale) and not np.array_equal(plain, words)


def test_a_name_that_is_not_known() -> None:
    x, w = arrays(1, 4, 32, "int8")
    with pytest.raises(Exception, match="activations 'int9' is not known"):
        product(x, w, 1, "int9")
    with pytest.raises(Exception, match="form 'int3' is not known"):
        native.linear(x, w.values, w.scales, "int3", 1)


@by_name
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("E", [192, 1152])
def test_scales_of_groups_and_zeros(E: int, form: str, activations: str) -> None:
    """As files have them: three to a row, and in int4 zeros."""
    x, w = arrays(5, 13, E, form)
    rng = np.random.default_rng(0)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, (13, 3)), jnp.float32)
    zeros = jnp.asarray(rng.integers(-7, 8, (13, 3)), jnp.float32) if form == "int4" else None
    whole = in_product(dequantized(w.values, scales, w.form, zeros), activations)
    exact = as_taken(x, form, activations) @ whole.T
    allowed = 1e-5 * np.abs(exact).max(0) + 1e-6
    parts = (x, w.values, scales, w.form.name, 5)
    result = np.asarray(native.linear(*parts, zeros, activations))
    assert (np.abs(result - exact) <= allowed).all()
    without = np.asarray(native.linear(*parts, activations=activations))
    assert (zeros is None) == np.array_equal(without, result)


@by_name
@pytest.mark.parametrize("form", FORMS)
def test_a_huge_input_costs_its_neighbours_alone(form: str, activations: str) -> None:
    """Those of its 256 at most: what is elsewhere is rounded as it would be without."""
    x, w = arrays(5, 13, 576, form)
    values = w.values.at[:, : 256 * w.values.shape[1] // 576].set(0x88 if form == "int4" else 0)
    plain = product(x, dataclasses.replace(w, values=values), 5, activations)
    x[:, 3] *= 1e4
    assert plain.any()
    assert np.array_equal(product(x, dataclasses.replace(w, values=values), 5, activations), plain)


@by_name
def test_every_value_of_fp8(activations: str) -> None:
    numbers = np.arange(256, dtype=np.uint8)
    numbers[[0x7F, 0xFF]] = 0  # the two that are no numbers
    values = numbers.view(jnp.float8_e4m3fn)[:, None] * np.ones((1, 32), jnp.float8_e4m3fn)
    x = np.zeros((1, 32), jnp.bfloat16)
    x[0, 7] = 1
    scales = np.full((256, 1), 2.0, np.float32)
    one, bits, twos = (jnp.asarray(part) for part in (x, values, scales))
    result = np.asarray(native.linear(one, bits, twos, "fp8", 1, activations=activations))
    assert np.array_equal(result[0], 2 * numbers.view(jnp.float8_e4m3fn).astype(np.float32))


@by_name
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_do_not_depend_on_the_others(form: str, activations: str) -> None:
    x, w = arrays(150, 20, 576, form)
    whole = product(x, w, 150, activations)
    for rows in (slice(0, 1), slice(3, 10), slice(140, 150), slice(5, 140)):
        assert np.array_equal(product(x[rows], w, len(x[rows]), activations), whole[rows])


@by_name
def test_padding_costs_nothing_and_is_zero(activations: str) -> None:
    x, w = arrays(70, 20, 64, "int8")
    whole = product(x, w, 70, activations)
    x[41:] = np.nan
    for count in (0, 1, 41):
        assert np.array_equal(product(x, w, count, activations)[:count], whole[:count])
        assert not product(x, w, count, activations)[count:].any()


@by_name
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_in_its_row(form: str, activations: str) -> None:
    x, w = arrays(5, 20, 576, form)
    whole = product(x, w, 5, activations)
    x[1, 300], x[2, 5], x[4] = np.nan, np.inf, 0
    result = product(x, w, 5, activations)
    assert np.isnan(result[1]).all()
    assert not np.isfinite(result[2]).any()
    assert np.array_equal(result[[0, 3]], whole[[0, 3]])
    assert not result[4].any()


@by_name
@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e30])
@pytest.mark.parametrize("form", FORMS)
def test_sizes_far_from_one(form: str, size: float, activations: str) -> None:
    x, w = arrays(3, 20, 576, form)
    scaled = (x.astype(np.float32) * size).astype(jnp.bfloat16)
    exact = as_taken(scaled, form, activations) @ meant(w, activations).T
    allowed = 1e-3 * np.abs(exact).max(0) + 1e-30
    assert (np.abs(product(scaled, w, 3, activations) - exact) <= allowed).all()


def interleaved_product(x: Any, w: QuantizedWeight, count: int, activations: str) -> np.ndarray:
    w = w.interleaved()
    parts = (w.values, w.scales, w.form.name, count, w.zeros, activations)
    return np.asarray(native.linear(x, *parts, interleaved=True))


ROUNDED = [x for x in ("int8", "int16") if native.interleaves("int8", 16, x)]


@pytest.mark.parametrize("activations", ROUNDED)
@pytest.mark.parametrize("form", native.ROUNDING)
@pytest.mark.parametrize(
    ("T", "N", "E"), [(1, 16, 32), (3, 32, 96), (5, 48, 576), (70, 16, 1056), (540, 32, 256)]
)
def test_interleaved(T: int, N: int, E: int, form: str, activations: str) -> None:
    x, w = arrays(T, N, E, form)
    result = interleaved_product(x, w, T, activations)
    exact = as_taken(x, form, activations) @ meant(w, activations).T
    assert (np.abs(result - exact) <= 1e-5 * np.abs(exact).max(0) + 1e-6).all()
    if activations == "int8":  # its arithmetic is that of rows
        assert np.array_equal(result, product(x, w, T, activations))
    some = slice(T // 3, T // 3 + 2)  # a row's bits do not depend on the others
    assert np.array_equal(
        interleaved_product(x[some], w, 2, activations)[: T - some.start], result[some]
    )


@pytest.mark.parametrize("activations", ROUNDED)
@pytest.mark.parametrize("form", native.ROUNDING)
@pytest.mark.parametrize(("E", "groups"), [(192, 3), (1152, 3), (512, 2), (1024, 1)])
def test_interleaved_with_groups_and_zeros(
    E: int, groups: int, form: str, activations: str
) -> None:
    x, w = arrays(5, 32, E, form)
    rng = np.random.default_rng(0)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, (32, groups)), jnp.float32)
    zeros = jnp.asarray(rng.integers(-7, 8, scales.shape), jnp.float32) if form == "int4" else None
    w = dataclasses.replace(w, scales=scales, zeros=zeros)
    exact = as_taken(x, form, activations) @ np.asarray(w.whole(), np.float64).T
    result = interleaved_product(x, w, 5, activations)
    assert (np.abs(result - exact) <= 1e-5 * np.abs(exact).max(0) + 1e-6).all()


@pytest.mark.parametrize("activations", ROUNDED)
def test_interleaved_and_no_number(activations: str) -> None:
    x, w = arrays(5, 32, 576, "int8")
    whole = interleaved_product(x, w, 5, activations)
    x[1, 300], x[2, 5], x[4] = np.nan, np.inf, 0
    result = interleaved_product(x, w, 5, activations)
    assert np.isnan(result[1]).all() and not np.isfinite(result[2]).any()
    assert np.array_equal(result[[0, 3]], whole[[0, 3]]) and not result[4].any()
    assert not interleaved_product(x, w, 3, activations)[3:].any(), "padding"


@pytest.mark.parametrize(
    ("form", "outputs", "activations", "problem"),
    [
        ("fp8", 16, "int16", "weights of fp8 are not interleaved"),
        ("int8", 16, "plain", "no product with these activations"),
        ("int8", 24, "int16", "N=24 of an interleaved weight must be a multiple of 16"),
    ],
)
def test_what_cannot_be_interleaved(
    form: str, outputs: int, activations: str, problem: str
) -> None:
    assert not native.interleaves(form, outputs, activations)
    x, values = jnp.ones((2, 64), jnp.bfloat16), jnp.zeros((outputs, 64), jnp.int8)
    parts = (x, values, jnp.ones((outputs, 1)), form, 2, None, activations)
    with pytest.raises(jax.errors.JaxRuntimeError, match=problem):
        native.linear(*parts, interleaved=True).block_until_ready()


@pytest.mark.parametrize(
    ("form", "values", "scales", "problem"),
    [
        ("int8", (4, 40), (4, 1), "E must be a multiple of 32"),
        ("int4", (4, 20), (4, 1), "E must be a multiple of 32"),
        ("int8", (4, 64), (4, 3), "S must divide E"),
        ("int4", (4, 32), (4, 4), "a scale of int4 must be of whole 32s"),
        ("int4", (4, 64), (4, 1), "its values have another shape"),
        ("fp8", (5, 64), (4, 1), "its values have another shape"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(
    form: str, values: tuple[int, ...], scales: tuple[int, ...], problem: str
) -> None:
    """The product itself checks them: a width that it cannot divide would end the process."""
    width = 40 if "E must" in problem else 64
    x = jnp.ones((2, width), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=problem):
        native.linear(x, jnp.zeros(values, jnp.int8), jnp.ones(scales), form, 2).block_until_ready()


def test_zeros_are_of_the_shape_of_scales() -> None:
    x, values, scales = (
        jnp.ones((2, 64), jnp.bfloat16),
        jnp.zeros((4, 32), jnp.int8),
        jnp.ones((4, 2)),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="its zeros have another shape"):
        native.linear(x, values, scales, "int4", 2, jnp.zeros((4, 1))).block_until_ready()
