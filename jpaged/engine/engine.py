"""The loop: schedule, dispatch, commit. The runner is handed in, so a mock model can stand in for the device."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from jpaged.config import EngineConfig
from jpaged.engine.batch import Batch, StepResult, pack
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.scheduler import Plan, Scheduler
from jpaged.engine.sequence import Sequence, Status
from jpaged.errors import RequestError


class Runner(Protocol):
    """What the engine needs of the device."""

    def dispatch(self, batch: Batch, num_rows: int) -> Any:
        """Start a step and return a handle at once."""
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a step and read its results."""
        ...

    def recover(self) -> None:
        """Make the device state usable again after an exception, wherever it fell."""
        ...


class Engine:
    """All requests in flight over one pool.

    config: resolved, with num_blocks. depth: dispatches in flight; with 2 the next step is dispatched before the last
    one's tokens are read.
    """

    def __init__(self, config: EngineConfig, runner: Runner, *, depth: int = 1):
        self.config = config
        self.runner = runner
        self.depth = depth
        self.sequences: dict[str, Sequence] = {}  # every unfinished request, in order of arrival
        self._in_flight: deque[tuple[Plan, Any, float]] = deque()
        self._is_broken = False
        self.scheduler = self._new_scheduler()
        self.stats = Stats()

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; its request_id must not be in use."""
        if seq.request_id in self.sequences:
            raise RequestError(f"request_id {seq.request_id!r} is in use by an unfinished request")
        with self._consistent():
            self.sequences[seq.request_id] = seq
            self.scheduler.add(seq)
        self.stats.prompt_tokens += seq.prompt_len

    def abort(self, request_id: str) -> Sequence | None:
        """End an unfinished request as "abort"; returns it, or None when there is none of that id."""
        seq = self.sequences.get(request_id)
        if seq is not None:
            with self._consistent():
                if seq.status is not Status.FINISHED:  # as one that ended in a step which then failed
                    self.scheduler.finish(seq, "abort")
                self.scheduler.finished.remove(seq)
                self._forget(seq)
        return seq

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    def step(self) -> list[Sequence]:
        """Dispatch the next step, commit the oldest in flight, return the sequences that ended. Idle: [] at once.

        Any exception leaves the engine consistent: what was running is queued again and recomputed.
        """
        with self._consistent():
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            if plan is not None:
                batch = pack(plan, self.config)
                self.stats.count(plan, batch)
                handle = self.runner.dispatch(batch, len(plan.entries))
                self._in_flight.append((plan, handle, started))
            if self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
                self._commit_oldest(started)
            finished = self.scheduler.take_finished()
            for seq in finished:
                self._forget(seq)
        return finished

    def recover(self) -> None:
        """Start over from the unfinished sequences: a fresh block manager, nothing cached, nothing in flight."""
        self._is_broken = True
        self._in_flight.clear()
        self.runner.recover()
        preemptions = self.scheduler.num_preemptions
        self.scheduler = self._new_scheduler()
        self.scheduler.num_preemptions = preemptions
        for seq in self.sequences.values():
            if seq.status is Status.FINISHED:
                self.scheduler.finished.append(seq)
            else:
                seq.restart()
                self.scheduler.add(seq)
        self._is_broken = False

    @contextlib.contextmanager
    def _consistent(self) -> Iterator[None]:
        """Recover from whatever is raised inside, wherever it fell, and let it pass."""
        if self._is_broken:  # by an interrupt that fell into recover itself
            self.recover()
        try:
            yield
        except BaseException:
            self.recover()
            raise

    def reset_prefix_cache(self) -> None:
        self.scheduler.blocks.reset()

    def _commit_oldest(self, started: float) -> None:
        plan, handle, dispatched = self._in_flight.popleft()
        waiting = time.perf_counter()
        result = self.runner.fetch(handle)
        fetched = time.perf_counter()
        self.scheduler.commit(plan, result)
        done = time.perf_counter()
        self.stats.device_time_s += fetched - waiting
        self.stats.host_time_s += (waiting - started) + (done - fetched)
        if plan.phase == "prefill":
            self.stats.prefill_time_s += done - dispatched
        else:
            self.stats.decode_time_s += done - dispatched

    def _forget(self, seq: Sequence) -> None:
        del self.sequences[seq.request_id]
        self.stats.cached_tokens += seq.num_cached
        self.stats.generated_tokens += seq.num_generated

    def _new_scheduler(self) -> Scheduler:
        assert self.config.num_blocks is not None, "the engine's config is not resolved"
        blocks = BlockManager(
            self.config.num_blocks, self.config.block_size, enable_prefix_caching=self.config.enable_prefix_caching
        )
        return Scheduler(
            blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )


class Stats:
    """Running totals of one engine. Times in seconds; tokens and steps are counts.

    host_time_s: scheduling, packing, dispatching and committing. device_time_s: waiting for results.
    padded_tokens: rows of tokens computed, padding included.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.prefill_steps = self.decode_steps = self.prefill_tokens = self.decode_tokens = self.padded_tokens = 0
        self.prefill_time_s = self.decode_time_s = self.host_time_s = self.device_time_s = 0.0

    def count(self, plan: Plan, batch: Batch) -> None:
        self.padded_tokens += batch.bucket.tokens
        if plan.phase == "prefill":
            self.prefill_steps += 1
            self.prefill_tokens += plan.num_tokens
        else:
            self.decode_steps += 1
            self.decode_tokens += plan.num_tokens
