"""Who multiplies by the weights of a step, chosen once when an engine starts."""

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_groups import kv_groups
from jpaged.models.layers.linear import ExpertProducts
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.served import served_config, share_of
from jpaged.runtime.attention import choose_kernel
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import are_many
from kernels_cpu import library
from kernels_cpu.linear import NativeProducts, is_width_supported
from kernels_cpu.rates import rates
from kernels_pallas.experts import IMPLEMENTATIONS
from kernels_pallas.experts.interface import Shapes
from kernels_pallas.implementation import Implementation

log = logging.getLogger("jpaged")


FREE = 1.2  # of the time of XLA's products: their share of a batch's time makes at most 15% of it


def choose_products(device: Any, dtype: Any, *, deterministic: bool) -> NativeProducts | None:
    """The C++ products of the CPU where they can run, which compiles and measures them; None is
    XLA's own.

    dtype: of the weights. deterministic: for any number of rows, and not only where they are the
    faster ones.
    """
    if device.platform != "cpu" or jnp.dtype(dtype) != jnp.bfloat16 or library.unavailable():
        return None
    return NativeProducts(most_rows=None if deterministic else rates().most_rows)


def multiplies_fp8(device: Any) -> bool:
    """Whether a device has tensor cores for fp8: NVIDIA's do from compute capability 8.9 on."""
    capability = getattr(device, "compute_capability", "")
    return capability[:1].isdecimal() and float(capability) >= 8.9  # AMD's begin with "gfx"


def choose_experts(
    model: ModelConfig, device: Any, dtype: Any, shards: int, is_plain: bool = True
) -> ExpertProducts | None:
    """Return the module that multiplies by a mixture's experts; None for a model without experts.

    dtype: of the weights. shards: devices that each expert is split over. is_plain: experts are
    arrays, not in 8 or 4 bits.
    """
    implementation = _experts_implementation(model, device, dtype, shards, is_plain)
    return None if implementation is None else implementation.module()


def _experts_implementation(
    model: ModelConfig, device: Any, dtype: Any, shards: int, is_plain: bool
) -> Implementation | None:
    if not model.num_experts:
        return None
    width = model.expert_size // shards if model.expert_size % shards == 0 else model.expert_size
    sizes = {"hidden_size": model.hidden_size, "expert_size": width}
    shapes = Shapes(dtype=dtype, is_plain=is_plain, **sizes)
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.is_compiled_for(device.platform):
            reason = implementation.module().unsupported(shapes, device)
            if reason is None:
                return implementation
            log.info("experts: not %s (%s)", name, reason)
    raise AssertionError("one of them runs everywhere")


def resolve_for(
    model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any, is_plain: bool = True
) -> EngineConfig:
    """The config resolved for a model at a place, where who multiplies and who attends decides what
    deterministic serving takes. dtype: of the weights. is_plain: the params' experts are arrays.
    """
    if (asked := config.speculative) is not None:
        if asked.has_model and (where.replicas > 1 or are_many(where.mesh)):
            # Replicas would wait for each other's guesses.
            raise ConfigError("speculative: a draft model only with one replica in one process")
        if asked.adaptive and are_many(where.mesh):  # they go by their clocks, which differ
            raise ConfigError("speculative over several processes: pass 'adaptive': False")
    on_cpu = where.device.platform == "cpu"
    free = config.resolve(model, batch_invariant=True, on_cpu=on_cpu)
    if not free.deterministic:
        return free
    if not is_batch_invariant(model, free, where, dtype, is_plain and not config.quantization):
        return config.resolve(model, on_cpu=on_cpu)
    if config.deterministic is None and rates().worst > FREE:
        return dataclasses.replace(free, deterministic=False)
    return free


def is_batch_invariant(
    model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any, is_plain: bool = True
) -> bool:
    """Whether the bits of a row can depend on that row alone in every product and in attention, so
    that deterministic serving needs no steps of one size.

    config: resolved. dtype: of the weights. is_plain: experts are served as arrays. Asking may
    compile C++: it happens when an engine starts.
    """
    if choose_products(where.device, dtype, deterministic=True) is None:
        return False
    shards = where.axis_size
    experts = _experts_implementation(model, where.device, dtype, shards, is_plain)
    model, own = served_config(model, shards), share_of(model, shards)
    widths = [own.hidden_size]
    for layer in own.layers:
        if layer.mixer is not None:
            widths.append(layer.mixer.num_heads * layer.mixer.head_dim)
        if isinstance(layer.ffn, MLPConfig):
            widths.append(layer.ffn.intermediate_size)
        elif layer.ffn is not None:
            widths.append(layer.ffn.shared_expert_size)
    kernels = (
        choose_kernel(model, group, config, dtype, where.device, shards)
        for group in kv_groups(model)
    )
    return (
        (experts is None or experts.is_batch_invariant())
        and not (config.max_loras and "experts" in config.lora_extra)
        and all(map(is_width_supported, widths))
        and all(kernel.is_batch_invariant for kernel in kernels)
    )
