"""The choice of the tokens that a query attends to, by their index keys."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.sparse_attention.tiles import last_real, loop_over_tiles, rows_of_blocks

SCORE_BYTES = 1 << 22  # f32 scores of all index heads, of a tile's tokens and as many keys
KEY_TILE = 256  # keys that are scored at once


def index_scores(q: Array, keys: Array, weights: Array) -> Array:
    """Return f32 scores [..., R] of index keys [..., R, J] for index queries [..., I, J] and the
    weights of their heads, f32 [..., I].

    sum_i w_i relu(q_i . k * J^-0.5) / I^0.5, in f32.
    """
    f32 = jnp.float32
    products = jnp.einsum(
        "...ij,...rj->...ir", q.astype(f32), keys.astype(f32), precision="highest"
    )
    products = jax.nn.relu(products * f32(q.shape[-1] ** -0.5))
    weights = weights.astype(f32) * f32(q.shape[-2] ** -0.5)
    return jnp.einsum("...i,...ir->...r", weights, products, precision="highest")


@functools.partial(jax.jit, static_argnames=("count", "num_layers"))
def choose(
    q_TIJ: Array,
    weights_TI: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    row_T: Array,
    position_T: Array,
    *,
    count: int,
    num_layers: int,
) -> Array:
    """Return the positions int32 [T, C] that each token attends to, ascending and then -1: the
    `count` of the highest scores among those up to its own, or all where there are no more.

    pool [L*N, P, J]: index keys, these tokens' among them. row_T, position_T: of each token; its
    position is -1 for padding, which chooses nothing. C is count, or all that a block table holds.
    Of equal scores that of the lower position counts as higher.
    """
    T, (_, M), P = q_TIJ.shape[0], block_table_SM.shape, pool.shape[1]
    blocks = min(M, max(1, KEY_TILE // P))  # of a tile of keys
    width, tiles = blocks * P, -(-M // blocks)
    chosen = min(count, M * P)
    B = math.gcd(T, max(1, SCORE_BYTES // (4 * q_TIJ.shape[1] * width)))
    past = jnp.int32(tiles * width)

    def by_score(first: Array) -> Array:
        q, weights, row_B, position_B = (
            lax.dynamic_slice_in_dim(x, first, B) for x in (q_TIJ, weights_TI, row_T, position_T)
        )

        def score(i: Array, scores: Array) -> Array:
            block = i * blocks + jnp.arange(blocks, dtype=jnp.int32)
            at = rows_of_blocks(
                pool.shape[0], layer, block_table_SM, row_B, block[None, :], num_layers
            )
            keys = pool[at].reshape(B, width, -1)
            seen = i * width + jnp.arange(width, dtype=jnp.int32)[None, :] <= position_B[:, None]
            # What lies in slots that are not written may be anything.
            new = jnp.where(seen, index_scores(q, keys, weights), -jnp.inf)
            return lax.dynamic_update_slice_in_dim(scores, new, i * width, 1)

        scores = jnp.full((B, tiles * width), -jnp.inf, jnp.float32)
        seen_tiles = jnp.max(position_B) // width + 1
        scores = lax.fori_loop(0, seen_tiles, score, scores)
        best, position = lax.top_k(scores, chosen)
        # In the order of the context, so that what is added up does not depend on scores.
        return jnp.sort(jnp.where(best > -jnp.inf, position.astype(jnp.int32), past), axis=-1)

    def everything(first: Array) -> Array:
        position_B = lax.dynamic_slice_in_dim(position_T, first, B)
        each = jnp.arange(chosen, dtype=jnp.int32)[None, :]
        return jnp.where(each <= position_B[:, None], each, past)

    def body(first: Array) -> Array:
        longest = jnp.max(lax.dynamic_slice_in_dim(position_T, first, B))
        return lax.cond(longest < chosen, everything, by_score, first)

    filled = jnp.full((T, chosen), past, jnp.int32)
    filled = loop_over_tiles(body, filled, B, last_real(position_T))
    return jnp.where(filled < past, filled, -1)
