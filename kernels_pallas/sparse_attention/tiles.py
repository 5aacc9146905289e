"""Tiles of packed tokens, and where the pool holds blocks of their rows."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax


def last_real(position_T: Array) -> Array:
    """Return how many packed tokens there are up to the last one that is not padding."""
    place_T = jnp.arange(1, position_T.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(position_T >= 0, place_T, 0))


def loop_over_tiles(body: Callable[[Array], Array], out: Array, size: int, count: Array) -> Array:
    """Return `out` with rows [size] of body(first) at every tile's first row, for as many tiles of
    `size` as hold the first `count` rows.
    """

    def one(i: Array, out: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(out, body(i * size), i * size, 0)

    return lax.fori_loop(0, (count + size - 1) // size, one, out)


def rows_of_blocks(
    pool_rows: int,
    layer: Array | int,
    block_table_SM: Array,
    row_B: Array,
    block: Array,
    num_layers: int,
) -> Array:
    """Return which of a pool's pool_rows hold blocks [B or 1, n] of the tables of rows [B]: int32
    [B, n]. A row or block past the table's end is any valid one.
    """
    S, M = block_table_SM.shape
    row = jnp.clip(row_B, 0, S - 1)[:, None]
    return layer * (pool_rows // num_layers) + block_table_SM[row, jnp.clip(block, 0, M - 1)]
