"""One dense decoder for every family: it trains (dense, causal) and serves (paged).

`Decoder` takes tokens [..., T] and attends causally within them: differentiable, for training and
tests. With a KVView of a step (see models/kv_view.py) it takes one packed row of tokens [T], whose
keys and values are kept as they attend. Everything else is the same code.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import DenseKV, KVView, kv_places
from jpaged.models.layers.attention import Attention
from jpaged.models.layers.embedding import embed
from jpaged.models.layers.linear import Linear, Serving
from jpaged.models.layers.mlp import MLP
from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.params import ParamSpec, initial_tree, nest, param_table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Pre-norm transformer layer."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: Array, rotary: Rotary, kv: KVView, index: Any) -> tuple[Array, KVView]:
        """x [..., E]; index: this layer's place among those of its KV group."""
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), rotary, kv, index)
        x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_norm(x)), kv


@dataclasses.dataclass(frozen=True)
class _Weights:
    """A node of the canonical tree, the specs of what is in it, and the modules made of them."""

    config: ModelConfig
    serving: Serving
    specs: Mapping[str, Any]
    tree: Mapping[str, Any]

    def at(self, name: str) -> "_Weights":
        """A node below."""
        return dataclasses.replace(self, specs=self.specs[name], tree=self.tree[name])

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(scale=self.tree[name]["scale"], eps=self.config.rms_norm_eps)

    def linear(self, name: str) -> Linear:
        """The product with a weight, and with its `_bias` if there is one."""
        spec: ParamSpec = self.specs[name]
        outputs, inputs = spec.sides
        split = spec.split_letter(self.config, self.serving.axis_size)
        return Linear(
            weight=self.tree[name],
            bias=self.tree.get(f"{name}_bias"),
            serving=self.serving,
            num_outputs=len(outputs),
            sum_over=self.serving.tensor_axis if split in inputs else None,
        )

    def layer(self, group: int) -> Layer:
        """This node as a layer."""
        attention, mlp, has_norm = self.at("attention"), self.at("mlp"), self.config.qk_norm
        return Layer(
            input_norm=self.norm("input_norm"),
            attention=Attention(
                qkv=attention.linear("qkv"),
                q_norm=attention.norm("q_norm") if has_norm else None,
                k_norm=attention.norm("k_norm") if has_norm else None,
                out=attention.linear("out"),
                group=group,
            ),
            post_norm=self.norm("post_norm"),
            mlp=MLP(gate_up=mlp.linear("gate_up"), down=mlp.linear("down")),
        )


class Decoder(nnx.Module):
    """The language model, holding the canonical tree of jpaged.models.params as nnx Params.

    tree: the arrays (or tracers) to hold; without it, untrained weights from rngs. serving: of the
    step that runs it. Its modules are made of these as it is called.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: DTypeLike = jnp.float32,
        tree: Mapping[str, Any] | None = None,
        serving: Serving | None = None,
    ):
        if tree is None:
            assert rngs is not None, "untrained weights need rngs"
            tree = initial_tree(config, rngs, dtype)
        held: Any = to_tree(tree)
        self.config = config
        self.embed = _hold(held["embed"])
        layers = held["layers"]
        self.layers = nnx.List([_hold(layers[str(i)]) for i in range(config.num_layers)])
        self.norm = _hold(held["norm"])
        if not config.tie_word_embeddings:
            self.lm_head = _hold(held["lm_head"])
        if serving is not None:
            self.serving = nnx.data(serving)

    def __call__(
        self, tokens: Array, positions: Array | None = None, kv: KVView | None = None
    ) -> tuple[Array, KVView]:
        """Final-norm hidden states [..., T, E] of int tokens [..., T], and the view with their keys
        and values.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        view: KVView = DenseKV.of(self.config) if kv is None else kv
        rotary = Rotary.at(self.config, positions)
        weights = self._weights()
        with jax.named_scope("embed"):
            x = embed(weights.tree["embed"]["weight"], tokens, weights.serving.tensor_axis)
        for i, (group, index) in enumerate(kv_places(self.config)):
            layer = weights.at("layers").at(str(i)).layer(group)
            x, view = _run_layer(layer, x, rotary, view, np.int32(index))
        return weights.norm("norm")(x), view

    def logits(self, x: Array) -> Array:
        """f32 logits [..., V] of final hidden states [..., E]."""
        head = self._weights().at("embed" if self.config.tie_word_embeddings else "lm_head")
        with jax.named_scope("head"):
            return head.linear("weight")(x, jnp.float32)

    def _weights(self) -> _Weights:
        serving = getattr(self, "serving", Serving())
        return _Weights(self.config, serving, nest(param_table(self.config)), to_tree(self))


@jax.jit
def _run_layer(
    layer: Layer, x: Array, rotary: Rotary, kv: KVView, index: Any
) -> tuple[Array, KVView]:
    # Inside another jit: layers of one form are traced and lowered once, not once each. XLA inlines
    # the calls.
    return layer(x, rotary, kv, index)


def bind(config: ModelConfig, tree: Mapping[str, Any], serving: Serving | None = None) -> Decoder:
    """The Decoder whose parameters are the arrays (or tracers) of a canonical tree; no array is
    copied.

    serving: what a step says of its products; None in training.
    """
    return Decoder(config, tree=tree, serving=serving)


def to_tree(model: Any) -> Any:
    """The canonical tree (nested dicts of bare arrays, keyed by strings) of a Decoder, an nnx.State
    or a mapping.
    """
    if isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    if isinstance(model, list | tuple):
        model = dict(enumerate(model))
    if isinstance(model, Mapping):
        return {str(key): to_tree(value) for key, value in model.items()}
    return model.get_value() if isinstance(model, nnx.Variable) else model


def _hold(tree: Any) -> Any:
    """nnx's own containers of a tree, with a Param for each array."""
    if isinstance(tree, Mapping):
        return nnx.Dict({name: _hold(child) for name, child in tree.items()})
    return nnx.Param(tree)
