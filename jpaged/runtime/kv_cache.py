"""The KV pool: its shape, its bytes, and how it lies on a mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec, Sharding

from jpaged.models.config import ModelConfig
from kernels_pallas.paged_attention.pool_layout import PoolLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape [L*N, P, rows, width] of the pool: row l*N + b is block b of layer l.

    rows, width: 2*K and D, K0, V0, K1, V1, ... on axis 2; padded where a TPU would otherwise copy
    the pool.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    rows: int
    width: int
    dtype: jnp.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.num_layers * self.num_blocks, self.block_size, self.rows, self.width)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, on all devices together."""
        return self.num_layers * self.block_size * self.rows * self.width * self.dtype.itemsize


def layout(
    model: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: jnp.dtype,
    token: PoolLayout | None = None,
    shards: int = 1,
) -> Layout:
    """The pool's layout for a model. token: of the kernel, on each of the `shards` devices that the
    KV heads are split over; None pads nothing.
    """
    rows, width = 2 * model.num_kv_heads, model.head_dim
    if token is not None:
        rows, width = shards * token.rows, token.width
    return Layout(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        rows=rows,
        width=width,
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


def copy_blocks(pool: Array, copies_C2: Array, *, num_layers: int) -> Array:
    """The pool after each (source, target) pair of blocks in turn, all layers of a block at once,
    in place.

    A pair whose blocks are the same ends the list: no copies cost nothing.
    """
    layers = pool.reshape(num_layers, pool.shape[0] // num_layers, *pool.shape[1:])

    def copy(i: Array, layers: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(layers, copies_C2[i, 0], 1, axis=1)
        # Apart from its write, so that no fusion reads the buffer that it writes.
        block = jax.lax.optimization_barrier(block)
        return jax.lax.dynamic_update_slice_in_dim(layers, block, copies_C2[i, 1], axis=1)

    count = jnp.sum(
        jnp.cumprod((copies_C2[:, 0] != copies_C2[:, 1]).astype(jnp.int32)), dtype=jnp.int32
    )
    with jax.named_scope("copy_blocks"):
        return jax.lax.fori_loop(0, count, copy, layers).reshape(pool.shape)


def _rows(block_ids_B: Array, num_layers: int, rows: int) -> Array:
    """Rows of the pool, a block's layers together; past the end, each at its own place, for ids of
    -1.
    """
    step = rows // num_layers
    row_BL = block_ids_B[:, None] + step * jnp.arange(num_layers, dtype=jnp.int32)[None, :]
    past_BL = rows + jnp.arange(row_BL.size, dtype=jnp.int32).reshape(row_BL.shape)
    return jnp.where(block_ids_B[:, None] < 0, past_BL, row_BL).reshape(-1)


def read_blocks(pool: Array, block_ids_B: Array, *, num_layers: int) -> Array:
    """Blocks of the pool, [B*L, P, 2K, D]; whatever is in reach for ids of -1."""
    return jnp.take(pool, _rows(block_ids_B, num_layers, pool.shape[0]), axis=0, mode="clip")


def write_blocks(pool: Array, block_ids_B: Array, blocks: Array, *, num_layers: int) -> Array:
    """The pool with blocks from read_blocks in these places; none is written for ids of -1."""
    rows = _rows(block_ids_B, num_layers, pool.shape[0])
    return pool.at[rows].set(blocks, mode="drop", unique_indices=True)
