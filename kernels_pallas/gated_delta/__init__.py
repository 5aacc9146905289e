"""The gated delta rule (arXiv:2412.06464): attention whose cache is one matrix a value head.

With S [Dk, Dv] of a value head, zeros before position 0, a token with decay g <= 0, strength beta,
query q, key k and value v does

    S = exp(g) * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q

where g is one number, or one for each channel of the key, a row of S (Kimi Delta Attention,
arXiv:2510.26692).

Value head h takes query and key of key head h // (Hv / Hk). Queries and keys come normalised, and
queries scaled.

IMPLEMENTATIONS lists modules of the same functions:

    unsupported(shapes, device) -> the reason why these shapes cannot run on a device, or None
    prefill(q_THD, k_THD, v_THD, g_THC, beta_TH, pool, rows) -> (o_THD, pool)
    decode(q_SHD, k_SHD, v_SHD, g_SHC, beta_SH, pool, rows) -> (o_SHD, pool)
    scratch_bytes(shapes, num_decays, num_rows) -> the bytes that a step of so many rows takes at
        most beside what it is given and returns; num_decays is C

q and k have Hk heads of width Dk, v and o have Hv of Dv, beta is [T, Hv], and g [T, Hv, C] where C
is 1 or Dk; all are f32, as the pool [slots, Hv, Dk, Dv] is. rows: a PackedRows, which says whose
tokens these are and which slots of the pool they read and write; in decode, token s is that of row
s. o is zeros for padding. If the bits of a token depend on its row and the tokens before it alone,
not on the batch nor on where a step begins, the module also has `batch_invariant() -> bool`, which
returns True.

`reference.py` is the definition. `xla.dense` is the form that can be differentiated.
"""

from kernels_pallas.implementation import CUDA, Implementation

# By name. On a device that several of them support, the first is the fastest.
IMPLEMENTATIONS = {
    "native": Implementation("kernels_cpu.gated_delta", ("cpu",)),
    "triton": Implementation("kernels_pallas.gated_delta.triton", CUDA),
    "xla": Implementation("kernels_pallas.gated_delta.xla"),
}
