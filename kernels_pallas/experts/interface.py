"""The arguments of every implementation of a mixture's experts."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

# Gate and up, f32 [..., I] each, to the input of down; without gates up, and an empty [..., 0].
Glu = Callable[[Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The weights of all experts: gate_up [X, 2, I, E], its bias [X, 2, I] or None, down [X, E, I].
    Experts without gates have up alone: [X, 1, I, E].

    A weight is an array, or an object in its place that has a `shape` and, as `weight[expert]`, one
    expert's weight, whose `matrix().linear(x)` is the product with rows x in f32, [rows, outputs].
    `form.name` says how its `values`, `scales` and `zeros` (or None) are stored.

    adapters: None, or two additions, to the products of gate_up and of down, either of which may be
    None. `addition.of_expert(expert, tokens)(x, product)` is what rows x of these tokens add, f32.
    Only `tiles` supports adapters.
    """

    gate_up: Any
    gate_up_bias: Array | None
    down: Any
    adapters: tuple[Any, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes on one device that decide whether an implementation can run.

    is_plain: weights are arrays.
    """

    dtype: Any
    hidden_size: int
    expert_size: int
    is_plain: bool = True


class Sorted(NamedTuple):
    """The P pairs of token and choice, sorted by expert.

    pair_P: index of the pair. token_P: its token. sizes_X: number of pairs of each expert. Choices
    past the last expert are padding: they come last and are not counted.
    """

    pair_P: Array
    token_P: Array
    sizes_X: Array


def sort(chosen_TA: Array, num_experts: int) -> Sorted:
    """Sort pairs by expert; the pairs of one expert stay in the order of their tokens."""
    flat_P = chosen_TA.reshape(-1)
    pair_P = jnp.argsort(flat_P, stable=True)
    sizes_X = jnp.zeros(num_experts, jnp.int32).at[flat_P].add(1, mode="drop")
    return Sorted(pair_P, pair_P // chosen_TA.shape[1], sizes_X)


def grouped_experts(
    product: Callable[[Array, Array, Array], Array],
    x_TE: Array,
    chosen_TA: Array,
    weight_TA: Array,
    weights: ExpertWeights,
    glu: Glu,
) -> Array:
    """Compute `experts` by a grouped product.

    product(rows [P, in], weights [X, ..., in], sizes [X]) -> [P, out]: rows are sorted by expert,
    sizes sum up to P, and all outputs are one axis.
    """
    num_experts, _, width, embed = weights.gate_up.shape
    # Every row needs an expert: padding goes to the last one with a weight of 0.
    is_real_TA = chosen_TA < num_experts
    weight_TA = jnp.where(is_real_TA, weight_TA, 0.0)
    by_expert = sort(jnp.minimum(chosen_TA, num_experts - 1), num_experts)
    rows_PE = x_TE[by_expert.token_P]
    h = product(rows_PE, weights.gate_up, by_expert.sizes_X)
    h = h.astype(jnp.float32)
    if weights.gate_up_bias is not None:
        expert_P = jnp.minimum(chosen_TA, num_experts - 1).reshape(-1)[by_expert.pair_P]
        bias = weights.gate_up_bias.reshape(num_experts, -1).astype(jnp.float32)
        h = h + bias[expert_P]
    h = glu(h[:, :width], h[:, width:]).astype(x_TE.dtype)
    y_PE = product(h, weights.down, by_expert.sizes_X).astype(jnp.float32)
    # Back to the order of pairs, so that a token's choices are added up in a fixed order.
    y_PE = jnp.zeros_like(y_PE).at[by_expert.pair_P].set(y_PE)
    y_TAE = y_PE.reshape(*chosen_TA.shape, embed) * weight_TA[:, :, None]
    return jnp.sum(y_TAE, axis=1)
