"""The C++ products of packed panels against float64, and attention within groups against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers.linear import StepContext
from jpaged.models.vision.parts import attend
from kernels_cpu import group_attention, panels
from kernels_cpu.library import unavailable

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"the CPU kernels: {unavailable()}"
)
PRODUCTS = panels.PanelProducts(most_rows=0, dtypes=("float32", "bfloat16"))


def random(*shape: int, dtype: str = "float32") -> jax.Array:
    rng = np.random.default_rng(list(shape))
    return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("T", "N", "E", "count"), [(1, 1, 3, 1), (30, 70, 600, 17), (9, 8, 7, 0)])
def test_products(T: int, N: int, E: int, count: int, dtype: str) -> None:
    """Padding gives zeros, whatever it is."""
    x, weight = random(T, E, dtype=dtype), random(N, E, dtype=dtype)
    x = x.at[count:].set(jnp.nan)
    assert PRODUCTS.supported(x, weight)
    y = np.asarray(PRODUCTS.linear(x, weight, count, jnp.float32))
    wanted = np.asarray(x[:count], np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(y[:count], wanted, atol=1e-5 * E**0.5)
    assert not y[count:].any()


def test_a_rows_bits_do_not_depend_on_others() -> None:
    x, weight = random(40, 300), random(33, 300)
    whole = np.asarray(panels.linear(x, weight, 40))
    for first, last in ((0, 1), (7, 20), (39, 40)):
        part = np.asarray(panels.linear(x[first:last], weight, last - first))
        assert np.array_equal(part, whole[first:last])


def test_other_dtypes_are_left_alone() -> None:
    half = random(4, 32).astype(jnp.float16)
    assert not PRODUCTS.supported(half, half) and not group_attention.supported(half)
    assert not PRODUCTS.supported(random(4, 32), random(4, 32, dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention(dtype: str) -> None:
    """Images of several lengths, windows, fewer heads of keys than of queries, and padding, which
    gives zeros.
    """
    total, real = 300, 280
    images = np.full(total, -1)
    images[:150], images[150:163], images[163:real] = 0, 1, 2
    groups = jnp.asarray(np.stack([images, np.arange(total) // 100]), jnp.int32)
    q, k, v = random(total, 4, 24), random(total, 2, 24), random(total, 2, 24) + 1
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    step = StepContext(group_attention=group_attention)
    ours = np.asarray(attend(q, k, v, groups, 0.3, step), np.float32)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    exact = attend(q, k, v, groups, 0.3, StepContext())
    tolerance = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(
        ours[:real], np.asarray(exact)[:real], atol=tolerance, rtol=tolerance
    )
    assert not ours[real:].any()
