"""Where arrays lie: one device, or a mesh of which an axis holds shares of the model and the others
replicas of it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.models.layers.experts import ExpertSharing
from jpaged.models.param_spec import MeshAxis, axes_of
from jpaged.models.params import param_specs
from jpaged.models.served import served_config, share_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One device, or a mesh with heads, FFN and vocabulary over `axis`: an axis of it, or several
    as if they were one (None: the model is whole everywhere). Along all other axes lie replicas:
    each has a pool, rows and inputs of its own, the parts of arrays whose first axis is split.
    device: the first of this process. expert_parallel: every device of the mesh has whole experts
    of a mixture; see EngineConfig.
    """

    mesh: Mesh | AbstractMesh | None  # abstract where nothing is compiled or run
    axis: MeshAxis | None
    device: Any  # jax.Device
    expert_parallel: bool | None = None

    @property
    def axis_size(self) -> int:
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[name] for name in axes_of(self.axis))

    @property
    def tensor_axis(self) -> MeshAxis | None:
        """The axis, if several devices share the model."""
        return self.axis if self.axis_size > 1 else None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that replicas lie along."""
        shape = {} if self.mesh is None else self.mesh.shape
        return tuple(name for name in shape if shape[name] > 1 and name not in axes_of(self.axis))

    @property
    def replicas(self) -> int:
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[name] for name in self.data_axes)

    @property
    def sharing(self) -> ExpertSharing:
        """How the devices share a mixture's experts."""
        return ExpertSharing(self.expert_parallel, self.replicas if self.expert_parallel else 1)

    def check(self, config: EngineConfig, model: ModelConfig) -> None:
        """ConfigError where an engine of this config cannot serve the model on these devices."""
        facts = Facts(
            config=config,
            devices=self.axis_size,
            replicas=self.replicas,
            holders=self.axis_size * self.replicas,
            has_experts=model.has_experts,
        )
        check_combination(facts)

    def served(self, model: ModelConfig) -> ModelConfig:
        """Return the model that is served in place of this one (see models/served.py)."""
        return served_config(model, self.axis_size, self.sharing)

    def share_of(self, model: ModelConfig) -> ModelConfig:
        """Return a model's sizes on one device (see models/served.py)."""
        return share_of(model, self.axis_size, self.sharing)

    def specs(self, served: ModelConfig) -> dict[str, Any]:
        """Return a nested dict of the PartitionSpecs of a served model's parameters."""
        return param_specs(served, self.axis, self.axis_size, self.data_axes)

    @property
    def by_replica(self) -> PartitionSpec:
        """How an array lies whose first axis has a part for each replica."""
        return PartitionSpec(self.data_axes) if self.data_axes else PartitionSpec()

    def devices_of(self, replica: int) -> list[Any]:
        """Return the devices that hold a replica; there must be a mesh."""
        assert isinstance(self.mesh, Mesh)
        names = self.mesh.axis_names
        data = [names.index(name) for name in self.data_axes]
        first = np.moveaxis(self.mesh.devices, data, range(len(data)))
        return list(first.reshape(self.replicas, -1)[replica])

    def sharding(self, spec: PartitionSpec) -> NamedSharding | SingleDeviceSharding:
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, spec)

    @property
    def replicated(self) -> NamedSharding | SingleDeviceSharding:
        return self.sharding(PartitionSpec())


def serving_mesh(
    config: EngineConfig, mesh: Mesh | None, devices: Sequence[Any] = ()
) -> Mesh | None:
    """Return the mesh to serve on: `mesh`, else one of as many of the devices (none named: jax's)
    as config's data_parallel_size and tensor_parallel_size ask for, over axes "data" and "tp". None
    where they ask for nothing, or for a single device. ConfigError where there are too few.
    """
    shape = asked_shape(config)
    if mesh is not None or not shape:
        return mesh
    size = math.prod(shape.values())
    available = list(devices) if len(devices) >= size else jax.devices()
    check_combination(Facts(config=config, available=len(available)))
    kinds = (AxisType.Auto,) * len(shape)
    return Mesh(np.array(available[:size]).reshape(*shape.values()), tuple(shape), axis_types=kinds)


def asked_shape(config: EngineConfig) -> dict[str, int]:
    """Return the axes of the mesh that a config asks for, by name; none where it asks for one
    device.
    """
    asked = {"data": config.data_parallel_size or 1, "tp": config.tensor_parallel_size or 1}
    return {name: size for name, size in asked.items() if size > 1}
