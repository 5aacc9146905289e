"""Who multiplies by the weights of a step, chosen once when an engine starts."""

import logging
from typing import Any

import jax.numpy as jnp

from jpaged.models.config import ModelConfig
from jpaged.models.layers.linear import ExpertProducts, Products
from kernels_cpu import library, linear
from kernels_pallas.experts import IMPLEMENTATIONS
from kernels_pallas.experts.interface import Shapes

log = logging.getLogger("jpaged")


def choose_products(device: Any, dtype: Any) -> Products | None:
    """The C++ products of the CPU where they can run, which compiles them; None is XLA's own.

    dtype: of the weights.
    """
    if device.platform == "cpu" and dtype == jnp.bfloat16 and library.unavailable() is None:
        return linear
    return None


def choose_experts(
    model: ModelConfig, device: Any, dtype: Any, shards: int
) -> ExpertProducts | None:
    """Who multiplies by the experts of a mixture on a device; None for a model without.

    dtype: of the weights. shards: devices that each expert is split over.
    """
    if not model.num_experts:
        return None
    width = model.expert_size // shards if model.expert_size % shards == 0 else model.expert_size
    shapes = Shapes(dtype=dtype, hidden_size=model.hidden_size, expert_size=width)
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.platforms is None or device.platform in implementation.platforms:
            reason = implementation.module().unsupported(shapes, device)
            if reason is None:
                return implementation.module()
            log.info("experts: not %s (%s)", name, reason)
    raise AssertionError("one of them runs everywhere")
