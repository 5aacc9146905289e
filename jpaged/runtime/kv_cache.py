"""The KV pool: its shape, its bytes, and how it lies on a mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec, Sharding

from jpaged.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape [L*N, P, 2*K, D] of the pool: row l*N + b is block b of layer l; axis 2 is K0, V0, K1, V1, ..."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.num_layers * self.num_blocks, self.block_size, 2 * self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, on all devices together."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def layout(model: ModelConfig, *, num_blocks: int, block_size: int, dtype: jnp.dtype) -> Layout:
    """The pool's layout for a model; CPU and CUDA need no padding."""
    return Layout(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def spec(axis: str | None) -> PartitionSpec:
    """KV heads over `axis`; a contiguous split of axis 2 keeps each head's K and V together."""
    return PartitionSpec(None, None, axis, None)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, where: Sharding) -> Any:
    def zeros() -> Array:
        return jnp.zeros(shape, dtype)

    return jax.jit(zeros, out_shardings=where).lower().compile()


def zeros(shape: tuple[int, ...], dtype: Any, where: Sharding) -> Array:
    """A fresh pool, made on the device: nothing is sent up, no share is copied from another's.

    Zeros, not garbage: whole pages are read and 0 * NaN would poison a row.
    """
    return _zeros(shape, jnp.dtype(dtype), where)()
