"""The feed-forward part of a layer."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import Linear


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """A gated linear unit (arXiv:2002.05202), gate and up in one weight: [..., 2, F]."""

    gate_up: Linear
    down: Linear
    activation: Literal["silu", "gelu_tanh"] = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        gate_up = self.gate_up(x, jnp.float32)
        gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
        return self.down((activate(self.activation, gate) * up).astype(x.dtype))


def activate(kind: Literal["silu", "gelu_tanh"], x: Array) -> Array:
    """The activation of a gate."""
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)
