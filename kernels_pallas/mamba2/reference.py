"""The definition of Mamba-2's scan in numpy: one token after the other.

Shapes: T packed tokens, S rows, H heads of width P, G groups of keys and queries of width N.
Arguments and results are those of `prefill` in kernels_pallas/mamba2/__init__.py.
"""

import numpy as np
from numpy.typing import ArrayLike

from kernels_pallas.packed_rows import PackedRows


def prefill(
    x_THP: ArrayLike,
    g_TH: ArrayLike,
    b_TGN: ArrayLike,
    c_TGN: ArrayLike,
    pool: ArrayLike,
    rows: PackedRows,
    *,
    exact: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return y [T, H, P], zeros for padding, and the pool [slots, H, P, N].

    exact: compute and return in float64 instead of f32.
    """
    dtype = np.float64 if exact else np.float32
    x, g, b, c = (np.asarray(part, dtype) for part in (x_THP, g_TH, b_TGN, c_TGN))
    states = np.array(pool, dtype)
    before = states.copy()
    places = (rows.query_start_loc_S1, rows.read_S, rows.write_S)
    loc, read, write = (np.asarray(place) for place in places)
    y = np.zeros(x.shape, dtype)
    for row in range(len(read)):
        if loc[row] == loc[row + 1]:
            continue
        is_held = read[row] < len(before)
        state = before[read[row]].copy() if is_held else np.zeros(states.shape[1:], dtype)
        for t in range(loc[row], loc[row + 1]):
            y[t], state = step(x[t], g[t], b[t], c[t], state)
        if write[row] < len(states):
            states[write[row]] = state
    return y, states


def step(
    x_HP: np.ndarray, g_H: np.ndarray, b_GN: np.ndarray, c_GN: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return y [H, P] of one token and the state [H, P, N] after it."""
    repeats = x_HP.shape[0] // b_GN.shape[0]
    b, c = (np.repeat(part, repeats, axis=0) for part in (b_GN, c_GN))
    state = np.exp(g_H)[:, None, None] * state + x_HP[:, :, None] * b[:, None, :]
    return np.einsum("hpn,hn->hp", state, c), state
