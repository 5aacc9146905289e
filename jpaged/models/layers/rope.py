"""Rotary position embeddings: inverse frequencies with their scalings, and the rotation."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.checks import positive
from jpaged.errors import ConfigError
from jpaged.models.layers.arithmetic import multiplied, rounded
from jpaged.models.rope_scaling import RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """A factor on rotated queries that grows with their position p (Ministral 3, which has it from
    Llama 4): 1 + beta * ln(1 + floor(p / length)).
    """

    beta: float
    length: int

    def __post_init__(self) -> None:
        positive(llama_4_scaling_beta=self.beta, original_max_position_embeddings=self.length)

    def factors(self, positions: Array) -> Array:
        """Return the factors of integer positions [...], in f32."""
        passed = jnp.floor(positions.astype(jnp.float32) / jnp.float32(self.length))
        return 1 + jnp.float32(self.beta) * jnp.log(1 + passed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The rotation of a head's queries and keys. dim: how many of its dimensions are rotated, the
    first ones. theta: the base of their frequencies.

    interleaved: Hugging Face files hold the rotated pairs side by side, (2i, 2i + 1). We rotate
    (i, i + dim/2): the rows of the projections are put in that order as they are read.

    sections: where tokens have positions on three axes (frames, rows and columns of images), how
    many frequencies turn by each of them: one section after the other, or with alternating_sections
    every third frequency by the same axis as far as its section goes, and the rest by the first
    axis. None: by one position. Source: M-RoPE of Qwen2-VL (arXiv:2409.12191) and Qwen3-VL.
    """

    dim: int
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False
    query_scaling: QueryScaling | None = None
    sections: tuple[int, int, int] | None = None
    alternating_sections: bool = False

    def __post_init__(self) -> None:
        positive(rope_theta=self.theta)
        if self.dim % 2:
            raise ConfigError(f"{self.dim} dimensions of a head are rotated: must be even")
        if (sizes := self.sections) is not None:
            if len(sizes) != 3 or not all(isinstance(x, int) and x >= 0 for x in sizes):
                raise ConfigError(f"mrope_section={sizes!r}: must be three numbers of frequencies")
            if not self.alternating_sections and sum(sizes) != self.dim // 2:
                raise ConfigError(f"mrope_section={sizes}: must sum up to {self.dim // 2}")
        s = self.scaling
        if s is not None and s.kind == "proportional" and not 0 < s.partial_rotary_factor <= 1:
            share = s.partial_rotary_factor
            raise ConfigError(f"partial_rotary_factor={share}: must be in (0, 1]")
        if s is not None and s.kind == "longrope":
            for factors in (s.short_factor, s.long_factor):
                if len(factors) != self.dim // 2:
                    raise ConfigError(
                        f"{len(factors)} longrope factors for {self.dim // 2} frequencies"
                    )


