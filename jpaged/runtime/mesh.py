"""Where arrays lie: one device, or a mesh whose one axis holds shares of the heads."""

import dataclasses
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One device, or a mesh with KV heads over `axis` (None: everything is replicated)."""

    mesh: Mesh | None
    axis: str | None
    device: Any  # jax.Device

    @property
    def axis_size(self) -> int:
        return 1 if self.mesh is None or self.axis is None else self.mesh.shape[self.axis]

    @property
    def tensor_axis(self) -> str | None:
        """The axis, if several devices share the heads."""
        return self.axis if self.axis_size > 1 else None

    def sharding(self, spec: PartitionSpec) -> NamedSharding | SingleDeviceSharding:
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, spec)

    @property
    def replicated(self) -> NamedSharding | SingleDeviceSharding:
        return self.sharding(PartitionSpec())
