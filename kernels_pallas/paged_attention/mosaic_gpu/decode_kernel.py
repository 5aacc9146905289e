"""Decode: the G query heads of a KV head are rows of one 64-row product.

A context is split over several thread blocks so that few rows fill the card; the parts meet in a
combine outside. How many is static: it follows from the shapes.

Shapes: S rows, M blocks a row, L layers, N pool blocks, P block size, H query heads, K KV heads, G
= H/K, D head dim; C slots of a KV tile, Q rows of a product, X splits of a context.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.common import NEG, combine, interpretation
from kernels_pallas.paged_attention.interface import Options, shapes_of
from kernels_pallas.paged_attention.mosaic_gpu.pieces import (
    DECODE_C,
    SMEM_BYTES,
    Q,
    add_values,
    fold,
    iota,
    launch,
    normalized,
    ring,
    scaled,
    scores,
    softmax_start,
    stream_tiles,
    tiled_smem,
    unsupported,
    zero_unseen,
)


@functools.partial(jax.jit, static_argnames=("options", "splits"))
def decode(
    q_SHD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    *,
    options: Options,
    splits: int | None = None,
) -> Array:
    """Attention of one query a row, the last token of its context; see `reference.decode`.

    splits: thread blocks a context, None chooses. Raises NotImplementedError with the reason that
    `unsupported` gives.
    """
    S, H, D = q_SHD.shape
    shapes, window = shapes_of(q_SHD, pool, block_table_SM, options), options.sliding_window
    interpret = interpretation("Mosaic GPU attention", unsupported, shapes, options)
    P, K, dtype = pool.shape[1], pool.shape[2] // 2, pool.dtype
    G, C, N = H // K, DECODE_C, pool.shape[0] // options.num_layers
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
        begin = jnp.int32(0) if window is None else jnp.maximum(context - window, 0)
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
                # Slots of the tile that are seen.
                low, high = begin - (first + i) * C, context - (first + i) * C
                plgpu.barrier_wait(full.at[stage])
                pl.when((low > 0) | (high < C))(lambda: zero_unseen(kv_sm.at[stage], low, high))
                s = scaled(scores(q_sm, kv_sm.at[stage]), options)
                slot = iota((Q, C), 1)
                s = jnp.where((slot >= low) & (slot < high), s, NEG)
                p, acc, m, total = fold(s, acc, m, total, dtype)
                acc = add_values(acc, p, kv_sm.at[stage], interpret)
                plgpu.barrier_arrive(empty.at[stage])
                return acc, m, total

            acc, m, total = lax.fori_loop(0, count, body, softmax_start(D))
            o_sm[...] = normalized(acc, total).astype(out_dtype)
            # A sum is at least 1, its maximum's weight, or 0.
            lse_sm[...] = m + jnp.log2(jnp.maximum(total, 1.0))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_sm.at[pl.ds(0, rows)], o_ref.at[row, split, head])
            plgpu.copy_smem_to_gmem(lse_sm.at[pl.ds(0, rows)], lse_ref.at[row, split, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_sm.at[pl.ds(0, rows)], q_full)
            stream_tiles(
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
    q_and_o = plgpu.RefUnion(tiled_smem((Q, D), dtype), tiled_smem((Q, D), out_dtype))
    q = jnp.pad(q_SHD.astype(dtype).reshape(S, K, G, D), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    o, lse = launch(
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
            (tiled_smem((stages, C, 2 * D), dtype), q_and_o, plgpu.SMEM((Q,), jnp.float32)),
            (plgpu.Barrier(), *ring(stages, C // P, 1)),
        ),
    )
    o = o[:, 0] if X == 1 else combine(o, lse)
    return o[:, :, :G].reshape(S, H, D).astype(q_SHD.dtype)
