"""The KV cache: a pool a group of layers, its shape and bytes, and moving blocks.

    pool [Lg * N, P, rows, width]      row l * N + b is block b of the group's l-th layer,
                                       each of its P slots the keys and values of one token

so one block table serves all layers of a group, and no slice of a pool is ever taken. Keys and
values in 8 bits lie in a ScaledPool, whose scales have an array of their own beside: what moves
blocks moves both.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec, Sharding

from jpaged.config import EngineConfig
from jpaged.engine.block_manager import GroupSize
from jpaged.models.config import ModelConfig
from jpaged.models.kv_groups import KVGroup, kv_groups
from jpaged.runtime.attention import KV_DTYPES, Kernel, choose_kernel
from jpaged.runtime.mesh import Placement
from kernels_pallas.paged_attention.pool_layout import ScaledPool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadPool:
    """The pool of an EAGLE-3 head: keys and values of its entries, and in hidden [N, P, E] the
    hidden state of the model at each position.
    """

    kv: Any
    hidden: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the keys and values."""
        return self.kv.shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """The pool of one group of layers, and the kernel that reads it.

    dtype: of queries, and of the pool unless kv_dtype names another, of 8 bits with scales. shards:
    devices that the KV heads are split over. hidden_size: of what a HeadPool has beside, 0 for any
    other.
    """

    group: KVGroup
    kernel: Kernel
    num_blocks: int
    block_size: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype | None = None
    shards: int = 1
    hidden_size: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.group.layers)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """K0, V0, K1, V1, ... on axis 2, as the kernel pads them."""
        token = self.kernel.pool_layout
        rows = self.num_layers * self.num_blocks
        return (rows, self.block_size, self.shards * token.rows, token.width)

    def of_rows(self, rows: int) -> Any:
        """So many rows of the pool as ShapeDtypeStructs: one, or a ScaledPool or HeadPool of
        several.
        """
        if self.hidden_size:
            kv = dataclasses.replace(self, hidden_size=0).of_rows(rows)
            hidden = (rows, self.block_size, self.hidden_size)
            return HeadPool(kv=kv, hidden=jax.ShapeDtypeStruct(hidden, self.dtype))
        shape = (rows, *self.shape[1:])
        if self.kv_dtype is None:
            return jax.ShapeDtypeStruct(shape, self.dtype)
        layout, values = self.kernel.pool_layout, jax.ShapeDtypeStruct(shape, self.kv_dtype)
        lines, columns = layout.scales(self.block_size)
        scales = jax.ShapeDtypeStruct((rows, lines, self.shards * columns), jnp.float32)
        return ScaledPool(values, scales, layout.slots_last)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the group, on all devices together."""
        parts = jax.tree.leaves(self.of_rows(self.num_layers))
        return sum(part.size * part.dtype.itemsize for part in parts)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def size(self) -> GroupSize:
        return GroupSize(self.num_blocks, self.group.window, self.block_bytes)


def pool_specs(
    model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any, num_blocks: int
) -> tuple[PoolSpec, ...]:
    """The pools of a model for a resolved config, kernels chosen.

    num_blocks: of the group that reaches furthest back; others need no more than can be in use.
    """
    most, widest = most_blocks(model, config), widest_group(model, config)
    kv_dtype = config.kv_cache_dtype and jnp.dtype(KV_DTYPES[config.kv_cache_dtype])
    return tuple(
        PoolSpec(
            group=group,
            kernel=choose_kernel(model, group, config, dtype, where.device, where.axis_size),
            num_blocks=num_blocks if at == widest else min(num_blocks, most[at]),
            block_size=config.block_size,
            dtype=jnp.dtype(dtype),
            kv_dtype=kv_dtype,
            shards=where.axis_size,
            hidden_size=model.hidden_size if model.is_head else 0,
        )
        for at, group in enumerate(kv_groups(model))
    )


def most_blocks(model: ModelConfig, config: EngineConfig) -> list[int]:
    """Of each group, the blocks that can be in use at once."""
    assert config.decode_steps is not None
    size, most = config.block_size, []
    for group in kv_groups(model):
        a_row, chunks = config.max_blocks_per_seq, 0
        if group.window is not None:
            # What a row still sees, the block that it writes, as many as it may draw ahead; and
            # what one prefill writes.
            ahead = 2 + -(-config.decode_steps // size)
            a_row = min(-(-(group.window - 1) // size) + ahead, a_row)
            chunks = -(-config.max_num_batched_tokens // size)
        most.append(min(config.max_num_seqs * a_row + chunks, _whole(config)))
    return most


def widest_group(model: ModelConfig, config: EngineConfig) -> int:
    """The group that reaches furthest back, for which num_blocks is meant."""
    reaches = [reach(group, config) for group in kv_groups(model)]
    return reaches.index(max(reaches))


def _whole(config: EngineConfig) -> int:
    return config.max_num_seqs * config.max_blocks_per_seq


def reach(group: KVGroup, config: EngineConfig) -> int:
    """Tokens of a sequence that a group keeps (resolved configs only)."""
    assert config.max_model_len is not None
    window = group.window
    return config.max_model_len if window is None else min(window, config.max_model_len)


def spec(where: Placement) -> PartitionSpec:
    """KV heads over the tensor axis, a contiguous split of axis 2 keeps each head's K and V
    together; and the pools of all replicas one after the other. So lie scales too, whatever their
    axis 2 is: a device's lie together.
    """
    return PartitionSpec(where.data_axes or None, None, where.tensor_axis)


def sharding(where: Placement) -> Any:
    """Of every pool at a place."""
    return where.sharding(spec(where))


def pinned(where: Placement) -> Any:
    """Of blocks on the host, in memory that the device reaches by itself; None without such."""
    kinds = {memory.kind for memory in where.device.addressable_memories()}
    return sharding(where).with_memory_kind("pinned_host") if "pinned_host" in kinds else None


def to_host(blocks: Any, where: Placement) -> Any:
    """Blocks on the host, in pinned memory where there is any."""
    memory = pinned(where)
    return jax.device_get(blocks) if memory is None else jax.device_put(blocks, memory)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, where: Sharding) -> Any:
    def zeros() -> Array:
        return jnp.zeros(shape, dtype)

    return jax.jit(zeros, out_shardings=where).lower().compile()


def zeros(shape: tuple[int, ...], dtype: Any, where: Sharding) -> Array:
    """A fresh array, made on the device: nothing is sent up, no share is copied from another's.

    A pool begins as zeros, not garbage: whole pages are read and 0 * NaN would poison a row.
    """
    return _zeros(shape, jnp.dtype(dtype), where)()


def copy_blocks(pool: Any, copies_C2: Array, *, num_layers: int) -> Any:
    """The pool after each (source, target) pair of blocks in turn, all layers of a block at once,
    in place.

    A pair whose blocks are the same ends the list: no copies cost nothing.
    """
    return jax.tree.map(lambda part: _copied(part, copies_C2, num_layers), pool)


def _copied(pool: Array, copies_C2: Array, num_layers: int) -> Array:
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


def read_blocks(pool: Any, block_ids_B: Array, *, num_layers: int) -> Any:
    """Blocks of the pool, [B*L, P, 2K, D]; whatever is in reach for ids of -1."""
    rows = _rows(block_ids_B, num_layers, pool.shape[0])
    return jax.tree.map(lambda part: jnp.take(part, rows, axis=0, mode="clip"), pool)


def write_blocks(pool: Any, block_ids_B: Array, blocks: Any, *, num_layers: int) -> Any:
    """The pool with blocks from read_blocks in these places; none is written for ids of -1."""
    rows = _rows(block_ids_B, num_layers, pool.shape[0])

    def write(part: Array, new: Array) -> Array:
        return part.at[rows].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, pool, blocks)
