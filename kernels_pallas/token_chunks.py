"""What kernels have in common that walk over the tokens of a row in chunks, by Triton.

Shapes: T packed tokens; C tokens of a chunk, a power of two; D channels of a head.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

# f32 in three products of 11 bits each, on tensor cores: what is lost is as small as what f32 loses
# where it adds up. One product of 11 bits would lose more than half of the digits.
PRECISION = lax.DotAlgorithmPreset.TF32_TF32_F32_X3


class Span(NamedTuple):
    """The chunks of a row: its tokens are those from begin to end, and chunk i has those of them
    from first + i * C on. first lies before begin where a row begins within a chunk.
    """

    begin: Array
    end: Array
    first: Array

    def chunks(self, chunk: int) -> Array:
        """Return the number of chunks of so many tokens."""
        touched = lax.div(self.end - self.first + chunk - 1, chunk)
        return jnp.where(self.end > self.begin, touched, 0)

    def tokens(self, i: Array, chunk: int) -> tuple[Array, Array]:
        """Return the tokens [C] of chunk i, and which of them it has. These come first."""
        begins = self.first + i * chunk
        token_C = jnp.maximum(begins, self.begin) + jnp.arange(chunk)
        return token_C, token_C < jnp.minimum(begins + chunk, self.end)


def span_of(begin: Array, end: Array, start: Array, chunk: int) -> Span:
    """Return the span of a row's tokens, cut at multiples of `chunk` in the row's own sequence, so
    that the bits do not depend on where a step begins, if that is a multiple too.

    start: the position of the first token in its sequence.
    """
    return Span(begin, end, begin - lax.rem(start, chunk))


def load_tokens(ref, token_C: Array, real_C: Array, head, channel_D: Array) -> Array:
    """Return what tokens have in channels of a head, [C, D], of an array [T, heads, ...]; zeros for
    those that are not real.
    """
    at, mask = _at(ref, token_C, real_C, head, channel_D)
    return plgpu.load(at, mask=mask, other=0.0)


def store_tokens(ref, token_C: Array, real_C: Array, head, channel_D: Array, x: Array) -> None:
    """Write x [C, D] to where load_tokens reads it, for tokens that are real."""
    at, mask = _at(ref, token_C, real_C, head, channel_D)
    plgpu.store(at, x, mask=mask)


def store_padding(ref, first, row, rows: int, head, channel_D: Array, chunk: int) -> None:
    """Write zeros for the tokens from `first` on, which no row has. The programs of so many rows
    share them by chunks.
    """
    num_tokens, begin = ref.shape[0], first + row * chunk

    def one_of_zeros(n, carry):
        token_C = begin + n * rows * chunk + jnp.arange(chunk)
        zeros = jnp.zeros((chunk, channel_D.shape[0]), jnp.float32)
        store_tokens(ref, token_C, token_C < num_tokens, head, channel_D, zeros)
        return carry

    turns = lax.div(jnp.maximum(num_tokens - begin, 0) + rows * chunk - 1, rows * chunk)
    lax.fori_loop(0, turns, one_of_zeros, 0)


def _at(ref, token_C: Array, real_C: Array, head, channel_D: Array):
    at = ref.at[token_C[:, None], head, channel_D[None, :]]
    return at, jnp.broadcast_to(real_C[:, None], (token_C.shape[0], channel_D.shape[0]))


def product(a: Array, b: Array, *, interpret: bool) -> Array:
    """Return the product of two matrices in f32; see PRECISION. CPUs multiply f32 as it is."""
    return plgpu.dot(a, b, precision=lax.Precision.HIGHEST if interpret else PRECISION)


class Decays(NamedTuple):
    """Sums of the decays of a chunk's tokens, g [C, 1] or [C, D]. since: from the chunk's first
    token up to each one; until: after each one; total: of all, [1] or [D].
    """

    since: Array
    until: Array
    total: Array


def decays_by_head(g_C: Array) -> Decays:
    """Return the sums of decays of which a token has one."""
    chunk = g_C.shape[0]
    i, j = places(chunk)
    since, until = (
        jnp.sum(jnp.where(seen, g_C[None, :], 0.0), axis=1)[:, None] for seen in (j <= i, j > i)
    )
    return Decays(since, until, jnp.sum(g_C, axis=0, keepdims=True))


def between(decays: Decays) -> Array:
    """Return what is left of each token j at each token i, [C, C]: zeros where j comes after i."""
    i, j = places(decays.since.shape[0])
    since_C = jnp.sum(decays.since, axis=1)
    # Masked before exp, which would overflow.
    return jnp.exp(jnp.where(j <= i, since_C[:, None] - since_C[None, :], -jnp.inf))


def places(chunk: int) -> tuple[Array, Array]:
    """Return the place of the row [C, 1] and of the column [1, C] of a matrix of two tokens."""
    place_C = jnp.arange(chunk)
    return place_C[:, None], place_C[None, :]
