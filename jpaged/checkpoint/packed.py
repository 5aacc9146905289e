"""Linear weights that a Hugging Face file holds in 8 or 4 bits, read as they lie: FP8 with scales
of blocks, AWQ, GPTQ and compressed-tensors.

Shapes: N outputs, E inputs, g inputs that share a scale.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jpaged.checkpoint.tensors import DTYPES, Part, store
from jpaged.errors import CheckpointError
from jpaged.models.hf_quantization import Format

RAW = {  # by a file's code or numpy's name
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    **{"I8": np.dtype(np.int8), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)},
}
FLOATS, INTS = tuple(DTYPES), ("I32",)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 neighbours
PACKING = 32  # inputs that lie together in our int4, the first half of them in the low bits


_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_HALF, *(-value for value in _HALF)], np.float32)  # the numbers of mxfp4


class Packed(NamedTuple):
    """Some outputs of a weight: (values - zeros) * scales, an input e taking scale e // group.

    values [N, E]: float8, int8, or uint8 from 0 to 15; scales, and zeros (None is none, and 8 of
    int4) [N, ceil(E / group)] f32.
    """

    form: str
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    group: int

    def dequantised(self) -> np.ndarray:
        """What it stands for, f32 [N, E]."""
        at = np.arange(self.values.shape[1]) // self.group
        if self.form == "mxfp4":
            return E2M1[self.values] * self.scales[:, at]
        values = self.values.astype(np.float32)
        if self.zeros is not None:
            values -= self.zeros[:, at]
        elif self.form == "int4":
            values -= 8
        return values * self.scales[:, at]


type Tensors = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # shapes, and dtypes that may be


def tensors_of(kind: Format, base: str, N: int, E: int, names: Mapping[str, Any]) -> Tensors | None:
    """What the file must hold of the weight at `base` (a name without its ".weight"); None where it
    holds it plain. names: all that the file holds.
    """
    g = kind.group or E
    groups, rows = -(-E // g), -(-N // 8)
    if kind.method == "mxfp4":  # of experts alone: checkpoint.stacked
        return None
    if kind.method in ("awq", "gptq"):
        if f"{base}.qweight" not in names:
            return None
        packed = (E, rows) if kind.method == "awq" else (-(-E // 8), N)
        found: Tensors = {
            "qweight": (packed, INTS),
            "qzeros": ((groups, rows), INTS),
            "scales": ((groups, N), FLOATS),
        }
        if kind.method == "gptq" and f"{base}.g_idx" in names:
            found["g_idx"] = ((E,), INTS)
    elif kind.form == "int4":
        if f"{base}.weight_packed" not in names:
            return None
        found = {
            "weight_packed": ((N, -(-E // 8)), INTS),
            "weight_scale": ((N, groups), FLOATS),
            "weight_shape": ((2,), ("I64", "I32")),
        }
        if f"{base}.weight_zero_point" in names:
            found["weight_zero_point"] = ((rows, groups), INTS)
    else:
        scale = "weight_scale_inv" if kind.method == "fp8" and kind.block else "weight_scale"
        if f"{base}.{scale}" not in names:
            return None
        shape = names[f"{base}.{scale}"].shape
        if kind.block is not None:
            shape = (-(-N // kind.block[0]), -(-E // kind.block[1]))
        elif math.prod(shape) > 1:  # else of the whole tensor
            shape = (N, groups)
        code = "F8_E4M3" if kind.form == "fp8" else "I8"
        found = {"weight": ((N, E), (code,)), scale: (shape, FLOATS)}
    return {f"{base}.{name}": wanted for name, wanted in found.items()}


def read_packed(
    kind: Format, read: Callable[[str], np.ndarray], base: str, N: int, E: int, names: Any
) -> Packed:
    """The weight at `base`; read gives a tensor by its name, names are those that there are."""
    g = kind.group or E
    if kind.method == "awq":
        values, zeros = (
            _words(read(f"{base}.{name}"))[..., AWQ_ORDER].reshape(-1, -(-N // 8) * 8)[:, :N].T
            for name in ("qweight", "qzeros")
        )
        return Packed("int4", values, _f32(read(f"{base}.scales")).T, _f32(zeros), g)
    if kind.method == "gptq":
        order = f"{base}.g_idx"
        if order in names and not np.array_equal(read(order), np.arange(E) // g):
            raise CheckpointError(
                f"{order}: inputs are grouped in another order than theirs (desc_act=True), which "
                "is not read"
            )
        values = _words(read(f"{base}.qweight")).swapaxes(1, 2).reshape(-1, N)[:E].T
        zeros = _words(read(f"{base}.qzeros")).reshape(-1, -(-N // 8) * 8)[:, :N].T
        return Packed(
            "int4", values, _f32(read(f"{base}.scales")).T, _f32(zeros) + float(kind.minus_one), g
        )
    if kind.form == "int4":
        values = _words(read(f"{base}.weight_packed")).reshape(N, -1)[:, :E]
        zeros, name = None, f"{base}.weight_zero_point"
        if name in names:
            zeros = _f32(_words(read(name)).swapaxes(1, 2).reshape(-1, -(-E // g))[:N])
        return Packed("int4", values, _f32(read(f"{base}.weight_scale")), zeros, g)
    scale = "weight_scale_inv" if kind.method == "fp8" and kind.block else "weight_scale"
    scales = _f32(read(f"{base}.{scale}"))
    if kind.block is not None:
        scales, g = np.repeat(scales, kind.block[0], axis=0)[:N], kind.block[1]
    rows = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1)
    scales = np.broadcast_to(rows, (N, -(-E // g)))
    return Packed(kind.form, read(f"{base}.weight"), scales, None, g)


def _words(x: np.ndarray) -> np.ndarray:
    """uint8 [..., 8]: the 4-bit numbers of 32-bit words, the lowest bits first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return (x.view(np.uint32)[..., None] >> shifts & 15).astype(np.uint8)


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def packed_part(name: str, whole: Callable[[], Packed], rows: slice, index: Any) -> Part:
    """Rows of a packed weight as a part of a canonical tensor, plain where it is read so."""

    def packed() -> Packed:
        found = whole()
        zeros = None if found.zeros is None else found.zeros[rows]
        return Packed(found.form, found.values[rows], found.scales[rows], zeros, found.group)

    def fill(out: np.ndarray) -> None:
        store(name, packed().dequantised().reshape(out.shape), out)

    def view(shape: tuple[int, ...]) -> np.ndarray:
        return packed().dequantised().reshape(shape)

    return Part(DTYPES["bfloat16"], fill, view, index, packed)


