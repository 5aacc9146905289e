"""Sums of tiles in Pallas' Triton backend, for CUDA: a program takes TILES tiles of one row.

Shapes: see the package.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.implementation import before_ampere

TILES = 16  # of a program: 16 logits a thread, four of them at a time


def unsupported(rows: int, vocab: int, tile: int, device: Any) -> str | None:
    """Return why so many logits cannot be read, or None: Triton's offsets have 32 bits."""
    if tile != pl.next_power_of_2(tile):
        return f"tiles of {tile}: only powers of two"
    if rows * vocab >= 2**31:
        return f"{rows} rows x {vocab} logits, of which there may be {2**31 - 1}"
    return before_ampere(device)


@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def read_tiles(
    z_SV: Array,
    tau_S: Array,
    floor_S: Array,
    all_tau_S: Array,
    *,
    tile: int,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return maxima and sums; see the package."""
    S, V = z_SV.shape
    assert unsupported(S, V, tile, None) is None
    N = pl.cdiv(V, tile)
    out = jax.ShapeDtypeStruct((S, N), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(S, pl.cdiv(N, TILES)),
        out_shape=(out, out, out),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="read_tiles",
    )(z_SV, tau_S, floor_S, all_tau_S)


def _kernel(z_ref, tau_ref, floor_ref, all_tau_ref, max_ref, sum_ref, all_ref, *, tile: int):
    row, first = pl.program_id(0), pl.program_id(1) * TILES
    at_N = first + jnp.arange(TILES)
    at_NC = at_N[:, None] * tile + jnp.arange(tile)[None, :]
    real_NC = at_NC < z_ref.shape[1]
    z_NC = plgpu.load(z_ref.at[row, at_NC], mask=real_NC, other=float("-inf"))
    tau, floor, all_tau = tau_ref[row], floor_ref[row], all_tau_ref[row]
    max_N = jnp.max(z_NC, axis=1)
    # A tile of -inf alone subtracts 0, since -inf - -inf is NaN.
    below_NC = z_NC - jnp.where(max_N == float("-inf"), jnp.float32(0), max_N)[:, None]
    sums_N = [
        jnp.sum(jnp.where(z_NC >= least, jnp.exp(x_NC), jnp.float32(0)), axis=1)
        for least, x_NC in ((floor, below_NC / tau), (float("-inf"), below_NC / all_tau))
    ]
    real_N = at_N < max_ref.shape[1]
    for ref, x_N in zip((max_ref, sum_ref, all_ref), (max_N, *sums_N), strict=True):
        plgpu.store(ref.at[row, at_N], x_N, mask=real_N)
