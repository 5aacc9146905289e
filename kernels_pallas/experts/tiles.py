"""Experts in plain XLA: a loop over tiles of sorted pairs, each of one expert, which reads only the
weights of experts that were chosen.

A token's bits depend on the token and on the size of a tile alone: its products have one shape,
whatever else the step holds, and its experts are added up in their order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.experts.interface import ExpertWeights, Glu, Shapes, sort

FEW, MANY = 16, 128  # rows of a tile


def unsupported(shapes: Shapes, device: Any) -> None:
    """Return why these shapes cannot run: None, all can."""


def experts(
    x_TE: Array, chosen_TA: Array, weight_TA: Array, weights: ExpertWeights, glu: Glu
) -> Array:
    """Compute the experts of each token; see kernels_pallas.experts."""
    T, num_experts, width = x_TE.shape[0], weights.gate_up.shape[0], weights.gate_up.shape[2]
    num_choices, num_pairs = chosen_TA.shape[1], chosen_TA.size
    rows = tile_rows(num_pairs, num_experts)
    by_expert = sort(chosen_TA, num_experts)
    tiles_X = -(-by_expert.sizes_X // rows)
    last_X, start_X = jnp.cumsum(tiles_X), jnp.cumsum(by_expert.sizes_X) - by_expert.sizes_X

    of_gate_up, of_down = weights.adapters or (None, None)

    def product(x: Array, weight: Any, expert: Array, token: Array, adapters: Any) -> Array:
        y = _product(x, weight[expert])
        if adapters is None:
            return y
        return y + adapters.of_expert(expert, token)(x, _rounded).reshape(y.shape)

    def one(i: Array, y_TE: Array) -> Array:
        expert = jnp.sum(last_X <= i, dtype=jnp.int32)
        place = (i - last_X[expert] + tiles_X[expert]) * rows + jnp.arange(rows)
        mine = place < by_expert.sizes_X[expert]
        pair = by_expert.pair_P[jnp.minimum(start_X[expert] + place, num_pairs - 1)]
        token = pair // num_choices
        h = product(x_TE[token], weights.gate_up, expert, token, of_gate_up)
        if weights.gate_up_bias is not None:
            h = h + weights.gate_up_bias[expert].reshape(1, -1).astype(jnp.float32)
        h = glu(h[:, :width], h[:, width:]).astype(x_TE.dtype)
        weight = jnp.where(mine, weight_TA.reshape(-1)[pair], 0.0)
        y = product(h, weights.down, expert, token, of_down) * weight[:, None]
        return y_TE.at[jnp.where(mine, token, T)].add(y, mode="drop")

    return lax.fori_loop(0, last_X[-1], one, jnp.zeros(x_TE.shape, jnp.float32))


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a tile: about as many as an expert has on average, a power of two."""
    average = max(num_pairs // num_experts, 1)
    return min(max(1 << (average.bit_length() - 1), FEW), MANY)


def _rounded(x: Array, weight: Array, dtype: Any) -> Array:
    return _product(x, weight).astype(dtype)


def _product(x: Array, weight: Any) -> Array:
    if not isinstance(weight, Array):
        return weight.matrix().linear(x)
    contract, weight = (((1,), (1,)), ((), ())), weight.reshape(-1, x.shape[1])
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)
