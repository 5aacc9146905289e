"""Products with a weight in 8 or 4 bits, for bf16 x on CPU; see quantized.h.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features in (whole 32s), N out.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels_cpu.library import level

# What x becomes in a product with a weight of int8 or int4; each name is one arithmetic on every
# processor. "plain": x stays bf16, and a weight with scales of groups is rounded to bf16. "int8": x
# becomes integers, each 32 inputs of a row in steps of a 127th of the largest of them. "int16":
# each 256 inputs in steps of a 32767th. With a weight of fp8 x stays bf16. See quantized.h.
ACTIVATIONS = ("plain", "int8", "int16")
FORMS = ("int8", "int4", "fp8")  # of weights, which `Form` in quantized.h lists as well
ROUNDING = ("int8", "int4")  # those beside which x becomes integers
INTERLEAVED = 16  # outputs that lie together in interleaved weights; see quantized.h


def interleaves(form: str, outputs: int, activations: str) -> bool:
    """Return whether `linear` takes interleaved weights in a form, of so many outputs, with these
    activations. All levels do with "int16", those of AVX-512 with "int8" too.
    """
    best = level()
    if best is None or form not in ROUNDING or outputs % INTERLEAVED:
        return False
    return activations in best.interleaved


def written_dtype(dtype: DTypeLike, activations: str) -> DTypeLike:
    """Return the dtype in which the processor writes a product that is wanted in a dtype."""
    best = level()
    return dtype if best is not None and activations in best.rounded else jnp.float32


def linear(
    x_TE: Array,
    values: Array,
    scales: Array,
    form: str,
    count: Array | int,
    zeros: Array | None = None,
    activations: str = "plain",
    dtype: DTypeLike = jnp.float32,
    *,
    interleaved: bool = False,
) -> Array:
    """Return x times the weight that values [N, E] (int4: [N, E/2]), scales [N, S], each of E / S
    inputs (int4: of whole 32s), and zeros [N, S] stand for, transposed: [T, N] in dtype, which is
    f32 or bf16.

    form: one of FORMS. activations: one of ACTIVATIONS. interleaved: how values, scales and zeros
    lie (see jpaged.models.quantized.WeightForm), where `interleaves` says that it can be. A row's
    bits depend on that row alone.
    """
    result = jax.ShapeDtypeStruct(
        (x_TE.shape[0], scales.shape[0]), written_dtype(dtype, activations)
    )
    call = jax.ffi.ffi_call("jpaged_quantized", result)
    count = jnp.asarray(count, jnp.int32)
    zeros = jnp.zeros((0, 0), jnp.float32) if zeros is None else zeros
    attributes = {"form": form, "activations": activations, "interleaved": interleaved}
    return call(x_TE, values, scales, zeros, count, **attributes).astype(dtype)
