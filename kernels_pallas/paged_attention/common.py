"""What the kernels share around their calls.

Shapes: S rows, A items of work, X splits of a context, K KV heads, G query heads of each, D head
dim.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.paged_attention.interface import Options, Shapes

# A masked score: finite, so that a tile without any visible key does no harm (a later maximum wipes
# it out).
NEG = -1e30
LOG2E = math.log2(math.e)


def rows_of(items_S: Array, item_A: Array) -> tuple[Array, Array]:
    """The row of each item and its place among the row's, of which row r has items_S[r]; past the
    end, the last row.
    """
    end_S = jnp.cumsum(items_S, dtype=jnp.int32)
    row_A = jnp.sum(end_S[None, :] <= item_A[:, None], axis=1, dtype=jnp.int32)
    row_A = jnp.minimum(row_A, items_S.shape[0] - 1)
    return row_A, item_A - (end_S - items_S)[row_A]


def combine(o_SXKGD: Array, lse_SXKG: Array, sinks_H: Array | None = None) -> Array:
    """The attention of whole contexts from that of their splits and the base-2 logarithms of their
    sums of weights, of which sinks are one more.
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


def interpretation(
    name: str, unsupported: Callable[[Shapes, Any], str | None], shapes: Shapes, options: Options
) -> Any:
    """How to interpret a call of a Pallas kernel, or False; NotImplementedError where it cannot
    run.

    A device is asked where one is there: on a CPU, kernels are interpreted, or lowered for another
    machine.
    """
    on_cpu = jax.default_backend() == "cpu"
    interpret = on_cpu if options.interpret is None else options.interpret
    device = None if interpret or on_cpu else jax.devices()[0]
    if reason := unsupported(shapes, device):
        raise NotImplementedError(f"{name}: {reason}")
    return interpret
