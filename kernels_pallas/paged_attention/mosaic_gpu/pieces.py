"""Parts of decode and prefill: the ring of KV tiles, the products, the online softmax.

Shapes: P block size, K KV heads, D head dim; C slots of a KV tile, Q rows of a product.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kernels_pallas.paged_attention.common import LOG2E, NEG
from kernels_pallas.paged_attention.interface import AttentionOptions, Shapes, unknown_options
from kernels_pallas.paged_attention.pool_layout import ScaledPool

OPTIONS = ("scale", "soft_cap", "window", "sinks", "ends")
Q = 64  # rows of a wgmma
DECODE_C = 64
PREFILL_C = 128
SMEM_BYTES = 227 << 10  # limit of a thread block
# Blocks of a tile whose numbers the copying warpgroup reads at once, the first ones before it waits
# for a stage. With 8 of them in its 24 registers, ptxas has no room for what a turn needs.
AHEAD = 4
WIDENED = 64  # columns of 8 bits that become 16 at a time, and lie together, if nothing is said

WGMMA = plgpu.Layout.WGMMA
# Four rows of 64 numbers a warp, 8 numbers a lane: what half the warp reads of 8 bits, and a
# quarter of it writes of 16, are whole 128 bytes of shared memory, without bank conflicts.
IN_ROWS = plgpu.Layout.TILED(
    Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def unsupported(shapes: Shapes, attention: AttentionOptions, device: Any) -> str | None:
    """Return why these shapes and options cannot run on a device, or None."""
    if reason := unknown_options(attention, OPTIONS):
        return reason
    capability = None if device is None else str(getattr(device, "compute_capability", "unknown"))
    dtype, head_dim, block_size = jnp.dtype(shapes.dtype), shapes.head_dim, shapes.block_size
    num_heads, num_kv_heads = shapes.num_heads, shapes.num_kv_heads
    if capability is not None and capability.partition(".")[0] != "9":
        return f"compute capability {capability}: wgmma is Hopper's alone (9.0)"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}: only bfloat16 and float16"
    if head_dim not in (64, 128, 256):
        return f"head_dim {head_dim}: only 64, 128 and 256"
    if block_size % 8 > 0 or (block_size % PREFILL_C > 0 and PREFILL_C % block_size > 0):
        return f"block_size {block_size}: only 8, 16, 32, 64 and multiples of {PREFILL_C}"
    if num_heads % num_kv_heads > 0 or num_heads > Q * num_kv_heads:
        heads = f"{num_heads} query heads over {num_kv_heads} KV heads"
        return f"{heads}: only 1 to {Q} whole heads each"
    if shapes.scaled and block_size % DECODE_C > 0:
        sizes = f"only {DECODE_C} and multiples of {PREFILL_C}"
        return f"{shapes.scaled}, block_size {block_size}: {sizes}"
    return None


def launch(
    kernel: Callable[..., None],
    q: Array,
    pool: Array | ScaledPool,
    block_table_SM: Array,
    work: Any,
    layer: Array | int,
    *,
    interpret: bool | plgpu.InterpretGPUParams,
    grid: dict[str, int],
    warpgroups: int,
    barriers: bool = True,
    **types: Any,
) -> Any:
    """Run a kernel over q, the pool as [L*N, P, K, 2D], the block table, `work` and the layer.

    A pool in 8 bits comes with its scales [L*N, 2K, P]. work: an array or several that describe the
    work of each row or tile. The last axis of the grid is the fastest. barriers: whether jax puts
    barriers of a warpgroup around its stores to shared memory; without, a kernel has those that it
    needs, by commit_smem.
    """
    if interpret:
        types["interpret"] = plgpu.InterpretGPUParams() if interpret is True else interpret
    call = plgpu.kernel(
        kernel,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not barriers
        ),
        **types,
    )
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    _, P, K2, D = pool.shape
    values, scales = (pool.values, pool.scales) if isinstance(pool, ScaledPool) else (pool, None)
    values = jnp.reshape(values, (-1, P, K2 // 2, 2 * D))
    return call(q, values if scales is None else (values, scales), block_table_SM, work, layer_1)


def work_item(turn, block, blocks: int):
    """Return the item of a thread block's turn; works on ints and tracers.

    Every other turn goes through the blocks backwards: items are sorted by falling length, and no
    block should have the longest item of every turn.
    """
    odd = turn % 2
    return turn * blocks + block + odd * (blocks - 1 - 2 * block)


def turns_of(block, items, blocks: int):
    """Return how many of so many items a thread block takes."""
    turns = pl.cdiv(jnp.int32(items), jnp.int32(blocks))
    last = work_item(turns - 1, block, blocks)
    return turns - (last >= items).astype(jnp.int32)


class Ring(NamedTuple):
    """A ring of KV tiles in shared memory, [stages, C, 2D], with two barriers for each stage: it is
    full, since all copies (or stores) have arrived, and empty, since all its readers are done.

    scales f32 [stages, 2, C]: of tiles that are in 8 bits, or were; else None.
    """

    tiles: Any
    full: Any
    empty: Any
    scales: Any = None

    @classmethod
    def types(
        cls,
        stages: int,
        shape: tuple[int, int],
        dtype: DTypeLike,
        *,
        arrivals: int,
        readers: int,
        width: int = 128,
        has_scales: bool = False,
    ) -> "Ring":
        """Return the types of a ring's parts, for a kernel's scratch. width: see tiled_smem."""
        return cls(
            tiles=tiled_smem((stages, *shape), dtype, width),
            full=plgpu.Barrier(num_arrivals=max(1, arrivals), num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=readers, num_barriers=stages),
            scales=plgpu.SMEM((stages, 2, shape[0]), jnp.float32) if has_scales else None,
        )


def rings_in_8_bits(
    room: int, C: int, D: int, kv_dtype: DTypeLike, dtype: DTypeLike, *, readers: int
) -> tuple[Ring, Ring]:
    """Return the types of the rings of `copy_and_widen` in so many bytes: of tiles in 16 bits that
    `readers` read, two if so many fit, and of tiles in 8 bits as they are copied.
    """
    wide, narrow = C * (2 * D * 2 + 8), C * (2 * D + 8)
    places = 2 if room >= 2 * wide + 2 * narrow else 1
    stages = (room - places * wide) // narrow
    shape = (C, 2 * D)
    wide_ring = Ring.types(places, shape, dtype, arrivals=1, readers=readers, has_scales=True)
    narrow_ring = Ring.types(
        *(stages, shape, kv_dtype), arrivals=2, readers=1, width=WIDENED, has_scales=True
    )
    return wide_ring, narrow_ring._replace(empty=None)  # who reads a tile copies the next


def tiled_smem(shape: tuple[int, ...], dtype: DTypeLike, width: int = 128) -> Any:
    """Return shared memory in the layout that wgmma reads and TMA writes without bank conflicts.

    width: of the columns that are sliced off later, which must be whole tiles.
    """
    itemsize = jnp.dtype(dtype).itemsize
    row = min(128, width * itemsize)  # bytes
    tiling = plgpu.TilingTransform((8, row // itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(row)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def stream_tiles(pool_ref, base, table_ref, context, head, first, count, done, ring: Ring) -> None:
    """Copy KV tiles first, ..., first + count - 1 of a row's head through the ring, each as soon as
    a stage is free.

    base: first pool row of the layer. done: tiles that went through the ring before. Past the
    context's end the last block is copied again, since the table may end there.
    """
    (stages, C, _), P = ring.tiles.shape, pool_ref.shape[1]
    last = lax.div(context - 1, jnp.int32(P))

    @pl.loop(0, count)
    def _(i):
        slot, stage = (first + i) * C, lax.rem(done + i, jnp.int32(stages))
        for offsets in itertools.batched(range(0, C, P), AHEAD):
            blocks = [
                base + table_ref[jnp.minimum(lax.div(slot + j, jnp.int32(P)), last)]
                for j in offsets
            ]
            if offsets[0] == 0:
                pl.when(done + i >= stages)(lambda: plgpu.barrier_wait(ring.empty.at[stage]))
            for j, block in zip(offsets, blocks, strict=True):
                copy_block(pool_ref, block, slot, head, ring, stage, j=j)


def copy_block(pool_ref, block, slot, head, ring: Ring, stage, scales_ref=None, j: int = 0) -> None:
    """Copy a block to row j of a stage's tile, or, where it is larger than a tile, the part of it
    from a slot of the context on. scales_ref: of a pool in 8 bits; a block is then a tile or more.
    """
    C, P = ring.tiles.shape[1], pool_ref.shape[1]
    part = slice(None)
    if P > C:
        part = pl.ds(pl.multiple_of(lax.rem(slot, jnp.int32(P)), C), C)
    src, dst = pool_ref.at[block, part, head], pl.ds(j, min(C, P))
    plgpu.copy_gmem_to_smem(src, ring.tiles.at[stage, dst], ring.full.at[stage])
    if scales_ref is not None:
        of_head = scales_ref.at[block, pl.ds(2 * head, 2), part]
        plgpu.copy_gmem_to_smem(of_head, ring.scales.at[stage], ring.full.at[stage])


def copy_and_widen(
    my_turns,
    span_of: Callable[[Any], tuple[Any, ...]],
    pool_ref,
    base,
    table_ref,
    scales_ref,
    narrow: Ring,
    wide: Ring,
    width: int,
) -> Array:
    """Copy the KV tiles of all turns and make 16 bits of their 8; return how many there are.

    As soon as a tile is read, its stage takes the next one that is to be copied, of this turn or a
    later one: who reads it copies, so that nobody has to be told.

    span_of: from a turn to its row, KV head, the first and last + 1 of the slots that it sees,
    which last is the row's context, its first tile and the number of its tiles. base: first pool
    row of the layer. width: the columns that are widened at a time.
    """
    (stages, C, _), P = narrow.tiles.shape, pool_ref.shape[1]

    def next_of(place):
        """Return the place of the tile after this one: its turn, which is my_turns after the last
        one, its number in it, row, KV head, context, first tile and number of tiles of the turn.
        """

        def is_past(place):
            turn, i, *_, count = place
            return (i >= count) & (turn < my_turns)

        def next_turn(place):
            turn = place[0] + 1
            # After the last turn nothing is copied, and what this returns is not used.
            last = jnp.maximum(my_turns - 1, 0)
            row, head, _, context, first, count = span_of(jnp.minimum(turn, last))
            return turn, jnp.int32(0), row, head, context, first, count

        turn, i, *rest = place
        return lax.while_loop(is_past, next_turn, (turn, i + 1, *rest))

    def block_of(place):
        """Return the block of a tile, which is read from the table long before it is used.

        Padding, which has no tiles, may be a row that the table has not.
        """
        _, i, row, _, context, first, _ = place
        row = jnp.minimum(row, table_ref.shape[0] - 1)
        last = lax.div(jnp.maximum(context - 1, 0), jnp.int32(P))
        return base + table_ref[row, jnp.minimum(lax.div((first + i) * C, jnp.int32(P)), last)]

    def copy_next(nth, copies):
        (turn, i, _, head, _, first, _), block = copies
        stage = lax.rem(nth, jnp.int32(stages))

        @pl.when(turn < my_turns)
        def _():
            copy_block(pool_ref, block, (first + i) * C, head, narrow, stage, scales_ref)

        place = next_of(copies[0])
        return place, block_of(place)

    nowhere = (jnp.int32(-1), *(jnp.int32(0),) * 6)
    first_place = next_of(nowhere)
    copies = lax.fori_loop(0, stages, copy_next, (first_place, block_of(first_place)))

    def item(turn, state):
        _, _, low, high, first, count = span_of(turn)

        def tile(i, state):
            nth, copies = state
            begin, end = low - (first + i) * C, high - (first + i) * C
            widen_tile(nth, begin, end, narrow, wide, width)
            return nth + 1, copy_next(nth + stages, copies)

        return lax.fori_loop(0, count, tile, state)

    return lax.fori_loop(0, my_turns, item, (jnp.int32(0), copies))[0]


def widen_tile(nth, begin, end, narrow: Ring, wide: Ring, width: int) -> None:
    """Make a tile of 16 bits of the nth tile of 8 bits that went through the ring.

    begin, end: first and last + 1 of its slots that are seen. What others hold, which may be NaN,
    becomes 0: values, and the scales of both. width: the columns that are widened at a time.
    """
    (stages, C, _), places = narrow.tiles.shape, wide.tiles.shape[0]
    stage, place = lax.rem(nth, jnp.int32(stages)), lax.rem(nth, jnp.int32(places))
    plgpu.barrier_wait(narrow.full.at[stage])
    pl.when(nth >= places)(lambda: plgpu.barrier_wait(wide.empty.at[place]))
    layout = plgpu.Layout.WG_STRIDED((2, C), 1)
    scales = plgpu.load(narrow.scales.at[stage], layout=layout)
    slot = plgpu.broadcasted_iota(jnp.int32, (2, C), 1, layout=layout)
    wide.scales.at[place][...] = jnp.where((slot >= begin) & (slot < end), scales, 0.0)
    widen(narrow.tiles.at[stage], wide.tiles.at[place], width)

    @pl.when((begin > 0) | (end < C))
    def _():
        zero_unseen(wide.tiles.at[place], begin, end)

    plgpu.barrier_arrive(wide.full.at[place])


def drain(used, places: int, empty) -> None:
    """Wait until the readers of the last of `used` turns at so many places are done.

    The interpreter insists that every arrival is waited for.
    """

    @pl.loop(jnp.maximum(used - places, 0), used)
    def _(i):
        plgpu.barrier_wait(empty.at[lax.rem(i, jnp.int32(places))])


def softmax_start(D: int, sink: Array | None = None) -> tuple[Array, Array, Array]:
    """Return the accumulator [Q, D], running maximum [Q] and running sum [Q] of an online softmax
    before its first score, which is the sink if there is one.
    """
    acc = plgpu.layout_cast(jnp.zeros((Q, D), jnp.float32), WGMMA)
    start = (NEG, 0.0) if sink is None else (sink * LOG2E, 1.0)
    m, total = (plgpu.layout_cast(jnp.full((Q,), x, jnp.float32), WGMMA.reduce(1)) for x in start)
    return acc, m, total


def iota(shape: tuple[int, int], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def scores(q_sm, kv_sm, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """Return q . k, [Q, C] in f32; `meanwhile` runs while the product does."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, q_sm, kv_sm.at[:, pl.ds(0, q_sm.shape[1])].transpose((1, 0)))
        meanwhile()
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((Q, kv_sm.shape[0]), jnp.float32))


