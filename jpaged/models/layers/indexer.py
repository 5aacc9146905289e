"""The indexer of sparse latent attention (arXiv:2512.02556): which tokens of its context a query
attends to.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least
from jpaged.errors import ConfigError
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.rope import Rotary, rotate
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part
from jpaged.models.record import INDEX_KEY, Field

NORM_EPS = 1e-6  # of the norm of index keys, whatever rms_norm_eps says


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """An indexer of num_heads Hi heads, whose queries and one key have key_dim Di numbers, of which
    the first are rotated as those of attention are. interleaved: as of RopeConfig; it may differ
    from that of attention.
    """

    num_heads: int
    key_dim: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "num_heads", "key_dim")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        return {"Hi": self.num_heads, "Di": self.key_dim}

    def check(self, rope_dim: int) -> None:
        """ConfigError unless so many numbers of a key can be rotated."""
        if rope_dim > self.key_dim:
            raise ConfigError(f"index_head_dim={self.key_dim}: below qk_rope_head_dim={rope_dim}")

    def params(self, rope_dim: int) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer. Every device has them whole: all have to
        choose alike.
        """
        pairs, source = rope_dim if self.interleaved else 0, "self_attn.indexer."

        def rotated(name: str, axes: str, hf_name: str) -> tuple[Part, ...]:
            return (Part(name, axes, source + hf_name, pairs),)

        q, k = rotated("q", "Hi Di, Lq", "wq_b.weight"), rotated("k", "Di, E", "wk.weight")
        scale = rotated("scale", "Di", "k_norm.weight")
        bias, weights = rotated("bias", "Di", "k_norm.bias"), source + "weights_proj.weight"
        return (
            ParamSpec("latent.index.q", "Hi Di, Lq", q, is_quantized=True),
            ParamSpec("latent.index.k", "Di, E", k, is_quantized=True),
            ParamSpec("latent.index.norm.scale", "Di", scale, "ones"),
            ParamSpec("latent.index.norm.bias", "Di", bias, "zeros"),
            ParamSpec("latent.index.weights", "Hi, E", weights),
        )

    @property
    def keeps(self) -> Field:
        """What the cache holds of each token for it, whole on every device."""
        return Field(INDEX_KEY, (self.key_dim,))

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for its products, beside that of a choice."""
        width = self.num_heads * (self.key_dim + 1) + self.key_dim
        return Scratch(shared=step.rows * 4 * 2 * width)

    def build(self, weights: Parameters) -> "Indexer":
        """Return the module of these parameters."""
        return Indexer(
            q=Linear.of(weights["latent.index.q"]),
            k=Linear.of(weights["latent.index.k"]),
            scale=weights["latent.index.norm.scale"].value,
            bias=weights["latent.index.norm.bias"].value,
            weights=Linear.of(weights["latent.index.weights"]),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexQueries:
    """What the tokens of a step ask of index keys. q: [..., Hi, Di]. key: [..., Di], their own.
    weights: of the heads, f32 [..., Hi]. count: how many tokens each of them chooses at most.
    """

    q: Array
    key: Array
    weights: Array
    count: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexer:
    """q: from the latents of queries, to [..., Hi, Di]. k: of x, to [..., Di], which a layer norm
    with scale and bias [Di] follows. weights: of x, to [..., Hi].
    """

    q: Linear
    k: Linear
    scale: Array
    bias: Array
    weights: Linear

    def __call__(
        self, x: Array, latent_q: Array, step: StepContext, rotary: Rotary | None, count: int
    ) -> IndexQueries:
        """x [..., E], latent_q [..., Lq]. rotary: of attention. count: see IndexQueries."""
        with jax.named_scope("index"):
            q, key = self.q(latent_q, step), self._normed(self.k(x, step))
            if rotary is not None:
                q = rotate(q, rotary.cos, rotary.sin)
                key = rotate(key[..., None, :], rotary.cos, rotary.sin)[..., 0, :]
            weights = self.weights(x, step, jnp.float32)
            return IndexQueries(q=q, key=key, weights=weights, count=count)

    def _normed(self, key: Array) -> Array:
        """Layer norm (arXiv:1607.06450) in f32, rounded once."""
        f32 = jnp.float32
        x: Any = key.astype(f32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + f32(NORM_EPS))
        shape = (1,) * (x.ndim - 1) + self.scale.shape
        scale, bias = (p.astype(f32).reshape(shape) for p in (self.scale, self.bias))
        return (x * scale + bias).astype(key.dtype)
