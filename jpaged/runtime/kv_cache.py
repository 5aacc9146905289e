"""The KV cache: a pool a group of layers, its shape and bytes, and moving blocks.

A pool is a dict of arrays, one a field of PoolSpec.record:

    pool[field.name] [Lg * N, *field.shape]    row l * N + b is block b of the group's l-th layer

so one block table serves all layers of a group, and no slice of a pool is ever taken. What moves
blocks is a tree map over the fields. Keys and values, or latents and rotated keys, are one field,
"kv": [P, rows, width], P slots of one token each, as the kernel lays them out; in 8 bits their
"scales" are another.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec, Sharding

from jpaged.config import EngineConfig
from jpaged.engine.cache.block_manager import GroupSize
from jpaged.models.config import ModelConfig
from jpaged.models.kv_groups import KVGroup, kv_groups
from jpaged.models.record import CHOSEN_EXPERTS, PAIRS, Field, Record
from jpaged.runtime.attention import Kernel
from jpaged.runtime.memory import GroupCost, window_share
from jpaged.runtime.mesh import Placement
from kernels_cpu import library
from kernels_cpu.zeros import zeros as lazy_zeros
from kernels_pallas.paged_attention.pool_layout import ScaledPool

LAZY_BYTES = 64 << 20  # of the least pool whose pages are not there before they are used

type Pool = dict[str, Any]  # arrays (or what stands for them) by the names of fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """The pool of one group of layers, and the kernel that reads it: None for states.

    dtype: of queries, and of the pool unless kv_dtype names another, of 8 bits with scales. shards:
    devices that split fields are split over.
    """

    group: KVGroup
    kernel: Kernel | None
    num_blocks: int
    block_size: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype | None = None
    shards: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.group.layers)

    @property
    def record(self) -> Record:
        """What a block of one layer is on all devices together: keys and values as the kernel lays
        them out (K0, V0, K1, V1, ... on axis 1, padded), and other fields of the group's record as
        the layer declares them, once a token or once a block.
        """
        kept, fields = self.group.record, list[Field]()
        if kept.has_keys:
            fields += self._keys_and_values
        slots = (self.block_size,) if kept.per == "token" else ()
        for field in kept.fields:
            if field.name not in itertools.chain(*PAIRS):
                split = None if field.split is None else len(slots) + field.split
                dtype = self.dtype if field.dtype is None else jnp.dtype(field.dtype)
                fields.append(Field(field.name, (*slots, *field.shape), split=split, dtype=dtype))
        return Record(fields=tuple(fields), per="block")

    @property
    def _keys_and_values(self) -> list[Field]:
        assert self.kernel is not None
        layout, P = self.kernel.pool_layout, self.block_size
        # A latent is of all heads: every device that holds some of them has it.
        shards, split = (1, None) if self.group.record.is_latent else (self.shards, 1)
        kv = (P, shards * layout.rows, layout.width)
        fields = [Field("kv", kv, split=split, dtype=self.kv_dtype or self.dtype)]
        if self.kv_dtype is not None:
            # A device's scales lie together, whatever their last axis is.
            lines, columns = layout.scales(P)
            shape = (lines, shards * columns)
            fields.append(Field("scales", shape, split=split, dtype=jnp.dtype(jnp.float32)))
        return fields

    @property
    def num_rows(self) -> int:
        """Lg * N."""
        return self.num_layers * self.num_blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys and values."""
        return (self.num_rows, *self.record["kv"].shape)

    def of_rows(self, rows: int) -> Pool:
        """Return the shapes of this many rows of the pool, as ShapeDtypeStructs."""
        return {
            field.name: jax.ShapeDtypeStruct((rows, *field.shape), field.dtype)
            for field in self.record.fields
        }

    def specs(self, placement: Placement) -> Pool:
        """Return how each field lies at a place; see `partition`."""
        return {field.name: partition(field, placement) for field in self.record.fields}

    def shardings(self, placement: Placement) -> Pool:
        """Return `specs` as shardings."""
        return {name: placement.sharding(spec) for name, spec in self.specs(placement).items()}

    def slots(self, pool: Pool, layer: Any, block_S: Array) -> Array:
        """Return the rows of a pool that hold a block for each row of a step, in the `layer`-th
        layer of the group; past the end, each another, for blocks of -1.
        """
        rows, past_S = num_rows(pool), jnp.arange(block_S.shape[0], dtype=jnp.int32)
        first = layer * (rows // self.num_layers)
        return jnp.where(block_S < 0, rows + past_S, first + block_S)

    def replayed(self, tokens: int, *, shards: int = 1) -> Pool:
        """Return what so many tokens of a step leave for a replay of its states, as
        ShapeDtypeStructs [Lg, tokens, *field.shape]; {} where nothing is replayed. shards: 1 for
        all devices together, else how many of them split it.
        """
        forms: Pool = {}
        for field in self.group.record.replayed:
            shape = list(field.shape)
            if field.split is not None:
                shape[field.split] //= shards
            dtype = self.dtype if field.dtype is None else jnp.dtype(field.dtype)
            forms[field.name] = jax.ShapeDtypeStruct((self.num_layers, tokens, *shape), dtype)
        return forms

    def replayed_specs(self, placement: Placement) -> Pool:
        """Return how that lies at a place; see `partition`."""
        return {
            field.name: partition(
                dataclasses.replace(field, split=None if field.split is None else field.split + 1),
                placement,
            )
            for field in self.group.record.replayed
        }

    def operand(self, pool: Pool) -> Any:
        """Return the keys and values of a pool as its kernel takes them."""
        if self.kv_dtype is None:
            return pool["kv"]
        assert self.kernel is not None
        layout = self.kernel.pool_layout
        return ScaledPool(pool["kv"], pool["scales"], layout.slots_last, layout.key_width)

    def written(self, pool: Pool, operand: Any) -> Pool:
        """Return the pool with these keys and values."""
        if self.kv_dtype is None:
            return pool | {"kv": operand}
        return pool | {"kv": operand.values, "scales": operand.scales}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the group, on all devices together."""
        return self.num_layers * sum(map(_bytes, self.record.fields))

    @property
    def device_block_bytes(self) -> int:
        """Bytes of one block in all layers of the group, on each device."""
        return self.num_layers * sum(
            _bytes(field) // (1 if field.split is None else self.shards)
            for field in self.record.fields
        )

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def size(self) -> GroupSize:
        group = self.group
        taken = [x.shape[0] for x in group.record.fields if x.name == CHOSEN_EXPERTS]
        experts = (self.num_layers, taken[0]) if taken else None
        return GroupSize(self.num_blocks, group.window, self.block_bytes, group.record.per, experts)


def pool_specs(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    kernels: Sequence[Kernel | None],
    num_blocks: int,
    dtype: Any,
) -> tuple[PoolSpec, ...]:
    """Return the pools of a model for a resolved config.

    kernels: one for each of kv_groups(model), None for states. num_blocks: of the group that
    reaches furthest back; groups with a window have their share of them (see group_costs), and
    states are as many as num_states says where it does. dtype: of the weights.
    """
    specs = [
        PoolSpec(
            group=group,
            kernel=kernel,
            num_blocks=0,
            block_size=config.block_size,
            dtype=jnp.dtype(dtype),
            kv_dtype=None if kernel is None else kernel.shapes.kv_dtype,
            shards=placement.axis_size,
        )
        for group, kernel in zip(kv_groups(model), kernels, strict=True)
    ]
    costs = group_costs(model, config, specs)
    counts = [
        most if cost is None else cost.count(num_blocks)
        for cost, most in zip(costs, most_blocks(model, config), strict=True)
    ]
    return tuple(
        dataclasses.replace(spec, num_blocks=count)
        for spec, count in zip(specs, counts, strict=True)
    )


def group_costs(
    model: ModelConfig, config: EngineConfig, specs: Sequence[PoolSpec]
) -> list[GroupCost | None]:
    """Return for each of kv_groups(model) what its pool takes of a device; None for states, and for
    them alone unless they are all that the model keeps. specs: its pools, of whatever number of
    blocks.
    """
    most, widest = most_blocks(model, config), widest_group(model, config)
    rows = [_blocks_a_row(spec.group, config) for spec in specs]
    length, chunk = rows[widest], -(-config.max_num_batched_tokens // config.block_size)
    sizes = [
        (spec.device_block_bytes, row)
        for spec, row in zip(specs, rows, strict=True)
        if spec.group.record.per == "token"
    ]
    full = sum(size for size, row in sizes if row >= length)
    share = window_share((full, length), [(size, row) for size, row in sizes if row < length])
    costs: list[GroupCost | None] = []
    for at, (spec, row) in enumerate(zip(specs, rows, strict=True)):
        size = spec.device_block_bytes
        if at == widest:
            costs.append(GroupCost(size))
        elif spec.group.record.per == "block":
            costs.append(None)
        elif row >= length:
            costs.append(GroupCost(size, most[at]))
        else:
            costs.append(GroupCost(size, most[at], least=row + chunk, share=share))
    return costs


def most_blocks(model: ModelConfig, config: EngineConfig) -> list[int]:
    """Return how many blocks of each group are of use at once; of states, num_states where that is
    set.
    """
    size, most = config.block_size, []
    for group in kv_groups(model):
        if group.record.per == "block":
            most.append(config.num_states or config.num_rows * states_a_row(config))
            continue
        # What one prefill writes, beside what rows hold.
        chunks = 0 if group.window is None else -(-config.max_num_batched_tokens // size)
        rows = config.num_rows * _blocks_a_row(group, config)
        most.append(min(rows + chunks, _whole(config)))
    return most


def _blocks_a_row(group: KVGroup, config: EngineConfig) -> int:
    """Return how many blocks of a group one sequence holds at most; 0 for states."""
    assert config.decode_steps is not None
    if group.record.per == "block":
        return 0
    if group.window is None:
        return config.max_blocks_per_seq
    # What a row still sees, the block that it writes, as many as it may draw ahead.
    size = config.block_size
    ahead = 2 + -(-config.decode_steps // size)
    return min(-(-(group.window - 1) // size) + ahead, config.max_blocks_per_seq)


def states_a_row(config: EngineConfig) -> int:
    """Return how many states a row is given in each group that keeps them: the one that a step
    reads, those that it writes (a chunk writes one, tokens that are drawn or guessed ahead one a
    block), and one that stays when its sequence has gone on or ended, to be found again.
    """
    assert config.decode_steps is not None
    guesses = 0 if config.speculative is None else config.speculative.num_tokens
    ahead = max(config.decode_steps - 1, guesses)
    return 2 + -(-ahead // config.block_size) + 1


def widest_group(model: ModelConfig, config: EngineConfig) -> int:
    """Return the group that reaches furthest back, for which num_blocks is meant."""
    reaches = [reach(group, config) for group in kv_groups(model)]
    return reaches.index(max(reaches))


def _whole(config: EngineConfig) -> int:
    return config.num_rows * config.max_blocks_per_seq


def reach(group: KVGroup, config: EngineConfig) -> int:
    """Tokens of a sequence that a group keeps (resolved configs only); 0 for a state of all."""
    assert config.max_model_len is not None
    if group.record.per == "block":
        return 0
    window = group.window
    return config.max_model_len if window is None else min(window, config.max_model_len)


def partition(field: Field, placement: Placement) -> PartitionSpec:
    """Return how an array of a field, [rows, *field.shape], lies at a place: replicas one after the
    other, and the field's own split axis over the tensor axis.
    """
    replicas = placement.data_axes or None
    if field.split is None:
        return PartitionSpec(replicas)
    return PartitionSpec(replicas, *[None] * field.split, placement.tensor_axis)


def _bytes(field: Field) -> int:
    return math.prod(field.shape) * field.dtype.itemsize


def num_rows(pool: Pool) -> int:
    """Lg * N of a pool."""
    return next(iter(pool.values())).shape[0]


def split(blocks: Any, num_layers: int, count: int) -> list[Any]:
    """Return each of the first `count` blocks of what read_blocks made, on the host: by field an
    array [L, *field.shape], or a list of the devices' shares of it. None holds on to the others'
    memory.
    """
    rows = [slice(i * num_layers, (i + 1) * num_layers) for i in range(count)]
    return [jax.tree.map(lambda part, at=at: part[at].copy(), blocks) for at in rows]


def joined(blocks: Sequence[Any], num_layers: int, count: int) -> Any:
    """Return such blocks one after the other, as write_blocks takes them: `count` of them, with
    zeros where there are fewer.
    """

    def join(*parts: np.ndarray) -> np.ndarray:
        whole = np.zeros((count * num_layers, *parts[0].shape[1:]), parts[0].dtype)
        for i, part in enumerate(parts):
            whole[i * num_layers : (i + 1) * num_layers] = part
        return whole

    return jax.tree.map(join, *blocks)


def _is_lazy(nbytes: int, placement: Sharding) -> bool:
    """Return whether zeros of this size take no memory before they are written to. Small ones are
    not worth a compile of the CPU kernels where nothing else needs those.
    """
    if nbytes < LAZY_BYTES or len(placement.device_set) > 1:
        return False
    (device,) = placement.device_set
    return device.platform == "cpu" and library.unavailable() is None


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, placement: Sharding, num_layers: int) -> Any:
    is_lazy = _is_lazy(math.prod(shape) * dtype.itemsize, placement)

    def zeros() -> Array:
        return lazy_zeros(shape, dtype, parts=num_layers) if is_lazy else jnp.zeros(shape, dtype)

    return jax.jit(zeros, out_shardings=placement).lower().compile()


def zeros(shape: tuple[int, ...], dtype: Any, placement: Sharding, *, num_layers: int = 1) -> Array:
    """Return a fresh array, made on the device: nothing is sent up, no share is copied from
    another's. num_layers: how many layers have equal parts of it, one after another.

    A pool begins as zeros, not garbage: whole pages are read and 0 * NaN would poison a row.
    """
    return _zeros(shape, jnp.dtype(dtype), placement, num_layers)()


def copy_blocks(pool: Any, copies_C2: Array, *, num_layers: int) -> Any:
    """Return the pool after each (source, target) pair of blocks in turn, all layers of a block at
    once, in place.

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
    """Pool rows of each block, all its layers; an id of -1 maps to distinct rows past the end,
    where reads clip and writes drop.
    """
    step = rows // num_layers
    row_BL = block_ids_B[:, None] + step * jnp.arange(num_layers, dtype=jnp.int32)[None, :]
    past_BL = rows + jnp.arange(row_BL.size, dtype=jnp.int32).reshape(row_BL.shape)
    return jnp.where(block_ids_B[:, None] < 0, past_BL, row_BL).reshape(-1)


def _first(pool: Any) -> Any:
    return jax.tree.leaves(pool)[0]


def read_blocks(pool: Any, block_ids_B: Array, *, num_layers: int) -> Any:
    """Blocks of the pool, [B*L, *field.shape]; whatever is in reach for ids of -1."""
    rows = _rows(block_ids_B, num_layers, _first(pool).shape[0])
    return jax.tree.map(lambda part: jnp.take(part, rows, axis=0, mode="clip"), pool)


def write_blocks(pool: Any, block_ids_B: Array, blocks: Any, *, num_layers: int) -> Any:
    """Return the pool with blocks from read_blocks in these places; ids of -1 write none."""
    rows = _rows(block_ids_B, num_layers, _first(pool).shape[0])

    def write(part: Array, new: Array) -> Array:
        return part.at[rows].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, pool, blocks)
