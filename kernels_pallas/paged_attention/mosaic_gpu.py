"""Paged attention for Hopper in Pallas Mosaic GPU: pages come by TMA, products are wgmma, warpgroups have roles.

A block of warpgroups walks over one row's KV tiles of C slots. One warpgroup does nothing but copy: for each page of a
tile one TMA brings a KV head's keys and values together (they are neighbours in the pool) into the next free stage of a
ring in shared memory. The others compute, by online softmax in base 2.

- decode: the G query heads of a KV head are rows of one 64-row product. A context is split over several thread blocks
  so that few rows fill the card; the parts meet in a combine outside. How many is static: it follows from the shapes.
- prefill: two computing warpgroups take turns at the tensor cores. They share KV tiles: they hold 64 queries of two
  query heads of one KV head or, where their number is odd, 128 queries of one. Which queries comes from a table of
  ragged tiles, `prefill_tiles`, that all layers of a step share.

Whole tiles are loaded, and 0 * NaN is NaN: values outside the context are zeroed in shared memory before use.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query heads, K KV heads,
G = H/K, D head dim; C slots of a KV tile, Q rows of a product, A query tiles, X splits of a context.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

Q = 64  # rows of a wgmma
DECODE_C = 64
PREFILL_C = 128
SMEM_BYTES = 227 << 10  # that a thread block may have
NEG = -1e30  # masked score: finite, so that a row which sees nothing of a tile does no harm (a later maximum wipes it)
LOG2E = math.log2(math.e)

_WGMMA = plgpu.Layout.WGMMA
_STATIC = ("num_layers", "scale", "sliding_window", "soft_cap", "interpret")


def unsupported(
    *,
    dtype: DTypeLike,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    compute_capability: str | None = None,
) -> str | None:
    """Why these kernels cannot run, or None. compute_capability None asks the default device if that is a GPU."""
    if compute_capability is None and jax.default_backend() == "gpu":
        compute_capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if compute_capability is not None and compute_capability.partition(".")[0] != "9":
        return f"compute capability {compute_capability}: wgmma is Hopper's alone (9.0)"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype).name}: only bfloat16 and float16"
    if head_dim not in (64, 128, 256):
        return f"head_dim {head_dim}: only 64, 128 and 256"
    if block_size % 8 or (block_size % PREFILL_C and PREFILL_C % block_size):
        return f"block_size {block_size}: only 8, 16, 32, 64 and multiples of {PREFILL_C}"
    if num_heads % num_kv_heads or num_heads > Q * num_kv_heads:
        return f"{num_heads} query heads over {num_kv_heads} KV heads: only 1 to {Q} whole heads each"
    return None


@functools.partial(jax.jit, static_argnames=(*_STATIC, "splits"))
def paged_attention_decode(
    q_SHD: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    block_table_SM: jax.Array,
    context_lens_S: jax.Array,
    *,
    num_layers: int = 1,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Attention of one query a row, the last token of its context; see `reference.paged_attention_decode`.

    interpret: None interprets where the default backend is the CPU. splits: thread blocks a context, None chooses.
    Raises NotImplementedError with the reason that `unsupported` gives.
    """
    _check(q_SHD, pool)
    S, H, D = q_SHD.shape
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, pool.dtype
    G, C, N = H // K, DECODE_C, pool.shape[0] // num_layers
    rows = -(-G // 8) * 8  # of q that are copied: the unit of a swizzled tile
    X = splits or min(max(-(-264 // (S * K)), 1), 16, -(-block_table_SM.shape[1] * P // C))
    out_dtype = dtype if X == 1 else jnp.dtype(jnp.float32)
    # Two thread blocks share an SM where their registers fit (D = 64): one computes while the other starts or ends.
    fixed = 4096 + Q * D * out_dtype.itemsize
    stages = (SMEM_BYTES // (2 if D == 64 else 1) - fixed) // (C * 2 * D * dtype.itemsize)
    interpreted, options = _interpretation(interpret)

    def kernel(q_ref, pool_ref, table_ref, contexts_ref, layer_ref, o_ref, lse_ref, buffers, barriers):
        kv_sm, (q_sm, o_sm), lse_sm = buffers
        q_full, full, empty = barriers
        head, split, row = (lax.axis_index(name) for name in ("head", "split", "row"))
        context = contexts_ref[row]
        begin = jnp.int32(0) if sliding_window is None else jnp.maximum(context - sliding_window, 0)
        first = lax.div(begin, jnp.int32(C))
        tiles = pl.cdiv(context, jnp.int32(C)) - first
        share = pl.cdiv(tiles, jnp.int32(X))
        first += split * share
        count = jnp.clip(tiles - split * share, 0, share)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            plgpu.barrier_wait(q_full)

            def body(i, carry):
                acc, m, total = carry
                stage = lax.rem(i, jnp.int32(stages))
                low, high = begin - (first + i) * C, context - (first + i) * C  # slots of the tile that are seen
                plgpu.barrier_wait(full.at[stage])
                pl.when((low > 0) | (high < C))(lambda: _zero_unseen(kv_sm.at[stage], low, high))
                s = _scaled(_scores(q_sm, kv_sm.at[stage]), scale, soft_cap)
                slot = _iota((Q, C), 1)
                s = jnp.where((slot >= low) & (slot < high), s, NEG)
                p, acc, m, total = _fold(s, acc, m, total, dtype)
                acc = _add_values(acc, p, kv_sm.at[stage], interpreted)
                plgpu.barrier_arrive(empty.at[stage])
                return acc, m, total

            acc, m, total = lax.fori_loop(0, count, body, _start(D))
            o_sm[...] = _normalized(acc, total).astype(out_dtype)
            lse_sm[...] = m + jnp.log2(jnp.maximum(total, 1.0))  # a sum is at least 1, its maximum's weight, or 0
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_sm.at[pl.ds(0, rows)], o_ref.at[row, split, head])
            plgpu.copy_smem_to_gmem(lse_sm.at[pl.ds(0, rows)], lse_ref.at[row, split, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_sm.at[pl.ds(0, rows)], q_full)
            _stream(pool_ref, layer_ref[0] * N, table_ref.at[row], context, head, first, count, kv_sm, full, empty)

    q_and_o = plgpu.RefUnion(_tiled_smem((Q, D), dtype), _tiled_smem((Q, D), out_dtype))
    ring = (
        plgpu.Barrier(num_arrivals=max(1, C // P), num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
    )
    outputs = ((S, X, K, rows, D), out_dtype), ((S, X, K, rows), jnp.float32)
    call = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(*output) for output in outputs],
        scratch_types=(
            (_tiled_smem((stages, C, 2 * D), dtype), q_and_o, plgpu.SMEM((Q,), jnp.float32)),
            (plgpu.Barrier(), *ring),
        ),
        grid=(K, X, S),
        grid_names=("head", "split", "row"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )
    q = jnp.pad(q_SHD.astype(dtype).reshape(S, K, G, D), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    o, lse = call(q, pool.reshape(-1, P, K, 2 * D), block_table_SM, context_lens_S, layer_1)
    o = o[:, 0] if X == 1 else _combine(o, lse)
    return o[:, :, :G].reshape(S, H, D).astype(q_SHD.dtype)


def _combine(o_SXKGD: jax.Array, lse_SXKG: jax.Array) -> jax.Array:
    """The attention of whole contexts from that of their splits and the base-2 logarithms of their sums of weights."""
    weight = jnp.exp2(lse_SXKG - jnp.max(lse_SXKG, axis=1, keepdims=True))
    return jnp.sum(o_SXKGD * weight[..., None], axis=1) / jnp.sum(weight, axis=1)[..., None]


def prefill_tiles(
    query_starts_S1: jax.Array, context_lens_S: jax.Array, *, num_tokens: int, num_heads: int, num_kv_heads: int
) -> jax.Array:
    """The query tiles of a step, int32 [A, 5]: row, first packed token, queries, position of the first, context.

    The same for all layers: make it once a step and hand it to each call. The most work comes first, so that the last
    tiles to start are short. Padding tokens make tiles of context 0, which write zeros; A is static, and tiles of the
    surplus have no queries. num_tokens is T.
    """
    S, B = context_lens_S.shape[0], 2 * Q // _tile_heads(num_heads, num_kv_heads)
    starts_R = query_starts_S1  # R = S + 1 rows: padding is the last
    lens_R = jnp.append(starts_R[1:], jnp.full((1,), num_tokens, starts_R.dtype)) - starts_R
    contexts_R = jnp.append(context_lens_S, jnp.zeros((1,), context_lens_S.dtype))
    tiles_R = (lens_R + B - 1) // B
    end_R = jnp.cumsum(tiles_R)
    tile_A = jnp.arange(num_tokens // B + S + 1, dtype=jnp.int32)
    row_A = jnp.minimum(jnp.sum(end_R[None, :] <= tile_A[:, None], axis=1, dtype=jnp.int32), S)
    skip_A = (tile_A - (end_R - tiles_R)[row_A]) * B  # queries of the row before the tile
    count_A = jnp.where(tile_A < end_R[-1], jnp.clip(lens_R[row_A] - skip_A, 0, B), 0)
    position_A = jnp.maximum((contexts_R - lens_R)[row_A] + skip_A, 0)
    table_A5 = jnp.stack([row_A, starts_R[row_A] + skip_A, count_A, position_A, contexts_R[row_A]], axis=1)
    work_A = jnp.minimum(position_A + count_A, contexts_R[row_A])
    return table_A5[jnp.argsort(work_A, descending=True)].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=_STATIC)
def paged_attention(
    q_THD: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    block_table_SM: jax.Array,
    context_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    *,
    num_layers: int = 1,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
    tiles: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of packed queries, any number a row; see `reference.paged_attention`.

    tiles: of `prefill_tiles`; None makes them. The rest as for `paged_attention_decode`.
    """
    _check(q_THD, pool)
    T, H, D = q_THD.shape
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, pool.dtype
    C, N = PREFILL_C if D < 256 else PREFILL_C // 2, pool.shape[0] // num_layers
    heads = _tile_heads(H, K)
    stages = (SMEM_BYTES - 2048 - 2 * Q * D * dtype.itemsize) // (C * 2 * D * dtype.itemsize)
    if tiles is None:
        tiles = prefill_tiles(query_starts_S1, context_lens_S, num_tokens=T, num_heads=H, num_kv_heads=K)
    interpreted, options = _interpretation(interpret)

    def kernel(q_ref, pool_ref, table_ref, tiles_ref, layer_ref, o_ref, buffers, barriers):
        kv_sm, qo_sm = buffers
        full, empty, zeroed, turn = barriers
        group, tile, warpgroup = (lax.axis_index(name) for name in ("heads", "tile", "warpgroup"))
        row, token, queries, position, context = (tiles_ref[tile, i] for i in range(5))
        low = jnp.int32(0) if sliding_window is None else jnp.maximum(position - sliding_window + 1, 0)
        begin = lax.div(low, jnp.int32(C))
        end = pl.cdiv(jnp.minimum(position + queries, context), jnp.int32(C))

        def next_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when((queries > 0) & (warpgroup < 2))
        def _():
            plgpu.set_max_registers(240, action="increase")
            q_sm, o_sm = (ref.at[warpgroup] for ref in qo_sm)
            head = group * heads + (warpgroup if heads == 2 else 0)
            skip = jnp.int32(0) if heads == 2 else warpgroup * Q
            # A warpgroup's rows are Q packed tokens that contain its queries, wherever the packed tokens end.
            start = jnp.minimum(token + skip, q_ref.shape[0] - Q)
            offset = token + skip - start
            q_sm[...] = plgpu.load(q_ref.at[pl.ds(start, Q), head], layout=_WGMMA, optimized=False)
            plgpu.commit_smem()

            pl.when(begin < end)(lambda: plgpu.barrier_wait(full.at[0]))
            pl.when(warpgroup == 1)(next_turn)

            def body(i, carry, masked):
                acc, m, total = carry
                stage = lax.rem(i - begin, jnp.int32(stages))
                if masked:
                    first, last = low - i * C, context - i * C  # slots of the tile that hold something
                    ragged = (first > 0) | (last < C)

                    @pl.when(ragged & (warpgroup == 0))
                    def _():
                        _zero_unseen(kv_sm.at[stage], first, last)
                        plgpu.barrier_arrive(zeroed)

                    pl.when(ragged & (warpgroup == 1))(lambda: plgpu.barrier_wait(zeroed))
                s = _scaled(_scores(q_sm, kv_sm.at[stage], next_turn), scale, soft_cap)
                if masked:
                    key, query = _iota((Q, C), 1), _iota((Q, C), 0) + (position + skip - offset - i * C)
                    seen = key <= query
                    if sliding_window is not None:
                        seen &= key > query - sliding_window
                    s = jnp.where(seen, s, NEG)
                p, acc, m, total = _fold(s, acc, m, total, dtype)
                if not interpreted:
                    p, acc, m, total = lax.optimization_barrier((p, acc, m, total))
                next_turn()

                def wait_for_next():
                    following = lax.rem(i + 1 - begin, jnp.int32(stages))
                    pl.when(i + 1 < end)(lambda: plgpu.barrier_wait(full.at[following]))

                acc = _add_values(acc, p, kv_sm.at[stage], interpreted, wait_for_next)
                plgpu.barrier_arrive(empty.at[stage])
                return acc, m, total

            state, masked_from = _start(D), begin
            # Tiles before the queries' own need no mask; but a second loop takes registers, which these cases lack.
            if sliding_window is None and soft_cap is None and D < 256:
                masked_from = jnp.minimum(lax.div(position + 1, jnp.int32(C)), end)
                state = lax.fori_loop(begin, masked_from, functools.partial(body, masked=False), state)
            acc, _, total = lax.fori_loop(masked_from, end, functools.partial(body, masked=True), state)
            pl.when(warpgroup == 0)(next_turn)

            _store_flat(o_sm, _normalized(acc, total).astype(dtype))
            plgpu.commit_smem()
            # A copy's size is static: the bits of the number of queries say which sizes add up to it.
            rest = jnp.clip(queries - skip, 0, Q)
            for size in (1 << bit for bit in range(Q.bit_length())):

                @pl.when((rest & size) != 0)
                def _(size=size):
                    done = rest & (size - 1)
                    src, dst = o_sm.at[pl.ds(offset + done, size)], pl.ds(start + offset + done, size)
                    plgpu.copy_smem_to_gmem(src, o_ref.at[dst, head])

            plgpu.wait_smem_to_gmem(0)

        @pl.when((queries > 0) & (warpgroup == 2))
        def _():
            plgpu.set_max_registers(32, action="decrease")
            head, count = lax.div(group * heads, jnp.int32(H // K)), end - begin
            _stream(pool_ref, layer_ref[0] * N, table_ref.at[row], context, head, begin, count, kv_sm, full, empty)

    padding = max(0, Q - T)
    q_and_o = plgpu.RefUnion(_tiled_smem((2, Q, D), dtype), plgpu.SMEM((2, Q, D), dtype))
    ring = (
        plgpu.Barrier(num_arrivals=max(1, C // P), num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    )
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((T + padding, H, D), dtype),
        scratch_types=(
            (_tiled_smem((stages, C, 2 * D), dtype), q_and_o),
            (*ring, plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)),
        ),
        grid=(H // heads, tiles.shape[0]),
        grid_names=("heads", "tile"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )
    q = jnp.pad(q_THD.astype(dtype), ((0, padding), (0, 0), (0, 0)))
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    return call(q, pool.reshape(-1, P, K, 2 * D), block_table_SM, tiles, layer_1)[:T].astype(q_THD.dtype)


def _tile_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads of a prefill tile: its two warpgroups take one each or, of an odd group, the same one."""
    return 1 if num_heads // num_kv_heads % 2 else 2


def _check(q: jax.Array, pool: jax.Array) -> None:
    reason = unsupported(
        dtype=pool.dtype,
        head_dim=pool.shape[3],
        block_size=pool.shape[1],
        num_heads=q.shape[1],
        num_kv_heads=pool.shape[2] // 2,
    )
    if reason is not None:
        raise NotImplementedError(f"Mosaic GPU attention: {reason}")


def _interpretation(interpret: bool | plgpu.InterpretGPUParams | None) -> tuple[bool, dict[str, Any]]:
    """Whether the kernel is interpreted, and the options of `plgpu.kernel` for it."""
    if interpret is None:
        interpret = jax.default_backend() == "cpu"
    if not interpret:
        return False, {}
    return True, {"interpret": plgpu.InterpretGPUParams() if interpret is True else interpret}


def _tiled_smem(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory in the layout that wgmma reads and TMA writes without bank conflicts."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _stream(pool_ref, base, table_ref, context, head, first, count, kv_sm, full, empty) -> None:
    """Copies KV tiles first, ..., first + count - 1 of a row's head through the ring, each as soon as a stage is free.

    base: of the layer's pool rows. Past the context's end comes its last block again: the table may end there.
    """
    (stages, C, _), P = kv_sm.shape, pool_ref.shape[1]
    last = lax.div(context - 1, jnp.int32(P))

    @pl.loop(0, count)
    def _(i):
        slot, stage = (first + i) * C, lax.rem(i, jnp.int32(stages))
        blocks = (base + table_ref[jnp.minimum(lax.div(slot + j, jnp.int32(P)), last)] for j in range(0, C, P))
        if P > 8:  # read before the wait, if registers can hold them
            blocks = [*blocks]
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
        for j, block in enumerate(blocks):
            # A whole block or, where that is larger, the tile's part of it.
            src = pool_ref.at[block, :, head]
            if P > C:
                src = pool_ref.at[block, pl.ds(pl.multiple_of(lax.rem(slot, jnp.int32(P)), C), C), head]
            plgpu.copy_gmem_to_smem(src, kv_sm.at[stage, pl.ds(j * P, min(C, P))], full.at[stage])

    # Every arrival has to be seen: the interpreter insists.
    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(i):
        plgpu.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])


def _start(D: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accumulator [Q, D], running maximum [Q] and sum [Q] of an online softmax."""
    acc = plgpu.layout_cast(jnp.zeros((Q, D), jnp.float32), _WGMMA)
    m = plgpu.layout_cast(jnp.full((Q,), NEG, jnp.float32), _WGMMA.reduce(1))
    total = plgpu.layout_cast(jnp.zeros((Q,), jnp.float32), _WGMMA.reduce(1))
    return acc, m, total


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_WGMMA)


def _scores(q_sm, kv_sm, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """q . k, [Q, C] in f32; `meanwhile` runs while the product does."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, q_sm, kv_sm.at[:, pl.ds(0, q_sm.shape[1])].transpose((1, 0)))
        meanwhile()
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((Q, kv_sm.shape[0]), jnp.float32))


def _scaled(s: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scores in base 2, capped. The hardware's own tanh is good to 11 bits only, which a cap of 50 would show."""
    if soft_cap is None:
        return s * (scale * LOG2E)
    tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * LOG2E * scale / soft_cap)))
    return tanh * (soft_cap * LOG2E)


def _fold(s, acc, m, total, dtype) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Weights of a tile's scores, and the state of the softmax brought to the new maximum."""
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
    total = total * alpha + jnp.sum(p, axis=1)
    return p.astype(dtype), acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), m_new, total


def _add_values(acc, p, kv_sm, interpreted: bool, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """acc + p . v, [Q, D]; `meanwhile` runs while the product does."""
    D = acc.shape[1]
    v_sm = kv_sm.at[:, pl.ds(D, D)]
    if interpreted:  # the interpreter knows wgmma neither on registers nor into a given accumulator
        acc = acc + jnp.dot(p, v_sm[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders this plain read before the copy that refills the stage
        meanwhile()
        return acc

    def product(acc_ref):
        plgpu.wgmma(acc_ref, p, v_sm)
        meanwhile()

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))  # pyright: ignore[reportReturnType]


def _normalized(acc, total) -> jax.Array:
    """What the softmax weighs to; zeros where nothing was seen."""
    return acc * lax.broadcast_in_dim(1.0 / jnp.where(total > 0, total, 1.0), acc.shape, [0])


def _zero_unseen(kv_sm, low, high) -> None:
    """Zeroes a tile's values outside of the slots low, ..., high - 1."""
    C, D = kv_sm.shape[0], kv_sm.shape[1] // 2
    for c, d in itertools.product(range(0, C, 64), range(D, 2 * D, 64)):  # in pieces, to spare registers
        v_sm = kv_sm.at[pl.ds(c, 64), pl.ds(d, 64)]
        slot = _iota((64, 64), 0) + c
        v = plgpu.load(v_sm, layout=_WGMMA)
        v_sm[...] = jnp.where((slot >= low) & (slot < high), v, jnp.zeros_like(v))
    plgpu.commit_smem()


def _store_flat(ref, x: jax.Array) -> None:
    """Stores to shared memory without tiles, of which TMA can copy any number of rows; bank conflicts are accepted."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
