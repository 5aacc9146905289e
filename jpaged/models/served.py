"""The model that several devices serve in place of another, and the form of each of its weights.

A model of K KV heads with G query heads each is also one of K * r KV heads with G / r query heads
each, of which r neighbours are equal; and a vocabulary may end in tokens that never occur. So a
mesh serves a model with a config of its own, which divides over the devices with equal results. Its
weights are made from the canonical parameters once a weight version.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.combinations import Facts, check_combination
from jpaged.models.config import ModelConfig
from jpaged.models.hf_quantization import Format
from jpaged.models.layers.embedding import EMBED
from jpaged.models.layers.experts import BY_SHAPE, ExpertSharing
from jpaged.models.layers.per_layer import TABLE
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import Params, nest, param_table
from jpaged.models.quantized import (
    FORMS,
    INT4,
    INT8,
    INTERLEAVED,
    NIBBLE_BLOCK,
    QuantizedWeight,
    WeightForm,
    quantized,
)

VOCAB_TILE = 128  # tokens that are drawn together; no tile lies on two devices


def served_config(
    model: ModelConfig, devices: int, sharing: ExpertSharing = BY_SHAPE
) -> ModelConfig:
    """Return the model that this many devices of a tensor axis serve: layers that they can share
    and a vocabulary padded to whole tiles. One device serves the model itself. sharing: how devices
    and replicas share experts. ConfigError where heads or experts cannot divide.
    """
    if devices == 1:
        if sharing.replicas == 1:
            return model
        layers = tuple(layer.served(1, sharing) for layer in model.layers)
        return dataclasses.replace(model, layers=layers)
    tiles = -(-model.vocab_size // (VOCAB_TILE * devices)) * devices
    layers = tuple(layer.served(devices, sharing) for layer in model.layers)
    return dataclasses.replace(model, layers=layers, vocab_size=tiles * VOCAB_TILE)


def share_of(model: ModelConfig, devices: int, sharing: ExpertSharing = BY_SHAPE) -> ModelConfig:
    """Return the model's sizes on one of this many devices as a ModelConfig: it bounds memory."""
    served = served_config(model, devices, sharing)
    if devices == 1:
        return served
    layers = tuple(layer.share(devices) for layer in served.layers)
    return dataclasses.replace(served, layers=layers, vocab_size=served.vocab_size // devices)


def served_form(
    spec: ParamSpec,
    model: ModelConfig,
    quantization: str | None,
    devices: int = 1,
    *,
    interleaved: bool = False,
) -> WeightForm | None:
    """Return the form in which a plain parameter is served under quantization=; None: plain.

    The weights of products are quantised, except those of routers and gates of experts. The head,
    and a tied embedding, takes its form's `head`: it costs the most in quality. devices: how many
    devices of a tensor axis split the parameter. interleaved: as of `in_order`. ConfigError where
    it has no whole groups.
    """
    inputs = spec.sides[1]
    if quantization is None or not spec.may_be_quantized:
        return None
    form = FORMS[quantization]
    if spec.split == "V":
        if spec.name == TABLE or (spec.name == EMBED.name and not model.tie_word_embeddings):
            return None  # gathered, not multiplied
        return in_order(form if form.head is None else FORMS[form.head], spec, interleaved)
    share = spec.shape_of(inputs[-1])[0]
    if spec.split_letter(devices) == inputs[-1]:
        share //= devices
    inputs_of_a_scale = form.group or 1
    check_combination(
        Facts(served_form=quantization, weight=spec.name, inputs=share, group=inputs_of_a_scale)
    )
    return in_order(form, spec, interleaved)


def in_order(form: WeightForm, spec: ParamSpec, interleaved: bool) -> WeightForm:
    """Return a form as a parameter is served in it: interleaved where it can be so. interleaved:
    the products take such weights; experts are multiplied one by one, as they lie.
    """
    outputs, inputs = (math.prod(spec.shape_of(" ".join(side))) for side in spec.sides)
    is_integral = form.name in (INT8.name, INT4.name) and spec.sides[0][0] != "X"
    divides = outputs % INTERLEAVED == 0 and inputs % NIBBLE_BLOCK == 0
    return dataclasses.replace(form, interleaved=interleaved and is_integral and divides)


def stored_shapes(
    spec: ParamSpec, stored: Format, dtype: Any, *, interleaved: bool = False
) -> QuantizedWeight | None:
    """Return the shapes of a parameter as load_params keeps it from a folder of a format; None:
    plain. interleaved: as of `in_order`.

    The folder holds the weights of all products but the head's in 8 or 4 bits, or those of experts
    alone, and those plain that its config says it ignores.
    """
    is_expert = spec.sides[0][:1] == ["X"]
    names = (spec.at(part.hf_name).removesuffix(".weight") for part in spec.parts)
    is_ignored = any(stored.ignores(name.replace("{x}", "0")) for name in names)
    is_plain = not spec.may_be_quantized or spec.split == "V" or is_ignored
    if is_plain or (stored.only_experts and not is_expert):
        return None
    shape, num_outputs, form = spec.shape, len(spec.sides[0]), stored.form
    of_scales = form.scale_shape(shape, num_outputs, stored.inputs_of_a_scale)
    if of_scales is None:
        return None
    values: Any = jax.ShapeDtypeStruct(form.value_shape(shape), form.dtype)
    scales: Any = jax.ShapeDtypeStruct(of_scales, jnp.float32)
    return QuantizedWeight(
        values=values,
        scales=scales,
        form=in_order(form, spec, interleaved),
        num_outputs=num_outputs,
        dtype=jnp.dtype(dtype),
        zeros=scales if stored.has_zeros else None,
    )


def quantized_tree(
    params: Params, quantization: str, *, interleaved: bool = False
) -> dict[str, Any]:
    """Return the canonical tree with its weights in the forms that one device serves them in.
    interleaved: as of `in_order`.
    """

    def one(spec: ParamSpec, leaf: Any) -> Any:
        form = served_form(spec, params.config, quantization, interleaved=interleaved)
        return leaf if form is None else quantized(jnp.asarray(leaf), form, len(spec.sides[0]))

    return jax.tree.map(one, nest(param_table(params.config)), dict(params))
