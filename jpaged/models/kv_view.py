"""What attention knows of the KV cache: groups of layers that share one, and the view of a step."""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jpaged.models.config import ModelConfig
from jpaged.models.layers.heads import Heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers whose keys and values are alike, so that one array and one block table hold them.

    layers: their indices in the model, ascending. window: tokens that a query sees, itself
    included; None is all of them.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups of a model, in the order of their first layers."""
    layers: dict[int | None, list[int]] = {}
    for layer in range(config.num_layers):
        layers.setdefault(config.sliding_window(layer), []).append(layer)
    return tuple(
        KVGroup(
            layers=tuple(members),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=window,
        )
        for window, members in layers.items()
    )


def kv_places(config: ModelConfig) -> list[tuple[int, int]]:
    """Of each layer its group, and its place among the group's layers."""
    places = {
        layer: (group, index)
        for group, members in enumerate(kv_groups(config))
        for index, layer in enumerate(members.layers)
    }
    return [places[layer] for layer in range(config.num_layers)]


class KVView(Protocol):
    """The keys and values that the tokens of a step see; threaded through the layers."""

    def attend(
        self,
        group: int,
        index: Any,
        qkv: Any,
        heads: Heads,
        *,
        scale: float,
        soft_cap: float | None,
        sinks: Any = None,
    ) -> tuple[Any, Self]:
        """Keep these tokens' keys and values, then attend over each row's whole context.

        group: of kv_groups. index: place of the layer among the group's, an int or a scalar array.
        q, k, v are heads(qkv). soft_cap: c of c * tanh(score / c), or None. sinks [H]: one more
        score of each head, which takes its share of the softmax alone; or None. Returns o [..., H,
        D] in qkv's dtype, and the view with the keys and values in it.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseKV:
    """The keys and values of the tokens at hand and no others, for training: causal by index."""

    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})  # a group

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """With the windows of a model's groups."""
        return cls(windows=tuple(group.window for group in kv_groups(config)))

    def attend(
        self,
        group: int,
        index: Any,
        qkv: Any,
        heads: Heads,
        *,
        scale: float,
        soft_cap: float | None,
        sinks: Any = None,
    ) -> tuple[Any, Self]:
        """See KVView: jax's reference attention, differentiable, its softmax in f32."""
        q, k, v = heads(qkv)
        window = self.windows[group]
        if soft_cap is not None or sinks is not None:
            return _attention(q, k, v, sinks, scale, soft_cap, window), self
        local = None if window is None else (window - 1, 0)
        with jax.numpy_dtype_promotion("standard"):  # it mixes bf16 with f32
            o = jax.nn.dot_product_attention(
                q, k, v, scale=scale, is_causal=True, local_window_size=local
            )
        return o, self


def _attention(
    q: Any, k: Any, v: Any, sinks: Any, scale: float, soft_cap: float | None, window: int | None
) -> Any:
    """jax's reference attention with sinks and capped scores, which it does not have."""
    tokens, heads, kv_heads = q.shape[-3], q.shape[-2], k.shape[-2]
    q = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1])
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, preferred_element_type=jnp.float32)
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    at = jnp.arange(tokens)
    seen = at[None, :] <= at[:, None]
    if window is not None:
        seen &= at[None, :] > at[:, None] - window
    scores = jnp.where(seen.reshape((1,) * (scores.ndim - 2) + seen.shape), scores, -jnp.inf)
    most = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        sinks = sinks.reshape((1,) * (scores.ndim - 4) + sinks.shape)
        most = jnp.maximum(most, sinks)
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - most)
    weights = (weights / total).astype(v.dtype)
    o = jnp.einsum("...kgts,...skd->...tkgd", weights, v, preferred_element_type=jnp.float32)
    return o.astype(v.dtype).reshape(*o.shape[:-3], heads, -1)
