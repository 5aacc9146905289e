"""INTERIM stand-in (being replaced): gathers the whole context."""

import jax
import jax.numpy as jnp


def paged_attention(q, pool, layer, bt, ctx, qs, *, num_layers=1, scale, sliding_window=None, soft_cap=None):
    T, H, D = q.shape
    N, P, K = pool.shape[0] // num_layers, pool.shape[1], pool.shape[2] // 2
    S, M = bt.shape
    kv = pool[layer * N + bt].reshape(S, M * P, K, 2, D).astype(jnp.float32)
    t = jnp.arange(T)
    row = (qs[1:][None] <= t[:, None]).sum(1)
    r = jnp.minimum(row, S - 1)
    pos = t + (ctx - qs[1:])[r]
    kvt = kv[r]
    s = jnp.einsum("tkgd,tpkd->tkgp", q.reshape(T, K, H // K, D).astype(jnp.float32), kvt[:, :, :, 0]) * scale
    p = jnp.arange(M * P)
    m = p[None] <= pos[:, None]
    if sliding_window:
        m &= p[None] > pos[:, None] - sliding_window
    s = jnp.where(m[:, None, None], s, -1e30)
    v = jnp.where(m[:, :, None, None], kvt[:, :, :, 1], 0.0)
    o = jnp.einsum("tkgp,tpkd->tkgd", jax.nn.softmax(s, -1), v).reshape(T, H, D)
    return jnp.where((row < S)[:, None, None], o, 0.0).astype(q.dtype)


def paged_attention_decode(q, pool, layer, bt, ctx, **k):
    return paged_attention(q, pool, layer, bt, ctx, jnp.arange(q.shape[0] + 1, dtype=jnp.int32), **k)
