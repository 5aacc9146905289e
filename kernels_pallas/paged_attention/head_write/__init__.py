"""One kernel, for CUDA cards and CPUs, between a layer's first product and its attention: it norms
and rotates queries and keys, and writes keys and values to their slots of the pool, in place.

XLA makes four kernels or more of the same work, and a decode step waits for each. A rotation turns
pairs that are half of the rotated dimensions apart, so on a card a row is taken in pieces: the
first halves of the pairs, the second halves, and the rest.

IMPLEMENTATIONS lists modules of the same two functions:

    unsupported(shapes, layout, device) -> the reason why a pool of a layout cannot be written on a
        device, or None. device None: any device
    write_heads(qkv_TKXD, pool, layer, slot_mapping_T, *, scales, norm, rotation, num_layers,
        interpret) -> normed and rotated queries [T, K * G, D], and the pool with normed and rotated
        keys and with values in their slots of one layer

qkv_TKXD: for each KV head its G query heads, its key and its value. pool [L*N, P, 2K, D].
slot_mapping_T int32: block * P + slot, no slot twice; keys and values of tokens with an index
outside [0, N*P) are dropped. scales: of the norms of queries and of keys, [D] each. rotation: cos
and sin, f32 [T, R/2], for pairs (i, i + R/2) of the first R dimensions.

Shapes: T packed tokens, L layers, N pool blocks, P block size, K KV heads, G query heads of each, X
= G + 2, D head dim, R rotated dimensions.
"""

from kernels_pallas.implementation import CUDA, Implementation
from kernels_pallas.paged_attention.head_write.interface import HeadNorm

# By name. On a device that several of them support, the first is the fastest.
IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation("kernels_pallas.paged_attention.head_write.mosaic_gpu", CUDA),
    "triton": Implementation("kernels_pallas.paged_attention.head_write.triton", CUDA),
    "native": Implementation("kernels_cpu.head_write", ("cpu",)),
}

__all__ = ["IMPLEMENTATIONS", "HeadNorm"]
