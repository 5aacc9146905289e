"""Pool: the KV pool of one model, the runner that holds it and the engine that runs over it."""

import atexit
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable

from jpaged import gpu_share
from jpaged.checks import store_address
from jpaged.config import EngineConfig
from jpaged.engine.cache.block_files import BlockFiles
from jpaged.engine.cache.costs import Costs
from jpaged.engine.cache.disk import Disk, StoredBlocks
from jpaged.engine.cache.remote_blocks import RemoteBlocks
from jpaged.engine.cache.wire import SECRET_VARIABLE, is_loopback, secret_of_environment
from jpaged.engine.engine import Engine
from jpaged.engine.sequence import Request
from jpaged.engine.types import Report
from jpaged.errors import CapacityError, ConfigError, JpagedError
from jpaged.models.config import ModelConfig
from jpaged.runtime import memory
from jpaged.runtime.choices import Choices
from jpaged.runtime.footprint import plan_pool
from jpaged.runtime.identity import stored_identity
from jpaged.runtime.kv_cache import states_a_row
from jpaged.runtime.memory import LARGEST, MemoryPlan, Needs
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import are_many, least, peers_of
from jpaged.runtime.runner import DraftOf, PeerRunner, Runner
from jpaged.runtime.step_table import warmup
from jpaged.types import PyTree
from kernels_pallas.implementation import CUDA

log = logging.getLogger("jpaged")

# The host plans and packs the next dispatch while the device works on the last one.
DISPATCHES_IN_FLIGHT = 2
SMALLER = 0.9  # of the size before it, where an allocator has less in one piece than it said
TRIES = 5  # sizes; XLA's allocator may wait ten seconds before it gives up one
FLUSH_S = 30.0  # in which the pool's blocks are written to files at the end
LEAST_BLOCKS = 8  # of a pool that grows
CLOSED = "this LLM is closed"


