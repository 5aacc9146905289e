"""The feed-forward part of a layer."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.layers.linear import Linear

Activation = Literal["silu", "gelu_tanh", "clamped"]
ALPHA, LIMIT = 1.702, 7.0  # of "clamped"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """A gated linear unit (arXiv:2002.05202), gate and up in one weight: [..., 2, F]."""

    gate_up: Linear
    down: Linear
    activation: Activation = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array, dtype: DTypeLike | None = None) -> Array:
        """x [..., E], the result in dtype (None is x's)."""
        gate_up = self.gate_up(x, jnp.float32)
        h = gated(self.activation, gate_up[..., 0, :], gate_up[..., 1, :])
        return self.down(h.astype(x.dtype), dtype)


def gated(kind: Activation, gate: Array, up: Array) -> Array:
    """What goes down of gate and up, f32 [..., F]."""
    if kind == "clamped":  # GPT-OSS's
        gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
        return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)
    gate = jax.nn.silu(gate) if kind == "silu" else jax.nn.gelu(gate, approximate=True)
    return gate * up