def axes_of_frequencies(rope: RopeConfig) -> np.ndarray:
    """Return which of the three axes each rotated pair turns by, int [dim/2]: see RopeConfig."""
    assert rope.sections is not None
    if not rope.alternating_sections:
        return np.repeat(np.arange(3), rope.sections)
    axes = np.zeros(rope.dim // 2, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


def inverse_frequencies(rope: RopeConfig, length: int = 0) -> tuple[np.ndarray, float]:
    """Return the angular frequency of each rotated pair (float32 [dim/2], radians a token), and the
    factor on cos and sin.

    length: tokens that a sequence may have; longrope is one thing up to the original length and
    another beyond it. Source: RoFormer (arXiv:2104.09864); the scalings as RopeScaling says.
    Computed in float64 on the host.
    """
    dim, base, s = rope.dim, rope.theta, rope.scaling
    inv = 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if s is None:
        return inv.astype(np.float32), 1.0
    if s.kind == "linear":
        inv = inv / s.factor
    elif (
        s.kind == "llama3"
    ):  # long wavelengths are slowed by the factor, short ones kept, those between interpolated
        # Rotations within the original context.
        turns = s.original_max_position * inv / (2 * math.pi)
        smooth = np.clip(
            (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0
        )
        inv = (1 - smooth) * inv / s.factor + smooth * inv
    elif s.kind == "longrope":
        inv = inv / np.asarray(
            s.long_factor if length > s.original_max_position else s.short_factor
        )
    elif s.kind == "proportional":
        turning = int(s.partial_rotary_factor * dim // 2)
        inv = np.where(np.arange(dim // 2) < turning, inv / s.factor, 0.0)
    else:
        inv = _yarn(inv, s, dim, base)
    return inv.astype(np.float32), s.attention_factor


def _yarn(inv: np.ndarray, s: RopeScaling, dim: int, base: float) -> np.ndarray:
    """YaRN, equation 23: interpolate the dimensions that turn fewer than beta_slow times, keep
    those over beta_fast.
    """

    def dimension(rotations: float) -> float:
        return (
            dim
            * math.log(s.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(base))
        )

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return inv / s.factor * ramp + inv * (1 - ramp)


def rotation(
    rope: RopeConfig, positions: Array, length: int = 0, axes: Array | None = None
) -> tuple[Array, Array]:
    """cos and sin, f32 [..., dim/2], of integer positions [...]; length as `inverse_frequencies`
    takes it. axes: integer positions [3, ...] on three axes, by which a rope with sections turns.
    """
    inv, factor = inverse_frequencies(rope, length)
    turned = positions.astype(jnp.float32)[..., None]
    if axes is not None and rope.sections is not None:
        first, second, third = axes.astype(jnp.float32)[..., None]
        axis = axes_of_frequencies(rope).reshape((1,) * positions.ndim + (-1,))
        turned = jnp.where(axis == 0, first, jnp.where(axis == 1, second, third))
    angles = turned * jnp.asarray(inv).reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of x [..., heads, D] in f32; cos and
    sin are [..., R/2]; returns x's dtype.
    """
    if (rotated := 2 * cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :rotated], cos, sin)
        return jnp.concatenate([turned, x[..., rotated:]], axis=-1)
    lead = x.shape[: cos.ndim - 1] + (1,) * (x.ndim - cos.ndim) + cos.shape[-1:]
    cos, sin = cos.reshape(lead), sin.reshape(lead)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    first = multiplied(a, cos) - multiplied(b, sin)
    second = multiplied(b, cos) + multiplied(a, sin)
    return rounded(jnp.concatenate([first, second], axis=-1), x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotation of a step's tokens by their positions: one for all layers of a RopeConfig.

    query_scale: factors f32 [...] on rotated queries, or None.
    """

    cos: Array
    sin: Array
    query_scale: Array | None = None

    @classmethod
    def at(cls, rope: RopeConfig, positions: Array, length: int, axes: Array | None = None) -> Self:
        """Return the rotation of integer positions [...]; length, axes: see `rotation`."""
        cos, sin = rotation(rope, positions, length, axes)
        scale = None if rope.query_scaling is None else rope.query_scaling.factors(positions)
        # Without the barrier each layer would work the angles out again.
        cos, sin, scale = jax.lax.optimization_barrier((cos, sin, scale))
        return cls(cos=cos, sin=sin, query_scale=scale)

    def __call__(self, q: Array, k: Array) -> tuple[Array, Array]:
        """q and k [..., heads, D], rotated; q scaled too."""
        return self.queries(q), rotate(k, self.cos, self.sin)

    def queries(self, q: Array) -> Array:
        """Return q [..., heads, D] rotated and scaled; [..., K, G, D] as well."""
        return self.scaled(rotate(q, self.cos, self.sin))

    def scaled(self, q: Array) -> Array:
        """Return rotated queries [..., D] times their factors, rounded to the queries' dtype."""
        if self.query_scale is None:
            return q
        scale = self.query_scale.astype(q.dtype)
        return multiplied(q, scale.reshape(scale.shape + (1,) * (q.ndim - scale.ndim)))
