"""Writing new keys and values into the pool, in place when the pool is donated (or carried by a
loop).

Shapes: T packed tokens, L layers, N pool blocks, P block size, K KV heads, D head dim.
"""

from typing import Any

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
    if slot_mapping_T.shape[0] == 1:
        # A scatter of one index becomes a selection, which copies the pool: a second is dropped.
        kv_T2KD = jnp.concatenate([kv_T2KD, kv_T2KD])
        slot_mapping_T = jnp.append(slot_mapping_T, jnp.asarray(-1, slot_mapping_T.dtype))
    where = (layer, slot_mapping_T, num_layers)
    if not isinstance(pool, ScaledPool):
        return _write(pool, kv_T2KD.astype(pool.dtype), *where)
    new = scaled(kv_T2KD, pool.dtype, pool.scales_of_a_row)
    if pool.slots_last:
        scales = _write_columns(pool.scales, pool.shape[1], new.scales, *where)
    else:
        scales = _write(pool.scales, new.scales, *where)
    return ScaledPool(_write(pool.values, new.values, *where), scales, pool.slots_last)


def _write(
    pool: Array, new: Array, layer: Array | int, slot_mapping_T: Array, num_layers: int
) -> Array:
    """One scatter over flat rows."""
    rows, P, *token = pool.shape
    row_T = _places(rows * P, layer, slot_mapping_T, num_layers)
    flat = pool.reshape(rows * P, *token).at[row_T].set(new, mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)


def _write_columns(
    scales: Array,
    P: int,
    new_T2K: Array,
    layer: Array | int,
    slot_mapping_T: Array,
    num_layers: int,
) -> Array:
    """The scales [L*N, 2K, P or more lanes] with those of each token in a column."""
    row_T = _places(scales.shape[0] * P, layer, slot_mapping_T, num_layers)
    at = (row_T // P, slice(None), row_T % P)
    return scales.at[at].set(new_T2K, mode="drop", unique_indices=True)


def _places(total: int, layer: Array | int, slot_mapping_T: Array, num_layers: int) -> Array:
    """Of each token, the slot among all of the pool's; of one that is dropped, its own past the
    end, so that all are unique.
    """
    slots = total // num_layers
    inside_T = (slot_mapping_T >= 0) & (slot_mapping_T < slots)
    past_T = total + jnp.arange(slot_mapping_T.shape[0], dtype=slot_mapping_T.dtype)
    return jnp.where(inside_T, layer * slots + slot_mapping_T, past_T)
