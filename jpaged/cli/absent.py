"""Chips that this machine lacks: compiling for them without a device."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jpaged.errors import ConfigError
from kernels_pallas.implementation import TPU

H200 = ("NVIDIA H200", 132)  # its name, and how many cores it has


@dataclasses.dataclass(frozen=True)
class Card:
    """An NVIDIA card that can be compiled for. shared_memory: bytes of a thread block at most."""

    name: str
    cores: int
    capability: tuple[int, int]
    shared_memory: int


CARDS = {  # one of each architecture
    "sm_80": Card("NVIDIA A100", 108, (8, 0), 166912),
    "sm_89": Card("NVIDIA L4", 58, (8, 9), 101376),
    "sm_90a": Card(*H200, (9, 0), 232448),
    "sm_100": Card("NVIDIA B200", 148, (10, 0), 232448),
    "sm_120": Card("NVIDIA RTX PRO 6000", 188, (12, 0), 101376),
}
CHIPS = {"cuda": ("sm_90a",), TPU: ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")}
# The environment of a process that compiles for TPUs that it lacks; libtpu reads it at first use.
LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3"}


def cannot_compile(platform: str) -> str | None:
    """Return why nothing can be compiled here for CUDA or TPUs, or None."""
    if platform == TPU:
        missing = importlib.util.find_spec("libtpu") is None
        return "libtpu is not installed: pip install libtpu" if missing else None
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        packages = "jax-cuda13-plugin jax-cuda13-pjrt"
        return f"no CUDA plugin: pip install --no-deps {packages}, at jax's version"
    if shutil.which("ptxas") is None:
        return "no ptxas on PATH: it comes with CUDA's toolkit"
    return None


def absent_devices(platform: str, chip: str, count: int = 1) -> Sequence[Any]:
    """Return the devices of a chip's topology. count: of devices, for CUDA."""
    if platform == TPU:
        return topologies.get_topology_desc(platform=TPU, topology_name=chip).devices
    options = {"platform": "cuda", "topology": f"1x1x{count}", "target_config": target(CARDS[chip])}
    return topologies.get_topology_desc("", **options).devices


def target(card: Card) -> str:
    """Return a card as XLA describes it: what a compiler asks of it, the rest as an H200 has it."""
    (major, minor), text = card.capability, Path(__file__).with_name("h200.textproto").read_text()
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = {
        "core_count": str(card.cores),
        "shared_memory_per_block_optin": str(card.shared_memory),
        "cuda_compute_capability": f"{{ major: {major} minor: {minor}{features} }}",
        "name": f'"{card.name}"',
        "device_description_str": f'"{card.name}"',
    }
    for field, value in lines.items():
        separator = " " if value[0] == "{" else ": "
        line = rf"^(\s*){field}:? .*$"
        text, count = re.subn(line, rf"\g<1>{field}{separator}{value}", text, flags=re.MULTILINE)
        assert count == 1, field
    return text


def stay_on_cpu() -> None:
    """Keep jax from looking for devices other than the CPU, and libtpu for TPUs. To be called
    before jax is first used.
    """
    os.environ |= LIBTPU
    jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def hopper(device: tuple[str, int] = H200) -> Iterator[None]:
    """Inside the block, lowering treats its target as a GPU of this name and number of cores."""
    abstract_device = jax.sharding.AbstractDevice(*device, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract_device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def absent_device(platform: str, chip: str) -> Iterator[Any]:
    """A device of the chip; lowering inside takes it for the one at hand."""
    with absent_mesh(platform, chip, {}) as devices:
        yield devices[0]


@contextlib.contextmanager
def absent_mesh(platform: str, chip: str, shape: Mapping[str, int]) -> Iterator[Sequence[Any]]:
    """Yield the devices of a mesh of these axes, for lowering inside the block."""
    count = math.prod(shape.values())
    devices = absent_devices(platform, chip, count)[:count]
    if len(devices) < count:
        raise ConfigError(f"{chip} has {len(devices)} chips, not {count}")
    if platform == "cuda":
        with hopper((CARDS[chip].name, CARDS[chip].cores)):
            yield devices
        return
    sizes = shape or {"tp": 1}
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=kinds)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield devices
