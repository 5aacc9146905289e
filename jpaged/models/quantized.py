"""Weights in 8 and 4 bits: a WeightForm says how numbers are stored and what they stand for, a
QuantizedWeight is a weight in one.

A weight is its numbers times their scales, in f32, and a product with it is accumulated in f32.
Scales are computed from whole rows of the model, so a mesh changes none of them.

EngineConfig.quantized_activations says what else a product y = x w^T rounds. Each of its values is
one arithmetic on every processor; results differ only in the order in which f32 is summed:

- "plain": x stays in its dtype. A weight with a scale for each output is multiplied as it is stored
  and its scale is applied to the sum; a weight with scales of groups is scaled first and then
  rounded to x's dtype. XLA, AMX and NEON multiply this way, and every kernel can.
- "int8": with int8 and int4 weights x becomes integers: each 32 inputs of a row in steps of a 127th
  of the largest of them. Sums of integers are exact; scales are applied to them in f32. AVX-512's
  default; the C++ kernels of all levels have it, with equal bits.
- "int16": the same for each 256 inputs, in steps of a 32767th. AVX2's default.

With the last two, x stays bf16 beside fp8 weights, whose scales are applied in f32. mxfp4 is always
"plain". "auto" is the processor's default; on cards that multiply fp8 by fp8 it also rounds x to
fp8 in large products with fp8 weights (see `fp8_product`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

# Consecutive inputs that lie together in 4 bits: the first half of them in the low bits of 16
# bytes, the second half in the high bits.
NIBBLE_BLOCK = 32
INTERLEAVED = 16  # outputs that lie together, see WeightForm.interleaved
# Multiply-adds of a product from which on it pays to round x to fp8 as well. That takes two more
# small kernels, about 4 us, and so many multiply-adds take tensor cores 11 us in bf16 (800 TFLOP/s)
# and half of it in fp8.
ROUNDED_FROM = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightForm:
    """How the numbers of a weight are stored, and what they stand for.

    name: the form's name in EngineConfig.quantization and for the kernels. dtype: of the stored
    values. bits: of a number; two numbers of 4 bits share a byte, see `pack`. offset: what a stored
    number is above the number that it stands for. decode: f32 values of stored numbers, for forms
    whose numbers are no integers or floats of `dtype`; it takes numpy and jax arrays.

    Plain weights can be made into forms that have these as well. encode: stored numbers of f32
    values within +-largest. group: how many inputs share a scale; None: all inputs of an output.
    head: the name of the form that the head and a tied embedding take instead.

    interleaved: the same numbers lie as the C++ products read them fastest, 16 outputs together:
    the matrix [N, E] of int8 as [N / 16, E / 4, 16, 4] bytes of number + 128, that of int4 as
    [N / 16, E / 8, 16, 4] bytes, of which the low halves are inputs 0 to 3 of 8 and the high ones
    4 to 7; scales and zeros [N, S] as [N / 16, S, 16]. Shapes stay those of the weight.
    """

    name: str
    dtype: np.dtype
    bits: int = 8
    offset: int = 0
    decode: Callable[[Any], Any] | None = None
    encode: Callable[[Array], Array] | None = None
    largest: float = 1.0
    group: int | None = None
    head: str | None = None
    interleaved: bool = False

    @property
    def in_rows(self) -> "WeightForm":
        """The same form whose outputs lie one after another."""
        return dataclasses.replace(self, interleaved=False) if self.interleaved else self

    @property
    def is_cast(self) -> bool:
        """Whether the stored values are the numbers themselves, so that a cast decodes them."""
        return self.bits == 8 and self.decode is None and not self.offset

    @property
    def is_float8(self) -> bool:
        """Whether tensor cores that multiply fp8 by fp8 can take the stored values."""
        return self.dtype == _E4M3

    @property
    def unpacked(self) -> "WeightForm":
        """The same numbers with one of them in an element of values."""
        return dataclasses.replace(self, bits=8)

    def pack(self, numbers: Any) -> Any:
        """Return the values of stored numbers [..., E]: [..., E], or [..., E / 2] in 4 bits.

        Of each 32 neighbours the first 16 go to the low halves of 16 bytes, the others to the high
        halves.
        """
        if self.bits == 8:
            return numbers
        halves = numbers.reshape(*numbers.shape[:-1], -1, 2, NIBBLE_BLOCK // 2)
        values = halves[..., 0, :] | (halves[..., 1, :] << 4)
        return values.reshape(*numbers.shape[:-1], -1)

    def unpack(self, values: Any) -> Any:
        """Return the stored numbers of values; the inverse of `pack`."""
        if self.bits == 8:
            return values
        packed = values.reshape(*values.shape[:-1], -1, NIBBLE_BLOCK // 2)
        halves = _of(values).concatenate([packed & 15, packed >> 4], axis=-1)
        return halves.reshape(*values.shape[:-1], -1)

    def decoded(self, numbers: Any) -> Any:
        """Return what stored numbers stand for before zeros and scales, in f32."""
        if self.decode is not None:
            return self.decode(numbers)
        wide = numbers.astype(jnp.float32)
        return wide - self.offset if self.offset else wide

    def scale_shape(
        self, shape: tuple[int, ...], num_outputs: int, group: int | None
    ) -> tuple[int, ...] | None:
        """Return the shape of the scales of a weight of this shape, of which `group` inputs share
        one (None: all inputs of an output); None where the weight cannot be stored in this form.
        """
        last, inputs = shape[-1], math.prod(shape[num_outputs:])
        asked = min(group or inputs, inputs)
        size = math.gcd(asked, last)
        if self.bits == 4 and (last % NIBBLE_BLOCK or size % NIBBLE_BLOCK):
            return None
        if self.is_cast and asked >= inputs:
            return (*shape[:num_outputs], *[1] * (len(shape) - num_outputs))
        return (*shape[:-1], last // size)

    def value_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the values of a weight of this shape."""
        return (*shape[:-1], shape[-1] * self.bits // 8)


def _of(x: Any) -> Any:
    """Return the module whose functions take this array: jax.numpy, or numpy."""
    return jnp if isinstance(x, jax.Array) else np


def _e2m1(numbers: Any) -> Any:
    """Return what the numbers of mxfp4 stand for: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Source: OCP Microscaling Formats 1.0.
    """
    xp, numbers = _of(numbers), numbers.astype(jnp.int32)
    exponent, mantissa = numbers >> 1 & 3, numbers & 1
    twice = xp.where(exponent == 0, mantissa, (2 + mantissa) << xp.maximum(exponent - 1, 0))
    return xp.where(numbers & 8 != 0, np.float32(-0.5), np.float32(0.5)) * twice.astype(jnp.float32)


def _to_int8(x: Array) -> Array:
    return jnp.round(x).astype(jnp.int8)


def _to_int4(x: Array) -> Array:
    return (_to_int8(x) + 8).astype(jnp.uint8)


def _to_fp8(x: Array) -> Array:
    return x.astype(jnp.float8_e4m3fn)


_INT8, _UINT8, _E4M3 = (jnp.dtype(name) for name in ("int8", "uint8", "float8_e4m3fn"))
INT8 = WeightForm(name="int8", dtype=_INT8, encode=_to_int8, largest=127.0)
INT4 = WeightForm(
    name="int4",
    dtype=_UINT8,
    bits=4,
    offset=8,
    encode=_to_int4,
    largest=7.0,
    group=NIBBLE_BLOCK,
    head="int8",
)
FP8 = WeightForm(name="fp8", dtype=_E4M3, encode=_to_fp8, largest=448.0)
MXFP4 = WeightForm(name="mxfp4", dtype=_UINT8, bits=4, decode=_e2m1)
FORMS = {form.name: form for form in (INT8, INT4, FP8, MXFP4)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight [*outputs, *inputs] in a form, which can stand wherever a plain array can.

    values: of the weight's shape; in 4 bits half as many on the last axis, see WeightForm.pack.
    scales: f32, of as many axes: one for each output (of size 1 in all inputs), or one for each
    group of the last axis. num_outputs: how many axes come first. dtype: of the weight that it
    stands for, in which embeddings return its rows. zeros: f32 in the shape of scales, subtracted
    from numbers before they are scaled; or None. products: a module that multiplies by it (see
    models.layers.linear); None is XLA.
    """

    values: Array
    scales: Array
    form: WeightForm = dataclasses.field(metadata={"static": True})
    num_outputs: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    zeros: Array | None = None
    products: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that it stands for."""
        *others, last = self.values.shape
        return (*others, last * 8 // self.form.bits)

    @property
    def ndim(self) -> int:
        """The number of axes of the weight that it stands for."""
        return len(self.shape)

    def matrix(self) -> Self:
        """Return the same weight as a matrix [outputs, inputs]."""
        outputs = int(np.prod(self.shape[: self.num_outputs]))
        flat: Self = jax.tree.map(lambda part: part.reshape(outputs, -1), self)
        return dataclasses.replace(flat, num_outputs=1)

    def __getitem__(self, index: Any) -> Self:
        """Return one weight of those along the first axis, the axis of experts."""
        return jax.tree.map(lambda part: part[index], self).of_one()

    def of_one(self) -> Self:
        """Return the element that a scan over the first axis yields as a weight of the other
        axes.
        """
        return dataclasses.replace(self, num_outputs=self.num_outputs - 1)

    @property
    def nbytes(self) -> int:
        """The bytes of values, scales and zeros."""
        return sum(part.nbytes for part in jax.tree.leaves(self))

    @property
    def sharding(self) -> Any:
        """The sharding of the values."""
        return self.values.sharding

    @property
    def by_output(self) -> bool:
        """Whether a product can take the values as they are and apply the scales to its sums."""
        grouped = math.prod(self.scales.shape[self.num_outputs :]) > 1
        return self.form.is_cast and not grouped

    @property
    def structure(self) -> Any:
        """What compiled steps depend on: the form, the shape of scales, whether there are zeros."""
        return self.form.name, self.scales.shape, self.zeros is not None

    def is_finite(self) -> bool:
        """Return whether a weight of numpy arrays is finite; e4m3 has NaN and no infinity."""
        if self.form.is_float8 and ((np.asarray(self.values).view(np.uint8) & 0x7F) == 0x7F).any():
            return False
        return bool(np.isfinite(self.scales).all())

    def interleaved(self) -> Self:
        """Return the same weight with its outputs interleaved, of which there are whole 16s."""
        assert not self.form.interleaved
        form, flat = dataclasses.replace(self.form, interleaved=True), self.matrix()
        N = flat.shape[0]
        if form.bits == 4:
            halves = form.unpack(flat.values).reshape(N, -1, 2, 4)
            values = halves[:, :, 0] | (halves[:, :, 1] << 4)
        else:
            values = (flat.values ^ jnp.int8(-128)).reshape(N, -1, 4)

        def together(x: Array, shape: tuple[int, ...]) -> Array:
            groups = x.reshape(N // INTERLEAVED, INTERLEAVED, x.shape[1], -1)
            return groups.swapaxes(1, 2).reshape(shape)

        return dataclasses.replace(
            self,
            values=together(values, self.values.shape),
            scales=together(flat.scales, self.scales.shape),
            zeros=None if flat.zeros is None else together(flat.zeros, self.scales.shape),
            form=form,
        )

    def in_rows(self) -> Self:
        """Return the same weight with its outputs one after another."""
        if not self.form.interleaved:
            return self
        form, flat = self.form.in_rows, self.matrix()

        def apart(x: Array, width: int) -> Array:
            groups = x.reshape(flat.shape[0] // INTERLEAVED, -1, INTERLEAVED, width)
            return groups.swapaxes(1, 2)

        values = form.pack(_numbers(apart(flat.values, 4), form).reshape(flat.shape))
        scales, zeros = (
            None if x is None else apart(x, 1).reshape(x.shape) for x in (self.scales, self.zeros)
        )
        assert scales is not None
        return dataclasses.replace(
            self, values=values.reshape(self.values.shape), scales=scales, zeros=zeros, form=form
        )

    def whole(self) -> Array:
        """Return the weight that it stands for, in f32."""
        w = self.in_rows()
        return dequantized(w.values, w.scales, w.form, w.zeros)

    def take(self, rows: Array) -> Array:
        """Return rows of the first axis in `dtype`, as an embedding does."""
        if self.form.interleaved:
            return self._taken_apart(rows)
        taken: Self = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), self)
        return taken.whole().astype(self.dtype)

    def _taken_apart(self, rows: Array) -> Array:
        """`take` of an interleaved matrix: what belongs to a row lies apart."""
        assert self.ndim == 2
        group, place = jnp.divmod(jnp.clip(rows, 0, self.shape[0] - 1), INTERLEAVED)

        def of_rows(x: Array, width: int) -> Array:
            parts = x.reshape(self.shape[0] // INTERLEAVED, -1, INTERLEAVED, width)
            return parts[group, :, place]

        form = self.form.in_rows
        numbers = _numbers(of_rows(self.values, 4), form).reshape(*rows.shape, -1)
        scales = of_rows(self.scales, 1)[..., 0]
        zeros = None if self.zeros is None else of_rows(self.zeros, 1)[..., 0]
        return dequantized(form.pack(numbers), scales, form, zeros).astype(self.dtype)

    def linear(self, x: Array, *, in_fp8: bool = False) -> Array:
        """Return x [..., E] times this matrix transposed, [..., outputs] in f32.

        XLA applies scales of outputs after the product; with scales of groups the weight is scaled
        first and rounded to x's dtype. in_fp8: the device multiplies fp8 by fp8, so x is rounded
        as well where the product is large.
        """
        assert self.num_outputs == 1 and self.ndim == 2
        if self.form.interleaved:  # which XLA multiplies by as rows
            return self.in_rows().linear(x)
        if self.products is not None:
            parts = (self.values, self.scales, self.zeros, self.form.name)
            return self.products.quantized(x, *parts, x.shape[0], jnp.float32)
        in_fp8 = in_fp8 and self.form.is_float8 and self.by_output and x.dtype == jnp.bfloat16
        if in_fp8 and math.prod(x.shape) * self.shape[0] >= ROUNDED_FROM:
            return fp8_product(x, self)
        if not self.by_output:
            if x.dtype != jnp.bfloat16 or self.form.decode is not None:
                return _dot(x, self.whole().astype(x.dtype))
            return jax.lax.platform_dependent(
                x, self, cuda=_fused_for_cuda, tpu=_fused_for_tpu, default=_widened_first
            )
        scales = self.scales.reshape((1,) * (x.ndim - 1) + (-1,))
        return _dot(x, self.values.astype(x.dtype)) * scales


def fp8_product(x: Array, w: QuantizedWeight) -> Array:
    """Return the product by tensor cores that take fp8 on both sides; each row of x is rounded with
    a scale of its own.
    """
    wide = x.astype(jnp.float32)
    scales = _scales(wide, (-1,), FP8)
    rounded = (wide / scales).astype(FP8.dtype)
    return _dot(rounded, w.values) * scales * w.scales.reshape((1,) * (x.ndim - 1) + (-1,))


def _dot(x: Array, weight: Array) -> Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)


def _widened_first(x: Array, w: QuantizedWeight) -> Array:
    return _dot(x, w.whole().astype(x.dtype))


def _fused_for_cuda(x: Array, w: QuantizedWeight) -> Array:
    """Return the product in a way that XLA fuses on CUDA.

    A weight that is cast after it was scaled XLA writes to memory; a weight in f32 that the product
    rounds to bf16 becomes a part of the product's kernel.
    """
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    in_bf16 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    parts = [
        jax.lax.dot_general(
            inputs.astype(jnp.float32),
            weight,
            contract,
            precision=in_bf16,
            preferred_element_type=jnp.float32,
        )
        for inputs, weight in in_stored_order(x, w)
    ]
    return functools.reduce(jnp.add, parts)


def _fused_for_tpu(x: Array, w: QuantizedWeight) -> Array:
    return functools.reduce(
        jnp.add,
        [_dot(inputs, weight.astype(x.dtype)) for inputs, weight in in_stored_order(x, w)],
    )


def in_stored_order(x: Array, w: QuantizedWeight) -> list[tuple[Array, Array]]:
    """Return parts of x and parts of the weight in f32 whose products add up to the whole product.

    In 4 bits they are the low halves of the bytes with their inputs, and the high halves with
    theirs, so that no weight changes its place. The form has no `decode`.
    """
    outputs, num_groups = w.scales.shape

    def apply_scales(numbers: Array) -> Array:
        groups = numbers.reshape(outputs, num_groups, -1)
        groups = groups if w.zeros is None else groups - w.zeros[..., None]
        return (groups * w.scales[..., None]).reshape(outputs, -1)

    if w.form.bits == 8:
        return [(x, apply_scales(w.form.decoded(w.values)))]
    halves = x.reshape(*x.shape[:-1], -1, 2, NIBBLE_BLOCK // 2)
    low, high = (halves[..., half, :].reshape(*x.shape[:-1], -1) for half in (0, 1))
    low_bits, high_bits = (
        w.form.decoded((w.values & bits).astype(jnp.float32) / unit)
        for bits, unit in ((15, 1), (240, 16))
    )
    return [(low, apply_scales(low_bits)), (high, apply_scales(high_bits))]


def dequantized(values: Any, scales: Any, form: WeightForm, zeros: Any = None) -> Any:
    """Return (numbers - zeros) * scales in f32, of numpy arrays or of jax's."""
    whole = form.decoded(form.unpack(values))
    groups = whole.reshape(*whole.shape[:-1], scales.shape[-1], -1)
    if zeros is not None:
        groups = groups - zeros[..., None]
    return (groups * scales[..., None]).reshape(whole.shape)


def _numbers(values: Array, form: WeightForm) -> Array:
    """Return the stored numbers, 4 or 8, that 4 bytes of an interleaved weight [..., 4] hold."""
    if form.bits == 4:
        return jnp.concatenate([values & 15, values >> 4], axis=-1)
    return values ^ jnp.int8(-128)


def experts_are_plain(tree: Any) -> bool:
    """Return whether the weights of a model's experts are arrays; True for a model without any."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_quantized)
    experts = [leaf for path, leaf in leaves if "['experts']" in jax.tree_util.keystr(path)]
    return not any(map(is_quantized, experts))


class Quantizer(Protocol):
    """A module that makes values and scales by a kernel, to the bits of `quantized`."""

    def supported(self, weight: jax.ShapeDtypeStruct | Array, form: str, interleaved: bool) -> bool:
        """Return whether it takes a matrix [outputs, inputs] in the form of a name."""
        ...

    def quantize(
        self, weight_NE: Array, form: str, *, interleaved: bool = False
    ) -> tuple[Array, Array]:
        """Return values and scales, each with the outputs on the first axis."""
        ...


def quantized(
    weight: Array, form: WeightForm | str, num_outputs: int, kernel: Quantizer | None = None
) -> QuantizedWeight:
    """Return a plain weight [*outputs, *inputs] in a form (or in the form of a name).

    A scale takes the largest of its output (or group) to the form's largest value; numbers are
    those nearest to the weight times the inverse of the scale. A scale of zeros alone is 1; values
    that are not finite leave scales that are not. kernel: what makes the same where it supports the
    weight; None is XLA alone.
    """
    form = FORMS[form] if isinstance(form, str) else form
    assert form.encode is not None, f"only files have {form.name}"
    if kernel is not None:
        matrix = weight.reshape(math.prod(weight.shape[:num_outputs]), -1)
        if kernel.supported(matrix, form.name, form.interleaved):
            values, scales = kernel.quantize(matrix, form.name, interleaved=form.interleaved)
            shape = form.scale_shape(weight.shape, num_outputs, form.group)
            assert shape is not None
            return QuantizedWeight(
                values=values.reshape(form.value_shape(weight.shape)),
                scales=scales.reshape(shape),
                form=form,
                num_outputs=num_outputs,
                dtype=weight.dtype,
            )
    x = weight.astype(jnp.float32)
    if form.group is not None:
        groups = x.reshape(*x.shape[:-1], -1, form.group)
        scales = _scales(groups, (-1,), form)
        numbers, scales = form.encode(groups * (1 / scales)).reshape(x.shape), scales[..., 0]
    else:
        scales = _scales(x, tuple(range(num_outputs, x.ndim)), form)
        numbers = form.encode(x * (1 / scales))
    made = QuantizedWeight(
        values=form.pack(numbers),
        scales=scales,
        form=form.in_rows,
        num_outputs=num_outputs,
        dtype=weight.dtype,
    )
    return made.interleaved() if form.interleaved else made


def _scales(x: Array, axes: tuple[int, ...], form: WeightForm) -> Array:
    top = jnp.max(jnp.abs(x), axis=axes, keepdims=True) * np.float32(1 / form.largest)
    return jnp.where(top == 0, jnp.float32(1), top)


def partition(weight: QuantizedWeight, spec: PartitionSpec) -> QuantizedWeight:
    """Return the PartitionSpecs of values, scales and zeros where a plain weight has `spec`: axes
    of size 1 are not split.
    """
    axes = (*spec, *[None] * (weight.ndim - len(spec)))
    kept = [
        axis if size > 1 else None for axis, size in zip(axes, weight.scales.shape, strict=True)
    ]
    parts: dict[str, Any] = {"values": spec, "scales": PartitionSpec(*kept)}
    parts["zeros"] = None if weight.zeros is None else parts["scales"]
    return dataclasses.replace(weight, **parts)


def specs_of(tree: Any, specs: Any) -> Any:
    """Return the PartitionSpecs of a serving tree, from those of its plain tree."""
    return jax.tree.map(
        lambda leaf, spec: partition(leaf, spec) if is_quantized(leaf) else spec,
        tree,
        specs,
        is_leaf=is_quantized,
    )


def is_quantized(node: Any) -> bool:
    """Return whether a node is a QuantizedWeight; for jax.tree.map(is_leaf=)."""
    return isinstance(node, QuantizedWeight)
