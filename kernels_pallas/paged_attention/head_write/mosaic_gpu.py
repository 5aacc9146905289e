"""Heads written on Hopper, in Pallas Mosaic GPU: a thread block takes one head, or a KV head's keys
or values, of 64 tokens.

TMA brings the rows to shared memory and takes them away: queries as they lie together, a key or a
value to its slot by copies of its own. A piece of a head has a buffer to itself: jax 0.12 looks for
a part of a buffer at the wrong place (docs/kernels.md). Where the tokens are no whole 64s, the last
64 end with them, and what two thread blocks write is the same. Numbers are computed in f32, where
products of 16 bits are exact, and rounded where the definition rounds.

Shapes: see the package; B tokens of a thread block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.implementation import capability_of
from kernels_pallas.paged_attention.head_write import triton
from kernels_pallas.paged_attention.head_write.interface import HeadNorm, refused
from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.mosaic_gpu.pieces import store_flat
from kernels_pallas.paged_attention.pool_layout import PoolLayout

ROWS = 64  # of the layout of a product, whose rows can be summed up
COLUMNS = 64  # of 16 bits: a row of a piece is copied from whole 128 bytes on
WGMMA = plgpu.Layout.WGMMA


def unsupported(shapes: Shapes, layout: PoolLayout, device: Any) -> str | None:
    """Return why this kernel cannot write a pool of a layout on a device, or None."""
    capability = capability_of(device)
    if capability is not None and capability != 9.0:
        return f"compute capability {capability}: only 9.0"
    if reason := refused(shapes, layout):
        return reason
    if jnp.dtype(shapes.dtype).itemsize != 2:
        return f"dtype {jnp.dtype(shapes.dtype)}: only bfloat16 and float16"
    if shapes.head_dim not in (64, 128, 256):
        return f"head_dim {shapes.head_dim}: only 64, 128 and 256"
    return None


@functools.partial(jax.jit, static_argnames=("norm", "num_layers", "interpret"))
def write_heads(
    qkv_TKXD: Array,
    pool: Array,
    layer: Array | int,
    slot_mapping_T: Array,
    *,
    scales: tuple[Array, Array] | None = None,
    norm: HeadNorm | None = None,
    rotation: tuple[Array, Array] | None = None,
    num_layers: int = 1,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return queries and the pool; see the package. Pairs that are not whole 64s apart are
    Triton's.
    """
    (T, K, X, D), rows, dtype = qkv_TKXD.shape, pool.shape[0], qkv_TKXD.dtype
    G, P, B = X - 2, pool.shape[1], min(T, ROWS)
    half = 0 if rotation is None else rotation[0].shape[-1]
    assert (scales is None) == (norm is None)
    if half % COLUMNS:
        given: Any = {"scales": scales, "norm": norm, "rotation": rotation}
        given |= {"num_layers": num_layers, "interpret": interpret}
        return triton.write_heads(qkv_TKXD, pool, layer, slot_mapping_T, **given)
    slots = rows // num_layers * P
    # First dimension and number of dimensions of each piece of a row.
    cuts = [(0, half), (half, half), (2 * half, D - 2 * half)]
    cuts = [cut for cut in cuts if cut[1] > 0]
    pieces = [pl.ds(*cut) for cut in cuts]

    def write_heads(qkv_ref, slots_ref, layer_ref, more_refs, pool_ref, q_ref, buffers, barrier):
        scale_refs, turn_refs = more_refs
        piece_sms, turn_sms = buffers
        block, head, nth = (lax.axis_index(name) for name in ("block", "head", "nth"))
        first = jnp.minimum(block * ROWS, T - B)
        here, real = pl.ds(first, B), pl.ds(0, B)
        for piece, sm in zip(pieces, piece_sms, strict=True):
            plgpu.copy_gmem_to_smem(qkv_ref.at[here, head, nth, piece], sm.at[real], barrier)
        for ref, sm in zip(turn_refs, turn_sms, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[here], sm.at[real], barrier)
        plgpu.barrier_wait(barrier)

        def load(sm):
            return plgpu.load(sm, layout=WGMMA, optimized=False).astype(jnp.float32)

        def rounded(x):
            return x.astype(dtype).astype(jnp.float32)

        def scaled(x, piece, norm):
            of_queries, of_keys = (
                plgpu.load(ref.at[piece], layout=WGMMA.reduce(0), optimized=False)
                for ref in scale_refs
            )
            scale = lax.cond(nth == G, lambda: of_keys, lambda: of_queries).astype(jnp.float32)
            scale = 1 + scale if norm.has_offset else scale
            if not norm.in_f32:
                x, scale = rounded(x), rounded(scale)
            return rounded(x * lax.broadcast_in_dim(scale, x.shape, [1]))

        def scatter(row):
            """Copy what there is of each token to its slot."""

            @pl.loop(0, B)
            def _(i):
                slot = slots_ref[first + i]

                @pl.when((slot >= 0) & (slot < slots))
                def _():
                    at = pl.ds(layer_ref[0] * slots + slot, 1)
                    for piece, sm in zip(pieces, piece_sms, strict=True):
                        plgpu.copy_smem_to_gmem(sm.at[pl.ds(i, 1)], pool_ref.at[at, row, piece])

        @pl.when(nth <= G)
        def _():
            x = [load(sm) for sm in piece_sms]
            if norm is not None:
                total = sum(jnp.sum(part * part, axis=1) for part in x)
                factor = lax.rsqrt(total / D + norm.eps)
                x = [part * lax.broadcast_in_dim(factor, part.shape, [0]) for part in x]
                x = [scaled(part, piece, norm) for part, piece in zip(x, pieces, strict=True)]
            if half:
                (a, b), (cos, sin) = x[:2], (load(sm) for sm in turn_sms)
                x = [a * cos - b * sin, b * cos + a * sin, *x[2:]]
            for part, sm in zip(x, piece_sms, strict=True):
                store_flat(sm, part.astype(dtype))
            plgpu.commit_smem()

        @pl.when(nth < G)
        def _():
            for piece, sm in zip(pieces, piece_sms, strict=True):
                plgpu.copy_smem_to_gmem(sm.at[real], q_ref.at[here, head, nth, piece])

        pl.when(nth >= G)(lambda: scatter(2 * head + nth - G))
        plgpu.wait_smem_to_gmem(0)

    turns = () if rotation is None else rotation
    flat = jax.new_ref(jnp.reshape(pool, (rows * P, 2 * K, D)))
    q = plgpu.kernel(
        write_heads,
        out_type=jax.ShapeDtypeStruct((T, K, G, D), dtype),
        grid=(pl.cdiv(T, ROWS), K, X),
        grid_names=("block", "head", "nth"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=(
            (
                tuple(plgpu.SMEM((ROWS, width), dtype) for _, width in cuts),
                tuple(plgpu.SMEM((ROWS, half), jnp.float32) for _ in turns),
            ),
            plgpu.Barrier(num_arrivals=len(pieces) + len(turns)),
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(
        qkv_TKXD,
        slot_mapping_T,
        jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
        (scales or (), turns),
        flat,
    )
    return q.reshape(T, K * G, D), flat[...].reshape(pool.shape)
