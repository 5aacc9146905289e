"""The C++ kernel that makes weights of int8 and int4, against what XLA makes, to the bit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.quantized import FORMS, quantized
from kernels_cpu import quantize
from kernels_cpu.library import unavailable

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"the CPU kernels: {unavailable()}"
)


def weight(N: int, E: int, dtype: Any) -> jax.Array:
    """Rows of many sizes, with ties between two numbers, zeros, and what f32 nearly has not."""
    rng = np.random.default_rng(N + E)
    w = rng.standard_normal((N, E)) * 2.0 ** rng.integers(-20, 20, (N, 1))
    w[0, :] = rng.integers(-127, 128, E) / 2
    w[0, ::32] = 127
    w[1] = 0
    w[2] = 1e-37
    w[3, ::32] = -3e38
    return jnp.asarray(w, dtype)


@pytest.mark.parametrize("interleaved", [False, True], ids=["rows", "interleaved"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_it_has_the_bits_of_xla(name: str, dtype: str, interleaved: bool) -> None:
    form = dataclasses.replace(FORMS[name], interleaved=interleaved)
    for N, E in [(16, 32), (48, 96), (304, 1056)]:
        w = weight(N, E, dtype)
        assert quantize.supported(w, name, interleaved)
        wanted = jax.jit(functools.partial(quantized, form=form, num_outputs=1))(w)
        made = jax.jit(functools.partial(quantized, form=form, num_outputs=1, kernel=quantize))(w)
        assert made.form == wanted.form and made.dtype == wanted.dtype
        np.testing.assert_array_equal(made.scales, wanted.scales)
        np.testing.assert_array_equal(made.values, wanted.values)
        assert len(np.unique(made.values)) > 14, "a control: there are many numbers"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_weights_of_more_axes(name: str) -> None:
    """Experts [X, outputs, inputs], and a projection whose inputs have two axes."""
    w = weight(24, 256, jnp.bfloat16)
    for shape, num_outputs in [((2, 12, 256), 2), ((24, 4, 64), 1)]:
        make = functools.partial(quantized, form=name, num_outputs=num_outputs)
        wanted, made = jax.jit(make)(w.reshape(shape)), make(w.reshape(shape), kernel=quantize)
        assert made.scales.shape == wanted.scales.shape
        np.testing.assert_array_equal(made.scales, wanted.scales)
        np.testing.assert_array_equal(made.values, wanted.values)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leaves_a_scale_that_is_not(value: float) -> None:
    for dtype in (jnp.bfloat16, jnp.float32):
        w = weight(16, 64, dtype).at[5, 40].set(value)
        for name, column in (("int8", 0), ("int4", 1)):
            scales = np.isfinite(quantize.quantize(w, name)[1])
            assert not scales[5, column] and scales.sum() == scales.size - 1


def test_what_it_does_not_take() -> None:
    w = jnp.zeros((24, 48), jnp.bfloat16)
    assert quantize.supported(w, "int8", False) and not quantize.supported(w, "int4", False)
    assert not quantize.supported(w, "int8", True)  # no whole 16 outputs
    assert not quantize.supported(w, "fp8", False)
    assert not quantize.supported(w.astype(jnp.float16), "int8", False)
    made = quantized(jnp.ones((24, 48), jnp.float16), "int8", 1, kernel=quantize)
    assert np.all(np.asarray(made.values) == 127), "XLA makes what it does not"
    for form, interleaved in (("int4", False), ("int8", True), ("fp8", False)):
        with pytest.raises(Exception, match=r"whole|not made here"):
            quantize.quantize(w, form, interleaved=interleaved)
