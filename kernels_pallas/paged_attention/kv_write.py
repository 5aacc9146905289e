"""Writing new keys and values into the pool, in place when the pool is donated (or carried by a
loop).

Shapes: T packed tokens, L layers, N pool blocks, P block size, K KV heads, D head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.paged_attention.pool_layout import ScaledPool, scaled


def write_kv(
    pool: Any, layer: Array | int, kv_T2KD: Array, slot_mapping_T: Array, *, num_layers: int = 1
) -> Any:
    """The pool with each token's keys and values (K0, V0, K1, V1, ...) in its slot of one layer.

    pool [L*N, P, 2K, D] or a ScaledPool, which takes them in 8 bits; slot_mapping_T int32: block *
    P + slot, no slot twice. Padding tokens carry any index outside [0, N*P), by custom the whole
    pool's L*N*P, and are dropped.
    """
    new = (
        scaled(kv_T2KD, pool.dtype) if isinstance(pool, ScaledPool) else kv_T2KD.astype(pool.dtype)
    )

    def write(part: Array, rows: Array) -> Array:
        return _write(part, layer, rows, slot_mapping_T, num_layers)

    return jax.tree.map(write, pool, new)


def _write(
    pool: Array, layer: Array | int, new: Array, slot_mapping_T: Array, num_layers: int
) -> Array:
    rows, P, *token = pool.shape
    slots, total = rows // num_layers * P, rows * P
    inside_T = (slot_mapping_T >= 0) & (slot_mapping_T < slots)
    # One scatter over flat rows; dropped rows get distinct indices past the end, so that all
    # indices are unique.
    past_T = total + jnp.arange(new.shape[0], dtype=slot_mapping_T.dtype)
    row_T = jnp.where(inside_T, layer * slots + slot_mapping_T, past_T)
    flat = pool.reshape(total, *token).at[row_T].set(new, mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)
