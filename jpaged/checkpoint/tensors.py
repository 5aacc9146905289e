"""What both checkpoint formats share: names and dtypes of tensors, and the check against the
config.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jpaged.errors import CheckpointError, ConfigError

DTYPES = {name: np.dtype(name) for name in ("float32", "float16")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
SLAB_BYTES = 16 * 2**20  # what is read, cast or stored as one piece

type Shape = tuple[int, ...]


def flat(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda node: isinstance(node, tuple)
) -> dict[str, Any]:
    """Return {"layers.0.attention.qkv": leaf, ...} of a nested dict, in jax's order. Orbax stores
    tensors under these names.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def float_dtype(dtype: Any) -> np.dtype:
    """Return the numpy dtype of a name, a numpy or a jax dtype; ConfigError for any that weights
    cannot have.
    """
    try:
        return DTYPES[np.dtype(dtype).name]
    except (KeyError, TypeError):
        raise ConfigError(f"dtype={dtype!r}: must be float32, bfloat16, float16 or None") from None


def check_fit(
    source: Any, stored: Mapping[str, tuple[Shape, str]], wanted: Mapping[str, Shape]
) -> None:
    """CheckpointError that names every kind of misfit between stored tensors (shape, dtype name)
    and the config's shapes. source: what holds the tensors, for the message.
    """
    both = [(name, *stored[name], wanted[name]) for name in wanted if name in stored]
    misfits = {
        "missing": [name for name in wanted if name not in stored],
        "not in this architecture": [name for name in stored if name not in wanted],
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
    parts = [f"{len(names)} {kind} ({first[kind]})" for kind, names in misfits.items() if names]
    if parts:
        raise CheckpointError(f"{source}: tensors do not fit the config: " + "; ".join(parts))


def first_line(e: Exception) -> str:
    """Return a library's message, cut to fit into one line of ours."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
