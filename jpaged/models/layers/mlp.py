"""The feed-forward part of a layer."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import Linear


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """SwiGLU (arXiv:2002.05202), gate and up in one weight: [..., 2, F]."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Array) -> Array:
        gate_up = self.gate_up(x, jnp.float32)
        gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))
