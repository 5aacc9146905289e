"""The feed-forward part of a layer in one call, for bf16 x on CPU, and its activation alone; see
mlp.h.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted and the rest, padding,
give zeros; E features in, F between, N out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels_cpu.quantized import written_dtype

KINDS = ("silu", "gelu_tanh")  # activations of a gate, which `Activation` in mlp.h lists as well


class Matrix(NamedTuple):
    """A weight [outputs, inputs] of bf16, or in 8 or 4 bits: values, scales, zeros, form and order
    as kernels_cpu.quantized.linear takes them; of bf16 form is "bf16", and scales are None.
    """

    values: Array
    scales: Array | None = None
    zeros: Array | None = None
    form: str = "bf16"
    interleaved: bool = False

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Values, scales and zeros; those that are not there are empty."""
        none = jnp.zeros((0, 0), jnp.float32)
        return (
            self.values,
            none if self.scales is None else self.scales,
            none if self.zeros is None else self.zeros,
        )

    @property
    def outputs(self) -> int:
        """How many numbers the product has."""
        return (self.values if self.scales is None else self.scales).shape[0]


def mlp(
    x_TE: Array,
    gate_up: Matrix,
    down: Matrix,
    activation: str,
    count: Array | int,
    dtype: DTypeLike,
    activations: str = "plain",
) -> Array:
    """Return down times the activation of gate times up, [T, N] in dtype, which is f32 or bf16.

    gate_up: [2 * F, E], gates first. activation: one of KINDS. activations: as of
    kernels_cpu.quantized.linear. A row's bits depend on that row alone, and are those of the two
    products with `activated` between them.
    """
    T, width = x_TE.shape[0], gate_up.outputs // 2
    written = dtype if down.scales is None else written_dtype(dtype, activations)
    results = (
        jax.ShapeDtypeStruct((T, down.outputs), written),
        jax.ShapeDtypeStruct((T, 2 * width), jnp.float32),
        jax.ShapeDtypeStruct((T, width), jnp.bfloat16),
    )
    call = jax.ffi.ffi_call("jpaged_mlp", results)
    y_TN, _, _ = call(
        x_TE,
        *gate_up.arrays,
        *down.arrays,
        jnp.asarray(count, jnp.int32),
        gate_up_form=gate_up.form,
        gate_up_interleaved=gate_up.interleaved,
        down_form=down.form,
        down_interleaved=down.interleaved,
        activations=activations,
        activation=activation,
    )
    return y_TN.astype(dtype)


def activated(gate_up_T2F: Array, activation: str, count: Array | int) -> Array:
    """Return the activation of gates times up of f32 [T, 2, F], rounded to bf16 [T, F]."""
    T, _, width = gate_up_T2F.shape
    call = jax.ffi.ffi_call("jpaged_activated", jax.ShapeDtypeStruct((T, width), jnp.bfloat16))
    return call(gate_up_T2F, jnp.asarray(count, jnp.int32), activation=activation)
