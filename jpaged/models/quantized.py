"""Weights in 8 and 4 bits: their forms, what each stands for, and how one is made of a plain one.

A weight is its values times their scales, in f32, and a product with it is accumulated in f32.
Scales are of the whole model's rows, so that a mesh changes none.

What else is rounded in a product y = x w^T is EngineConfig.quantized_activations. Each name is one
arithmetic on every processor; results differ by the order of sums in f32 alone:

- "plain": x stays in its dtype. A weight with a scale an output is taken as it is, its scale comes
  after the sum; one with scales of groups is rounded to x's dtype once it is scaled. XLA, AMX and
  NEON multiply so, and every kernel can.
- "int8": x of int8 and int4 weights becomes integers, each 32 inputs of a row in steps of a 127th
  of the largest of them. Sums of integers are exact; scales come after them, in f32. AVX-512's
  default; the C++ kernels of all levels have it, with equal bits.
- "int16": the same for each 256 inputs, in steps of a 32767th. AVX2's default.

With the last two, x of fp8 weights stays bf16, and their scales are applied in f32. mxfp4 is always
plain. "auto" is the default of the processor; on cards that multiply fp8 by fp8 it also rounds x to
fp8 in large products with fp8 weights (see `fp8_product`).
"""

import dataclasses
import functools
import math
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

type Form = Literal["int8", "int4", "fp8"]  # that plain weights are made into
type StoredForm = Form | Literal["mxfp4"]  # files have it
GROUP = 32  # inputs that share a scale in int4
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
IN_4_BITS = ("int4", "mxfp4")
VALUES = {"int8": jnp.int8, "int4": jnp.uint8, "fp8": jnp.float8_e4m3fn}
# Multiplications of a product from which on rounding x as well is worth two more small kernels,
# some 4 us: so many take tensor cores 11 us in bf16, at 800 TFLOP/s.
ROUNDED_FROM = 2**32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight [*outputs, *inputs] in a form. Where a plain array stands, this can.

    values: of the weight's shape; int4 and mxfp4 have two to a byte along the last axis, of each
    group of 32 the first 16 in the low halves, int4 as value + 8. scales: f32, of as many axes: one
    an output (of size 1 in all inputs, for int8 and fp8), or one a group of the last axis.
    num_outputs: how many axes come first. dtype: of the weight that it stands for, which products
    and embeddings take. zeros: f32 as the scales of int4, what is taken off values before they are
    scaled; or None. products: who multiplies by it (see models.layers.linear); None is XLA.
    """

    values: Array
    scales: Array
    form: StoredForm = dataclasses.field(metadata={"static": True})
    num_outputs: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    zeros: Array | None = None
    products: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it stands for."""
        *others, last = self.values.shape
        return (*others, 2 * last if self.form in IN_4_BITS else last)

    @property
    def ndim(self) -> int:
        """Axes of the weight that it stands for."""
        return len(self.shape)

    def matrix(self) -> Self:
        """The same as [outputs, inputs]."""
        outputs = int(np.prod(self.shape[: self.num_outputs]))
        flat: Self = jax.tree.map(lambda part: part.reshape(outputs, -1), self)
        return dataclasses.replace(flat, num_outputs=1)

    def __getitem__(self, at: Any) -> Self:
        """One of the first axis, that of experts."""
        return jax.tree.map(lambda part: part[at], self).of_one()

    def of_one(self) -> Self:
        """What a scan over the first axis gives, as a weight of the other axes."""
        return dataclasses.replace(self, num_outputs=self.num_outputs - 1)

    @property
    def nbytes(self) -> int:
        """Of all its parts."""
        return sum(part.nbytes for part in jax.tree.leaves(self))

    @property
    def sharding(self) -> Any:
        """Of the values."""
        return self.values.sharding

    @property
    def by_output(self) -> bool:
        """Whether scales are of outputs, and may come after a product."""
        grouped = math.prod(self.scales.shape[self.num_outputs :]) > 1
        return self.form not in IN_4_BITS and not grouped

    def whole(self) -> Array:
        """The weight that it stands for, in f32."""
        return dequantized(self.values, self.scales, self.form, self.zeros)

    def take(self, rows: Array) -> Array:
        """Rows of the first axis, in `dtype`: what an embedding gives."""
        taken: Self = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), self)
        return taken.whole().astype(self.dtype)

    def linear(self, x: Array, *, in_fp8: bool = False) -> Array:
        """x [..., E] times this matrix transposed, [..., outputs] in f32; by XLA scales of outputs
        come after the product, those of groups before it, rounded to x's dtype. in_fp8: the device
        multiplies fp8 by fp8, so that x is rounded too where the product is large.
        """
        assert self.num_outputs == 1 and self.ndim == 2
        if self.products is not None:
            parts = (self.values, self.scales, self.zeros, self.form)
            return self.products.quantized(x, *parts, x.shape[0])
        in_fp8 = in_fp8 and self.form == "fp8" and self.by_output and x.dtype == jnp.bfloat16
        if in_fp8 and math.prod(x.shape) * self.shape[0] >= ROUNDED_FROM:
            return fp8_product(x, self)
        if not self.by_output:
            if x.dtype != jnp.bfloat16 or self.form == "mxfp4":
                return _dot(x, self.whole().astype(x.dtype))
            return jax.lax.platform_dependent(
                x, self, cuda=_fused_for_cuda, tpu=_fused_for_tpu, default=_widened_first
            )
        scales = self.scales.reshape((1,) * (x.ndim - 1) + (-1,))
        return _dot(x, self.values.astype(x.dtype)) * scales


