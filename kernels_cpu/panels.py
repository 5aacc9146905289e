"""Products of packed panels in f32, for many rows on CPU; see panels.h.

Shapes: T rows, of which the first `count` (an int32 scalar) are wanted and the rest, padding, give
zeros; E features in, N out.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels_cpu.linear import NativeProducts

PANEL_ROWS = 12  # kPanelRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PanelProducts(NativeProducts):
    """These products for any number of rows in the dtypes of `dtypes`; where it has not bf16, those
    of NativeProducts. Weights in 8 and 4 bits are multiplied as there.
    """

    dtypes: tuple[str, ...]

    def supported(self, x: Array | jax.ShapeDtypeStruct, weight: Array) -> bool:
        """Whether these arrays are multiplied here: x [T, E], weight [N, E] in one of the dtypes,
        or as NativeProducts does.
        """
        return self._in_panels(x, weight) or super().supported(x, weight)

    def linear(
        self, x_TE: Array, weight_NE: Array, count: Array | int, dtype: DTypeLike = jnp.float32
    ) -> Array:
        """See `linear`."""
        if self._in_panels(x_TE, weight_NE):
            return linear(x_TE, weight_NE, count).astype(dtype)
        return super().linear(x_TE, weight_NE, count, dtype)

    def norms(self, x: Array, scale: Array) -> bool:
        """Nothing: in a vision tower norms are XLA's."""
        del x, scale
        return False

    def activates(self, activation: str) -> bool:
        """Nothing: in a vision tower activations are XLA's."""
        del activation
        return False

    def _in_panels(self, x: Array | jax.ShapeDtypeStruct, weight: Array) -> bool:
        is_plain = x.dtype == weight.dtype and x.ndim == weight.ndim == 2
        return is_plain and x.dtype.name in self.dtypes


def linear(x_TE: Array, weight_NE: Array, count: Array | int) -> Array:
    """x times weight transposed, [T, N] in f32, of both in f32 or both in bf16; a row's bits depend
    on that row alone.
    """
    T, E = x_TE.shape
    results = (
        jax.ShapeDtypeStruct((T, weight_NE.shape[0]), jnp.float32),
        jax.ShapeDtypeStruct((-(-T // PANEL_ROWS) * PANEL_ROWS * E,), jnp.float32),
    )
    call = jax.ffi.ffi_call("jpaged_panels", results)
    return call(x_TE, weight_NE, jnp.asarray(count, jnp.int32))[0]
