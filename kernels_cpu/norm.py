"""Root mean square norms of rows in bf16 on CPU; see norm.h.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PARTS = 16  # kParts


def supported(x: Array, scale: Array) -> bool:
    """Return whether `norm` takes these arrays: x [T, E] in bf16, E in whole 16s, scale [E] in bf16
    or f32.
    """
    if x.dtype != jnp.bfloat16 or scale.dtype not in (jnp.bfloat16, jnp.float32) or x.ndim != 2:
        return False
    return scale.shape == x.shape[1:] and x.shape[1] % PARTS == 0


def norm(
    x_TE: Array,
    scale_E: Array,
    count: Array | int,
    eps: float,
    *,
    has_offset: bool = False,
    in_f32: bool = False,
) -> Array:
    """Return x normed, in bf16; has_offset and in_f32 as of jpaged.models.layers.norm.NormConfig. A
    row's bits depend on that row alone.
    """
    nothing = jnp.zeros((0, 0), x_TE.dtype)
    return _call(x_TE, nothing, scale_E, count, eps, has_offset, in_f32)[0]


def add_and_norm(
    x_TE: Array,
    y_TE: Array,
    scale_E: Array,
    count: Array | int,
    eps: float,
    *,
    has_offset: bool = False,
    in_f32: bool = False,
) -> tuple[Array, Array]:
    """Return x + y, rounded to bf16, and that normed as `norm` does it."""
    y, added = _call(x_TE, y_TE, scale_E, count, eps, has_offset, in_f32)
    return added, y


def _call(
    x_TE: Array,
    added: Array,
    scale_E: Array,
    count: Array | int,
    eps: float,
    has_offset: bool,
    in_f32: bool,
) -> tuple[Array, Array]:
    """Return x normed once `added` is added to it, and the sum; `added` and the sum are empty where
    nothing is added.
    """
    results = [jax.ShapeDtypeStruct(x.shape, x_TE.dtype) for x in (x_TE, added)]
    call = jax.ffi.ffi_call("jpaged_norm", results)
    settings = {"eps": np.float32(eps), "has_offset": has_offset, "in_f32": in_f32}
    normed, total = call(x_TE, added, scale_E, jnp.asarray(count, jnp.int32), **settings)
    return normed, total
