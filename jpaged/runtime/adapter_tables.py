"""The tables that hold adapters on the device: a slot for each, the same shapes whatever lies in
them, so that new weights are written and nothing is compiled.

Every replica has tables of its own: the first axis of each array is theirs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jpaged.config import EngineConfig, has_head_adapters
from jpaged.models.config import ModelConfig
from jpaged.models.layers.low_rank import AdapterTable
from jpaged.models.lora import Pairs, adapted_specs
from jpaged.models.param_spec import ParamSpec
from jpaged.runtime import kv_cache
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import put

# By the names of the weights; a leading axis of replicas, but in what a step takes of it.
type Tables = dict[str, AdapterTable]

WHOLE_RANK = 8  # ranks are whole ones of these: of all slots together, what tiles of a GPU take


def table_rank(config: EngineConfig) -> int:
    """Return the rank that every adapter is padded to."""
    return -(-config.max_lora_rank // WHOLE_RANK) * WHOLE_RANK


def table_bytes(model: ModelConfig, config: EngineConfig, dtype: Any) -> int:
    """Return the bytes of the tables of a model. model: a device's share."""
    if not config.max_loras:
        return 0
    specs = adapted_specs(model, config.lora_extra)
    tables = [_shapes(spec, config) for spec in specs.values()]
    shapes: list[Any] = [shape for table in tables for shape in (table.a, *table.b)]
    sizes = map(math.prod, shapes)
    return jnp.dtype(dtype).itemsize * sum(sizes)


def adapted_ranks(config: EngineConfig) -> int:
    """Return the ranks of all slots together, for a weight of up to three parts; 0 without
    adapters.
    """
    return 3 * config.max_loras * table_rank(config) if config.max_loras else 0


def adapter_scratch_bytes(config: EngineConfig, tokens: int, logits: int, vocab: int) -> int:
    """Return the bytes that a step allocates for adapters at most: products of its tokens with
    every A, and what adapters of the head add to rows of logits.

    logits: rows of logits [V] that a step holds at once.
    """
    added = 4 * vocab * logits if has_head_adapters(config) else 0
    return 16 * tokens * adapted_ranks(config) + added


