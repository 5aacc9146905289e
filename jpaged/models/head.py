"""DraftHead: the modules that every head which guesses for a model has."""

import dataclasses

import jax
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.layers.layer import Layer
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import RMSNorm


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftHead:
    """One layer, the product `fc` before it and the norm after it. EagleHead and MTPHead say what
    `fc` joins and how the layer runs.
    """

    fc: Linear
    layer: Layer
    norm: RMSNorm

    def through_fc(self, x: Array, step: StepContext) -> Array:
        """Return what `fc` makes of x [..., T, A]: whole hidden states [..., T, E] on every
        device.
        """
        assert self.norm.scale is not None
        with jax.named_scope("fc"):
            return step.gathered(self.fc(x, step), self.norm.scale.shape[-1])

    @property
    def dtype(self) -> DTypeLike:
        """Return the dtype of its weights."""
        assert self.fc.weight is not None
        return self.fc.weight.dtype

    @property
    def experts_are_plain(self) -> bool:
        """Return whether the weights of its experts are arrays: see Forward."""
        return self.layer.experts_are_plain
