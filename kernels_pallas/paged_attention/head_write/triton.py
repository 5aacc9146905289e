"""Heads written by Pallas' Triton backend, for CUDA: a program takes one KV head of B tokens. Rows
are loaded in pieces, each padded to a power of two.

Shapes: see the package; B tokens of a program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.implementation import before_ampere
from kernels_pallas.paged_attention.head_write.interface import HeadNorm, refused
from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.pool_layout import PoolLayout

ELEMENTS = 1024  # numbers of queries in a program, 8 a thread; decides B


def unsupported(shapes: Shapes, layout: PoolLayout, device: Any) -> str | None:
    """Return why this kernel cannot write a pool of a layout on a device, or None."""
    return refused(shapes, layout) or before_ampere(device)


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
    """Return queries and the pool; see the package."""
    (T, K, X, D), rows = qkv_TKXD.shape, pool.shape[0]
    P, G = pool.shape[1], X - 2
    heads = pl.next_power_of_2(G)
    tokens = max(1, min(ELEMENTS // (heads * pl.next_power_of_2(D)), pl.next_power_of_2(T)))
    assert (scales is None) == (norm is None)
    kernel = functools.partial(
        _kernel,
        heads=heads,
        tokens=tokens,
        slots=rows // num_layers * P,
        norm=norm,
        half=0 if rotation is None else rotation[0].shape[-1],
    )
    q, flat = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(T, tokens), K),
        out_shape=(
            jax.ShapeDtypeStruct((T, K, G, D), qkv_TKXD.dtype),
            jax.ShapeDtypeStruct((rows * P, 2 * K, D), pool.dtype),
        ),
        input_output_aliases={0: 1},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="write_heads",
    )(
        jnp.reshape(pool, (rows * P, 2 * K, D)),
        qkv_TKXD,
        slot_mapping_T,
        jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
        *(scales or ()),
        *(rotation or ()),
    )
    return q.reshape(T, K * G, D), flat.reshape(pool.shape)


def _kernel(
    _,
    qkv_ref,
    slots_ref,
    layer_ref,
    *refs,
    heads: int,
    tokens: int,
    slots: int,
    norm: HeadNorm | None,
    half: int,
):
    *more, q_ref, pool_ref = refs
    scale_refs, turn_refs = (more[:2], more[2:]) if norm is not None else ((None, None), more)
    (T, _, _, D), head, G = qkv_ref.shape, pl.program_id(1), q_ref.shape[2]
    first, dtype = pl.program_id(0) * tokens, qkv_ref.dtype
    # First dimension and number of dimensions of each piece of a row.
    pieces = [(0, half), (half, half), (2 * half, D - 2 * half)]
    pieces = [piece for piece in pieces if piece[1] > 0]

    def lanes(start, size):
        """Return the dimensions of a piece, padded to a power of 2, and which are real."""
        lane = jnp.arange(pl.next_power_of_2(size))
        return start + lane, lane < size

    def place(ref, rows, piece, real_R):
        """Return a reference to a piece of an array's rows, and the mask of what is real."""
        dims, real = lanes(*piece)
        index = (*(i[:, None] if getattr(i, "ndim", 0) else i for i in rows), dims[None, :])
        return ref.at[index], real_R[:, None] & real[None, :]

    def load(ref, rows, piece, real_R):
        source, mask = place(ref, rows, piece, real_R)
        return plgpu.load(source, mask=mask, other=0)

    def store(ref, rows, piece, real_R, x):
        target, mask = place(ref, rows, piece, real_R)
        plgpu.store(target, x, mask=mask)

    def prepared(token_R, nth_R, real_R, scale_ref):
        """Return the pieces of rows, normed and rotated."""
        rows = token_R, head, nth_R
        x = [load(qkv_ref, rows, piece, real_R) for piece in pieces]
        if norm is not None:
            x = [part.astype(jnp.float32) for part in x]
            total_R = sum(jnp.sum(part * part, axis=1) for part in x)
            factor_R1 = jax.lax.rsqrt(total_R / D + norm.eps)[:, None]
            x = [
                scaled(part * factor_R1, piece, scale_ref, norm)
                for part, piece in zip(x, pieces, strict=True)
            ]
        if half:
            cos, sin = (load(ref, (token_R,), (0, half), real_R) for ref in turn_refs)
            a, b = (part.astype(jnp.float32) for part in x[:2])
            x = [(a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype), *x[2:]]
        return x

    def scaled(part, piece, scale_ref, norm: HeadNorm):
        within = jnp.float32 if norm.in_f32 else dtype
        dims, real = lanes(*piece)
        scale = plgpu.load(scale_ref.at[dims], mask=real, other=0).astype(within)[None, :]
        scale = 1 + scale if norm.has_offset else scale
        return (part.astype(within) * scale).astype(dtype)

    at_R = jnp.arange(tokens * heads)
    token_R, nth_R = first + jax.lax.div(at_R, heads), jax.lax.rem(at_R, heads)
    real_R = (token_R < T) & (nth_R < G)
    queries = prepared(token_R, nth_R, real_R, scale_refs[0])
    for piece, x in zip(pieces, queries, strict=True):
        store(q_ref, (token_R, head, nth_R), piece, real_R, x)

    token_B = first + jnp.arange(tokens)
    slot_B = plgpu.load(slots_ref.at[token_B], mask=token_B < T, other=-1)
    real_B = (slot_B >= 0) & (slot_B < slots)
    row_B = layer_ref[0] * slots + slot_B
    keys = prepared(token_B, G, real_B, scale_refs[1])
    for piece, x in zip(pieces, keys, strict=True):
        store(pool_ref, (row_B, 2 * head), piece, real_B, x)
    values = load(qkv_ref, (token_B, head, G + 1), (0, D), real_B)
    store(pool_ref, (row_B, 2 * head + 1), (0, D), real_B, values)
