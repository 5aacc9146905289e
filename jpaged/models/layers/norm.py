"""Root mean square norm."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.params import MeshAxis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root mean square norm (arXiv:1910.07467) over the axes of its scale, the last of x, in f32.

    has_offset: x is multiplied by 1 + scale. in_f32: it is so before it is rounded. mean_over: the
    mesh axis whose devices each hold a share of what is normed, all alike; None: this device has
    it whole.
    """

    scale: Array
    eps: float = dataclasses.field(metadata={"static": True})
    has_offset: bool = dataclasses.field(default=False, metadata={"static": True})
    in_f32: bool = dataclasses.field(default=False, metadata={"static": True})
    mean_over: MeshAxis | None = dataclasses.field(default=None, metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        axes = tuple(range(x.ndim - self.scale.ndim, x.ndim))
        x32 = x.astype(jnp.float32)
        mean = mean_of_squares(x32.reshape(*x.shape[: axes[0]], -1))
        mean = mean.reshape(mean.shape[:-1] + (1,) * len(axes))
        if self.mean_over is not None:
            mean = jax.lax.pmean(mean, self.mean_over)
        x32 = x32 * jax.lax.rsqrt(mean + jnp.float32(self.eps))
        dtype = jnp.float32 if self.in_f32 else x.dtype
        scale = self.scale.astype(dtype).reshape((1,) * axes[0] + self.scale.shape)
        if self.has_offset:
            scale = 1 + scale
        return (x32.astype(dtype) * scale).astype(x.dtype)


LANES = 128  # partial sums of a row, which are stored between the two halves of the sum


def mean_of_squares(x: Array) -> Array:
    """Over the last axis, which becomes 1 long. On CPU added by halving, an order that is written
    down: for jnp.mean, XLA:CPU picks one by the number of rows, and bits would depend on the batch.
    Elsewhere a norm is one kernel with it, and three without.
    """

    def mean(x: Array) -> Array:
        return jnp.mean(x * x, axis=-1, keepdims=True)

    return jax.lax.platform_dependent(x, cpu=_mean_by_halving, default=mean)


def _mean_by_halving(x: Array) -> Array:
    lanes = _halved(x * x, LANES)
    if lanes.shape[-1] < x.shape[-1]:
        lanes = jax.lax.optimization_barrier(lanes)  # or the whole sum is one long expression
    rest = _halved(lanes, 1)
    total = rest[..., :1]
    for i in range(1, rest.shape[-1]):
        total = total + rest[..., i : i + 1]
    return total / x.shape[-1]


def _halved(x: Array, most: int) -> Array:
    """Halves of the last axis added while it is even and longer than `most`."""
    while x.shape[-1] > most and x.shape[-1] % 2 == 0:
        low, high = jnp.split(x, 2, axis=-1)
        x = low + high
    return x
