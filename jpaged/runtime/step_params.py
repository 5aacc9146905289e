"""StepParams: the weights that a step takes as its first argument."""

import dataclasses

import jax
from jax import Array

from jpaged.models.forward import Forward
from jpaged.models.head_modules import Head
from jpaged.models.layers.low_rank import AdapterTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParams:
    """Modules of arrays, or of what stands for arrays (shapes, PartitionSpecs); a field is None
    where a step does not use it.

    model: see weights.ServingWeights. adapters: the tables of all replicas, by the names of their
    weights. draft: the modules of a draft model, or of a head. embeddings: the pools of all
    replicas (runtime/embedding_pool.py).
    """

    model: Forward | None = None
    adapters: dict[str, AdapterTable] | None = None
    draft: Forward | Head | None = None
    embeddings: Array | None = None
