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

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.mamba2.interface import Shapes
from kernels_pallas.packed_rows import Chunks, PackedRows, chunks_of

CHUNK = 64  # tokens of a row that are computed together
TOGETHER = 8  # chunks that are computed at once


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return None: it runs everywhere."""
    return None


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
    """See the package. A loop over as many chunks as there are, whatever the lengths of rows. Rows
    are cut at multiples of CHUNK in their own sequences.
    """
    num_tokens, num_rows = x_THP.shape[0], rows.start_S.shape[0]
    chunks, count, together = chunks_of(rows, num_tokens, CHUNK, TOGETHER)
    # One token more, of zeros, stands for all padding, whatever padding holds.
    tokens = [
        jnp.concatenate([part, jnp.zeros((1, *part.shape[1:]), part.dtype)])
        for part in (x_THP, g_TH, b_TGN, c_TGN)
    ]
    states, y = rows.read(pool), jnp.zeros(x_THP.shape, x_THP.dtype)

    def one_chunk(carry: tuple[Array, Array], part: tuple[Array, Array, Chunks]) -> Any:
        (state, states), (decay_H, added_HPN, chunk) = carry, part
        begins = states[jnp.minimum(chunk.row_N, num_rows - 1)]
        before = jnp.where(chunk.is_first_N, begins, state)
        after = decay_H[:, None, None] * before + added_HPN
        kept = jnp.where(chunk.is_last_N, chunk.row_N, num_rows)
        return (after, states.at[kept].set(after, mode="drop")), before

    def one_group(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, states, y = carry
        group = Chunks(*(lax.dynamic_slice_in_dim(part, i * together, together) for part in chunks))
        parts = _within(*(jnp.moveaxis(part[group.token_NC], 2, 1) for part in tokens))
        carried = (parts.decay, parts.added, group)
        (state, states), before = lax.scan(one_chunk, (state, states), carried)
        y_BHCP = parts.y + _of_state(parts, before)
        y = y.at[group.token_NC].set(jnp.moveaxis(y_BHCP, 1, 2), mode="drop")
        return state, states, y

    groups = -(-count // together)
    _, states, y = lax.fori_loop(0, groups, one_group, (jnp.zeros_like(states[0]), states, y))
    return y, rows.written(pool, states)


def dense(x: Array, g: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
    """Return y [S, T, H, P] and the states [S, H, P, N] after S rows of T tokens each.

    x [S, T, H, P], g [S, T, H], b and c [S, T, G, N]; state: that before each row. It can be
    differentiated.
    """
    num_rows, num_tokens = x.shape[:2]
    num_chunks = max(-(-num_tokens // CHUNK), 1)

    def in_chunks(part: Array) -> Array:  # [N, S, H, C, ...]
        pads = [(0, 0)] * part.ndim
        pads[1] = (0, num_chunks * CHUNK - num_tokens)
        part = jnp.pad(part, pads)
        part = part.reshape(part.shape[0], num_chunks, CHUNK, *part.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(part, 3, 2), 1, 0)

    parts = jax.vmap(_within)(*map(in_chunks, (x, g, b, c)))

    def one(state: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
        decay_SH, added = part
        return decay_SH[..., None, None] * state + added, state

    state, before = lax.scan(one, state, (parts.decay, parts.added))
    y = parts.y + jax.vmap(_of_state)(parts, before)  # [N, S, H, C, P]
    y = jnp.moveaxis(jnp.moveaxis(y, 0, 1), 2, 3)
    return y.reshape(num_rows, num_chunks * CHUNK, *x.shape[2:])[:, :num_tokens], state


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
