"""Root mean square norm."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root mean square norm (arXiv:1910.07467) over the last axis, computed in f32."""

    scale: Array
    eps: float = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(mean + jnp.float32(self.eps))
        scale = self.scale.reshape((1,) * (x.ndim - 1) + x.shape[-1:])
        return x32.astype(x.dtype) * scale.astype(x.dtype)