def scaled(s: Array, options: AttentionOptions, of_keys: Array | None = None) -> Array:
    """Return scores in base 2, scaled and capped. of_keys: the scales of keys in 8 bits.

    The hardware's tanh is good to 11 bits only, which a cap of 50 would show.
    """
    scale, soft_cap = options.scale, options.soft_cap
    factor = scale * LOG2E if soft_cap is None else 2 * LOG2E * scale / soft_cap
    s = s * (factor if of_keys is None else of_keys * factor)
    if soft_cap is None:
        return s
    tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(s))
    return tanh * (soft_cap * LOG2E)


def fold(s, acc, m, total, dtype, scales=None) -> tuple[Array, Array, Array, Array]:
    """Return the weights of a tile's scores, and the softmax state at the new maximum.

    scales: of the values in 8 bits; the weights are multiplied by them.
    """
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
    total = total * alpha + jnp.sum(p, axis=1)
    p = p if scales is None else p * scales
    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
    return p.astype(dtype), acc, m_new, total


def add_values(
    acc, p, kv_sm, interpret: Any, meanwhile: Callable[[], None] = lambda: None
) -> Array:
    """Return acc + p . v, [Q, D]; `meanwhile` runs while the product does."""
    v_sm = kv_sm.at[:, pl.ds(acc.shape[1], acc.shape[1])]
    if interpret:  # the interpreter knows wgmma neither on registers nor into a given accumulator
        acc = acc + jnp.dot(p, v_sm[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders this plain read before the copy that refills the stage
        meanwhile()
        return acc

    def product(acc_ref):
        plgpu.wgmma(acc_ref, p, v_sm)
        meanwhile()

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))  # pyright: ignore[reportReturnType]


