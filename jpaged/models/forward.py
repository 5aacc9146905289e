"""One dense decoder for every family: it trains (dense, causal) and serves (paged).

`Forward` takes tokens [..., T] and attends causally within them: differentiable, for training and
tests. With a KVView of a step (see models/kv_view.py) it takes one packed row of tokens [T], whose
keys and values are kept as they attend. Everything else is the same code.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import DenseKV, KVView, kv_places
from jpaged.models.layers.attention import Attention
from jpaged.models.layers.embedding import embed
from jpaged.models.layers.experts import Experts
from jpaged.models.layers.linear import Linear, Serving
from jpaged.models.layers.low_rank import AdapterRows, ExpertLowRank, LowRank
from jpaged.models.layers.mlp import MLP
from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.params import ParamSpec, nest, param_table
from jpaged.models.trees import to_tree
from kernels_pallas.experts.interface import ExpertWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Transformer layer, with norms before attention and MLP, after them, or both; None where
    there is none.
    """

    input_norm: RMSNorm | None
    attention: Attention
    attention_post_norm: RMSNorm | None
    post_norm: RMSNorm | None
    mlp: MLP | Experts
    mlp_post_norm: RMSNorm | None
    residual_multiplier: float = dataclasses.field(metadata={"static": True})

    def __call__(
        self, x: Array, rotary: Rotary | None, kv: KVView, index: Any
    ) -> tuple[Array, KVView]:
        """x [..., E]; index: this layer's place among those of its KV group."""
        with jax.named_scope("attention"):
            attended, kv = self.attention(_normed(self.input_norm, x), rotary, kv, index)
            x = self._add(x, _normed(self.attention_post_norm, attended))
        with jax.named_scope("mlp"):
            y = self.mlp(_normed(self.post_norm, x))
            return self._add(x, _normed(self.mlp_post_norm, y)), kv

    def _add(self, x: Array, y: Array) -> Array:
        return x + _scaled(y, self.residual_multiplier)


