"""Params: the weights of one model, as a read-only pytree that knows its architecture."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jpaged.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class _Static:
    """What jax keeps beside the leaves. The source takes no part in equality or hash: it must never
    split a treedef.
    """

    config: ModelConfig
    keys: tuple[str, ...]
    source: Path | None = dataclasses.field(compare=False)


class Params(Mapping[str, Any]):
    """The canonical parameter tree (see models/layout.py) with its ModelConfig, usable wherever jax
    takes a pytree.

    Flattens like the plain dict that it wraps: same leaves, order and key paths. Nothing is checked
    here, so that jax, optax and Orbax may put any object where an array was. Two Params have one
    treedef if their configs are equal, wherever they came from. source: the folder they were read
    from (its tokenizer and generation_config), a hint and no more: a tree map keeps the first
    tree's, and a jitted function returns that of the call that traced it.
    """

    __slots__ = ("__weakref__", "_static", "_tree")

    def __init__(self, tree: Mapping[str, Any], config: ModelConfig, source: Path | None = None):
        self._tree = {key: tree[key] for key in sorted(tree)}
        self._static = _Static(config, tuple(self._tree), source)

    @property
    def config(self) -> ModelConfig:
        """The architecture that these weights are for."""
        return self._static.config

    @property
    def source(self) -> Path | None:
        """The checkpoint folder that these weights came from, if one is known."""
        return self._static.source

    def __getitem__(self, key: str) -> Any:
        return self._tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    __eq__ = object.__eq__  # a Mapping's would compare arrays for truth
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        leaves = [
            leaf
            for leaf in jax.tree.leaves(self._tree)
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        ]
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        dtypes = "+".join(sorted({str(leaf.dtype) for leaf in leaves})) or "no arrays"
        return f"Params({self.config.family}, {count:,} parameters, {dtypes})"


def _children(params: Params) -> tuple[list[tuple[Any, Any]], _Static]:
    return [
        (jax.tree_util.DictKey(key), child) for key, child in params._tree.items()
    ], params._static


def _rebuild(static: _Static, children: Iterable[Any]) -> Params:
    params = object.__new__(Params)
    params._static = static
    params._tree = dict(zip(static.keys, children, strict=True))
    return params


jax.tree_util.register_pytree_with_keys(Params, _children, _rebuild)
