"""jax's own TPU kernel under the interface of `tpu`: what this project would call if it had none.

jax's kernel takes no packed or padded heads, no scales and no sinks, and no interpreter runs it.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, D head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from kernels_pallas.paged_attention.interface import Options, shapes_of
from kernels_pallas.paged_attention.pool_layout import ScaledPool
from kernels_pallas.paged_attention.tpu.attention import VMEM, tile_sizes

_jit = functools.partial(jax.jit, static_argnames="options")


@_jit
def prefill(
    q_THD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    *,
    options: Options,
    sinks_H: Array | None = None,
) -> Array:
    """Causal attention of packed queries, any number a row; see `reference.prefill`.

    pool [L*N, P, 2K, D]. Raises NotImplementedError with the reason for what cannot run.
    """
    if sinks_H is not None:
        raise NotImplementedError("jax's kernel takes no sinks")
    if isinstance(pool, ScaledPool):
        raise NotImplementedError("jax's kernel takes no scales")
    (T, _, D), (_, M), K = q_THD.shape, block_table_SM.shape, pool.shape[2] // 2
    if (options.num_kv_heads or K, D) != (K, pool.shape[3]):
        raise NotImplementedError(f"jax's kernel takes no padded pool of {pool.shape}")
    B, U = tile_sizes(shapes_of(q_THD, pool, block_table_SM, options), pool, num_tokens=T)
    starts_S, live = query_start_loc_S1[:-1], query_start_loc_S1[-1]
    first_block = jnp.asarray(layer * (pool.shape[0] // options.num_layers), jnp.int32)
    # Its rows are a prefix, up to the last one with queries, and all have a context: the next one's
    # is prefetched.
    num_rows = jnp.sum(starts_S < live, dtype=jnp.int32)
    o_THD = ragged_paged_attention(
        q_THD.astype(pool.dtype),
        pool,
        jnp.maximum(context_lens_S, 1),
        block_table_SM + first_block,
        query_start_loc_S1,
        num_rows[None],
        sm_scale=options.attention.scale,
        sliding_window=options.attention.window,
        soft_cap=options.attention.soft_cap,
        num_kv_pages_per_block=min(U, M),
        num_queries_per_block=B,
        vmem_limit_bytes=VMEM,
    )
    live_T = jnp.arange(T, dtype=jnp.int32) < live
    return jnp.where(live_T[:, None, None], o_THD.astype(q_THD.dtype), 0)


@_jit
def decode(
    q_SHD: Array,
    pool: Array,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    *,
    options: Options,
    sinks_H: Array | None = None,
) -> Array:
    """The same for one query a row, [S, H, D]; a row with context 0 is padding and gives zeros."""
    starts_S1 = jnp.arange(q_SHD.shape[0] + 1, dtype=jnp.int32)
    rows = (block_table_SM, context_lens_S, starts_S1)
    o_SHD = prefill(q_SHD, pool, layer, *rows, options=options, sinks_H=sinks_H)
    return jnp.where((context_lens_S > 0)[:, None, None], o_SHD, 0)