@dataclasses.dataclass(frozen=True)
class Served:
    """The serving trees of one moment. version: that of the weights, which cached KV depends on.
    identity: what the weights are known by in files; None where there are none.
    """

    params: PyTree
    draft: DraftOf | None
    version: int
    identity: bytes | None = None


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a pool is: blocks of keys and values, and states of sequences (None for a model
    that keeps none).
    """

    num_blocks: int
    num_states: int | None = None

    def __str__(self) -> str:
        states = "" if self.num_states is None else f" and {self.num_states} states"
        return f"{self.num_blocks} blocks{states}"

    def grown(self, other: "Size") -> "Size":
        """Return a size with the larger number of blocks and of states."""
        states = None if self.num_states is None else max(self.num_states, other.num_states or 0)
        return Size(max(self.num_blocks, other.num_blocks), states)

    def smaller(self) -> "Size":
        """Return the next smaller size to try."""
        states = None if self.num_states is None else max(int(self.num_states * SMALLER), 2)
        return Size(max(int(self.num_blocks * SMALLER), 1), states)


class Pool:
    """Sizes, makes and grows the pool of one model.

    config: resolved; its num_blocks stays None where the pool is sized when it is made. grows:
    `reserve` makes and enlarges the pool; else `start` makes it, once.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        placement: Placement,
        choices: Choices,
        *,
        has_state: bool,
        grows: bool,
    ):
        self.config = config
        self._model, self._placement, self._choices, self.grows = model, placement, choices, grows
        self._has_state = has_state
        self._served: Served | None = None  # None while no weights are bound
        self._cached_version = 0  # of the weights that the prefix cache is of
        self._engine: Engine | None = None
        self._runner: Runner | None = None  # the engine's
        self.size: Size | None = None  # of the pool that there is
        self._asked: Size | None = None  # what `reserve` has made room for as far as there is any
        self._needs: Needs | None = None  # of compiled steps, once they were asked
        self._disk: Disk | None = None  # of the config's prefix_store

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine: from `start` until `close`."""
        return self._engine is not None

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""
        return self._engine is None or not self._engine.has_unfinished()

    @property
    def engine(self) -> Engine:
        """What runs the requests; ConfigError where there is none."""
        if self._engine is None:
            raise ConfigError(CLOSED)
        return self._engine

    @property
    def runner(self) -> Runner:
        """What holds the pool; ConfigError where there is none."""
        if self._runner is None:
            raise ConfigError(CLOSED)
        return self._runner

    def serve(self, served: Served | None) -> None:
        """Run steps with these trees from now on; prefixes of another version of the weights are
        dropped. None lets go of them.
        """
        self._served = served
        if self._engine is None or self._runner is None:
            return
        if served is None:
            self._runner.serve(None)
            return
        draft = None if served.draft is None else served.draft[1]
        self._runner.serve(served.params, draft, served.version)
        if self._cached_version != served.version:
            if self._disk is not None:
                self._engine.identify(self._stored(self._runner, served))
            self._engine.reset_prefix_cache()
            self._cached_version = served.version

    def start(self, size: Size | None = None) -> None:
        """Make the engine over a pool of this size; None: of num_blocks, or what memory holds.
        Weights must be bound. The last engine goes once the new one is made; where an allocator
        keeps the device's memory, its pool goes before, and the new one is allocated here, smaller
        where it does not fit after all. ConfigError where none fits.
        """
        assert self._served is not None, "bind weights first"
        size = size or self._largest(self._served)
        self._flush_files()
        if self._keeps_memory:
            self._free()
            runner, size = self._allocated(size)
        else:
            runner = self._runner_of(size)
        if runner.config.strict:
            warmup(runner.compiled)
            runner.seal()
        stored = None
        if runner.config.prefix_store is not None:
            stored, self._disk = self._stored(runner, self._served), self._disk_of(runner)
        self._engine = Engine(
            runner.config,
            runner,
            num_replicas=self._placement.replicas,
            depth=DISPATCHES_IN_FLIGHT,
            disk=self._disk,
            stored=stored,
        )
        self._runner, self.size = runner, size
        self._cached_version = self._served.version

    def _disk_of(self, runner: Runner) -> Disk:
        """Return the files of the config's prefix_store; ConfigError where there can be none."""
        config, codec = runner.config, runner.block_codec()
        if self._disk is not None:
            self._disk.codec = codec
            return self._disk
        assert config.prefix_store is not None
        files = stored_blocks(config.prefix_store, int(config.prefix_store_gib * 2**30))
        self._at_exit = functools.partial(_call, weakref.WeakMethod(self._flush_files), os.getpid())
        atexit.register(self._at_exit)
        return Disk(files, codec, Costs())

    def _stored(self, runner: Runner, served: Served) -> bytes:
        assert served.identity is not None, "the weights have no identity"
        args = self._placement, self._choices, runner.pools
        return stored_identity(served.identity, self._model, runner.config, *args)

    def _flush_files(self) -> None:
        """Write to the prefix store what the pools hold, if there are both."""
        if self._disk is None or self._engine is None:
            return
        try:
            left = self._engine.flush_files(FLUSH_S)
        except (RuntimeError, JpagedError):
            log.exception("prefix_store: what the pool held was not written")
            return
        if left:
            log.warning("prefix_store: %d blocks were not written within %g seconds", left, FLUSH_S)

    def _runner_of(self, size: Size) -> Runner:
        """Return a runner over a pool of this size, which is not allocated yet."""
        assert self._served is not None
        config = dataclasses.replace(self.config, **vars(size))
        served, placement = self._served, self._placement
        peers = peers_of(placement.mesh, config.peer_timeout_s)
        kind = Runner if peers is None else PeerRunner
        runner = kind(
            self._model, config, placement, served.params, served.draft, self._choices, peers
        )
        runner.weight_version = served.version
        return runner

    def _allocated(self, size: Size) -> tuple[Runner, Size]:
        """Return a runner whose pool is allocated, and its size: this one, or a smaller one where
        the default was too large. ConfigError where none of a few fits.
        """
        for left in reversed(range(TRIES)):
            runner = self._runner_of(size)
            try:
                runner.allocate()
            except ConfigError:
                # Processes that share a model must have pools of one size.
                is_asked = self.config.num_blocks is not None or are_many(self._placement.mesh)
                if is_asked or not left or size.num_blocks == 1:
                    raise
                log.warning(
                    "a KV pool of %s does not fit the device in one piece: %s is tried. Memory "
                    "that other arrays have cut up is whole again once they are gone",
                    size,
                    size.smaller(),
                )
                size = size.smaller()
            else:
                return runner, size
        raise AssertionError("the last try raises")

    def allocate(self) -> None:
        """Have the pool again after `release`; where other arrays have come between and it is of
        the default size, a smaller one, whose steps compile again. ConfigError where none fits.
        """
        try:
            self.runner.allocate()
        except ConfigError:
            if not self._keeps_memory or self.config.num_blocks is not None:
                raise
            assert self.size is not None and self._served is not None
            log.warning("the KV pool of %s does not fit any more: steps compile again", self.size)
            fitting = self._largest(self._served)
            size = Size(
                min(fitting.num_blocks, self.size.smaller().num_blocks),
                self.size.smaller().num_states,
            )
            self.start(size)

    @property
    def _keeps_memory(self) -> bool:
        """Whether the device has memory of its own, which an allocator gives in pieces: there a
        pool is allocated before anything is compiled beside it.
        """
        return memory.allocator_stats(self._placement.device) is not None

    def _free(self) -> None:
        """Free the pool that there is; its prefixes go with it."""
        if self._engine is not None:
            self._engine.reset_prefix_cache()
            self.runner.release()

    def reserve(self, sizes: list[int]) -> None:
        """If it grows, have a pool that holds sequences of so many blocks each, as far as they
        run at once. It has a power of two of blocks, or num_blocks, and states for a power of two
        of sequences. No request may be unfinished.
        """
        if self.is_enough(sizes):
            return
        held, config = self.size, self.config
        longest = sorted(sizes, reverse=True)[: config.num_rows]
        blocks, states = max(sum(longest), LEAST_BLOCKS), self._states_of(len(longest))
        needed = Size(blocks, states)
        assert self._served is not None, "bind weights first"
        most = self._largest(self._served)
        if most.num_states is not None and states is not None:
            states = min(states, most.num_states)
        blocks = min(1 << (blocks - 1).bit_length(), most.num_blocks)
        size = Size(config.num_blocks or blocks, states)
        size = size if held is None else size.grown(held)
        if size != held:
            if held is not None:
                log.info("the KV pool grows from %s to %s: steps compile again", held, size)
            self.start(size)
        # More than there is room for is not asked for again.
        self._asked = needed.grown(size)

    def is_enough(self, sizes: list[int]) -> bool:
        """Return whether `reserve` would leave the pool as it is."""
        held, config = self.size, self.config
        if not self.grows or (held is not None and config.num_blocks is not None):
            return True
        if held is None or self._asked is None:
            return False
        longest = sorted(sizes, reverse=True)[: config.num_rows]
        states = self._states_of(len(longest)) if self._has_state else config.num_states
        few = sum(longest) <= self._asked.num_blocks
        return few and (states or 0) <= (self._asked.num_states or 0)

    def _states_of(self, sequences: int) -> int | None:
        """Return the states that so many sequences are given, or num_states."""
        config = self.config
        if not self._has_state or config.num_states is not None:
            return config.num_states
        rows = min(1 << (max(sequences, 1) - 1).bit_length(), config.num_rows)
        return rows * states_a_row(config)

    def resize_tables(self, config: EngineConfig) -> None:
        """Serve adapters from tables of the sizes that this config has; steps compile again."""
        log.info("adapters take %d slots: steps compile again", config.max_loras)
        self.config, self._needs = config, None
        if self._engine is not None:
            self.start(self.size)

    def misfit(self, request: Request) -> CapacityError | None:
        """Return the error of a request whose prompt, or the tokens that it goes on from, the whole
        pool cannot hold, or None.
        """
        engine, num_tokens = self.engine, max(map(len, request.sequences))
        if num_tokens <= engine.most_tokens:
            return None
        pool = f"the KV pool of {engine.config.num_blocks} blocks of {engine.config.block_size}"
        return CapacityError(
            f"prompt of {num_tokens} tokens does not fit {pool}: shorten it or raise num_blocks"
        )

    def release(self) -> None:
        """Free the pool and its prefixes, which the next dispatch allocates again; compiled steps
        stay.
        """
        self._flush_files()
        self.serve(None)
        self._free()

    def close(self) -> None:
        """Let go of engine, pool and weights; of no use afterwards."""
        self._flush_files()
        if self._disk is not None:
            self._disk.close()
            atexit.unregister(self._at_exit)
            self._disk = None
        self._engine = self._runner = self._served = None

    def report(self) -> Report:
        """Return the totals of engine and device since the start."""
        return self.engine.report() | self.runner.report()

    def _largest(self, served: Served) -> Size:
        """Return the size of the default pool, which is also as far as a pool grows. What compiled
        steps need does not depend on the pool: they are asked once.
        """
        config, placement = self.config, self._placement
        if config.num_blocks is not None:
            return Size(config.num_blocks, self._states_of(config.num_rows))
        plan = plan_pool(
            self._model,
            config,
            placement,
            served.params,
            draft=served.draft,
            freed=0 if self._engine is None else self.runner.pool_bytes,
            needs=self._needs,
            choices=self._choices,
        )
        self._needs = plan.needs if plan.needs.is_measured else None
        if placement.device.platform in CUDA:
            _report_share(plan, config)
        if plan.num_seqs < config.num_rows:
            assert plan.pool.states is not None
            log.warning(
                "%d sequences run at once, not max_num_seqs=%d: there is room for %d states of %d "
                "bytes, and each needs two. A lower max_num_seqs takes less memory",
                plan.num_seqs,
                config.num_rows,
                plan.num_states,
                plan.pool.states.nbytes,
            )
        sizes = [plan.num_blocks, plan.num_states]
        blocks, states = map(least, sizes) if are_many(placement.mesh) else sizes
        return Size(blocks, states if self._has_state else None)


