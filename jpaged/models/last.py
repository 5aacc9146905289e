"""Last: the tokens of a step after which something is drawn."""

from collections.abc import Callable
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from jpaged.models.kv_view import KVView
from jpaged.models.layers.linear import StepContext


class Last(NamedTuple):
    """The tokens of a step after which something is drawn. Once the last layer that keeps something
    has done so, the others matter no more: what follows is computed for these alone.

    index_R: int32, their places among the step's tokens. step: their context. view: makes of the
    step's view that in which each of them is a row of one token.
    """

    index_R: Array
    step: StepContext
    view: Callable[[KVView], KVView]

    def rows_of(self, x: Array) -> Array:
        """Return x [R, ...] of these tokens, of x [T, ...] of all."""
        return jnp.take(x, self.index_R, axis=0, mode="clip")

    def in_layer(self, index: int) -> Self:
        """Return the same for a layer."""
        return self._replace(step=self.step.in_layer(index))
