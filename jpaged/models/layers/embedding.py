"""The embedding of tokens."""

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import Serving
from jpaged.models.layers.low_rank import LowRank
from jpaged.models.quantized import QuantizedWeight


def embed(
    weight_VE: Array | QuantizedWeight, tokens: Array, serving: Serving, adapters: LowRank | None
) -> Array:
    """[..., E] of int tokens [...]. serving: its mesh axis is that whose devices each hold an equal
    share of the vocabulary. adapters: what tokens [T] add to their embeddings, or None.
    """
    axis = serving.tensor_axis
    if axis is None:
        return _adapted(_rows(weight_VE, tokens), tokens, serving, adapters)
    at = tokens - jax.lax.axis_index(axis) * weight_VE.shape[0]
    is_here = (at >= 0) & (at < weight_VE.shape[0])
    x = jnp.where(is_here[..., None], _rows(weight_VE, at), 0)
    # Exact: all but one device add zeros.
    return jax.lax.psum(_adapted(x, at, serving, adapters), axis)


def _adapted(x: Array, at: Array, serving: Serving, adapters: LowRank | None) -> Array:
    """Added in f32 and rounded once."""
    if adapters is None:
        return x
    y = x.astype(jnp.float32)
    return adapters.added_of_index(y, at, serving.products, serving.count(x)).astype(x.dtype)


def _rows(weight_VE: Array | QuantizedWeight, at: Array) -> Array:
    if isinstance(weight_VE, QuantizedWeight):
        return weight_VE.take(at)
    return jnp.take(weight_VE, at, axis=0, mode="clip")
