"""The tables that hold adapters on the device: a slot for each, the same shapes whatever lies in
them, so that new weights are written and nothing is compiled.

Every replica has tables of its own: the first axis of each array is theirs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jpaged.config import EngineConfig
from jpaged.engine.packing import Batch
from jpaged.models.config import ModelConfig
from jpaged.models.lora import Pairs, adapted_specs
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import nest
from jpaged.runtime import kv_cache
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import put

WHOLE_RANK = 8  # ranks are whole ones of these: of all slots together, what tiles of a GPU take


def table_rank(config: EngineConfig) -> int:
    """The rank that every adapter is padded to."""
    return -(-config.max_lora_rank // WHOLE_RANK) * WHOLE_RANK


def table_bytes(model: ModelConfig, config: EngineConfig, dtype: Any) -> int:
    """Of the tables of a model as a device has it."""
    if not config.max_loras:
        return 0
    specs = adapted_specs(model, config.lora_extra)
    shapes = [_shapes(spec, config) for spec in specs.values()]
    sizes = [math.prod(shape) for each in shapes for shape in (each["a"], *each["b"])]
    return jnp.dtype(dtype).itemsize * sum(sizes)


def table_form(model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any) -> Any:
    """The tables of a served model as ShapeDtypeStructs of all replicas."""

    def struct(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        whole = (where.replicas, *shape)
        return jax.ShapeDtypeStruct(whole, dtype, sharding=where.sharding(spec))

    def of_weight(name: str, spec: ParamSpec) -> dict[str, Any]:
        shapes, specs = _shapes(spec, config), _specs(spec, where)
        pairs = zip(shapes["b"], specs["b"], strict=True)
        return {"a": struct(shapes["a"], specs["a"]), "b": tuple(struct(*pair) for pair in pairs)}

    specs = adapted_specs(model, config.lora_extra)
    return nest({name: of_weight(name, spec) for name, spec in specs.items()})


def table_specs(model: ModelConfig, config: EngineConfig, where: Placement) -> Any:
    """How they lie: B is split where the outputs are, A where the inputs are."""
    specs = adapted_specs(model, config.lora_extra)
    return nest({name: _specs(spec, where) for name, spec in specs.items()})


def own_tables(tables: Any) -> Any:
    """What a step takes of them: AdapterRows.tables of its replica."""
    return jax.tree.map(lambda x: x[0], tables)


def _shapes(spec: ParamSpec, config: EngineConfig) -> dict[str, Any]:
    inputs = spec.shape_of(" ".join(spec.sides[1]))
    outputs = [spec.shape_of(part.axes.partition(",")[0]) for part in spec.parts]
    slots, rank = config.max_loras, table_rank(config)
    return {
        "a": (len(outputs), slots, rank, *inputs),
        "b": tuple((slots, rank, *shape) for shape in outputs),
    }


def _specs(spec: ParamSpec, where: Placement) -> dict[str, Any]:
    letter, data = spec.split_letter(where.axis_size), where.data_axes or None

    def split(lead: int, axes: list[str]) -> PartitionSpec:
        if letter not in axes or where.tensor_axis is None:
            return PartitionSpec(data)
        return PartitionSpec(data, *[None] * (lead + axes.index(letter)), where.tensor_axis)

    outputs = [part.axes.partition(",")[0].split() for part in spec.parts]
    return {"a": split(3, spec.sides[1]), "b": tuple(split(2, axes) for axes in outputs)}


def in_a_slot(pairs: Pairs, model: ModelConfig, config: EngineConfig, dtype: Any) -> Any:
    """An adapter in the form of a slot, numpy: padded with zeros to the tables' rank, and of zeros
    where it has no pair. pairs, model: as served.
    """
    data = {}
    for name, spec in adapted_specs(model, config.lora_extra).items():
        shapes = _shapes(spec, config)
        a = np.zeros(shapes["a"][:1] + shapes["a"][2:], dtype)
        b = tuple(np.zeros(shape[1:], dtype) for shape in shapes["b"])
        for at, part in enumerate(spec.parts):
            if (pair := pairs.get(spec.at(part.name))) is not None:
                a[at, : pair.rank] = pair.a
                b[at][: pair.rank] = np.moveaxis(pair.b, -1, 0)
        data[name] = {"a": a, "b": b}
    return nest(data)


def write_adapter(tables: Any, slots: Array, data: Any) -> Any:
    """The tables of a replica with an adapter in its slot; past the end: as they were."""
    slot = slots[0]

    def write(table: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(table["b"], new["b"], strict=True)
        return {
            "a": table["a"].at[0, :, slot].set(new["a"], mode="drop"),
            "b": tuple(b.at[0, slot].set(x, mode="drop") for b, x in pairs),
        }

    return jax.tree.map(write, tables, data, is_leaf=_is_table)


def _is_table(node: Any) -> bool:
    return isinstance(node, dict) and "a" in node


class AdapterTables:
    """The tables of one runner, made when they are first needed. model: as served. dtype: of the
    weights.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any):
        self.model, self.config, self.where, self.dtype = model, config, where, dtype
        self.arrays: Any = None
        self._compiled: Any = None

    def write_loads(self, batch: Batch) -> None:
        """Write the adapters that a batch brings into their slots."""
        for replica, part in enumerate(batch.each):
            for slot, adapter in part.loads:
                self.load(replica, slot, adapter.data)

    def allocate(self) -> None:
        """Have them, of zeros at first, and what writes to them."""
        arrays = jax.tree.leaves(self.arrays)
        # Tables that went into a write that never came back are gone: all is loaded again then.
        if self.config.max_loras and (not arrays or any(x.is_deleted() for x in arrays)):
            form = table_form(self.model, self.config, self.where, self.dtype)
            self.arrays = jax.tree.map(lambda x: kv_cache.zeros(x.shape, x.dtype, x.sharding), form)
            self.load(0, self.config.max_loras, {})  # nowhere

    def load(self, replica: int, slot: int, pairs: Pairs) -> None:
        """Write an adapter into a slot of a replica."""
        self.allocate()
        data = in_a_slot(pairs, self.model, self.config, self.dtype)
        slots = np.full(self.where.replicas, self.config.max_loras, np.int32)
        slots[replica] = slot
        placed = jax.tree.map(lambda x, spec: put(x, self.where.sharding(spec)), data, self._lies())
        slots = put(slots, self.where.sharding(self.where.each))
        if self._compiled is None:
            self._compiled = self._lower(slots, placed).compile()
        self.arrays = self._compiled(self.arrays, slots, placed)

    def _lies(self) -> Any:
        """How an adapter's data lies, beside tables of its weights."""

        def of_slot(spec: PartitionSpec, slots: int) -> PartitionSpec:
            """slots: their axis after that of the replicas."""
            return PartitionSpec(*spec[1 : 1 + slots], *spec[2 + slots :])

        def of_weight(table: dict[str, Any]) -> dict[str, Any]:
            b = tuple(of_slot(spec, 0) for spec in table["b"])
            return {"a": of_slot(table["a"], 1), "b": b}

        specs = table_specs(self.model, self.config, self.where)
        return jax.tree.map(of_weight, specs, is_leaf=_is_table)

    def _lower(self, slots: Array, placed: Any) -> Any:
        where, specs = self.where, table_specs(self.model, self.config, self.where)
        function: Any = write_adapter
        if where.tensor_axis is not None or where.replicas > 1:
            function = jax.shard_map(
                write_adapter,
                mesh=where.mesh,
                in_specs=(specs, where.each, self._lies()),
                out_specs=specs,
                check_vma=False,
            )
        outs = jax.tree.map(where.sharding, specs)
        jitted = jax.jit(function, donate_argnums=0, out_shardings=outs)
        return jitted.lower(self.arrays, slots, placed)
