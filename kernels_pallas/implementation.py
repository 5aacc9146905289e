"""Implementation: a module that implements an operation, and the platforms that it is made for."""

import dataclasses
import importlib
from typing import Any

CUDA = ("gpu", "cuda")  # names that jax.Device.platform has for a CUDA device
TPU = "tpu"  # and for a TPU


def capability_of(device: Any) -> float | None:
    """Return the compute capability of an NVIDIA card; None of another device, or of None."""
    capability = getattr(device, "compute_capability", "")
    return float(capability) if capability[:1].isdecimal() else None  # AMD's begin with "gfx"


def before_ampere(device: Any) -> str | None:
    """Return why Triton kernels cannot run on a card, which has no bf16; None on others."""
    capability = capability_of(device)
    if capability is None or capability >= 8.0:
        return None
    return f"compute capability {capability}: only from 8.0"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One entry of an operation's IMPLEMENTATIONS.

    path: the module's full name. platforms: the values of jax.Device.platform that the module
    compiles for; None means every platform. A module that does not compile for CPUs is made of
    Pallas kernels, which a CPU can still interpret.
    """

    path: str
    platforms: tuple[str, ...] | None = None

    def is_compiled_for(self, platform: str) -> bool:
        """Return whether the module compiles for a platform."""
        return self.platforms is None or platform in self.platforms

    def is_batch_invariant(self) -> bool:
        """Return whether the bits of a result depend on its own row and on nothing else in a batch.

        A module for which this holds has a function `batch_invariant() -> bool`.
        """
        function = getattr(self.module(), "batch_invariant", None)
        return function is not None and function()

    def module(self) -> Any:
        """Return the module. The first call imports it, since importing Pallas takes a second."""
        return importlib.import_module(self.path)
