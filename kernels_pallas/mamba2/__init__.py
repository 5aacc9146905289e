"""The scan of Mamba-2 (arXiv:2405.21060): a state a head that decays by one number a token.

With S [P, N] of a head, zeros before position 0, a token with decay g <= 0, value x, key b and
query c does

    S = exp(g) * S + x b^T;  y = S c

Head h takes key and query of group h // (H / G). In the terms of the paper x and g are the input
and A times the length of the token's time step, b and c are B and C.

`xla` has

    prefill(x_THP, g_TH, b_TGN, c_TGN, pool, rows) -> (y_THP, pool)
    decode(x_SHP, g_SH, b_SGN, c_SGN, pool, rows) -> (y_SHP, pool)
    dense(x, g, b, c, state) -> (y, state)

All are f32, as the pool [slots, H, P, N] is. rows: a PackedRows, which says whose tokens these are
and which slots of the pool they read and write; in decode, token s is that of row s. y is zeros for
padding. `dense` is the form that can be differentiated. `reference.py` is the definition.
"""
