"""The Ray cluster that engines run on: how this process joins it, and what an engine reserves."""

import importlib
import logging
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError

try:
    # For type checkers, `import ray` would be a module of this package's neighbours.
    ray: Any = importlib.import_module("ray")
except ImportError as e:
    raise ImportError("engines on a cluster need Ray: pip install 'jpaged[ray]'") from e


def connect(address: str, actors: int) -> bool:
    """Connect this process to Ray unless it is connected. Return whether this call did so."""
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    if address == "local":
        settings |= {"include_dashboard": False, "num_cpus": max(actors, 2)}
    before = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if (
            port.isdecimal() and "/" not in host
        ):  # checked here, since Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(**settings)
    except Exception as e:
        raise ConfigError(f"cannot reach Ray at {address!r}: {e}") from e
    if threading.current_thread() is threading.main_thread():
        # Ray installs a handler that ends the program at once; this restores the old one.
        signal.signal(signal.SIGTERM, before)
    return True


def devices_of(engine_config: Mapping[str, Any]) -> int:
    """Return how many devices an engine with these settings takes."""
    sizes = ("data_parallel_size", "tensor_parallel_size")
    data, tensor = (engine_config.get(name) or getattr(EngineConfig, name) or 1 for name in sizes)
    return data * tensor


def default_resources(devices: int) -> tuple[dict[str, float], int]:
    """Return what each actor of a replica of this many devices reserves on this cluster, and the
    number of actors: GPUs, or all TPU chips of a host, if there are any, on as many hosts as
    needed; otherwise a CPU. Raises ConfigError if the devices do not divide over hosts.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name in ("GPU", "TPU"):
        most = int(max((node.get(name, 0) for node in nodes), default=0))
        if not most:
            continue
        if devices <= most:
            return {name: devices if name == "GPU" else most}, 1
        if devices % most:
            raise ConfigError(
                f"a replica of {devices} devices does not divide over hosts of {most} {name}s: "
                "change data_parallel_size or tensor_parallel_size"
            )
        return {name: most}, devices // most
    return {"CPU": 1}, 1
