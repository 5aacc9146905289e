"""What every implementation of a mixture's experts is asked and told."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Glu = Callable[[Array, Array], Array]  # gate and up, f32 [..., I] each, to what goes down


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """As they lie in memory: gate_up [X, 2, I, E], its bias [X, 2, I] or None, down [X, E, I].
    Weights are arrays, or of what stands for one: with a shape, an expert by its index, and of that
    matrix().linear(x), its product in f32 with all its outputs as one axis.

    adapters: None, or what tokens add to the products of gate_up and of down, None where nothing:
    of_expert(expert, tokens)(x, product) is f32 of rows x, which are of these tokens. `tiles` alone
    takes them.
    """

    gate_up: Any
    gate_up_bias: Array | None
    down: Any
    adapters: tuple[Any, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What one device multiplies, as far as it decides whether an implementation can run.

    is_plain: weights are arrays.
    """

    dtype: Any
    hidden_size: int
    expert_size: int
    is_plain: bool = True


class Sorted(NamedTuple):
    """The P pairs of token and choice in the order of their experts.

    pair_P: which pair; token_P: its token. sizes_X: pairs of each expert; choices past the last
    expert (padding) come last and are counted nowhere.
    """

    pair_P: Array
    token_P: Array
    sizes_X: Array


def sort(chosen_TA: Array, num_experts: int) -> Sorted:
    """Pairs by expert; those of one expert in the order of their tokens."""
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
    """`experts` by a product of sorted rows [P, in] and weights [X, ..., in], with sizes [X] that
    sum up to P: [P, out], all outputs as one axis.
    """
    num_experts, _, width, embed = weights.gate_up.shape
    # Every row needs an expert: padding goes to the last, and weighs nothing.
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
    # Back in the order of pairs, so that a token's choices are added up in one order.
    y_PE = jnp.zeros_like(y_PE).at[by_expert.pair_P].set(y_PE)
    y_TAE = y_PE.reshape(*chosen_TA.shape, embed) * weight_TA[:, :, None]
    return jnp.sum(y_TAE, axis=1)
