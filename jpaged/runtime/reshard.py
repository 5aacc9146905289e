"""Reshard: one array from where its owner keeps it to where and how it is served, on the devices.

`jax.device_put` between two shardings of several devices goes through the host where no device
holds the wanted slice, and the source keeps the whole host copy for as long as it lives. A compiled
identity with out_shardings does it by collectives. That one takes arrays that lie on the target's
own devices in their order, so others are brought there first.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jpaged.models.served import Change
from jpaged.runtime.processes import put


class Reshard:
    """Compiled functions, one a change and target; arrays of new versions find them again."""

    def __init__(self) -> None:
        self._functions: dict[tuple[Change | None, Sharding], Any] = {}

    def __call__(self, leaf: Any, change: Change, target: Sharding) -> Any:
        """The leaf changed, with this sharding."""
        if not isinstance(leaf, jax.Array):
            return put(change(np.asarray(leaf)), target)
        here = leaf.sharding
        if here.is_fully_addressable and not target.is_fully_addressable:
            # Whole in each process, which gives its own shares of it.
            return put(change(np.asarray(leaf)), target)
        if _order(here) == _order(target):
            return self._changed(leaf, change, target)
        if not isinstance(here, NamedSharding) or here.num_devices == 1:
            # Cut on its one device. Of several without a mesh only jax knows the order.
            return jax.device_put(self._function(change, here)(leaf), target)
        if isinstance(target, NamedSharding) and here.device_set == target.device_set:
            # Another order of the same devices: each share goes to where its turn is.
            devices = np.array(_order(target)).reshape(here.mesh.axis_sizes)
            grid = Mesh(devices, here.mesh.axis_names)
            turned = jax.device_put(leaf, NamedSharding(grid, here.spec))
            return self._changed(turned, change, target)
        # Other devices: gathered whole where it is, and cut there. One leaf at a time.
        if not here.is_fully_replicated:
            leaf = self._function(None, NamedSharding(here.mesh, PartitionSpec()))(leaf)
        shards = sorted(leaf.addressable_shards, key=lambda s: s.device not in target.device_set)
        return jax.block_until_ready(self(shards[0].data, change, target))

    def _changed(self, leaf: Any, change: Change, target: Sharding) -> Any:
        """Of an array on the target's devices. A new shape is made where the array is, as long as
        it divides, since XLA would gather the whole for both at once.
        """
        shape = jax.eval_shape(change, leaf).shape
        if shape == leaf.shape or not _divides(leaf.sharding, shape):
            return self._function(change, target)(leaf)
        return self._function(None, target)(self._function(change, leaf.sharding)(leaf))

    def _function(self, change: Change | None, target: Sharding) -> Any:
        key = (change, target)
        if key not in self._functions:
            self._functions[key] = jax.jit(change or _identity, out_shardings=target)
        return self._functions[key]


def is_served(leaf: Any, change: Change, target: Sharding) -> bool:
    """Whether a leaf is what is served already."""
    is_there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(target, leaf.ndim)
    return is_there and not change.is_needed(leaf)


def _divides(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _identity(leaf: Any) -> Any:
    return leaf


def _order(sharding: Sharding) -> tuple[Any, ...] | None:
    """The devices in their order; None where only jax knows it."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat) if isinstance(sharding.mesh, Mesh) else None
    if isinstance(sharding, SingleDeviceSharding):
        return tuple(sharding.device_set)
    return None
