"""Arrays of zeros on CPU that take no memory before they are written to; see zeros.cc."""

from typing import Any

import jax
import numpy as np
from jax import Array


def zeros(shape: tuple[int, ...], dtype: Any, *, parts: int = 0) -> Array:
    """Return zeros whose pages are not there before somebody writes to them (on Linux; elsewhere
    they are all written). parts: into how many equal ones the array divides that are written from
    their beginnings on, and may lie on huge pages; 0: none do.
    """
    call = jax.ffi.ffi_call("jpaged_zeros", jax.ShapeDtypeStruct(shape, dtype))
    return call(parts=np.int64(parts))
