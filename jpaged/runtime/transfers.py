"""Transfers: every array that passes between the host and the devices of one engine, counted."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax import Array

from jpaged.runtime import kv_cache
from jpaged.runtime.kv_cache import PoolSpec
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import Peers, from_shards, local_shards, put

Sent = Array | np.ndarray  # an argument of a step, on the devices or to go up with the call


class Transfers:
    """The only way up and the only way down. ups, downs: how many there were.

    What goes up has a part for each replica, one after the other along its first axis. To one
    device it goes with the call that it is an argument of, which is to be made while `sending`: at
    a fifth of the host's time of a jax.device_put.
    """

    def __init__(self, where: Placement):
        self.where = where
        self.ups = self.downs = 0
        self._each = where.sharding(where.each)
        self.with_calls = where.mesh is None

    def sending(self) -> AbstractContextManager[None]:
        """Lets calls take what `put` returned, whatever transfer guard their caller has set."""
        return jax.transfer_guard_host_to_device("allow") if self.with_calls else nullcontext()

    def put(self, array: np.ndarray) -> Sent:
        """Up, one transfer: an argument of a step."""
        self.ups += 1
        return array if self.with_calls else put(array, self._each)

    def put_for(self, replica: int, part: np.ndarray, fill: int) -> Array:
        """Up, the int32 part of one replica and `fill` in the others'."""
        if (count := self.where.replicas) > 1:
            parts = np.full((count, max(part.size, 1)), fill, np.int32)
            parts[replica] = part
            part = parts.reshape(-1)
        self.ups += 1
        return put(part, self._each)

    def get(self, array: Array) -> np.ndarray:
        """Down, one transfer: at a third of the host's time of a jax.device_get."""
        self.downs += 1
        with jax.transfer_guard_device_to_host("allow"):
            return np.asarray(array)

    def put_blocks(self, blocks: Any, replica: int, pool: PoolSpec, count: int) -> Any:
        """Up, so many blocks of a replica's pool, from get_blocks; zeros in the others' parts."""
        self.ups += 1
        if self.where.replicas == 1:
            return jax.device_put(blocks, pool.shardings(self.where))
        return self._joined(blocks, pool, count)

    def get_blocks(self, blocks: Any, replica: int, pool: PoolSpec) -> Any:
        """Down, a replica's part: into pinned memory where that is whole and there is any."""
        self.downs += 1
        if self.where.replicas == 1:
            return kv_cache.to_host(blocks, pool, self.where)
        return self._shards(blocks, replica)

    def _shards(self, blocks: Any, replica: int) -> Any:
        devices = self.where.devices_of(replica)
        return jax.tree.map(lambda part: local_shards(part, devices), blocks)

    def _joined(self, shards: Any, pool: PoolSpec, count: int) -> Any:
        whole = pool.of_rows(self.where.replicas * pool.num_layers * count)
        shardings = pool.shardings(self.where)
        return {
            name: from_shards(shards[name], x.shape, x.dtype, shardings[name])
            for name, x in whole.items()
        }


class SharedTransfers(Transfers):
    """Those of one process of several: blocks go to each process's own memory."""

    def __init__(self, where: Placement, peers: Peers):
        super().__init__(where)
        self.peers = peers
        self._whole = jax.jit(lambda x: x, out_shardings=where.replicated)

    def get(self, array: Array) -> np.ndarray:
        """Each process commits what all replicas drew, those of other processes among them."""
        return super().get(self._whole(array) if self.where.replicas > 1 else array)

    def put_blocks(self, blocks: Any, replica: int, pool: PoolSpec, count: int) -> Any:
        self.ups += 1
        return self._joined(blocks, pool, count)

    def get_blocks(self, blocks: Any, replica: int, pool: PoolSpec) -> Any:
        self.downs += 1
        return self.peers.call(lambda: self._shards(blocks, replica), "reading blocks")
