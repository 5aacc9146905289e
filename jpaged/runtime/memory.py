"""Where a device's memory goes, and so how many KV blocks fit: computed, with no trial run.

A device holds the weights, the program's other arrays, what the steps need beside them (see
footprint.py), and the pool, which takes what is left. On CPU the memory is others' too: there the
pool is small by default and half of what is free stays free, which the steps' temporaries must fit.
Elsewhere an allocator says what it has; a pool is one array a group of layers and field, so it
needs free memory in one piece. Running out of memory is reported in terms of settings.
"""

import bisect
import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jpaged import gpu_share
from jpaged.config import EngineConfig
from jpaged.engine.shapes import moved_blocks
from jpaged.errors import CapacityError, ConfigError
from kernels_pallas.implementation import CUDA

CPU_POOL_BYTES = 4 << 30
LARGEST = "the largest free block of the device"
CGROUPS = {
    "2": ("memory.max", "memory.current"),
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
# In every backend's words for running out of memory.
ASKED = re.compile(r"allocat\w* ([\d.]+ ?(?:bytes|[KMGT]i?B?))")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes of a device that the engine takes beside weights and pool.

    temporaries: of the largest step, with its results. code: of all steps, where code lies in the
    device's memory. state: what the engine keeps for each device slot. tower: of the largest call
    of a vision tower. autotuning: what XLA takes for a while to compile a step beside the pool,
    where it tries products on the device; no part of `total`, since that may lie outside of the
    engine's share. source: where the figures come from.
    is_measured: from compiled steps.
    """

    temporaries: int = 0
    code: int = 0
    state: int = 0
    tower: int = 0
    autotuning: int = 0
    source: str = ""
    is_measured: bool = False

    @property
    def total(self) -> int:
        return self.temporaries + self.code + self.state + self.tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be used of a device, what its arrays hold already, and what a pool may take, all in
    bytes. whole: what its allocator may take for all programs, of which `total` is the engine's.
    block: the largest array that it can give. None where it does not say. is_gpu: whether jax takes
    a share of the device only (see gpu_share), and tries products on it when it compiles.
    """

    total: int
    in_use: int = 0
    pool: int | None = None
    whole: int | None = None
    block: int | None = None
    is_gpu: bool = False

    @classmethod
    def of(cls, device: Any, utilization: float) -> "Limits":
        """Return the limits of a device that is here: the share `utilization` of what its allocator
        may take; on a CPU the memory that is free, of which a pool may take half, and 4 GiB at
        most. ConfigError where an allocator does not say what it has, as that of
        XLA_PYTHON_CLIENT_ALLOCATOR=platform.
        """
        stats = allocator_stats(device)
        if stats is None:
            free = free_memory()
            return cls(total=free, pool=min(CPU_POOL_BYTES, free // 2))
        if stats.get("bytes_limit", 0) <= 0:
            asked = os.environ.get(ALLOCATOR)
            by = f" ({ALLOCATOR}={asked})" if asked else ""
            raise ConfigError(
                f"num_blocks=None: the allocator{by} does not say how much memory {device} has, so "
                "the pool has no default size: set num_blocks (and max_num_seqs of a model that "
                "keeps states), or leave jax its default allocator (of plan_memory, pass limits=)"
            )
        return cls(
            total=int(stats["bytes_limit"] * utilization),
            in_use=stats["bytes_in_use"],
            whole=stats["bytes_limit"],
            block=largest_block(stats),
            is_gpu=device.platform in CUDA,
        )


def allocator_stats(device: Any) -> Mapping[str, int] | None:
    """Return what the allocator of a device's memory says of itself, which may be nothing; None for
    a CPU, which has neither.
    """
    return None if device.platform == "cpu" else device.memory_stats() or {}


def largest_block(stats: Mapping[str, int]) -> int | None:
    """Return the bytes of the largest array that an allocator can give now, as its memory_stats()
    say; None where they do not.

    XLA's allocator of GPUs (bfc_allocator.cc) counts the largest free block of what it has taken of
    the device, `pool_bytes`; what it may still take comes in one piece too. Before its first
    allocation it has taken nothing. Where something is free there is a largest block, so 0 says
    that it is not counted.
    """
    limit, in_use = stats["bytes_limit"], stats["bytes_in_use"]
    taken = stats.get("pool_bytes", -1)
    taken = limit if taken < 0 else taken  # that of TPUs has all of it
    free = stats.get("largest_free_block_bytes", 0)
    if free <= 0 and in_use < taken:
        return None
    return max(free, limit - taken)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateCost:
    """What states take beside keys and values. nbytes: of one, in every group that keeps states.
    a_row: states that a row is given. blocks_a_row: blocks of a sequence of max_model_len. most: as
    many as all rows are given. pinned: their number where settings say it.
    """

    nbytes: int
    a_row: int
    blocks_a_row: int
    most: int
    pinned: int | None = None

    def beside(self, num_blocks: int, nbytes: int) -> int:
        """Return how many states there are beside so many blocks of keys and values, which take
        this many bytes: those of as many rows as the blocks hold whole, or as many as take the same
        bytes, whichever is more.
        """
        if self.pinned is not None:
            return self.pinned
        whole = self.a_row * -(-num_blocks // self.blocks_a_row)
        return min(max(whole, nbytes // self.nbytes), self.most)


@dataclasses.dataclass(frozen=True)
class GroupCost:
    """What a group of layers with keys and values takes. nbytes: of a block. most: blocks that are
    of use at once; None is any number. share: blocks of it for each block of the group that reaches
    furthest back, but no fewer than `least`, which one sequence beside a prefill needs.
    """

    nbytes: int
    most: int | None = None
    least: int = 0
    share: float = 1.0

    def count(self, num_blocks: int) -> int:
        """Return its blocks beside so many of the group that reaches furthest back."""
        if self.most is None:
            return num_blocks
        return min(num_blocks, self.most, max(self.least, math.ceil(num_blocks * self.share)))


def window_share(full: tuple[int, int], windows: Sequence[tuple[int, int]]) -> float:
    """Return how many blocks each group with a window is given for each block of those without.

    full, windows: bytes of a block, and blocks of the longest sequence. Short sequences take as
    many blocks of one group as of the other, long ones few of those with a window; a pool is
    divided before it is known which will come. This division holds the same share of what the best
    one for their length would hold of the shortest and of the longest, and more between: no other
    does as well where it does worst.
    """
    nbytes, length = full
    of_windows = sum(size for size, _ in windows)
    if not of_windows:
        return 1.0
    whole = nbytes + of_windows
    # Bytes of the longest sequence, for each byte that its blocks without a window take.
    long = 1 + sum(size * count for size, count in windows) / (nbytes * length)
    held = long / (1 + long * of_windows / whole)  # of the most that short sequences could have
    return held * nbytes / (whole - held * of_windows)


@dataclasses.dataclass(frozen=True)
class PoolCost:
    """What pools take of a device. groups: of layers with keys and values. in_use: blocks of the
    group that reaches furthest back that can be in use at once; None is max_num_seqs *
    max_model_len. states: what those take that are kept beside.
    """

    groups: tuple[GroupCost, ...]
    in_use: int | None = None
    states: StateCost | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in every group."""
        states = self.states.nbytes if self.states else 0
        return sum(group.nbytes for group in self.groups) + states

    def of(self, num_blocks: int) -> int:
        """Return the bytes of this many blocks, and of the states beside them."""
        states = self.states.nbytes * self.num_states(num_blocks) if self.states else 0
        return self._blocks(num_blocks) + states

    def num_states(self, num_blocks: int) -> int:
        """Return how many states there are beside this many blocks."""
        if self.states is None:
            return 0
        return self.states.beside(num_blocks, self._blocks(num_blocks))

    def moved(self, config: EngineConfig) -> int:
        """Return the bytes of the most blocks of all groups that one move between pool and host
        takes.
        """
        keys = moved_blocks(config) * sum(group.nbytes for group in self.groups)
        if self.states is None:
            return keys
        return keys + moved_blocks(config, per="block") * self.states.nbytes

    def within(self, nbytes: int) -> int:
        """Return how many blocks fit into this many bytes."""
        unbounded = sum(group.nbytes for group in self.groups if group.most is None)
        return bisect.bisect_right(range(nbytes // unbounded + 1), nbytes, key=self.of) - 1

    def _blocks(self, num_blocks: int) -> int:
        return sum(group.nbytes * group.count(num_blocks) for group in self.groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The bytes of one device. other: arrays that are not the engine's. num_blocks: of the group of
    layers that reaches furthest back. decided_by: what set it. max_num_seqs: rows of the config.
    """

    limit: int
    weights: int
    other: int
    needs: Needs
    pool: PoolCost
    block_size: int
    num_blocks: int
    decided_by: str
    max_num_seqs: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in every group of layers."""
        return self.pool.block_bytes

    @property
    def num_states(self) -> int:
        """States of sequences in the pool; 0 for a model that keeps none."""
        return self.pool.num_states(self.num_blocks)

    @property
    def num_seqs(self) -> int:
        """Sequences that run at once: max_num_seqs, as far as there are states for them, of which
        each needs one to go on from and one to write.
        """
        if self.pool.states is None:
            return self.max_num_seqs
        return min(self.max_num_seqs, max(self.num_states // 2, 1))

    @property
    def account(self) -> dict[str, int]:
        """Bytes by what takes them."""
        return {
            "weights": self.weights,
            "other": self.other,
            "temporaries": self.needs.temporaries,
            "code": self.needs.code,
            "state": self.needs.state,
            **({"tower": self.needs.tower} if self.needs.tower else {}),
            "pool": self.pool.of(self.num_blocks),
        }

    @property
    def waste(self) -> int:
        """Bytes of the limit that nothing uses; below zero the plan does not fit."""
        return self.limit - sum(self.account.values())


def plan(
    config: EngineConfig, limits: Limits, *, pool: PoolCost, weights: int = 0, needs: Needs
) -> MemoryPlan:
    """Return the account of a device for a resolved config; num_blocks is the config's own, or what
    fits.

    weights: bytes of them that limits.in_use counts too where it is not 0. The default pool never
    holds more than max_num_seqs * max_model_len tokens. Raises ConfigError where no block fits.
    """
    other = max(limits.in_use - weights, 0)
    free = limits.total - weights - other - needs.total
    if limits.whole is not None:
        free = min(free, limits.whole - weights - other - needs.total - needs.autotuning)
    sizes = {"memory": pool.within(free)}
    whole = config.num_rows * config.max_blocks_per_seq
    sizes["max_num_seqs * max_model_len"] = whole if pool.in_use is None else pool.in_use
    if limits.block is not None:
        # Where other arrays lie between, steps and trials must find room in the same piece.
        piece = limits.block - needs.total - needs.autotuning
        free, sizes[LARGEST] = min(free, piece), pool.within(piece)
    if limits.pool is not None:
        sizes["the default pool of a CPU"] = pool.within(limits.pool)
    if config.num_blocks is not None:
        sizes = {"num_blocks": config.num_blocks}
    decided_by = min(sizes, key=lambda name: sizes[name])
    if sizes[decided_by] < 1:
        left = max(free if limits.pool is None else min(free, limits.pool), 0)
        lower = _settings(config, "block_size", "max_num_batched_tokens", "max_num_seqs")
        more = f", or {gpu_share.how_to_raise()}" if limits.is_gpu else ""
        raise ConfigError(
            f"no KV block of {pool.block_bytes} bytes{_beside(pool)} fits the {left} bytes left "
            f"for the pool (weights take {weights}, other arrays {other}, steps {needs.total}): "
            f"lower {lower}, or raise "
            f"{_settings(config, 'memory_utilization', 'tensor_parallel_size')}{more}"
        )
    return MemoryPlan(
        limit=limits.total,
        weights=weights,
        other=other,
        needs=needs,
        pool=pool,
        block_size=config.block_size,
        num_blocks=sizes[decided_by],
        decided_by=decided_by,
        max_num_seqs=config.num_rows,
    )


@contextlib.contextmanager
def explained(config: EngineConfig, *, pool_bytes: int | None = None) -> Iterator[None]:
    """Running out of memory inside becomes an error that names the settings to lower; anything else
    passes.

    pool_bytes: of the pool that is allocated inside (a ConfigError then); None for a step (a
    CapacityError).
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as e:
        if (error := memory_error(e, config, pool_bytes=pool_bytes)) is None:
            raise
        raise error from e


def memory_error(
    error: Exception,
    config: EngineConfig,
    *,
    pool_bytes: int | None = None,
) -> CapacityError | ConfigError | None:
    """Return the error that `explained` raises in the place of one; None where it passes."""
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        return None
    if pool_bytes is not None:
        states = () if config.num_states is None else ("num_states",)
        lower = _settings(config, "num_blocks", *states, "memory_utilization", last=" or ")
        return ConfigError(
            f"the KV pool of {pool_bytes} bytes does not fit the device: lower {lower}"
        )
    knobs = ("num_blocks", "memory_utilization", "max_num_batched_tokens", "max_num_seqs")
    asked, lower = ASKED.search(str(error)), _settings(config, *knobs, last=" or ")
    return CapacityError(f"a step could not get {asked[1] if asked else 'memory'}: lower {lower}")


def _beside(pool: PoolCost) -> str:
    """Return the states that come with the first block, for an error."""
    if pool.states is None:
        return ""
    return f" with {pool.num_states(1)} states of {pool.states.nbytes} bytes"


def _settings(config: EngineConfig, *names: str, last: str = ", ") -> str:
    *others, end = (f"{name}={getattr(config, name)}" for name in names)
    return last.join(filter(None, [", ".join(others), end]))


def free_memory() -> int:
    """Return the bytes that this process may still take: the machine's available memory or its
    cgroup's, whichever is less.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for version, names in CGROUPS.items():
        folder = "/sys/fs/cgroup" if version == "2" else "/sys/fs/cgroup/memory"
        limit, used = (_lines(f"{folder}/{name}") for name in names)
        if limit and used and limit[0] != "max":
            # Cached pages of files (a checkpoint just read) count as used, and go when others are
            # wanted.
            stat = dict(line.split() for line in _lines(f"{folder}/memory.stat"))
            cached = int(stat.get("inactive_file", 0))
            free = min(free, max(int(limit[0]) - int(used[0]) + cached, 0))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux, or no cgroup: the caller has another source
        return []
