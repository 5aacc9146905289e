"""Paged attention for Hopper in Pallas Mosaic GPU: pages come by TMA, products are wgmma,
warpgroups have roles.

A block of warpgroups walks over one row's KV tiles of C slots. One warpgroup does nothing but copy:
for each page of a tile one TMA brings a KV head's keys and values together (they are neighbours in
the pool) into the next free stage of a ring in shared memory. The others compute, by online softmax
in base 2. `decode_kernel` and `prefill_kernel` say how they share the work, `pieces` is what both
are made of.

Whole tiles are loaded, and 0 * NaN is NaN: values outside the context are zeroed in shared memory
before use.
"""

from kernels_pallas.paged_attention.mosaic_gpu.decode_kernel import decode
from kernels_pallas.paged_attention.mosaic_gpu.pieces import OPTIONS, unsupported
from kernels_pallas.paged_attention.mosaic_gpu.prefill_kernel import prefill, prepare
from kernels_pallas.paged_attention.pool_layout import slots_last_layout as pool_layout

__all__ = ["OPTIONS", "decode", "pool_layout", "prefill", "prepare", "unsupported"]
