"""Mamba-2's scan in plain XLA: chunks of tokens at once, or one token a row.

Within a chunk of C tokens that begins with state S, with G the running sum of g and
M[i, j] = exp(G_i - G_j) for i >= j, else 0:

    y_i = sum_j (c_i . b_j) M[i, j] x_j + exp(G_i) S c_i
    S_end = exp(G_C) S + sum_j exp(G_C - G_j) x_j b_j^T

Padding within a chunk has x = g = 0 and changes nothing. Only the states follow one another: all
else is computed for several chunks together.

Shapes: T packed tokens, S rows, G groups, H = R * G heads of width P, states of width N, C tokens a
chunk, B chunks that are computed together.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import row_chunks
from kernels_pallas.mamba2.interface import Shapes
from kernels_pallas.packed_rows import PackedRows

CHUNK = 64  # tokens of a row that are computed together
TOGETHER = 8  # chunks that are computed at once


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return None: it runs everywhere."""
    return None


def scratch_bytes(shapes: Shapes, num_rows: int) -> int:
    """Return the bytes of the parts of the chunks that are computed together, and of the states of
    rows before and after.
    """
    heads, keys = shapes.num_heads, 2 * shapes.num_groups * shapes.state_dim
    state = heads * shapes.head_dim * shapes.state_dim
    chunk = CHUNK * (heads * (4 * CHUNK + 6 * shapes.head_dim) + 3 * keys)
    return 4 * TOGETHER * (chunk + 4 * state) + 12 * (num_rows + 2) * state


def decode(
    x_SHP: Array, g_SH: Array, b_SGN: Array, c_SGN: Array, pool: Array, rows: PackedRows
) -> tuple[Array, Array]:
    """See the package. The product is with the state as it is read, so that it is read once."""
    state = rows.read(pool)
    num_groups = b_SGN.shape[1]
    grouped = state.reshape(state.shape[0], num_groups, -1, *state.shape[2:])
    by_query = _product("sgrpn,sgn->sgrp", grouped, c_SGN).reshape(x_SHP.shape)
    repeats = x_SHP.shape[1] // num_groups
    b_SHN = jnp.repeat(b_SGN, repeats, axis=1)
    both_SH = jnp.repeat(jnp.sum(b_SGN * c_SGN, axis=-1), repeats, axis=1)
    decay = jnp.exp(g_SH)[..., None]
    y = decay * by_query + both_SH[..., None] * x_SHP
    state = decay[..., None] * state + x_SHP[..., None] * b_SHN[:, :, None, :]
    y = jnp.where((rows.lengths_S > 0)[:, None, None], y, 0)
    return y, rows.written(pool, state)


def prefill(
    x_THP: Array, g_TH: Array, b_TGN: Array, c_TGN: Array, pool: Array, rows: PackedRows
) -> tuple[Array, Array]:
    """See the package. Rows are cut at multiples of CHUNK in their own sequences, so that the bits
    do not depend on where a step begins, if that is a multiple too.
    """
    tokens = (x_THP, g_TH, b_TGN, c_TGN)
    y = jnp.zeros_like(x_THP)
    return row_chunks.prefill(_rule(), tokens, y, pool, rows, chunk=CHUNK, together=TOGETHER)


def dense(x: Array, g: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
    """Return y [S, T, H, P] and the states [S, H, P, N] after S rows of T tokens each.

    x [S, T, H, P], g [S, T, H], b and c [S, T, G, N]; state: that before each row. It can be
    differentiated.
    """
    return row_chunks.dense(_rule(), (x, g, b, c), state, chunk=CHUNK)


def _rule() -> row_chunks.Rule:
    def across(state: Array, parts: _Parts) -> tuple[Array, Array]:
        return state, parts.decay[..., None, None] * state + parts.added

    return row_chunks.Rule(
        _within, across, lambda parts, before: parts.y + _of_state(parts, before)
    )


class _Parts(NamedTuple):
    """What chunks have before their states are known.

    y [B, H, C, P]: without what comes of the state. queries: c [B, G, C, N]. grown: exp(G)
    [B, H, C]. decay: exp(G_C) [B, H]. added [B, H, P, N]: what the chunk adds to the state.
    """

    y: Array
    queries: Array
    grown: Array
    decay: Array
    added: Array


def _within(x: Array, g: Array, b: Array, c: Array) -> _Parts:
    """Return the parts of chunks x [B, H, C, P], g [B, H, C], b and c [B, G, C, N]."""
    length, num_groups = x.shape[-2], b.shape[1]
    repeats = x.shape[1] // num_groups
    total = jnp.cumsum(g, axis=-1)
    is_seen = jnp.tril(jnp.ones((length, length), bool))[None, None]
    # Masked before exp, which would overflow above the diagonal.
    decay = jnp.exp(jnp.where(is_seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    scores = jnp.repeat(_product("bgin,bgjn->bgij", c, b), repeats, axis=1) * decay
    last = x * jnp.exp(total[..., -1:] - total)[..., None]
    last = last.reshape(x.shape[0], num_groups, repeats, *x.shape[2:])
    added = _product("bgrcp,bgcn->bgrpn", last, b)
    return _Parts(
        y=_product("bhij,bhjp->bhip", scores, x),
        queries=c,
        grown=jnp.exp(total),
        decay=jnp.exp(total[..., -1]),
        added=added.reshape(x.shape[0], x.shape[1], *added.shape[3:]),
    )


def _of_state(parts: _Parts, before: Array) -> Array:
    """Return what comes of the states [B, H, P, N] before chunks, [B, H, C, P]."""
    num_groups = parts.queries.shape[1]
    before = before.reshape(before.shape[0], num_groups, -1, *before.shape[2:])
    y = _product("bgcn,bgrpn->bgrcp", parts.queries, before)
    return parts.grown[..., None] * y.reshape(parts.y.shape)


def _product(axes: str, *factors: Array) -> Array:
    # Without a precision, a TPU would round both to bf16 and a GPU to 11 bits.
    return jnp.einsum(axes, *factors, precision=lax.Precision.HIGHEST)
