"""Writing to the pool: exact, nothing else touched, padding dropped; and in place in an unrolled
layer loop.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import tpu, xla
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.kv_write import write_kv
from kernels_pallas.paged_attention.pool_layout import (
    PoolLayout,
    ScaledPool,
    scaled,
    slots_last_layout,
)
from tests.hlo import pool_copies

L, N, P, K, G, D, S, M = 3, 37, 8, 2, 2, 16, 8, 4
i32 = jnp.int32


def written_one_by_one(
    pool: np.ndarray, layer: int, kv_T2KD: np.ndarray, slot_mapping_T: np.ndarray
) -> np.ndarray:
    """What write_kv is held to: each token's keys and values in its slot; slots outside the layer
    are dropped.
    """
    new = pool.copy()
    for kv_2KD, slot in zip(kv_T2KD, slot_mapping_T, strict=True):
        if 0 <= slot < N * P:
            new[layer * N + slot // P, slot % P] = kv_2KD
    return new


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_writes_its_slots_and_nothing_else(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((L * N, P, 2 * K, D)).astype(dtype)
    kv = rng.standard_normal((11, 2 * K, D)).astype(dtype)
    slots = rng.permutation(N * P)[:11].astype(np.int32)
    slots[:2] = 0, N * P - 1
    slots[[3, 6, 10]] = L * N * P  # padding
    slots[5], slots[7] = (
        N * P,
        -1,
    )  # neither the next layer's first slot nor a slot counted from the end
    for layer in (0, 1, L - 1):
        new = np.asarray(
            jax.jit(write_kv, static_argnames="num_layers")(
                pool, jnp.int32(layer), kv, slots, num_layers=L
            )
        )
        assert np.array_equal(new, written_one_by_one(pool, layer, kv, slots))
        written = np.unique(np.flatnonzero((new != pool).any((2, 3))))
        assert set(written) == {layer * N * P + s for s in slots if 0 <= s < N * P}
        arrays = jnp.asarray(pool), layer, jnp.asarray(kv), jnp.asarray(slots)
        assert np.array_equal(write_kv(*arrays, num_layers=L), new)


@pytest.mark.parametrize("num_layers", [1, L])
@pytest.mark.parametrize(
    "layout", [slots_last_layout(K, D), tpu.pool_layout(K, D)], ids=["", "tpu"]
)
def test_scales_whose_slots_are_last(layout: PoolLayout, num_layers: int) -> None:
    """In the places where a pool that is written plainly has them once it is laid out so; what is
    padding stays.
    """
    rng = np.random.default_rng(0)
    kv = jnp.asarray(rng.standard_normal((11, 2 * K, D)), jnp.float32)
    slots = rng.permutation(N * P)[:11].astype(np.int32)
    slots[[3, 6]] = L * N * P
    plain = ScaledPool(
        jnp.zeros((L * N, P, 2 * K, D), jnp.int8), jnp.zeros((L * N, P, 2 * K), jnp.float32)
    )
    how: Any = {"num_layers": num_layers}
    expected = layout.pack_scaled(write_kv(plain, num_layers - 1, kv, jnp.asarray(slots), **how))
    empty = layout.pack_scaled(plain)
    found = write_kv(empty, num_layers - 1, layout.pack(kv), jnp.asarray(slots), **how)
    assert found.slots_last and np.asarray(expected.scales).any()
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_in_8_bits(dtype: str) -> None:
    """Values and scales in the same slots; each key and value to the nearest of its own scale,
    whatever the others are.
    """
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((11, 2 * K, D)).astype(np.float32)
    kv[0, 0], kv[0, 1], kv[1, 0], kv[2, 0], kv[3, 0, 5] = 0.0, -0.0, 1e30, 1e-30, np.nan
    made = scaled(jnp.asarray(kv), dtype)
    meant = np.asarray(made.values.astype(jnp.float32) * made.scales[..., None])
    most = np.abs(kv).max(-1, keepdims=True) * {"int8": 0.5 / 127}.get(dtype, 16 / 448)
    assert np.isnan(meant[3, 0, 5]) and np.isnan(np.asarray(made.scales)[3, 0]), "broken shows"
    keep = np.isfinite(most[..., 0])
    assert (np.abs(meant - kv)[keep] <= 1.001 * most[keep]).all() and not meant[0, :2].any()
    pool = ScaledPool(
        jnp.ones((L * N, P, 2 * K, D), dtype), jnp.full((L * N, P, 2 * K), 3.0, jnp.float32)
    )
    slots = rng.permutation(N * P)[:11].astype(np.int32)
    slots[[3, 6]] = L * N * P
    new = write_kv(pool, 1, jnp.asarray(kv), jnp.asarray(slots), num_layers=L)
    for old, found, own in zip(*map(jax.tree.leaves, (pool, new, made)), strict=True):
        expected = written_one_by_one(np.asarray(old), 1, np.asarray(own), slots)
        assert np.asarray(found).tobytes() == expected.tobytes()


def _layers(pool, x_THD, slots_T, table_SM, contexts_S, starts_S1, *, decode: bool):
    """Write, then attend, in each of several unrolled layers."""
    options = Options(attention=AttentionOptions(scale=0.25), num_layers=L)
    for layer in range(L):
        kv = jnp.concatenate([x_THD[:, ::G], x_THD[:, 1::G]], axis=1)
        pool = write_kv(pool, layer, kv, slots_T, num_layers=L)
        args = (x_THD, pool, layer, table_SM, contexts_S)
        if decode:
            o = xla.decode(*args, options=options)
        else:
            o = xla.prefill(*args, starts_S1, options=options)
        x_THD = x_THD + o
    return pool, x_THD


@pytest.mark.parametrize(
    ("phase", "rows", "dtype"),
    [
        ("decode", S, jnp.float32),
        ("decode", S, jnp.bfloat16),
        ("decode", 1, jnp.bfloat16),
        ("prefill", S, jnp.bfloat16),
    ],
)
def test_pool_is_updated_in_place(phase: str, rows: int, dtype: Any) -> None:
    T = rows if phase == "decode" else 40
    shape = (L * N, P, 2 * K, D)
    specs = [
        (shape, dtype),
        ((T, K * G, D), dtype),
        ((T,), i32),
        ((rows, M), i32),
        ((rows,), i32),
        ((rows + 1,), i32),
    ]
    args = [jax.ShapeDtypeStruct(*spec) for spec in specs]

    def copies(**options: Any) -> list[str]:
        step = jax.jit(_layers, static_argnames="decode", **options)
        hlo = step.lower(*args, decode=phase == "decode").compile().as_text()
        assert hlo is not None
        return pool_copies(hlo, int(np.prod(shape)))

    assert copies(donate_argnums=0) == []
    assert len(copies()) == 1  # the control: without donation the pool must be copied, once


def test_a_write_by_selection_is_seen_as_a_copy() -> None:
    def select(pool, x):
        return jnp.where(jnp.arange(pool.shape[0])[:, None] == 3, x[None], pool)

    args = jax.ShapeDtypeStruct((1000, 7), jnp.float32), jax.ShapeDtypeStruct((7,), jnp.float32)
    hlo = jax.jit(select, donate_argnums=0).lower(*args).compile().as_text()
    assert hlo is not None and len(pool_copies(hlo, 7000)) == 1


BESIDE = """
%fused (pool: f32[1000,7], x: f32[7]) -> f32[1000,7] {
  %pool = f32[1000,7]{1,0} parameter(0)
  %x = f32[7]{0} parameter(1)
  %row = f32[1,7]{1,0} bitcast(%x)
  %at = s32[] constant(3)
  ROOT %written = f32[1000,7]{1,0} dynamic-update-slice(%pool, %row, %at, %at)
}

