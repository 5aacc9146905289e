"""EAGLE-3 heads (arXiv:2503.01840): one layer that guesses tokens by a model's hidden states.

An entry p of a sequence joins the model's hidden states of position p, of several layers and made
one by `fc`, with the embedding of token p + 1, and guesses token p + 2. To guess further, what the
layer gave for entry p takes the place of the hidden states of position p + 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.errors import ConfigError, UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.forward import Forward, Weights
from jpaged.models.kv_view import KVView
from jpaged.models.layers.embedding import embed
from jpaged.models.layers.linear import Serving
from jpaged.models.layers.rope import Rotary
from jpaged.models.params import nest, param_table

STATES = 3  # hidden states of a position that `fc` joins


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(ModelConfig):
    """The architecture of a head, and of the model that it is for what it must know.

    target_hidden_size: of the model. aux_layers: those whose inputs it takes, one past the last
    being what comes out of that; () is the published default: 2, half of the layers, all but 3.
    draft_vocab_size: tokens that it can guess, draft_tokens: their ids as int32 bytes, b"" where
    they are all that the model has. own_embed, own_lm_head: those of the model serve where it has
    none. norm_before_residual: what attention is added to is normed.
    """

    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] = ()
    draft_tokens: bytes = dataclasses.field(default=b"", repr=False)
    own_embed: bool = False
    own_lm_head: bool = True
    norm_before_residual: bool = False
    is_model, is_head = False, True

    @property
    def has_embed(self) -> bool:
        return self.own_embed

    @property
    def has_lm_head(self) -> bool:
        return False

    @property
    def has_draft_lm_head(self) -> bool:
        return self.own_lm_head

    @property
    def more_axes(self) -> dict[str, int]:
        return {"A": STATES * self.target_hidden_size, "W": self.draft_vocab_size}

    def to_hf(self) -> dict[str, Any]:
        raise UnsupportedError("the config.json of an EAGLE-3 head is not written")


def fitted(head: HeadConfig, target: ModelConfig) -> HeadConfig:
    """The head with the layers that it takes of a model; ConfigError where it is not for that."""
    if head.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"EAGLE-3 head for target_hidden_size={head.target_hidden_size}: the model has "
            f"hidden_size={target.hidden_size}"
        )
    if head.vocab_size != target.vocab_size:
        raise ConfigError(
            f"EAGLE-3 head for vocab_size={head.vocab_size}: the model has {target.vocab_size}"
        )
    if not (head.own_embed and head.own_lm_head) and head.hidden_size != target.hidden_size:
        raise ConfigError(
            f"EAGLE-3 head of hidden_size={head.hidden_size} without an embedding or a head of its "
            f"own: those of the model are of hidden_size={target.hidden_size}"
        )
    if target.embedding_scale != 1.0:
        raise UnsupportedError(
            f"an EAGLE-3 head for {target.family}, which scales its embeddings: use 'draft'"
        )
    layers = head.aux_layers or (2, target.num_layers // 2, target.num_layers - 3)
    if len(layers) != STATES or not all(0 <= i <= target.num_layers for i in layers):
        raise ConfigError(
            f"EAGLE-3 head: hidden states of layers {layers}: must be {STATES} of the model's "
            f"{target.num_layers} (eagle_aux_hidden_state_layer_ids of its config.json)"
        )
    return dataclasses.replace(head, aux_layers=tuple(layers))


@dataclasses.dataclass(frozen=True)
class Head:
    """The head of a canonical tree, beside the model that it guesses for."""

    config: HeadConfig
    tree: Any
    target: Forward
    serving: Serving

    def joined(self, states: list[Array]) -> Array:
        """One hidden state [..., T, E] of those of the model's layers."""
        with jax.named_scope("fc"):
            return self._weights().at("fc").linear("weight")(jnp.concatenate(states, axis=-1))

    def __call__(
        self, tokens: Array, positions: Array, hidden: Array, kv: KVView
    ) -> tuple[Array, KVView]:
        """What the layer gives [T, E] for entries at these positions, before the norm, and the view
        with their keys and values. tokens: each the one after its position. hidden: of the
        position, [T, E].
        """
        config, weights = self.config, self._weights()
        tree = self.tree if config.own_embed else self.target.tree
        with jax.named_scope("embed"):
            x = embed(tree["embed"]["weight"], tokens, self.serving, None).astype(hidden.dtype)
        own, length = weights.at("layers").at("0"), self.serving.max_len or tokens.shape[-1]
        layer, norm, hidden_norm = own.layer(0, 0), own.norm("input_norm"), own.norm("hidden_norm")
        assert norm is not None and hidden_norm is not None and layer.post_norm is not None
        normed = hidden_norm(hidden)
        rotary = Rotary.at(config, positions, "global", length)
        with jax.named_scope("attention"):
            pair = jnp.concatenate([norm(x), normed], axis=-1)
            attended, kv = layer.attention(pair, rotary, kv, np.int32(0))
        x = (normed if config.norm_before_residual else hidden) + attended
        with jax.named_scope("mlp"):
            return x + layer.mlp(layer.post_norm(x)), kv

    def logits(self, x: Array) -> Array:
        """f32 logits [..., V] of the model's whole vocabulary, of what the layer gave; -inf for
        tokens that it cannot guess.
        """
        weights = self._weights()
        norm = weights.norm("norm")
        assert norm is not None
        if not self.config.own_lm_head:
            return self.target.logits(norm(x))
        with jax.named_scope("head"):
            logits = weights.at("lm_head").linear("weight")(norm(x), jnp.float32)
        if not self.config.draft_tokens:
            return logits
        tokens_W = np.frombuffer(self.config.draft_tokens, np.int32)
        # A gather: XLA:CPU scatters one value at a time.
        place_V = np.full(self.config.vocab_size, len(tokens_W), np.int32)
        place_V[tokens_W] = np.arange(len(tokens_W))
        none = jnp.full((*logits.shape[:-1], 1), -jnp.inf, jnp.float32)
        return jnp.take(jnp.concatenate([logits, none], axis=-1), place_V, axis=-1)

    def _weights(self) -> Weights:
        specs = nest(param_table(self.config))
        return Weights(self.config, self.serving, specs, self.tree)
