"""The embedding of tokens."""

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.params import MeshAxis
from jpaged.models.quantized import QuantizedWeight


def embed(weight_VE: Array | QuantizedWeight, tokens: Array, axis: MeshAxis | None) -> Array:
    """[..., E] of int tokens [...]. axis: the mesh axis whose devices each hold an equal share of
    the vocabulary, inside shard_map; None where this one has all of it.
    """
    if axis is None:
        return _rows(weight_VE, tokens)
    at = tokens - jax.lax.axis_index(axis) * weight_VE.shape[0]
    is_here = (at >= 0) & (at < weight_VE.shape[0])
    x = jnp.where(is_here[..., None], _rows(weight_VE, at), 0)
    return jax.lax.psum(x, axis)  # exact: all but one device add zeros


def _rows(weight_VE: Array | QuantizedWeight, at: Array) -> Array:
    if isinstance(weight_VE, QuantizedWeight):
        return weight_VE.take(at)
    return jnp.take(weight_VE, at, axis=0, mode="clip")
