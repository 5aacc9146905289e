"""The heap of the C library, in which XLA makes its arrays on CPU and compiles."""

import ctypes
import functools
import sys
from collections.abc import Callable


def trim() -> None:
    """Give memory that is free in the heap back to the kernel, where the C library can (glibc): it
    keeps tens of megabytes of what loading and compiling has freed.
    """
    if (malloc_trim := _malloc_trim()) is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim.argtypes = [ctypes.c_size_t]
    return malloc_trim
