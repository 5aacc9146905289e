"""Paged attention on CPU for bf16 queries, and a pool of bf16 or 8 bits; see paged_attention.h.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, D head dim, V width of a value.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_cpu.library import unavailable
from kernels_pallas.paged_attention.interface import (
    AttentionOptions,
    Options,
    Shapes,
    prepare_nothing,
    unknown_options,
)
from kernels_pallas.paged_attention.pool_layout import ScaledPool, plain_pool_layout

OPTIONS = ("scale", "soft_cap", "window", "value_dim", "sinks", "latent", "ends")

pool_layout, prepare = plain_pool_layout, prepare_nothing


def unsupported(shapes: Shapes, attention: AttentionOptions, device: Any) -> str | None:
    """Return why these shapes and options cannot run here, or None. Any block size and group of
    heads can.
    """
    del device
    if reason := unknown_options(attention, OPTIONS):
        return reason
    if jnp.dtype(shapes.dtype) != jnp.bfloat16:
        return f"dtype {jnp.dtype(shapes.dtype).name}: only bfloat16"
    if shapes.head_dim % 32:
        return f"head_dim {shapes.head_dim}: only multiples of 32"
    if attention.value_width(shapes.head_dim) % 32:
        return f"values of {attention.value_dim}: only multiples of 32"
    if not attention.scale > 0:
        return f"scale {attention.scale}: only above 0"
    return unavailable()


def batch_invariant() -> bool:
    """A query's bits are the same in any batch and chunk, and in decode and prefill."""
    return True


def prefill(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Any,
    prepared: None = None,
    *,
    options: Options,
    sinks_H: Array | None = None,
    ends_T: Array | None = None,
) -> Array:
    """Causal attention of packed queries; see `kernels_pallas.paged_attention.reference.prefill`.

    It runs where `unsupported` gives no reason: that has compiled it.
    """
    del prepared
    rows = (block_table_SM, context_lens_S, query_start_loc_S1)
    return _call(q_THD, pool, layer, rows, options, sinks_H, ends_T, decode=False)


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
    """Attention of one query a row; see `kernels_pallas.paged_attention.reference.decode`."""
    # Where rows begin is known. As a constant of every layer it would be an operation that waits
    # for nothing, and XLA:CPU wakes a second thread where more than eight can begin at once.
    rows = (block_table_SM, context_lens_S, jnp.zeros((0,), jnp.int32))
    return _call(q_SHD, pool, layer, rows, options, sinks_H, decode=True)


def _call(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    rows: tuple[Any, ...],
    options: Options,
    sinks_H: Array | None,
    ends_T: Array | None = None,
    *,
    decode: bool,
) -> Array:
    """rows: the block table, the context lengths and the query_start_loc, empty for a decode."""
    T, H, D = q_THD.shape
    o_THV = jax.ShapeDtypeStruct((T, H, options.attention.value_width(D)), q_THD.dtype)
    call = jax.ffi.ffi_call("jpaged_paged_attention", o_THV)
    attributes = {
        "scale": np.float32(options.attention.scale),
        "soft_cap": np.float32(options.attention.soft_cap or 0.0),
        "num_layers": np.int64(options.num_layers),
        "window": np.int64(options.attention.window or 0),
        "decode": decode,
        "latent": options.attention.latent,
    }
    sinks = jnp.asarray(() if sinks_H is None else sinks_H, jnp.float32)
    values, scales = pool, jnp.zeros((0, 0, 0), jnp.float32)
    if isinstance(pool, ScaledPool):
        values, scales = pool.values, pool.scales
    layer = jnp.asarray(layer, jnp.int32)
    ends = jnp.asarray(() if ends_T is None else ends_T, jnp.int32)
    return call(q_THD, values, scales, layer, *rows, sinks, ends, **attributes)
