"""Writing new keys and values into the pool, in place when the pool is donated (or carried by a
loop).

Shapes: T packed tokens, L layers, N pool blocks, P block size, K KV heads, D head dim.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from kernels_pallas.paged_attention.pool_layout import ScaledPool, scaled


def write_kv(
    pool: Any, layer: Array | int, kv_T2KD: Array, slot_mapping_T: Array, *, num_layers: int = 1
) -> Any:
    """Return the pool with each token's keys and values, in its slot.

    pool [L*N, P, 2K, D] (K0, V0, K1, V1, ...) or as another PoolLayout has it, kv likewise; or a
    ScaledPool, for which they are converted to 8 bits. slot_mapping_T int32: block * P + slot of
    the layer, no slot twice. Tokens with an index outside [0, N*P) are padding and are dropped;
    callers use L*N*P.
    """
    if slot_mapping_T.shape[0] == 1:
        # XLA turns a scatter of one index into a selection, which copies the pool: add a second
        # index, which is dropped.
        kv_T2KD = jnp.concatenate([kv_T2KD, kv_T2KD])
        slot_mapping_T = jnp.append(slot_mapping_T, jnp.asarray(-1, slot_mapping_T.dtype))
    slots = (layer, slot_mapping_T, num_layers)
    if not isinstance(pool, ScaledPool):
        return _write(pool, kv_T2KD.astype(pool.dtype), *slots)
    new = scaled(kv_T2KD, pool.dtype, pool.scales_of_a_row, pool.key_width)
    if pool.slots_last:
        scales = _write_columns(pool.scales, pool.shape[1], new.scales, *slots)
    else:
        scales = _write(pool.scales, new.scales, *slots)
    values = _write(pool.values, new.values, *slots)
    return dataclasses.replace(pool, values=values, scales=scales)


def _write(
    pool: Array, new: Array, layer: Array | int, slot_mapping_T: Array, num_layers: int
) -> Array:
    """Write by one scatter over flat rows.

    A token of one row is written without that axis, over which XLA would copy a TPU's pool.
    """
    rows, P, *token = pool.shape
    if token[0] == 1:
        token, new = token[1:], new.reshape(new.shape[0], *token[1:])
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
    """Return scales [L*N, 2K, P or more lanes] with each token's scales in its column."""
    row_T = _places(scales.shape[0] * P, layer, slot_mapping_T, num_layers)
    columns = (row_T // P, slice(None), row_T % P)
    return scales.at[columns].set(new_T2K, mode="drop", unique_indices=True)


def _places(total: int, layer: Array | int, slot_mapping_T: Array, num_layers: int) -> Array:
    """Return each token's slot among all slots of the pool.

    A dropped token gets a distinct slot past the end, so that all are unique.
    """
    slots = total // num_layers
    inside_T = (slot_mapping_T >= 0) & (slot_mapping_T < slots)
    past_T = total + jnp.arange(slot_mapping_T.shape[0], dtype=slot_mapping_T.dtype)
    return jnp.where(inside_T, layer * slots + slot_mapping_T, past_T)
