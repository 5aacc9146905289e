"""Where arrays lie: one device, or a mesh of which an axis holds shares of the model."""

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

from jpaged.errors import ConfigError
from jpaged.models.params import MeshAxis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One device, or a mesh with heads, FFN and vocabulary over `axis`: an axis of it, or several
    as if they were one (None: everything is replicated). device: the first of this process.
    """

    mesh: Mesh | AbstractMesh | None  # abstract where nothing is compiled or run
    axis: MeshAxis | None
    device: Any  # jax.Device

    @property
    def axis_size(self) -> int:
        if self.mesh is None or self.axis is None:
            return 1
        names = (self.axis,) if isinstance(self.axis, str) else self.axis
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def tensor_axis(self) -> MeshAxis | None:
        """The axis, if several devices share the model."""
        return self.axis if self.axis_size > 1 else None

    def sharding(self, spec: PartitionSpec) -> NamedSharding | SingleDeviceSharding:
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, spec)

    @property
    def replicated(self) -> NamedSharding | SingleDeviceSharding:
        return self.sharding(PartitionSpec())


def serving_mesh(size: int | None, mesh: Mesh | None, devices: Sequence[Any] = ()) -> Mesh | None:
    """The mesh to serve on: `mesh`, else one of so many of the devices (none named: jax's) over
    which one axis, "tp", shares the model. None where neither is asked for, or a single device is.
    ConfigError where there are too few.
    """
    if mesh is not None or size in (None, 1):
        return mesh
    found = list(devices) if len(devices) >= size else jax.devices()
    if len(found) < size:
        raise ConfigError(f"tensor_parallel_size={size}: there are {len(found)} devices")
    return Mesh(np.array(found[:size]), ("tp",), axis_types=(AxisType.Auto,))
