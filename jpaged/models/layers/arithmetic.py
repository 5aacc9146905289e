"""Arithmetic that on CPU is rounded as it is written, whatever program it is a part of.

A compiler need not do that. Where XLA fuses what makes a number of bf16 with what reads it, it
leaves out the rounding; LLVM adds a product before that is rounded, where it likes; and XLA:CPU
orders a sum by the number of rows. Decode, prefill and a trainer's forward pass are different
programs, in which a token would have different bits. Elsewhere XLA has its way: there deterministic
serving has one program, and what is fused matters more.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

type Function = Literal["exp", "sigmoid", "silu", "softplus", "gelu_tanh"]
type Apply = Callable[[Function, Array], Array]


def apply_by_xla(name: Function, x: Array) -> Array:
    """Return a function of the numbers x. It can be differentiated; on CPU the last bit of a number
    depends on the shape of x and on what it is fused with.
    """
    match name:
        case "exp":
            return jnp.exp(x)
        case "sigmoid":
            return jax.nn.sigmoid(x)
        case "silu":
            return jax.nn.silu(x)
        case "softplus":
            return jax.nn.softplus(x)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Return f32 x rounded to a dtype."""

    def plain(x: Array) -> Array:
        return x.astype(dtype)

    if dtype != jnp.bfloat16:
        return plain(x)
    return jax.lax.platform_dependent(x, cpu=_to_bf16, default=plain)


def added(x: Array, y: Array) -> Array:
    """Return the sum of x and y of one dtype, rounded to it."""

    def written(x: Array, y: Array) -> Array:
        return jax.lax.optimization_barrier(x + y)  # a residual stream lies in memory anyway

    if x.dtype != jnp.bfloat16:
        return x + y
    return jax.lax.platform_dependent(x, y, cpu=written, default=jnp.add)


def multiplied(x: Array, y: Array) -> Array:
    """Return the product of x and y of one dtype, rounded to it; that of f32 before anything is
    added to it.
    """

    def written(x: Array, y: Array) -> Array:
        if x.dtype == jnp.bfloat16:
            return _to_bf16(x.astype(jnp.float32) * y.astype(jnp.float32))
        return jax.lax.optimization_barrier(x * y)

    return jax.lax.platform_dependent(x, y, cpu=written, default=jnp.multiply)


def scaled(x: Array, factor: float) -> Array:
    """x times a number, which is rounded to its dtype first."""
    return x if factor == 1.0 else multiplied(x, jnp.asarray(factor, x.dtype))


def _to_bf16(x: Array) -> Array:
    """Return f32 x in bf16; XLA does not leave out this rounding."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


LANES = 128  # partial sums of a row, which are stored between the two halves of the sum


def sum_of_last(x: Array) -> Array:
    """Return the sum of f32 x over its last axis, which becomes 1 long. On CPU it is added by
    halving, an order that does not depend on the number of rows, as that of jnp.sum does.
    """

    def of_rows(x: Array) -> Array:
        return jnp.sum(x, axis=-1, keepdims=True)

    return jax.lax.platform_dependent(x, cpu=_sum_by_halving, default=of_rows)


def _sum_by_halving(x: Array) -> Array:
    lanes = _halved(x, LANES)
    if lanes.shape[-1] < x.shape[-1]:
        lanes = jax.lax.optimization_barrier(lanes)  # or the whole sum is one long expression
    rest = _halved(lanes, 1)
    total = rest[..., :1]
    for i in range(1, rest.shape[-1]):
        total = total + rest[..., i : i + 1]
    return total


def _halved(x: Array, most: int) -> Array:
    """Halves of the last axis added while it is even and longer than `most`."""
    while x.shape[-1] > most and x.shape[-1] % 2 == 0:
        low, high = jnp.split(x, 2, axis=-1)
        x = low + high
    return x


def mean_of_squares(x: Array) -> Array:
    """Return the mean of the squares of f32 x over its last axis, which becomes 1 long."""
    return sum_of_last(multiplied(x, x)) / x.shape[-1]
