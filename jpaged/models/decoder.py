"""`Decoder`: the model as a flax.nnx module, for trainers that want one."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from jpaged.models.forward import Forward, bind
from jpaged.models.kv_view import KVView
from jpaged.models.params import initial_tree
from jpaged.models.trees import to_tree


class Decoder(nnx.Module):
    """The language model, holding the canonical tree of jpaged.models.params as nnx Params.

    tree: the arrays (or tracers) to hold; without it, untrained weights from rngs.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: DTypeLike = jnp.float32,
        tree: Mapping[str, Any] | None = None,
    ):
        if tree is None:
            assert rngs is not None, "untrained weights need rngs"
            tree = initial_tree(config, rngs, dtype)
        held: Any = to_tree(tree)
        self.config = config
        self.embed = _hold(held["embed"])
        if "per_layer" in held:
            self.per_layer = _hold(held["per_layer"])
        layers = held["layers"]
        self.layers = nnx.List([_hold(layers[str(i)]) for i in range(config.num_layers)])
        self.norm = _hold(held["norm"])
        for name in ("lm_head", "score", "dense"):
            if name in held:
                setattr(self, name, _hold(held[name]))

    def __call__(
        self, tokens: Array, positions: Array | None = None, kv: KVView | None = None
    ) -> tuple[Array, KVView]:
        """Final-norm hidden states [..., T, E] of int tokens [..., T], and the view with their keys
        and values.
        """
        return self._forward()(tokens, positions, kv)

    def logits(self, x: Array) -> Array:
        """f32 logits [..., V] of final hidden states [..., E]; [..., Y] of a classifier."""
        return self._forward().logits(x)

    def _forward(self) -> Forward:
        return bind(self.config, to_tree(self))


def _hold(tree: Any) -> Any:
    """nnx's own containers of a tree, with a Param for each array."""
    if isinstance(tree, Mapping):
        return nnx.Dict({name: _hold(child) for name, child in tree.items()})
    return nnx.Param(tree)