def stored_blocks(store: str, num_bytes: int) -> StoredBlocks:
    """Return what holds the blocks of a config's prefix_store; ConfigError where nothing can.
    num_bytes: that a folder may have. Whether a block server answers is seen while running.
    """
    if (address := store_address(store)) is not None:
        secret = secret_of_environment()
        if not secret and not is_loopback(address[0]):
            raise ConfigError(
                f"prefix_store={store!r}: beyond this machine a block server asks for a secret: "
                f"set {SECRET_VARIABLE}"
            )
        return RemoteBlocks(*address, secret)
    try:
        return BlockFiles(store, num_bytes)
    except (OSError, ImportError) as e:
        raise ConfigError(f"prefix_store={store!r}: no folder that can be written to: {e}") from e


def _call(method: weakref.WeakMethod[Callable[[], None]], pid: int) -> None:
    """Call a method if its object lives, and this is the process that made it: in a fork, which has
    no other thread of it, it would wait for ever.
    """
    if os.getpid() == pid and (live := method()) is not None:
        live()


def _report_share(plan: MemoryPlan, config: EngineConfig) -> None:
    """Log which share of a GPU the pool and what it stands beside can have, and what raises it: a
    warning where memory bounds the pool and nobody has decided on the share.
    """
    bounds = plan.decided_by in ("memory", LARGEST)
    level = logging.WARNING if bounds and not gpu_share.is_set() else logging.INFO
    gib = 1 << 30
    _log_once(
        level,
        f"the KV pool may have {plan.account['pool'] / gib:.1f} GiB (bounded by {plan.decided_by}):"
        f" jax takes {gpu_share.share():g} of the GPU, and memory_utilization="
        f"{config.memory_utilization:g} of that, {plan.limit / gib:.1f} GiB, is for weights, steps "
        f"and pool. For more, {gpu_share.how_to_raise()}",
    )


@functools.cache
def _log_once(level: int, text: str) -> None:
    log.log(level, text)
