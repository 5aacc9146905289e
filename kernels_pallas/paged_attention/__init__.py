"""Paged attention: `reference` defines the operation, IMPLEMENTATIONS lists the modules that serve.

Each module has the same functions, whose arguments `interface` describes:

    OPTIONS: the names of the AttentionOptions that it computes
    unsupported(shapes, attention, device) -> the reason why these shapes with these options cannot
        run on a device, or None. device None: only shapes and options are judged
    pool_layout(num_kv_heads, head_dim, value_dim=None) -> the PoolLayout of one device's pool
    prepare(query_start_loc_S1, context_lens_S, *, num_tokens, shapes, window) -> what every layer's
        `prefill` of one step needs and would otherwise compute again (a pytree, or None)
    prefill(q_THD, pool, layer, block_table_SM, context_lens_S, query_start_loc_S1, prepared=None,
        *, options, sinks_H=None) -> o_THV
    decode(q_SHD, pool, layer, block_table_SM, context_lens_S, *, options, sinks_H=None) -> o_SHV

If a query's bits depend only on that query and its context, in prefill and decode alike, the module
also has `batch_invariant() -> bool`, which returns True.

`kv_write` writes new keys and values for all of them. On CUDA, and in bf16 on CPUs, `head_write`
can do that in the same kernel as the norms and the rotation of queries and keys.
"""

from typing import Literal

from kernels_pallas.implementation import CUDA, TPU, Implementation

# The keys of IMPLEMENTATIONS, for type checkers.
Name = Literal["mosaic_gpu", "triton", "tpu", "native", "xla"]

# On a device that several of them support, the first is the fastest.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "mosaic_gpu": Implementation("kernels_pallas.paged_attention.mosaic_gpu", CUDA),
    "triton": Implementation("kernels_pallas.paged_attention.triton", CUDA),
    "tpu": Implementation("kernels_pallas.paged_attention.tpu", (TPU,)),
    "native": Implementation("kernels_cpu.paged_attention", ("cpu",)),
    "xla": Implementation("kernels_pallas.paged_attention.xla"),
}
