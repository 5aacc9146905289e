"""Choices: what computes an engine's steps at a place, chosen once when it starts.

Asking may compile C++ and measure it, and says in the log what cannot run and why. So `choose` runs
once for a model, and everything that needs a choice is handed the result; nothing chooses while a
step is traced.
"""

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.models.kv_groups import attention_options, kv_groups
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.conv import ConvConfig
from jpaged.models.layers.delta import GatedDeltaConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.linear import DeltaRule, ExpertProducts, Scan, StepContext
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.layers.per_layer import TABLE
from jpaged.models.quantized import is_quantized
from jpaged.models.served import VOCAB_TILE
from jpaged.runtime.attention import Kernel, choose_kernel
from jpaged.runtime.logprobs import OnePass
from jpaged.runtime.mesh import Placement
from kernels_cpu import group_attention, library
from kernels_cpu.linear import NativeProducts, is_width_supported
from kernels_cpu.panels import PanelProducts
from kernels_cpu.rates import rates
from kernels_pallas import experts, gated_delta, mamba2, paged_attention, short_conv, vocab_tiles
from kernels_pallas.experts.interface import Shapes
from kernels_pallas.implementation import CUDA, Implementation, capability_of

ATTENTION = AttentionConfig | LatentConfig
log = logging.getLogger("jpaged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What computes the steps of one model at one place; `choose` makes it.

    dtype: of the weights. attention: the kernel of each of kv_groups(model), None of one that keeps
    states. products: the module that multiplies by weights; None is XLA. experts: the module that
    multiplies by a mixture's experts; None for a model without. delta: the module of the gated
    delta rule; None for a model without. scan: that of Mamba-2's scan, likewise. one_pass: the
    kernel that sums over the vocabulary; None is XLA. in_fp8: the device has tensor cores for
    products of fp8 by fp8. counts_steps: a dispatch of several decode steps takes them all, since a
    loop that ends early would ask the host at each turn. states_are_alike: the bits of no layer's
    state depend on the batch or on where a step begins. is_batch_invariant: the bits of a row
    depend on that row alone in every product and in attention, so that deterministic serving needs
    no steps of one size. draft: the choices for the model that guesses ahead, if one does.
    """

    dtype: Any
    attention: tuple[Kernel | None, ...]
    products: NativeProducts | None = None
    experts: ExpertProducts | None = None
    delta: DeltaRule | None = None
    scan: Scan | None = None
    one_pass: OnePass | None = None
    in_fp8: bool = False
    counts_steps: bool = False
    states_are_alike: bool = True
    is_batch_invariant: bool = False
    draft: "Choices | None" = None

    def for_config(self, config: EngineConfig) -> Self:
        """Return the same choices for a resolved config with other rows and other determinism."""
        rows = config.num_rows
        kernels = tuple(
            k and dataclasses.replace(k, shapes=dataclasses.replace(k.shapes, num_rows=rows))
            for k in self.attention
        )
        products = self.products
        if products is not None:
            products = dataclasses.replace(
                products, most_rows=_most_rows(bool(config.deterministic))
            )
        return dataclasses.replace(self, attention=kernels, products=products)


def choose(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    dtype: Any,
    is_plain: bool = True,
) -> Choices:
    """Choose for a model at a place; UnsupportedError where a kernel or an arithmetic that is named
    cannot run.

    config: resolved. dtype: of the weights. is_plain: experts are served as arrays, not in 8 or 4
    bits.
    """
    device, shards, dtype = placement.device, placement.axis_size, jnp.dtype(dtype)
    served = placement.served(model)
    products = choose_products(
        device,
        dtype,
        deterministic=bool(config.deterministic),
        activations=config.quantized_activations,
    )
    mixture = _experts(placement.share_of(model), device, dtype, is_plain)
    delta, scan = _of_states(placement.share_of(model), device)
    states_are_alike = all(x is None or x.is_batch_invariant() for x in (delta, scan))
    asked = attention_options(served)
    if not config.max_embeddings:  # no prompt has images
        asked = [{dataclasses.replace(x, ends=False) for x in options} for options in asked]
    kernels = tuple(
        choose_kernel(
            group, options, config, dtype, device, shards, unfused=unfused(served, group.layers)
        )
        if group.record.has_keys
        else None
        for group, options in zip(kv_groups(served), asked, strict=True)
    )
    return Choices(
        dtype=dtype,
        attention=kernels,
        products=products,
        experts=None if mixture is None else mixture.module(),
        delta=None if delta is None else delta.module(),
        scan=None if scan is None else scan.module(),
        one_pass=choose_one_pass(config, served.vocab_size // shards, device),
        in_fp8=config.quantized_activations == "auto" and multiplies_fp8(device),
        counts_steps=device.platform in CUDA,
        states_are_alike=states_are_alike,
        is_batch_invariant=(
            products is not None
            and (mixture is None or mixture.is_batch_invariant())
            and not (config.max_loras and "experts" in config.lora_extra)
            and all(map(is_width_supported, _widths(placement.share_of(model))))
            and all(kernel is None or kernel.is_batch_invariant for kernel in kernels)
            and states_are_alike
            and all(map(_is_state_invariant, served.layers))
            # XLA multiplies by what makes keys and values of latents, head by head.
            and not any(isinstance(layer.mixer, LatentConfig) for layer in served.layers)
        ),
    )


def _is_state_invariant(layer: LayerConfig) -> bool:
    """Return whether the bits of a layer's state can depend on its row alone, if it has one: those
    of the gated delta rule and of Mamba-2, by `states_are_alike`, and those of a short convolution,
    whose products of bf16 are exact in f32 and are added up in one order. Other layers make no such
    promise.
    """
    alike = GatedDeltaConfig | MambaConfig | ConvConfig
    is_alike = all(isinstance(x, alike) for x in layer.mixers if not isinstance(x, ATTENTION))
    return is_alike or all(x.per == "token" for x in layer.keeps())


def unfused(model: ModelConfig, layers: tuple[int, ...]) -> str | None:
    """Return why no kernel prepares attention in these layers; None: one can."""
    mixers = (mixer for i in layers for mixer in model.layers[i].mixers)
    reasons = (m.unfused for m in mixers if isinstance(m, ATTENTION))
    return next((reason for reason in reasons if reason is not None), None)


def _widths(model: ModelConfig) -> list[int]:
    """Return the inputs of every kind of product in a device's share of a model."""
    weights = [x for x in model.params() if x.is_multiplied and x.name != TABLE]
    products = [x for x in weights if x.sides[0][0] != "X"]
    return [math.prod(spec.shape_of(" ".join(spec.sides[1]))) for spec in products]


def choose_products(
    device: Any, dtype: Any, *, deterministic: bool, activations: str = "auto"
) -> NativeProducts | None:
    """Return the C++ products if they can run, which compiles and measures them; None is XLA's.

    dtype: of the weights. deterministic: take them for any number of rows; otherwise only for the
    numbers at which they were measured to be faster. activations: as quantized_activations of
    EngineConfig; UnsupportedError where only the C++ products have it, and they cannot run.
    """
    reason: str | None = None
    if device.platform != "cpu":
        reason = f"weights are on {device.platform}"
    elif jnp.dtype(dtype) != jnp.bfloat16:
        reason = f"the dtype is {jnp.dtype(dtype).name}, not bfloat16"
    else:
        reason = library.unavailable()
    check_combination(Facts(activations=activations, no_cpu_products=reason or ""))
    if reason is not None:
        return None
    if activations == "auto":
        best = library.level()
        activations = "plain" if best is None else best.activations
        log.info("quantized_activations='auto': %r on this processor", activations)
    return NativeProducts(most_rows=_most_rows(deterministic), activations=activations)


def tower_step(device: Any, products: NativeProducts | None) -> StepContext:
    """Return what multiplies and attends in a vision tower that one device has: on a CPU the C++
    kernels, for weights in f32 too; elsewhere XLA. products: those of the text model's layers.
    """
    if device.platform != "cpu" or library.unavailable():
        return StepContext(products=products)
    best = library.level()
    assert best is not None
    most_rows, activations = 0, "plain"  # of none
    if products is not None:
        most_rows, activations = products.most_rows, products.activations
    panels = PanelProducts(dtypes=best.panels, most_rows=most_rows, activations=activations)
    return StepContext(products=panels, group_attention=group_attention)


def interleaves_on(device: Any, dtype: Any, config: EngineConfig) -> bool:
    """Return whether weights of int8 and int4 that stand for weights of this dtype are to lie
    interleaved (see WeightForm) on a device that alone serves them: its C++ products take them so.
    """
    if device.platform != "cpu" or jnp.dtype(dtype) != jnp.bfloat16 or library.unavailable():
        return False
    best, activations = library.level(), config.quantized_activations
    if best is None:
        return False
    return (best.activations if activations == "auto" else activations) in best.interleaved


def interleaves_at(placement: Placement, dtype: Any, config: EngineConfig) -> bool:
    """Return `interleaves_on` the one device of a place; False where there are several."""
    return placement.mesh is None and interleaves_on(placement.device, dtype, config)


def _most_rows(deterministic: bool) -> int | None:
    return None if deterministic else rates().most_rows


def activations_of(choices: Choices, params: Any) -> str | None:
    """Return what x becomes in products with this model's weights of 8 and 4 bits: "plain", "int8"
    or "int16" (see models.quantized), or "fp8" where XLA rounds x beside weights of fp8; None where
    all weights are plain. params: the tree that is served.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    forms = {leaf.form for leaf in leaves if is_quantized(leaf)}
    if not forms:
        return None
    if choices.in_fp8 and any(form.is_float8 for form in forms):
        return "fp8"
    if choices.products is None or not any(choices.products.rounds(form.name) for form in forms):
        return "plain"
    return choices.products.activations


def layer_kernels(model: ModelConfig, choices: Choices) -> dict[str, str | None]:
    """Return the names of what computes the gated delta rule, Mamba-2's scan, short convolutions
    and the experts of a mixture, as their packages list them; None of what the model has no layers
    of.
    """
    mixers = [mixer for layer in model.layers for mixer in layer.mixers]
    convolves = any(isinstance(x, GatedDeltaConfig | ConvConfig | MambaConfig) for x in mixers)
    return {
        "gated_delta": _name_of(choices.delta, gated_delta.IMPLEMENTATIONS),
        "mamba2": _name_of(choices.scan, mamba2.IMPLEMENTATIONS),
        "short_conv": short_conv.NAME if convolves else None,
        "experts": _name_of(choices.experts, experts.IMPLEMENTATIONS),
    }


def _name_of(module: Any, implementations: Mapping[str, Implementation]) -> str | None:
    """Return the name under which an operation's package lists a module, None of no module."""
    if module is None:
        return None
    return next(name for name, x in implementations.items() if x.module() is module)


def multiplies_fp8(device: Any) -> bool:
    """Return whether a device has tensor cores for fp8: NVIDIA's from compute capability 8.9 on."""
    return (capability_of(device) or 0) >= 8.9


def _experts(model: ModelConfig, device: Any, dtype: Any, is_plain: bool) -> Implementation | None:
    """Return the implementation of experts, which supports those of every layer; None for a model
    without experts. model: a device's share.
    """
    sizes = {
        (ffn.width(model.hidden_size), ffn.expert_size)
        for layer in model.layers
        for ffn in layer.ffns
        if isinstance(ffn, ExpertsConfig)
    }
    if not sizes:
        return None
    shapes = [
        Shapes(
            dtype=dtype,
            hidden_size=width,
            expert_size=size,
            is_plain=is_plain,
        )
        for width, size in sorted(sizes)
    ]
    for name, implementation in experts.IMPLEMENTATIONS.items():
        if implementation.is_compiled_for(device.platform):
            module = implementation.module()
            refused = [module.unsupported(shape, device) for shape in shapes]
            reasons = [reason for reason in refused if reason is not None]
            if not reasons:
                return implementation
            log.info("experts: not %s (%s)", name, reasons[0])
    raise AssertionError("one of them runs everywhere")


def _of_states(
    model: ModelConfig, device: Any
) -> tuple[Implementation | None, Implementation | None]:
    """Return the implementations of the gated delta rule and of Mamba-2's scan, which support every
    layer that has them; None for a model without. model: a device's share.
    """
    mixers = {mixer for layer in model.layers for mixer in layer.mixers}
    rules = {mixer.shapes for mixer in mixers if isinstance(mixer, GatedDeltaConfig)}
    scans = {mixer.shapes for mixer in mixers if isinstance(mixer, MambaConfig)}
    delta = _first("gated delta rule", gated_delta.IMPLEMENTATIONS, rules, device)
    return delta, _first("Mamba-2", mamba2.IMPLEMENTATIONS, scans, device)


def _first(
    title: str,
    implementations: Mapping[str, Implementation],
    shapes: Collection[Any],
    device: Any,
) -> Implementation | None:
    """Return the first implementation that supports all of these shapes; None where there are
    none.
    """
    if not shapes:
        return None
    for name, implementation in implementations.items():
        if implementation.is_compiled_for(device.platform):
            module = implementation.module()
            reasons = {module.unsupported(shape, device) for shape in shapes} - {None}
            if not reasons:
                return implementation
            log.info("%s: not %s (%s)", title, name, reasons.pop())
    raise AssertionError("one of them runs everywhere")


def choose_one_pass(config: EngineConfig, vocab: int, device: Any) -> OnePass | None:
    """Return the kernel that sums over the vocabulary on CUDA, or interpreted if a CUDA kernel of
    attention is; None is XLA, whose bits are kept elsewhere. vocab: of one device.
    """
    if device.platform not in CUDA:
        named = paged_attention.IMPLEMENTATIONS.get(config.attention)
        if named is None or named.platforms != CUDA or device.platform != "cpu":
            return None
    assert config.seq_buckets is not None
    is_interpreted, rows = device.platform == "cpu", config.seq_buckets[-1]
    readers = [*vocab_tiles.IMPLEMENTATIONS]
    if is_interpreted:  # that of the kernel which is named, before others
        readers = readers[readers.index(config.attention) :]
    for name in readers:
        reader = vocab_tiles.IMPLEMENTATIONS[name]
        reason = reader.module().unsupported(rows, vocab, VOCAB_TILE, device)
        if reason is None:
            return OnePass(reader=reader, interpret=is_interpreted)
        log.info("sums over the vocabulary: not %s (%s)", name, reason)
    return None
