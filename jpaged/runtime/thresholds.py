"""The smallest logit that each row of a draw keeps: top_k, top_p and min_p all keep an upper set of
the logits, so each is one number a row, and together they are the largest of the three.

`thresholds` looks with loops and branches of XLA, which on a GPU ask the host at each turn;
`thresholds_by_kernels` is for CUDA, a sequence of kernels without any. C is the candidates of a
row, G the rows searched together.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jpaged.runtime.logprobs import (
    NEG_INF,
    SUM_TILE,
    TOP_TILE,
    OnePass,
    finite_max,
    first_true,
    pick,
    tile_max,
    tile_sums,
    top_values,
    total,
    weights,
)
from jpaged.runtime.vocabulary import WHOLE, Vocabulary

CANDIDATES = 64  # thresholds that fall within this many tokens need no search
# Rows searched together: fixed, so that sums do not depend on how many rows need it.
SEARCH_ROWS = 8


def thresholds(
    z_SV: Array,
    max_S: Array,
    temp_S: Array,
    greedy_S: Array,
    min_p_S: Array,
    top_p_S: Array,
    top_k_S: Array,
    vocabulary: Vocabulary = WHOLE,
    filters: bool = True,
) -> Array:
    """Return the smallest logit that each row keeps, -inf where it keeps all."""
    if not filters:
        return jnp.full_like(max_S, NEG_INF)
    vocab = vocabulary.tokens(z_SV)
    min_p_S = jnp.where(greedy_S, jnp.float32(0), min_p_S)
    top_p_S = jnp.where(greedy_S, jnp.float32(1), top_p_S)
    top_k_S = jnp.where(greedy_S | (top_k_S >= vocab), 0, top_k_S)
    # p >= min_p * max p, taken to the logits: no search. log(0) is -inf, which keeps all.
    floor_S = jnp.where(min_p_S > 0, max_S + temp_S * jnp.log(min_p_S), NEG_INF)
    size = min(CANDIDATES, vocab)

    def search() -> Array:
        top_SC, _ = top_values(z_SV, size, vocabulary)
        k_settled_S = top_k_S <= size
        kth_S = pick(top_SC, jnp.clip(top_k_S, 1, size) - 1)
        at_least_S = jnp.maximum(floor_S, jnp.where((top_k_S > 0) & k_settled_S, kth_S, NEG_INF))

        def nucleus() -> tuple[Array, Array]:
            p_SV = weights(z_SV, max_S, temp_S, at_least_S)
            mass_S = top_p_S * total(tile_sums(p_SV, vocabulary))
            reached_SC = (
                jnp.cumsum(weights(top_SC, max_S, temp_S, at_least_S), axis=1) >= mass_S[:, None]
            )
            first_S = first_true(reached_SC)
            inside_S = first_S < size
            return jnp.where(
                inside_S, pick(top_SC, jnp.minimum(first_S, size - 1)), NEG_INF
            ), inside_S

        p_on_S = top_p_S < 1
        pth_S, inside_S = lax.cond(
            jnp.any(p_on_S), nucleus, lambda: (jnp.full_like(max_S, NEG_INF), jnp.ones_like(p_on_S))
        )
        settled_S = k_settled_S & (inside_S | ~p_on_S)
        found_S = jnp.where(p_on_S, jnp.maximum(at_least_S, pth_S), at_least_S)
        rest_S = jnp.where(k_settled_S, 0, top_k_S)
        rows = (max_S, temp_S, at_least_S, rest_S, top_p_S, settled_S, found_S)
        return lax.cond(
            jnp.all(settled_S),
            lambda: found_S,
            lambda: _search_rows(z_SV, *rows, vocabulary),
        )

    return lax.cond(jnp.any((top_k_S > 0) | (top_p_S < 1)), search, lambda: floor_S)


class Found(NamedTuple):
    """What each row keeps: the logits from floor_S up. tile_max_SN: maxima of SUM_TILE tokens each.
    max_S: of the row, 0 where there is none that is finite. sums_SN: of each tile's weights that
    are kept, at temp_S against max_S. raw_S: the sum over all at tau_S.
    """

    tile_max_SN: Array
    max_S: Array
    floor_S: Array
    sums_SN: Array
    raw_S: Array


def thresholds_by_kernels(
    z_SV: Array,
    temp_S: Array,
    tau_S: Array,
    greedy_S: Array,
    min_p_S: Array,
    top_p_S: Array,
    top_k_S: Array,
    one_pass: OnePass,
) -> Found:
    """Return what each row keeps, of a whole vocabulary on one device. The logits are read twice,
    for maxima of tiles and for sums; a row whose CANDIDATES do not settle it is searched by a
    program of its own. tau_S: the temperature of raw_S.

    A row's bits do not depend on which way other rows go.
    """
    vocab = z_SV.shape[1]
    min_p_S = jnp.where(greedy_S, jnp.float32(0), min_p_S)
    top_p_S = jnp.where(greedy_S, jnp.float32(1), top_p_S)
    top_k_S = jnp.where(greedy_S | (top_k_S >= vocab), 0, top_k_S)
    top_max_SN = tile_max(z_SV, TOP_TILE)
    tile_max_SN = _joined_max(top_max_SN)
    max_S = finite_max(tile_max_SN)
    floor_S = jnp.where(min_p_S > 0, max_S + temp_S * jnp.log(min_p_S), NEG_INF)

    size = min(CANDIDATES, vocab)
    top_SC, ids_SC = top_values(z_SV, size, tile_max_SN=top_max_SN)
    k_settled_S = top_k_S <= size
    kth_S = pick(top_SC, jnp.clip(top_k_S, 1, size) - 1)
    at_least_S = jnp.maximum(floor_S, jnp.where((top_k_S > 0) & k_settled_S, kth_S, NEG_INF))
    read = one_pass.read(z_SV, temp_S, at_least_S, tau_S)
    sums_SN = read.against(max_S)

    mass_S = top_p_S * total(sums_SN)
    top_weights_SC = weights(top_SC, max_S, temp_S, at_least_S)
    first_S = first_true(jnp.cumsum(top_weights_SC, axis=1) >= mass_S[:, None])
    pth_S = pick(top_SC, jnp.minimum(first_S, size - 1))
    # Beyond the last candidate there may be others equal to it, which are kept as well.
    p_settled_S = (first_S < size) & ((pth_S > top_SC[:, -1]) | (size == vocab))
    p_on_S = top_p_S < 1
    settled_S = k_settled_S & (p_settled_S | ~p_on_S)
    rest_S = jnp.where(k_settled_S, 0, top_k_S)
    found_S, searched_SN = one_pass.search(
        z_SV, max_S, temp_S, at_least_S, rest_S, top_p_S, settled_S
    )
    few_S = jnp.where(p_on_S, jnp.maximum(at_least_S, pth_S), at_least_S)
    # All that is kept is among the candidates: their weights, by the tile that each is in.
    tiles_N = jnp.arange(sums_SN.shape[1], dtype=jnp.int32)
    in_tile_SCN = (ids_SC // SUM_TILE)[:, :, None] == tiles_N[None, None, :]
    of_few_SC = weights(top_SC, max_S, temp_S, few_S)
    few_SN = jnp.sum(jnp.where(in_tile_SCN, of_few_SC[:, :, None], jnp.float32(0)), axis=1)
    sums_SN = jnp.where(p_on_S[:, None], few_SN, sums_SN)
    return Found(
        tile_max_SN=tile_max_SN,
        max_S=max_S,
        floor_S=jnp.where(settled_S, few_S, found_S),
        sums_SN=jnp.where(settled_S[:, None], sums_SN, searched_SN),
        raw_S=total(read.all_against(max_S)),
    )


def _joined_max(top_max_SN: Array) -> Array:
    """Return the maxima of SUM_TILE tokens each, of those of TOP_TILE."""
    rows, tiles = top_max_SN.shape
    joined = SUM_TILE // TOP_TILE
    padded = jnp.pad(top_max_SN, ((0, 0), (0, -tiles % joined)), constant_values=NEG_INF)
    return jnp.max(padded.reshape(rows, -1, joined), axis=2)


def _search_rows(
    z_SV: Array,
    max_S: Array,
    temp_S: Array,
    floor_S: Array,
    top_k_S: Array,
    top_p_S: Array,
    settled_S: Array,
    found_S: Array,
    vocabulary: Vocabulary,
) -> Array:
    """Exact thresholds of the rows that the candidates did not settle, a few rows at a time;
    `found_S` elsewhere.
    """
    rows = z_SV.shape[0]
    unsettled = jnp.sum(~settled_S, dtype=jnp.int32)
    (order,) = jnp.nonzero(~settled_S, size=rows + SEARCH_ROWS, fill_value=rows)

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        start, found_S = state
        at_G = lax.dynamic_slice(order, (start,), (SEARCH_ROWS,))
        take = functools.partial(jnp.take, indices=at_G, axis=0, mode="clip")
        z_GV, max_G, temp_G, floor_G, top_k_G, top_p_G = map(
            take, (z_SV, max_S, temp_S, floor_S, top_k_S, top_p_S)
        )

        def largest(weight_GV: Array, target_G: Array, floor_G: Array) -> Array:
            """Return the largest v >= floor such that sum(weight where z >= v) >= target, by
            bisection over all floats.
            """

            def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
                low_G, high_G = bounds
                # The mean, rounded up, without overflow.
                middle_G = (low_G | high_G) - ((low_G ^ high_G) >> 1)
                reached_GV = z_GV >= _from_ordered(middle_G)[:, None]
                reached_G = jnp.sum(jnp.where(reached_GV, weight_GV, jnp.float32(0)), axis=1)
                enough_G = vocabulary.sum(reached_G) >= target_G
                return jnp.where(enough_G, middle_G, low_G), jnp.where(
                    enough_G, high_G, middle_G - 1
                )

            bounds = _to_ordered(jnp.minimum(floor_G, max_G)), _to_ordered(max_G)
            return _from_ordered(lax.while_loop(lambda b: jnp.any(b[0] < b[1]), halve, bounds)[0])

        # f32 counts are exact up to 2**24, more than any vocabulary.
        kth_G = lax.cond(
            jnp.any(top_k_G > 0),
            lambda: largest(jnp.ones_like(z_GV), top_k_G.astype(jnp.float32), floor_G),
            lambda: floor_G,
        )
        floor_G = jnp.where(top_k_G > 0, kth_G, floor_G)

        def nucleus() -> Array:
            p_GV = weights(z_GV, max_G, temp_G, floor_G)
            return largest(p_GV, top_p_G * vocabulary.sum(jnp.sum(p_GV, axis=1)), floor_G)

        pth_G = lax.cond(jnp.any(top_p_G < 1), nucleus, lambda: floor_G)
        floor_G = jnp.where(top_p_G < 1, pth_G, floor_G)
        return start + SEARCH_ROWS, found_S.at[at_G].set(floor_G, mode="drop")

    return lax.while_loop(lambda s: s[0] < unsettled, body, (jnp.int32(0), found_S))[1]


def _to_ordered(z: Array) -> Array:
    """f32 to int32 such that the integers order as the floats do."""
    bits = lax.bitcast_convert_type(z, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _from_ordered(key: Array) -> Array:
    return lax.bitcast_convert_type(jnp.where(key >= 0, key, key ^ 0x7FFFFFFF), jnp.float32)
