"""Arrays of zeros on CPU that take no memory before they are written to; see zeros.cc."""

from typing import Any

import jax
import numpy as np
from jax import Array


def zeros(shape: tuple[int, ...], dtype: Any, *, huge: bool = False) -> Array:
    """Return zeros whose pages are not there before somebody writes to them (on Linux; elsewhere
    they are all written). huge: the kernel may take huge pages.
    """
    call = jax.ffi.ffi_call("jpaged_zeros", jax.ShapeDtypeStruct(shape, dtype))
    return call(huge=np.int64(huge))
