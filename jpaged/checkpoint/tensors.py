"""What both checkpoint formats share: named tensors, the check against the config, casting."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jpaged.errors import CheckpointError, ConfigError

DTYPES = {name: np.dtype(name) for name in ("float32", "float16")} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
SLAB_BYTES = 16 * 2**20  # what is read, cast or stored as one piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A stored tensor and its place: canonical[index] takes it in C order. `read` fills that view, and casts."""

    name: str
    dtype: np.dtype
    read: Callable[[np.ndarray], None]
    index: Any = ()


def flat(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """{"layers.0.attention.qkv": leaf, ...} of a nested dict, in jax's order. Orbax stores tensors by these names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of such names."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def float_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype from a name, a numpy or a jax dtype; ConfigError for any that weights cannot have."""
    try:
        return DTYPES[np.dtype(dtype).name]
    except (KeyError, TypeError):
        raise ConfigError(f"dtype={dtype!r}: must be float32, bfloat16, float16 or None") from None


def check_fit(
    where: Any, found: Mapping[str, tuple[tuple[int, ...], str]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """CheckpointError that names every kind of misfit between tensors (shape, dtype name) and the config's shapes."""
    both = [name for name in wanted if name in found]
    misfits = {
        "missing": [name for name in wanted if name not in found],
        "not in this architecture": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {list(found[name][0])}, config {list(wanted[name])}"
            for name in both
            if tuple(found[name][0]) != tuple(wanted[name])
        ],
        "not bfloat16, float16 or float32": [
            f"{name} {found[name][1]}" for name in both if found[name][1] not in DTYPES
        ],
    }
    if said := [f"{len(names)} {kind} ({_first(names)})" for kind, names in misfits.items() if names]:
        raise CheckpointError(f"{where}: tensors do not fit the config: " + "; ".join(said))


def store(name: str, block: np.ndarray, out: np.ndarray) -> None:
    """Write a block into a view of its shape, cast to the view's dtype."""
    with np.errstate(over="ignore"):
        out[...] = block
    if out.dtype == np.float16 and block.dtype != np.float16 and not np.isfinite(out).all():
        raise CheckpointError(f"{name}: holds values beyond float16's range; load it as bfloat16 or float32")


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts on a cache line: jax on CPU then takes it over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _first(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
