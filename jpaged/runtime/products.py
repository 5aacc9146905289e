"""Who multiplies by the weights of a step, chosen once when an engine starts."""

import logging
from typing import Any

import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import kv_groups
from jpaged.models.layers.linear import ExpertProducts, Products
from jpaged.models.served import served_config
from jpaged.runtime.attention import choose_kernel
from jpaged.runtime.mesh import Placement
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


def resolve_for(
    model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any
) -> EngineConfig:
    """The config resolved for a model at a place, where who multiplies and who attends decides what
    deterministic serving takes. dtype: of the weights.
    """
    free = config.resolve(model, batch_invariant=True)
    if free.deterministic and not is_batch_invariant(model, free, where, dtype):
        return config.resolve(model)
    return free


def is_batch_invariant(
    model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any
) -> bool:
    """Whether the bits of a row depend on that row alone in every product and in attention, so
    that deterministic serving needs no steps of one size.

    config: resolved. dtype: of the weights. Asking may compile C++: it happens when an engine
    starts. Experts are not: XLA sums over them as their number of tokens has it.
    """
    chosen = library.level()
    if model.num_experts:
        return False
    if choose_products(where.device, dtype) is None or chosen is None:
        return False
    shards = where.axis_size
    model = served_config(model, shards)
    heads, ffn = model.num_heads * model.head_dim // shards, model.intermediate_size // shards
    kernels = (
        choose_kernel(model, group, config, dtype, where.device, shards)
        for group in kv_groups(model)
    )
    return (
        chosen.batch_invariant
        and all(linear.is_width_supported(width) for width in (model.hidden_size, heads, ffn))
        and all(kernel.is_batch_invariant for kernel in kernels)
    )
