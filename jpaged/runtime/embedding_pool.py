"""The pool of embeddings on the device, which a prefill reads in place of those of tokens. Before
each step its first rows are written anew.

Every replica has a pool of its own: the first axis is theirs.
"""

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jpaged.config import EngineConfig
from jpaged.engine.spans import Piece, rows_of
from jpaged.models.config import ModelConfig
from jpaged.runtime import kv_cache
from jpaged.runtime.mesh import Placement
from jpaged.runtime.transfers import Transfers

MOST_WRITTEN = 256  # rows that go up at once


def rows_written(config: EngineConfig) -> int:
    """Return how many rows go up at once: all writes are of one size, so that one compiles."""
    return min(config.max_embeddings, MOST_WRITTEN)


def pool_shape(model: ModelConfig, config: EngineConfig) -> tuple[int, int, int]:
    """Return the shape of a replica's pool: rows, an embedding and what is added to it after each
    of the first layers, E.
    """
    return config.max_embeddings, 1 + model.num_deepstack, model.hidden_size


def embedding_bytes(model: ModelConfig, config: EngineConfig, dtype: Any) -> int:
    """Return the bytes of the pool on a device, and of what goes up to it at once."""
    rows, *shape = pool_shape(model, config)
    width = jnp.dtype(dtype).itemsize * math.prod(shape)
    return (rows + rows_written(config)) * width


def pool_form(
    model: ModelConfig, config: EngineConfig, placement: Placement, dtype: Any
) -> jax.ShapeDtypeStruct:
    """Return the pools of all replicas as a ShapeDtypeStruct."""
    shape = (placement.replicas, *pool_shape(model, config))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(placement.by_replica))


def write_rows(pool: Array, first: Array, rows: Array) -> Array:
    """Return a replica's pool [1, N, ...] with rows from the first one on; what is past the end is
    dropped.
    """
    at = first[0] + jnp.arange(rows.shape[0], dtype=jnp.int32)
    return pool.at[0, at].set(rows, mode="drop")


class EmbeddingPool:
    """The pools of one runner, made when they are first needed. model: as served. dtype: of the
    weights. seconds: of compiles, by name; where that of its write is noted.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        placement: Placement,
        dtype: Any,
        transfers: Transfers,
        seconds: dict[Any, float],
    ):
        self.model, self.config, self.placement, self.dtype = model, config, placement, dtype
        self.array: Array | None = None
        self._transfers, self._seconds = transfers, seconds
        self._compiled: Any = None

    def allocate(self) -> None:
        """Have it, of zeros at first, and what writes to it; nothing where no prompt may have
        embeddings.
        """
        if not self.config.max_embeddings:
            return
        # A pool that went into a write that never came back is gone.
        if self.array is None or self.array.is_deleted():
            form = pool_form(self.model, self.config, self.placement, self.dtype)
            self.array = kv_cache.zeros(form.shape, form.dtype, form.sharding)
        if self._compiled is None:
            started = time.perf_counter()
            self._compiled = self._lower().compile()
            self._seconds["write_embeddings"] = time.perf_counter() - started

    def write(self, replica: int, pieces: tuple[Piece, ...]) -> None:
        """Put these parts of spans into the first rows of a replica's pool."""
        self.allocate()
        rows = rows_of(list(pieces), self.model.num_deepstack, self.dtype)
        size = rows_written(self.config)
        none = self.config.max_embeddings  # past the end: dropped
        for first in range(0, len(rows), size):
            part = np.zeros((size, *rows.shape[1:]), self.dtype)
            part[: len(rows) - first] = rows[first : first + size]
            at = self._transfers.put_for(replica, np.array([first], np.int32), none)
            sent = self._transfers.put_whole(part)
            self.array = self._compiled(self.array, at, sent)

    def _lower(self) -> Any:
        placement = self.placement
        form = pool_form(self.model, self.config, placement, self.dtype)
        part = (rows_written(self.config), *form.shape[2:])
        first = jax.ShapeDtypeStruct(
            (placement.replicas,), jnp.int32, sharding=placement.sharding(placement.by_replica)
        )
        sent = jax.ShapeDtypeStruct(part, self.dtype, sharding=placement.replicated)
        function: Any = write_rows
        if placement.tensor_axis is not None or placement.replicas > 1:
            parts = placement.by_replica
            function = jax.shard_map(
                write_rows,
                mesh=placement.mesh,
                in_specs=(parts, parts, PartitionSpec()),
                out_specs=parts,
                check_vma=False,
            )
        jitted = jax.jit(function, donate_argnums=0, out_shardings=form.sharding)
        return jitted.lower(form, first, sent)
