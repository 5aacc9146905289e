"""Adapters: holds the adapters of one model by name, on the host and in the form in which they are
served.
"""

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jpaged.checkpoint.peft import load_adapter
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.types import Report
from jpaged.errors import ConfigError, RequestError
from jpaged.models.config import ModelConfig
from jpaged.models.lora import EXTRA, Adapter, Pair, Target, extra_of, pairs_of, targets
from jpaged.models.served import served_config
from jpaged.models.trees import to_tree
from jpaged.models.weight import Change
from jpaged.runtime.identity import leaves_digest
from jpaged.types import PyTree

MOST_SLOTS, LEAST_RANK = 16, 8  # of tables that grow: more adapters take turns
Leaves = tuple[Any, list[weakref.ref[jax.Array] | None]]  # a tree's form, and its arrays


class Adapters:
    """What add_adapter was given, and the trees of the latest call.

    Those are known by the identity of their leaves, as weights are: equal objects are the same
    version, anything else is a new one, also for threads whose calls join one batch. devices: of
    the tensor axis. dtype: that they are served in.
    """

    def __init__(self, model: ModelConfig, devices: int, dtype: DTypeLike):
        self.model, self.served = model, served_config(model, devices)
        self.dtype = jnp.dtype(dtype)
        self.named: dict[str, AdapterVersion] = {}
        self._versions = itertools.count(1)
        self._reading = threading.Lock()  # of `_known`, held while trees are read
        self._known: list[tuple[Leaves, AdapterVersion]] = []

    def add(
        self, name: object, source: PyTree, config: EngineConfig, shared_salt: bytes | None = None
    ) -> int:
        """Take an adapter under a name, in place of the one that had it; return its version.
        shared_salt: see AdapterVersion. ConfigError where it cannot be served from the tables of
        this config.
        """
        name = check_name(name)
        made = dataclasses.replace(self.made(source, name), shared_salt=shared_salt)
        check_fits([made], config)
        self.named[name] = made
        return made.version

    def remove(self, name: object) -> None:
        """Forget a name; RequestError where it is unknown."""
        if not isinstance(name, str) or self.named.pop(name, None) is None:
            raise RequestError(f"adapter {name!r} is unknown")

    def made(self, source: PyTree, name: str | None = None) -> AdapterVersion:
        """Return a version of a tree, or of a folder as PEFT writes it."""
        if isinstance(source, str | Path):
            pairs = load_adapter(source, self.model)
        else:
            pairs = jax.device_get(pairs_of(source, self.model, caller="generate"))
        parts, served = targets(self.model, EXTRA), targets(self.served, EXTRA)
        data = {part: self._served(pair, parts[part], served[part]) for part, pair in pairs.items()}
        rank = max(pair.rank for pair in pairs.values())
        version = next(self._versions)
        return AdapterVersion(
            name=name, version=version, rank=rank, data=data, digest_of=leaves_digest
        )

    def of_call(self, sources: list[PyTree]) -> list[AdapterVersion | None]:
        """Return the version of each tree, folder or None; equal objects are read once."""
        known: list[tuple[Leaves, AdapterVersion]] = []
        by_source: dict[int, AdapterVersion] = {}
        with self._reading:
            for source in sources:
                if source is not None and id(source) not in by_source:
                    leaves = _leaves(source)
                    same = (made for other, made in self._known if _is_same(leaves, other))
                    by_source[id(source)] = made = next(same, None) or self.made(source)
                    known.append((leaves, made))
            self._known = known
        return [None if source is None else by_source[id(source)] for source in sources]

    def report(self) -> Report:
        """Return the version that each name has."""
        named = self.named.copy()  # at once: other threads add to it
        return {"adapters": {name: adapter.version for name, adapter in named.items()}}

    def _served(self, pair: Pair, target: Target, served: Target) -> Pair:
        """Return a pair for the heads of the served model, in its dtype."""
        outputs, _, inputs = target.part.axes.partition(",")
        change = Change.of(target.spec, served.spec, self.dtype)

        def changed(x: PyTree, axes: list[str]) -> np.ndarray:
            repeats = change.repeats if "K" in axes else 1
            rows = change.rows if "V" in axes else 0
            of_side = dataclasses.replace(change, axes=tuple(axes), repeats=repeats, rows=rows)
            return of_side(np.asarray(x))

        return Pair(
            changed(pair.a, ["r", *inputs.split()]), changed(pair.b, [*outputs.split(), "r"])
        )


def grown(config: EngineConfig, adapters: list[AdapterVersion]) -> EngineConfig:
    """Return the config with tables for these adapters, their sizes powers of two and no smaller
    than those that there are.
    """
    count = min(1 << (len(adapters) - 1).bit_length(), MOST_SLOTS)
    rank = 1 << (max(adapter.rank for adapter in adapters) - 1).bit_length()
    least = config.max_lora_rank if config.max_loras else LEAST_RANK
    sizes = {"max_loras": max(count, config.max_loras), "max_lora_rank": max(rank, least)}
    extra = set(config.lora_extra).union(*(extra_of(adapter.data) for adapter in adapters))
    return dataclasses.replace(config, **sizes, lora_extra=tuple(extra))


def check_fits(adapters: Iterable[AdapterVersion], config: EngineConfig) -> None:
    """ConfigError where an adapter has no room in the tables."""
    for adapter in adapters:
        changes = extra_of(adapter.data)
        check_combination(Facts(config=config, adapter_rank=adapter.rank, adapter_changes=changes))


def _leaves(source: PyTree) -> Leaves:
    """Return the form of a tree and weak references to its arrays. A folder has none: it is read
    anew each time.
    """
    if isinstance(source, str | Path):
        return object(), []
    scale = source.scale if isinstance(source, Adapter) else 1.0
    tree = to_tree(source.weights if isinstance(source, Adapter) else source)
    arrays, form = jax.tree.flatten(tree)
    return (form, scale), [weakref.ref(x) if isinstance(x, jax.Array) else None for x in arrays]


def _is_same(one: Leaves, other: Leaves) -> bool:
    if one[0] != other[0]:
        return False
    pairs = zip(one[1], other[1], strict=True)
    return all(a is not None and b is not None and a() is b() and a() is not None for a, b in pairs)


def check_name(name: object) -> str:
    """Return the name of an adapter, a printable str; ConfigError for anything else."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"adapter name {name!r}: must be a non-empty str of printable characters")
    return name
