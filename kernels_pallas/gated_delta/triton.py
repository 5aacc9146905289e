"""The gated delta rule on CUDA cards: one token a row in one kernel. `triton_prefill.py`
has prompts.

In plain XLA a step gathers the states of its rows, makes products of them, and scatters what they
become: the states pass through memory three times, not once. Here a program reads some columns of
one head's state, from the slot that its row reads, and writes them to the slot that the row writes,
in place. No program needs what another has.

Shapes: S rows, Hk key heads, Hv value heads, Dk, Dv their widths; C is 1, or Dk where each channel
of a key has a decay of its own; B columns of a program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.gated_delta.interface import Shapes
from kernels_pallas.gated_delta.triton_prefill import prefill as prefill
from kernels_pallas.implementation import before_ampere
from kernels_pallas.packed_rows import PackedRows
from kernels_pallas.state_kernels import interpreted_on_cpu, load_state, store_state

COLUMNS = 32  # B, at most: of f32, what a warp loads of a row of the state at once


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return why these shapes cannot run on a device, or None."""
    for name in ("key_dim", "value_dim"):
        width = getattr(shapes, name)
        if width & (width - 1) or width < 16:
            return f"{name} {width}: only powers of two from 16 on"
    return before_ampere(device)


def scratch_bytes(shapes: Shapes, num_decays: int, num_rows: int) -> int:
    """Return 0: states change where they lie, and nothing of a chunk is stored but its outputs."""
    return 0


def decode(
    q_SHD: Array,
    k_SHD: Array,
    v_SHD: Array,
    g_SHC: Array,
    beta_SH: Array,
    pool: Array,
    rows: PackedRows,
) -> tuple[Array, Array]:
    """See the package. The pool is changed in place where XLA lets it; on CPU the kernel is
    interpreted.
    """
    return interpreted_on_cpu(_step, q_SHD, k_SHD, v_SHD, g_SHC, beta_SH, pool, rows)


def _step(
    q_SHD: Array,
    k_SHD: Array,
    v_SHD: Array,
    g_SHC: Array,
    beta_SH: Array,
    pool: Array,
    rows: PackedRows,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    (S, Hv, Dv), columns = v_SHD.shape, min(COLUMNS, v_SHD.shape[2])
    o, pool = pl.pallas_call(
        functools.partial(_kernel, columns=columns),
        grid=(S, Hv, Dv // columns),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v_SHD, pool)],
        input_output_aliases={0: 1},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="gated_delta_step",
    )(
        pool,
        q_SHD,
        k_SHD,
        v_SHD,
        g_SHC,
        beta_SH,
        rows.lengths_S,
        rows.read_S,
        rows.write_S,
    )
    return o, pool


def _kernel(
    _,
    q_ref,
    k_ref,
    v_ref,
    g_ref,
    beta_ref,
    lengths_ref,
    read_ref,
    write_ref,
    o_ref,
    pool_ref,
    *,
    columns: int,
):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    (_, Hk, Dk), Hv = q_ref.shape, v_ref.shape[1]
    key_head = lax.div(head, Hv // Hk)
    column_B, channel_D = part * columns + jnp.arange(columns), jnp.arange(Dk)
    is_token, read, write = lengths_ref[row] > 0, read_ref[row], write_ref[row]

    place = head, channel_D[:, None], column_B[None, :]
    state = load_state(pool_ref, read, place, is_token)
    q, k = (ref[row, key_head, channel_D][:, None] for ref in (q_ref, k_ref))
    v = v_ref[row, head, column_B]
    decay = (
        jnp.exp(g_ref[row, head, channel_D])[:, None]
        if g_ref.shape[2] > 1
        else jnp.exp(g_ref[row, head, 0])
    )
    state *= decay
    change = beta_ref[row, head] * (v - jnp.sum(state * k, axis=0))
    state += k * change[None, :]
    o = jnp.sum(state * q, axis=0)
    plgpu.store(o_ref.at[row, head, column_B], jnp.where(is_token, o, 0.0))
    store_state(pool_ref, write, place, state, is_token)
