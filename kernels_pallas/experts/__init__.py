"""The experts of a mixture: each token through the few that were chosen for it, none dropped.

IMPLEMENTATIONS are modules of the same two functions:

    unsupported(shapes, device) -> why it cannot run there, or None
    experts(x_TE, chosen_TA, weight_TA, weights, glu) -> [T, E] f32: of each token the sum over its
        A choices of weight * down(glu(gate, up))

One whose results for a token depend on that token alone, to the bit, says so by a function
`batch_invariant() -> bool`. `interface` has their arguments. Shapes: T tokens, A choices of a
token, X experts, E embed, I width of an expert, P = T * A pairs of token and choice.
"""

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Where an implementation is, and the platforms of devices that it runs on; None is all."""

    path: str
    platforms: tuple[str, ...] | None = None

    def module(self) -> Any:
        """The module, imported when it is first asked for: Pallas takes its time."""
        return importlib.import_module(self.path)


# By name; on a device where several can run, the first of them is the fastest.
IMPLEMENTATIONS = {
    "megablox": Implementation("kernels_pallas.experts.megablox", ("tpu",)),
    "mosaic_gpu": Implementation("kernels_pallas.experts.mosaic_gpu", ("gpu", "cuda")),
    "triton": Implementation("kernels_pallas.experts.triton", ("gpu", "cuda")),
    "native": Implementation("kernels_cpu.experts", ("cpu",)),
    "tiles": Implementation("kernels_pallas.experts.tiles"),
}


def rows_are_independent(module: Any) -> bool:
    """Whether the bits that a module gives for a token depend on that token alone."""
    says = getattr(module, "batch_invariant", None)
    return says is not None and says()