%summed (pool.1: f32[1000,7]) -> f32[7] {
  %pool.1 = f32[1000,7]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %sum = f32[7]{0} reduce(%pool.1, %zero), dimensions={0}, to_apply=%add
}

ENTRY %main (pool.2: f32[1000,7]) -> f32[1000,7] {
  %pool.2 = f32[1000,7]{1,0} parameter(0)
  %s = ((f32[1000,7]{1,0}), f32[7]{0}, u32[]) fusion-start(%pool.2), kind=kLoop, calls=%summed
  %sum.1 = f32[7]{0} fusion-done(%s)
  %w = ((f32[1000,7]{1,0}, f32[7]{0}), f32[1000,7]{1,0}, u32[]) fusion-start(%pool.2, %sum.1), \
kind=kLoop, calls=%fused
  ROOT %done = f32[1000,7]{1,0} fusion-done(%w)
}
"""


def test_fusions_that_run_beside_others_are_told_apart() -> None:
    """XLA's form on GPUs: one reads the pool, one writes to it in place; the control copies it."""
    assert pool_copies(BESIDE, 7000) == []
    control = BESIDE.replace("dynamic-update-slice(%pool, %row, %at, %at)", "add(%pool, %pool)")
    (found,) = pool_copies(control, 7000)
    assert "%w =" in found
