"""The families of models: FAMILIES has every Family that a module of this package defines, by its
`model_type`, so a new family is a new module (or a new constant in one) and nothing else.

A family says how its config.json describes layers and what its files call their parameters; what a
layer does and which parameters it has is said in `models/layers`.
"""

import importlib
import pkgutil
from collections.abc import Iterator

from jpaged.models.families.family import Family


def _defined() -> Iterator[Family]:
    """Yield the families of all modules of this package, module by module."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Family):
                yield value


FAMILIES = {family.model_type: family for family in _defined()}

__all__ = ["FAMILIES", "Family"]
