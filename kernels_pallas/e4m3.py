"""float8_e4m3fn in kernels, decoded by integer arithmetic: not every processor can convert it."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array


def e4m3_to_f32(bits: Array, bitcast: Callable[..., Array]) -> Array:
    """Return the f32 values of float8_e4m3fn numbers.

    bits: int32, each number's 8 bits with the sign extended. bitcast(x, dtype): the backend's
    reinterpretation of 32-bit values. NaN becomes 480 with the same sign: scales carry NaN instead.

    Only normal f32 numbers occur on the way, since a TPU flushes smaller ones to zero.
    """
    size = bits & 0x7F
    # The exponents' biases are 7 and 127.
    normal = bitcast((size << 20) + (120 << 23), jnp.float32)
    size = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(bits < 0, -size, size)