def _normed(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _scaled(x: Array, factor: float) -> Array:
    """x times a number, which is rounded to its dtype first."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


@dataclasses.dataclass(frozen=True)
class Weights:
    """A node of the canonical tree, the specs of what is in it, and the modules made of them.

    adapters: the tables of what is in it.
    """

    config: ModelConfig
    serving: Serving
    specs: Mapping[str, Any]
    tree: Mapping[str, Any]
    adapters: AdapterRows | None = None

    def at(self, name: str) -> "Weights":
        """A node below."""
        below = {"specs": self.specs[name], "tree": self.tree[name]}
        return dataclasses.replace(self, **below, adapters=self.adapters_at(name))

    def adapters_at(self, name: str) -> AdapterRows | None:
        """The tables of a node below, or None."""
        if self.adapters is None or name not in self.adapters.tables:
            return None
        return dataclasses.replace(self.adapters, tables=self.adapters.tables[name])

    def norm(self, name: str) -> RMSNorm | None:
        """A norm, if this model has it."""
        if name not in self.tree:
            return None
        spec: ParamSpec = self.specs[name]["scale"]
        is_split = spec.split_letter(self.config, self.serving.axis_size) is not None
        return RMSNorm(
            scale=self.tree[name]["scale"],
            eps=self.config.rms_norm_eps,
            has_offset=self.config.norm_offset,
            in_f32=self.config.norm_in_f32,
            mean_over=self.serving.tensor_axis if is_split else None,
        )

    def linear(self, name: str) -> Linear:
        """The product with a weight, and with its `_bias` if there is one."""
        spec: ParamSpec = self.specs[name]
        outputs, inputs = spec.sides
        split = spec.split_letter(self.config, self.serving.axis_size)
        return Linear(
            weight=self.tree[name],
            bias=self.tree.get(f"{name}_bias"),
            serving=self.serving,
            adapters=self.low_rank(name),
            num_outputs=len(outputs),
            sum_over=self.serving.tensor_axis if split in inputs else None,
        )

    def low_rank(self, name: str, kind: Any = LowRank) -> Any:
        """What adapters add to a weight, or None."""
        rows = self.adapters_at(name)
        if rows is None:
            return None
        return kind(**rows.tables, slot_T=rows.slot_T, joined=self.specs[name].joined)

    def mlp(self, *, is_partial: bool = False) -> MLP:
        """This node as an MLP. is_partial: what devices give is summed by the caller."""
        down = self.linear("down")
        if is_partial:
            down = dataclasses.replace(down, sum_over=None)
        return MLP(gate_up=self.linear("gate_up"), down=down, activation=self.config.activation)

    def experts(self) -> Experts:
        """This node as a mixture."""
        own, config, serving = self.at("experts"), self.config, self.serving
        names = ["experts", *(["shared"] if "shared" in self.tree else [])]
        split = [
            self.specs[name]["down"].split_letter(config, serving.axis_size) is not None
            for name in names
        ]
        sums_shared = split == [True, True]
        adapters = tuple(own.low_rank(name, ExpertLowRank) for name in ("gate_up", "down"))
        return Experts(
            router=self.linear("router"),
            weights=ExpertWeights(
                gate_up=own.tree["gate_up"],
                gate_up_bias=own.tree.get("gate_up_bias"),
                down=own.tree["down"],
                adapters=None if adapters == (None, None) else adapters,
            ),
            down_bias=own.tree.get("down_bias"),
            shared=self.at("shared").mlp(is_partial=sums_shared) if split[1:] else None,
            shared_gate=self.linear("shared_gate") if split[1:] else None,
            per_token=config.experts_per_token,
            is_normed=config.norm_topk_prob,
            activation=config.activation,
            sum_over=serving.tensor_axis if split[0] else None,
            sums_shared=sums_shared,
        )

    def layer(self, index: int, group: int) -> Layer:
        """This node as a layer. index: of the layer in the model; group: of its keys and values."""
        attention, config = self.at("attention"), self.config
        return Layer(
            input_norm=self.norm("input_norm"),
            attention=Attention(
                qkv=attention.linear("qkv"),
                q_norm=attention.norm("q_norm"),
                k_norm=attention.norm("k_norm"),
                out=attention.linear("out"),
                sinks=attention.tree.get("sinks"),
                group=group,
                options=config.attention_options(index),
            ),
            attention_post_norm=self.norm("attention_post_norm"),
            post_norm=self.norm("post_norm"),
            mlp=self.at("mlp").experts() if "router" in self.specs["mlp"] else self.at("mlp").mlp(),
            mlp_post_norm=self.norm("mlp_post_norm"),
            residual_multiplier=config.residual_multiplier,
        )


@dataclasses.dataclass(frozen=True)
class Forward:
    """The language model of a canonical tree (see jpaged.models.params), of arrays or tracers.

    serving: what a step says of its products. The modules are made of these as it is called.
    """

    config: ModelConfig
    tree: Mapping[str, Any]
    serving: Serving = dataclasses.field(default_factory=Serving)

    def __call__(
        self, tokens: Array, positions: Array | None = None, kv: KVView | None = None
    ) -> tuple[Array, KVView]:
        """Final-norm hidden states [..., T, E] of int tokens [..., T], and the view with their keys
        and values.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        x, view, _ = self.tapped(tokens, positions, DenseKV() if kv is None else kv)
        return x, view

    def tapped(
        self, tokens: Array, positions: Array, kv: KVView, taps: tuple[int, ...] = ()
    ) -> tuple[Array, KVView, list[Array]]:
        """So, and the hidden states [..., T, E] that go into these layers; one past the last layer
        is what comes out of it, before the final norm.
        """
        view, tapped = kv, dict[int, Array]()
        weights = self.weights()
        length = weights.serving.max_len or tokens.shape[-1]
        kinds: list[Any] = [self.config.rope_kind(i) for i in range(self.config.num_layers)]
        rotaries = {
            kind: None if kind is None else Rotary.at(self.config, positions, kind, length)
            for kind in dict.fromkeys(kinds)
        }
        with jax.named_scope("embed"):
            table = weights.at("embed")
            how = (table.serving, table.low_rank("weight"))
            x = embed(table.tree["weight"], tokens, *how)
            x = _scaled(x, self.config.embedding_scale)
        for i, (group, index) in enumerate(kv_places(self.config)):
            tapped |= {i: x} if i in taps else {}
            layer = weights.at("layers").at(str(i)).layer(i, group)
            x, view = _run_layer(layer, x, rotaries[kinds[i]], view, np.int32(index))
        tapped[len(kinds)] = x
        return _normed(weights.norm("norm"), x), view, [tapped[i] for i in taps]

    def logits(self, x: Array) -> Array:
        """f32 logits [..., V] of final hidden states [..., E]."""
        weights = self.weights()
        head = weights.at("embed" if self.config.tie_word_embeddings else "lm_head")
        # A tied head has adapters of its own.
        head = dataclasses.replace(head, adapters=weights.adapters_at("lm_head"))
        with jax.named_scope("head"):
            logits = head.linear("weight")(x, jnp.float32)
            if self.config.logits_scaling != 1.0:
                logits = logits / jnp.float32(self.config.logits_scaling)
            if (cap := self.config.final_logit_softcapping) is not None:
                logits = jnp.float32(cap) * jnp.tanh(logits / jnp.float32(cap))
            return logits

    def weights(self) -> Weights:
        # A layer takes its own adapters, not those of all.
        plain = dataclasses.replace(self.serving, adapters=None)
        specs = nest(param_table(self.config))
        return Weights(self.config, plain, specs, self.tree, self.serving.adapters)


@jax.jit
def _run_layer(
    layer: Layer, x: Array, rotary: Rotary | None, kv: KVView, index: Any
) -> tuple[Array, KVView]:
    # Inside another jit: layers of one form are traced and lowered once, not once each. XLA inlines
    # the calls.
    return layer(x, rotary, kv, index)


def bind(config: ModelConfig, tree: Mapping[str, Any], serving: Serving | None = None) -> Forward:
    """The model whose parameters are the arrays (or tracers) of a tree; no array is copied.

    serving: what a step says of its products; None in training.
    """
    return Forward(config, to_tree(tree), Serving() if serving is None else serving)
