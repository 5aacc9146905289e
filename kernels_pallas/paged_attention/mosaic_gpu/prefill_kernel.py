"""Prefill: two computing warpgroups take turns at the tensor cores.

They share KV tiles: they hold 64 queries of two query heads of one KV head or, where their number
is odd, 128 queries of one. Which queries comes from a table of ragged tiles, of `prepare`, that all
layers of a step share.

As many thread blocks as the card holds go through the tiles, the longest first, as those of decode
go through their items: how many tiles a step has depends on its rows, and a grid would have to
be as large as the most that its padded shape can have. While one computes the end of a tile, its
copies are those of the next.

Keys and values in 8 bits become 16 in shared memory as in decode, by the warpgroup that copies
them. Smaller tiles leave it room and registers.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim; C slots of a KV tile, Q rows of a product, A query tiles.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.common import NEG, interpretation, multiprocessors, rows_of
from kernels_pallas.paged_attention.interface import Options, Shapes, shapes_of
from kernels_pallas.paged_attention.mosaic_gpu.pieces import (
    DECODE_C,
    PREFILL_C,
    SMEM_BYTES,
    WGMMA,
    WIDENED,
    Q,
    Ring,
    add_values,
    along_slots,
    copy_and_widen,
    drain,
    fold,
    iota,
    launch,
    normalized,
    rings_in_8_bits,
    scaled,
    scores,
    softmax_start,
    store_flat,
    stream_tiles,
    tiled_smem,
    turns_of,
    unsupported,
    work_item,
    zero_unseen,
)
from kernels_pallas.paged_attention.pool_layout import ScaledPool

# Registers of a thread of the two computing warpgroups and of the copying one. 384 threads start
# with 168, and a thread block gets no more than it started with: 65,536 at 32 would wait for ever.
COMPUTING, COPYING = 240, 24
# The same in 8 bits, where the one that copies widens.
COMPUTING_IN_8_BITS, WIDENING = 224, 56


class Tiles(NamedTuple):
    """The query tiles of a step.

    table_A5 int32: row, first packed token, queries, position of the first, context. count_1: how
    many of them there are; those after them have no queries. stop_A int32: the position after the
    last one that any query of a tile sees; None where no query sees what comes after it.
    """

    table_A5: Array
    count_1: Array
    stop_A: Array | None = None


def prepare(
    query_start_loc_S1: Array,
    context_lens_S: Array,
    *,
    num_tokens: int,
    shapes: Shapes,
    window: int | None,
    ends_T: Array | None = None,
) -> Tiles:
    """Return the Tiles of a step, the same for all layers.

    Those with the most work come first, so that the last ones to start are short. Padding tokens
    make tiles of context 0, which write zeros. num_tokens is T. ends_T: as of `prefill`.
    """
    del window
    S, B = context_lens_S.shape[0], 2 * Q // _tile_heads(shapes.num_heads, shapes.num_kv_heads)
    starts_R = query_start_loc_S1  # R = S + 1 rows: padding is the last
    lens_R = jnp.append(starts_R[1:], jnp.full((1,), num_tokens, starts_R.dtype)) - starts_R
    contexts_R = jnp.append(context_lens_S, jnp.zeros((1,), context_lens_S.dtype))
    row_A, nth_A = rows_of(
        (lens_R + B - 1) // B, jnp.arange(num_tokens // B + S + 1, dtype=jnp.int32)
    )
    skip_A = nth_A * B  # queries of the row before the tile
    count_A = jnp.clip(lens_R[row_A] - skip_A, 0, B)
    position_A = jnp.maximum((contexts_R - lens_R)[row_A] + skip_A, 0)
    table_A5 = jnp.stack(
        [row_A, starts_R[row_A] + skip_A, count_A, position_A, contexts_R[row_A]], axis=1
    )
    work_A = jnp.minimum(position_A + count_A, contexts_R[row_A])
    if ends_T is not None:
        lane_1B = jnp.arange(B, dtype=jnp.int32)[None, :]
        token_AB = jnp.minimum((starts_R[row_A] + skip_A)[:, None] + lane_1B, num_tokens - 1)
        ends_AB = jnp.where(lane_1B < count_A[:, None], ends_T[token_AB], 0)
        work_A = jnp.maximum(work_A, jnp.minimum(jnp.max(ends_AB, axis=1), contexts_R[row_A]))
    order_A = jnp.argsort(jnp.where(count_A > 0, work_A, -1), descending=True)
    count_1 = jnp.sum(count_A > 0, dtype=jnp.int32, keepdims=True)
    stop_A = None if ends_T is None else work_A[order_A].astype(jnp.int32)
    return Tiles(table_A5[order_A].astype(jnp.int32), count_1, stop_A)


@functools.partial(jax.jit, static_argnames=("options", "thread_blocks"))
def prefill(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    prepared: Tiles | None = None,
    *,
    options: Options,
    sinks_H: Array | None = None,
    ends_T: Array | None = None,
    thread_blocks: int | None = None,
) -> Array:
    """Causal attention of packed queries, any number a row; see `reference.prefill`.

    thread_blocks: how many share the tiles; None chooses. Raises NotImplementedError with the
    reason that `unsupported` gives.
    """
    T, H, D = q_THD.shape
    shapes, window = shapes_of(q_THD, pool, block_table_SM, options), options.attention.window
    interpret = interpretation("Mosaic GPU attention", unsupported, shapes, options)
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, jnp.dtype(shapes.dtype)
    in_8_bits = isinstance(pool, ScaledPool)
    assert not in_8_bits or pool.slots_last, "as pool_layout has them"
    C, N = PREFILL_C if D < 256 else PREFILL_C // 2, pool.shape[0] // options.num_layers
    C = DECODE_C if in_8_bits else C
    heads = _tile_heads(H, K)
    room = SMEM_BYTES - 2048 - 2 * Q * D * dtype.itemsize
    if in_8_bits:
        rings = rings_in_8_bits(room, C, D, pool.dtype, dtype, readers=2)
    else:
        stages, shape = room // (C * 2 * D * dtype.itemsize), (C, 2 * D)
        rings = Ring.types(stages, shape, dtype, arrivals=C // P, readers=2), None
    tiles = prepared
    if tiles is None:
        tiles = prepare(
            query_start_loc_S1,
            context_lens_S,
            num_tokens=T,
            shapes=shapes,
            window=window,
            ends_T=ends_T,
        )
    assert ends_T is None or tiles.stop_A is not None, "prepared for queries that see ahead"
    parts = H // heads  # of a tile: pairs of heads, or heads
    blocks = min(thread_blocks or multiprocessors(), tiles.table_A5.shape[0] * parts)

    def kernel(q_ref, pool_ref, table_ref, work_refs, layer_ref, o_ref, buffers, barriers):
        (tiles_ref, count_ref, sinks_ref, ahead), (ring, copied, qo_sm) = work_refs, buffers
        pool_ref, scales_ref = pool_ref if in_8_bits else (pool_ref, None)
        stages, (zeroed, turn_barrier) = ring.tiles.shape[0], barriers
        block, warpgroup = (lax.axis_index(name) for name in ("block", "warpgroup"))
        items = count_ref[0] * parts
        my_turns = turns_of(block, items, blocks)

        def tile_of(turn):
            """Return a turn's row, first packed token, queries, position of the first and context,
            its first head, the first slot that it sees, and its first KV tile and last + 1.
            """
            tile, part = tile_and_part(work_item(turn, block, blocks), parts)
            row, token, queries, position, context = (tiles_ref[tile, i] for i in range(5))
            low = jnp.int32(0) if window is None else jnp.maximum(position - window + 1, 0)
            begin = lax.div(low, jnp.int32(C))
            stop = jnp.minimum(position + queries, context) if ahead is None else ahead[0][tile]
            end = pl.cdiv(stop, jnp.int32(C))
            return row, token, queries, position, context, part * heads, low, begin, end

        # At a turn one warpgroup is a tile ahead, for which a single stage has no room.
        take_turns = stages > 1

        def meet():
            plgpu.barrier_arrive(turn_barrier)
            plgpu.barrier_wait(turn_barrier)

        def next_turn():
            if take_turns:
                meet()

        @pl.when(warpgroup < 2)
        def _():
            registers = COMPUTING_IN_8_BITS if in_8_bits else COMPUTING
            plgpu.set_max_registers(registers, action="increase")
            q_sm, o_sm = (ref.at[warpgroup] for ref in qo_sm)
            skip = jnp.int32(0) if heads == 2 else warpgroup * Q

            def item(turn, done):
                """Compute one tile. done: KV tiles of the turns before."""
                _, token, queries, position, context, head, low, begin, end = tile_of(turn)
                head += warpgroup if heads == 2 else 0
                # A warpgroup's rows are Q packed tokens that contain its queries, wherever the
                # packed tokens end.
                start = jnp.minimum(token + skip, q_ref.shape[0] - Q)
                offset = token + skip - start
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's results
                if interpret:  # it takes the warpgroups' halves of these buffers for one
                    meet()
                q_sm[...] = plgpu.load(
                    q_ref.at[pl.ds(start, Q), head], layout=WGMMA, optimized=False
                )
                plgpu.commit_smem()

                last_Q = None  # that a query sees, where that may come after it
                if ahead is not None:
                    layout = WGMMA.reduce(1)
                    ends_Q = plgpu.load(
                        ahead[1].at[pl.ds(start, Q)], layout=layout, optimized=False
                    )
                    of_row = plgpu.broadcasted_iota(jnp.int32, (Q,), 0, layout=layout)
                    last_Q = jnp.maximum(of_row + (position + skip - offset), ends_Q - 1)

                def stage_of(i):
                    return lax.rem(done + i - begin, jnp.int32(stages))

                def wait_for(i):
                    pl.when(i < end)(lambda: plgpu.barrier_wait(ring.full.at[stage_of(i)]))

                if take_turns:
                    wait_for(begin)
                pl.when(warpgroup == 1)(next_turn)

                def body(i, carry, masked):
                    acc, m, total = carry
                    stage = stage_of(i)
                    tile = ring.tiles.at[stage]
                    if not take_turns:
                        wait_for(i)
                    if masked and not in_8_bits:
                        # Slots of the tile that hold something.
                        first, last = low - i * C, context - i * C
                        ragged = (first > 0) | (last < C)

                        @pl.when(ragged & (warpgroup == 0))
                        def _():
                            zero_unseen(tile, first, last)
                            plgpu.barrier_arrive(zeroed)

                        pl.when(ragged & (warpgroup == 1))(lambda: plgpu.barrier_wait(zeroed))
                    # ptxas would compute the descriptors of all parts of q_sm before the loop, and
                    # keep them in registers that lack, or in memory.
                    here = warpgroup if interpret else lax.optimization_barrier(warpgroup)
                    s = scores(qo_sm[0].at[here], tile, next_turn)
                    if in_8_bits:
                        s *= along_slots(ring.scales.at[stage, 0])
                    s = scaled(s, options.attention)
                    if masked:
                        key, query = (
                            iota((Q, C), 1),
                            iota((Q, C), 0) + (position + skip - offset - i * C),
                        )
                        seen = key <= query
                        if last_Q is not None:
                            seen = key <= lax.broadcast_in_dim(last_Q - i * C, (Q, C), [0])
                        if window is not None:
                            seen &= key > query - window
                        s = jnp.where(seen, s, NEG)
                    of_values = along_slots(ring.scales.at[stage, 1]) if in_8_bits else None
                    p, acc, m, total = fold(s, acc, m, total, dtype, of_values)
                    if not interpret:
                        p, acc, m, total = lax.optimization_barrier((p, acc, m, total))
                    next_turn()

                    def wait_for_next():
                        if take_turns:
                            wait_for(i + 1)

                    acc = add_values(acc, p, tile, interpret, wait_for_next)
                    plgpu.barrier_arrive(ring.empty.at[stage])
                    return acc, m, total

                state: Any = softmax_start(D, None if sinks_ref is None else sinks_ref[head])
                masked_from = begin
                # Tiles before the queries' own need no mask; but a second loop takes registers,
                # which these cases lack.
                if window is None and options.attention.soft_cap is None and D < 256:
                    masked_from = jnp.minimum(lax.div(position + 1, jnp.int32(C)), end)
                    state = lax.fori_loop(
                        begin, masked_from, functools.partial(body, masked=False), state
                    )
                acc, _, total = lax.fori_loop(
                    masked_from, end, functools.partial(body, masked=True), state
                )
                pl.when(warpgroup == 0)(next_turn)

                if interpret and not take_turns:  # as above: the other's queries are there by now
                    meet()
                store_flat(o_sm, normalized(acc, total).astype(dtype))
                plgpu.commit_smem()
                # A copy's size is static: the bits of the number of queries say which sizes add up
                # to it.
                rest = jnp.clip(queries - skip, 0, Q)
                for size in (1 << bit for bit in range(Q.bit_length())):

                    @pl.when((rest & size) != 0)
                    def _(size=size):
                        sent = offset + (rest & (size - 1))
                        to = o_ref.at[pl.ds(start + sent, size), head]
                        plgpu.copy_smem_to_gmem(o_sm.at[pl.ds(sent, size)], to)

                return done + end - begin

            lax.fori_loop(0, my_turns, item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def read_of(turn):
            row, _, _, _, context, head, low, begin, end = tile_of(turn)
            return row, lax.div(head, jnp.int32(H // K)), low, context, begin, end - begin

        def copy_tiles():
            """Copy the KV tiles of all turns; return how many there are."""

            def item(turn, done):
                row, kv_head, _, context, first, count = read_of(turn)
                source = (pool_ref, layer_ref[0] * N, table_ref.at[row], context)
                stream_tiles(*source, kv_head, first, count, done, ring)
                return done + count

            return lax.fori_loop(0, my_turns, item, jnp.int32(0))

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(WIDENING if in_8_bits else COPYING, action="decrease")
            if in_8_bits:
                source = (pool_ref, layer_ref[0] * N, table_ref, scales_ref)
                done = copy_and_widen(my_turns, read_of, *source, copied, ring, WIDENED)
            else:
                done = copy_tiles()
            drain(done, stages, ring.empty)

    padding = max(0, Q - T)
    q_and_o = plgpu.RefUnion(tiled_smem((2, Q, D), dtype), plgpu.SMEM((2, Q, D), dtype))
    q = jnp.pad(q_THD.astype(dtype), ((0, padding), (0, 0), (0, 0)))
    ahead = None
    if ends_T is not None:
        ahead = tiles.stop_A, jnp.pad(jnp.asarray(ends_T, jnp.int32), (0, padding))
    o = launch(
        kernel,
        q,
        pool,
        block_table_SM,
        (
            *(tiles.table_A5, tiles.count_1),
            None if sinks_H is None else jnp.asarray(sinks_H, jnp.float32),
            ahead,
        ),
        layer,
        interpret=interpret,
        warpgroups=3,
        grid={"block": blocks},
        out_type=jax.ShapeDtypeStruct((T + padding, H, D), dtype),
        scratch_types=(
            (*rings, q_and_o),
            (plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)),
        ),
    )
    return o[:T].astype(q_THD.dtype)


def _tile_heads(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads of a prefill tile: its two warpgroups take one each, or, if
    the group is odd, share one.
    """
    return 1 if num_heads // num_kv_heads % 2 else 2


def tile_and_part(item, parts: int):
    """Return an item's tile, and which part of its heads: those of a tile are side by side, since
    they read the same tokens' keys and values.
    """
    return lax.div(item, jnp.int32(parts)), lax.rem(item, jnp.int32(parts))
