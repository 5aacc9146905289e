"""Rows: how the tokens of a step split into rows, each a part of one sequence."""

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
