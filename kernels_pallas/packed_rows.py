"""PackedRows: the rows of a step whose layers keep a state a row, and where their states lie."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class PackedRows(NamedTuple):
    """S rows whose tokens are packed one row after the other into T, and slots of a pool of states.

    query_start_loc_S1: int32 [S+1], where each row's tokens begin; tokens past the last entry are
    padding, and a row may be empty. start_S: the position in its sequence of each row's first token
    here. read_S: the slot that holds the state before that token; past the end of the pool, the
    state is zeros. write_S: the slot that takes the state after the row's last token; past the end,
    none does. All slots that are written differ, and no row writes one that another reads. An empty
    row reads and writes nothing.
    """

    query_start_loc_S1: Array
    start_S: Array
    read_S: Array
    write_S: Array

    @property
    def lengths_S(self) -> Array:
        """Return the number of tokens of each row."""
        return self.query_start_loc_S1[1:] - self.query_start_loc_S1[:-1]

    def read(self, pool: Array) -> Array:
        """Return the state [S, ...] before each row's first token."""
        states = jnp.take(pool, self.read_S, axis=0, mode="fill", fill_value=0)
        return lax.optimization_barrier(states)  # so that no fusion reads the pool that it writes

    def written(self, pool: Array, states: Array) -> Array:
        """Return the pool with the state [S, ...] after each row's last token."""
        past_S = pool.shape[0] + jnp.arange(self.write_S.shape[0], dtype=jnp.int32)
        slot_S = jnp.where(self.lengths_S > 0, self.write_S, past_S)
        return pool.at[slot_S].set(states.astype(pool.dtype), mode="drop", unique_indices=True)

    def row_of(self, num_tokens: int) -> Array:
        """Return the row of each of T tokens; S for padding."""
        tokens_T = jnp.arange(num_tokens, dtype=jnp.int32)
        ends_S = self.query_start_loc_S1[1:]
        return jnp.sum(ends_S[None, :] <= tokens_T[:, None], axis=1, dtype=jnp.int32)


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
