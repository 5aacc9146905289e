"""Products with a weight in 8 or 4 bits, for bf16 x on CPU; see quantized.h.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features in (whole 32s), N out.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

FORMS = {"int8": 0, "int4": 1, "fp8": 2}  # as quantized.h numbers them


def linear(x_TE: Array, values: Array, scales: Array, form: str, count: Array | int) -> Array:
    """x times the weight that values [N, E] (int4: [N, E/2]) and scales [N, 1] (int4: [N, E/32])
    stand for, transposed: f32 [T, N]. A row's bits depend on that row alone.
    """
    result = jax.ShapeDtypeStruct((x_TE.shape[0], scales.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("jpaged_quantized", result)
    count = jnp.asarray(count, jnp.int32)
    return call(x_TE, values, scales, count, form=np.int64(FORMS[form]))
