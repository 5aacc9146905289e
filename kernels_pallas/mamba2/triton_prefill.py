"""Mamba-2's scan over prompts on CUDA cards: one kernel walks each row's tokens in chunks.

A program has some rows of one head's state in registers. It reads them from the slot that its row
of the batch reads, takes the row's tokens chunk by chunk, and writes them to the slot that it
writes, in place. `xla.py` has the equations of a chunk. No program needs what another has, and
nothing of a chunk but its outputs is stored.

Shapes: T packed tokens, S rows, H heads of width P, G groups of keys and queries of width N; C
tokens of a chunk, B rows of a state that a program takes, W of its columns that are multiplied at
once, since registers do not hold all.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.packed_rows import PackedRows
from kernels_pallas.state_kernels import interpreted_on_cpu, load_state, store_state
from kernels_pallas.token_chunks import (
    between,
    decays_by_head,
    load_tokens,
    product,
    span_of,
    store_padding,
    store_tokens,
)

CHUNK = 16  # C: a power of two
ROWS = 32  # B, at most
WIDTH = 16  # W, at most
WARPS = 4


def prefill(
    x_THP: Array, g_TH: Array, b_TGN: Array, c_TGN: Array, pool: Array, rows: PackedRows
) -> tuple[Array, Array]:
    """See the package. Rows are cut at multiples of CHUNK in their own sequences, so that the bits
    do not depend on where a step begins, if that is a multiple too. The pool is changed in place
    where XLA lets it; on CPU the kernel is interpreted.
    """
    return interpreted_on_cpu(_chunks, x_THP, g_TH, b_TGN, c_TGN, pool, rows)


def _chunks(
    x_THP: Array,
    g_TH: Array,
    b_TGN: Array,
    c_TGN: Array,
    pool: Array,
    rows: PackedRows,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    H, P = x_THP.shape[1:]
    block = min(ROWS, P)
    y, pool = pl.pallas_call(
        functools.partial(_kernel, block=block, interpret=interpret),
        grid=(rows.start_S.shape[0], H, P // block),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (x_THP, pool)],
        input_output_aliases={0: 1},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="mamba2_chunks",
    )(pool, x_THP, g_TH, b_TGN, c_TGN, *rows)
    return y, pool


def _kernel(
    _,
    x_ref,
    g_ref,
    b_ref,
    c_ref,
    loc_ref,
    start_ref,
    read_ref,
    write_ref,
    y_ref,
    pool_ref,
    *,
    block: int,
    interpret: bool,
):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    (_, G, N), H = b_ref.shape, x_ref.shape[1]
    S, multiply = start_ref.shape[0], functools.partial(product, interpret=interpret)
    width = min(WIDTH, N)
    group = lax.div(head, H // G)
    place_B = part * block + jnp.arange(block)
    pieces = [first + jnp.arange(width) for first in range(0, N, width)]  # of the columns
    span = span_of(loc_ref[row], loc_ref[row + 1], start_ref[row], CHUNK)
    has_tokens, read, write = span.end > span.begin, read_ref[row], write_ref[row]

    def place_of(column_W):  # in a state
        return head, place_B[None, :], column_W[:, None]

    def one_chunk(n, states):
        token_C, real_C = span.tokens(n, CHUNK)

        def load(ref, place, index):
            return load_tokens(ref, token_C, real_C, place, index)

        g_C = plgpu.load(g_ref.at[token_C, head], mask=real_C, other=0.0)
        decays, x = decays_by_head(g_C), load(x_ref, head, place_B)
        scores = jnp.zeros((CHUNK, CHUNK), jnp.float32)
        of_state = jnp.zeros((CHUNK, block), jnp.float32)
        for column_W, state in zip(pieces, states, strict=True):
            b, c = (load(ref, group, column_W) for ref in (b_ref, c_ref))
            scores += multiply(c, b.T)
            of_state += multiply(c, state)
        y = multiply(scores * between(decays), x) + jnp.exp(decays.since) * of_state
        store_tokens(y_ref, token_C, real_C, head, place_B, y)
        last, left = x * jnp.exp(decays.until), jnp.exp(decays.total)[:, None]
        return tuple(
            left * state + multiply(load(b_ref, group, column_W).T, last)  # loaded again: see WIDTH
            for column_W, state in zip(pieces, states, strict=True)
        )

    states = tuple(load_state(pool_ref, read, place_of(x), has_tokens) for x in pieces)
    states = lax.fori_loop(0, span.chunks(CHUNK), one_chunk, states)
    for column_W, state in zip(pieces, states, strict=True):
        store_state(pool_ref, write, place_of(column_W), state, has_tokens)
    store_padding(y_ref, loc_ref[S], row, S, head, place_B, CHUNK)
