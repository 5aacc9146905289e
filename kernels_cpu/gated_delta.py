"""The gated delta rule on CPU, in f32; see gated_delta.h and kernels_pallas/gated_delta."""

from typing import Any

import jax
from jax import Array

from kernels_cpu import functions
from kernels_cpu.library import unavailable
from kernels_pallas.gated_delta.interface import Shapes
from kernels_pallas.packed_rows import PackedRows

COLUMNS = 32  # of a tile, as gated_delta.h has it


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Why these shapes cannot run here, or None."""
    del device
    if shapes.value_dim % COLUMNS:
        return f"value_dim {shapes.value_dim}: only multiples of {COLUMNS}"
    return unavailable()


def scratch_bytes(shapes: Shapes, num_decays: int, num_rows: int) -> int:
    """Return 0: states change where they lie, and what is at work stays in registers."""
    return 0


def batch_invariant() -> bool:
    """A token's bits are the same in any batch and chunk, and in decode and prefill."""
    return True


def prefill(
    q_THD: Array,
    k_THD: Array,
    v_THD: Array,
    g_THC: Array,
    beta_TH: Array,
    pool: Array,
    rows: PackedRows,
) -> tuple[Array, Array]:
    """See kernels_pallas/gated_delta. The pool is changed in place where XLA lets it.

    It runs where `unsupported` gives no reason: that has compiled it.
    """
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v_THD, pool))
    call = jax.ffi.ffi_call("jpaged_gated_delta", results, input_output_aliases={5: 1})
    places = (rows.query_start_loc_S1, rows.read_S, rows.write_S)
    decay_THC = functions.apply("exp", g_THC)
    o_THD, pool = call(q_THD, k_THD, v_THD, decay_THC, beta_TH, pool, *places)
    return o_THD, pool


decode = prefill  # one token a row is a case of it, at the same cost
