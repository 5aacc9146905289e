"""Products with a weight in 8 or 4 bits, for bf16 x on CPU; see quantized.h.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features in (whole 32s), N out.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

FORMS = {"int8": 0, "int4": 1, "fp8": 2}  # as quantized.h numbers them


def linear(
    x_TE: Array,
    values: Array,
    scales: Array,
    form: str,
    count: Array | int,
    zeros: Array | None = None,
) -> Array:
    """x times the weight that values [N, E] (int4: [N, E/2]), scales [N, S], each of E / S inputs
    (int4: of whole 32s), and zeros [N, S] stand for, transposed: f32 [T, N]. A row's bits depend
    on that row alone.
    """
    result = jax.ShapeDtypeStruct((x_TE.shape[0], scales.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("jpaged_quantized", result)
    count = jnp.asarray(count, jnp.int32)
    zeros = jnp.zeros((0, 0), jnp.float32) if zeros is None else zeros
    return call(x_TE, values, scales, zeros, count, form=np.int64(FORMS[form]))
