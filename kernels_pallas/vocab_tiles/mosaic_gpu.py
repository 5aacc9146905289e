"""Sums of tiles on Hopper, in Pallas Mosaic GPU: a thread block takes 64 tiles of one row, a tile a
row of registers.

Reads have no masks there. So vocabularies are whole tiles, and the last 64 of a row end with it:
some are computed twice. Results of a thread block lie together, since a copy begins at whole 16
bytes, and what is there twice is cut out afterwards.

Shapes: see the package; B thread blocks of a row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.implementation import capability_of
from kernels_pallas.paged_attention.common import LOG2E

TILE = 128  # C
TILES = 64  # of a thread block: rows of the layout of a product, which can be summed up


def unsupported(rows: int, vocab: int, tile: int, device: object) -> str | None:
    """Return why so many logits cannot be read on a device, or None."""
    capability = capability_of(device)
    if capability is not None and capability != 9.0:
        return f"compute capability {capability}: only 9.0"
    if tile != TILE or vocab % TILE or vocab < TILES * TILE:
        return f"{vocab} logits in tiles of {tile}: only {TILES} tiles of {TILE} or more, all whole"
    if rows * vocab >= 2**31:
        return f"{rows} rows x {vocab} logits, of which there may be {2**31 - 1}"
    return None


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
    N, B = V // tile, pl.cdiv(V // tile, TILES)

    def read_tiles(z_ref, tau_ref, floor_ref, all_tau_ref, out_ref, out_sm):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        tiles = pl.ds(jnp.minimum(part * TILES, N - TILES), TILES)
        z = plgpu.load(z_ref.at[row, tiles], layout=plgpu.Layout.WGMMA, optimized=False)
        top = jnp.max(z, axis=1)
        # A tile of -inf alone subtracts 0, since -inf - -inf is NaN.
        base = jnp.where(top == float("-inf"), jnp.float32(0), top)
        below = z - lax.broadcast_in_dim(base, z.shape, [0])

        def summed(tau, least):
            weights = jnp.exp2(below * (LOG2E / tau))
            return jnp.sum(jnp.where(z >= least, weights, jnp.float32(0)), axis=1)

        out_sm[0] = top
        out_sm[1] = summed(tau_ref[row], floor_ref[row])
        out_sm[2] = summed(all_tau_ref[row], jnp.float32(float("-inf")))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_sm, out_ref.at[row, :, part])
        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        read_tiles,
        out_type=jax.ShapeDtypeStruct((S, 3, B, TILES), jnp.float32),
        grid=(S, B),
        grid_names=("row", "part"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=(plgpu.SMEM((3, TILES), jnp.float32),),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    out = call(z_SV.reshape(S, N, tile), tau_S, floor_S, all_tau_S)
    whole, last = out[:, :, :-1].reshape(S, 3, -1), out[:, :, -1, B * TILES - N :]
    top_SN, sum_SN, all_SN = jnp.unstack(jnp.concatenate([whole, last], axis=2), axis=1)
    return top_SN, sum_SN, all_SN
