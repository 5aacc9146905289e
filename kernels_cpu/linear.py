"""Products with a weight as it lies in memory, for bf16 on CPU; see linear.h.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features in, N out.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels_cpu import functions, low_rank, mlp, norm, quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeProducts:
    """These products for x of up to most_rows rows (None is any number), XLA's own for more.

    activations: what x becomes in products with weights of int8 and int4, one of
    quantized.ACTIVATIONS. The caller knows that the library is there (see library.unavailable).
    """

    most_rows: int | None
    activations: str = "plain"

    def supported(self, x: Array | jax.ShapeDtypeStruct, weight: Array) -> bool:
        """Whether these arrays are multiplied here: bf16, x [T, E], weight [N, E], E in whole
        32s.
        """
        if not x.dtype == weight.dtype == jnp.bfloat16 or not x.ndim == weight.ndim == 2:
            return False
        is_few = self.most_rows is None or x.shape[0] <= self.most_rows
        return is_few and is_width_supported(x.shape[1])

    def linear(
        self, x_TE: Array, weight_NE: Array, count: Array | int, dtype: DTypeLike = jnp.float32
    ) -> Array:
        """See `linear`."""
        return linear(x_TE, weight_NE, count, dtype)

    def multiplies(self, form: str, width: int) -> bool:
        """Return whether `quantized` takes weights in a form, of `width` inputs."""
        return form in quantized.FORMS and is_width_supported(width)

    def rounds(self, form: str) -> bool:
        """Return whether x becomes what `activations` says beside weights in a form."""
        return form in quantized.ROUNDING

    def interleaves(self, form: str, outputs: int) -> bool:
        """Return whether `quantized` takes interleaved weights in a form, of so many outputs."""
        return quantized.interleaves(form, outputs, self.activations)

    def quantized(
        self,
        x_TE: Array,
        values: Array,
        scales: Array,
        zeros: Any,
        form: str,
        count: Any,
        dtype: DTypeLike,
        interleaved: bool = False,
    ) -> Array:
        """See kernels_cpu.quantized.linear: for any number of rows, since XLA would widen the
        whole weight first.
        """
        rest = (form, count, zeros, self.activations, dtype)
        return quantized.linear(x_TE, values, scales, *rest, interleaved=interleaved)

    def norms(self, x: Array, scale: Array) -> bool:
        """See kernels_cpu.norm.supported."""
        return norm.supported(x, scale)

    def normed(
        self,
        x: Array,
        added: Array | None,
        scale: Array,
        count: Any,
        eps: float,
        has_offset: bool,
        in_f32: bool,
    ) -> tuple[Array, Array]:
        """See kernels_cpu.norm.norm: for any number of rows, since XLA makes four operations of it,
        each waiting for the one before.
        """
        return norm.norm(x, added, scale, count, eps, has_offset=has_offset, in_f32=in_f32)

    def activates(self, activation: str) -> bool:
        """Return whether `mlp` and `activated` have the activation of this name."""
        return activation in mlp.KINDS

    def mlp(
        self,
        x_TE: Array,
        gate_up: mlp.Matrix,
        down: mlp.Matrix,
        activation: str,
        count: Any,
        dtype: DTypeLike,
    ) -> Array:
        """See kernels_cpu.mlp.mlp: of weights that are multiplied here, each for itself."""
        return mlp.mlp(x_TE, gate_up, down, activation, count, dtype, self.activations)

    def activated(self, gate_up_T2F: Array, activation: str, count: Any) -> Array:
        """See kernels_cpu.mlp.activated: also where a product is XLA's, so that a row has the bits
        of `mlp` whatever is added to its products.
        """
        return mlp.activated(gate_up_T2F, activation, count)

    def apply(self, name: str, x: Array) -> Array:
        """See kernels_cpu.functions.apply: for x of any shape, since XLA's bits depend on that."""
        return functions.apply(name, x)

    def adds(self, x: Array, a: Array) -> bool:
        """See kernels_cpu.low_rank.supported."""
        return low_rank.supported(x, a)

    def add_low_rank(self, y: Array, x: Array, a: Array, b: Any, *rest: Any) -> Array:
        """See kernels_cpu.low_rank.add: for any number of rows, since XLA would multiply by all
        slots.
        """
        return low_rank.add(y, x, a, b, *rest)


def is_width_supported(E: int) -> bool:
    """Whether rows of so many features can be multiplied here."""
    return E % 32 == 0


def linear(
    x_TE: Array, weight_NE: Array, count: Array | int, dtype: DTypeLike = jnp.float32
) -> Array:
    """x times weight transposed, [T, N] in f32 or bf16, accumulated in f32; a row's bits depend on
    that row alone.
    """
    result = jax.ShapeDtypeStruct((x_TE.shape[0], weight_NE.shape[0]), dtype)
    call = jax.ffi.ffi_call("jpaged_linear", result)
    return call(x_TE, weight_NE, jnp.asarray(count, jnp.int32))