def table_form(
    model: ModelConfig, config: EngineConfig, placement: Placement, dtype: Any
) -> Tables:
    """Return the tables of a served model as ShapeDtypeStructs, those of all replicas together."""

    def struct(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        whole = (placement.replicas, *shape)
        return jax.ShapeDtypeStruct(whole, dtype, sharding=placement.sharding(spec))

    specs, shapes = table_specs(model, config, placement), _all_shapes(model, config)
    return jax.tree.map(struct, shapes, specs, is_leaf=_is_shape)


def table_specs(model: ModelConfig, config: EngineConfig, placement: Placement) -> Tables:
    """Return how they lie: B is split where the outputs are, A where the inputs are."""
    specs = adapted_specs(model, config.lora_extra)
    return {name: _specs(spec, placement) for name, spec in specs.items()}


def own_tables(tables: Tables) -> Tables:
    """Return the tables of the replica that runs a step."""
    return jax.tree.map(lambda x: x[0], tables)


def _all_shapes(model: ModelConfig, config: EngineConfig) -> Tables:
    specs = adapted_specs(model, config.lora_extra)
    return {name: _shapes(spec, config) for name, spec in specs.items()}


def _shapes(spec: ParamSpec, config: EngineConfig) -> AdapterTable:
    """Return the table of a weight with shapes in place of arrays."""
    inputs = spec.shape_of(" ".join(spec.sides[1]))
    outputs = [spec.shape_of(part.axes.partition(",")[0]) for part in spec.parts]
    slots, rank = config.max_loras, table_rank(config)
    a: Any = (len(outputs), slots, rank, *inputs)
    b: Any = tuple((slots, rank, *shape) for shape in outputs)
    return AdapterTable(a=a, b=b, joined=spec.concat_axis)


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def _specs(spec: ParamSpec, placement: Placement) -> AdapterTable:
    """Return the table of a weight with PartitionSpecs in place of arrays."""
    letter, data = spec.split_letter(placement.axis_size), placement.data_axes or None

    def split(lead: int, axes: list[str]) -> PartitionSpec:
        if letter not in axes or placement.tensor_axis is None:
            return PartitionSpec(data)
        return PartitionSpec(data, *[None] * (lead + axes.index(letter)), placement.tensor_axis)

    outputs = [part.axes.partition(",")[0].split() for part in spec.parts]
    a: Any = split(3, spec.sides[1])
    b: Any = tuple(split(2, axes) for axes in outputs)
    return AdapterTable(a=a, b=b, joined=spec.concat_axis)


def in_a_slot(pairs: Pairs, model: ModelConfig, config: EngineConfig, dtype: Any) -> Tables:
    """Return what an adapter has in its slot of each table, numpy: padded with zeros to the
    tables' rank, and zeros where it has no pair. pairs, model: as served.
    """
    data: Tables = {}
    for name, spec in adapted_specs(model, config.lora_extra).items():
        shapes = _shapes(spec, config)
        a: Any = np.zeros(shapes.a[:1] + shapes.a[2:], dtype)
        b: Any = tuple(np.zeros(shape[1:], dtype) for shape in shapes.b)
        for at, part in enumerate(spec.parts):
            if (pair := pairs.get(spec.at(part.name))) is not None:
                a[at, : pair.rank] = pair.a
                b[at][: pair.rank] = np.moveaxis(pair.b, -1, 0)
        data[name] = AdapterTable(a=a, b=b, joined=spec.concat_axis)
    return data


def write_adapter(tables: Tables, slots: Array, data: Tables) -> Tables:
    """Return the tables of a replica with an adapter in its slot; unchanged where that is past
    the last slot.
    """
    slot = slots[0]

    def write(table: AdapterTable, new: AdapterTable) -> AdapterTable:
        pairs = zip(table.b, new.b, strict=True)
        return AdapterTable(
            a=table.a.at[0, :, slot].set(new.a, mode="drop"),
            b=tuple(b.at[0, slot].set(x, mode="drop") for b, x in pairs),
            joined=table.joined,
        )

    return {name: write(table, data[name]) for name, table in tables.items()}


class AdapterTables:
    """The tables of one runner, made when they are first needed. model: as served. dtype: of the
    weights.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, placement: Placement, dtype: Any):
        self.model, self.config, self.placement, self.dtype = model, config, placement, dtype
        self.arrays: Tables | None = None
        self._compiled: Any = None

    def allocate(self) -> None:
        """Have them, of zeros at first, and what writes to them."""
        arrays = jax.tree.leaves(self.arrays)
        # Tables that went into a write that never came back are gone: all is loaded again then.
        if self.config.max_loras and (not arrays or any(x.is_deleted() for x in arrays)):
            form = table_form(self.model, self.config, self.placement, self.dtype)
            self.arrays = jax.tree.map(lambda x: kv_cache.zeros(x.shape, x.dtype, x.sharding), form)
            self.load(0, self.config.max_loras, {})  # nowhere

    def load(self, replica: int, slot: int, pairs: Pairs) -> None:
        """Write an adapter into a slot of a replica."""
        self.allocate()
        data = in_a_slot(pairs, self.model, self.config, self.dtype)
        slots = np.full(self.placement.replicas, self.config.max_loras, np.int32)
        slots[replica] = slot
        placed = jax.tree.map(
            lambda x, spec: put(x, self.placement.sharding(spec)), data, self._lies()
        )
        slots = put(slots, self.placement.sharding(self.placement.by_replica))
        if self._compiled is None:
            self._compiled = self._lower(slots, placed).compile()
        self.arrays = self._compiled(self.arrays, slots, placed)

    def _lies(self) -> Tables:
        """Return how an adapter's data lies, beside tables of its weights."""

        def of_slot(spec: PartitionSpec, slots: int) -> PartitionSpec:
            """slots: their axis after that of the replicas."""
            return PartitionSpec(*spec[1 : 1 + slots], *spec[2 + slots :])

        def of_weight(table: AdapterTable) -> AdapterTable:
            a: Any = table.a
            b: Any = table.b
            b = tuple(of_slot(spec, 0) for spec in b)
            return dataclasses.replace(table, a=of_slot(a, 1), b=b)

        specs = table_specs(self.model, self.config, self.placement)
        return {name: of_weight(table) for name, table in specs.items()}

    def _lower(self, slots: Array, placed: Any) -> Any:
        placement, specs = self.placement, table_specs(self.model, self.config, self.placement)
        function: Any = write_adapter
        if placement.tensor_axis is not None or placement.replicas > 1:
            function = jax.shard_map(
                write_adapter,
                mesh=placement.mesh,
                in_specs=(specs, placement.by_replica, self._lies()),
                out_specs=specs,
                check_vma=False,
            )
        outs = jax.tree.map(placement.sharding, specs)
        jitted = jax.jit(function, donate_argnums=0, out_shardings=outs)
        return jitted.lower(self.arrays, slots, placed)
