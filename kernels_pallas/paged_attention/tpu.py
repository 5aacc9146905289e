"""Paged attention for TPU: one Pallas kernel for prefill and decode alike; a decode step is one
query a row.

The grid walks over items: pairs of a query tile (B packed tokens) and a row that has tokens in it.
An item goes through the KV tiles (U blocks) that its queries see, by online softmax. Blocks come by
DMA into one of two buffers while the other is computed with; an item's last KV tile starts the next
item's first one, so that the memory never idles. Items of one query tile follow each other and
share its running maximum, sum and accumulator: tokens of other items see nothing, which changes
nothing. References are indexed plainly (no bitcast or reshape of one), so that what is compiled
also runs in the interpreter.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim; Y, X the last two dimensions of the pool; A items, B tokens
of a query tile, Q = B*G, U blocks of a KV tile, C = U*P tokens, W 32-bit words of a token in each
lane.
"""

import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from kernels_pallas.paged_attention.common import NEG, rows_of

KV_TILE = 1 << 20  # bytes, where that makes 128 to 512 tokens
SCORES = 1 << 17  # of the heads that are computed together: one's matmuls hide another's reductions
QUERY_TILE = 6 << 20  # bytes of queries, output and softmax state
VMEM, SMEM = (
    48 << 20,
    960 << 10,
)  # of at least 64 MiB and 1 MiB since TPU v5; the compiler needs some too

_i32 = jnp.int32
_options = (
    "num_layers",
    "scale",
    "sliding_window",
    "soft_cap",
    "num_kv_heads",
    "interpret",
    "tiles",
    "kernel",
)
_jit = functools.partial(jax.jit, static_argnames=_options)


