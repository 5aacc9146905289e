"""The scan of Mamba-2 (arXiv:2405.21060): a state a head that decays by one number a token.

With S [P, N] of a head, zeros before position 0, a token with decay g <= 0, value x, key b and
query c does

    S = exp(g) * S + x b^T;  y = S c

Head h takes key and query of group h // (H / G). In the terms of the paper x and g are the input
and A times the length of the token's time step, b and c are B and C.

IMPLEMENTATIONS lists modules of the same functions:

    unsupported(shapes, device) -> the reason why these shapes cannot run on a device, or None
    prefill(x_THP, g_TH, b_TGN, c_TGN, pool, rows) -> (y_THP, pool)
    decode(x_SHP, g_SH, b_SGN, c_SGN, pool, rows) -> (y_SHP, pool)
    scratch_bytes(shapes, num_rows) -> the bytes that a step of so many rows takes at most beside
        what it is given and returns

All are f32, as the pool [slots, H, P, N] is. rows: a PackedRows, which says whose tokens these are
and which slots of the pool they read and write; in decode, token s is that of row s. y is zeros for
padding. If the bits of a token depend on its row and the tokens before it alone, not on the batch
nor on where a step begins, the module also has `batch_invariant() -> bool`, which returns True.

`reference.py` is the definition. `xla.dense` is the form that can be differentiated.
"""

from kernels_pallas.implementation import CUDA, Implementation

# By name. On a device that several of them support, the first is the fastest.
IMPLEMENTATIONS = {
    "native": Implementation("kernels_cpu.mamba2", ("cpu",)),
    "triton": Implementation("kernels_pallas.mamba2.triton", CUDA),
    "xla": Implementation("kernels_pallas.mamba2.xla"),
}
