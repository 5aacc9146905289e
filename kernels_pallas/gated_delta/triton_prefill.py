"""The gated delta rule over prompts on CUDA cards: one kernel walks each row's tokens in chunks.

A program has some columns of one value head's state in registers. It reads them from the slot that
its row reads, takes the row's tokens chunk by chunk, and writes them to the slot that the row
writes, in place. `xla.py` has the equations of a chunk. No program needs what another has, since
columns of a state do not meet, and nothing of a chunk but its outputs is stored. Programs of the
same head compute the scores of keys and queries anew.

Shapes: T packed tokens, S rows, Hk key heads, Hv value heads, Dk, Dv their widths; G decays of a
token, 1 or Dk; C tokens of a chunk, B columns of a program, W channels of a key that are multiplied
at once, since registers do not hold all.
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
    places,
    product,
    span_of,
    store_padding,
    store_tokens,
)

CHUNK = 16  # C: a power of two
COLUMNS = 32  # B, at most
WIDTH = 16  # W, at most
WARPS = 4


def prefill(
    q_THD: Array,
    k_THD: Array,
    v_THD: Array,
    g_THC: Array,
    beta_TH: Array,
    pool: Array,
    rows: PackedRows,
) -> tuple[Array, Array]:
    """See the package. Rows are cut at multiples of CHUNK in their own sequences, so that the bits
    do not depend on where a step begins, if that is a multiple too. The pool is changed in place
    where XLA lets it; on CPU the kernel is interpreted.
    """
    return interpreted_on_cpu(_chunks, q_THD, k_THD, v_THD, g_THC, beta_TH, pool, rows)


def _chunks(
    q_THD: Array,
    k_THD: Array,
    v_THD: Array,
    g_THC: Array,
    beta_TH: Array,
    pool: Array,
    rows: PackedRows,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    Hv, Dv = v_THD.shape[1:]
    columns = min(COLUMNS, Dv)
    o, pool = pl.pallas_call(
        functools.partial(_kernel, columns=columns, interpret=interpret),
        grid=(rows.start_S.shape[0], Hv, Dv // columns),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v_THD, pool)],
        input_output_aliases={0: 1},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="gated_delta_chunks",
    )(pool, q_THD, k_THD, v_THD, g_THC, beta_TH, *rows)
    return o, pool


def _kernel(
    _,
    q_ref,
    k_ref,
    v_ref,
    g_ref,
    beta_ref,
    loc_ref,
    start_ref,
    read_ref,
    write_ref,
    o_ref,
    pool_ref,
    *,
    columns: int,
    interpret: bool,
):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    (_, Hk, Dk), Hv = q_ref.shape, v_ref.shape[1]
    S, by_channel = start_ref.shape[0], g_ref.shape[2] > 1
    multiply = functools.partial(product, interpret=interpret)
    width = min(WIDTH, Dk)
    key_head = lax.div(head, Hv // Hk)
    column_B = part * columns + jnp.arange(columns)
    pieces = [first + jnp.arange(width) for first in range(0, Dk, width)]  # of the channels
    span = span_of(loc_ref[row], loc_ref[row + 1], start_ref[row], CHUNK)
    has_tokens, read, write = span.end > span.begin, read_ref[row], write_ref[row]
    i, j = places(CHUNK)

    def place_of(channel_W):  # in a state
        return head, channel_W[:, None], column_B[None, :]

    def one_chunk(n, states):
        token_C, real_C = span.tokens(n, CHUNK)

        def load(ref, place, index):
            return load_tokens(ref, token_C, real_C, place, index)

        by_head = None
        if not by_channel:
            g_C = plgpu.load(g_ref.at[token_C, head, 0], mask=real_C, other=0.0)
            by_head = decays_by_head(g_C)

        def scores_of(piece, sums):
            channel_W = piece * width + jnp.arange(width)
            q, k = (load(ref, key_head, channel_W) for ref in (q_ref, k_ref))
            if by_head is None:
                return _scores_by_channel(q, k, load(g_ref, head, channel_W), sums, multiply)
            return tuple(sum_ + multiply(x, k.T) for sum_, x in zip(sums, (k, q), strict=True))

        sums = (jnp.zeros((CHUNK, CHUNK), jnp.float32),) * 2
        by_key, by_query = lax.fori_loop(0, len(pieces), scores_of, sums)
        of_state = o = jnp.zeros((CHUNK, columns), jnp.float32)
        for channel_W, state in zip(pieces, states, strict=True):
            q, k = (load(ref, key_head, channel_W) for ref in (q_ref, k_ref))
            if by_head is None:
                g = load(g_ref, head, channel_W)
                grown = jnp.exp(multiply(jnp.where(j <= i, 1.0, 0.0), g))
                q, k = q * grown, k * grown
            of_state += multiply(k, state)
            o += multiply(q, state)
        if by_head is not None:  # one decay for all channels: of the sums, not of what is summed
            left, grown = between(by_head), jnp.exp(by_head.since)
            by_key, by_query, of_state, o = (
                by_key * left,
                by_query * left,
                of_state * grown,
                o * grown,
            )
        beta_C1 = plgpu.load(beta_ref.at[token_C, head], mask=real_C, other=0.0)[:, None]
        inverse = _inverse(beta_C1 * by_key, multiply)
        change = multiply(inverse, beta_C1 * (load(v_ref, head, column_B) - of_state))
        o += multiply(by_query, change)
        store_tokens(o_ref, token_C, real_C, head, column_B, o)
        if by_head is not None:
            change *= jnp.exp(by_head.until)
        after = []
        for channel_W, state in zip(pieces, states, strict=True):
            k = load(k_ref, key_head, channel_W)  # again: registers hold a piece, not all
            if by_head is None:
                g = load(g_ref, head, channel_W)
                k *= jnp.exp(multiply(jnp.where(j > i, 1.0, 0.0), g))
                total = jnp.sum(g, axis=0)
            else:
                total = by_head.total
            after.append(jnp.exp(total)[:, None] * state + multiply(k.T, change))
        return tuple(after)

    states = tuple(load_state(pool_ref, read, place_of(x), has_tokens) for x in pieces)
    states = lax.fori_loop(0, span.chunks(CHUNK), one_chunk, states)
    for channel_W, state in zip(pieces, states, strict=True):
        store_state(pool_ref, write, place_of(channel_W), state, has_tokens)
    store_padding(o_ref, loc_ref[S], row, S, head, column_B, CHUNK)


def _scores_by_channel(q, k, g, sums, multiply):
    """Return sums [C, C] with what tokens have of each other's keys, of which what is below the
    diagonal counts, and of queries, in the channels of q, k and g [C, W]. As in xla.py, blocks of
    tokens double.
    """
    i, j = places(CHUNK)

    def doubled(level, sums):
        half = lax.shift_left(1, level)
        of_i, of_j = lax.div(i, half), lax.div(j, half)
        is_later = lax.rem(of_i, 2) == 1
        # A token of the later of two blocks decays from where they meet, one before up to there.
        summed = (of_i == of_j) & jnp.where(is_later, j <= i, j > i)
        decay = jnp.exp(multiply(summed.astype(jnp.float32), g))
        earlier, met = (k * decay).T, is_later & (of_j == of_i - 1)
        return tuple(
            sum_ + jnp.where(met, multiply(x * decay, earlier), 0.0)
            for sum_, x in zip(sums, (k, q), strict=True)
        )

    by_key, by_query = lax.fori_loop(0, CHUNK.bit_length() - 1, doubled, sums)
    return by_key, by_query + jnp.where(i == j, jnp.sum(q * k, axis=1)[:, None], 0.0)


def _inverse(matrix, multiply):
    """Return the inverse of the identity and what of a matrix [C, C] is below the diagonal, by
    substitution of blocks that double, as in xla.py: of [[a, 0], [b, c]], where x is the inverse of
    both blocks on the diagonal, it is x - x [[0, 0], [b, 0]] x.
    """
    i, j = places(CHUNK)

    def corner(half):
        of_i, of_j = lax.div(i, half), lax.div(j, half)
        return jnp.where((lax.rem(of_i, 2) == 1) & (of_j == of_i - 1), matrix, 0.0)

    def doubled(level, inverse):
        of_blocks = corner(lax.shift_left(1, level))
        return inverse - multiply(multiply(inverse, of_blocks), inverse)

    of_pairs = jnp.where(i == j, 1.0, 0.0) - corner(1)
    return lax.fori_loop(1, CHUNK.bit_length() - 1, doubled, of_pairs)
