"""Whether a Triton kernel's masks keep it within its arrays: the interpreter clamps or drops what
the hardware would read or overwrite.
"""

import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import Slice


def watch(patch: pytest.MonkeyPatch, *modules: Any) -> list[bool]:
    """Notes of each load and store of modules whether it leaves its array in any dimension."""
    seen: list[bool] = []
    plgpu = modules[0].plgpu
    load, store = plgpu.load, plgpu.store

    def note(wrong: Any) -> None:
        seen.append(bool(wrong))

    def watched_load(ref: Any, *, mask: Any = None, **how: Any) -> Any:
        jax.debug.callback(note, _outside(ref, mask))
        return load(ref, mask=mask, **how)

    def watched_store(ref: Any, value: Any, *, mask: Any) -> None:
        jax.debug.callback(note, _outside(ref, mask))
        store(ref, value, mask=mask)

    watched = types.SimpleNamespace(**vars(plgpu))
    watched.load, watched.store = watched_load, watched_store
    for module in modules:
        patch.setattr(module, "plgpu", watched)
    return seen


def again(module: Any, old: str = "", new: str = "") -> Any:
    """A module of the same source, with a part replaced."""
    source, name = Path(module.__file__).read_text(), f"{module.__name__.rpartition('.')[2]}_again"
    assert not old or source.count(old) == 1
    made: Any = types.ModuleType(name)
    made.of = module.__name__
    exec(compile(source.replace(old, new) if old else source, name, "exec"), vars(made))
    return made


def over(module: Any, part: Any) -> Any:
    """A module of the same source, with the functions of another, changed one: part is that of
    `again` of a module that it imports them from.
    """
    made = again(module)
    names = [name for name in vars(made) if getattr(vars(made)[name], "__module__", "") == part.of]
    assert names
    for name in names:
        setattr(made, name, getattr(part, name))
    return made


def _outside(ref: Any, mask: Any) -> jax.Array:
    wrong, access = jnp.zeros((), bool), ref.transforms[-1]
    for index, size in zip(access.indices, access.shape, strict=True):
        if not isinstance(index, Slice):
            wrong |= (index < 0) | (index >= size)
    return jnp.any(wrong if mask is None else wrong & mask)
