"""Attention of all patches of an image to all others, on CPU in f32; see group_attention.h.

Shapes: N patches, H query heads, K heads of keys and values, D width of a key, V of a value, G
numbers that a patch has.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

DTYPES = ("float32", "bfloat16")
KEYS, WIDTH = 128, 32  # kKeys, and what PackedWidth rounds up to


def supported(q: Array) -> bool:
    """Whether queries of this dtype attend here."""
    return q.dtype.name in DTYPES


def attend(q_NHD: Array, k_NKD: Array, v_NKV: Array, groups_GN: Array, scale: float) -> Array:
    """Return [N, H, V] in q's dtype, f32 or bf16: a query sees the keys whose numbers are its own
    in all groups. Those whose first number is negative are padding, whose results are zeros.
    """
    N, H, D = q_NHD.shape
    K, V = v_NKV.shape[1:]
    keys, width = -(-N // KEYS) * KEYS, -(-V // WIDTH) * WIDTH
    results = (
        jax.ShapeDtypeStruct((N, H, V), q_NHD.dtype),
        jax.ShapeDtypeStruct((K * keys * (D + width),), jnp.float32),
    )
    call = jax.ffi.ffi_call("jpaged_group_attention", results)
    return call(q_NHD, k_NKD, v_NKV, groups_GN, scale=np.float32(scale))[0]
