"""Heads normed, rotated and written to the pool by one call on CPU, in bf16; see head_write.h and
kernels_pallas/paged_attention/head_write.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_cpu.library import unavailable
from kernels_pallas.paged_attention.head_write.interface import HeadNorm, refused
from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.pool_layout import PoolLayout


def unsupported(shapes: Shapes, layout: PoolLayout, device: Any) -> str | None:
    """Return why a pool of a layout cannot be written here, or None."""
    del device
    if reason := refused(shapes, layout):
        return reason
    if jnp.dtype(shapes.dtype) != jnp.bfloat16:
        return f"dtype {jnp.dtype(shapes.dtype).name}: only bfloat16"
    if shapes.head_dim % 32:
        return f"head_dim {shapes.head_dim}: only multiples of 32"
    return unavailable()


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
    """Return queries and the pool, which is changed in place where XLA lets it; see the package.

    A token's bits depend on that token alone.
    """
    assert not interpret and (scales is None) == (norm is None)
    T, K, X, D = qkv_TKXD.shape
    results = (
        jax.ShapeDtypeStruct((T, K * (X - 2), D), qkv_TKXD.dtype),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
    )
    call = jax.ffi.ffi_call("jpaged_head_write", results, input_output_aliases={1: 1})
    none = jnp.zeros((0, 0), jnp.float32)
    norm = norm or HeadNorm(0.0)
    q_THD, written = call(
        qkv_TKXD,
        pool,
        jnp.asarray(layer, jnp.int32),
        slot_mapping_T,
        *((none, none) if scales is None else scales),
        *((none, none) if rotation is None else rotation),
        num_layers=np.int64(num_layers),
        eps=np.float32(norm.eps),
        has_offset=norm.has_offset,
        in_f32=norm.in_f32,
    )
    return q_THD, written
