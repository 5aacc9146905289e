"""The embedding of tokens."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import StepContext
from jpaged.models.param_spec import Parameter, ParamSpec
from jpaged.models.quantized import QuantizedWeight

EMBED = ParamSpec("embed.weight", "V, E", "model.embed_tokens.weight", "normal", "V")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
    """weight: [V, E]; over a mesh each device holds an equal share of the vocabulary. name: under
    which a step may have adapters for it.
    """

    weight: Array | QuantizedWeight
    name: str = dataclasses.field(default="embed.weight", metadata={"static": True})

    @classmethod
    def of(cls, weight: Parameter) -> Self:
        """Return the embedding of a parameter."""
        return cls(weight=weight.value, name=weight.spec.short_name)

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
        """x with the adapters of its rows, added in f32 and rounded once."""
        rows = step.low_rank(self.name)
        if rows is None:
            return x
        y = x.astype(jnp.float32)
        return rows.added_of_index(y, at, step.products, step.count(x)).astype(x.dtype)

    def _rows(self, at: Array) -> Array:
        if isinstance(self.weight, QuantizedWeight):
            return self.weight.take(at)
        return jnp.take(self.weight, at, axis=0, mode="clip")
