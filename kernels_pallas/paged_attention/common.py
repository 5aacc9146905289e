"""Helpers that several kernels share around their calls.

Shapes: S rows, A items of work, X splits of a context, K KV heads, G query heads of each, D head
dim.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.paged_attention.interface import AttentionOptions, Options, Shapes

# A masked score. It is finite so that a tile without any visible key does no harm: a later maximum
# makes its weights zero.
NEG = -1e30
LOG2E = math.log2(math.e)


def rows_of(items_S: Array, item_A: Array) -> tuple[Array, Array]:
    """Return each item's row and its index among the row's items; row r has items_S[r] of them.

    Items past the end get the last row.
    """
    end_S = jnp.cumsum(items_S, dtype=jnp.int32)
    row_A = jnp.sum(end_S[None, :] <= item_A[:, None], axis=1, dtype=jnp.int32)
    row_A = jnp.minimum(row_A, items_S.shape[0] - 1)
    return row_A, item_A - (end_S - items_S)[row_A]


def combine(o_SXKGD: Array, lse_SXKG: Array, sinks_H: Array | None = None) -> Array:
    """Combine the attention of a context's splits into that of the whole context, [S, K, G, D].

    lse_SXKG: base-2 logarithm of each split's sum of weights. sinks_H: one more score of each head.
    """
    most = jnp.max(lse_SXKG, axis=1, keepdims=True)
    if sinks_H is None:
        weight, sink = jnp.exp2(lse_SXKG - most), 0.0
    else:
        sinks = (sinks_H.astype(jnp.float32) * LOG2E).reshape(1, 1, *lse_SXKG.shape[2:])
        most = jnp.maximum(most, sinks)
        weight, sink = jnp.exp2(lse_SXKG - most), jnp.exp2(sinks - most)[:, 0]
    total = jnp.sum(weight, axis=1) + sink
    return jnp.sum(o_SXKGD * weight[..., None], axis=1) / total[..., None]


def multiprocessors() -> int:
    """Return the number of multiprocessors of the card that a kernel is traced for.

    Without a card to ask, that of an H200.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.num_cores:
        return described.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 132


def interpretation(
    name: str,
    unsupported: Callable[[Shapes, AttentionOptions, Any], str | None],
    shapes: Shapes,
    options: Options,
) -> Any:
    """Return how to interpret a call of a Pallas kernel, False to compile it.

    Raises NotImplementedError if it cannot run. On a CPU the device is not asked: kernels are
    interpreted there, or lowered for another machine.
    """
    on_cpu = jax.default_backend() == "cpu"
    interpret = on_cpu if options.interpret is None else options.interpret
    device = None if interpret or on_cpu else jax.devices()[0]
    if reason := unsupported(shapes, options.attention, device):
        raise NotImplementedError(f"{name}: {reason}")
    return interpret
