"""Paged attention for TPU: one Pallas kernel for prefill and decode alike; a decode step is one
query a row.

The grid walks over items: pairs of a query tile (B packed tokens) and a row that has tokens in it.
An item goes through the KV tiles (U blocks) that its queries see, by online softmax. Blocks come by
DMA into one of two buffers while the other is computed with; an item's last KV tile starts the next
item's first one, so that the memory never idles. Items of one query tile follow each other and
share its running maximum, sum and accumulator: tokens of other items see nothing, which changes
nothing. References are indexed plainly (no bitcast or reshape of one), so that what is compiled
also runs in the interpreter.
"""

from kernels_pallas.paged_attention.tpu.attention import (
    OPTIONS,
    decode,
    pool_layout,
    prefill,
    prepare,
    unsupported,
)

__all__ = ["OPTIONS", "decode", "pool_layout", "prefill", "prepare", "unsupported"]
