"""Experts on TPUs: jax's grouped product, which reads the weights without a copy."""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox import gmm

from kernels_pallas.experts.interface import ExpertWeights, Glu, Shapes, grouped_experts

LANES = 128
ROWS, MOST_IN, MOST_OUT = 128, 2048, 512  # of a tile


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return why these shapes cannot run on a device, or None. device None: any device."""
    if not shapes.is_plain:
        return "weights in 8 or 4 bits: only arrays"
    for name in ("hidden_size", "expert_size"):
        if getattr(shapes, name) % LANES:
            return f"{name} {getattr(shapes, name)} is not a multiple of {LANES}"
    if shapes.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype {shapes.dtype}"
    return None


def experts(
    x_TE: Array,
    chosen_TA: Array,
    weight_TA: Array,
    weights: ExpertWeights,
    glu: Glu,
    *,
    interpret: bool = False,
) -> Array:
    """Compute the experts of each token; see kernels_pallas.experts."""
    product = functools.partial(_product, interpret=interpret)
    return grouped_experts(product, x_TE, chosen_TA, weight_TA, weights, glu)


def _product(x: Array, weights: Array, sizes: Array, *, interpret: bool) -> Array:
    rows, weights = x.shape[0], weights.reshape(len(weights), -1, x.shape[1])
    x = jnp.pad(x, ((0, -rows % ROWS), (0, 0)))  # rows that belong to no group
    tiling = (ROWS, _tile(x.shape[1], MOST_IN), _tile(weights.shape[1], MOST_OUT))
    y = gmm(x, weights, sizes, jnp.float32, tiling, transpose_rhs=True, interpret=interpret)
    return y[:rows]


def _tile(size: int, most: int) -> int:
    """Return the largest tile of whole lanes that divides a size."""
    return LANES * math.gcd(size // LANES, most // LANES)
