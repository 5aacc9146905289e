"""StepParams: the weights that a step takes as its first argument."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParams:
    """Arrays, or their shapes, or how they lie; a field is None where a step has no use for it.

    model: the serving tree (see weights.ServingWeights). adapters: the tables of all replicas (see
    adapter_tables). draft: the serving tree of a draft model, or of a head.
    """

    model: Any = None
    adapters: Any = None
    draft: Any = None
