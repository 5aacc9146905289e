"""The kernel: online softmax of an item's queries over the KV tiles that they see.

Shapes: S rows, M blocks a row, L layers, N pool blocks, P block size, K KV heads, G query heads of
each; Y, X the last two dimensions of the pool; A items, B tokens of a query tile, Q = B*G, U blocks
of a KV tile, C = U*P tokens, W 32-bit words of a token in each lane; Z scales of a token; XO the
width of o.
"""

import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.e4m3 import e4m3_to_f32
from kernels_pallas.paged_attention.common import NEG

# Scores of the heads that are computed together: the matmuls of one hide the reductions of another.
SCORES = 1 << 17

_i32 = jnp.int32


def kernel(
    base,
    row_A,
    tile_A,
    context_S,
    start_S1,
    q,
    pool,
    table,
    *refs,
    B: int,
    P: int,
    W: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    packed: bool,
    kv_dtype: str | None,
    in_place: bool,
    one_row: bool,
    latent: int | None,
    sees_ahead: bool,
) -> None:
    """base [2]: the layer's first block, number of items; where queries see ahead, [2 + A], with
    the position up to which each item's queries do. q [K, Q, X], o [K, Q, XO]. pool [L*N, ...] and
    table [S, M/128, 128] in HBM. latent: the width of one, where a token's row is a latent and a
    rotated key: both together are its key, and the latent is its value. refs: in 8 bits (kv_dtype)
    scales [L*N, Z, P or more] in HBM; sinks [K, Q, 128], where there are any; ends [Q, 128], of
    each query in all lanes, where queries see ahead; o and the scratch.

    Scratch: blocks [2, U, ...], the two buffers, and those of scales, where there are any. words
    [X/128, C*W, 128], a KV tile as 32-bit words, or in f32 what 8 bits say; there are none where a
    tile is read as words where it lies (in_place), which no interpreter knows, or as it is where a
    token is one row of bf16 (one_row). top and total [K, Q, 128], each value in all lanes. acc [K,
    Q, XO]. tables [2, M/128, 128]: of this item's row, and of the next one's. turn [1], KV tiles
    met so far, whose parity says which buffer is whose. arrived, fetched: a semaphore a buffer, a
    table.
    """
    *more, top, total, acc, tables, turn, arrived, fetched = refs
    words: Any = None if in_place or one_row else more.pop()
    blocks_of_scales: Any = None
    if kv_dtype is None:
        *sinks, o, blocks = more
        copied = ((pool, blocks),)
    else:
        scales, *sinks, o, blocks, blocks_of_scales = more
        copied = ((pool, blocks), (scales, blocks_of_scales))
    ends = sinks.pop() if sees_ahead else None
    K, Q, X = q.shape
    U, G, narrow = blocks.shape[1], Q // B, blocks.dtype == jnp.bfloat16
    C = U * P
    item, items = pl.program_id(0), base[1]

    def span(item):
        """Return an item's row, the difference of a packed token's position and index, and the
        first and last + 1 of the positions that it sees.
        """
        row, first = row_A[item], tile_A[item] * B
        shift, begin = context_S[row] - start_S1[row + 1], 0
        if sliding_window is not None:
            begin = jnp.maximum(jnp.maximum(first, start_S1[row]) + shift - (sliding_window - 1), 0)
        end = jnp.minimum(first + B, start_S1[row + 1]) + shift
        if sees_ahead:
            end = jnp.maximum(end, base[2 + item])
        return row, shift, begin, end

    def fetch(item, act: str) -> None:
        """Start, or await, the copy of a row's block table: those of all rows would not fit."""
        slot = lax.rem(item, 2)
        source = table.at[row_A[item]]
        getattr(pltpu.make_async_copy(source, tables.at[slot], fetched.at[slot]), act)()

    def copy(item, j, slot, act: str) -> None:
        """Start, or await, the copies of the blocks of KV tile j that an item sees."""
        _, _, begin, end = span(item)

        def block(u, _):
            block_id = base[0] + tables[lax.rem(item, 2), lax.div(u, 128), lax.rem(u, 128)]
            for source, buffer in copied:
                part = buffer.at[slot, u - j * U]
                getattr(pltpu.make_async_copy(source.at[block_id], part, arrived.at[slot]), act)()

        first, stop = (
            jnp.maximum(lax.div(begin, P), j * U),
            jnp.minimum(lax.div(end + P - 1, P), (j + 1) * U),
        )
        lax.fori_loop(first, stop, block, None)

    def words_of(slot) -> list[Any]:
        """Return the words of a buffer's KV tile, [C*W, 128] for each 128 lanes."""
        if not in_place:
            return [words.at[i] for i in range(X // 128)]
        buffer = blocks.at[slot]
        return [(buffer.bitcast(jnp.uint32) if narrow else buffer).reshape(C * W, X)]

    def copy_words(slot) -> None:
        """Copy a buffer to `words`."""
        flat = blocks[slot].reshape(-1, X)
        flat = pltpu.bitcast(flat, jnp.uint32) if narrow else flat
        for i in range(X // 128):
            words[i] = flat[:, i * 128 : (i + 1) * 128]

    def clear_unseen(slot, first, begin, end) -> None:
        """Write zeros over a tile's words of tokens outside begin to end. first: its first token.

        0 * NaN is NaN, and slots that no query sees, or no copy reached, may hold any bits.
        """
        if one_row:  # two tokens share a word
            two = pltpu.bitcast(blocks[slot].reshape(C, X), jnp.uint32)
            token = 2 * lax.broadcasted_iota(_i32, two.shape, 0) + first
            kept = jnp.zeros_like(two)
            for t, half in ((token, 0x0000FFFF), (token + 1, 0xFFFF0000)):
                kept |= jnp.where((t >= begin) & (t < end), jnp.uint32(half), jnp.uint32(0))
            blocks[slot] = pltpu.bitcast(two & kept, blocks.dtype).reshape(U, P, X)
            return
        word = lax.broadcasted_iota(_i32, (C * W, 128), 0) + first * W
        is_seen = (word >= begin * W) & (word < end * W)
        for part in words_of(slot):
            part[...] = jnp.where(is_seen, part[...], jnp.zeros_like(part[...]))

    def pool_row(slot, y: int) -> Array:
        """Return row y of each token of a buffer's tile, [C, X].

        Two rows of bf16 share a word, and a bf16 is the upper half of an f32.
        """
        if one_row:
            return blocks[slot].reshape(C, X)
        strided = pl.ds(y // 2 if narrow else y, C, stride=W)
        w = jnp.concatenate([part[strided, :] for part in words_of(slot)], axis=1)
        w = (w & jnp.uint32(0xFFFF0000) if y % 2 else w << 16) if narrow else w
        return pltpu.bitcast(w, jnp.float32).astype(q.dtype)

    def widen(slot) -> None:
        """Decode a buffer of 8-bit numbers into `words`; every result is finite."""

        def block(u, _):
            x = blocks[slot, u].reshape(-1, X)
            if kv_dtype == "int8":
                x = x.astype(_i32).astype(jnp.float32)
            else:
                x = e4m3_to_f32(pltpu.bitcast(x, jnp.int8).astype(_i32), pltpu.bitcast)
            rows = pl.ds(pl.multiple_of(u * (P * W), P * W), P * W)
            for i in range(X // 128):
                words[i, rows, :] = x[:, i * 128 : (i + 1) * 128]

        lax.fori_loop(0, U, block, None)

    def scales_of(slot, first, begin, end) -> Array:
        """Return the scales of a buffer's tokens, [Z, C], zero if unseen. first: first token."""
        together, tiles = max(1, 128 // P), []
        for u in range(0, U, together):  # blocks that share lanes
            x = blocks_of_scales[slot, u]
            lane = lax.broadcasted_iota(_i32, x.shape, 1)
            for i in range(1, min(together, U - u)):
                moved = pltpu.roll(blocks_of_scales[slot, u + i], i * P, 1)
                x = jnp.where(lane >= i * P, moved, x)
            tiles.append(x)
        x = jnp.concatenate(tiles, axis=1)
        x = x if x.shape[1] == C else x[:, :C]
        token = lax.broadcasted_iota(_i32, x.shape, 1) + first
        return jnp.where((token >= begin) & (token < end), x, jnp.zeros_like(x))

    def dot(x, y, axis_of_y: int) -> Array:
        precision = None if q.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
        form = (((1,), (axis_of_y,)), ((), ()))
        return lax.dot_general(x, y, form, precision=precision, preferred_element_type=jnp.float32)

    def scores(h: int, k_CX: Array, by: Array | None) -> Array:
        """Return the scores of a head, before soft_cap. by: scales [Z, C], in 8 bits."""
        if by is None:
            return dot(q[h], k_CX, 1) * scale
        if latent is None:
            return dot(q[h], k_CX, 1) * (by[2 * h : 2 * h + 1] * scale)
        parts = (q[h][:, :latent], k_CX[:, :latent]), (q[h][:, latent:], k_CX[:, latent:])
        s_QC = [dot(*part, 1) * (by[i : i + 1] * scale) for i, part in enumerate(parts)]
        return s_QC[0] + s_QC[1]

    @pl.when(item < items)
    def _():
        tile = tile_A[item]
        row, shift, begin, end = span(item)
        last = lax.div(end - 1, C)

        @pl.when(item == 0)
        def _():
            turn[0] = 0
            fetch(0, "start")
            fetch(0, "wait")
            copy(0, lax.div(begin, C), 0, "start")

        @pl.when(item + 1 < items)
        def _():
            fetch(item + 1, "start")

        @pl.when((item == 0) | (tile_A[jnp.maximum(item - 1, 0)] != tile))
        def _():
            # Above NEG: what is masked weighs nothing even where all is.
            top[...] = sinks[0][...] if sinks else jnp.full_like(top, NEG / 2)
            total[...] = jnp.ones_like(total) if sinks else jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        def kv_tile(j, _):
            slot = lax.rem(turn[0], 2)

            @pl.when((j == last) & (item + 1 < items))
            def _():
                fetch(item + 1, "wait")

            @pl.when((j < last) | (item + 1 < items))
            def _():
                following = jnp.where(j < last, item, item + 1)
                copy(
                    following,
                    jnp.where(j < last, j + 1, lax.div(span(following)[2], C)),
                    1 - slot,
                    "start",
                )

            copy(item, j, slot, "wait")
            by = None
            if kv_dtype is not None:
                widen(slot)
                by = scales_of(slot, j * C, begin, end)
            else:
                if not in_place and not one_row:
                    copy_words(slot)
                # Most tiles are seen whole.
                is_partly_seen = (begin > j * C) | (end < (j + 1) * C)
                pl.when(is_partly_seen)(lambda: clear_unseen(slot, j * C, begin, end))

            # Row r of the query tile is its token r // G, and x <= r // G where x * G <= r.
            r = lax.broadcasted_iota(_i32, (Q, C), 0)
            ahead = (lax.broadcasted_iota(_i32, (Q, C), 1) + (j * C - tile * B - shift)) * G
            is_seen = ahead <= r
            if ends is not None:
                is_seen |= lax.broadcasted_iota(_i32, (Q, C), 1) < ends[...][:, :1] - j * C
            mask = (
                is_seen
                & (r >= (start_S1[row] - tile * B) * G)
                & (r < (start_S1[row + 1] - tile * B) * G)
            )
            if sliding_window is not None:
                mask &= ahead + sliding_window * G > r
            for some in itertools.batched(range(K), max(1, SCORES // (Q * C))):
                rows = [(h, h) if packed else (2 * h, 2 * h + 1) for h in some]
                kv = [[pool_row(slot, y) for y in pair] for pair in rows]
                s_QC = [scores(h, k_CX, by) for h, (k_CX, _) in zip(some, kv, strict=True)]
                s_QC = (
                    s_QC if soft_cap is None else [soft_cap * jnp.tanh(s / soft_cap) for s in s_QC]
                )
                s_QC = [jnp.where(mask, s, NEG) for s in s_QC]
                old = [top[h] for h in some]
                new = [
                    jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
                    for m, s in zip(old, s_QC, strict=True)
                ]
                p_QC = [jnp.exp(s - m[:, :1]) for m, s in zip(new, s_QC, strict=True)]
                if by is None:
                    weights = p_QC = [p.astype(q.dtype) for p in p_QC]
                else:
                    by_values = [by[i : i + 1] for i in (2 * h + (latent is None) for h in some)]
                    weights = [
                        (p * x).astype(q.dtype) for p, x in zip(p_QC, by_values, strict=True)
                    ]
                pv = [
                    dot(p, v_CX[:, : acc.shape[2]], 0)
                    for p, (_, v_CX) in zip(weights, kv, strict=True)
                ]
                for h, m0, m, p, o_QX in zip(some, old, new, p_QC, pv, strict=True):
                    top[h], alpha = m, jnp.exp(m0 - m)
                    total[h] = alpha * total[h] + jnp.sum(
                        p.astype(jnp.float32), axis=1, keepdims=True
                    )
                    acc[h] = alpha[:, :1] * acc[h] + o_QX
            turn[0] += 1

        lax.fori_loop(lax.div(begin, C), last + 1, kv_tile, None)

        @pl.when((item + 1 == items) | (tile_A[jnp.minimum(item + 1, items - 1)] != tile))
        def _():
            for h in range(K):
                o[h] = (acc[h] / jnp.maximum(total[h][:, :1], 1e-30)).astype(o.dtype)
