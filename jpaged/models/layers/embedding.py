"""The embedding of tokens."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.low_rank import AdapterTable
from jpaged.models.param_spec import Parameter
from jpaged.models.quantized import QuantizedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
    """weight: [V, E]; over a mesh each device holds an equal share of the vocabulary. adapters:
    what tokens add to their embeddings, or None.
    """

    weight: Array | QuantizedWeight
    adapters: AdapterTable | None = None

    @classmethod
    def of(cls, weight: Parameter) -> Self:
        """The embedding of a parameter."""
        return cls(weight=weight.value, adapters=AdapterTable.of(weight))

    def __call__(self, tokens: Array, step: StepContext) -> Array:
        """[..., E] of int tokens [...]."""
        axis = step.tensor_axis
        if axis is None:
            return self._adapted(self._rows(tokens), tokens, step)
        at = tokens - jax.lax.axis_index(axis) * self.weight.shape[0]
        is_here = (at >= 0) & (at < self.weight.shape[0])
        x = jnp.where(is_here[..., None], self._rows(at), 0)
        # Exact: all but one device add zeros.
        return jax.lax.psum(self._adapted(x, at, step), axis)

    def _adapted(self, x: Array, at: Array, step: StepContext) -> Array:
        """x with its adapters, added in f32 and rounded once."""
        if self.adapters is None or step.slot_T is None:
            return x
        rows, y = self.adapters.rows(step.slot_T), x.astype(jnp.float32)
        return rows.added_of_index(y, at, step.products, step.count(x)).astype(x.dtype)

    def _rows(self, at: Array) -> Array:
        if isinstance(self.weight, QuantizedWeight):
            return self.weight.take(at)
        return jnp.take(self.weight, at, axis=0, mode="clip")
