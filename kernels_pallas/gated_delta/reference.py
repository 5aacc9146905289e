"""The definition of the gated delta rule in numpy: one token after the other.

Shapes: T packed tokens, S rows, Hk key heads of width Dk, Hv value heads of width Dv. Arguments and
results are those of `prefill` in kernels_pallas/gated_delta/__init__.py.
"""

import numpy as np
from numpy.typing import ArrayLike

from kernels_pallas.packed_rows import PackedRows


def prefill(
    q_THD: ArrayLike,
    k_THD: ArrayLike,
    v_THD: ArrayLike,
    g_THC: ArrayLike,
    beta_TH: ArrayLike,
    pool: ArrayLike,
    rows: PackedRows,
    *,
    exact: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return o [T, Hv, Dv], zeros for padding, and the pool [slots, Hv, Dk, Dv].

    exact: compute and return in float64 instead of f32.
    """
    dtype = np.float64 if exact else np.float32
    q, k, v, g, beta = (np.asarray(x, dtype) for x in (q_THD, k_THD, v_THD, g_THC, beta_TH))
    states = np.array(pool, dtype)
    before = states.copy()
    loc, read, write = (np.asarray(x) for x in (rows.query_start_loc_S1, rows.read_S, rows.write_S))
    o = np.zeros(v.shape, dtype)
    for row in range(len(read)):
        if loc[row] == loc[row + 1]:
            continue
        is_held = read[row] < len(before)
        state = before[read[row]].copy() if is_held else np.zeros(states.shape[1:], dtype)
        for t in range(loc[row], loc[row + 1]):
            o[t], state = step(q[t], k[t], v[t], g[t], beta[t], state)
        if write[row] < len(states):
            states[write[row]] = state
    return o, states


def step(
    q_HD: np.ndarray,
    k_HD: np.ndarray,
    v_HD: np.ndarray,
    g_HC: np.ndarray,
    beta_H: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return o [Hv, Dv] of one token and the state [Hv, Dk, Dv] after it."""
    repeats = v_HD.shape[0] // q_HD.shape[0]
    q, k = (np.repeat(x, repeats, axis=0) for x in (q_HD, k_HD))
    state = state * np.exp(g_HC)[:, :, None]
    change = beta_H[:, None] * (v_HD - np.einsum("hkv,hk->hv", state, k))
    state = state + k[:, :, None] * change[:, None, :]
    return np.einsum("hkv,hk->hv", state, q), state
