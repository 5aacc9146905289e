"""The experts of a mixture: every token goes through the few experts chosen for it.

IMPLEMENTATIONS lists modules of the same two functions, whose arguments `interface` describes:

    unsupported(shapes, device) -> the reason why these shapes cannot run on a device, or None
    experts(x_TE, chosen_TA, weight_TA, weights, glu) -> [T, E] f32: for each token the sum over its
        A choices of weight * down(glu(gate, up)); no token is dropped

If the bits of a token's result depend on that token alone, the module also has
`batch_invariant() -> bool`, which returns True.

Shapes: T tokens, A choices of a token, X experts, E embed, I width of an expert, P = T * A pairs of
token and choice.
"""

from kernels_pallas.implementation import CUDA, TPU, Implementation

# By name. On a device that several of them support, the first is the fastest.
IMPLEMENTATIONS = {
    "megablox": Implementation("kernels_pallas.experts.megablox", (TPU,)),
    "mosaic_gpu": Implementation("kernels_pallas.experts.mosaic_gpu", CUDA),
    "triton": Implementation("kernels_pallas.experts.triton", CUDA),
    "native": Implementation("kernels_cpu.experts", ("cpu",)),
    "tiles": Implementation("kernels_pallas.experts.tiles"),
}
