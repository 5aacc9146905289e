"""One reading of the logits that gives what a draw needs of each tile of the vocabulary: its
maximum, and its sums of exponentials against that maximum.

XLA reads the logits for the maxima, for the sums, and again for logprobs at another temperature.
Sums against a tile's maximum do not need the row's; they are scaled to it afterwards, when one
number a tile is left. A tile's bits depend on its row alone.

IMPLEMENTATIONS lists modules of the same two functions:

    unsupported(rows, vocab, tile, device) -> the reason why so many logits, or tiles of so many,
        cannot be read on a device, or None. device None: any device
    read_tiles(z_SV, tau_S, floor_S, all_tau_S, *, tile, interpret=False) -> three f32 [S, N],
        numbers of each tile: its maximum m; the sum of exp((z - m) / tau) over z >= floor; the sum
        of exp((z - m) / all_tau) over all z. Both sums are 0 if m is -inf, and leave NaN out.
        z_SV f32, -inf allowed; tau_S, all_tau_S f32 > 0; tile: C, a power of 2

Shapes: S rows, V tokens of the vocabulary (or of a device's share of it), N tiles of C tokens.
"""

from kernels_pallas.implementation import CUDA, Implementation

# By name. On a device that several of them support, the first is the fastest.
IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation("kernels_pallas.vocab_tiles.mosaic_gpu", CUDA),
    "triton": Implementation("kernels_pallas.vocab_tiles.triton", CUDA),
}
