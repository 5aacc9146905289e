"""Paged attention: `reference` defines the operation, `xla` and later modules implement it under
the same signatures.

    paged_attention(q_THD, pool, layer, block_table_SM, context_lens_S, query_starts_S1, *,
                    num_layers=1, scale, sliding_window=None, soft_cap=None) -> o_THD
    paged_attention_decode(q_SHD, pool, layer, block_table_SM, context_lens_S, *, (the same
    options)) -> o_SHD write_kv(pool, layer, kv_T2KD, slot_mapping_T, *, num_layers=1) -> pool
    (kv_write; one for all implementations)

`cases` lists the shapes that tests and benches share.
"""
