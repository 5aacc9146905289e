"""Who multiplies by the weights of a step, chosen once when an engine starts."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import kv_groups
from jpaged.models.layers.linear import ExpertProducts, Products
from jpaged.models.quantized import is_quantized
from jpaged.models.served import served_config, share_of
from jpaged.runtime.attention import choose_kernel
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import are_many
from kernels_cpu import library
from kernels_cpu.linear import NativeProducts, is_width_supported
from kernels_cpu.rates import rates
from kernels_pallas.experts import IMPLEMENTATIONS, rows_are_independent
from kernels_pallas.experts.interface import Shapes

log = logging.getLogger("jpaged")


FREE = 1.2  # of the time of XLA's products: their share of a batch's time makes at most 15% of it


def choose_products(
    device: Any, dtype: Any, *, deterministic: bool, activations: str = "auto"
) -> NativeProducts | None:
    """The C++ products of the CPU where they can run, which compiles and measures them; None is
    XLA's own.

    dtype: of the weights. deterministic: for any number of rows, and not only where they are the
    faster ones. activations: EngineConfig.quantized_activations; UnsupportedError where only the
    C++ products have that arithmetic and they cannot run.
    """
    reason: str | None = None
    if device.platform != "cpu":
        reason = f"weights are on {device.platform}"
    elif jnp.dtype(dtype) != jnp.bfloat16:
        reason = f"the dtype is {jnp.dtype(dtype).name}, not bfloat16"
    else:
        reason = library.unavailable()
    if reason is not None:
        if activations not in ("auto", "plain"):
            raise UnsupportedError(
                f"quantized_activations={activations!r}: only the C++ products of CPUs have it, "
                f"which cannot run here ({reason}); 'plain' runs everywhere"
            )
        return None
    if activations == "auto":
        best = library.level()
        activations = "plain" if best is None else best.activations
    most_rows = None if deterministic else rates().most_rows
    return NativeProducts(most_rows=most_rows, activations=activations)


def activations_of(products: Products | None, params: Any, *, in_fp8: bool) -> str | None:
    """Return what x becomes in products with this model's weights of 8 and 4 bits: "plain", "int8"
    or "int16" (see models.quantized), or "fp8" where XLA rounds x beside weights of fp8; None where
    all weights are plain.

    params: the tree that is served. in_fp8: as of StepSetting.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    forms = {leaf.form for leaf in leaves if is_quantized(leaf)}
    if not forms:
        return None
    if in_fp8 and "fp8" in forms:
        return "fp8"
    rounded = products is not None and forms & {"int8", "int4"}
    return products.activations if products is not None and rounded else "plain"


def multiplies_fp8(device: Any) -> bool:
    """Whether a device has tensor cores for fp8: NVIDIA's do from compute capability 8.9 on."""
    capability = getattr(device, "compute_capability", "")
    return capability[:1].isdecimal() and float(capability) >= 8.9  # AMD's begin with "gfx"


def choose_experts(
    model: ModelConfig, device: Any, dtype: Any, shards: int, is_plain: bool = True
) -> ExpertProducts | None:
    """Who multiplies by the experts of a mixture on a device; None for a model without.

    dtype: of the weights. shards: devices that each expert is split over. is_plain: experts are
    arrays, not in 8 or 4 bits.
    """
    if not model.num_experts:
        return None
    width = model.expert_size // shards if model.expert_size % shards == 0 else model.expert_size
    sizes = {"hidden_size": model.hidden_size, "expert_size": width}
    shapes = Shapes(dtype=dtype, is_plain=is_plain, **sizes)
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.platforms is None or device.platform in implementation.platforms:
            reason = implementation.module().unsupported(shapes, device)
            if reason is None:
                return implementation.module()
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
    activations = config.quantized_activations
    if choose_products(where.device, dtype, deterministic=True, activations=activations) is None:
        return False
    shards = where.axis_size
    experts = choose_experts(model, where.device, dtype, shards, is_plain)
    model, own = served_config(model, shards), share_of(model, shards)
    widths = [own.hidden_size, own.num_heads * own.head_dim, own.shared_expert_size]
    if any(map(model.has_mlp, range(model.num_layers))):
        widths.append(own.intermediate_size)
    kernels = (
        choose_kernel(model, group, config, dtype, where.device, shards)
        for group in kv_groups(model)
    )
    return (
        (experts is None or rows_are_independent(experts))
        and not (config.max_loras and "experts" in config.lora_extra)
        and all(map(is_width_supported, widths))
        and all(kernel.is_batch_invariant for kernel in kernels)
    )
