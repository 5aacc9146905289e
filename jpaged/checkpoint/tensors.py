"""What both checkpoint formats share: named tensors, the check against the config, casting."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jpaged.errors import CheckpointError, ConfigError

DTYPES = {name: np.dtype(name) for name in ("float32", "float16")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
SLAB_BYTES = 16 * 2**20  # what is read, cast or stored as one piece


class Part(NamedTuple):
    """A stored tensor and its place: canonical[index] takes it in C order. `read` fills that view,
    and casts. `view` gives it as an array of the view's shape, of which an index reads a piece.
    packed: gives what the file holds where that is in 8 or 4 bits (checkpoint.packed).
    """

    dtype: np.dtype
    read: Callable[[np.ndarray], None]
    view: Callable[[tuple[int, ...]], Any]
    index: Any = ()
    packed: Callable[[], Any] | None = None


def flat(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda node: isinstance(node, tuple)
) -> dict[str, Any]:
    """{"layers.0.attention.qkv": leaf, ...} of a nested dict, in jax's order. Orbax stores tensors
    by these names.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def float_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype from a name, a numpy or a jax dtype; ConfigError for any that weights cannot
    have.
    """
    try:
        return DTYPES[np.dtype(dtype).name]
    except (KeyError, TypeError):
        raise ConfigError(f"dtype={dtype!r}: must be float32, bfloat16, float16 or None") from None


Shape = tuple[int, ...]


def check_fit(
    where: Any, found: Mapping[str, tuple[Shape, str]], wanted: Mapping[str, Shape]
) -> None:
    """CheckpointError that names every kind of misfit between tensors (shape, dtype name) and the
    config's shapes.
    """
    both = [(name, *found[name], wanted[name]) for name in wanted if name in found]
    misfits = {
        "missing": [name for name in wanted if name not in found],
        "not in this architecture": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {list(a)}, config {list(b)}" for name, a, _, b in both if tuple(a) != tuple(b)
        ],
        "not bfloat16, float16 or float32": [
            f"{name} {dtype}" for name, _, dtype, _ in both if dtype not in DTYPES
        ],
    }
    first = {
        kind: ", ".join(names[:3]) + (", ..." if names[3:] else "")
        for kind, names in misfits.items()
    }
    if said := [f"{len(names)} {kind} ({first[kind]})" for kind, names in misfits.items() if names]:
        raise CheckpointError(f"{where}: tensors do not fit the config: " + "; ".join(said))


def read_share(
    name: str, parts: list[Part], shape: Shape, dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """canonical[index] of a tensor of this shape; nothing else of its parts is read."""
    wanted = [range(*own.indices(size)) for own, size in zip(index, shape, strict=True)]
    out = np.empty([len(own) for own in wanted], dtype)
    for part in parts:
        slices = (*part.index, *[slice(None)] * (len(shape) - len(part.index)))
        there = [range(*own.indices(size)) for own, size in zip(slices, shape, strict=True)]
        both = [
            (max(a[0], b[0]), min(a[-1], b[-1]) + 1) for a, b in zip(wanted, there, strict=True)
        ]
        if all(first < end for first, end in both):
            at, into = (
                tuple(slice(first - own[0], end - own[0]) for (first, end), own in pairs)
                for pairs in (zip(both, there, strict=True), zip(both, wanted, strict=True))
            )
            store(name, part.view(tuple(map(len, there)))[at], out[into])
    return out


def store(name: str, block: np.ndarray, out: np.ndarray) -> None:
    """Write a block into a view of its shape, cast to the view's dtype."""
    with np.errstate(over="ignore"):
        out[...] = block
    if out.dtype == np.float16 and block.dtype != np.float16 and not np.isfinite(out).all():
        raise CheckpointError(
            f"{name}: holds values beyond float16's range; load it as bfloat16 or float32"
        )


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts on a cache line: jax on CPU then takes it over without a
    copy.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def first_line(e: Exception) -> str:
    """What a library's error says, cut to fit into one line of ours."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