class Laid(NamedTuple):
    """The arrays of a canonical weight in 8 or 4 bits, as models.quantized describes them."""

    form: str
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None

    def is_finite(self) -> bool:
        """Whether all that it stands for is; e4m3 has NaN, and no infinity."""
        if self.form == "fp8" and ((self.values.view(np.uint8) & 0x7F) == 0x7F).any():
            return False
        return bool(np.isfinite(self.scales).all())


def laid(parts: list[Part], shape: tuple[int, ...], num_outputs: int) -> Laid | None:
    """A canonical weight of packed parts; None where it cannot be kept so, and is read plain."""
    found = [part.packed() for part in parts if part.packed is not None]
    kinds = {(p.form, p.group) for p in found}
    if len(found) < len(parts) or len(kinds) > 1:
        return None
    first, last, inputs = found[0], shape[-1], math.prod(shape[num_outputs:])
    form, in_4_bits = first.form, first.values.dtype == np.uint8
    by_output = not in_4_bits and first.group >= inputs
    g = math.gcd(first.group, last)
    if in_4_bits and (last % PACKING or g % PACKING):
        return None
    values: Any = np.empty(shape, first.values.dtype)
    grouped = (*shape[:num_outputs], *[1] * (len(shape) - num_outputs))
    scales = np.empty(grouped if by_output else (*shape[:-1], last // g), np.float32)
    has_zeros = any(p.zeros is not None for p in found)
    zeros = np.zeros_like(scales) if has_zeros else None
    at = 0 if by_output else np.arange(0, inputs, g) // first.group
    for part, p in zip(parts, found, strict=True):
        values[part.index] = p.values.reshape(values[part.index].shape)
        scales[part.index] = p.scales[:, at].reshape(scales[part.index].shape)
        if zeros is not None and p.zeros is not None:
            zeros[part.index] = p.zeros[:, at].reshape(zeros[part.index].shape) - 8
    if in_4_bits:
        pairs = values.reshape(*shape[:-1], -1, 2, PACKING // 2)
        values = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*shape[:-1], -1)
    return Laid(form, values, scales, zeros)


def parts_of(
    kind: Format, entries: Mapping[str, Any], read: Callable[[str, Any], np.ndarray]
) -> Callable[[str, int, int], Callable[[], Packed]]:
    """A function of a weight's name and sizes that gives its reader. A weight that several tensors
    of ours share is read once for those that follow each other.
    """

    @functools.lru_cache(maxsize=1)
    def whole(base: str, N: int, E: int) -> Packed:
        return read_packed(kind, lambda name: read(name, entries[name]), base, N, E, entries)

    return lambda name, N, E: functools.partial(whole, name.removesuffix(".weight"), N, E)
