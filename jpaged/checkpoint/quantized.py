"""Pieces of weights that a Hugging Face file holds in 8 or 4 bits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jpaged.models.hf_quantization import Format
from jpaged.models.quantized import QuantizedWeight
from jpaged.models.weight import Index, Piece, store


def quantized_piece(
    name: str, whole: Callable[[], QuantizedWeight], rows: slice | np.ndarray, index: Index
) -> Piece:
    """Return some rows of a quantised matrix as a piece, which can be read as plain values too.

    whole: reads the matrix, in numpy arrays.
    """

    def quantized() -> QuantizedWeight:
        return jax.tree.map(lambda array: array[rows], whole())

    def read(out: np.ndarray) -> None:
        store(name, np.reshape(quantized().whole(), out.shape), out)

    def view(shape: tuple[int, ...]) -> np.ndarray:
        return np.reshape(quantized().whole(), shape)

    return Piece(np.dtype("bfloat16"), read, view, index, quantized)


def reader_of(
    stored: Format, entries: Mapping[str, Any], read: Callable[[str, Any], np.ndarray]
) -> Callable[[str, int, int], Callable[[], QuantizedWeight]]:
    """Return a function of a weight's name and sizes that returns the function which reads it.

    A weight that several pieces share is read once for those that follow each other. read: returns
    a tensor of the file by its name and entry.
    """

    @functools.lru_cache(maxsize=1)
    def whole(base: str, N: int, E: int) -> QuantizedWeight:
        return stored.read(lambda name: read(name, entries[name]), base, N, E, entries)

    return lambda name, N, E: functools.partial(whole, name.removesuffix(".weight"), N, E)
