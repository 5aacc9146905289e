"""The form in which several devices serve a model: one that divides, with equal results; and the
form of each of its weights.

A model of K KV heads with G query heads each is also one of K * r KV heads with G / r query heads
each, of which r neighbours are equal; and a vocabulary may end in tokens that never come. So a mesh
serves a model of a config of its own, made from the canonical parameters once a weight version.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.combinations import Facts, check_combination
from jpaged.models.config import ModelConfig
from jpaged.models.hf_quantization import Format
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import Params, nest, param_table
from jpaged.models.quantized import (
    GROUP,
    IN_4_BITS,
    VALUES,
    Form,
    QuantizedWeight,
    quantized,
)

VOCAB_TILE = 128  # tokens that are drawn together; no tile lies on two devices


def served_config(model: ModelConfig, devices: int) -> ModelConfig:
    """What so many devices of a tensor axis serve: each layer in a form that they can share, and
    the vocabulary padded to whole tiles; the model itself on one. ConfigError where heads cannot
    divide.
    """
    if devices == 1:
        return model
    tiles = -(-model.vocab_size // (VOCAB_TILE * devices)) * devices
    layers = tuple(layer.served(devices) for layer in model.layers)
    return dataclasses.replace(model, layers=layers, vocab_size=tiles * VOCAB_TILE)


def share_of(model: ModelConfig, devices: int) -> ModelConfig:
    """The model's sizes on each of so many devices, as a ModelConfig: used to bound memory."""
    if devices == 1:
        return model
    served = served_config(model, devices)
    layers = tuple(layer.share(devices) for layer in served.layers)
    return dataclasses.replace(served, layers=layers, vocab_size=served.vocab_size // devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """From a canonical parameter to the served one; compared by value, so that a compiled function
    of one serves the next version too.

    axes: as ParamSpec spells them. repeats: how often each KV head is held. rows: of padding after
    the vocabulary. dtype: what it is cast to.
    """

    axes: tuple[str, ...]
    dtype: str
    repeats: int = 1
    rows: int = 0

    @classmethod
    def of(cls, spec: ParamSpec, served: ParamSpec, dtype: Any) -> "Change":
        """The change of one parameter. served: its spec in the served model."""

        def size(spec: ParamSpec, letter: str) -> int:
            return spec.shape_of(letter)[0]

        return cls(
            axes=tuple(spec.axes.replace(",", " ").split()),
            dtype=str(jnp.dtype(dtype)),
            repeats=size(served, "K") // size(spec, "K") if spec.split == "K" else 1,
            rows=size(served, "V") - size(spec, "V") if spec.split == "V" else 0,
        )

    def is_needed(self, leaf: Any) -> bool:
        """Whether it changes anything."""
        return self.repeats > 1 or self.rows > 0 or str(leaf.dtype) != self.dtype

    def __call__(self, leaf: Any) -> Any:
        """The served parameter: a numpy array of a numpy array, a jax one of a jax one."""
        xp = jnp if isinstance(leaf, jax.Array) else np
        out = leaf.astype(self.dtype)
        if self.repeats > 1:
            out = self._repeated(out, xp)
        if self.rows:
            at = self.axes.index("V")
            widths = [(0, self.rows if i == at else 0) for i in range(out.ndim)]
            out = xp.pad(out, widths)
        return out

    def _repeated(self, x: Any, xp: Any) -> Any:
        """Each KV head several times over, its query heads dealt out to the copies in order."""
        at = self.axes.index("K")
        group, _, others = self.axes[at + 1].partition("+")
        if group != "G":
            return xp.repeat(x, self.repeats, axis=at)
        num_query = x.shape[at + 1] - int(others or 0)
        q, kv = xp.split(x, [num_query], axis=at + 1)
        dealt = (x.shape[at] * self.repeats, num_query // self.repeats)
        q = q.reshape(*x.shape[:at], *dealt, *x.shape[at + 2 :])
        return xp.concatenate([q, xp.repeat(kv, self.repeats, axis=at)], axis=at + 1)


def served_form(
    spec: ParamSpec, model: ModelConfig, quantization: Form | None, devices: int = 1
) -> Form | None:
    """What a parameter is served in; None is as it is. The weights of products are quantised, but
    for routers and gates of experts; the head (and a tied embedding) stays in 8 bits, since it
    costs the most in quality. ConfigError where it cannot be.

    devices: of a tensor axis, that split it.
    """
    inputs = spec.sides[1]
    if quantization is None or not inputs or spec.split is None:
        return None
    if spec.split == "V":
        if spec.name == "embed.weight" and not model.tie_word_embeddings:
            return None
        return "int8" if quantization == "int4" else quantization
    share = spec.shape_of(inputs[-1])[0]
    if spec.split_letter(devices) == inputs[-1]:
        share //= devices
    check_combination(Facts(served_form=quantization, weight=spec.name, inputs=share))
    return quantization


def stored_shapes(spec: ParamSpec, kind: Format, dtype: Any) -> QuantizedWeight | None:
    """The shapes of a parameter as a folder of a format has it, where it holds all weights of
    products but the head's in 8 or 4 bits (mxfp4: those of experts); None is plain.
    """
    is_expert = spec.sides[0][:1] == ["X"]
    if not spec.sides[1] or spec.split in (None, "V"):
        return None
    if kind.method == "mxfp4" and not is_expert:
        return None
    shape, num_outputs = spec.shape, len(spec.sides[0])
    last, inputs = shape[-1], math.prod(shape[num_outputs:])
    asked = GROUP if kind.method == "mxfp4" else kind.block[1] if kind.block else kind.group
    group, in_4_bits = math.gcd(asked or inputs, last), kind.form in IN_4_BITS
    if in_4_bits and (last % GROUP or group % GROUP):
        return None
    by_output = not in_4_bits and (asked or inputs) >= inputs
    ones = [1] * (len(shape) - num_outputs)
    of_scales = (*shape[:num_outputs], *ones) if by_output else (*shape[:-1], last // group)
    scales: Any = jax.ShapeDtypeStruct(of_scales, jnp.float32)
    held = (*shape[:-1], last // 2) if in_4_bits else shape
    values: Any = jax.ShapeDtypeStruct(held, jnp.uint8 if in_4_bits else VALUES[kind.form])
    return QuantizedWeight(
        values=values,
        scales=scales,
        form=kind.form,
        num_outputs=num_outputs,
        dtype=jnp.dtype(dtype),
        zeros=scales if kind.has_zeros else None,
    )


def quantized_tree(params: Params, quantization: Form) -> dict[str, Any]:
    """The canonical tree with its weights as they are served: what an engine on one device has."""

    def one(spec: ParamSpec, leaf: Any) -> Any:
        form = served_form(spec, params.config, quantization)
        return leaf if form is None else quantized(jnp.asarray(leaf), form, len(spec.sides[0]))

    return jax.tree.map(one, nest(param_table(params.config)), dict(params))