def pool_shape(num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """(Y, X), the last two dimensions of a pool that XLA updates in place on TPU; `to_pool` says
    what is where.
    """
    rows, X = (
        (num_kv_heads, 128) if head_dim <= 64 else (2 * num_kv_heads, -(-head_dim // 128) * 128)
    )
    return next((n for n in (2, 4) if rows <= n), -(-rows // 8) * 8), X


def to_pool(kv_2KD: Array) -> Array:
    """Keys and values [..., 2K, D] (K0, V0, K1, V1, ...) as [..., Y, X], padded with zeros.

    Heads of up to 64 are packed: K in the first 64 lanes of a row, V in the others. Longer ones
    have a row for each.
    """
    *lead, K2, D = kv_2KD.shape
    Y, X = pool_shape(K2 // 2, D)
    if D <= 64:
        kv_2KD = _pad(kv_2KD, (*lead, K2, 64)).reshape(*lead, K2 // 2, X)
    return _pad(kv_2KD, (*lead, Y, X))


def _pad(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])


def unsupported(
    *,
    dtype: Any,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    num_rows: int = 1,
    blocks_per_row: int = 1,
    device_kind: str = "TPU",
) -> str | None:
    """Why the kernel cannot run with these (the pool's dtype; heads of one device), or None if it
    can.
    """
    (Y, X), itemsize = pool_shape(num_kv_heads, head_dim), jnp.dtype(dtype).itemsize
    vmem = 3 * max(block_size, 128) * Y * X * itemsize + 16 * _query_bytes(num_heads, X, itemsize)
    smem, old = 4 * num_rows * (blocks_per_row + 4), ("TPU v2", "TPU v3", "TPU v4")
    heads = f"{num_heads} query heads over {num_kv_heads} KV heads"
    reasons = {
        f"{device_kind}: only TPU v5 and newer": not device_kind.startswith("TPU")
        or device_kind.startswith(old),
        f"dtype {jnp.dtype(dtype)}: only bfloat16 and float32": jnp.dtype(dtype)
        not in (jnp.bfloat16, jnp.float32),
        f"{heads}: only whole numbers of them": num_heads % num_kv_heads > 0,
        f"{heads} of {head_dim}, blocks of {block_size}: {vmem >> 20} MiB of vector memory": vmem
        > VMEM * 3 // 4,
        f"a block table of {num_rows} x {blocks_per_row}: {smem >> 10} KiB of scalar memory": smem
        > SMEM,
    }
    return next((reason for reason, wrong in reasons.items() if wrong), None)


def _query_bytes(H: int, X: int, itemsize: int) -> int:
    """A token of a query tile in VMEM: two each of q and o, the accumulator; the maximum and the
    sum in 128 lanes.
    """
    return H * (X * (4 * itemsize + 4) + 2 * 128 * 4)


def _kernel(
    base,
    row_A,
    tile_A,
    table,
    context_S,
    start_S1,
    q,
    pool,
    o,
    blocks,
    words,
    top,
    total,
    acc,
    turn,
    arrived,
    *,
    B: int,
    W: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    packed: bool,
) -> None:
    """base [2]: the layer's first block, number of items. table [S*M]. q, o [K, Q, X]. pool [L*N,
    ...], in HBM.

    Scratch: blocks [2, U, ...], the two buffers. words [X/128, C*W, 128], a KV tile as 32-bit
    words, zero where unseen. top and total [K, Q, 128], each value in all lanes. acc [K, Q, X].
    turn [1], KV tiles met so far, whose parity says which buffer is whose. arrived, a semaphore a
    buffer.
    """
    K, Q, X = q.shape
    U, C, G, M = blocks.shape[1], words.shape[1] // W, Q // B, table.shape[0] // context_S.shape[0]
    P, narrow = C // U, blocks.dtype == jnp.bfloat16
    item, items = pl.program_id(0), base[1]

    def span(item):
        """The row; what to add to a packed token's index to get its position; positions seen:
        first, last + 1.
        """
        row, first = row_A[item], tile_A[item] * B
        shift, begin = context_S[row] - start_S1[row + 1], 0
        if sliding_window is not None:
            begin = jnp.maximum(jnp.maximum(first, start_S1[row]) + shift - (sliding_window - 1), 0)
        return row, shift, begin, jnp.minimum(first + B, start_S1[row + 1]) + shift

    def copy(item, j, slot, act: str) -> None:
        """Start, or await, the blocks of KV tile j that an item sees."""
        row, _, begin, end = span(item)

        def block(u, _):
            source = pool.at[base[0] + table[row * M + u]]
            getattr(
                pltpu.make_async_copy(source, blocks.at[slot, u - j * U], arrived.at[slot]), act
            )()

        first, stop = (
            jnp.maximum(lax.div(begin, P), j * U),
            jnp.minimum(lax.div(end + P - 1, P), (j + 1) * U),
        )
        lax.fori_loop(first, stop, block, None)

    def pool_row(y: int) -> Array:
        """Row y of each token, [C, X]. Two rows of bf16 share a word, and a bf16 is the upper half
        of an f32.
        """
        strided = pl.ds(y // 2 if narrow else y, C, stride=W)
        w = jnp.concatenate([words[i, strided, :] for i in range(X // 128)], axis=1)
        w = (w & jnp.uint32(0xFFFF0000) if y % 2 else w << 16) if narrow else w
        return pltpu.bitcast(w, jnp.float32).astype(blocks.dtype)

    def dot(x, y, axis_of_y: int) -> Array:
        precision = None if narrow else lax.Precision.HIGHEST
        form = (((1,), (axis_of_y,)), ((), ()))
        return lax.dot_general(x, y, form, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(item < items)
    def _():
        tile = tile_A[item]
        row, shift, begin, end = span(item)
        last = lax.div(end - 1, C)

        @pl.when(item == 0)
        def _():
            turn[0] = 0
            copy(0, lax.div(begin, C), 0, "start")

        @pl.when((item == 0) | (tile_A[jnp.maximum(item - 1, 0)] != tile))
        def _():
            top[...] = jnp.full_like(
                top, NEG / 2
            )  # above NEG: what is masked weighs nothing even where all is
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        def kv_tile(j, _):
            slot = lax.rem(turn[0], 2)

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
            flat = blocks[slot].reshape(-1, X)
            flat = pltpu.bitcast(flat, jnp.uint32) if narrow else flat
            # 0 * NaN is NaN, and slots that no query sees, or no copy reached, may hold any bits.
            at = lax.broadcasted_iota(_i32, flat.shape, 0) + j * (C * W)
            flat = jnp.where((at >= begin * W) & (at < end * W), flat, jnp.zeros_like(flat))
            for i in range(X // 128):
                words[i] = flat[:, i * 128 : (i + 1) * 128]

            # Row r of the query tile is its token r // G, and x <= r // G where x * G <= r.
            r = lax.broadcasted_iota(_i32, (Q, C), 0)
            ahead = (lax.broadcasted_iota(_i32, (Q, C), 1) + (j * C - tile * B - shift)) * G
            mask = (
                (ahead <= r)
                & (r >= (start_S1[row] - tile * B) * G)
                & (r < (start_S1[row + 1] - tile * B) * G)
            )
            if sliding_window is not None:
                mask &= ahead + sliding_window * G > r
            for some in itertools.batched(range(K), max(1, SCORES // (Q * C))):
                kv = [
                    [pool_row(y) for y in ((h, h) if packed else (2 * h, 2 * h + 1))] for h in some
                ]
                s_QC = [dot(q[h], k_CX, 1) * scale for h, (k_CX, _) in zip(some, kv, strict=True)]
                s_QC = (
                    s_QC if soft_cap is None else [soft_cap * jnp.tanh(s / soft_cap) for s in s_QC]
                )
                s_QC = [jnp.where(mask, s, NEG) for s in s_QC]
                old = [top[h] for h in some]
                new = [
                    jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
                    for m, s in zip(old, s_QC, strict=True)
                ]
                p_QC = [
                    jnp.exp(s - m[:, :1]).astype(blocks.dtype)
                    for m, s in zip(new, s_QC, strict=True)
                ]
                pv = [dot(p, v_CX, 0) for p, (_, v_CX) in zip(p_QC, kv, strict=True)]
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


@_jit
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
    num_kv_heads: int | None = None,
    interpret: bool | pltpu.InterpretParams | None = None,
    tiles: tuple[int, int] | None = None,
    kernel: Literal["own", "jax"] = "own",
) -> Array:
    """Causal attention of packed queries, any number a row; see `reference.paged_attention`.

    pool [L*N, P, Y, X], or [L*N, P, 2K, D], which the interpreter pads first. num_kv_heads: K,
    where Y is padded. interpret: None is the TPU interpreter on CPU; False compiles. tiles: (B, U),
    by default made to fit. kernel: "jax" is the one that comes with jax, which knows no packed or
    padded heads and no interpreter. NotImplementedError, with the reason, for what cannot run.
    """
    T, H, D = q_THD.shape
    S, M = block_table_SM.shape
    cpu = jax.default_backend() == "cpu"
    interpret = cpu if interpret is None else interpret
    K = num_kv_heads or pool.shape[2] // (1 if D <= 64 and pool.shape[3] == 128 else 2)
    if interpret and pool.shape[2:] != pool_shape(K, D):
        pool = to_pool(pool)
    _, P, Y, X = pool.shape
    reason = unsupported(
        dtype=pool.dtype,
        head_dim=D,
        block_size=P,
        num_heads=H,
        num_kv_heads=K,
        num_rows=S,
        blocks_per_row=M,
        device_kind="TPU" if cpu or interpret else jax.devices()[0].device_kind,
    )
    if pool_shape(K, D) != (Y, X):
        reason = (
            f"a pool of [..., {Y}, {X}] would be copied; {K} KV heads of {D} need [..., "
            f"{pool_shape(K, D)}]"
        )
    if kernel == "jax" and (interpret or (2 * K, D) != (Y, X)):
        reason = (
            f"jax's kernel, {K} KV heads of {D} in a pool of [..., {Y}, {X}]: only "
            "unpadded and compiled"
        )
    if reason:
        raise NotImplementedError(f"TPU attention: {reason}")
    G, itemsize = H // K, pool.dtype.itemsize
    # Q is a multiple of 16: whole tiles of bf16.
    B = max(8, min(T // S, QUERY_TILE // _query_bytes(H, X, itemsize), 512 // G))
    U = max(1, min(max(KV_TILE // (Y * X * itemsize), 128), 512) // P)
    B, U = tiles or (max(1 << B.bit_length() - 1, 16 if G % 2 else 8), U)
    live_T = jnp.arange(T, dtype=_i32) < query_starts_S1[-1]
    first_block = jnp.asarray(layer * (pool.shape[0] // num_layers), _i32)
    starts_S, ends_S = query_starts_S1[:-1], query_starts_S1[1:]
    if kernel == "jax":
        # Its rows are a prefix, up to the last one with queries, and all have a context: the next
        # one's is prefetched.
        rows_1 = jnp.sum(starts_S < query_starts_S1[-1], dtype=_i32)[None]
        args = (
            jnp.maximum(context_lens_S, 1),
            block_table_SM + first_block,
            query_starts_S1,
            rows_1,
        )
        o_THD = ragged_paged_attention(
            q_THD.astype(pool.dtype),
            pool,
            *args,
            sm_scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            num_kv_pages_per_block=min(U, M),
            num_queries_per_block=B,
            vmem_limit_bytes=VMEM,
        )
        return jnp.where(live_T[:, None, None], o_THD.astype(q_THD.dtype), 0)

    Q, C, W, count = B * G, U * P, Y * itemsize // 4, -(-T // B)
    items_S = jnp.where(
        (ends_S > starts_S) & (context_lens_S > 0), (ends_S - 1) // B - starts_S // B + 1, 0
    )
    items = jnp.sum(items_S, dtype=_i32)
    item_A = jnp.minimum(
        jnp.arange(min(T, count + S), dtype=_i32), jnp.maximum(items - 1, 0)
    )  # the last repeats
    row_A, nth_A = rows_of(items_S, item_A)
    tile_A, base = (
        jnp.minimum(starts_S[row_A] // B + nth_A, count - 1),
        jnp.stack([first_block, items]),
    )
    scalars = (base, row_A, tile_A, block_table_SM.reshape(-1), context_lens_S, query_starts_S1)

    q = (
        _pad(q_THD.astype(pool.dtype), (count * B, H, X))
        .reshape(-1, K, G, X)
        .swapaxes(0, 1)
        .reshape(K, -1, X)
    )
    query_tile = pl.BlockSpec((K, Q, X), lambda item, base, row_A, tile_A, *_: (0, tile_A[item], 0))
    if (
        Y % 8 == 0 or X == 128
    ):  # the same bytes; otherwise XLA would copy the pool, and the kernel makes it flat
        pool = pool.reshape(-1, P * Y, X)
    buffers = pltpu.VMEM((2, U, *pool.shape[1:]), pool.dtype)
    words = pltpu.VMEM((X // 128, C * W, 128), jnp.float32 if W == Y else jnp.uint32)
    state = [pltpu.VMEM((K, Q, lanes), jnp.float32) for lanes in (128, 128, X)]
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "packed": D <= 64,
    }
    o = pl.pallas_call(
        functools.partial(_kernel, B=B, W=W, **options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=item_A.shape,
            in_specs=[query_tile, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=query_tile,
            scratch_shapes=[
                buffers,
                words,
                *state,
                pltpu.SMEM((1,), _i32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q_THD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM
        ),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="paged_attention",
    )(*scalars, q, pool)
    lead = 64 if D <= 64 else 0  # packed: what the probabilities make of V's lanes
    o_THD = o.reshape(K, -1, G, X).swapaxes(0, 1).reshape(-1, H, X)[:T, :, lead : lead + D]
    return jnp.where(live_T[:, None, None], o_THD, 0)


@_jit
def paged_attention_decode(
    q_SHD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    **options: Any,
) -> Array:
    """The same for one query a row, [S, H, D]; a row with context 0 is padding and gives zeros.
    Options as above.
    """
    starts_S1 = jnp.arange(q_SHD.shape[0] + 1, dtype=_i32)
    o_SHD = paged_attention(
        q_SHD, pool, layer, block_table_SM, context_lens_S, starts_S1, **options
    )
    return jnp.where((context_lens_S > 0)[:, None, None], o_SHD, 0)
