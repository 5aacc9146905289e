"""Products with a weight as it lies in memory, for bf16 on CPU; see linear.cc.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features in, N out.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

FEW_ROWS = 64  # beyond, packing the weight pays, as XLA does
TILE = 4  # rows of x in a tile of linear.cc, which packs them


def supported(x: Array, weight: Array) -> bool:
    """Whether these arrays are better multiplied here: bf16, x [T, E] of few rows, weight [N, E], E
    in whole 32s. That the library is there (see library.unavailable) is the caller's to know.
    """
    if not x.dtype == weight.dtype == jnp.bfloat16 or not x.ndim == weight.ndim == 2:
        return False
    return x.shape[0] <= FEW_ROWS and x.shape[1] % 32 == 0


def linear(
    x_TE: Array, weight_NE: Array, count: Array | int, dtype: DTypeLike = jnp.float32
) -> Array:
    """x times weight transposed, [T, N] in f32 or bf16, accumulated in f32; a row's bits depend on
    that row alone.
    """
    T, E = x_TE.shape
    result = jax.ShapeDtypeStruct((T, weight_NE.shape[0]), dtype)
    packed = jax.ShapeDtypeStruct((-(-T // TILE) * TILE, E), x_TE.dtype)  # the kernel's own memory
    return jax.ffi.ffi_call("jpaged_linear", (result, packed))(
        x_TE, weight_NE, jnp.asarray(count, jnp.int32)
    )[0]
