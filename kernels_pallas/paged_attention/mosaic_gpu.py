"""Paged attention for Hopper in Pallas Mosaic GPU: pages come by TMA, products are wgmma,
warpgroups have roles.

A block of warpgroups walks over one row's KV tiles of C slots. One warpgroup does nothing but copy:
for each page of a tile one TMA brings a KV head's keys and values together (they are neighbours in
the pool) into the next free stage of a ring in shared memory. The others compute, by online softmax
in base 2.

- decode: the G query heads of a KV head are rows of one 64-row product. A context is split over
  several thread blocks so that few rows fill the card; the parts meet in a combine outside. How
  many is static: it follows from the shapes.
- prefill: two computing warpgroups take turns at the tensor cores. They share KV tiles: they hold
  64 queries of two query heads of one KV head or, where their number is odd, 128 queries of one.
  Which queries comes from a table of ragged tiles, `prefill_tiles`, that all layers of a step
  share.

Whole tiles are loaded, and 0 * NaN is NaN: values outside the context are zeroed in shared memory
before use.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim; C slots of a KV tile, Q rows of a product, A query tiles, X
splits of a context.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kernels_pallas.paged_attention.common import NEG, combine, rows_of

Q = 64  # rows of a wgmma
DECODE_C = 64
PREFILL_C = 128
SMEM_BYTES = 227 << 10  # that a thread block may have
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
    """Why these kernels cannot run, or None. compute_capability None asks the default device if
    that is a GPU.
    """
    if compute_capability is None and jax.default_backend() == "gpu":
        compute_capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    hopper = compute_capability is None or compute_capability.partition(".")[0] == "9"
    heads = f"{num_heads} query heads over {num_kv_heads} KV heads"
    reasons = {
        f"compute capability {compute_capability}: wgmma is Hopper's alone (9.0)": not hopper,
        f"dtype {jnp.dtype(dtype)}: only bfloat16 and float16": jnp.dtype(dtype)
        not in (jnp.bfloat16, jnp.float16),
        f"head_dim {head_dim}: only 64, 128 and 256": head_dim not in (64, 128, 256),
        f"block_size {block_size}: only 8, 16, 32, 64 and multiples of {PREFILL_C}": block_size % 8
        > 0
        or (block_size % PREFILL_C > 0 and PREFILL_C % block_size > 0),
        f"{heads}: only 1 to {Q} whole heads each": num_heads % num_kv_heads > 0
        or num_heads > Q * num_kv_heads,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "splits"))
def paged_attention_decode(
    q_SHD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    *,
    num_layers: int = 1,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
    splits: int | None = None,
) -> Array:
    """Attention of one query a row, the last token of its context; see
    `reference.paged_attention_decode`.

    interpret: None interprets where the default backend is the CPU. splits: thread blocks a
    context, None chooses. Raises NotImplementedError with the reason that `unsupported` gives.
    """
    S, H, D = q_SHD.shape
    interpret = _interpretation(interpret, q_SHD, pool)
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, pool.dtype
    G, C, N = H // K, DECODE_C, pool.shape[0] // num_layers
    rows = -(-G // 8) * 8  # of q that are copied: the unit of a swizzled tile
    X = splits or min(max(-(-264 // (S * K)), 1), 16, -(-block_table_SM.shape[1] * P // C))
    out_dtype = dtype if X == 1 else jnp.dtype(jnp.float32)
    # Two thread blocks share an SM where their registers fit (D = 64): one computes while the other
    # starts or ends.
    fixed = 4096 + Q * D * out_dtype.itemsize
    stages = (SMEM_BYTES // (2 if D == 64 else 1) - fixed) // (C * 2 * D * dtype.itemsize)

    def kernel(
        q_ref, pool_ref, table_ref, contexts_ref, layer_ref, o_ref, lse_ref, buffers, barriers
    ):
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
                low, high = (
                    begin - (first + i) * C,
                    context - (first + i) * C,
                )  # slots of the tile that are seen
                plgpu.barrier_wait(full.at[stage])
                pl.when((low > 0) | (high < C))(lambda: _zero_unseen(kv_sm.at[stage], low, high))
                s = _scaled(_scores(q_sm, kv_sm.at[stage]), scale, soft_cap)
                slot = _iota((Q, C), 1)
                s = jnp.where((slot >= low) & (slot < high), s, NEG)
                p, acc, m, total = _fold(s, acc, m, total, dtype)
                acc = _add_values(acc, p, kv_sm.at[stage], interpret)
                plgpu.barrier_arrive(empty.at[stage])
                return acc, m, total

            acc, m, total = lax.fori_loop(0, count, body, _start(D))
            o_sm[...] = _normalized(acc, total).astype(out_dtype)
            lse_sm[...] = m + jnp.log2(
                jnp.maximum(total, 1.0)
            )  # a sum is at least 1, its maximum's weight, or 0
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_sm.at[pl.ds(0, rows)], o_ref.at[row, split, head])
            plgpu.copy_smem_to_gmem(lse_sm.at[pl.ds(0, rows)], lse_ref.at[row, split, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_sm.at[pl.ds(0, rows)], q_full)
            _stream(
                pool_ref,
                layer_ref[0] * N,
                table_ref.at[row],
                context,
                head,
                first,
                count,
                kv_sm,
                full,
                empty,
            )

    outputs = ((S, X, K, rows, D), out_dtype), ((S, X, K, rows), jnp.float32)
    q_and_o = plgpu.RefUnion(_tiled_smem((Q, D), dtype), _tiled_smem((Q, D), out_dtype))
    q = jnp.pad(q_SHD.astype(dtype).reshape(S, K, G, D), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    o, lse = _launch(
        kernel,
        q,
        pool,
        block_table_SM,
        context_lens_S,
        layer,
        interpret=interpret,
        warpgroups=2,
        grid={"head": K, "split": X, "row": S},
        out_type=[jax.ShapeDtypeStruct(*output) for output in outputs],
        scratch_types=(
            (_tiled_smem((stages, C, 2 * D), dtype), q_and_o, plgpu.SMEM((Q,), jnp.float32)),
            (plgpu.Barrier(), *_ring(stages, C // P, 1)),
        ),
    )
    o = o[:, 0] if X == 1 else combine(o, lse)
    return o[:, :, :G].reshape(S, H, D).astype(q_SHD.dtype)


def prefill_tiles(
    query_starts_S1: Array,
    context_lens_S: Array,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
) -> Array:
    """The query tiles of a step, int32 [A, 5]: row, first packed token, queries, position of the
    first, context.

    The same for all layers: make it once a step and hand it to each call. The most work comes
    first, so that the last tiles to start are short. Padding tokens make tiles of context 0, which
    write zeros; A is static, and tiles of the surplus have no queries. num_tokens is T.
    """
    S, B = context_lens_S.shape[0], 2 * Q // _tile_heads(num_heads, num_kv_heads)
    starts_R = query_starts_S1  # R = S + 1 rows: padding is the last
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


@functools.partial(jax.jit, static_argnames=_STATIC)
def paged_attention(
    q_THD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_starts_S1: Array,
    *,
    num_layers: int = 1,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
    tiles: Array | None = None,
) -> Array:
    """Causal attention of packed queries, any number a row; see `reference.paged_attention`.

    tiles: of `prefill_tiles`; None makes them. The rest as for `paged_attention_decode`.
    """
    T, H, D = q_THD.shape
    interpret = _interpretation(interpret, q_THD, pool)
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, pool.dtype
    C, N = PREFILL_C if D < 256 else PREFILL_C // 2, pool.shape[0] // num_layers
    heads = _tile_heads(H, K)
    stages = (SMEM_BYTES - 2048 - 2 * Q * D * dtype.itemsize) // (C * 2 * D * dtype.itemsize)
    if tiles is None:
        tiles = prefill_tiles(
            query_starts_S1, context_lens_S, num_tokens=T, num_heads=H, num_kv_heads=K
        )

    def kernel(q_ref, pool_ref, table_ref, tiles_ref, layer_ref, o_ref, buffers, barriers):
        kv_sm, qo_sm = buffers
        full, empty, zeroed, turn = barriers
        group, tile, warpgroup = (lax.axis_index(name) for name in ("heads", "tile", "warpgroup"))
        row, token, queries, position, context = (tiles_ref[tile, i] for i in range(5))
        low = (
            jnp.int32(0)
            if sliding_window is None
            else jnp.maximum(position - sliding_window + 1, 0)
        )
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
            # A warpgroup's rows are Q packed tokens that contain its queries, wherever the packed
            # tokens end.
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
                    first, last = (
                        low - i * C,
                        context - i * C,
                    )  # slots of the tile that hold something
                    ragged = (first > 0) | (last < C)

                    @pl.when(ragged & (warpgroup == 0))
                    def _():
                        _zero_unseen(kv_sm.at[stage], first, last)
                        plgpu.barrier_arrive(zeroed)

                    pl.when(ragged & (warpgroup == 1))(lambda: plgpu.barrier_wait(zeroed))
                s = _scaled(_scores(q_sm, kv_sm.at[stage], next_turn), scale, soft_cap)
                if masked:
                    key, query = (
                        _iota((Q, C), 1),
                        _iota((Q, C), 0) + (position + skip - offset - i * C),
                    )
                    seen = key <= query
                    if sliding_window is not None:
                        seen &= key > query - sliding_window
                    s = jnp.where(seen, s, NEG)
                p, acc, m, total = _fold(s, acc, m, total, dtype)
                if not interpret:
                    p, acc, m, total = lax.optimization_barrier((p, acc, m, total))
                next_turn()

                def wait_for_next():
                    following = lax.rem(i + 1 - begin, jnp.int32(stages))
                    pl.when(i + 1 < end)(lambda: plgpu.barrier_wait(full.at[following]))

                acc = _add_values(acc, p, kv_sm.at[stage], interpret, wait_for_next)
                plgpu.barrier_arrive(empty.at[stage])
                return acc, m, total

            state, masked_from = _start(D), begin
            # Tiles before the queries' own need no mask; but a second loop takes registers, which
            # these cases lack.
            if sliding_window is None and soft_cap is None and D < 256:
                masked_from = jnp.minimum(lax.div(position + 1, jnp.int32(C)), end)
                state = lax.fori_loop(
                    begin, masked_from, functools.partial(body, masked=False), state
                )
            acc, _, total = lax.fori_loop(
                masked_from, end, functools.partial(body, masked=True), state
            )
            pl.when(warpgroup == 0)(next_turn)

            _store_flat(o_sm, _normalized(acc, total).astype(dtype))
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
            plgpu.set_max_registers(32, action="decrease")
            head, count = lax.div(group * heads, jnp.int32(H // K)), end - begin
            _stream(
                pool_ref,
                layer_ref[0] * N,
                table_ref.at[row],
                context,
                head,
                begin,
                count,
                kv_sm,
                full,
                empty,
            )

    padding = max(0, Q - T)
    q_and_o = plgpu.RefUnion(_tiled_smem((2, Q, D), dtype), plgpu.SMEM((2, Q, D), dtype))
    q = jnp.pad(q_THD.astype(dtype), ((0, padding), (0, 0), (0, 0)))
    o = _launch(
        kernel,
        q,
        pool,
        block_table_SM,
        tiles,
        layer,
        interpret=interpret,
        warpgroups=3,
        grid={"heads": H // heads, "tile": tiles.shape[0]},
        out_type=jax.ShapeDtypeStruct((T + padding, H, D), dtype),
        scratch_types=(
            (_tiled_smem((stages, C, 2 * D), dtype), q_and_o),
            (*_ring(stages, C // P, 2), plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)),
        ),
    )
    return o[:T].astype(q_THD.dtype)


def _launch(
    kernel: Callable[..., None],
    q: Array,
    pool: Array,
    block_table_SM: Array,
    work: Array,
    layer: Array | int,
    *,
    interpret: bool | plgpu.InterpretGPUParams,
    grid: dict[str, int],
    warpgroups: int,
    **types: Any,
) -> Any:
    """Runs a kernel over q, the pool as [L*N, P, K, 2D], the table, what each row or tile has to
    do, and the layer.
    """
    if interpret:
        types["interpret"] = plgpu.InterpretGPUParams() if interpret is True else interpret
    call = plgpu.kernel(
        kernel,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **types,
    )
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    _, P, K2, D = pool.shape
    return call(q, pool.reshape(-1, P, K2 // 2, 2 * D), block_table_SM, work, layer_1)


def _ring(stages: int, copies: int, readers: int) -> tuple[plgpu.Barrier, plgpu.Barrier]:
    """Of each stage: that its copies (at least one) have all arrived, and that its readers are all
    done with it.
    """
    full = plgpu.Barrier(num_arrivals=max(1, copies), num_barriers=stages)
    return full, plgpu.Barrier(num_arrivals=readers, num_barriers=stages)


def _tile_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads of a prefill tile: its two warpgroups take one each or, of an odd group, the same
    one.
    """
    return 1 if num_heads // num_kv_heads % 2 else 2


