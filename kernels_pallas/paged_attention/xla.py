"""Paged attention in plain XLA, tuned for CPU: online softmax over KV tiles that stay in cache.

Neither function gathers a whole context or pays for the block table's width, for padding rows or
for uneven lengths: the work is a list of tiles of about 64 tokens, and loops with dynamic trip
counts go through those that exist.

- decode: the list holds (row, KV tile) pairs, W of them an iteration whatever rows they belong to
  (as flash-decoding splits a context); partial results meet in their row's running maximum, sum and
  accumulator.
- prefill: query tiles, sorted by how many KV tiles they see; W query tiles at a time walk over
  their own KV tiles.

What XLA:CPU makes fast decides the form (each measured): gathers of long flat rows; barriers where
a fusion would compute an index anew for each element; for a single query, multiply-adds on vectors
instead of batched matmuls, which spend their time packing the context.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim, V width of a value, E what the pool holds of a head: D + V,
or D of latents; W work items an iteration, A query tiles, B tokens of a query tile, Q = B*G, C
tokens of a KV tile, U pool rows that make up a KV tile.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.paged_attention.common import NEG
from kernels_pallas.paged_attention.interface import (
    AttentionOptions,
    Options,
    Shapes,
    kv_heads_of,
    shapes_of,
    unknown_options,
)
from kernels_pallas.paged_attention.pool_layout import ScaledPool, plain_pool_layout

KV_TILE = 64  # tokens of context a work item
QUERY_TILE = 64  # tokens of a prefill query tile, at most
# Context read by an iteration of decode: it should be in L2 or L3 still when it is used.
DECODE_BYTES = 1 << 21
PREFILL_BYTES = 1 << 20  # f32 scores of an iteration of prefill

_barrier = lax.optimization_barrier
# Inside another jit this makes an unrolled model trace and lower the operation once, not once a
# layer.
_jit = functools.partial(jax.jit, static_argnames="options")

OPTIONS = ("scale", "soft_cap", "window", "value_dim", "sinks", "latent", "causal")

pool_layout = plain_pool_layout


def unsupported(shapes: Shapes, attention: AttentionOptions, device: Any) -> str | None:
    """Return why these options cannot run; all shapes can, on every device."""
    del shapes, device
    return unknown_options(attention, OPTIONS)


class _Tiles(NamedTuple):
    """The pool seen as rows of at most one KV tile."""

    rows: Array  # [L*N*parts, P/parts * K*E]
    scales: Array | None  # [L*N*parts, P/parts * 2K]
    size: int  # C
    units: int  # U: rows that make up a tile
    parts: int  # rows that a block was cut into
    first_block: Array | int  # of the layer


@_jit
def decode(
    q_SHD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    *,
    options: Options,
    sinks_H: Array | None = None,
) -> Array:
    """Attention of one query a row, the last token of its context; see `reference.decode`."""
    S, H, D = q_SHD.shape
    attention = options.attention
    K, V = kv_heads_of(pool, attention), attention.value_width(D)
    E, of_value = attention.places(D)
    tiles = _tiles(pool, layer, options.num_layers)
    C = tiles.size
    W = _clamp_pow2(DECODE_BYTES // (C * K * E * max(pool.dtype.itemsize, 2)), 4, 32)
    begin_S = (
        jnp.zeros_like(context_lens_S)
        if attention.window is None
        else jnp.maximum(context_lens_S - attention.window, 0)
    )
    first_tile_S = begin_S // C
    tiles_S = (context_lens_S + C - 1) // C - first_tile_S
    end_S = jnp.cumsum(tiles_S)
    # Place of a row among the rows that have work.
    rank_S = jnp.cumsum((tiles_S > 0).astype(jnp.int32)) - 1
    lane_W = jnp.arange(W)
    # Else once a context token.
    dtype, q_SHD = q_SHD.dtype, _barrier(q_SHD.astype(jnp.float32) * jnp.float32(attention.scale))

    def body(i, state):
        item_W = i * W + lane_W
        row_W = jnp.minimum(
            jnp.sum(end_S[None, :] <= item_W[:, None], axis=1, dtype=jnp.int32), S - 1
        )
        tile_W = first_tile_S[row_W] + item_W - (end_S - tiles_S)[row_W]
        # Slots before it are seen.
        stop_W = jnp.where(item_W < end_S[-1], context_lens_S[row_W] - tile_W * C, 0)
        start_W = begin_S[row_W] - tile_W * C  # slots from it on are seen
        rank_W = rank_S[row_W]
        first_rank = rank_W[0]
        ids = _pool_rows(tiles, block_table_SM, row_W, tile_W)
        ids, q_WHD, start_W, stop_W = _barrier((ids, q_SHD[row_W], start_W, stop_W))
        slot_C = jnp.arange(C)
        seen_WC = (slot_C[None, :] >= start_W[:, None]) & (slot_C[None, :] < stop_W[:, None])
        kv = _barrier(_take(tiles.rows, ids)).reshape(W, C, K, E)
        of_keys, of_values = _scales(tiles, ids, (W, C, K), H)
        scores, values = _decode_scores, _decode_values
        if attention.latent:  # one KV head for many query heads: products of matrices
            kv = _latents(kv, V, of_keys, of_values)
            scores, values, of_keys, of_values = _latent_scores, _latent_values, None, None
        s_WCH = _capped(_times(scores(q_WHD, kv), of_keys), attention.soft_cap)
        s_WCH = jnp.where(seen_WC[:, :, None], s_WCH, NEG)

        # Ranks of consecutive items differ by at most one, so the items of an iteration meet W
        # neighbouring ranks.
        owner_WW = ((rank_W - first_rank)[None, :] == lane_W[:, None]) & (stop_W > 0)[None, :]
        m0, total0, acc0 = (lax.dynamic_slice_in_dim(x, first_rank, W) for x in state)
        m = jnp.maximum(
            m0, jnp.max(jnp.where(owner_WW[:, :, None], jnp.max(s_WCH, axis=1)[None], NEG), axis=1)
        )
        m_WH, s_WCH = _barrier((m[jnp.minimum(rank_W - first_rank, W - 1)], s_WCH))
        p_WCH = jnp.exp(s_WCH - m_WH[:, None])
        alpha = jnp.exp(m0 - m)
        owner, weight_WCH = (
            owner_WW.astype(jnp.float32),
            _times(p_WCH, of_values, seen_WC[..., None]),
        )
        acc = jnp.dot(
            owner,
            values(weight_WCH, seen_WC, kv[..., of_value]).reshape(W, H * V),
            precision="highest",
        )
        total = total0 * alpha + jnp.dot(owner, jnp.sum(p_WCH, axis=1), precision="highest")
        new = (m, total, acc0 * alpha[:, :, None] + acc.reshape(W, H, V))
        return tuple(
            lax.dynamic_update_slice_in_dim(x, y, first_rank, 0)
            for x, y in zip(state, new, strict=True)
        )

    f32 = jnp.float32
    most_H, total_H = _start(sinks_H, H)
    state = (
        jnp.broadcast_to(most_H, (S + W, H)),
        jnp.broadcast_to(total_H, (S + W, H)),
        jnp.zeros((S + W, H, V), f32),
    )
    _, total, acc = lax.fori_loop(0, (end_S[-1] + W - 1) // W, body, state)
    at_S = jnp.maximum(rank_S, 0)
    o_SHV = acc[at_S] / jnp.maximum(total[at_S], 1e-30)[:, :, None]
    return jnp.where((tiles_S > 0)[:, None, None], o_SHV, 0.0).astype(dtype)


def _decode_scores(q_WHD: Array, kv_WCKE: Array) -> Array:
    """Return q (f32) . k in f32, [W, C, H]: vectors of 16 partial sums, then a tree."""
    W, C, K, _ = kv_WCKE.shape
    _, H, D = q_WHD.shape
    lanes = math.gcd(D, 16)
    q = q_WHD.reshape(W, 1, K, H // K, D)
    k = kv_WCKE[:, :, :, None, :D].astype(jnp.float32)
    x = q[..., :lanes] * k[..., :lanes]
    for i in range(lanes, D, lanes):
        x = x + q[..., i : i + lanes] * k[..., i : i + lanes]
    while lanes > 1:
        lanes //= 2
        x = x[..., :lanes] + x[..., lanes:]
    return x.reshape(W, C, H)


def _decode_values(p_WCH: Array, seen_WC: Array, v_WCKV: Array) -> Array:
    """Return p . v in f32, [W, K, G, V], a few slots a turn; unseen slots count as zero, whatever
    they hold.
    """
    W, C, K, V = v_WCKV.shape
    G = p_WCH.shape[2] // K
    unroll = next(u for u in (4, 3, 2, 1) if C % u == 0)

    def body(i, acc_WKGD):
        p, seen, values = (
            lax.dynamic_slice_in_dim(x, i * unroll, unroll, 1) for x in (p_WCH, seen_WC, v_WCKV)
        )
        p = p.reshape(W, unroll, K, G, 1)
        for u in range(unroll):
            v = values[:, u, :, None].astype(jnp.float32)
            v = jnp.where(seen[:, u, None, None, None], v, 0.0)
            acc_WKGD = acc_WKGD + p[:, u] * v
        return acc_WKGD

    return lax.fori_loop(0, C // unroll, body, jnp.zeros((W, K, G, V), jnp.float32))


def _latents(kv_WCKE: Array, V: int, of_latent: Array | None, of_rotated: Array | None) -> Array:
    """Return latents and rotated keys in f32, times their scales where the pool has scales.

    of_latent, of_rotated: [W, C, H], equal for all query heads.
    """
    kv = kv_WCKE.astype(jnp.float32)
    if of_latent is None or of_rotated is None:
        return kv
    parts = (kv[..., :V] * of_latent[..., :1, None], kv[..., V:] * of_rotated[..., :1, None])
    return jnp.concatenate(parts, axis=-1)


def _latent_scores(q_WHD: Array, kv_WCKE: Array) -> Array:
    """Return the same as `_decode_scores` for the one KV head of latents in f32."""
    return _einsum("whd,wcd->wch", q_WHD, kv_WCKE[:, :, 0])


def _latent_values(p_WCH: Array, seen_WC: Array, v_WCKV: Array) -> Array:
    """Return the same as `_decode_values` for them."""
    return _einsum("wch,wcv->whv", p_WCH, jnp.where(seen_WC[..., None], v_WCKV[:, :, 0], 0.0))


class _QueryTiles(NamedTuple):
    """B packed queries of one row each, [A]; most KV tiles first."""

    row: Array
    size: Array  # queries; 0 for none
    token: Array  # the first one's place among the packed tokens
    position: Array  # and its position in the row
    begin: Array  # first position that any query sees
    end: Array  # and the one after the last
    need: Array  # KV tiles


class Prepared(NamedTuple):
    """The query tiles of a step. at_T: each packed token's index among the tiles' tokens; padding
    has A*B, a row of zeros.
    """

    tiles: _QueryTiles
    at_T: Array


def prepare(
    query_start_loc_S1: Array,
    context_lens_S: Array,
    *,
    num_tokens: int,
    shapes: Shapes,
    window: int | None,
    causal: bool = True,
) -> Prepared:
    """Return the query tiles of a step, the same for all layers of a window. num_tokens is T."""
    S, T = context_lens_S.shape[0], num_tokens
    *_, C = _kv_tile(shapes.block_size)
    B, W = _query_tile_sizes(T, S, shapes.num_heads, C)
    A = -(-(T // B + S) // W) * W
    starts_S, lens_S = query_start_loc_S1[:-1], query_start_loc_S1[1:] - query_start_loc_S1[:-1]
    tiles_S = (lens_S + B - 1) // B
    end_S = jnp.cumsum(tiles_S)
    tile_A, token_T = jnp.arange(A), jnp.arange(T)
    row_A = jnp.minimum(jnp.sum(end_S[None, :] <= tile_A[:, None], axis=1, dtype=jnp.int32), S - 1)
    skip_A = (tile_A - (end_S - tiles_S)[row_A]) * B  # queries of the row before the tile
    count_A = jnp.where(tile_A < end_S[-1], jnp.clip(lens_S[row_A] - skip_A, 0, B), 0)
    position_A = (context_lens_S - lens_S)[row_A] + skip_A
    begin_A = jnp.zeros_like(position_A)
    if window is not None:
        begin_A = jnp.maximum(position_A - (window - 1), 0)
    stop_A = position_A + count_A
    if not causal:
        within_A = context_lens_S[row_A]
        stop_A = within_A if window is None else jnp.minimum(stop_A + window - 1, within_A)
    need_A = jnp.where(count_A > 0, (stop_A + C - 1) // C - begin_A // C, 0)
    order_A = jnp.argsort(need_A, descending=True)
    token_A = starts_S[row_A] + skip_A
    tiles = _QueryTiles(row_A, count_A, token_A, position_A, begin_A, stop_A, need_A)

    row_T = jnp.minimum(
        jnp.sum(query_start_loc_S1[None, 1:] <= token_T[:, None], axis=1, dtype=jnp.int32), S - 1
    )
    skip_T = token_T - starts_S[row_T]
    tile_T = jnp.minimum((end_S - tiles_S)[row_T] + skip_T // B, A - 1)
    at_T = jnp.argsort(order_A)[tile_T] * B + skip_T % B
    at_T = jnp.where(token_T < query_start_loc_S1[-1], at_T, A * B)
    return Prepared(_QueryTiles(*(x[order_A] for x in tiles)), at_T)


@_jit
def prefill(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    prepared: Prepared | None = None,
    *,
    options: Options,
    sinks_H: Array | None = None,
) -> Array:
    """Attention of packed queries, any number a row; see `reference.prefill`."""
    T, H, D = q_THD.shape
    attention, window = options.attention, options.attention.window
    K, V = kv_heads_of(pool, attention), attention.value_width(D)
    E, of_value = attention.places(D)
    dtype = q_THD.dtype if isinstance(pool, ScaledPool) else pool.dtype
    tiles = _tiles(pool, layer, options.num_layers)
    C = tiles.size
    B, W = _query_tile_sizes(T, context_lens_S.shape[0], H, C)
    if prepared is None:
        prepared = prepare(
            query_start_loc_S1,
            context_lens_S,
            num_tokens=T,
            shapes=shapes_of(q_THD, pool, block_table_SM, options),
            window=window,
            causal=attention.causal,
        )
    queries, at_T = prepared.tiles, prepared.at_T
    flat_q, kv_pool = q_THD.reshape(T, H * D), tiles.rows.reshape(-1, C // tiles.units, K, E)

    def group(g, out):
        mine = _QueryTiles(*(lax.dynamic_slice_in_dim(x, g * W, W) for x in queries))
        slot_B, slot_C = jnp.arange(B), jnp.arange(C)
        valid_WB = slot_B[None, :] < mine.size[:, None]
        token_WB = jnp.where(valid_WB, mine.token[:, None] + slot_B[None, :], 0)
        q = _barrier(_take(flat_q, token_WB.reshape(-1))).reshape(W, B, K, H // K * D)
        q = _barrier(q.transpose(0, 2, 1, 3).reshape(W * K, -1, D)).astype(dtype)
        pos_WB = jnp.where(valid_WB, mine.position[:, None] + slot_B[None, :], -1)
        pos_WQ = jnp.repeat(pos_WB, H // K, axis=1)

        def body(i, state):
            m0, total0, acc0 = state
            tile_W = mine.begin // C + i
            ids, start_W = _barrier(
                (_pool_rows(tiles, block_table_SM, mine.row, tile_W), tile_W * C)
            )
            pos_WC = start_W[:, None] + slot_C[None, :]
            kv = _take(kv_pool, ids).reshape(W, C, K, E)
            of_keys, of_values = _scales(tiles, ids, (W, C, K))
            if attention.latent and of_keys is not None and of_values is not None:
                columns = (x.reshape(W, C, K) for x in (of_keys, of_values))
                kv = _latents(kv, V, *columns)
                of_keys = of_values = None
            kv = kv.transpose(0, 2, 1, 3)  # [W, K, C, E].
            seen_WC = (pos_WC >= mine.begin[:, None]) & (pos_WC < mine.end[:, None])
            kv = kv.astype(dtype)
            v = jnp.where(seen_WC[:, None, :, None], kv[..., of_value], jnp.zeros((), dtype))
            k, v = _barrier(kv[..., :D].reshape(W * K, C, D)), _barrier(v.reshape(W * K, C, V))
            s = _times(_einsum("wqd,wcd->wqc", q, k).reshape(W, K, -1, C), of_keys)
            mask = seen_WC[:, None, :]
            if attention.causal:
                mask = pos_WC[:, None, :] <= pos_WQ[:, :, None]
            elif window is not None:
                mask &= pos_WC[:, None, :] < pos_WQ[:, :, None] + window
            if window is not None:
                mask &= pos_WC[:, None, :] > pos_WQ[:, :, None] - window
            s = jnp.where(mask[:, None], _capped(s * attention.scale, attention.soft_cap), NEG)
            m, s = _barrier((jnp.maximum(m0, jnp.max(s, axis=-1)), s))
            p = jnp.exp(s - m[..., None]).astype(dtype)
            alpha, weights = jnp.exp(m0 - m), _times(p, of_values, seen_WC[:, None, None])
            pv = _einsum("wqc,wcd->wqd", weights.reshape(W * K, -1, C), v).reshape(acc0.shape)
            return (
                m,
                total0 * alpha + jnp.sum(p.astype(jnp.float32), axis=-1),
                acc0 * alpha[..., None] + pv,
            )

        shape = (W, K, H // K * B)
        most, total = (jnp.tile(x_H.reshape(1, K, -1), (1, 1, B)) for x_H in _start(sinks_H, H))
        state = (
            jnp.broadcast_to(most, shape),
            jnp.broadcast_to(total, shape),
            jnp.zeros((*shape, V), jnp.float32),
        )
        _, total, acc = lax.fori_loop(0, mine.need[0], body, state)
        o = (
            (acc / jnp.maximum(total, 1e-30)[..., None])
            .astype(q_THD.dtype)
            .reshape(W, K, B, H // K * V)
        )
        o = _barrier(o.transpose(0, 2, 1, 3).reshape(W * B, H * V))
        return lax.dynamic_update_slice_in_dim(out, o, g * W * B, 0)

    groups = (jnp.sum((queries.need > 0).astype(jnp.int32)) + W - 1) // W
    A = queries.need.shape[0]
    out = lax.fori_loop(0, groups, group, jnp.zeros((A * B + 1, H * V), q_THD.dtype))
    return _take(out, _barrier(at_T)).reshape(T, H, V)


def _start(sinks_H: Array | None, H: int) -> tuple[Array, Array]:
    """Return the running maximum and sum of the softmax, before any score but the sinks."""
    if sinks_H is None:
        return jnp.full(H, NEG, jnp.float32), jnp.zeros(H, jnp.float32)
    return sinks_H.astype(jnp.float32), jnp.ones(H, jnp.float32)


def _einsum(form: str, x: Array, y: Array) -> Array:
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32, precision="highest")


def _tiles(pool: Any, layer: Array | int, num_layers: int) -> _Tiles:
    rows, P = pool.shape[:2]
    units, parts, size = _kv_tile(P)
    first_block = layer * (rows // num_layers)
    scales = None
    if isinstance(pool, ScaledPool):
        pool, scales = pool.values, jnp.reshape(pool.scales, (rows * parts, -1))
    return _Tiles(jnp.reshape(pool, (rows * parts, -1)), scales, size, units, parts, first_block)


def _scales(
    tiles: _Tiles, ids: Array, shape_WCK: tuple[int, int, int], heads: int | None = None
) -> tuple[Array | None, Array | None]:
    """Return the scales of keys and of values; (None, None) for a pool without scales.

    [W, C, heads] each, repeated for query heads, or [W, K, 1, C] if heads is None.
    """
    if tiles.scales is None:
        return None, None
    x = _barrier(_take(tiles.scales, ids)).reshape(*shape_WCK, 2)
    x = jnp.repeat(x, heads // shape_WCK[2], 2) if heads else x.swapaxes(1, 2)[:, :, None]
    return x[..., 0], x[..., 1]


def _times(x: Array, by: Array | None, seen: Array | bool = True) -> Array:
    """Return x times scales if there are any; zero in unseen slots, whose scales may be NaN."""
    return x if by is None else jnp.where(seen, x.astype(jnp.float32) * by, 0.0).astype(x.dtype)


def _kv_tile(P: int) -> tuple[int, int, int]:
    """Return U, the number of parts that a block is cut into, and C."""
    parts = P // KV_TILE if P % KV_TILE == 0 else 1
    units = max(1, KV_TILE // P)
    return units, parts, units * P // parts


def _query_tile_sizes(T: int, S: int, H: int, C: int) -> tuple[int, int]:
    """Return B and W of prefill."""
    B = _clamp_pow2(T // S, 8, QUERY_TILE)
    return B, _clamp_pow2(PREFILL_BYTES // (H * B * C * 4), 1, 16)


def _pool_rows(tiles: _Tiles, block_table_SM: Array, row_W: Array, tile_W: Array) -> Array:
    """Return the rows [W*U] of the pool that hold KV tile `tile_W` of `row_W`; past the table's
    end, any valid row.
    """
    unit_WU = tile_W[:, None] * tiles.units + jnp.arange(tiles.units)[None, :]
    block_WU = jnp.minimum(unit_WU // tiles.parts, block_table_SM.shape[1] - 1)
    id_WU = tiles.first_block + block_table_SM[row_W[:, None], block_WU]
    return (id_WU * tiles.parts + unit_WU % tiles.parts).reshape(-1)


def _take(x: Array, ids: Array) -> Array:
    return x.at[ids].get(mode="promise_in_bounds")


def _capped(s: Array, soft_cap: float | None) -> Array:
    return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)


def _clamp_pow2(n: int, low: int, high: int) -> int:
    """Return the largest power of two up to n, within [low, high] (both powers of two)."""
    return min(max(1 << max(n, 1).bit_length() - 1, low), high)
