"""Who multiplies by the weights of a step, chosen once when an engine starts."""

from typing import Any

import jax.numpy as jnp

from jpaged.models.layers.linear import Products
from kernels_cpu import library, linear


def choose_products(device: Any, dtype: Any) -> Products | None:
    """The C++ products of the CPU where they can run, which compiles them; None is XLA's own.

    dtype: of the weights.
    """
    if device.platform == "cpu" and dtype == jnp.bfloat16 and library.unavailable() is None:
        return linear
    return None
