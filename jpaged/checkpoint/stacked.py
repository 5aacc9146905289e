"""Experts of a layer that a Hugging Face file holds in one tensor, as StackedExperts says. Those of
GPT-OSS have alternate rows of gate and up, transposed in bfloat16 or as they are in mxfp4.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jpaged.checkpoint.quantized import quantized_piece
from jpaged.checkpoint.tensors import DTYPES
from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.families.family import StackedExperts
from jpaged.models.hf_quantization import Mxfp4
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.quantized import QuantizedWeight
from jpaged.models.weight import Piece, store

BLOCK = 32  # numbers of mxfp4 that share a scale: 16 bytes, in each the lower half first


def stacked_pieces(
    entries: Mapping[str, Any], config: ModelConfig, form: StackedExperts
) -> tuple[dict[str, list[Piece]], dict[str, tuple[int, ...]]]:
    """Return the pieces of the experts' canonical tensors, one for each expert, and the shapes that
    the file's tensors must have.

    entries: the file's tensors (hf.Entry), whose names end in _blocks and _scales in mxfp4.
    """
    pieces: dict[str, list[Piece]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    hidden = config.hidden_size
    for number, layer in enumerate(config.layers):
        experts = next((ffn for ffn in layer.ffns if isinstance(ffn, ExpertsConfig)), None)
        if experts is None:
            continue
        num, width = experts.num_experts, experts.expert_size
        for name, inputs, outputs in (("gate_up", hidden, 2 * width), ("down", width, hidden)):
            theirs = f"model.layers.{number}.{form.node}.{getattr(form, name)}"
            alternate = form.alternate and name == "gate_up"
            ours = f"layers.{number}.mlp.experts.{name}"
            if f"{theirs}_blocks" in entries:
                groups = (num, outputs, inputs // BLOCK)
                shapes = {f"{theirs}_blocks": (*groups, BLOCK // 2), f"{theirs}_scales": groups}
                reads = [
                    functools.partial(_mxfp4, entries, theirs, shapes, x, alternate)
                    for x in range(num)
                ]
                pieces[ours] = [
                    quantized_piece(theirs, read, slice(None), (slice(x, x + 1),))
                    for x, read in enumerate(reads)
                ]
            else:
                one = (inputs, outputs) if form.transposed else (outputs, inputs)
                shapes = {theirs: (num, *one)}
                fill = functools.partial(_fill, theirs, entries.get(theirs), one, form)
                pieces[ours] = [
                    _piece(_dtype(entries, theirs), functools.partial(fill, x), slice(x, x + 1))
                    for x in range(num)
                ]
            wanted |= shapes
            if experts.bias:
                bias = f"{theirs}_bias"
                fill = functools.partial(_fill_bias, bias, entries.get(bias), (num, outputs), form)
                pieces[f"{ours}_bias"] = [_piece(_dtype(entries, bias), fill, slice(None))]
                wanted |= {bias: (num, outputs)}
    return pieces, wanted


def _piece(dtype: np.dtype, fill: Callable[[np.ndarray], None], experts: slice) -> Piece:
    """Return some experts of a tensor, which are read whole even for a share of them."""

    def view(shape: tuple[int, ...]) -> np.ndarray:
        out = np.empty(shape, dtype)
        fill(out)
        return out

    return Piece(dtype, fill, view, (experts,))


def _mxfp4(
    entries: Mapping[str, Any], base: str, shapes: Mapping[str, Any], x: int, alternate: bool
) -> QuantizedWeight:
    """Return one expert's weight. alternate: rows of gate and up alternate in the file; in ours all
    rows of gate come first.
    """

    def read(name: str) -> np.ndarray:
        return _read(name, entries[name], shapes[name][1:], np.dtype(np.uint8), x)

    _, rows, groups = shapes[f"{base}_scales"]
    weight = Mxfp4().read(read, base, rows, groups * BLOCK, entries)
    if not alternate:
        return weight
    order = np.arange(rows).reshape(-1, 2).T.reshape(-1)
    return jax.tree.map(lambda array: array[order], weight)


def _fill(
    name: str,
    entry: Any,
    shape: tuple[int, ...],
    form: StackedExperts,
    x: int,
    out: np.ndarray,
) -> None:
    """Fill one expert's weights, gate_up [1, 2, I, E] or down [1, E, I]."""
    rows = _read(name, entry, shape, DTYPES[entry.dtype], x)
    _put(name, rows.T if form.transposed else rows, form, out[0])


def _fill_bias(
    name: str, entry: Any, shape: tuple[int, ...], form: StackedExperts, out: np.ndarray
) -> None:
    """Fill the biases of all experts, [X, 2, I] or [X, E]."""
    bias = _read(name, entry, shape, DTYPES[entry.dtype])
    for x in range(shape[0]):
        _put(name, bias[x], form, out[x])


def _put(name: str, rows: np.ndarray, form: StackedExperts, out: np.ndarray) -> None:
    """Store rows; where `out` has an axis more, they are those of gate and up."""
    if out.ndim > rows.ndim and form.alternate:
        rows = rows.reshape(-1, 2, *rows.shape[1:]).swapaxes(0, 1)
    store(name, rows.reshape(out.shape), out)


def _read(
    name: str, entry: Any, shape: tuple[int, ...], dtype: np.dtype, index: int = 0
) -> np.ndarray:
    """Return the index-th array of this shape of a tensor."""
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
    """Return the dtype of a tensor; bfloat16 if it is missing, which `check_fit` will report."""
    entry = entries.get(name)
    return DTYPES.get(entry.dtype if entry else "", DTYPES["bfloat16"])
