"""OnePass: the sums that a draw and logprobs need of the vocabulary, read by one kernel on CUDA."""

import dataclasses
import importlib
from typing import Any

import jax.numpy as jnp
from jax import Array

from jpaged.config import EngineConfig
from jpaged.models.served import VOCAB_TILE
from kernels_pallas.implementation import CUDA
from kernels_pallas.paged_attention import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnePass:
    """`read_tiles` of kernels_pallas/vocab_tiles.py, for this device's share of the vocabulary.
    interpret: on a CPU.
    """

    interpret: bool = False

    def read(self, z_SV: Array, tau_S: Array, floor_S: Array) -> "TileSums":
        kernel: Any = importlib.import_module("kernels_pallas.vocab_tiles")
        how = {"tile": VOCAB_TILE, "interpret": self.interpret}
        max_SN, sum_SN, plain_SN = kernel.read_tiles(z_SV, tau_S, floor_S, **how)
        return TileSums(max_SN, sum_SN, plain_SN, tau_S)


@dataclasses.dataclass(frozen=True)
class TileSums:
    """Maxima of tiles, and the sums against them: at a temperature over what is at least the floor,
    and at temperature 1 over all.
    """

    max_SN: Array
    sum_SN: Array
    plain_SN: Array
    tau_S: Array

    def against(self, max_S: Array) -> Array:
        """The sums at the temperature, against each row's maximum."""
        return self._scaled(self.sum_SN, max_S, self.tau_S)

    def plain_against(self, max_S: Array) -> Array:
        """The sums at temperature 1."""
        return self._scaled(self.plain_SN, max_S, jnp.ones_like(max_S))

    def _scaled(self, sum_SN: Array, max_S: Array, tau_S: Array) -> Array:
        return sum_SN * jnp.exp((self.max_SN - max_S[:, None]) / tau_S[:, None])


def choose_one_pass(config: EngineConfig, vocab: int, device: Any) -> OnePass | None:
    """On CUDA, and where attention's kernel for it is interpreted. Elsewhere None: XLA's own sums,
    whose bits are kept. vocab: of one device.
    """
    if device.platform not in CUDA:
        named = IMPLEMENTATIONS.get(config.attention)
        if named is None or named.platforms != CUDA or device.platform != "cpu":
            return None
    kernel: Any = importlib.import_module("kernels_pallas.vocab_tiles")
    assert config.seq_buckets is not None
    if kernel.unsupported(config.seq_buckets[-1], vocab) is not None:
        return None
    return OnePass(interpret=device.platform == "cpu")
