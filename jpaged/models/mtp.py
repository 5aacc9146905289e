"""MTP heads: the layer that a checkpoint has to predict one token more (arXiv:2412.19437, 2.2).

An entry p of a sequence joins the embedding of token p + 1 with the hidden state of position p that
the model gives to its output head, each normed, and runs a layer of the family on it. What that
gives, normed, goes to the model's output head to guess token p + 2, and takes the place of the
hidden state of position p + 1 where that is to be guessed from.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.combinations import Facts, check_combination
from jpaged.errors import UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.draft_head import MTPConfig
from jpaged.models.families import FAMILIES
from jpaged.models.forward import Forward, bind_layers
from jpaged.models.head import DraftHead
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import Stream
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.params import parameters
from jpaged.models.trees import to_tree


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Return the config of the MTP head of a model: a layer as its last one of attention, with an
    indexer of its own where the model's layers choose what they attend to. UnsupportedError for
    families whose heads are not read.
    """
    check_combination(Facts(model=target))
    if FAMILIES[target.family].mtp is None:
        built = ", ".join(name for name, family in FAMILIES.items() if family.mtp is not None)
        raise UnsupportedError(
            f"speculative: method='mtp': no MTP head of {target.family} is read (those of {built} "
            "are)"
        )
    attention = AttentionConfig | LatentConfig
    layer = [layer for layer in target.layers if isinstance(layer.mixer, attention)][-1]
    if isinstance(layer.mixer, LatentConfig) and layer.mixer.chosen is not None:
        mixers = [layer.mixer for layer in target.layers if isinstance(layer.mixer, LatentConfig)]
        mixer = [mixer for mixer in mixers if mixer.indexer is not None][-1]  # no other has chosen
        layer = dataclasses.replace(layer, mixer=mixer)
    head = MTPConfig(target_hidden_size=target.hidden_size, target_layers=target.num_layers)
    changes: dict[str, Any] = {"draft_head": head, "vision": None, "eos_token_ids": ()}
    return dataclasses.replace(target, layers=[layer], **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPHead(DraftHead):
    """The modules of an MTP head, a pytree of their arrays. `bind_mtp` makes it. It has the methods
    of EagleHead.
    """

    embed_norm: RMSNorm
    hidden_norm: RMSNorm

    def joined(self, states: list[Array], step: StepContext) -> Array:
        """Return the one hidden state [..., T, E] that it takes of the model."""
        (hidden,) = states
        return hidden

    def __call__(
        self,
        target: Forward,
        tokens: Array,
        positions: Array,
        hidden: Array,
        kv: KVView,
        step: StepContext,
    ) -> tuple[Array, KVView]:
        """Return what it gives [T, E] for entries at these positions, normed, and the view with
        their keys and values.

        tokens: the one after each position. hidden: the hidden state of each position, [T, E].
        """
        with jax.named_scope("embed"):
            embedded = self.embed_norm(target.embed(tokens, step).astype(hidden.dtype))
        pair = jnp.concatenate([embedded, self.hidden_norm(hidden)], axis=-1)
        x = self.through_fc(pair, step)
        rotary, rope = None, self.layer.rope
        if rope is not None:
            rotary = Rotary.at(rope, positions, step.max_len or tokens.shape[-1])
        stream, kv = self.layer(Stream(x), step, rotary, kv, (Place(0, np.int32(0)),))
        return self.norm(stream.sum), kv

    def logits(self, target: Forward, x: Array, step: StepContext) -> Array:
        """Return f32 logits [..., V] for what the head gave."""
        return target.logits(x, step)


def bind_mtp(config: ModelConfig, tree: Mapping[str, Any]) -> MTPHead:
    """Return the head whose parameters are the leaves of a canonical tree; no array is copied."""
    weights = parameters(config, to_tree(tree))

    def norm(name: str) -> RMSNorm:
        made = RMSNorm.of(config.norm, weights[f"{name}.scale"])
        assert made is not None
        return made

    (layer,) = bind_layers(config, weights)
    return MTPHead(
        embed_norm=norm("embed_norm"),
        hidden_norm=norm("hidden_norm"),
        fc=Linear.of(weights["fc.weight"]),
        layer=layer,
        norm=norm("norm"),
    )
