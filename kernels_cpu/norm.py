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
    added_TE: Array | None,
    scale_E: Array,
    count: Array | int,
    eps: float,
    *,
    has_offset: bool = False,
    in_f32: bool = False,
) -> tuple[Array, Array]:
    """Return x with what is added to it (None: x), rounded to bf16, and that normed, in bf16;
    has_offset and in_f32 as of jpaged.models.layers.norm.NormConfig. A row's bits depend on that
    row alone.
    """
    added = jnp.zeros((0, 0), x_TE.dtype) if added_TE is None else added_TE
    results = [jax.ShapeDtypeStruct(x.shape, x_TE.dtype) for x in (x_TE, added)]
    call = jax.ffi.ffi_call("jpaged_norm", results)
    settings = {"eps": np.float32(eps), "has_offset": has_offset, "in_f32": in_f32}
    normed, total = call(x_TE, added, scale_E, jnp.asarray(count, jnp.int32), **settings)
    return x_TE if added_TE is None else total, normed
