"""The call of the TPU kernel: the layout of its pool, its tile sizes, and its list of items.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim, V width of a value; Y, X the last two dimensions of the
pool; A items, B tokens of a query tile, Q = B*G, U blocks of a KV tile, C = U*P tokens, W 32-bit
words of a token in each lane; XO the width of what comes out.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.common import interpretation, rows_of
from kernels_pallas.paged_attention.interface import (
    AttentionOptions,
    Options,
    Shapes,
    prepare_nothing,
    shapes_of,
    unknown_options,
)
from kernels_pallas.paged_attention.pool_layout import PoolLayout, ScaledPool, pad
from kernels_pallas.paged_attention.tpu.kernel import kernel

KV_TILE = 1 << 20  # bytes, where that makes 128 to 512 tokens
QUERY_TILE = 6 << 20  # bytes of queries, output and softmax state
# Of at least 64 MiB and 1 MiB since TPU v5; the compiler needs some too.
VMEM, SMEM = 48 << 20, 960 << 10
LANES = 128  # numbers in a row of memory
OPTIONS = ("scale", "soft_cap", "window", "value_dim", "sinks", "latent", "ends")

_i32 = jnp.int32
_jit = functools.partial(jax.jit, static_argnames="options")

prepare = prepare_nothing


def pool_layout(num_kv_heads: int, head_dim: int, value_dim: int | None = None) -> PoolLayout:
    """Return (Y, X), the last two dimensions of a pool that XLA updates in place on TPU.

    Heads of up to 64 are packed: K in the first 64 lanes of a row, V in the others. Longer heads
    have a row for K and a row for V. Where values are of another width, they follow K in its row,
    as a rotated key follows its latent; one such row stays one, which `kv_write` and this kernel
    take for [L*N, P, X]. In 8 bits, scales run along lanes, as the scores that they multiply do.
    """
    key_width = None
    if value_dim is not None:
        rows, width, key_width = num_kv_heads, -(-(head_dim + value_dim) // LANES) * LANES, head_dim
        head_width = width
    elif head_dim <= 64:
        rows, width, head_width = num_kv_heads, 128, 64
    else:
        rows, width = 2 * num_kv_heads, -(-head_dim // 128) * 128
        head_width = width
    if key_width is None or rows > 1:
        rows = next((n for n in (2, 4) if rows <= n), -(-rows // 8) * 8)
    return PoolLayout(
        rows=rows,
        width=width,
        head_width=head_width,
        slots_last=True,
        lanes=LANES,
        key_width=key_width,
    )


def unsupported(shapes: Shapes, attention: AttentionOptions, device: Any) -> str | None:
    """Return why these shapes and options cannot run on a device, or None."""
    if reason := unknown_options(attention, OPTIONS):
        return reason
    layout = pool_layout(shapes.num_kv_heads, *_vectors(shapes.head_dim, attention))
    dtype, num_rows, blocks_per_row = (
        jnp.dtype(shapes.dtype),
        shapes.num_rows,
        shapes.blocks_per_row,
    )
    # Two buffers and the words, if there are any; in 8 bits, words of 32.
    token_bytes = layout.rows * layout.width * (6 if shapes.scaled else 3 * dtype.itemsize)
    vmem = max(shapes.block_size, 128) * token_bytes
    vmem += 16 * _query_bytes(shapes.num_heads, layout.width, dtype.itemsize)
    # Two rows of the table; of each row its context, its start and an item of two numbers or more,
    # three where queries see ahead.
    numbers = 8 if attention.ends else 6
    smem = 4 * (2 * -(-blocks_per_row // LANES) * LANES + numbers * num_rows)
    heads = f"{shapes.num_heads} query heads over {shapes.num_kv_heads} KV heads"
    kind, old = "TPU" if device is None else device.device_kind, ("TPU v2", "TPU v3", "TPU v4")
    if not kind.startswith("TPU") or kind.startswith(old):
        return f"{kind}: only TPU v5 and newer"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype {dtype}: only bfloat16 and float32"
    if shapes.scaled and (shapes.block_size % 8 or _of_lanes(shapes.block_size) is None):
        sizes = f"only 8, 16, 32, 64 and multiples of {LANES}"
        return f"{shapes.scaled}, block_size {shapes.block_size}: {sizes}"
    if layout.rows == 1 and (dtype != jnp.bfloat16 or shapes.block_size % 8):
        form = f"{heads} in one row a token, in {dtype}, blocks of {shapes.block_size}"
        return f"{form}: only in bfloat16, in blocks of whole 8s, else the pool would be copied"
    if shapes.scaled and attention.latent and attention.value_width(shapes.head_dim) % LANES:
        return f"{shapes.scaled}, latents of {attention.value_dim}: only multiples of {LANES}"
    if shapes.scaled and layout.rows == 2:
        of = f"{shapes.num_kv_heads} KV heads of {shapes.head_dim}"
        return f"{shapes.scaled}, {of}: two rows, which in 8 bits take the memory of four"
    if shapes.num_heads % shapes.num_kv_heads > 0:
        return f"{heads}: only whole numbers of them"
    if vmem > VMEM * 3 // 4:
        sizes = f"{heads} of {shapes.head_dim}, blocks of {shapes.block_size}"
        return f"{sizes}: {vmem >> 20} MiB of vector memory"
    if smem > SMEM:
        table = f"a block table of {num_rows} x {blocks_per_row}"
        return f"{table}: {smem >> 10} KiB of scalar memory"
    return None


def _vectors(head_dim: int, attention: AttentionOptions) -> tuple[int, int | None]:
    """Return the widths of the two vectors that the pool holds of a KV head."""
    if not attention.latent:
        return head_dim, attention.value_dim
    latent = attention.value_width(head_dim)
    return latent, head_dim - latent


def _of_lanes(block_size: int) -> int | None:
    """Return the number of blocks that fill whole lanes together; None if no number does."""
    if block_size % LANES == 0:
        return 1
    return None if LANES % block_size else LANES // block_size


def _query_bytes(H: int, X: int, itemsize: int) -> int:
    """Return the bytes in VMEM of one token of a query tile: two buffers each of q and o, the
    accumulator, and the maximum and the sum in 128 lanes.
    """
    return H * (X * (4 * itemsize + 4) + 2 * 128 * 4)


def tile_sizes(
    shapes: Shapes, pool: Array | ScaledPool, *, num_tokens: int, latent: bool = False
) -> tuple[int, int]:
    """Return (B, U), tokens of a query tile and blocks of a KV tile, as large as memory allows.

    shapes: of the call, so that num_rows is S. pool: in this module's layout. num_tokens: T.
    latent: as of AttentionOptions.
    """
    (_, P, Y, X), itemsize = pool.shape, jnp.dtype(shapes.dtype).itemsize
    H, G = shapes.num_heads, shapes.num_heads // shapes.num_kv_heads
    # Q = B*G is a multiple of 16: whole tiles of bf16. Rows of other tokens than an item's are
    # multiplied in vain, which costs nothing under the copies, but for the many heads of latents.
    whole = 16 // math.gcd(G, 16)
    least = whole if latent else max(whole, 8)
    B = max(
        least,
        min(num_tokens // shapes.num_rows, QUERY_TILE // _query_bytes(H, X, itemsize), 512 // G),
    )
    U = max(1, min(max(KV_TILE // (Y * X * pool.dtype.itemsize), 128), 512) // P)
    if shapes.scaled:  # whole lanes of scales
        U = -(-U // (_of_lanes(P) or 1)) * (_of_lanes(P) or 1)
    return 1 << B.bit_length() - 1, U


@_jit
def prefill(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    prepared: None = None,
    *,
    options: Options,
    sinks_H: Array | None = None,
    ends_T: Array | None = None,
) -> Array:
    """Causal attention of packed queries, any number a row; see `reference.prefill`.

    pool [L*N, P, Y, X], or [L*N, P, 2K, D], which the interpreter pads first; or a ScaledPool of
    either. Raises NotImplementedError with the reason for what cannot run.
    """
    del prepared
    rows = (block_table_SM, context_lens_S, query_start_loc_S1)
    return attend(q_THD, pool, layer, *rows, options=options, sinks_H=sinks_H, ends_T=ends_T)


def attend(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    *,
    options: Options,
    sinks_H: Array | None = None,
    ends_T: Array | None = None,
    tiles: tuple[int, int] | None = None,
) -> Array:
    """Like `prefill`, with query tiles and KV tiles of given sizes.

    tiles: (B, U), tokens of a query tile and blocks of a KV tile; None takes `tile_sizes`.
    """
    T, H, D = q_THD.shape
    S, M = block_table_SM.shape
    attention = options.attention
    value_dim, V = attention.value_dim, attention.value_width(D)
    packed = value_dim is not None or D <= 64  # K and V of a head lie in one row
    is_plain = value_dim is None and not (packed and pool.shape[3] == 128)
    K = options.num_kv_heads or pool.shape[2] // (2 if is_plain else 1)
    shapes = shapes_of(q_THD, pool, block_table_SM, dataclasses.replace(options, num_kv_heads=K))
    interpret = interpretation("TPU attention", unsupported, shapes, options)
    needed = pool_layout(K, *_vectors(D, attention))
    if isinstance(pool, ScaledPool):
        pool = needed.pack_scaled(pool) if interpret and not pool.slots_last else pool
    elif interpret and pool.shape[2:] != (needed.rows, needed.width):
        pool = needed.pack(pool)
    _, P, Y, X = pool.shape
    if (needed.rows, needed.width) != (Y, X):
        raise NotImplementedError(
            f"TPU attention: a pool of [..., {Y}, {X}] would be copied; {K} KV heads of {D} need "
            f"[..., {needed.rows}, {needed.width}]"
        )
    G, dtype, itemsize = H // K, jnp.dtype(shapes.dtype), jnp.dtype(shapes.dtype).itemsize
    B, U = tiles or tile_sizes(shapes, pool, num_tokens=T, latent=attention.latent)
    live_T = jnp.arange(T, dtype=_i32) < query_start_loc_S1[-1]
    first_block = jnp.asarray(layer * (pool.shape[0] // options.num_layers), _i32)
    starts_S, ends_S = query_start_loc_S1[:-1], query_start_loc_S1[1:]
    Q, C, count = B * G, U * P, -(-T // B)
    W = Y if shapes.scaled else Y * itemsize // 4
    items_S = jnp.where(
        (ends_S > starts_S) & (context_lens_S > 0), (ends_S - 1) // B - starts_S // B + 1, 0
    )
    items = jnp.sum(items_S, dtype=_i32)
    # The last repeats.
    item_A = jnp.minimum(jnp.arange(min(T, count + S), dtype=_i32), jnp.maximum(items - 1, 0))
    row_A, nth_A = rows_of(items_S, item_A)
    tile_A, base = (
        jnp.minimum(starts_S[row_A] // B + nth_A, count - 1),
        jnp.stack([first_block, items]),
    )
    ends: list[Array] = []
    if ends_T is not None:
        ends_NB = pad(jnp.asarray(ends_T, _i32), (count * B,)).reshape(count, B)
        token_AB = tile_A[:, None] * B + jnp.arange(B, dtype=_i32)[None, :]
        is_mine = (token_AB >= starts_S[row_A][:, None]) & (token_AB < ends_S[row_A][:, None])
        stop_A = jnp.max(jnp.where(is_mine, ends_NB[tile_A], 0), axis=1)
        base = jnp.concatenate([base, stop_A])
        # Of each row of a query tile, in all lanes.
        ends = [jnp.broadcast_to(jnp.repeat(ends_NB.reshape(-1), G)[:, None], (count * Q, LANES))]
    scalars = (base, row_A, tile_A, context_lens_S, query_start_loc_S1)
    # Whole rows of 128, which a copy may take some of: those of a row of the table.
    table = pad(block_table_SM, (S, -(-M // LANES) * LANES)).reshape(S, -1, LANES)

    q = (
        pad(q_THD.astype(dtype), (count * B, H, X))
        .reshape(-1, K, G, X)
        .swapaxes(0, 1)
        .reshape(K, -1, X)
    )
    # A latent is the first lanes of its row, and no others are wanted of the values.
    XO = -(-V // LANES) * LANES if attention.latent else X
    query_tile, out_tile = (
        pl.BlockSpec((K, Q, width), lambda item, base, row_A, tile_A, *_: (0, tile_A[item], 0))
        for width in (X, XO)
    )
    values: Any = pool
    scales: list[Array] = []
    if isinstance(pool, ScaledPool):
        values, scales = pool.values, [pool.scales]
    # The same bytes; otherwise XLA would copy the pool, and the kernel makes it flat.
    if Y == 1 or Y % 8 == 0 or X == 128:
        values = values.reshape(-1, P * Y, X)
    buffers = [pltpu.VMEM((2, U, *x.shape[1:]), x.dtype) for x in (values, *scales)]
    in_place = not scales and X == LANES and interpret is False
    one_row = not scales and Y == 1
    if not in_place and not one_row:
        words = jnp.float32 if W == Y else jnp.uint32
        buffers.append(pltpu.VMEM((X // LANES, C * W, LANES), words))
    state = [pltpu.VMEM((K, Q, lanes), jnp.float32) for lanes in (128, 128, XO)]
    sinks = []
    if sinks_H is not None:  # of each row of a query tile, in all lanes
        start_KG = jnp.asarray(sinks_H, jnp.float32).reshape(K, G)
        sinks = [jnp.broadcast_to(jnp.tile(start_KG, (1, B))[:, :, None], (K, Q, 128))]
    whole = pl.BlockSpec((K, Q, 128), lambda *_: (0, 0, 0))
    of_ends = pl.BlockSpec((Q, LANES), lambda item, base, row_A, tile_A, *_: (tile_A[item], 0))
    o = pl.pallas_call(
        functools.partial(
            kernel,
            B=B,
            P=P,
            W=W,
            scale=attention.scale,
            sliding_window=attention.window,
            soft_cap=attention.soft_cap,
            packed=packed,
            kv_dtype=pool.dtype.name if scales else None,
            in_place=in_place,
            one_row=one_row,
            latent=V if attention.latent else None,
            sees_ahead=bool(ends),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=item_A.shape,
            in_specs=[
                query_tile,
                *[pl.BlockSpec(memory_space=pl.ANY)] * (2 + len(scales)),
                *[whole] * len(sinks),
                *[of_ends] * len(ends),
            ],
            out_specs=out_tile,
            scratch_shapes=[
                *buffers,
                *state,
                pltpu.SMEM((2, *table.shape[1:]), _i32),
                pltpu.SMEM((1,), _i32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:2], XO), q_THD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM
        ),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="paged_attention",
    )(*scalars, q, values, table, *scales, *sinks, *ends)
    # Packed: what the probabilities make of V's lanes.
    lead = 0 if not packed or attention.latent else 64 if value_dim is None else D
    o_THV = o.reshape(K, -1, G, XO).swapaxes(0, 1).reshape(-1, H, XO)[:T, :, lead : lead + V]
    return jnp.where(live_T[:, None, None], o_THV, 0)


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
    """The same for one query a row, [S, H, D]; a row with context 0 is padding and gives zeros."""
    starts_S1 = jnp.arange(q_SHD.shape[0] + 1, dtype=_i32)
    rows = (block_table_SM, context_lens_S, starts_S1)
    o_SHD = prefill(q_SHD, pool, layer, *rows, options=options, sinks_H=sinks_H)
    return jnp.where((context_lens_S > 0)[:, None, None], o_SHD, 0)
