"""Experts that a Hugging Face file holds in one tensor a layer, as GPT-OSS's does: the rows of gate
and up in turn, transposed in bfloat16 or packed in mxfp4.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jpaged.checkpoint.packed import Packed, packed_part
from jpaged.checkpoint.tensors import DTYPES, Part, store
from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.layers.experts import ExpertsConfig

BLOCK = 32  # values of mxfp4 that share a scale: 16 bytes, the lower half of each first


def stacked_parts(
    entries: Mapping[str, Any], config: ModelConfig
) -> tuple[dict[str, list[Part]], dict[str, tuple[int, ...]]]:
    """The parts of the experts' tensors, an expert each, and the shapes that the file's must have.

    entries: the file's tensors (hf.Entry), packed where they are named *_blocks and *_scales.
    """
    parts: dict[str, list[Part]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    hidden = config.hidden_size
    for layer, each in enumerate(config.layers):
        if not isinstance(each.ffn, ExpertsConfig):
            continue
        num, width = each.ffn.num_experts, each.ffn.expert_size
        for name, inputs, outputs in (("gate_up", hidden, 2 * width), ("down", width, hidden)):
            theirs = f"model.layers.{layer}.mlp.experts.{name}_proj"
            ours = f"layers.{layer}.mlp.experts.{name}"
            if f"{theirs}_blocks" in entries:
                groups = (num, outputs, inputs // BLOCK)
                own = {f"{theirs}_blocks": (*groups, BLOCK // 2), f"{theirs}_scales": groups}
                beside = [(key, entries.get(key)) for key in own]
                reads = [
                    functools.partial(_packed, beside, own, x, name == "gate_up")
                    for x in range(num)
                ]
                parts[ours] = [
                    packed_part(theirs, read, slice(None), (slice(x, x + 1),))
                    for x, read in enumerate(reads)
                ]
            else:
                own = {theirs: (num, inputs, outputs)}
                dtype, beside = _dtype(entries, theirs), (theirs, entries.get(theirs))
                fill = functools.partial(_fill, *beside, own[theirs][1:])
                parts[ours] = [
                    _part(dtype, functools.partial(fill, x), slice(x, x + 1)) for x in range(num)
                ]
            bias = f"{theirs}_bias"
            given = functools.partial(_fill_bias, bias, entries.get(bias), (num, outputs))
            parts[f"{ours}_bias"] = [_part(_dtype(entries, bias), given, slice(None))]
            wanted |= own | {bias: (num, outputs)}
    return parts, wanted


def _part(dtype: np.dtype, fill: Callable[[np.ndarray], None], experts: slice) -> Part:
    """Some experts of a tensor, which are read whole for a share of them too."""

    def view(shape: tuple[int, ...]) -> np.ndarray:
        out = np.empty(shape, dtype)
        fill(out)
        return out

    return Part(dtype, fill, view, (experts,))


def _packed(entries: Any, shapes: Mapping[str, Any], x: int, pairs: bool) -> Packed:
    """One expert's weight as it lies, its rows in our order; see `_put`.

    Of the file: blocks uint8 [..., groups, 16], two values a byte, the lower bits first; scales
    uint8 [..., groups], the exponent of two plus 127. Source: OCP Microscaling Formats 1.0.
    """
    blocks, exponents = (
        _read(name, entry, shapes[name][1:], np.dtype(np.uint8), x) for name, entry in entries
    )
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    if pairs:
        rows = np.arange(len(blocks)).reshape(-1, 2).T.reshape(-1)
        values, scales = values[rows], scales[rows]
    return Packed("mxfp4", values, scales, None, BLOCK)


def _fill(name: str, entry: Any, shape: tuple[int, ...], x: int, out: np.ndarray) -> None:
    """One expert's weights, gate_up [1, 2, I, E] or down [1, E, I], transposed in the file."""
    _put(name, _read(name, entry, shape, DTYPES[entry.dtype], x).T, out[0])


def _fill_bias(name: str, entry: Any, shape: tuple[int, ...], out: np.ndarray) -> None:
    """Every expert's, [X, 2, I] or [X, E]."""
    bias = _read(name, entry, shape, DTYPES[entry.dtype])
    for x in range(shape[0]):
        _put(name, bias[x], out[x])


def _put(name: str, rows: np.ndarray, out: np.ndarray) -> None:
    """Rows of gate and up in turn, [2 I, ...], or rows as they are."""
    if out.ndim > rows.ndim:
        rows = rows.reshape(-1, 2, *rows.shape[1:]).swapaxes(0, 1)
    store(name, rows, out)


def _read(
    name: str, entry: Any, shape: tuple[int, ...], dtype: np.dtype, index: int = 0
) -> np.ndarray:
    """So many values of a tensor, from the index-th such piece on."""
    count = int(np.prod(shape))
    try:
        with entry.file.open("rb") as file:
            file.seek(entry.start + index * count * dtype.itemsize)
            data = file.read(count * dtype.itemsize)
    except OSError as e:
        raise CheckpointError(f"{entry.file}: {name}: {e}") from e
    if len(data) < count * dtype.itemsize:
        raise CheckpointError(f"{entry.file}: {name}: the file ends early")
    return np.frombuffer(data, dtype).reshape(shape)


def _dtype(entries: Mapping[str, Any], name: str) -> np.dtype:
    """Of a tensor that may be missing, which the check against the config then says."""
    entry = entries.get(name)
    return DTYPES.get(entry.dtype if entry else "", DTYPES["bfloat16"])
