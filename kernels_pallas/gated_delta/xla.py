"""The gated delta rule in plain XLA: chunks of tokens at once, or one token a row.

Within a chunk of C tokens that begins with state S, with G the running sum of g and
x |i, j| y = sum over channels of x_i exp(G_i - G_j) y_j for i >= j, else 0, the changes
d_i = beta_i (v_i - S_i^T k_i) of all tokens solve one lower triangular system:

    (I + A) d = beta v - (beta k exp(G)) S,   A[i, j] = beta_i (k |i, j| k) for i > j
    o = (q exp(G)) S + (q |i, j| k) d;   S_end = exp(G_C) S + (k exp(G_C - G))^T d

I + A is inverted by substitution. An inverse by products of powers of A, which is popular,
overflows where the keys of a chunk are nearly equal. Padding within a chunk has k = beta = g = 0
and changes nothing. No decay is divided by, since exp(-G) overflows: see `_scores_by_channel`.

Shapes: T packed tokens, S rows, Hk key heads, Hv = R * Hk value heads, C tokens a chunk, B chunks
that are prepared together. In the names of decays, C is 1, or Dk: one for each channel of a key.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import row_chunks
from kernels_pallas.gated_delta.interface import Shapes
from kernels_pallas.packed_rows import PackedRows

CHUNK = 64  # tokens of a row that are computed together
TOGETHER = 8  # chunks that are prepared at once: all but their states is parallel


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return None: it runs everywhere."""
    return None


def scratch_bytes(shapes: Shapes, num_decays: int, num_rows: int) -> int:
    """Return the bytes of the parts of the chunks that are prepared together, and of the states of
    rows before and after. With a decay for each channel, chunks also hold what the tokens of their
    blocks have of each other.
    """
    heads, widest = shapes.num_value_heads, max(shapes.key_dim, shapes.value_dim)
    of_token = 6 * CHUNK + 10 * widest
    if num_decays > 1:
        of_token += 12 * num_decays
    states = 12 * (num_rows + 2) * heads * shapes.key_dim * shapes.value_dim
    return 4 * TOGETHER * heads * CHUNK * of_token + states


