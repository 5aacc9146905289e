"""The smallest logit that a row keeps under top_k and top_p, found on the device by a program a
row. In Pallas' Triton backend, for CUDA.

XLA's loops and branches on a GPU ask the host at each turn. Here a row's program bisects by itself,
and one whose row is settled already ends at once, so that one launch serves any batch. A row's
bits depend on that row alone.

Shapes: S rows, V tokens of the vocabulary, N tiles of C tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

TILES = 32  # read at a time: 16 logits a thread
WARPS = 8
HALVINGS = 32  # of all floats


@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def row_thresholds(
    z_SV: Array,
    max_S: Array,
    tau_S: Array,
    floor_S: Array,
    top_k_S: Array,
    top_p_S: Array,
    settled_S: Array,
    *,
    tile: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return f32 [S], the smallest logit that each row keeps, and f32 [S, N], each tile's sum of
    exp((z - max) / tau) over what is kept. Of a settled row the sums may be anything.

    A row keeps what is at least its floor; of that, top_k i32 of the largest and all that equal the
    last of them, where it is not 0; of that, the largest that have top_p of the sum together, and
    all that equal the last of them, where it is below 1. z_SV f32, -inf allowed; max_S finite,
    tau_S > 0. settled_S bool. tile: C, a power of 2.
    """
    S, V = z_SV.shape
    N = pl.cdiv(V, tile)
    out = jax.ShapeDtypeStruct((S,), jnp.float32), jax.ShapeDtypeStruct((S, N), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(S,),
        out_shape=out,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="row_thresholds",
    )(z_SV, max_S, tau_S, floor_S, top_k_S, top_p_S, settled_S.astype(jnp.int32))


def _kernel(
    z_ref: Any,
    max_ref: Any,
    tau_ref: Any,
    floor_ref: Any,
    top_k_ref: Any,
    top_p_ref: Any,
    settled_ref: Any,
    found_ref: Any,
    sum_ref: Any,
    *,
    tile: int,
) -> None:
    row, tiles = pl.program_id(0), sum_ref.shape[1]
    # Of a settled row nothing is read.
    is_open = 1 - settled_ref[row]
    parts = is_open * pl.cdiv(tiles, TILES)
    top, tau, top_k, top_p = max_ref[row], tau_ref[row], top_k_ref[row], top_p_ref[row]

    def part(i: Array) -> tuple[Array, Array]:
        """Return some tiles of the row, -inf past its end, and their weights."""
        at_NC = (i * TILES + jnp.arange(TILES))[:, None] * tile + jnp.arange(tile)[None, :]
        z_NC = plgpu.load(z_ref.at[row, at_NC], mask=at_NC < z_ref.shape[1], other=float("-inf"))
        return z_NC, jnp.exp((z_NC - top) / tau)

    def summed(least: Array, counts: bool) -> Array:
        """Return the number, or the weight, of all that is at least this."""

        def add(i: Array, sum_N: Array) -> Array:
            z_NC, weight_NC = part(i)
            weight_NC = jnp.ones_like(z_NC) if counts else weight_NC
            return sum_N + jnp.sum(jnp.where(z_NC >= least, weight_NC, jnp.float32(0)), axis=1)

        return jnp.sum(lax.fori_loop(0, parts, add, jnp.zeros(TILES, jnp.float32)))

    def largest(least: Array, target: Array, counts: bool, is_on: Array) -> Array:
        """Return the largest number from `least` up such that what is at least it sums up to the
        target, by halving all floats between; `least` where it is off.
        """

        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up
            enough = summed(_from_ordered(middle), counts) >= target
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

        bounds = _to_ordered(jnp.minimum(least, top)), _to_ordered(top)
        halvings = is_open * is_on.astype(jnp.int32) * HALVINGS
        low, _ = lax.fori_loop(0, halvings, halve, bounds)
        return jnp.where(is_on, _from_ordered(low), least)

    floor = largest(floor_ref[row], top_k.astype(jnp.float32), True, top_k > 0)
    found = largest(floor, top_p * summed(floor, False), False, top_p < 1)
    found_ref[row] = found

    def store(i: Array, _: None) -> None:
        z_NC, weight_NC = part(i)
        sum_N = jnp.sum(jnp.where(z_NC >= found, weight_NC, jnp.float32(0)), axis=1)
        at_N = i * TILES + jnp.arange(TILES)
        plgpu.store(sum_ref.at[row, at_N], sum_N, mask=at_N < tiles)

    lax.fori_loop(0, parts, store, None)


def _to_ordered(z: Array) -> Array:
    """Return an int32 for an f32, such that the integers order as the floats do."""
    bits = lax.bitcast_convert_type(z, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _from_ordered(key: Array) -> Array:
    return lax.bitcast_convert_type(jnp.where(key >= 0, key, key ^ 0x7FFFFFFF), jnp.float32)
