"""The embedding of tokens."""

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.params import MeshAxis


def embed(weight_VE: Array, tokens: Array, axis: MeshAxis | None) -> Array:
    """[..., E] of int tokens [...]. axis: the mesh axis whose devices each hold an equal share of
    the vocabulary, inside shard_map; None where this one has all of it.
    """
    if axis is None:
        return jnp.take(weight_VE, tokens, axis=0, mode="clip")
    at = tokens - jax.lax.axis_index(axis) * weight_VE.shape[0]
    is_here = (at >= 0) & (at < weight_VE.shape[0])
    x = jnp.where(is_here[..., None], jnp.take(weight_VE, at, axis=0, mode="clip"), 0)
    return jax.lax.psum(x, axis)  # exact: all but one device add zeros
