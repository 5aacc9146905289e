"""Heads normed, rotated and written in one C++ call, and the norms of rows, against the layers' own
definitions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers.layer import Residual, Stream
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.norm import NormConfig, RMSNorm
from kernels_cpu import head_write, norm
from kernels_cpu.library import unavailable
from kernels_cpu.linear import NativeProducts
from kernels_cpu.panels import PanelProducts
from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.pool_layout import plain_pool_layout
from kernels_pallas.paged_attention.tpu import pool_layout as padded
from tests.kernels.test_head_write import PLAIN, Case, build, check
from tests.kernels.test_kv_write import L

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"the CPU kernels: {unavailable()}"
)
QWEN3 = Case("qwen3", T=37, D=64, R=64, norm=PLAIN)
CASES = (
    QWEN3,
    Case("gemma3", D=32, R=32, norm=(True, True)),
    Case("an offset in 16 bits", T=5, D=128, R=128, norm=(True, False)),
    Case("llama", T=37, G=4, D=64, R=64),
    Case("phi3", G=3, D=96, R=72),
    Case("smollm3 without rope", T=3, D=32, R=0),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_what_the_layers_do(case: Case) -> None:
    check(head_write, case, "bfloat16", interpret=False)


@pytest.mark.parametrize("layer", [0, L - 1])
def test_each_layer(layer: int) -> None:
    check(head_write, QWEN3, "bfloat16", layer, interpret=False)


def written(case: Case, rows: slice) -> tuple[Any, Any]:
    given = build(case, "bfloat16")
    settings: dict[str, Any] = given.how | {"interpret": False}
    if (turn := settings.get("rotation")) is not None:
        settings["rotation"] = turn[0][rows], turn[1][rows]
    pool, slots = jnp.asarray(given.pool), jnp.asarray(given.slots[rows])
    q, pool = head_write.write_heads(given.qkv[rows], pool, 1, slots, **settings)
    return np.asarray(q), np.asarray(pool)


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    """Nor on how many threads there are work for: prefill and decode write the same."""
    case = dataclasses.replace(QWEN3, T=37, K=8, G=4, D=128, R=128)
    q, pool = written(case, slice(None))
    for rows in (slice(3, 4), slice(5, 12), slice(36, 37)):
        some_q, some_pool = written(case, rows)
        assert np.array_equal(some_q, q[rows])
        before = np.asarray(build(case, "bfloat16").pool)
        changed = some_pool != before
        assert np.array_equal(some_pool[changed], pool[changed])


@pytest.mark.parametrize(
    ("own", "layout", "reason"),
    [
        ({}, plain_pool_layout, None),
        ({"dtype": jnp.float32}, plain_pool_layout, "only bfloat16"),
        ({"head_dim": 80}, plain_pool_layout, "only multiples of 32"),
        ({"kv_dtype": jnp.int8}, plain_pool_layout, "with scales"),
        ({"head_dim": 96}, padded, "padding"),
    ],
)
def test_unsupported(own: dict[str, Any], layout: Any, reason: str | None) -> None:
    given = {"dtype": jnp.bfloat16, "head_dim": 64, "block_size": 16} | own
    shapes = Shapes(num_heads=4, num_kv_heads=2, **given)
    found = head_write.unsupported(shapes, layout(2, given["head_dim"]), None)
    assert found is None if reason is None else reason in str(found)


def test_widths_that_are_not_the_pools() -> None:
    given = build(QWEN3, "bfloat16")
    pool, slots = jnp.asarray(given.pool)[:, :, :2], jnp.asarray(given.slots)
    settings: dict[str, Any] = given.how | {"interpret": False}
    with pytest.raises(Exception, match="heads of other widths"):
        head_write.write_heads(given.qkv, pool, 1, slots, **settings)
    settings["scales"] = given.how["scales"][0][:32], given.how["scales"][1]
    with pytest.raises(Exception, match="one number a dimension"):
        head_write.write_heads(given.qkv, jnp.asarray(given.pool), 1, slots, **settings)


STEP = StepContext(products=NativeProducts(most_rows=0))


def normed(config: NormConfig, x: jax.Array, step: StepContext) -> np.ndarray:
    rng = np.random.default_rng(2)
    scale = jnp.asarray(1 + 0.3 * rng.standard_normal(x.shape[-1]), jnp.bfloat16)
    residual = Residual(RMSNorm(scale=scale, config=config), None)
    return np.asarray(residual.taken(x, step), np.float32)


@pytest.mark.parametrize(("has_offset", "in_f32"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize(("T", "E"), [(1, 16), (5, 528), (70, 1024)])
def test_norms_are_what_the_layers_do(T: int, E: int, has_offset: bool, in_f32: bool) -> None:
    """Each row's bits are its own, and padding is zero."""
    config = NormConfig(eps=1e-5, has_offset=has_offset, in_f32=in_f32)
    x = jnp.asarray(3 * np.random.default_rng(T).standard_normal((T, E)), jnp.bfloat16)
    found, meant = normed(config, x, STEP), normed(config, x, StepContext())
    # In 16 bits a number is rounded before its scale and after it: either may go the other way.
    np.testing.assert_allclose(found, meant, rtol=2**-7 if in_f32 else 2**-6, atol=2**-8)
    assert np.mean(found != meant) < 0.2
    assert np.array_equal(normed(config, x[-1:], STEP), found[-1:])
    few = dataclasses.replace(STEP, num_rows=jnp.int32(T // 2))
    part = normed(config, x.at[T // 2 :].set(jnp.nan), few)
    assert np.array_equal(part[: T // 2], found[: T // 2]) and not part[T // 2 :].any()


@pytest.mark.parametrize(("has_offset", "in_f32"), [(False, False), (True, True)])
@pytest.mark.parametrize(("T", "E"), [(1, 16), (5, 528), (70, 1024)])
def test_what_is_added_before_a_norm(T: int, E: int, has_offset: bool, in_f32: bool) -> None:
    """One call has the bits of a sum and a norm after it; padding is zero."""
    rng = np.random.default_rng(T)
    x, y = (jnp.asarray(3 * rng.standard_normal((T, E)), jnp.bfloat16) for _ in range(2))
    scale = jnp.asarray(1 + 0.3 * rng.standard_normal(E), jnp.bfloat16)
    config = NormConfig(eps=1e-5, has_offset=has_offset, in_f32=in_f32)
    residual = Residual(RMSNorm(scale=scale, config=config), None)
    few = dataclasses.replace(STEP, num_rows=jnp.int32(T // 2))
    total, taken = residual.taken_of_sum(Stream(x, y), STEP)
    padded = Stream(x.at[T // 2 :].set(jnp.nan), y)
    part, part_taken = residual.taken_of_sum(padded, few)
    assert np.array_equal(total, x + y) and np.array_equal(taken, residual.taken(x + y, STEP))
    for half, whole in ((part, total), (part_taken, taken)):
        assert np.array_equal(half[: T // 2], whole[: T // 2])
        assert not np.asarray(half[T // 2 :], np.float32).any()
    x32, y32 = x.astype(jnp.float32), y.astype(jnp.float32)  # which the kernels do not take
    total, taken = residual.taken_of_sum(Stream(x32, y32), STEP)
    assert np.array_equal(total, x32 + y32) and np.array_equal(taken, residual.taken(total, STEP))


def test_norms_that_are_supported() -> None:
    x, scale = jnp.zeros((2, 32), jnp.bfloat16), jnp.ones(32, jnp.bfloat16)
    assert norm.supported(x, scale) and norm.supported(x, scale.astype(jnp.float32))
    for other, of in (
        (x.astype(jnp.float32), scale),
        (x[None], scale),
        (x[:, :24], scale[:24]),
        (x, scale[:16]),
        (x, scale.astype(jnp.float16)),
    ):
        assert not norm.supported(other, of)
    towers = PanelProducts(most_rows=None, dtypes=("bfloat16",))
    assert not towers.norms(x, scale)
