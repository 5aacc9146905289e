"""Decode: the G query heads of a KV head are rows of one 64-row product.

The work is a list of items, one a KV head of a part of a row's context, heads fastest, so that what
lies side by side in memory is read at one time, and the longest rows first. As many thread blocks
as the card holds go through the list, each its share: while one computes the end of an item, its
copies are those of the next, so that short contexts too are read without a pause. (At D = 256
shared memory has no room for that: there each item is a thread block.)

Keys and values in 8 bits are copied as they lie, with their scales; the warpgroup that copies makes
tiles of 16 bits of them in shared memory, from where alone a wgmma takes keys and values, while the
computing one is at the tile before. Scores and weights are what scales multiply.

A context is split over several items where rows are too few to fill the card; the parts meet in a
combine outside. How many is static: it follows from the shapes.

Shapes: S rows, M blocks a row, L layers, N pool blocks, P block size, H query heads, K KV heads, G
= H/K, D head dim; C slots of a KV tile, Q rows of a product, X splits of a context.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.common import NEG, combine, interpretation, multiprocessors
from kernels_pallas.paged_attention.interface import Options, shapes_of
from kernels_pallas.paged_attention.mosaic_gpu.decode_forms import ByQuery, BySlot
from kernels_pallas.paged_attention.mosaic_gpu.pieces import (
    DECODE_C,
    SMEM_BYTES,
    Ring,
    copy_and_widen,
    drain,
    launch,
    rings_in_8_bits,
    scaled,
    stream_tiles,
    turns_of,
    unsupported,
    work_item,
    zero_unseen,
)
from kernels_pallas.paged_attention.pool_layout import ScaledPool, pad

MAX_SPLITS = 128
AT_ONCE = 128  # columns of 8 bits that become 16 at a time
START = 3  # the time in which an item starts and ends, in KV tiles that could be read


def split_count(items: int, tiles: int, slots: int) -> int:
    """Return X: into how many parts each of `items` contexts of at most `tiles` KV tiles is cut.

    For a card that holds `slots` thread blocks at once, the number that takes the least time: more
    parts leave less of the last wave idle, but very short parts do nothing but start and end.
    """

    def duration(splits: int) -> int:
        return -(-items * splits // slots) * (-(-tiles // splits) + START)

    return min(range(1, max(1, min(MAX_SPLITS, tiles)) + 1), key=duration)


def by_slot(head_dim: int, rows: int) -> bool:
    """Return whether a row of scores is a slot, for so many queries of a KV head, filled up to 8s;
    with more, that form has more registers than there are.
    """
    return rows <= 32 and head_dim * rows <= 4096


def resident(head_dim: int, group: int, *, in_8_bits: bool = False) -> int:
    """Return the number of thread blocks on an SM: two if it pays and their registers fit, 128 a
    thread, so that one computes while the other waits.

    group: query heads of a KV head. in_8_bits: whether keys and values are. In 16 bits a tile of a
    head_dim of 128 is bytes enough to hide what is computed; one of 256 leaves no room for two.
    """
    rows = -(-group // 8) * 8
    if in_8_bits:
        fits = head_dim <= 128 and head_dim * rows <= 3072
        return 2 if fits and by_slot(head_dim, rows) else 1
    return 2 if head_dim == 64 else 1


@functools.partial(jax.jit, static_argnames=("options", "splits", "thread_blocks", "fastest"))
def decode(
    q_SHD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    *,
    options: Options,
    sinks_H: Array | None = None,
    splits: int | None = None,
    thread_blocks: int | None = None,
    fastest: Literal["heads", "rows"] = "heads",
) -> Array:
    """Attention of one query a row, the last token of its context; see `reference.decode`.

    splits: number of items that one KV head of a context is cut into. thread_blocks: number of
    thread blocks that share the items. None chooses either. fastest: the axis along which
    neighbouring thread blocks differ. Raises NotImplementedError with the reason that `unsupported`
    gives.
    """
    S, H, D = q_SHD.shape
    shapes, window = shapes_of(q_SHD, pool, block_table_SM, options), options.attention.window
    interpret = interpretation("Mosaic GPU attention", unsupported, shapes, options)
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, jnp.dtype(shapes.dtype)
    in_8_bits = isinstance(pool, ScaledPool)
    assert not in_8_bits or pool.slots_last, "as pool_layout has them"
    G, C, N = H // K, DECODE_C, pool.shape[0] // options.num_layers
    rows = -(-G // 8) * 8  # of q that are copied: the unit of a swizzled tile
    # KV heads whose queries are copied together. Rows of a product stay apart: others do no harm.
    shared = 8 // G if H % 8 == 0 and 8 % G == 0 else 1
    on_an_sm = resident(D, G, in_8_bits=in_8_bits)
    slots = multiprocessors() * on_an_sm
    reach = block_table_SM.shape[1] * P
    reach = reach if window is None else min(reach, window + C - 1)
    X = splits or split_count(S * K, -(-reach // C), slots)
    items = S * X * K
    are_parts = X > 1 or sinks_H is not None  # that meet outside, sinks being one of them
    out_dtype = jnp.dtype(jnp.float32) if are_parts else dtype
    blocks = min(thread_blocks or (items if D > 128 else slots), items)
    turns = -(-items // blocks)
    # Shared memory holds results and, of several items, the queries of two, so that the next one's
    # are there in time. An SM keeps 1 KiB of it for each thread block.
    form = (BySlot if by_slot(D, rows) else ByQuery)(rows, C, D, dtype, interpret)
    places, shape = min(turns, 2), (C, 2 * D)
    fixed = 5120 + form.bytes(places, out_dtype)
    room = (SMEM_BYTES + 1024) // on_an_sm - 1024 - fixed
    if in_8_bits:
        rings = rings_in_8_bits(room, C, D, pool.dtype, dtype, readers=1)
    else:
        stages = room // (C * 2 * D * dtype.itemsize)
        rings = Ring.types(stages, shape, dtype, arrivals=C // P, readers=1), None

    def kernel(q_ref, pool_ref, table_ref, work_refs, layer_ref, *refs):
        (*out_refs, (ring, copied), ((q_sm, o_sm), p_sm, lse_sm), q_full) = refs
        pool_ref, scales_ref = pool_ref if in_8_bits else (pool_ref, None)
        stages = ring.tiles.shape[0]
        order_ref, contexts_ref = work_refs
        block, warpgroup = (lax.axis_index(name) for name in ("block", "warpgroup"))

        my_turns = turns_of(block, items, blocks)

        def span_of(turn):
            """Return a turn's row, split and head, the first and last + 1 of the slots that it
            sees, its first KV tile and the number of its KV tiles.
            """
            item = work_item(turn, block, blocks)
            part, head = lax.div(item, jnp.int32(K)), lax.rem(item, jnp.int32(K))
            if fastest == "rows":
                part, head = lax.rem(item, jnp.int32(S * X)), lax.div(item, jnp.int32(S * X))
            row, split = order_ref[lax.div(part, jnp.int32(X))], lax.rem(part, jnp.int32(X))
            context = contexts_ref[row]
            begin = jnp.int32(0) if window is None else jnp.maximum(context - window, 0)
            first = lax.div(begin, jnp.int32(C))
            tiles = pl.cdiv(context, jnp.int32(C)) - first
            share = pl.cdiv(tiles, jnp.int32(X))
            count = jnp.clip(tiles - split * share, 0, share)
            return row, split, head, begin, context, first + split * share, count

        @pl.when(warpgroup == 0)
        def _():
            def copy_queries(turn):
                row, _, head, *_ = span_of(turn)
                place = lax.rem(turn, jnp.int32(places))
                queries = q_ref.at[row, lax.div(head, jnp.int32(shared))]
                plgpu.copy_gmem_to_smem(queries, q_sm.at[place, pl.ds(0, rows)], q_full.at[place])

            def item(turn, done):
                """Compute one item. done: KV tiles of the turns before."""
                row, split, head, begin, context, first, count = span_of(turn)
                place = lax.rem(turn, jnp.int32(places))
                if turns > 1:  # into the place of the item before this one
                    pl.when(turn + 1 < my_turns)(lambda: copy_queries(turn + 1))
                plgpu.barrier_wait(q_full.at[place])

                def body(i, carry):
                    stage = lax.rem(done + i, jnp.int32(stages))
                    # Slots of the tile that are seen.
                    low, high = begin - (first + i) * C, context - (first + i) * C
                    plgpu.barrier_wait(ring.full.at[stage])
                    tile, ragged = ring.tiles.at[stage], (low > 0) | (high < C)
                    if not in_8_bits:
                        pl.when(ragged)(lambda: zero_unseen(tile, low, high))
                    s = form.scores(tile, q_sm.at[place])
                    of_keys, of_values = None, None
                    if in_8_bits:
                        of_keys, of_values = (
                            form.scales(ring.scales.at[stage, x]) for x in range(2)
                        )
                    s = scaled(s, options.attention, of_keys)

                    def masked(s):
                        slot = form.slots()
                        return jnp.where((slot >= low) & (slot < high), s, NEG)

                    if by_slot(D, rows) or on_an_sm == 1:
                        s = lax.cond(ragged, masked, lambda whole: whole, s)
                    else:  # a branch takes registers, which two blocks with queries as rows lack
                        s = masked(s)
                    weights_sm = p_sm
                    if p_sm is not None:
                        weights_sm = p_sm.at[lax.rem(done + i, jnp.int32(2))]
                    carry = form.add(s, carry, of_values, weights_sm, tile)
                    plgpu.barrier_arrive(ring.empty.at[stage])
                    return carry

                acc, m, totals = lax.fori_loop(0, count, body, form.start())
                total = form.total(totals)
                if turns > 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's results
                form.store(o_sm, lse_sm if are_parts else None, acc, m, total)
                plgpu.commit_smem()
                heads = pl.ds(head * G, G)
                rows_of_head = pl.ds(lax.rem(head, jnp.int32(shared)) * G, G)
                plgpu.copy_smem_to_gmem(o_sm.at[rows_of_head], out_refs[0].at[row, split, heads])
                if are_parts:
                    lse_ref = out_refs[1].at[row, split, head]
                    plgpu.copy_smem_to_gmem(lse_sm.at[pl.ds(0, rows)], lse_ref)
                return done + count

            copy_queries(jnp.int32(0))
            lax.fori_loop(0, my_turns, item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def copy_tiles():
            """Copy the tiles of all turns; return how many there are."""

            def item(turn, done):
                row, _, head, _, context, first, count = span_of(turn)
                source = (pool_ref, layer_ref[0] * N, table_ref.at[row], context, head)
                stream_tiles(*source, first, count, done, ring)
                return done + count

            return lax.fori_loop(0, my_turns, item, jnp.int32(0))

        def read_of(turn):
            row, _, *rest = span_of(turn)
            return row, *rest

        @pl.when(warpgroup == 1)
        def _():
            if in_8_bits:
                source = (pool_ref, layer_ref[0] * N, table_ref, scales_ref)
                done = copy_and_widen(my_turns, read_of, *source, copied, ring, AT_ONCE)
            else:
                done = copy_tiles()
            drain(done, stages, ring.empty)

    outputs = [((S, X, H, D), out_dtype), ((S, X, K, rows), jnp.float32)]
    q = q_SHD.astype(dtype).reshape(S, K // shared, shared * G, D)
    q = pad(q, (S, K // shared, rows, D))
    order_S = jnp.argsort(-context_lens_S).astype(jnp.int32)
    o, *lse = launch(
        kernel,
        q,
        pool,
        block_table_SM,
        (order_S, context_lens_S),
        layer,
        interpret=interpret,
        barriers=not by_slot(D, rows),
        warpgroups=2,
        grid={"block": blocks},
        out_type=[jax.ShapeDtypeStruct(*output) for output in outputs[: 2 if are_parts else 1]],
        scratch_types=(
            rings,
            form.buffers(places, out_dtype),
            plgpu.Barrier(num_barriers=places),
        ),
    )
    if not are_parts:
        return o[:, 0].astype(q_SHD.dtype)
    row_KG = (np.arange(K)[:, None] % shared) * G + np.arange(G)[None, :]
    lse_SXKG = jnp.take_along_axis(lse[0], jnp.asarray(row_KG)[None, None], axis=3)
    o = combine(o.reshape(S, X, K, G, D), lse_SXKG, sinks_H)
    return o.reshape(S, H, D).astype(q_SHD.dtype)
