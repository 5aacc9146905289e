"""Experts on Hopper: jax's grouped product by warpgroup matrix instructions."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

from kernels_pallas.experts.interface import ExpertWeights, Glu, Shapes, grouped_experts

IN, OUT = 64, 128  # of a tile
FEW, MANY = 64, 128  # its rows
EIGHT = 8  # rows of a swizzled tile in shared memory: TMA takes whole ones


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return why these shapes cannot run on a device, or None. device None: any device."""
    if not shapes.is_plain:
        return "weights in 8 or 4 bits: only arrays"
    for name in ("hidden_size", "expert_size"):
        if getattr(shapes, name) % OUT:
            return f"{name} {getattr(shapes, name)} is not a multiple of {OUT}"
    if shapes.dtype != jnp.bfloat16:
        return f"dtype {shapes.dtype}"
    if device is not None and device.compute_capability != "9.0":
        return f"compute capability {device.compute_capability}: only 9.0"
    return None


def experts(
    x_TE: Array, chosen_TA: Array, weight_TA: Array, weights: ExpertWeights, glu: Glu
) -> Array:
    """Compute the experts of each token; see kernels_pallas.experts. Products round to bf16."""
    return grouped_experts(_product, x_TE, chosen_TA, weight_TA, weights, glu)


def _product(x: Array, weights: Array, sizes: Array) -> Array:
    rows = x.shape[0]
    many = rows >= MANY * weights.shape[0]
    # Rows that fill up the last eight are in no group.
    y = ragged_dot(
        jnp.pad(x, ((0, -rows % EIGHT), (0, 0))),
        weights.reshape(len(weights), -1, x.shape[1]),
        group_sizes=sizes,
        block_m=MANY if many else FEW,
        block_n=OUT,
        block_k=IN,
        max_concurrent_steps=4,
        grid_block_n=1,
        transpose_rhs=True,
    )
    return y[:rows]
