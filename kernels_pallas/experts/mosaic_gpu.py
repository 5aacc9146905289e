"""Experts on Hopper by warpgroup matrix instructions: weights in 16 bits by jax's grouped product,
those in 8 and 4 bits by one that widens them (`widened_product`).
"""

import functools
from typing import Any, cast

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

from kernels_pallas.experts import triton
from kernels_pallas.experts.interface import ExpertWeights, Glu, Shapes, grouped_experts
from kernels_pallas.experts.row_tiles import tile_rows, whole_tiles
from kernels_pallas.experts.widened_product import Weight, grouped_product, refused

IN, OUT = 64, 128  # of a tile of jax's product
FEW, MANY = 64, 128  # its rows
EIGHT = 8  # rows of a swizzled tile in shared memory: TMA takes whole ones
FEWEST, MOST = 8, 128  # rows of a tile of the product that widens
WIDENED = 64  # outputs that it takes at a time


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return why these shapes cannot run on a device, or None. device None: any device."""
    whole = OUT if shapes.is_plain else WIDENED
    for name in ("hidden_size", "expert_size"):
        if getattr(shapes, name) % whole:
            return f"{name} {getattr(shapes, name)} is not a multiple of {whole}"
    if shapes.dtype != jnp.bfloat16:
        return f"dtype {shapes.dtype}"
    if device is not None:
        capability = getattr(device, "compute_capability", None)  # a CPU has none
        if capability != "9.0":
            return f"compute capability {capability}: only 9.0"
    return None


def experts(
    x_TE: Array,
    chosen_TA: Array,
    weight_TA: Array,
    weights: ExpertWeights,
    glu: Glu,
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Array:
    """Compute the experts of each token; see kernels_pallas.experts. Products of weights in 16 bits
    round to bf16. Triton takes forms and groups of scales that the product in 8 and 4 bits does not
    take (`widened_product.refused`).

    interpret: for weights in 8 and 4 bits.
    """
    if isinstance(weights.gate_up, Array) and isinstance(weights.down, Array):
        return grouped_experts(_product, x_TE, chosen_TA, weight_TA, weights, glu)
    X, _, width, embed = weights.gate_up.shape
    held = [_held(weight) for weight in (weights.gate_up, weights.down)]
    rows = _rows(held, (embed, width), tile_rows(chosen_TA.size, X, FEWEST, MOST))
    if rows is None:
        args = x_TE, chosen_TA, weight_TA, weights, glu
        return triton.experts(*args, interpret=bool(interpret))
    gate_up, down = cast(list[Weight], held)
    tiles = whole_tiles(chosen_TA, X, rows)
    product = functools.partial(
        grouped_product,
        expert_I=tiles.expert_I,
        count_1=tiles.count_1,
        rows=rows,
        interpret=interpret,
    )
    h = product(x_TE[tiles.token_R], gate_up)
    if weights.gate_up_bias is not None:
        bias = weights.gate_up_bias.reshape(X, 1, -1).astype(jnp.float32)
        h = (h.reshape(-1, rows, h.shape[1]) + bias[tiles.expert_I]).reshape(h.shape)
    h = glu(h[:, :width], h[:, width:]).astype(x_TE.dtype)
    y_TAE = product(h, down)[tiles.row_TA]
    # Rows that no tile has may hold anything, NaN too.
    y_TAE = jnp.where((chosen_TA < X)[:, :, None], y_TAE * weight_TA[:, :, None], 0.0)
    return jnp.sum(y_TAE, axis=1)


def _rows(held: list[Weight | None], inputs: tuple[int, int], most: int) -> int | None:
    """Return the most rows of a tile that both weights can be multiplied by, or None."""
    while most >= FEWEST:
        pairs = zip(held, inputs, strict=True)
        if not any(weight is None or refused(weight, most, size) for weight, size in pairs):
            return most
        most //= 2
    return None


def _held(weight: Any) -> Weight | None:
    """Return a weight as [X, outputs, places]; None for an array."""
    if isinstance(weight, Array):
        return None
    values = weight.values.reshape(weight.shape[0], -1, weight.values.shape[-1])
    scales = weight.scales.reshape(*values.shape[:2], -1)
    zeros = None if weight.zeros is None else weight.zeros.reshape(scales.shape)
    return Weight(weight.form.name, values, scales, zeros)


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
