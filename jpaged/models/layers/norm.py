"""Root mean square norm."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.errors import ConfigError
from jpaged.models.layers.arithmetic import added, mean_of_squares, rounded
from jpaged.models.param_spec import Init, MeshAxis, Parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """A root mean square norm. has_offset: the factor is 1 + scale. in_f32: the scale is applied in
    f32, before x is rounded; otherwise after.
    """

    eps: float = 1e-6
    has_offset: bool = False
    in_f32: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.eps, bool) or not isinstance(self.eps, int | float) or self.eps < 0:
            raise ConfigError(f"rms_norm_eps={self.eps!r}: must be a number of at least 0")

    @property
    def init(self) -> Init:
        """The scale with which training starts: a norm that changes nothing."""
        return "zeros" if self.has_offset else "ones"


PLAIN_NORM = NormConfig()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root mean square norm (arXiv:1910.07467) over the axes of its scale, the last of x, in f32.

    scale: None multiplies by nothing, and the norm is over the last axis. split: the size of the
    axis of the scale that a mesh splits where it divides; None: it lies whole on every device.
    """

    scale: Array | None
    config: NormConfig = dataclasses.field(metadata={"static": True})
    split: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, config: NormConfig, scale: Parameter | None) -> "RMSNorm | None":
        """Return the norm of a parameter; None where the model does not have that."""
        if scale is None:
            return None
        spec = scale.spec
        split = None if spec.split is None else spec.shape_of(spec.split)[0]
        return cls(scale=scale.value, config=config, split=split)

    def __call__(self, x: Array, mean_over: MeshAxis | None = None) -> Array:
        """x normed, in its dtype. mean_over: the mesh axis whose devices each hold a share of what
        is normed, all alike; None: this device has it whole.
        """
        num_axes = 1 if self.scale is None else self.scale.ndim
        axes = tuple(range(x.ndim - num_axes, x.ndim))
        x32 = x.astype(jnp.float32)
        mean = mean_of_squares(x32.reshape(*x.shape[: axes[0]], -1))
        mean = mean.reshape(mean.shape[:-1] + (1,) * len(axes))
        if mean_over is not None:
            mean = jax.lax.pmean(mean, mean_over)
        x32 = x32 * jax.lax.rsqrt(mean + jnp.float32(self.config.eps))
        if self.scale is None:
            return rounded(x32, x.dtype)
        dtype = jnp.float32 if self.config.in_f32 else x.dtype
        scale = self.scale.astype(dtype).reshape((1,) * axes[0] + self.scale.shape)
        if self.config.has_offset:
            scale = added(jnp.ones_like(scale), scale)
        y = rounded(x32, dtype).astype(jnp.float32) * scale.astype(jnp.float32)
        return rounded(y, x.dtype)
