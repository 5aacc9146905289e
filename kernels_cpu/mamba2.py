"""Mamba-2's scan on CPU, in f32; see mamba2.h and kernels_pallas/mamba2."""

from typing import Any

import jax
from jax import Array

from kernels_cpu import functions
from kernels_cpu.library import unavailable
from kernels_pallas.mamba2.interface import Shapes
from kernels_pallas.packed_rows import PackedRows

COLUMNS, ROWS = 16, 4  # of a state, whose sizes are multiples of these, as mamba2.h has them


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Why these shapes cannot run here, or None."""
    del device
    if shapes.state_dim % COLUMNS:
        return f"state_dim {shapes.state_dim}: only multiples of {COLUMNS}"
    if shapes.head_dim % ROWS:
        return f"head_dim {shapes.head_dim}: only multiples of {ROWS}"
    return unavailable()


def scratch_bytes(shapes: Shapes, num_rows: int) -> int:
    """Return 0: states change where they lie, and what is at work stays in registers."""
    return 0


def batch_invariant() -> bool:
    """A token's bits are the same in any batch and chunk, and in decode and prefill."""
    return True


def prefill(
    x_THP: Array, g_TH: Array, b_TGN: Array, c_TGN: Array, pool: Array, rows: PackedRows
) -> tuple[Array, Array]:
    """See kernels_pallas/mamba2. The pool is changed in place where XLA lets it.

    It runs where `unsupported` gives no reason: that has compiled it.
    """
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (x_THP, pool))
    call = jax.ffi.ffi_call("jpaged_mamba2", results, input_output_aliases={4: 1})
    places = (rows.query_start_loc_S1, rows.read_S, rows.write_S)
    y_THP, pool = call(x_THP, functions.apply("exp", g_TH), b_TGN, c_TGN, pool, *places)
    return y_THP, pool


decode = prefill  # one token a row is a case of it, at the same cost