def _interpretation(interpret: Any, q: Array, pool: Array) -> bool | plgpu.InterpretGPUParams:
    """How to interpret the kernel, or False; NotImplementedError where it cannot run at all."""
    (_, P, K2, D), H = pool.shape, q.shape[1]
    reason = unsupported(
        dtype=pool.dtype, head_dim=D, block_size=P, num_heads=H, num_kv_heads=K2 // 2
    )
    if reason is not None:
        raise NotImplementedError(f"Mosaic GPU attention: {reason}")
    return jax.default_backend() == "cpu" if interpret is None else interpret


def _tiled_smem(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory in the layout that wgmma reads and TMA writes without bank conflicts."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _stream(pool_ref, base, table_ref, context, head, first, count, kv_sm, full, empty) -> None:
    """Copies KV tiles first, ..., first + count - 1 of a row's head through the ring, each as soon
    as a stage is free.

    base: of the layer's pool rows. Past the context's end comes its last block again: the table may
    end there.
    """
    (stages, C, _), P = kv_sm.shape, pool_ref.shape[1]
    last = lax.div(context - 1, jnp.int32(P))

    @pl.loop(0, count)
    def _(i):
        slot, stage = (first + i) * C, lax.rem(i, jnp.int32(stages))
        blocks = (
            base + table_ref[jnp.minimum(lax.div(slot + j, jnp.int32(P)), last)]
            for j in range(0, C, P)
        )
        if P > 8:  # read before the wait, if registers can hold them
            blocks = [*blocks]
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
        for j, block in enumerate(blocks):
            # A whole block or, where that is larger, the tile's part of it.
            src = pool_ref.at[block, :, head]
            if P > C:
                src = pool_ref.at[
                    block, pl.ds(pl.multiple_of(lax.rem(slot, jnp.int32(P)), C), C), head
                ]
            plgpu.copy_gmem_to_smem(src, kv_sm.at[stage, pl.ds(j * P, min(C, P))], full.at[stage])

    # Every arrival has to be seen: the interpreter insists.
    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(i):
        plgpu.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])


