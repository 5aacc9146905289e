"""The experts of a mixture by products with their weights as they lie in memory, for bf16 on CPU;
see experts.h and kernels_pallas.experts.

A step reads the weights of the experts that its tokens chose, and no others.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_cpu.library import unavailable
from kernels_pallas.experts.interface import ExpertWeights, Glu, Shapes

# Computed at once: their results lie in memory together.
MOST_PAIRS = 8192


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Why these shapes cannot run here, or None; asking may compile C++."""
    del device
    if not shapes.is_plain:
        return "weights in 8 or 4 bits: only arrays"
    if jnp.dtype(shapes.dtype) != jnp.bfloat16:
        return f"dtype {jnp.dtype(shapes.dtype).name}: only bfloat16"
    for name in ("hidden_size", "expert_size"):
        if getattr(shapes, name) % 32:
            return f"{name} {getattr(shapes, name)}: only multiples of 32"
    return unavailable()


def batch_invariant() -> bool:
    """A token's bits depend on that token alone."""
    return True


def experts(
    x_TE: Array, chosen_TA: Array, weight_TA: Array, weights: ExpertWeights, glu: Glu
) -> Array:
    """See the package."""
    (T, A), num_experts = chosen_TA.shape, weights.down.shape[0]
    at_once = max(MOST_PAIRS // A, 1)
    if at_once >= T:
        return _some(x_TE, chosen_TA, weight_TA, weights, glu)

    def part(rows: tuple[Array, Array, Array]) -> Array:
        return _some(*rows, weights, glu)

    def parts(rows_T: Array, fill: int) -> Array:
        padded = jnp.pad(rows_T, ((0, -T % at_once), (0, 0)), constant_values=fill)
        return padded.reshape(-1, at_once, rows_T.shape[1])

    rows = parts(x_TE, 0), parts(chosen_TA, num_experts), parts(weight_TA, 0)
    return jax.lax.map(part, rows).reshape(-1, x_TE.shape[1])[:T]


def _some(
    x_TE: Array, chosen_TA: Array, weight_TA: Array, weights: ExpertWeights, glu: Glu
) -> Array:
    """Compute all pairs at once."""
    (T, A), (num_experts, _, width, embed) = chosen_TA.shape, weights.gate_up.shape
    h = _product(x_TE, weights.gate_up.reshape(num_experts, -1, embed), chosen_TA)
    if weights.gate_up_bias is not None:
        bias = weights.gate_up_bias.reshape(num_experts, -1).astype(jnp.float32)
        h = h + bias[jnp.minimum(chosen_TA, num_experts - 1).reshape(-1)]
    h = glu(h[:, :width], h[:, width:]).astype(x_TE.dtype)
    y_TAE = _product(h, weights.down, chosen_TA).reshape(T, A, embed)
    y_TE = y_TAE[:, 0] * weight_TA[:, :1]
    for choice in range(1, A):  # in one order, whatever the number of tokens
        y_TE = y_TE + y_TAE[:, choice] * weight_TA[:, choice, None]
    return y_TE


def _product(x: Array, weight_XNE: Array, chosen_TA: Array) -> Array:
    """Return for each pair of token and choice its row of x times its expert's weight, [T * A, N]
    in f32; zeros for a choice past the last expert.

    x: a row for each token, or one for each pair.
    """
    result = jax.ShapeDtypeStruct((chosen_TA.size, weight_XNE.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("jpaged_experts", result)(x, weight_XNE, chosen_TA)
