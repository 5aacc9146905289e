"""Formats of Hugging Face files that hold linear weights in 8 or 4 bits: what a folder's
`quantization_config` says, which tensors hold a weight, and what they hold.

A Format is one of them. Weights that its files hold plain are read as plain ones.

Shapes: N outputs, E inputs.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from jpaged.errors import CheckpointError, ConfigError
from jpaged.models.quantized import FP8, INT4, INT8, MXFP4, QuantizedWeight, WeightForm

FLOATS, INTS = ("float32", "float16", "bfloat16"), ("I32",)  # dtypes of a file's tensors
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 neighbours

type Tensors = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # shapes, and dtypes that may be
type Read = Callable[[str], np.ndarray]  # a tensor of the file by its name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(abc.ABC):
    """How a folder's files hold linear weights. A subclass reads one layout of tensors.

    form: of the numbers. group: how many inputs share a scale; None: all inputs of an output.
    block: how many outputs and inputs share one. has_zeros: whether zeros are subtracted before
    numbers are scaled. ignored: the products that the files hold plain, as quantization_config
    lists them: names, or "re:" and a regular expression of how names begin.
    """

    form: WeightForm
    group: int | None = None
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    ignored: tuple[str, ...] = ()
    only_experts: ClassVar[bool] = False

    def ignores(self, base: str) -> bool:
        """Return whether quantization_config says that the weight at `base` is plain in the files.
        What they do hold is what counts when they are read.
        """

        def is_named(name: str) -> bool:
            name = name.removeprefix("language_model.")
            return f"{base}.".startswith(f"{name}.") or base.endswith(f".{name}")

        return any(
            re.match(name.removeprefix("re:"), base) if name.startswith("re:") else is_named(name)
            for name in self.ignored
        )

    @property
    def inputs_of_a_scale(self) -> int | None:
        """How many inputs share a scale; None: all inputs of an output."""
        return self.group if self.block is None else self.block[1]

    @abc.abstractmethod
    def tensors(self, base: str, N: int, E: int, names: Mapping[str, Any]) -> Tensors | None:
        """Return the tensors that must hold the weight [N, E] at `base`, which is its name without
        ".weight"; None if the file holds the weight plain. names: all tensors of the file, which
        have a `shape`.
        """

    @abc.abstractmethod
    def read(
        self, read: Read, base: str, N: int, E: int, names: Mapping[str, Any]
    ) -> QuantizedWeight:
        """Return the weight at `base` in numpy arrays, one number in an element of its values."""

    def weight(
        self, numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None
    ) -> QuantizedWeight:
        """Return the weight of stored numbers [N, E], with stored scales and zeros [N, groups]."""
        E, group = numbers.shape[1], self.inputs_of_a_scale
        if group is not None and E % group:  # the last group is cut: take groups that divide E
            columns = np.arange(0, E, math.gcd(group, E) if group < E else E) // group
            scales = scales[:, columns]
            zeros = None if zeros is None else zeros[:, columns]
        arrays: dict[str, Any] = {"values": numbers, "scales": scales, "zeros": None}
        if zeros is not None:
            arrays["zeros"] = zeros - np.float32(self.form.offset)
        dtype = np.dtype("bfloat16")
        return QuantizedWeight(**arrays, form=self.form.unpacked, num_outputs=1, dtype=dtype)

    def _groups(self, E: int) -> int:
        return -(-E // (self.group or E))


class Awq(Format):
    """AutoAWQ's: words of 8 outputs, the even ones first, transposed."""

    def tensors(self, base: str, N: int, E: int, names: Mapping[str, Any]) -> Tensors | None:
        if f"{base}.qweight" not in names:
            return None
        return {
            f"{base}.qweight": ((E, -(-N // 8)), INTS),
            f"{base}.qzeros": ((self._groups(E), -(-N // 8)), INTS),
            f"{base}.scales": ((self._groups(E), N), FLOATS),
        }

    def read(
        self, read: Read, base: str, N: int, E: int, names: Mapping[str, Any]
    ) -> QuantizedWeight:
        numbers, zeros = (
            _nibbles(read(f"{base}.{name}"))[..., AWQ_ORDER].reshape(-1, -(-N // 8) * 8)[:, :N].T
            for name in ("qweight", "qzeros")
        )
        return self.weight(numbers, _f32(read(f"{base}.scales")).T, _f32(zeros))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gptq(Format):
    """AutoGPTQ's: words of 8 inputs, transposed. minus_one: its first version stores zeros less
    one.
    """

    minus_one: bool = False

    def tensors(self, base: str, N: int, E: int, names: Mapping[str, Any]) -> Tensors | None:
        if f"{base}.qweight" not in names:
            return None
        wanted: Tensors = {
            f"{base}.qweight": ((-(-E // 8), N), INTS),
            f"{base}.qzeros": ((self._groups(E), -(-N // 8)), INTS),
            f"{base}.scales": ((self._groups(E), N), FLOATS),
        }
        if f"{base}.g_idx" in names:
            wanted[f"{base}.g_idx"] = ((E,), INTS)
        return wanted

    def read(
        self, read: Read, base: str, N: int, E: int, names: Mapping[str, Any]
    ) -> QuantizedWeight:
        order = f"{base}.g_idx"
        if order in names and not np.array_equal(read(order), np.arange(E) // (self.group or E)):
            raise CheckpointError(
                f"{order}: inputs are grouped in another order than theirs (desc_act=True), which "
                "is not read"
            )
        numbers = _nibbles(read(f"{base}.qweight")).swapaxes(1, 2).reshape(-1, N)[:E].T
        zeros = _nibbles(read(f"{base}.qzeros")).reshape(-1, -(-N // 8) * 8)[:, :N].T
        return self.weight(
            numbers, _f32(read(f"{base}.scales")).T, _f32(zeros) + float(self.minus_one)
        )


class PackedInts(Format):
    """compressed-tensors' pack-quantized: words of 8 inputs, zeros in words of 8 outputs."""

    def tensors(self, base: str, N: int, E: int, names: Mapping[str, Any]) -> Tensors | None:
        if f"{base}.weight_packed" not in names:
            return None
        wanted: Tensors = {
            f"{base}.weight_packed": ((N, -(-E // 8)), INTS),
            f"{base}.weight_scale": ((N, self._groups(E)), FLOATS),
            f"{base}.weight_shape": ((2,), ("I64", "I32")),
        }
        if f"{base}.weight_zero_point" in names:
            wanted[f"{base}.weight_zero_point"] = ((-(-N // 8), self._groups(E)), INTS)
        return wanted

    def read(
        self, read: Read, base: str, N: int, E: int, names: Mapping[str, Any]
    ) -> QuantizedWeight:
        numbers = _nibbles(read(f"{base}.weight_packed")).reshape(N, -1)[:, :E]
        zeros, name = None, f"{base}.weight_zero_point"
        if name in names:
            zeros = _nibbles(read(name)).swapaxes(1, 2).reshape(-1, self._groups(E))[:N]
        scales = _f32(read(f"{base}.weight_scale"))
        return self.weight(numbers, scales, None if zeros is None else _f32(zeros))


# Both multiply the weight: transformers calls the factor the inverse of what divided it.
SCALE_NAMES = ("weight_scale", "weight_scale_inv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Format):
    """Weights of 8 bits under their plain name, with scales beside them under one of SCALE_NAMES,
    one for the whole tensor, for each output, group or block.

    code: the dtype of the weight in the file.
    """

    code: str

    def tensors(self, base: str, N: int, E: int, names: Mapping[str, Any]) -> Tensors | None:
        scale = self._scale(base, names)
        if scale is None:
            return None
        shape = names[scale].shape
        if self.block is not None:
            shape = (-(-N // self.block[0]), -(-E // self.block[1]))
        elif math.prod(shape) > 1:
            shape = (N, self._groups(E))
        return {f"{base}.weight": ((N, E), (self.code,)), scale: (shape, FLOATS)}

    def read(
        self, read: Read, base: str, N: int, E: int, names: Mapping[str, Any]
    ) -> QuantizedWeight:
        scale, groups = self._scale(base, names), self._groups(E)
        assert scale is not None
        scales = _f32(read(scale))
        if self.block is not None:
            scales = np.repeat(scales, self.block[0], axis=0)[:N]
            groups = -(-E // self.block[1])
        rows = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1)
        return self.weight(read(f"{base}.weight"), np.broadcast_to(rows, (N, groups)))

    def _scale(self, base: str, names: Mapping[str, Any]) -> str | None:
        return next((f"{base}.{name}" for name in SCALE_NAMES if f"{base}.{name}" in names), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4(Format):
    """GPT-OSS's experts: blocks, uint8 [N, groups, 16], two numbers a byte, the lower bits first;
    and scales, uint8 [N, groups], the exponent of two plus 127. The file has those of all experts
    of a layer in one tensor, which checkpoint.stacked takes apart; other weights are plain.

    Source: OCP Microscaling Formats 1.0.
    """

    form: WeightForm = MXFP4
    group: int | None = 32
    only_experts: ClassVar[bool] = True

    def tensors(self, base: str, N: int, E: int, names: Mapping[str, Any]) -> Tensors | None:
        return None

    def read(
        self, read: Read, base: str, N: int, E: int, names: Mapping[str, Any]
    ) -> QuantizedWeight:
        blocks, exponents = read(f"{base}_blocks"), read(f"{base}_scales")
        numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(N, E)
        return self.weight(numbers, np.ldexp(np.float32(1), exponents.astype(np.int32) - 127))


def _nibbles(x: np.ndarray) -> np.ndarray:
    """Return the 4-bit numbers of 32-bit words, the lowest bits first: uint8 [..., 8]."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return (x.view(np.uint32)[..., None] >> shifts & 15).astype(np.uint8)


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def read_format(raw: Any, *, are_alternate: bool) -> Format | None:
    """Return the format that a quantization_config names, None without one.

    are_alternate: the family's files hold rows of gate and up in turn, which mxfp4 alone is read
    of. Experts of other families are one by one in files of 8 and 4 bits, or plain. ConfigError,
    which names the method, for formats that are not read.
    """
    if not raw:
        return None
    method = raw.get("quant_method") if isinstance(raw, Mapping) else raw
    if are_alternate:
        if method == "mxfp4":
            return Mxfp4()
        raise _refused(method, "these experts are read in mxfp4 or plain")
    if not isinstance(raw, Mapping) or method not in METHODS:
        raise _refused(method, f"not one of {', '.join(METHODS)}, nor mxfp4 of GPT-OSS")
    ignored = tuple(raw.get("ignore") or raw.get("modules_to_not_convert") or ())
    for name in ignored:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as e:
            raise _refused(
                method, f"{name!r}, which it ignores, is no regular expression: {e}"
            ) from e
    return dataclasses.replace(METHODS[method](raw), ignored=ignored)


def _refused(method: Any, reason: str) -> ConfigError:
    return ConfigError(f"quantization_config ({method!r}): {reason}")


def _bits(method: str, bits: Any, wanted: int = 4) -> None:
    if bits != wanted:
        raise _refused(method, f"{bits} bits: only {wanted}")


def _group(size: Any) -> int | None:
    return None if size in (None, -1) else int(size)


def _fp8(raw: Mapping[str, Any]) -> Format:
    if (variant := raw.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused("fp8", f"fmt={variant!r}: only e4m3")
    if (size := raw.get("weight_block_size")) is None:
        return Scaled(form=FP8, code="F8_E4M3")
    block = (size[0], size[1])
    return Scaled(form=FP8, code="F8_E4M3", block=block)


def _awq(raw: Mapping[str, Any]) -> Format:
    _bits("awq", raw.get("bits", raw.get("w_bit")))
    if (version := str(raw.get("version", "gemm")).lower()) != "gemm":
        raise _refused("awq", f"version={version!r}: only gemm")
    group = _group(raw.get("group_size", raw.get("q_group_size")))
    return Awq(form=INT4, group=group, has_zeros=True)


def _gptq(raw: Mapping[str, Any]) -> Format:
    _bits("gptq", raw.get("bits"))
    version = raw.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _refused("gptq", f"checkpoint_format={version!r}: only gptq and gptq_v2")
    group = _group(raw.get("group_size"))
    return Gptq(form=INT4, group=group, minus_one=version == "gptq", has_zeros=True)


def _compressed(raw: Mapping[str, Any]) -> Format:
    name, groups = "compressed-tensors", list((raw.get("config_groups") or {}).values())
    if not groups or any(group.get("weights") != groups[0].get("weights") for group in groups):
        raise _refused(name, "config_groups that differ in their weights, or none")
    weights, layout = groups[0].get("weights") or {}, raw.get("format")
    codes = {"float-quantized": (FP8, "F8_E4M3"), "int-quantized": (INT8, "I8")}
    if layout not in (*codes, "pack-quantized"):
        raise _refused(name, f"format={layout!r}: only {', '.join(codes)}, pack-quantized")
    _bits(name, weights.get("num_bits"), 4 if layout == "pack-quantized" else 8)
    strategy, size = weights.get("strategy"), weights.get("block_structure")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _refused(name, f"strategy={strategy!r}: only tensor, channel, group and block")
    if weights.get("actorder") == "group":
        raise _refused(name, "actorder='group': groups of inputs in another order than theirs")
    group = _group(weights.get("group_size")) if strategy == "group" else None
    block = (size[0], size[1]) if strategy == "block" and size else None
    if layout == "pack-quantized":
        has_zeros = not weights.get("symmetric", True)
        return PackedInts(form=INT4, group=group, block=block, has_zeros=has_zeros)
    form, code = codes[layout]
    return Scaled(form=form, code=code, group=group, block=block)


# By `quant_method`.
METHODS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}