def _start(D: int) -> tuple[Array, Array, Array]:
    """Accumulator [Q, D], running maximum [Q] and sum [Q] of an online softmax."""
    acc = plgpu.layout_cast(jnp.zeros((Q, D), jnp.float32), _WGMMA)
    m, total = (
        plgpu.layout_cast(jnp.full((Q,), x, jnp.float32), _WGMMA.reduce(1)) for x in (NEG, 0.0)
    )
    return acc, m, total


def _iota(shape: tuple[int, int], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_WGMMA)


def _scores(q_sm, kv_sm, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """q . k, [Q, C] in f32; `meanwhile` runs while the product does."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, q_sm, kv_sm.at[:, pl.ds(0, q_sm.shape[1])].transpose((1, 0)))
        meanwhile()
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((Q, kv_sm.shape[0]), jnp.float32))


def _scaled(s: Array, scale: float, soft_cap: float | None) -> Array:
    """Scores in base 2, capped. The hardware's own tanh is good to 11 bits only, which a cap of 50
    would show.
    """
    if soft_cap is None:
        return s * (scale * LOG2E)
    tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * LOG2E * scale / soft_cap)))
    return tanh * (soft_cap * LOG2E)


def _fold(s, acc, m, total, dtype) -> tuple[Array, Array, Array, Array]:
    """Weights of a tile's scores, and the state of the softmax brought to the new maximum."""
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
    total = total * alpha + jnp.sum(p, axis=1)
    return p.astype(dtype), acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), m_new, total


