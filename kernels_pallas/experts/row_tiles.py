"""Tiles of rows that are sorted by expert, each of one expert.

Shapes: T tokens, A choices of a token, X experts, P = T * A pairs, I tiles, B rows of a tile, R = I
* B rows of all tiles.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from kernels_pallas.experts.interface import sort


def tile_rows(num_rows: int, num_experts: int, fewest: int, most: int) -> int:
    """Return the rows of a tile: about as many as an expert has on average, a power of two."""
    average = max(num_rows // num_experts, 1)
    return min(max(pl.next_power_of_2(average), fewest), most)


def tile_table(sizes_X: Array, num_rows: int, rows: int) -> tuple[Array, Array, Array]:
    """Return int32 [I] each: a tile's expert, X for no tile; its first row; the last + 1 of the
    expert's rows.
    """
    X = len(sizes_X)
    tiles_X = -(-sizes_X // rows)
    last_X, end_X = jnp.cumsum(tiles_X), jnp.cumsum(sizes_X)
    tile_I = jnp.arange(num_rows // rows + min(X, num_rows), dtype=jnp.int32)
    expert_I = jnp.sum(last_X[None, :] <= tile_I[:, None], axis=1, dtype=jnp.int32)
    last_I = jnp.minimum(expert_I, X - 1)
    before_I = tile_I - last_X[last_I] + tiles_X[last_I]  # tiles of the same expert
    first_I = end_X[last_I] - sizes_X[last_I] + before_I * rows
    return expert_I, first_I.astype(jnp.int32), end_X[last_I].astype(jnp.int32)


class WholeTiles(NamedTuple):
    """Rows that are filled up so that each tile is of one expert alone.

    token_R: the token of a row; some token's where it fills up. row_TA: the row of each pair. Pairs
    whose choice is X have none, and name some row. expert_I: the expert of a tile. count_1: how
    many tiles there are; those after them are of any expert.
    """

    token_R: Array
    row_TA: Array
    expert_I: Array
    count_1: Array


def whole_tiles(chosen_TA: Array, num_experts: int, rows: int) -> WholeTiles:
    """Return the tiles of so many rows each. Choices of X are padding."""
    P, X = chosen_TA.size, num_experts
    by_expert = sort(chosen_TA, X)
    expert_I, first_I, _ = tile_table(by_expert.sizes_X, P, rows)
    sorted_R = (first_I[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]).reshape(-1)
    tiles_X = -(-by_expert.sizes_X // rows)
    # By how much a row is further down than its pair among the sorted ones.
    down_X = (jnp.cumsum(tiles_X) - tiles_X) * rows
    down_X = down_X - (jnp.cumsum(by_expert.sizes_X) - by_expert.sizes_X)
    place_P = jnp.zeros(P, jnp.int32).at[by_expert.pair_P].set(jnp.arange(P, dtype=jnp.int32))
    row_P = place_P + down_X[jnp.minimum(chosen_TA.reshape(-1), X - 1)].astype(jnp.int32)
    return WholeTiles(
        token_R=by_expert.token_P[jnp.minimum(sorted_R, P - 1)],
        row_TA=jnp.minimum(row_P, len(sorted_R) - 1).reshape(chosen_TA.shape),
        expert_I=jnp.minimum(expert_I, X - 1),
        count_1=jnp.sum(tiles_X, dtype=jnp.int32, keepdims=True),
    )
