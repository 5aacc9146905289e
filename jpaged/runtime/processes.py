"""Processes: one model over the devices of several, each of which runs the same engine.

Every process makes the same calls with the same arguments, and its scheduler, which depends on
nothing else, decides the same. What this module adds is what may differ: where an array's shares
come from, waiting for peers that may be gone, and finding out that the processes disagree.
"""

import pickle
import queue
import threading
import zlib
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jpaged.errors import PeerError


def are_many(mesh: Any) -> bool:
    """Return whether a mesh has devices of several processes."""
    return count_of(mesh) > 1


def count_of(mesh: Any) -> int:
    """Return how many processes hold the devices of a mesh; 1 for anything that is no mesh."""
    return len({d.process_index for d in mesh.devices.flat}) if isinstance(mesh, Mesh) else 1


def is_local(device: Any) -> bool:
    """Return whether a device is this process's."""
    return device.process_index == jax.process_index()


def put(array: np.ndarray, sharding: Sharding) -> Array:
    """Return a host array on the devices; over processes each gives its own shares of an equal
    array.

    Not by jax.device_put there: that compares the array over all processes first, at a hundred
    times the cost.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def local_shards(array: Array, devices: Container[Any]) -> dict[Any, np.ndarray]:
    """Return what those of the devices that are this process's hold of an array, on the host."""
    shards = (shard for shard in array.addressable_shards if shard.device in devices)
    return {shard.device: np.asarray(shard.data) for shard in shards}


def from_shards(
    shards: Mapping[Any, np.ndarray], shape: tuple[int, ...], dtype: Any, sharding: Sharding
) -> Array:
    """Return the array of which each process has `local_shards`; zeros on all other devices."""
    zeros = np.zeros(sharding.shard_shape(shape), dtype)
    devices = sorted(sharding.addressable_devices, key=lambda device: device.id)
    placed = [jax.device_put(shards.get(device, zeros), device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def broadcast(value: Any = None) -> Any:
    """Return what the first process passes, in every process; the others' values are not looked at.

    Any picklable value. All processes must call it at the same point. Alone, it returns its value.
    """
    if jax.process_count() == 1:
        return value
    sent = np.frombuffer(pickle.dumps(value) if jax.process_index() == 0 else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(sent.size)))
    padded = np.zeros(1 << (size - 1).bit_length(), np.uint8)  # few shapes: each compiles once
    padded[: sent.size] = sent
    received = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return pickle.loads(received[:size].tobytes())


def least(value: int) -> int:
    """Return the least of a number over all processes."""
    return int(np.min(multihost_utils.process_allgather(np.int64(value))))


class Peers:
    """What a runner asks of the other processes of its mesh. seconds: it waits for them at most."""

    def __init__(self, mesh: Mesh, seconds: float):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._num_devices, self._seconds = mesh.size, seconds
        whole = NamedSharding(mesh, PartitionSpec())
        self._differ = jax.jit(lambda x: jnp.max(x) - jnp.min(x), out_shardings=whole)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A wait for a peer cannot be broken off, so it is another thread that waits.
        threading.Thread(target=self._work, name="jpaged peers", daemon=True).start()

    def compare(self, *parts: bytes) -> Array:
        """Start to compare what each process is about to run; `check` takes what it returns."""
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        checksums = np.full(self._num_devices, crc & 0x7FFFFFFF, np.int32)
        return self._differ(put(checksums, self._sharding))

    def check(self, compared: Array) -> None:
        """PeerError where the processes are about to run different steps."""
        if int(jax.device_get(compared)):
            raise PeerError(
                "the processes run different steps: all must make the same calls with the same "
                "arguments (jpaged.broadcast gives all what the first one has read)"
            )

    def call[T](self, function: Callable[[], T], doing: str) -> T:
        """What a function returns that needs all processes; PeerError where one is gone or late."""
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def job() -> None:
            try:
                outcome.put((function(), None))
            except BaseException as e:
                outcome.put((None, e))

        self._jobs.put(job)
        try:
            result, error = outcome.get(timeout=self._seconds)
        except queue.Empty:
            raise PeerError(
                f"{doing}: another process did not come within peer_timeout_s={self._seconds:g}; "
                "it stalls, is gone or runs something else. Leave this one too"
            ) from None
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise PeerError(f"{doing}: another process is gone ({error})") from error
        if error is not None:
            raise error
        return result

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def peers_of(mesh: Any, seconds: float) -> Peers | None:
    """Return the Peers of a mesh that several processes share; None where one holds it alone."""
    return Peers(mesh, seconds) if are_many(mesh) else None
