"""EAGLE-3 heads (arXiv:2503.01840): one layer that guesses tokens by a model's hidden states.

An entry p of a sequence joins the model's hidden states of position p, of several layers and made
one by `fc`, with the embedding of token p + 1, and guesses token p + 2. To guess further, what the
layer gave for entry p takes the place of the hidden states of position p + 1.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.models.config import ModelConfig
from jpaged.models.draft_head import HeadConfig
from jpaged.models.forward import Forward, bind_layers
from jpaged.models.head import DraftHead
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.attention import Attention
from jpaged.models.layers.embedding import Embedding
from jpaged.models.layers.experts import Experts
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.mlp import MLP
from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.params import parameters
from jpaged.models.trees import to_tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(DraftHead):
    """The modules of a head, a pytree of their arrays. `bind_eagle` makes it.

    embed, head: None where those of the model that it guesses for serve, which is the argument
    `target` of its methods.
    """

    embed: Embedding | None
    hidden_norm: RMSNorm
    head: Linear | None
    config: HeadConfig = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})  # of the model

    def joined(self, states: list[Array], step: StepContext) -> Array:
        """Return one hidden state [..., T, E] of those of the model's layers."""
        return self.through_fc(jnp.concatenate(states, axis=-1), step)

    def __call__(
        self,
        target: Forward,
        tokens: Array,
        positions: Array,
        hidden: Array,
        kv: KVView,
        step: StepContext,
    ) -> tuple[Array, KVView]:
        """Return what the layer gives [T, E] for entries at these positions, before the norm, and
        the view with their keys and values.

        tokens: the one after each position. hidden: the hidden state of each position, [T, E].
        """
        layer, rope = self.layer, self.layer.rope
        assert isinstance(layer.mixer, Attention) and rope is not None
        assert isinstance(layer.ffn, MLP | Experts)
        with jax.named_scope("embed"):
            embed = target.embed if self.embed is None else self.embed
            x = embed(tokens, step).astype(hidden.dtype)
        normed = self.hidden_norm(hidden)
        rotary = Rotary.at(rope, positions, step.max_len or tokens.shape[-1])
        with jax.named_scope("attention"):
            pair = jnp.concatenate([layer.around_mixer.taken(x, step), normed], axis=-1)
            attended, kv = layer.mixer(pair, step, rotary, kv, (Place(0, np.int32(0)),))
        x = (normed if self.config.norm_before_residual else hidden) + attended
        with jax.named_scope("mlp"):
            return x + layer.ffn(layer.around_ffn.taken(x, step), step), kv

    def logits(self, target: Forward, x: Array, step: StepContext) -> Array:
        """Return f32 logits [..., V] over the model's vocabulary for what the layer gave, -inf for
        tokens that the head cannot guess; on a mesh the device's share of them.
        """
        x = self.norm(x)
        if self.head is None:
            return target.logits(x, step)
        with jax.named_scope("head"):
            logits = self.head(x, step, jnp.float32)
        if not self.config.draft_tokens:
            return logits
        tokens_W = np.frombuffer(self.config.draft_tokens, np.int32)
        logits = step.gathered(logits, len(tokens_W))
        # A gather: XLA:CPU scatters one value at a time.
        place_V = np.full(self.vocab_size, len(tokens_W), np.int32)
        place_V[tokens_W] = np.arange(len(tokens_W))
        none = jnp.full((*logits.shape[:-1], 1), -jnp.inf, jnp.float32)
        place_V = step.share(jnp.asarray(place_V))
        return jnp.take(jnp.concatenate([logits, none], axis=-1), place_V, axis=-1)


def bind_eagle(config: ModelConfig, tree: Mapping[str, Any]) -> EagleHead:
    """Return the head whose parameters are the leaves of a canonical tree; no array is copied."""
    head = config.draft_head
    assert isinstance(head, HeadConfig)
    weights = parameters(config, to_tree(tree))
    norm = RMSNorm.of(config.norm, weights["norm.scale"])
    hidden_norm = RMSNorm.of(config.norm, weights["layers.0.hidden_norm.scale"])
    assert norm is not None and hidden_norm is not None
    (layer,) = bind_layers(config, weights)
    return EagleHead(
        config=head,
        vocab_size=config.vocab_size,
        fc=Linear.of(weights["fc.weight"]),
        embed=Embedding.of(weights["embed.weight"]) if head.has_embed else None,
        hidden_norm=hidden_norm,
        layer=layer,
        norm=norm,
        head=Linear.of(weights["lm_head.weight"]) if head.has_lm_head else None,
    )
