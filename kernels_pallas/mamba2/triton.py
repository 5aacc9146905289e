"""Mamba-2's scan on CUDA cards: one token a row in one kernel. `triton_prefill.py` has
prompts.

In plain XLA a step gathers the states of its rows and scatters what they become: the states pass
through memory twice as often as they have to. Here a program reads some rows of one head's state
from the slot that its row of the batch reads, and writes them to the slot that it writes, in place.
No program needs what another has.

Shapes: S rows, H heads of width P, G groups of keys and queries of width N; B rows of a state that
a program takes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.implementation import before_ampere
from kernels_pallas.mamba2.interface import Shapes
from kernels_pallas.mamba2.triton_prefill import prefill as prefill
from kernels_pallas.packed_rows import PackedRows
from kernels_pallas.state_kernels import interpreted_on_cpu, load_state, store_state

ROWS = 32  # B, at most: with N = 128, 32 numbers a thread


def unsupported(shapes: Shapes, device: object) -> str | None:
    """Return why these shapes cannot run on a device, or None."""
    for name in ("head_dim", "state_dim"):
        width = getattr(shapes, name)
        if width & (width - 1) or width < 16:
            return f"{name} {width}: only powers of two from 16 on"
    return before_ampere(device)


def scratch_bytes(shapes: Shapes, num_rows: int) -> int:
    """Return 0: states change where they lie, and nothing of a chunk is stored but its outputs."""
    return 0


def decode(
    x_SHP: Array, g_SH: Array, b_SGN: Array, c_SGN: Array, pool: Array, rows: PackedRows
) -> tuple[Array, Array]:
    """See the package. The pool is changed in place where XLA lets it; on CPU the kernel is
    interpreted.
    """
    return interpreted_on_cpu(_step, x_SHP, g_SH, b_SGN, c_SGN, pool, rows)


def _step(
    x_SHP: Array,
    g_SH: Array,
    b_SGN: Array,
    c_SGN: Array,
    pool: Array,
    rows: PackedRows,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    (S, H, P), block = x_SHP.shape, min(ROWS, x_SHP.shape[2])
    y, pool = pl.pallas_call(
        functools.partial(_kernel, block=block),
        grid=(S, H, P // block),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (x_SHP, pool)],
        input_output_aliases={0: 1},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="mamba2_step",
    )(pool, x_SHP, g_SH, b_SGN, c_SGN, rows.lengths_S, rows.read_S, rows.write_S)
    return y, pool


def _kernel(
    _,
    x_ref,
    g_ref,
    b_ref,
    c_ref,
    lengths_ref,
    read_ref,
    write_ref,
    y_ref,
    pool_ref,
    *,
    block: int,
):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    (_, G, N), H = b_ref.shape, x_ref.shape[1]
    group = lax.div(head, H // G)
    place_B, column_N = part * block + jnp.arange(block), jnp.arange(N)
    is_token, read, write = lengths_ref[row] > 0, read_ref[row], write_ref[row]

    place = head, place_B[:, None], column_N[None, :]
    state = load_state(pool_ref, read, place, is_token)
    x = x_ref[row, head, place_B]
    b, c = (ref[row, group, column_N][None, :] for ref in (b_ref, c_ref))
    state = jnp.exp(g_ref[row, head]) * state + x[:, None] * b
    y = jnp.sum(state * c, axis=1)
    plgpu.store(y_ref.at[row, head, place_B], jnp.where(is_token, y, 0.0))
    store_state(pool_ref, write, place, state, is_token)
