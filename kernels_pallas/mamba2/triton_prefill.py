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
from kernels_pallas.token_chunks import between, decays_by_head, product, span_of

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
    compiled, interpreted = (functools.partial(_chunks, interpret=x) for x in (False, True))
    args = (x_THP, g_TH, b_TGN, c_TGN, pool, rows)
    return lax.platform_dependent(*args, cpu=interpreted, default=compiled)


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
    (T, G, N), H, slots = b_ref.shape, x_ref.shape[1], pool_ref.shape[0]
    S, multiply = start_ref.shape[0], functools.partial(product, interpret=interpret)
    width = min(WIDTH, N)
    group = lax.div(head, H // G)
    place_B = part * block + jnp.arange(block)
    pieces = [first + jnp.arange(width) for first in range(0, N, width)]  # of the columns
    span = span_of(loc_ref[row], loc_ref[row + 1], start_ref[row], CHUNK)
    has_tokens, read, write = span.end > span.begin, read_ref[row], write_ref[row]

    def state_at(slot, column_W):
        return pool_ref.at[slot, head, place_B[None, :], column_W[:, None]]

    def masked(does):
        return jnp.broadcast_to(does, (width, block))

    def tokens_of(ref, place, token_C, real_C, index):
        at = ref.at[token_C[:, None], place, index[None, :]]
        mask = jnp.broadcast_to(real_C[:, None], (CHUNK, index.shape[0]))
        return plgpu.load(at, mask=mask, other=0.0)

    def one_chunk(n, states):
        token_C, real_C = span.tokens(n, CHUNK)

        def load(ref, place, index):
            return tokens_of(ref, place, token_C, real_C, index)

        g_C = plgpu.load(g_ref.at[token_C, head], mask=real_C, other=0.0)
        decays, x = decays_by_head(g_C), load(x_ref, head, place_B)
        scores = jnp.zeros((CHUNK, CHUNK), jnp.float32)
        of_state = jnp.zeros((CHUNK, block), jnp.float32)
        for column_W, state in zip(pieces, states, strict=True):
            b, c = (load(ref, group, column_W) for ref in (b_ref, c_ref))
            scores += multiply(c, b.T)
            of_state += multiply(c, state)
        y = multiply(scores * between(decays), x) + jnp.exp(decays.since) * of_state
        at = y_ref.at[token_C[:, None], head, place_B[None, :]]
        plgpu.store(at, y, mask=jnp.broadcast_to(real_C[:, None], y.shape))
        last, left = x * jnp.exp(decays.until), jnp.exp(decays.total)[:, None]
        return tuple(
            left * state + multiply(load(b_ref, group, column_W).T, last)  # loaded again: see WIDTH
            for column_W, state in zip(pieces, states, strict=True)
        )

    begins = masked(has_tokens & (read < slots))
    before = jnp.minimum(read, slots - 1)
    states = tuple(plgpu.load(state_at(before, x), mask=begins, other=0.0) for x in pieces)
    states = lax.fori_loop(0, span.chunks(CHUNK), one_chunk, states)
    writes, after = masked(has_tokens & (write < slots)), jnp.minimum(write, slots - 1)
    for column_W, state in zip(pieces, states, strict=True):
        plgpu.store(state_at(after, column_W), state, mask=writes)

    padding = loc_ref[S] + row * CHUNK  # the programs of all rows share it

    def one_of_zeros(n, carry):
        token_C = padding + n * S * CHUNK + jnp.arange(CHUNK)
        at = y_ref.at[token_C[:, None], head, place_B[None, :]]
        mask = jnp.broadcast_to(token_C[:, None] < T, (CHUNK, block))
        plgpu.store(at, jnp.zeros((CHUNK, block), jnp.float32), mask=mask)
        return carry

    turns = lax.div(jnp.maximum(T - padding, 0) + S * CHUNK - 1, S * CHUNK)
    lax.fori_loop(0, turns, one_of_zeros, 0)
