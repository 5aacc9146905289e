"""Trees of parameters that callers pass: nested dicts, lists, flax.nnx's modules and states.

Nothing here imports flax, which would take time at every start and which serving has no use for:
whoever passes an object of nnx has imported it.
"""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def imported(name: str) -> ModuleType | None:
    """Return a module if it has been imported, else None."""
    return sys.modules.get(name)


def is_module(x: Any) -> bool:
    """Return whether an object is an nnx Module."""
    nnx = imported("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def to_tree(model: Any) -> Any:
    """Return the canonical tree of an nnx Module, an nnx.State or a mapping: nested dicts of bare
    arrays, keyed by strings.
    """
    nnx = imported("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    if isinstance(model, list | tuple):
        model = dict(enumerate(model))
    if isinstance(model, Mapping):
        return {str(key): to_tree(value) for key, value in model.items()}
    return model.get_value() if nnx is not None and isinstance(model, nnx.Variable) else model
