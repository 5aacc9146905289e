"""Trees of parameters as they come: nested dicts, lists, flax.nnx's modules and states.

Nothing here imports flax, which takes a part of each start and which serving has no use for: where
an object of nnx's is, nnx has been imported.
"""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def imported(name: str) -> ModuleType | None:
    """A module, if anybody has imported it."""
    return sys.modules.get(name)


def is_module(x: Any) -> bool:
    """Whether it is an nnx Module."""
    nnx = imported("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def to_tree(model: Any) -> Any:
    """The canonical tree (nested dicts of bare arrays, keyed by strings) of an nnx Module, an
    nnx.State or a mapping.
    """
    nnx = imported("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    if isinstance(model, list | tuple):
        model = dict(enumerate(model))
    if isinstance(model, Mapping):
        return {str(key): to_tree(value) for key, value in model.items()}
    return model.get_value() if nnx is not None and isinstance(model, nnx.Variable) else model
