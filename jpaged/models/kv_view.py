"""What attention knows of the KV cache: groups of layers that share one, and the view of a step."""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jpaged.models.config import ModelConfig
from jpaged.models.layers.heads import Heads
from kernels_pallas.paged_attention.interface import AttentionOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers whose keys and values are alike, so that one array and one block table hold them.

    layers: their indices in the model, ascending. num_heads: query heads of each. window: tokens
    that a query sees, itself included; None is all of them.
    """

    layers: tuple[int, ...]
    num_heads: int
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
            num_heads=config.num_heads,
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
        options: AttentionOptions,
        sinks: Any = None,
    ) -> tuple[Any, Self]:
        """Keep these tokens' keys and values, then attend over each row's whole context.

        group: index into kv_groups. index: place of the layer in its group, an int or a scalar
        array. heads: q, k, v = heads(qkv). options: passed on to the kernel as it is. sinks: f32
        [H] or None, passed on likewise. Returns o [..., H, D] in qkv's dtype, and the view with the
        keys and values in it.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseKV:
    """A view without a cache, for training: tokens attend to those before them in the same call."""

    def attend(
        self,
        group: int,
        index: Any,
        qkv: Any,
        heads: Heads,
        options: AttentionOptions,
        sinks: Any = None,
    ) -> tuple[Any, Self]:
        """See KVView: jax's reference attention, differentiable, its softmax in f32."""
        q, k, v = heads(qkv)
        if options.soft_cap is not None or sinks is not None:
            return _attention(q, k, v, options, sinks), self
        local = None if options.window is None else (options.window - 1, 0)
        with jax.numpy_dtype_promotion("standard"):  # it mixes bf16 with f32
            o = jax.nn.dot_product_attention(
                q, k, v, scale=options.scale, is_causal=True, local_window_size=local
            )
        return o, self


def _attention(q: Any, k: Any, v: Any, options: AttentionOptions, sinks: Any) -> Any:
    """Dense attention with sinks and capped scores, which jax's reference does not have."""
    tokens, heads, kv_heads = q.shape[-3], q.shape[-2], k.shape[-2]
    q = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1])
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, preferred_element_type=jnp.float32)
    scores = scores * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    position = jnp.arange(tokens)
    seen = position[None, :] <= position[:, None]
    if options.window is not None:
        seen &= position[None, :] > position[:, None] - options.window
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
