"""Transfers: every array that passes between the host and the devices of one engine, counted."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax import Array

from jpaged.runtime.kv_cache import PoolSpec
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import Peers, from_shards, is_local, local_shards, put

Sent = Array | np.ndarray  # an argument of a step, on the devices or to go up with the call


class Transfers:
    """The only way up and the only way down. ups, downs: how many there were.

    What goes up has a part for each replica, one after the other along its first axis. To one
    device it goes with the call that it is an argument of, which is to be made while `sending`: at
    a fifth of the host's time of a jax.device_put. peers: the other processes that serve the model;
    blocks then go to each process's own memory.
    """

    def __init__(self, placement: Placement, peers: Peers | None = None):
        self.placement, self._peers = placement, peers
        self.ups = self.downs = 0
        self._each = placement.sharding(placement.by_replica)
        self.with_calls = placement.mesh is None
        # Else blocks move as the shares of devices.
        self._moves_whole = placement.replicas == 1 and peers is None
        # Each process commits what all replicas drew, those of other processes among them.
        gathers = placement.replicas > 1 and peers is not None
        self._gather = jax.jit(lambda x: x, out_shardings=placement.replicated) if gathers else None

    def sending(self) -> AbstractContextManager[None]:
        """Return a context in which calls take what `put` returned, whatever transfer guard their
        caller has set.
        """
        return jax.transfer_guard_host_to_device("allow") if self.with_calls else nullcontext()

    def put(self, array: np.ndarray) -> Sent:
        """Send an argument of a step up, in one transfer."""
        self.ups += 1
        return array if self.with_calls else put(array, self._each)

    def put_whole(self, array: np.ndarray) -> Sent:
        """Send an array up to every device, in one transfer."""
        self.ups += 1
        return array if self.with_calls else put(array, self.placement.replicated)

    def put_for(self, replica: int, part: np.ndarray, fill: int) -> Array:
        """Send the int32 part of one replica up, with `fill` in the parts of the others."""
        if (count := self.placement.replicas) > 1:
            parts = np.full((count, max(part.size, 1)), fill, np.int32)
            parts[replica] = part
            part = parts.reshape(-1)
        self.ups += 1
        return put(part, self._each)

    def start(self, array: Array) -> None:
        """Start to send an array down as soon as it is computed, which `get` waits for: else the
        device learns only after the end of a step that its result is wanted.

        What has to be gathered first goes down with `get`, which knows that all processes agree.
        """
        if self._gather is None:
            with jax.transfer_guard_device_to_host("allow"):
                array.copy_to_host_async()

    def get(self, array: Array) -> np.ndarray:
        """Return an array on the host, in one transfer, which takes a third of the host's time of a
        jax.device_get.
        """
        self.downs += 1
        array = array if self._gather is None else self._gather(array)
        with jax.transfer_guard_device_to_host("allow"):
            return np.asarray(array)

    @property
    def shares_a_block(self) -> int | None:
        """In how many shares of devices a block moves; None where it moves whole."""
        return None if self._moves_whole else self.placement.axis_size

    @property
    def shares_blocks(self) -> bool:
        """Whether put_blocks takes for any replica what get_blocks gave of another. Over processes
        it does not: a replica's shares are with the processes that have its devices.
        """
        return self._peers is None

    def put_blocks(self, blocks: Any, replica: int, pool: PoolSpec, count: int) -> Any:
        """Send so many blocks of a replica's pool up, as get_blocks gives them; the others' parts
        are zeros.
        """
        self.ups += 1
        if self._moves_whole:
            return jax.device_put(blocks, pool.shardings(self.placement))
        return self._joined(blocks, replica, pool, count)

    def start_blocks(self, blocks: Any, replica: int) -> None:
        """Start to send a replica's part of some blocks down, which get_blocks waits for."""
        parts: list[Array] = jax.tree.leaves(blocks)
        if not self._moves_whole:
            devices = self.placement.devices_of(replica)
            shards = [shard for part in parts for shard in part.addressable_shards]
            parts = [shard.data for shard in shards if shard.device in devices]
        with jax.transfer_guard_device_to_host("allow"):
            for part in parts:
                part.copy_to_host_async()

    def get_blocks(self, blocks: Any, replica: int) -> Any:
        """Return a replica's part of some blocks on the host: by field an array, or a list of the
        shares of its devices.
        """
        self.downs += 1
        if self._moves_whole:
            with jax.transfer_guard_device_to_host("allow"):
                return jax.tree.map(np.asarray, blocks)
        if self._peers is None:
            return self._shares(blocks, replica)
        return self._peers.call(lambda: self._shares(blocks, replica), "reading blocks")

    def _shares(self, blocks: Any, replica: int) -> Any:
        """Return the shares of a replica's devices, those of this process, in their order: another
        replica's devices take the same ones.
        """
        devices = [d for d in self.placement.devices_of(replica) if is_local(d)]

        def shares(part: Array) -> list[np.ndarray]:
            with jax.transfer_guard_device_to_host("allow"):
                by_device = local_shards(part, devices)
            return [by_device[device] for device in devices]

        return jax.tree.map(shares, blocks)

    def _joined(self, blocks: Any, replica: int, pool: PoolSpec, count: int) -> Any:
        whole = pool.of_rows(self.placement.replicas * pool.num_layers * count)
        shardings = pool.shardings(self.placement)
        devices = [d for d in self.placement.devices_of(replica) if is_local(d)]
        return {
            name: from_shards(
                dict(zip(devices, blocks[name], strict=True)), x.shape, x.dtype, shardings[name]
            )
            for name, x in whole.items()
        }
