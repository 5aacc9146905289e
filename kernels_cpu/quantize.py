"""Weights of int8 and int4 made of plain ones on CPU, with the bits that XLA makes; see quantize.h.

Shapes: a weight [N, E] of N outputs. Its values are [N, E] of int8, or [N, E / 2] of uint8 in int4,
and its scales f32 [N, 1], or [N, E / 32] in int4.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_cpu.quantized import INTERLEAVED, ROUNDING

GROUP = 32  # inputs that share a scale in int4


def supported(weight: jax.ShapeDtypeStruct | Array, form: str, interleaved: bool) -> bool:
    """Return whether `quantize` takes a weight [N, E]: in bf16 or f32, with whole groups."""
    if weight.dtype not in (jnp.bfloat16, jnp.float32) or form not in ROUNDING:
        return False
    outputs, inputs = weight.shape
    if interleaved and (outputs % INTERLEAVED or inputs % 4):
        return False
    return form != "int4" or inputs % GROUP == 0


def quantize(weight_NE: Array, form: str, *, interleaved: bool = False) -> tuple[Array, Array]:
    """Return the values and the scales of a weight in int8 or int4, as
    jpaged.models.quantized.quantized makes them. interleaved: how they lie, see
    jpaged.models.quantized.WeightForm.
    """
    N, E = weight_NE.shape
    is_int4 = form == "int4"
    values = jax.ShapeDtypeStruct((N, E // 2 if is_int4 else E), jnp.uint8 if is_int4 else jnp.int8)
    scales = jax.ShapeDtypeStruct((N, E // GROUP if is_int4 else 1), jnp.float32)
    call = jax.ffi.ffi_call("jpaged_quantize", (values, scales))
    made, of_groups = call(weight_NE, form=form, interleaved=interleaved)
    return made, of_groups