def _add_values(
    acc, p, kv_sm, interpret: Any, meanwhile: Callable[[], None] = lambda: None
) -> Array:
    """acc + p . v, [Q, D]; `meanwhile` runs while the product does."""
    D = acc.shape[1]
    v_sm = kv_sm.at[:, pl.ds(D, D)]
    if interpret:  # the interpreter knows wgmma neither on registers nor into a given accumulator
        acc = acc + jnp.dot(p, v_sm[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders this plain read before the copy that refills the stage
        meanwhile()
        return acc

    def product(acc_ref):
        plgpu.wgmma(acc_ref, p, v_sm)
        meanwhile()

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))  # pyright: ignore[reportReturnType]


def _normalized(acc, total) -> Array:
    """What the softmax weighs to; zeros where nothing was seen."""
    return acc * lax.broadcast_in_dim(1.0 / jnp.where(total > 0, total, 1.0), acc.shape, [0])


def _zero_unseen(kv_sm, low, high) -> None:
    """Zeroes a tile's values outside of the slots low, ..., high - 1."""
    C, D = kv_sm.shape[0], kv_sm.shape[1] // 2
    for c, d in itertools.product(
        range(0, C, 64), range(D, 2 * D, 64)
    ):  # in pieces, to spare registers
        v_sm = kv_sm.at[pl.ds(c, 64), pl.ds(d, 64)]
        slot = _iota((64, 64), 0) + c
        v = plgpu.load(v_sm, layout=_WGMMA)
        v_sm[...] = jnp.where((slot >= low) & (slot < high), v, jnp.zeros_like(v))
    plgpu.commit_smem()


def _store_flat(ref, x: Array) -> None:
    """Stores to shared memory without tiles, of which TMA can copy any number of rows; bank
    conflicts are accepted.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
