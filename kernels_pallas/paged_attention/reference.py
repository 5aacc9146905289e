"""The definition of paged attention in numpy, one row at a time.

Every implementation is tested against it.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim, V width of a value; Q queries of a row, C tokens of context
that any of them sees, N = Q*G.
"""

import numpy as np
from jax.typing import ArrayLike

from kernels_pallas.paged_attention.interface import Options, kv_heads_of, unknown_options
from kernels_pallas.paged_attention.pool_layout import ScaledPool

OPTIONS = ("scale", "soft_cap", "window", "value_dim", "sinks", "latent", "causal")
QUERIES = 256  # computed together; bounds the memory of their scores


def prefill(
    q_THD: ArrayLike,
    pool: ArrayLike | ScaledPool,
    layer: int,
    block_table_SM: ArrayLike,
    context_lens_S: ArrayLike,
    query_start_loc_S1: ArrayLike,
    *,
    options: Options,
    sinks_H: ArrayLike | None = None,
    exact: bool = False,
) -> np.ndarray:
    """Attention of packed queries over paged keys and values, [T, H, V] in q's dtype.

    pool [L*N, P, 2K, D]: row layer*N + b is block b of a layer, axis 2 is K0, V0, K1, V1, ...;
    [L*N, P, K, D + V], a head's key and then its value, where their widths differ; [L*N, P, K, D],
    a latent of V numbers and a rotated key, of latents. Query head h reads KV head h // G. A
    ScaledPool stands for its values times their scales.
    block_table_SM int32, padded with 0. context_lens_S counts a row's tokens, its queries included:
    their own keys and values are in the pool.
    query_start_loc_S1 is cumulative: row r owns the packed tokens query_start_loc[r] up to
    query_start_loc[r+1] - 1, the last of which sits at position context_lens[r] - 1. Padding gives
    zeros: tokens past query_start_loc[S]; a row without queries is skipped. A query sees itself and
    all before it, or, with a window w, itself and the w - 1 before it; where it is not causal, as
    many after it too. soft_cap c turns a score s into c * tanh(s / c). sinks_H: one more score of
    each head, which takes its share of the softmax and adds nothing. Slots that no
    query sees may hold anything, NaN too.

    exact: compute and return in float64. Otherwise as a plain implementation would: f32 scores and
    softmax, probabilities (times V's scales) rounded to the pool's dtype (to q's for a
    ScaledPool), the result to q's.
    """
    q = np.asarray(q_THD)
    values, scales = (
        (pool.values, np.asarray(pool.scales)) if isinstance(pool, ScaledPool) else (pool, None)
    )
    kv_pool = np.asarray(values)
    tables, contexts, starts = (
        np.asarray(x) for x in (block_table_SM, context_lens_S, query_start_loc_S1)
    )
    attention, window = options.attention, options.attention.window
    dtype = np.dtype(np.float64 if exact else np.float32)
    P, K, (_, H, D) = kv_pool.shape[1], kv_heads_of(kv_pool, attention), q.shape
    V = attention.value_width(D)
    E, of_value = attention.places(D)
    if reason := unknown_options(attention, OPTIONS):
        raise NotImplementedError(f"reference: {reason}")
    assert attention.sinks == (sinks_H is not None)
    first_block = layer * (kv_pool.shape[0] // options.num_layers)
    out = np.zeros((len(q), H, V), dtype)
    for row, context in enumerate(contexts):
        last = starts[row + 1]
        for token in range(starts[row], last, QUERIES):
            q_QHD = q[token : min(token + QUERIES, last)].astype(dtype)
            position_Q = context - last + token + np.arange(len(q_QHD))
            first_Q = np.zeros_like(position_Q)
            if window is not None:
                first_Q = np.maximum(0, position_Q - window + 1)
            last_Q = position_Q if attention.causal else np.full_like(position_Q, context - 1)
            if window is not None and not attention.causal:
                last_Q = np.minimum(last_Q, position_Q + window - 1)
            seen_C = np.arange(first_Q[0], last_Q[-1] + 1)
            slots = (first_block + tables[row, seen_C // P], seen_C % P)
            kv = kv_pool[slots].astype(dtype).reshape(len(seen_C), K, E)
            k_CKD, v_CKV = kv[..., :D], kv[..., of_value]
            if scales is not None and attention.latent:
                of_CK2 = scales[slots].astype(dtype).reshape(len(seen_C), K, 2)
                k_CKD = k_CKD * np.repeat(of_CK2, (V, D - V), axis=-1)
                v_CKV = k_CKD[..., :V]
            elif scales is not None:
                of_CK2 = scales[slots].astype(dtype).reshape(len(seen_C), K, 2)
                k_CKD, v_CKV = k_CKD * of_CK2[..., :1], v_CKV * of_CK2[..., 1:]
            k_KCD, v_KCV = k_CKD.swapaxes(0, 1), v_CKV.swapaxes(0, 1)
            q_KND = q_QHD.reshape(-1, K, H // K, q.shape[2]).swapaxes(0, 1)
            q_KND = q_KND.reshape(K, -1, q.shape[2])
            score_KNC = q_KND @ k_KCD.swapaxes(1, 2) * dtype.type(attention.scale)
            if attention.soft_cap is not None:
                soft_cap = dtype.type(attention.soft_cap)
                score_KNC = soft_cap * np.tanh(score_KNC / soft_cap)
            sees_QC = (seen_C <= last_Q[:, None]) & (seen_C >= first_Q[:, None])
            sees_NC = np.repeat(sees_QC, H // K, axis=0)
            score_KNC = np.where(sees_NC, score_KNC, dtype.type(-np.inf))
            sinks_KG = np.full((K, H // K), -np.inf) if sinks_H is None else np.asarray(sinks_H)
            sinks_KN = np.tile(sinks_KG.astype(dtype).reshape(K, -1), (1, len(q_QHD)))
            most_KN = np.maximum(score_KNC.max(axis=2), sinks_KN)
            p_KNC = np.exp(score_KNC - most_KN[:, :, None])
            total_KN = p_KNC.sum(axis=2) + np.exp(sinks_KN - most_KN)
            p_KNC /= total_KN[:, :, None]
            if not exact:
                # With scales, the products of probabilities and V's scales are rounded.
                first = 0 if attention.latent else 1
                by_K1C = 1 if scales is None else scales[slots][:, first::2].T[:, None]
                by_K1C = np.asarray(by_K1C, dtype)
                rounded = kv_pool.dtype if scales is None else q.dtype
                p_KNC = (p_KNC * by_K1C).astype(rounded).astype(dtype) / by_K1C
            o_KQGV = (p_KNC @ v_KCV).reshape(K, len(q_QHD), H // K, -1)
            out[token : token + len(q_QHD)] = o_KQGV.swapaxes(0, 1).reshape(-1, H, V)
    return out if exact else out.astype(q.dtype)


def decode(
    q_SHD: ArrayLike,
    pool: ArrayLike | ScaledPool,
    layer: int,
    block_table_SM: ArrayLike,
    context_lens_S: ArrayLike,
    *,
    options: Options,
    sinks_H: ArrayLike | None = None,
    exact: bool = False,
) -> np.ndarray:
    """The same for one query a row, [S, H, V]; a row with context 0 is padding and gives zeros."""
    q, contexts = np.asarray(q_SHD), np.asarray(context_lens_S)
    live = np.flatnonzero(contexts > 0)
    starts = np.arange(len(live) + 1)
    table = np.asarray(block_table_SM)[live]
    result = prefill(
        q[live],
        pool,
        layer,
        table,
        contexts[live],
        starts,
        options=options,
        exact=exact,
        sinks_H=sinks_H,
    )
    out = np.zeros((len(q), *result.shape[1:]), result.dtype)
    out[live] = result
    return out
