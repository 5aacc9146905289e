"""Attention over the latents of chosen tokens."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.paged_attention.common import NEG
from kernels_pallas.paged_attention.interface import Options
from kernels_pallas.paged_attention.pool_layout import ScaledPool
from kernels_pallas.sparse_attention.tiles import last_real, loop_over_tiles, rows_of_blocks

KEY_TILE = 128  # chosen tokens that are attended to at once
GATHERED_BYTES = 1 << 22  # f32 latents of them, of a tile's tokens


@functools.partial(jax.jit, static_argnames="options")
def attend(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    row_T: Array,
    position_T: Array,
    chosen_TC: Array,
    *,
    options: Options,
) -> Array:
    """Return o [T, H, V] of queries over the latents at the positions that each token chose, which
    `choose` returns; softmax and sums in f32. Padding gets zeros or what is left in memory of it.

    pool [L*N, P, 1, D or more], or a ScaledPool: a latent and a rotated key side by side, then
    padding; options.attention is that of latents. row_T, position_T: see `choose`.
    """
    T, H, D = q_THD.shape
    attention, C = options.attention, chosen_TC.shape[1]
    assert attention.latent and attention.soft_cap is None and not attention.sinks
    V, P = attention.value_width(D), pool.shape[1]
    width = min(C, KEY_TILE)
    B = math.gcd(T, max(1, GATHERED_BYTES // (4 * width * D)))
    short = -C % width
    chosen_TC = jnp.pad(chosen_TC, ((0, 0), (0, short)), constant_values=-1)
    counts_T = jnp.sum((chosen_TC >= 0).astype(jnp.int32), axis=1)

    def body(first: Array) -> Array:
        q, row_B, chosen_BC, counts_B = (
            lax.dynamic_slice_in_dim(x, first, B) for x in (q_THD, row_T, chosen_TC, counts_T)
        )
        q = q.astype(jnp.float32) * jnp.float32(attention.scale)

        def over(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            most, total, acc = state
            at = lax.dynamic_slice_in_dim(chosen_BC, i * width, width, 1)
            rows = rows_of_blocks(
                pool.shape[0], layer, block_table_SM, row_B, at // P, options.num_layers
            )
            seen = (at >= 0)[:, None, :]
            kv = _latents(pool, rows, at % P, D, V)
            kv = jnp.where(seen.swapaxes(1, 2), kv, 0.0)
            scores = jnp.where(seen, _einsum("bhd,bcd->bhc", q, kv), NEG)
            new = jnp.maximum(most, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
            alpha = jnp.exp(most - new)
            total = total * alpha + jnp.sum(weights, axis=-1, keepdims=True)
            return new, total, acc * alpha + _einsum("bhc,bcv->bhv", weights, kv[..., :V])

        start = (
            jnp.full((B, H, 1), NEG, jnp.float32),
            jnp.zeros((B, H, 1), jnp.float32),
            jnp.zeros((B, H, V), jnp.float32),
        )
        tiles = (jnp.max(counts_B) + width - 1) // width
        _, total, acc = lax.fori_loop(0, tiles, over, start)
        return (acc / jnp.maximum(total, 1e-30)).astype(q_THD.dtype)

    out = jnp.zeros((T, H, V), q_THD.dtype)
    return loop_over_tiles(body, out, B, last_real(position_T))


def _latents(pool: Any, rows: Array, slot: Array, D: int, V: int) -> Array:
    """Return latents and rotated keys in f32 [B, c, D] of slots [B, c] of rows of the pool."""
    if not isinstance(pool, ScaledPool):
        return pool[rows, slot, 0, :D].astype(jnp.float32)
    kv = pool.values[rows, slot, 0, :D].astype(jnp.float32)
    of_latent, of_rotated = (
        pool.scales[rows, i, slot] if pool.slots_last else pool.scales[rows, slot, i]
        for i in range(2)
    )
    parts = kv[..., :V] * of_latent[..., None], kv[..., V:] * of_rotated[..., None]
    return jnp.concatenate(parts, axis=-1)


def _einsum(form: str, x: Array, y: Array) -> Array:
    return jnp.einsum(form, x, y, precision="highest")
