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