def fp8_product(x: Array, w: QuantizedWeight) -> Array:
    """By tensor cores that take fp8 on both sides: each row of x with a scale of its own."""
    wide = x.astype(jnp.float32)
    scales = _scales(wide, (-1,), "fp8")
    rounded = (wide / scales).astype(VALUES["fp8"])
    return _dot(rounded, w.values) * scales * w.scales.reshape((1,) * (x.ndim - 1) + (-1,))


def _dot(x: Array, weight: Array) -> Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)


def _widened_first(x: Array, w: QuantizedWeight) -> Array:
    return _dot(x, w.whole().astype(x.dtype))


def _fused_for_cuda(x: Array, w: QuantizedWeight) -> Array:
    """XLA writes a weight that is cast after its scales to memory; one that the product itself
    rounds to bf16 becomes a part of it.
    """
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    in_bf16 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    parts = [
        jax.lax.dot_general(
            own.astype(jnp.float32),
            part,
            contract,
            precision=in_bf16,
            preferred_element_type=jnp.float32,
        )
        for own, part in as_they_lie(x, w)
    ]
    return functools.reduce(jnp.add, parts)


def _fused_for_tpu(x: Array, w: QuantizedWeight) -> Array:
    return functools.reduce(
        jnp.add, [_dot(own, part.astype(x.dtype)) for own, part in as_they_lie(x, w)]
    )


