"""A causal convolution of a few tokens, each channel by itself, over packed rows.

Shapes: T packed tokens, S rows, W taps, C channels: one axis or several. The history of a row is
its last W - 1 inputs, oldest first.
"""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.packed_rows import PackedRows

NAME = "xla"  # what compiles it on every device


def packed(x_TC: Array, weight_CW: Array, pool: Array, rows: PackedRows) -> tuple[Array, Array]:
    """Return the sums f32 [T, C] over j of weight[:, j] * x[t - (W - 1) + j] and the pool.

    pool: [slots, W-1, C], a history a slot, in x's dtype. Inputs before a row's first token are
    those of its history. What the result has for padding is finite if x is, and of no use.
    """
    num_taps, num_tokens = weight_CW.shape[-1], x_TC.shape[0]
    history_SWC = rows.read(pool)
    row_T = jnp.minimum(rows.row_of(num_tokens), rows.start_S.shape[0] - 1)
    begin_T = rows.query_start_loc_S1[row_T]
    tokens_T = jnp.arange(num_tokens, dtype=jnp.int32)
    y = jnp.zeros(x_TC.shape, jnp.float32)
    for tap in range(num_taps):
        back = num_taps - 1 - tap
        earlier = _shifted(x_TC, back)
        if back:
            index_T = jnp.clip(tokens_T - begin_T + tap, 0, num_taps - 2)
            is_inside_T = tokens_T - begin_T >= back
            earlier = jnp.where(_of_rank(is_inside_T, x_TC), earlier, history_SWC[row_T, index_T])
        y = y + earlier.astype(jnp.float32) * weight_CW[..., tap].astype(jnp.float32)[None]
    return y, rows.written(pool, _last(x_TC, history_SWC, rows))


def decode(x_SC: Array, weight_CW: Array, pool: Array, rows: PackedRows) -> tuple[Array, Array]:
    """Return the same of one token a row: token s is that of row s."""
    history_SWC = rows.read(pool)
    window_SWC = jnp.concatenate([history_SWC, x_SC[:, None].astype(history_SWC.dtype)], axis=1)
    y = jnp.zeros(x_SC.shape, jnp.float32)
    for tap in range(weight_CW.shape[-1]):
        weight_C = weight_CW[..., tap].astype(jnp.float32)[None]
        y = y + window_SWC[:, tap].astype(jnp.float32) * weight_C
    return y, rows.written(pool, window_SWC[:, 1:])


def advanced(x_TC: Array, pool: Array, rows: PackedRows) -> Array:
    """Return the pool with the histories after these tokens, as `packed` does."""
    return rows.written(pool, _last(x_TC, rows.read(pool), rows))


def _shifted(x: Array, back: int) -> Array:
    """Return x whose entry t of axis 0 is that of t - back, or zeros."""
    if not back:
        return x
    zeros = jnp.zeros((min(back, x.shape[0]), *x.shape[1:]), x.dtype)
    return jnp.concatenate([zeros, x[: max(x.shape[0] - back, 0)]], axis=0)


def _last(x_TC: Array, history_SWC: Array, rows: PackedRows) -> Array:
    """Return the last W - 1 inputs [S, W-1, C] of each row."""
    kept = history_SWC.shape[1]
    ends_S, lengths_S = rows.query_start_loc_S1[1:], rows.lengths_S
    offset_SW = jnp.arange(kept, dtype=jnp.int32)[None, :] + lengths_S[:, None]  # past the oldest
    token_SW = jnp.maximum(ends_S[:, None] - kept + jnp.arange(kept, dtype=jnp.int32)[None, :], 0)
    index_SW = _of_rank(jnp.minimum(offset_SW, kept - 1), history_SWC)
    old_SWC = jnp.take_along_axis(history_SWC, index_SW, axis=1)
    new_SWC = jnp.take(x_TC, token_SW, axis=0, mode="clip")
    return jnp.where(
        _of_rank(offset_SW >= kept, old_SWC), new_SWC.astype(history_SWC.dtype), old_SWC
    )


def _of_rank(x: Array, like: Array) -> Array:
    """Return x with axes of one after its own."""
    return x.reshape(*x.shape, *(1,) * (like.ndim - x.ndim))
