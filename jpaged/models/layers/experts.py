"""The feed-forward part of a mixture of experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import Linear, Products
from jpaged.models.layers.mlp import MLP, Activation, gated
from jpaged.models.params import MeshAxis
from jpaged.models.quantized import QuantizedWeight, is_quantized
from kernels_pallas.experts import tiles
from kernels_pallas.experts.interface import ExpertWeights, Glu


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Each token through the few experts that its router scores highest (arXiv:1701.06538), and
    through one that is shared (arXiv:2401.06066), where there is one.

    down_bias: [X, E] or None. shared, shared_gate: or None. per_token: experts of a token.
    is_normed: their weights sum up to 1. sum_over: the mesh axis whose devices each hold a share of
    every expert's width; None is one device. sums_shared: the shared one is split too, and summed
    with the others.
    """

    router: Linear
    weights: ExpertWeights
    down_bias: Array | None
    shared: MLP | None
    shared_gate: Linear | None
    per_token: int = dataclasses.field(metadata={"static": True})
    is_normed: bool = dataclasses.field(metadata={"static": True})
    activation: Activation = dataclasses.field(metadata={"static": True})
    sum_over: MeshAxis | None = dataclasses.field(metadata={"static": True})
    sums_shared: bool = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        """x [..., E]."""
        serving, rows = self.router.serving, x.reshape(-1, x.shape[-1])
        with jax.named_scope("router"):
            chosen, weight = self._route(rows)
        if serving.num_rows is not None:  # padding chooses none
            is_real = jnp.arange(rows.shape[0]) < serving.num_rows
            chosen = jnp.where(is_real[:, None], chosen, self.weights.gate_up.shape[0])
        glu = functools.partial(gated, self.activation)
        experts = every_expert if serving.experts is None else serving.experts.experts
        if self.weights.adapters is not None:  # the others know of none
            experts = tiles.experts
        weights = self.weights
        if serving.products is not None and x.dtype == jnp.bfloat16:
            weights = _multiplied_by(serving.products, weights)
        with jax.named_scope("experts"):
            y = experts(rows, chosen, weight, weights, glu)
        shared = self._shared(rows)
        if self.sums_shared:
            y, shared = y + shared, 0.0
        if self.sum_over is not None:
            y = jax.lax.psum(y, self.sum_over)
        if self.down_bias is not None:  # once, whoever holds which share
            for choice in range(self.per_token):  # in one order, whatever the number of rows
                bias = jnp.take(self.down_bias, chosen[:, choice], 0, mode="fill", fill_value=0)
                y = y + weight[:, choice, None] * bias.astype(jnp.float32)
        return (y + shared).astype(x.dtype).reshape(x.shape)

    def _shared(self, x: Array) -> Array | float:
        if self.shared is None or self.shared_gate is None:
            return 0.0
        with jax.named_scope("shared_expert"):
            gate = jax.nn.sigmoid(self.shared_gate(x, jnp.float32))
            return gate * self.shared(x, jnp.float32)

    def _route(self, x: Array) -> tuple[Array, Array]:
        """Of each row its experts and their weights, in f32."""
        scores = jax.nn.softmax(self.router(x, jnp.float32), axis=-1)
        weight, chosen = jax.lax.top_k(scores, self.per_token)
        if self.is_normed:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        return chosen, weight


def _multiplied_by(products: Products, weights: ExpertWeights) -> ExpertWeights:
    """With those in forms that it knows multiplied by a module, one by one."""

    def one(weight: Any) -> Any:
        if not is_quantized(weight) or weight.form == "mxfp4":
            return weight
        values = weight.values
        if weight.form == "fp8":  # XLA:CPU would take an expert out of it a number at a time
            values = jax.lax.bitcast_convert_type(values, jnp.uint8)
        return dataclasses.replace(weight, values=values, products=products)

    return jax.tree.map(one, weights, is_leaf=is_quantized)


def every_expert(
    x_TE: Array, chosen_TA: Array, weight_TA: Array, weights: ExpertWeights, glu: Glu
) -> Array:
    """The definition: every expert for every token, unwanted results times 0; see
    kernels_pallas.experts. It can be differentiated.
    """
    _, _, width, embed = weights.gate_up.shape

    def dot(x: Array, weight: Array | QuantizedWeight, outputs: int) -> Array:
        if isinstance(weight, QuantizedWeight):
            return weight.of_one().matrix().linear(x)
        weight, contract = weight.reshape(outputs, -1), (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)

    @jax.checkpoint
    def add(y_TE: Array, expert: tuple[Array, ExpertWeights]) -> tuple[Array, None]:
        at, own = expert
        h = dot(x_TE, own.gate_up, 2 * width)
        if own.gate_up_bias is not None:
            h = h + own.gate_up_bias.reshape(1, -1).astype(jnp.float32)
        gate, up = jnp.split(h, 2, axis=-1)
        share_T = jnp.sum(jnp.where(chosen_TA == at, weight_TA, 0.0), axis=1)
        y = dot(glu(gate, up).astype(x_TE.dtype), own.down, embed)
        return y_TE + share_T[:, None] * y, None

    every = (jnp.arange(weights.down.shape[0]), weights)
    y_TE, _ = jax.lax.scan(add, jnp.zeros(x_TE.shape, jnp.float32), every)
    return y_TE