def as_they_lie(x: Array, w: QuantizedWeight) -> list[tuple[Array, Array]]:
    """Parts of x and of the weight in f32 whose products add up: of int4 the low halves of the
    bytes with their inputs, and the high ones, so that nothing moves among the weights.
    """
    outputs, num_groups = w.scales.shape

    def scaled(numbers: Array) -> Array:
        groups = numbers.reshape(outputs, num_groups, -1)
        groups = groups if w.zeros is None else groups - w.zeros[..., None]
        return (groups * w.scales[..., None]).reshape(outputs, -1)

    if w.form != "int4":
        return [(x, scaled(w.values.astype(jnp.float32)))]
    halves = x.reshape(*x.shape[:-1], -1, 2, GROUP // 2)
    low, high = (halves[..., half, :].reshape(*x.shape[:-1], -1) for half in (0, 1))
    low_bits, high_bits = (
        (w.values & bits).astype(jnp.float32) / unit - 8 for bits, unit in ((15, 1), (240, 16))
    )
    return [(low, scaled(low_bits)), (high, scaled(high_bits))]


def dequantized(
    values: Array, scales: Array, form: StoredForm, zeros: Array | None = None
) -> Array:
    """Values, less zeros, times scales, f32."""
    if form in IN_4_BITS:
        packed = values.reshape(*values.shape[:-1], -1, GROUP // 2)
        halves = jnp.concatenate([packed & 15, packed >> 4], axis=-1)
        numbers = halves.reshape(*values.shape[:-1], -1)
        if form == "int4":
            whole = numbers.astype(jnp.float32) - 8
        else:
            whole = _e2m1(numbers.astype(jnp.int32))
    else:
        whole = values.astype(jnp.float32)
    groups = whole.reshape(*whole.shape[:-1], scales.shape[-1], -1)
    if zeros is not None:
        groups = groups - zeros[..., None]
    return (groups * scales[..., None]).reshape(whole.shape)


def _e2m1(numbers: Array) -> Array:
    """What the numbers of mxfp4 stand for: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero.

    Source: OCP Microscaling Formats 1.0.
    """
    exponent, mantissa = numbers >> 1 & 3, numbers & 1
    twice = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(numbers & 8 != 0, -0.5, 0.5) * twice.astype(jnp.float32)


def experts_are_plain(tree: Any) -> bool:
    """Whether the experts of a model's parameters are arrays, as those of one without are."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_quantized)
    experts = [leaf for path, leaf in leaves if "['experts']" in jax.tree_util.keystr(path)]
    return not any(map(is_quantized, experts))


def quantized(weight: Array, form: Form, num_outputs: int) -> QuantizedWeight:
    """The form of a plain weight [*outputs, *inputs]: to the nearest value, with the scale that
    takes the largest of an output (or group) to the largest value. Zeros keep a scale of 1; what is
    not finite leaves scales that are not.
    """
    x = weight.astype(jnp.float32)
    if form == "int4":
        groups = x.reshape(*x.shape[:-1], -1, GROUP)
        scales = _scales(groups, (-1,), form)
        rounded = jnp.round(groups / scales).astype(jnp.int8) + 8
        low, high = jnp.split(rounded.astype(jnp.uint8), 2, axis=-1)
        values = (low | (high << 4)).reshape(*x.shape[:-1], -1)
        scales = scales[..., 0]
    else:
        scales = _scales(x, tuple(range(num_outputs, x.ndim)), form)
        values = x / scales
        values = (jnp.round(values) if form == "int8" else values).astype(VALUES[form])
    return QuantizedWeight(
        values=values, scales=scales, form=form, num_outputs=num_outputs, dtype=weight.dtype
    )


def _scales(x: Array, axes: tuple[int, ...], form: Form) -> Array:
    top = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / LARGEST[form]
    return jnp.where(top == 0, jnp.float32(1), top)


def partition(weight: QuantizedWeight, spec: PartitionSpec) -> QuantizedWeight:
    """How its parts lie where a plain weight lies by a spec: axes of size 1 are whole."""
    axes = (*spec, *[None] * (weight.ndim - len(spec)))
    kept = [
        axis if size > 1 else None for axis, size in zip(axes, weight.scales.shape, strict=True)
    ]
    parts: dict[str, Any] = {"values": spec, "scales": PartitionSpec(*kept)}
    parts["zeros"] = None if weight.zeros is None else parts["scales"]
    return dataclasses.replace(weight, **parts)


def specs_of(tree: Any, specs: Any) -> Any:
    """How a serving tree lies, of the specs of its plain one."""
    return jax.tree.map(
        lambda leaf, spec: partition(leaf, spec) if is_quantized(leaf) else spec,
        tree,
        specs,
        is_leaf=is_quantized,
    )


def is_quantized(node: Any) -> bool:
    """For jax.tree.map(is_leaf=)."""
    return isinstance(node, QuantizedWeight)
