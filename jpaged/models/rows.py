"""Rows: how the tokens of a step split into rows, each a part of one sequence; and Slots: where the
cache holds the states of these rows.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The S rows of a step's packed tokens T, as a mixer with a state needs them.

    start_loc_S1: int32 [S+1], the index in T of each row's first token; from start_loc_S1[S] on
    there is padding. first_S: int32 [S], the position of that token in its sequence. row_T: int32
    [T], the row of each token, S for padding. length: how many tokens every row has, if all have
    as many (1 in a decode step, where some rows may be padding); None where lengths differ.
    """

    start_loc_S1: Array
    first_S: Array
    row_T: Array
    length: int | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_batch(cls, rows: int, length: int) -> Self:
        """Return the rows of whole sequences, `length` tokens each, one after the other."""
        return cls(
            start_loc_S1=jnp.arange(rows + 1, dtype=jnp.int32) * length,
            first_S=jnp.zeros(rows, jnp.int32),
            row_T=jnp.repeat(jnp.arange(rows, dtype=jnp.int32), length),
            length=length,
        )

    @property
    def num_rows(self) -> int:
        """S."""
        return self.first_S.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.row_T.shape[0]

    @property
    def lens_S(self) -> Array:
        """The tokens of each row in this step."""
        return self.start_loc_S1[1:] - self.start_loc_S1[:-1]

    @property
    def offset_T(self) -> Array:
        """The index of each token among its row's tokens of this step; arbitrary for padding."""
        starts_T = jnp.take(self.start_loc_S1, self.row_T, mode="clip")
        return jnp.arange(self.num_tokens, dtype=jnp.int32) - starts_T

    @property
    def position_T(self) -> Array:
        """The position of each token in its sequence; arbitrary for padding."""
        return self.offset_T + jnp.take(self.first_S, self.row_T, mode="clip")


type State = dict[str, Array]  # by the names of a record's fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """The states of one layer, and of others that share its pool.

    pool: arrays [slots, *field.shape]. read_S: int32, the slot of each row's state before its first
    token here; past the end where the row begins its sequence, and the state is zeros. written_S:
    the slot that takes its state after its last token; past the end where nothing does. No slot is
    written twice, and none is written that another row reads.
    """

    pool: State
    read_S: Array
    written_S: Array

    def read(self) -> State:
        """Return the state before each row's first token: arrays [S, *field.shape]."""

        def taken(field: Array) -> Array:
            return jnp.take(field, self.read_S, axis=0, mode="fill", fill_value=0)

        # Apart from the write, so that no fusion reads the pool that it writes.
        return jax.lax.optimization_barrier({name: taken(x) for name, x in self.pool.items()})

    def written(self, new: State) -> State:
        """Return the pool with the state after each row's last token: every field, in its dtype."""
        assert new.keys() == self.pool.keys(), f"{sorted(new)} in place of {sorted(self.pool)}"
        kept: State = {}
        for name, state in new.items():
            field = self.pool[name]
            assert state.dtype == field.dtype, f"{name}: {state.dtype} in place of {field.dtype}"
            kept[name] = field.at[self.written_S].set(state, mode="drop", unique_indices=True)
        return kept
