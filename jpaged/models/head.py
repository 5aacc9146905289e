"""DraftHead: the modules that every head which guesses for a model has."""

import dataclasses

from jax.typing import DTypeLike

from jpaged.models.layers.layer import Layer
from jpaged.models.layers.linear import Linear
from jpaged.models.layers.norm import RMSNorm


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftHead:
    """One layer, the product `fc` before it and the norm after it. EagleHead and MTPHead say what
    `fc` joins and how the layer runs.
    """

    fc: Linear
    layer: Layer
    norm: RMSNorm

    @property
    def dtype(self) -> DTypeLike:
        """Return the dtype of its weights."""
        assert self.fc.weight is not None
        return self.fc.weight.dtype

    @property
    def experts_are_plain(self) -> bool:
        """Return whether the weights of its experts are arrays: see Forward."""
        return self.layer.experts_are_plain