def normalized(acc, total) -> Array:
    """Return acc divided by the sum of weights; zeros if nothing was seen."""
    return acc * lax.broadcast_in_dim(1.0 / jnp.where(total > 0, total, 1.0), acc.shape, [0])


def along_slots(scales_sm) -> Array:
    """Return a tile's scales [C] broadcast to the shape of scores, [Q, C]."""
    of_slot = plgpu.load(scales_sm, layout=WGMMA.reduce(0))
    return lax.broadcast_in_dim(of_slot, (Q, *scales_sm.shape), [1])


def widen(narrow_sm, kv_sm, width: int) -> None:
    """Convert a tile of 8 bits to the 16 that a product can take from shared memory."""
    dtype, C, D = kv_sm.dtype, kv_sm.shape[0], kv_sm.shape[1] // 2
    at_once = (jnp.dtype(narrow_sm.dtype), jnp.dtype(dtype)) in (
        (jnp.dtype(jnp.int8), jnp.dtype(jnp.bfloat16)),
        (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float16)),
    )
    for c, d in itertools.product(range(0, C, 64), range(0, 2 * D, width)):
        piece = pl.ds(c, 64), pl.ds(d, width)
        x = plgpu.load(narrow_sm.at[piece], layout=IN_ROWS)
        kv_sm.at[piece][...] = (x if at_once else x.astype(jnp.float32)).astype(dtype)
    plgpu.commit_smem()


def zero_unseen(kv_sm, low, high) -> None:
    """Set a tile's values to zero outside of the slots low, ..., high - 1."""
    C, D = kv_sm.shape[0], kv_sm.shape[1] // 2
    for c, d in itertools.product(
        range(0, C, 64), range(D, 2 * D, 64)
    ):  # in pieces, to spare registers
        v_sm = kv_sm.at[pl.ds(c, 64), pl.ds(d, 64)]
        slot = iota((64, 64), 0) + c
        v = plgpu.load(v_sm, layout=WGMMA)
        v_sm[...] = jnp.where((slot >= low) & (slot < high), v, jnp.zeros_like(v))
    plgpu.commit_smem()


def store_flat(ref, x: Array) -> None:
    """Store to untiled shared memory, of which TMA can copy any number of rows.

    Bank conflicts are accepted.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