def decode(
    q_SHD: Array,
    k_SHD: Array,
    v_SHD: Array,
    g_SHC: Array,
    beta_SH: Array,
    pool: Array,
    rows: PackedRows,
) -> tuple[Array, Array]:
    """See the package. Both products are with the state as it is read, so that it is read once."""
    state = rows.read(pool)
    repeats = v_SHD.shape[1] // k_SHD.shape[1]
    q, k = (jnp.repeat(x, repeats, axis=1) for x in (q_SHD, k_SHD))
    decay = jnp.exp(g_SHC)
    by_key, by_query = (_product("shkv,shk->shv", state, decay * x) for x in (k, q))
    change = beta_SH[..., None] * (v_SHD - by_key)
    state = decay[..., None] * state + k[..., None] * change[..., None, :]
    o = by_query + jnp.sum(q * k, axis=-1, keepdims=True) * change
    o = jnp.where((rows.lengths_S > 0)[:, None, None], o, 0)
    return o, rows.written(pool, state)


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
    do not depend on where a step begins, if that is a multiple too.
    """
    tokens = (q_THD, k_THD, v_THD, g_THC, beta_TH)
    o = jnp.zeros_like(v_THD)
    return row_chunks.prefill(_rule(), tokens, o, pool, rows, chunk=CHUNK, together=TOGETHER)


def dense(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """Return o [S, T, Hv, Dv] and the states [S, Hv, Dk, Dv] after S rows of T tokens each.

    q and k [S, T, Hk, Dk], v [S, T, Hv, Dv], g [S, T, Hv, C], beta [S, T, Hv]; state: that before
    each row. It can be differentiated.
    """
    return row_chunks.dense(_rule(), (q, k, v, g, beta), state, chunk=CHUNK)


def _rule() -> row_chunks.Rule:
    return row_chunks.Rule(_within, _across, outputs=lambda parts, o: o)


class _Parts(NamedTuple):
    """What chunks [..., Hv, C, ...] have before their states are known.

    values, keys: the solutions for beta v and for beta k exp(G), of which d = values - keys S.
    scores: q |i, j| k. queries: q exp(G). last_keys: k exp(G_C - G). decay: exp(G_C), [..., Hv, 1]
    or [..., Hv, Dk].
    """

    values: Array
    keys: Array
    scores: Array
    queries: Array
    last_keys: Array
    decay: Array


class _Scores(NamedTuple):
    """What tokens of chunks [B, Hv, C, ...] have of each other: by_key k |i, j| k, whose diagonal
    is of no use, by_query q |i, j| k, [..., C, C]. since_first: G. to_last: G_C - G.
    """

    by_key: Array
    by_query: Array
    since_first: Array
    to_last: Array


def _within(q: Array, k: Array, v: Array, g: Array, beta: Array) -> _Parts:
    """Return the parts of chunks q, k [B, Hk, C, Dk], v [B, Hv, C, Dv], g [B, Hv, C, 1 or Dk], beta
    [B, Hv, C].
    """
    length, repeats = q.shape[-2], v.shape[-3] // k.shape[-3]
    scores = (_scores if g.shape[-1] == 1 else _scores_by_channel)(q, k, g)
    q, k = (jnp.repeat(x, repeats, axis=1) for x in (q, k))
    strength, grown = beta[..., None], jnp.exp(scores.since_first)
    is_below = jnp.tril(jnp.ones((length, length), bool), -1)[None, None]
    below = jnp.where(is_below, strength * scores.by_key, 0)
    sides = jnp.concatenate([strength * v, strength * k * grown], axis=-1)
    solved = _product("bhij,bhjd->bhid", _inverse(below), sides)
    return _Parts(
        values=solved[..., : v.shape[-1]],
        keys=solved[..., v.shape[-1] :],
        scores=scores.by_query,
        queries=q * grown,
        last_keys=k * jnp.exp(scores.to_last),
        decay=grown[..., -1, :],
    )


def _scores(q: Array, k: Array, g: Array) -> _Scores:
    """Return the scores where a decay is of a whole head: g [B, Hv, C, 1]."""
    length, repeats = q.shape[-2], g.shape[-3] // k.shape[-3]
    total = jnp.cumsum(g, axis=-2)
    is_seen = jnp.tril(jnp.ones((length, length), bool))[None, None]
    # Masked before exp, which would overflow above the diagonal.
    decay = jnp.exp(jnp.where(is_seen, total - jnp.swapaxes(total, -1, -2), -jnp.inf))
    by_key, by_query = (
        decay * jnp.repeat(_product("bhik,bhjk->bhij", x, k), repeats, axis=1) for x in (k, q)
    )
    return _Scores(by_key, by_query, since_first=total, to_last=total[..., -1:, :] - total)


def _scores_by_channel(q: Array, k: Array, g: Array) -> _Scores:
    """Return the scores where each channel has its decay: g [B, Hv, C, Dk], C a power of 2.

    By blocks that double: between the tokens j of a block and i of the next one, exp(G_i - G_j) is
    the product of what decays from j to the end of its block and from there to i. Both are at most
    1, so neither overflows, whatever the decays, and both are sums of g alone, not differences.
    """
    repeats = g.shape[-3] // k.shape[-3]
    # [B, Hv, blocks, tokens of a block, Dk]: every token is a block at first.
    q, k = (jnp.repeat(x, repeats, axis=1)[..., None, :] for x in (q, k))
    since_first, to_last = g[..., None, :], jnp.zeros_like(g)[..., None, :]
    by_key, by_query = (jnp.sum(x * k, axis=-1, keepdims=True) for x in (k, q))
    while q.shape[-3] > 1:
        (q0, k0, since0, to0), (q1, k1, since1, to1) = (
            [x[..., half::2, :, :] for x in (q, k, since_first, to_last)] for half in (0, 1)
        )
        grown = jnp.exp(since1)
        later = jnp.concatenate([k1 * grown, q1 * grown], axis=-2)
        corners = _product("...ik,...jk->...ij", later, k0 * jnp.exp(to0))
        corners = jnp.split(corners, 2, axis=-2)
        by_key, by_query = map(_lower_blocks, (by_key, by_query), corners)
        q, k = jnp.concatenate([q0, q1], axis=-2), jnp.concatenate([k0, k1], axis=-2)
        since_first = jnp.concatenate([since0, since0[..., -1:, :] + since1], axis=-2)
        to_last = jnp.concatenate([to0 + since1[..., -1:, :], to1], axis=-2)
    return _Scores(*(x[..., 0, :, :] for x in (by_key, by_query, since_first, to_last)))


def _lower_blocks(diagonal: Array, corner: Array) -> Array:
    """Return matrices [[a, 0], [c, b]] [..., N, 2n, 2n] of the blocks a, b, a, b, ... [..., 2N, n,
    n] and c [..., N, n, n].
    """
    first, second = diagonal[..., 0::2, :, :], diagonal[..., 1::2, :, :]
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)


@jax.custom_jvp
def _inverse(below: Array) -> Array:
    """Return the inverse of I + below, strictly lower triangular matrices [B, H, C, C] with C a
    power of 2.

    By substitution of blocks that double, log2(C) times two products: of [[a, 0], [b, c]] the
    inverse is [[1/a, 0], [-1/c b 1/a, 1/c]]. Row by row it would be a loop of C steps, each of
    which a GPU would have to be launched with.
    """
    *lead, length, _ = below.shape
    inverse = jnp.ones((*lead, length, 1, 1), below.dtype)  # of the blocks on the diagonal
    for half in (1 << n for n in range(length.bit_length() - 1)):
        count = length // (2 * half)
        blocks = below.reshape(*lead, count, 2, half, count, 2, half)
        lower = jnp.einsum("...ninj->...nij", blocks[..., 1, :, :, 0, :])
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = _product("...ij,...jk->...ik", second, lower)
        inverse = _lower_blocks(inverse, -_product("...ij,...jk->...ik", corner, first))
    return inverse[..., 0, :, :]


@_inverse.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = _inverse(*primals)
    return inverse, -_product("bhij,bhjk,bhkl->bhil", inverse, tangents[0], inverse)


def _across(state: Array, parts: _Parts) -> tuple[Array, Array]:
    """Return o [Hv, C, Dv] of one chunk that begins with state [Hv, Dk, Dv], and its end's."""
    change = parts.values - _product("hck,hkv->hcv", parts.keys, state)
    o = _product("hck,hkv->hcv", parts.queries, state)
    o = o + _product("hij,hjv->hiv", parts.scores, change)
    state = parts.decay[..., None] * state
    return o, state + _product("hck,hcv->hkv", parts.last_keys, change)


def _product(axes: str, *factors: Array) -> Array:
    # Without a precision, a TPU would round both to bf16 and a GPU to 11 bits.
    return jnp.einsum(axes, *factors, precision=lax.Precision.HIGHEST)
