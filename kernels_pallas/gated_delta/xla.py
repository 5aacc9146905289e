"""The gated delta rule in plain XLA: chunks of tokens at once, or one token a row.

Within a chunk of C tokens that begins with state S, with G the running sum of g and
M[i, j] = exp(G_i - G_j) for i >= j, else 0, the changes d_i = beta_i (v_i - S_i^T k_i) of all
tokens solve one lower triangular system:

    (I + A) d = beta v - (beta k exp(G)) S,   A[i, j] = beta_i (k_i . k_j) M[i, j] for i > j
    o = (q exp(G)) S + ((q k^T) M) d;   S_end = exp(G_C) S + (k exp(G_C - G))^T d

I + A is inverted by substitution. An inverse by products of powers of A, which is popular,
overflows where the keys of a chunk are nearly equal. Padding within a chunk has k = beta = g = 0
and changes nothing.

Shapes: T packed tokens, S rows, Hk key heads, Hv = R * Hk value heads, C tokens a chunk, B chunks
that are prepared together.
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
    g_SH: Array,
    beta_SH: Array,
    pool: Array,
    rows: PackedRows,
) -> tuple[Array, Array]:
    """See the package. Both products are with the state as it is read, so that it is read once."""
    state = rows.read(pool)
    repeats = v_SHD.shape[1] // k_SHD.shape[1]
    q, k = (jnp.repeat(x, repeats, axis=1) for x in (q_SHD, k_SHD))
    by_key, by_query = (_product("shkv,shk->shv", state, x) for x in (k, q))
    decay = jnp.exp(g_SH)[..., None]
    change = beta_SH[..., None] * (v_SHD - decay * by_key)
    state = decay[..., None] * state + k[..., None] * change[..., None, :]
    o = decay * by_query + jnp.sum(q * k, axis=-1, keepdims=True) * change
    o = jnp.where((rows.lengths_S > 0)[:, None, None], o, 0)
    return o, rows.written(pool, state)


def prefill(
    q_THD: Array,
    k_THD: Array,
    v_THD: Array,
    g_TH: Array,
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
        for x in (q_THD, k_THD, v_THD, g_TH, beta_TH)
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

    q and k [S, T, Hk, Dk], v [S, T, Hv, Dv], g and beta [S, T, Hv]; state: that before each row. It
    can be differentiated.
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
    scores: (q k^T) M. queries: q exp(G). last_keys: k exp(G_C - G). decay: exp(G_C), [..., Hv].
    """

    values: Array
    keys: Array
    scores: Array
    queries: Array
    last_keys: Array
    decay: Array


def _within(q: Array, k: Array, v: Array, g: Array, beta: Array) -> _Parts:
    """Return the parts of chunks q, k [B, Hk, C, Dk], v [B, Hv, C, Dv], g, beta [B, Hv, C]."""
    length, repeats = q.shape[-2], v.shape[-3] // k.shape[-3]
    total = jnp.cumsum(g, axis=-1)
    is_seen = jnp.tril(jnp.ones((length, length), bool))[None, None]
    # Masked before exp, which would overflow above the diagonal.
    decay = jnp.exp(jnp.where(is_seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    by_key, by_query = (_product("bhik,bhjk->bhij", x, k) for x in (k, q))
    by_key, by_query, q, k = (jnp.repeat(x, repeats, axis=1) for x in (by_key, by_query, q, k))
    strength, grown = beta[..., None], jnp.exp(total)[..., None]
    below = jnp.where(is_seen & ~jnp.eye(length, dtype=bool)[None, None], strength * by_key, 0)
    sides = jnp.concatenate([strength * v, strength * k * grown], axis=-1)
    solved = _product("bhij,bhjd->bhid", _inverse(below * decay), sides)
    return _Parts(
        values=solved[..., : v.shape[-1]],
        keys=solved[..., v.shape[-1] :],
        scores=by_query * decay,
        queries=q * grown,
        last_keys=k * jnp.exp(total[..., -1:] - total)[..., None],
        decay=jnp.exp(total[..., -1]),
    )


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
        corner = -_product("...ij,...jk->...ik", corner, first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
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
    state = parts.decay[:, None, None] * state
    return o, state + _product("hck,hcv->hkv", parts.last_keys, change)


def _product(axes: str, *factors: Array) -> Array:
    # Without a precision, a TPU would round both to bf16 and a GPU to 11 bits.
    return jnp.einsum(axes, *factors, precision=lax.Precision.HIGHEST)
