"""Products with a weight as it lies in memory, for bf16 on CPU; see linear.h.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features in, N out.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels_cpu.library import level


def supported(x: Array, weight: Array) -> bool:
    """Whether these arrays are better multiplied here: bf16, x [T, E] of no more rows than the
    level's `few_rows`, weight [N, E], E in whole 32s. That the library is there (see
    library.unavailable) is the caller's to know.
    """
    if not x.dtype == weight.dtype == jnp.bfloat16 or not x.ndim == weight.ndim == 2:
        return False
    chosen = level()
    most = None if chosen is None else chosen.few_rows
    return (most is None or x.shape[0] <= most) and is_width_supported(x.shape[1])


def is_width_supported(E: int) -> bool:
    """Whether rows of so many features can be multiplied here."""
    return E % 32 == 0


def linear(
    x_TE: Array, weight_NE: Array, count: Array | int, dtype: DTypeLike = jnp.float32
) -> Array:
    """x times weight transposed, [T, N] in f32 or bf16, accumulated in f32; a row's bits depend on
    that row alone.
    """
    result = jax.ShapeDtypeStruct((x_TE.shape[0], weight_NE.shape[0]), dtype)
    call = jax.ffi.ffi_call("jpaged_linear", result)
    return call(x_TE, weight_NE, jnp.asarray(count, jnp.int32))
