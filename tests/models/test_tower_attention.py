"""Attention of towers in tiles: what dense attention gives, and tiles of which nothing is seen are
not computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers.linear import StepContext
from jpaged.models.vision import parts

QUERIES, KEYS = 4, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "QUERIES", QUERIES)
    monkeypatch.setattr(parts, "KEYS", KEYS)


def case(lengths: list[int], total: int, windows: bool = False) -> tuple[Any, ...]:
    """Images of these lengths and padding: q [N, 4, 6], k and v [N, 2, 6], groups [G, N]."""
    rng = np.random.default_rng(len(lengths) + total)
    images = np.full(total, -1, np.int32)
    for i, length in enumerate(lengths):
        start = sum(lengths[:i])
        images[start : start + length] = i
    groups = [images]
    if windows:
        real = images >= 0
        groups += [np.where(real, np.arange(total) // 10, 0), np.where(real, np.arange(total), 0)]
        groups[2] %= 3
    q, k, v = (rng.standard_normal((total, h, 6)).astype(np.float32) for h in (4, 2, 2))
    return q, k, v, np.stack(groups).astype(np.int32)


def dense(q: Any, k: Any, v: Any, groups: np.ndarray) -> Any:
    """The same by its definition, [N, 4, 6]; padding sees nothing."""
    k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) * 0.5
    is_seen = (groups[:, :, None] == groups[:, None]).all(axis=0)
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize(
    ("lengths", "total", "windows"),
    [([40], 40, False), ([7, 18, 3], 37, False), ([25, 14], 45, True)],
)
def test_numbers_and_gradients(lengths: list[int], total: int, windows: bool) -> None:
    q, k, v, groups = case(lengths, total, windows)
    arrays = q, k, v
    real = sum(lengths)
    weights = np.random.default_rng(0).standard_normal((real, 4, 6)).astype(np.float32)

    def loss(function: Any, *arrays: Any) -> Any:
        return (function(*arrays, groups)[:real] * weights).sum()

    def tiles(q: Any, k: Any, v: Any, groups: np.ndarray) -> Any:
        return parts.attend(q, k, v, jnp.asarray(groups), 0.5, StepContext())

    found, wanted = tiles(q, k, v, groups), dense(q, k, v, groups)
    np.testing.assert_allclose(found[:real], wanted[:real], atol=1e-5)
    assert np.isfinite(found[real:]).all()
    grads = [
        jax.grad(lambda *x, f=f: loss(f, *x), argnums=(0, 1, 2))(*arrays) for f in (tiles, dense)
    ]
    for one, other in zip(*grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_other_images_are_not_computed() -> None:
    """NaN in the keys and values of whole tiles of others, and of padding, reaches nobody."""
    q, k, v, groups = case([16, 16], 48)
    wanted = np.asarray(dense(q[:16], k[:16], v[:16], groups[:, :16]))
    k[16:], v[16:] = np.nan, np.nan
    found = np.asarray(parts.attend(q, k, v, jnp.asarray(groups), 0.5, StepContext()))
    np.testing.assert_allclose(found[:16], wanted, atol=1e-5)
    assert np.isnan(found[16:32]).all() and not found[32:].any()
