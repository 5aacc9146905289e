"""Paged attention on CPU for a bf16 pool; see paged_attention.cc.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, D head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_cpu.library import unavailable


def unsupported(
    *, dtype: Any, head_dim: int, block_size: int, num_heads: int, num_kv_heads: int
) -> str | None:
    """Why these shapes cannot run here, or None. Any block size and group of heads can."""
    del block_size, num_heads, num_kv_heads
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"dtype {jnp.dtype(dtype).name}: only bfloat16"
    if head_dim % 32:
        return f"head_dim {head_dim}: only multiples of 32"
    return unavailable()


def paged_attention_decode(
    q_SHD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    **options: Any,
) -> Array:
    """Attention of one query a row; see
    `kernels_pallas.paged_attention.reference.paged_attention_decode`.
    """
    starts_S1 = np.arange(q_SHD.shape[0] + 1, dtype=np.int32)
    return _call(
        q_SHD, pool, layer, block_table_SM, context_lens_S, starts_S1, decode=True, **options
    )


def paged_attention(
    q_THD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_starts_S1: Any,
    **options: Any,
) -> Array:
    """Causal attention of packed queries; see
    `kernels_pallas.paged_attention.reference.paged_attention`.
    """
    return _call(
        q_THD, pool, layer, block_table_SM, context_lens_S, query_starts_S1, decode=False, **options
    )


def _call(
    q_THD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_starts_S1: Any,
    *,
    decode: bool,
    num_layers: int = 1,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    call = jax.ffi.ffi_call(
        "jpaged_paged_attention", jax.ShapeDtypeStruct(q_THD.shape, q_THD.dtype)
    )
    attributes = {"scale": np.float32(scale), "soft_cap": np.float32(soft_cap or 0.0)}
    attributes |= {
        "num_layers": np.int64(num_layers),
        "window": np.int64(sliding_window or 0),
        "decode": decode,
    }
    args = (jnp.asarray(layer, jnp.int32), block_table_SM, context_lens_S, query_starts_S1)
    return call(q_THD, pool, *args, **attributes)
