"""Layers with a state in plain XLA, over chunks of a row's tokens: what chunks have before their
states are known is computed for several together, and the states then follow one another.

Shapes: T packed tokens, S rows, H heads, N chunks of C tokens, B chunks that are computed together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.packed_rows import PackedRows


class Rule(NamedTuple):
    """What a kind of layers does with chunks, whose parts and results are pytrees.

    within: from chunks of each array of tokens, [B, H, C, ...], to their parts [B, ...]. across:
    from the state before a chunk and its parts to what follows from the state, and the state after.
    outputs: from parts and what follows from their states, [B, ...] both, to [B, H, C, D].
    """

    within: Callable[..., Any]
    across: Callable[[Array, Any], tuple[Any, Array]]
    outputs: Callable[[Any, Any], Array]


def prefill(
    rule: Rule,
    tokens: tuple[Array, ...],
    o: Array,
    pool: Array,
    rows: PackedRows,
    *,
    chunk: int,
    together: int,
) -> tuple[Array, Array]:
    """Return o with the outputs [T, H, D] of arrays of packed tokens, and the pool with the states
    after each row. It is a loop over as many chunks as there are, whatever the lengths of rows. No
    output of padding is written.
    """
    num_rows = rows.start_S.shape[0]
    chunks, count, together = chunks_of(rows, o.shape[0], chunk, together)
    # One token more, of zeros, stands for all padding, whatever padding holds.
    padded = [jnp.concatenate([x, jnp.zeros((1, *x.shape[1:]), x.dtype)]) for x in tokens]
    states = rows.read(pool)

    def one_chunk(carry: tuple[Array, Array], x: tuple[Any, Chunks]) -> Any:
        (state, states), (parts, chunk) = carry, x
        begins = states[jnp.minimum(chunk.row_N, num_rows - 1)]
        result, state = rule.across(jnp.where(chunk.is_first_N, begins, state), parts)
        kept = jnp.where(chunk.is_last_N, chunk.row_N, num_rows)
        return (state, states.at[kept].set(state, mode="drop")), result

    def one_group(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, states, o = carry
        group = Chunks(*(lax.dynamic_slice_in_dim(x, i * together, together) for x in chunks))
        parts = rule.within(*(jnp.moveaxis(x[group.token_NC], 2, 1) for x in padded))
        (state, states), results = lax.scan(one_chunk, (state, states), (parts, group))
        o_NHCD = rule.outputs(parts, results)
        o = o.at[group.token_NC].set(jnp.moveaxis(o_NHCD, 1, 2), mode="drop")
        return state, states, o

    groups = -(-count // together)
    _, states, o = lax.fori_loop(0, groups, one_group, (jnp.zeros_like(states[0]), states, o))
    return o, rows.written(pool, states)


def dense(
    rule: Rule, tokens: tuple[Array, ...], state: Array, *, chunk: int
) -> tuple[Array, Array]:
    """Return the outputs [S, T, H, D] of arrays [S, T, H, ...] of the tokens of S rows that have as
    many each, and the states after them. state: that before each row.
    """
    num_tokens = tokens[0].shape[1]
    num_chunks = max(-(-num_tokens // chunk), 1)

    def in_chunks(x: Array) -> Array:  # [N, S, H, C, ...]
        pads = [(0, 0)] * x.ndim
        pads[1] = (0, num_chunks * chunk - num_tokens)
        x = jnp.pad(x, pads)
        x = x.reshape(x.shape[0], num_chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    parts = jax.vmap(rule.within)(*map(in_chunks, tokens))

    def one(state: Array, part: Any) -> tuple[Array, Any]:
        result, state = jax.vmap(rule.across)(state, part)
        return state, result

    state, results = lax.scan(one, state, parts)
    o = jax.vmap(rule.outputs)(parts, results)  # [N, S, H, C, D]
    o = jnp.moveaxis(jnp.moveaxis(o, 0, 1), 2, 3)
    return o.reshape(o.shape[0], num_chunks * chunk, *o.shape[3:])[:, :num_tokens], state


class Chunks(NamedTuple):
    """Chunks [N] of packed rows. token_NC: their tokens, T for padding. row_N: S past the last."""

    token_NC: Array
    row_N: Array
    is_first_N: Array
    is_last_N: Array


def chunks_of(
    rows: PackedRows, num_tokens: int, chunk: int, together: int
) -> tuple[Chunks, Array, int]:
    """Cut rows at multiples of chunk in their sequences, so that the bits of a chunk do not depend
    on where a step begins, if that is a multiple too. Return as many chunks as T tokens can have at
    most, how many of them are real, and how many a loop may take at once: they are a multiple of
    that, which is `together` at most.
    """
    lengths_S, start_S = rows.lengths_S, rows.start_S
    num_rows = start_S.shape[0]
    # A row of n tokens touches (n + chunk - 2) // chunk + 1 chunks at most, and no more than n.
    most = max(min(num_tokens, (num_tokens - 2 * num_rows) // chunk + 2 * num_rows), 1)
    together = min(together, most)
    most = -(-most // together) * together
    first_S = start_S // chunk
    last_S = (start_S + lengths_S - 1) // chunk
    ends_S = jnp.cumsum(jnp.where(lengths_S > 0, last_S - first_S + 1, 0))
    chunks_N = jnp.arange(most, dtype=jnp.int32)
    row_N = jnp.sum(ends_S[None, :] <= chunks_N[:, None], axis=1, dtype=jnp.int32)
    is_real_N = row_N < num_rows
    row = jnp.minimum(row_N, num_rows - 1)
    number_N = chunks_N - ends_S[row] + last_S[row] + 1  # in the row's own sequence
    offset_C = jnp.arange(chunk, dtype=jnp.int32)
    offset_NC = (number_N * chunk - start_S[row])[:, None] + offset_C[None]
    is_token_NC = (offset_NC >= 0) & (offset_NC < lengths_S[row][:, None]) & is_real_N[:, None]
    begin_N1 = rows.query_start_loc_S1[row][:, None]
    chunks = Chunks(
        token_NC=jnp.where(is_token_NC, begin_N1 + offset_NC, num_tokens),
        row_N=row_N,
        is_first_N=is_real_N & (number_N == first_S[row]),
        is_last_N=is_real_N & (number_N == last_S[row]),
    )
    return chunks, ends_S[-1], together
