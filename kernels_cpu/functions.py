"""Functions of f32 numbers on CPU, the bits of whose results depend on their numbers alone; see
functions.h.
"""

import jax
import jax.numpy as jnp
from jax import Array

NAMES = ("exp", "sigmoid", "silu", "softplus", "gelu_tanh")  # which `Parse` in functions.cc knows


def apply(name: str, x: Array) -> Array:
    """Return a function, one of NAMES, of the numbers x, f32 of any shape.

    It runs where library.unavailable gives no reason: that has compiled it.
    """
    assert name in NAMES and x.dtype == jnp.float32, (name, x.dtype)
    return jax.ffi.ffi_call("jpaged_function", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, name=name)
