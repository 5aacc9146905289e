"""Prefill: two computing warpgroups take turns at the tensor cores.

They share KV tiles: they hold 64 queries of two query heads of one KV head or, where their number
is odd, 128 queries of one. Which queries comes from a table of ragged tiles, of `prepare`, that all
layers of a step share.

A tile in 8 bits would have to become one of 16 in shared memory, for which this ring leaves no
room: the kernel of triton.py serves such a pool.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim; C slots of a KV tile, Q rows of a product, A query tiles.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention import triton
from kernels_pallas.paged_attention.common import NEG, interpretation, rows_of
from kernels_pallas.paged_attention.interface import Options, Shapes, shapes_of
from kernels_pallas.paged_attention.mosaic_gpu.pieces import (
    PREFILL_C,
    SMEM_BYTES,
    WGMMA,
    Q,
    add_values,
    drain,
    fold,
    iota,
    launch,
    normalized,
    ring,
    scaled,
    scores,
    softmax_start,
    store_flat,
    stream_tiles,
    tiled_smem,
    unsupported,
    zero_unseen,
)
from kernels_pallas.paged_attention.pool_layout import ScaledPool

# Registers of a thread of the two computing warpgroups and of the copying one. 384 threads start
# with 168, and a thread block gets no more than it started with: 65,536 at 32 would wait for ever.
COMPUTING, COPYING = 240, 24


def prepare(
    query_start_loc_S1: Array,
    context_lens_S: Array,
    *,
    num_tokens: int,
    shapes: Shapes,
    window: int | None,
) -> Any:
    """Return the query tiles of a step, int32 [A, 5]: row, first packed token, queries, position of
    the first, context.

    The same for all layers. Tiles with the most work come first, so that the last ones to start are
    short. Padding tokens make tiles of context 0, which write zeros. A is static: surplus tiles
    have no queries. num_tokens is T. For a pool in 8 bits, the result of triton.prepare.
    """
    if shapes.scaled:
        return triton.prepare(
            query_start_loc_S1, context_lens_S, num_tokens=num_tokens, shapes=shapes, window=window
        )
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
    return table_A5[jnp.argsort(work_A, descending=True)].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="options")
def prefill(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    prepared: Any = None,
    *,
    options: Options,
    sinks_H: Array | None = None,
) -> Array:
    """Causal attention of packed queries, any number a row; see `reference.prefill`.

    A pool in 8 bits is served by triton.prefill. Raises NotImplementedError with the reason that
    `unsupported` gives.
    """
    if isinstance(pool, ScaledPool):
        rows = (block_table_SM, context_lens_S, query_start_loc_S1)
        return triton.prefill(q_THD, pool, layer, *rows, prepared, options=options, sinks_H=sinks_H)
    T, H, D = q_THD.shape
    shapes, window = shapes_of(q_THD, pool, block_table_SM, options), options.attention.window
    interpret = interpretation("Mosaic GPU attention", unsupported, shapes, options)
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, pool.dtype
    C, N = PREFILL_C if D < 256 else PREFILL_C // 2, pool.shape[0] // options.num_layers
    heads = _tile_heads(H, K)
    stages = (SMEM_BYTES - 2048 - 2 * Q * D * dtype.itemsize) // (C * 2 * D * dtype.itemsize)
    tiles = prepared
    if tiles is None:
        tiles = prepare(
            query_start_loc_S1, context_lens_S, num_tokens=T, shapes=shapes, window=window
        )

    def kernel(q_ref, pool_ref, table_ref, work_refs, layer_ref, o_ref, buffers, barriers):
        tiles_ref, *sinks = work_refs
        kv_sm, qo_sm = buffers
        full, empty, zeroed, turn = barriers
        group, tile, warpgroup = (lax.axis_index(name) for name in ("heads", "tile", "warpgroup"))
        row, token, queries, position, context = (tiles_ref[tile, i] for i in range(5))
        low = jnp.int32(0) if window is None else jnp.maximum(position - window + 1, 0)
        begin = lax.div(low, jnp.int32(C))
        end = pl.cdiv(jnp.minimum(position + queries, context), jnp.int32(C))

        def next_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when((queries > 0) & (warpgroup < 2))
        def _():
            plgpu.set_max_registers(COMPUTING, action="increase")
            q_sm, o_sm = (ref.at[warpgroup] for ref in qo_sm)
            head = group * heads + (warpgroup if heads == 2 else 0)
            skip = jnp.int32(0) if heads == 2 else warpgroup * Q
            # A warpgroup's rows are Q packed tokens that contain its queries, wherever the packed
            # tokens end.
            start = jnp.minimum(token + skip, q_ref.shape[0] - Q)
            offset = token + skip - start
            q_sm[...] = plgpu.load(q_ref.at[pl.ds(start, Q), head], layout=WGMMA, optimized=False)
            plgpu.commit_smem()

            pl.when(begin < end)(lambda: plgpu.barrier_wait(full.at[0]))
            pl.when(warpgroup == 1)(next_turn)

            def body(i, carry, masked):
                acc, m, total = carry
                stage = lax.rem(i - begin, jnp.int32(stages))
                if masked:
                    # Slots of the tile that hold something.
                    first, last = low - i * C, context - i * C
                    ragged = (first > 0) | (last < C)

                    @pl.when(ragged & (warpgroup == 0))
                    def _():
                        zero_unseen(kv_sm.at[stage], first, last)
                        plgpu.barrier_arrive(zeroed)

                    pl.when(ragged & (warpgroup == 1))(lambda: plgpu.barrier_wait(zeroed))
                s = scaled(scores(q_sm, kv_sm.at[stage], next_turn), options.attention)
                if masked:
                    key, query = (
                        iota((Q, C), 1),
                        iota((Q, C), 0) + (position + skip - offset - i * C),
                    )
                    seen = key <= query
                    if window is not None:
                        seen &= key > query - window
                    s = jnp.where(seen, s, NEG)
                p, acc, m, total = fold(s, acc, m, total, dtype)
                if not interpret:
                    p, acc, m, total = lax.optimization_barrier((p, acc, m, total))
                next_turn()

                def wait_for_next():
                    following = lax.rem(i + 1 - begin, jnp.int32(stages))
                    pl.when(i + 1 < end)(lambda: plgpu.barrier_wait(full.at[following]))

                acc = add_values(acc, p, kv_sm.at[stage], interpret, wait_for_next)
                plgpu.barrier_arrive(empty.at[stage])
                return acc, m, total

            state, masked_from = softmax_start(D, *(sinks_ref[head] for sinks_ref in sinks)), begin
            # Tiles before the queries' own need no mask; but a second loop takes registers, which
            # these cases lack.
            if window is None and options.attention.soft_cap is None and D < 256:
                masked_from = jnp.minimum(lax.div(position + 1, jnp.int32(C)), end)
                state = lax.fori_loop(
                    begin, masked_from, functools.partial(body, masked=False), state
                )
            acc, _, total = lax.fori_loop(
                masked_from, end, functools.partial(body, masked=True), state
            )
            pl.when(warpgroup == 0)(next_turn)

            store_flat(o_sm, normalized(acc, total).astype(dtype))
            plgpu.commit_smem()
            # A copy's size is static: the bits of the number of queries say which sizes add up to
            # it.
            rest = jnp.clip(queries - skip, 0, Q)
            for size in (1 << bit for bit in range(Q.bit_length())):

                @pl.when((rest & size) != 0)
                def _(size=size):
                    done = rest & (size - 1)
                    src, dst = (
                        o_sm.at[pl.ds(offset + done, size)],
                        pl.ds(start + offset + done, size),
                    )
                    plgpu.copy_smem_to_gmem(src, o_ref.at[dst, head])

            plgpu.wait_smem_to_gmem(0)

        @pl.when((queries > 0) & (warpgroup == 2))
        def _():
            plgpu.set_max_registers(COPYING, action="decrease")
            head, count = lax.div(group * heads, jnp.int32(H // K)), end - begin
            stream_tiles(
                pool_ref,
                layer_ref[0] * N,
                table_ref.at[row],
                context,
                head,
                begin,
                count,
                jnp.int32(0),
                kv_sm,
                full,
                empty,
            )
            drain(count, stages, empty)

    padding = max(0, Q - T)
    q_and_o = plgpu.RefUnion(tiled_smem((2, Q, D), dtype), plgpu.SMEM((2, Q, D), dtype))
    q = jnp.pad(q_THD.astype(dtype), ((0, padding), (0, 0), (0, 0)))
    o = launch(
        kernel,
        q,
        pool,
        block_table_SM,
        (tiles,) if sinks_H is None else (tiles, jnp.asarray(sinks_H, jnp.float32)),
        layer,
        interpret=interpret,
        warpgroups=3,
        grid={"tile": tiles.shape[0], "heads": H // heads},
        out_type=jax.ShapeDtypeStruct((T + padding, H, D), dtype),
        scratch_types=(
            (tiled_smem((stages, C, 2 * D), dtype), q_and_o),
            (*ring(stages, C // P, 2), plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)),
        ),
    )
    return o[:T].astype(q_THD.dtype)


def _tile_heads(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads of a prefill tile: its two warpgroups take one each, or, if
    the group is odd, share one.
    """
    return 1 if num_heads // num_kv_heads % 2 else 2
