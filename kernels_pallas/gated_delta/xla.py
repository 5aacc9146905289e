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

from kernels_pallas.gated_delta.interface import Shapes
from kernels_pallas.packed_rows import Chunks, PackedRows, chunks_of

CHUNK = 64  # tokens of a row that are computed together
TOGETHER = 8  # chunks that are prepared at once: all but their states is parallel


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return None: it runs everywhere."""
    return None


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
    """See the package. A loop over as many chunks as there are, whatever the lengths of rows. Rows
    are cut at multiples of CHUNK in their own sequences, so that the bits do not depend on where a
    step begins, if that is a multiple too.
    """
    num_tokens, num_rows = q_THD.shape[0], rows.start_S.shape[0]
    chunks, count, together = chunks_of(rows, num_tokens, CHUNK, TOGETHER)
    # One token more, of zeros, stands for all padding, whatever padding holds.
    tokens = [
        jnp.concatenate([x, jnp.zeros((1, *x.shape[1:]), x.dtype)])
        for x in (q_THD, k_THD, v_THD, g_THC, beta_TH)
    ]
    states, o = rows.read(pool), jnp.zeros(v_THD.shape, v_THD.dtype)

    def one_chunk(carry: tuple[Array, Array], x: tuple[_Parts, Chunks]) -> Any:
        (state, states), (parts, chunk) = carry, x
        state = jnp.where(chunk.is_first_N, states[jnp.minimum(chunk.row_N, num_rows - 1)], state)
        o, state = _across(state, parts)
        kept = jnp.where(chunk.is_last_N, chunk.row_N, num_rows)
        return (state, states.at[kept].set(state, mode="drop")), o

    def one_group(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, states, o = carry
        group = Chunks(*(lax.dynamic_slice_in_dim(x, i * together, together) for x in chunks))
        parts = _within(*(jnp.moveaxis(x[group.token_NC], 2, 1) for x in tokens))
        (state, states), o_BHCD = lax.scan(one_chunk, (state, states), (parts, group))
        o = o.at[group.token_NC].set(jnp.moveaxis(o_BHCD, 1, 2), mode="drop")
        return state, states, o

    groups = -(-count // together)
    _, states, o = lax.fori_loop(0, groups, one_group, (jnp.zeros_like(states[0]), states, o))
    return o, rows.written(pool, states)


def dense(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """Return o [S, T, Hv, Dv] and the states [S, Hv, Dk, Dv] after S rows of T tokens each.

    q and k [S, T, Hk, Dk], v [S, T, Hv, Dv], g [S, T, Hv, C], beta [S, T, Hv]; state: that before
    each row. It can be differentiated.
    """
    (num_rows, num_tokens), chunk = v.shape[:2], CHUNK
    num_chunks = max(-(-num_tokens // chunk), 1)

    def in_chunks(x: Array) -> Array:  # [N, S, H, C, ...]
        pads = [(0, 0)] * x.ndim
        pads[1] = (0, num_chunks * chunk - num_tokens)
        x = jnp.pad(x, pads)
        x = x.reshape(x.shape[0], num_chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    parts = jax.vmap(_within)(*map(in_chunks, (q, k, v, g, beta)))

    def one(state: Array, part: _Parts) -> tuple[Array, Array]:
        o, state = jax.vmap(_across)(state, part)
        return state, o

    state, o = lax.scan(one, state, parts)  # o [N, S, Hv, C, Dv]
    o = jnp.moveaxis(jnp.moveaxis(o, 0, 1), 2, 3)
    return o.reshape(num_rows, num_chunks * chunk, *v.shape[2:])[:, :num_tokens], state


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
