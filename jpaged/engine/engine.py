"""The loop: schedule, dispatch, commit. The runner is handed in, so a mock model can stand in for
the device.
"""

import contextlib
import copy
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from jpaged.config import EngineConfig
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.packing import Batch, pack
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.sequence import Request, Status, Swapped
from jpaged.errors import RequestError


class Runner(Protocol):
    """What the engine needs of the device."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool in all layers."""
        ...

    def dispatch(self, batch: Batch) -> Any:
        """Start a step and return a handle at once."""
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a step and read its results."""
        ...

    def read_blocks(self, block_ids: list[int]) -> Any:
        """Copy blocks of the pool to the host, as they are after the steps dispatched so far."""
        ...

    def write_blocks(self, data: Any, block_ids: list[int]) -> None:
        """Put what read_blocks gave into these blocks, before the next step; -1 leaves a block
        out.
        """
        ...

    def recover(self) -> None:
        """Make the device state usable again after an exception, wherever it fell."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's requests, queues and tables, and the content of the blocks in use."""

    requests: dict[str, Request]
    scheduler: Scheduler
    block_ids: list[int]
    blocks: Any


class Engine:
    """All requests in flight over one pool.

    config: resolved, with num_blocks. depth: dispatches in flight; with 2 the next step is
    dispatched before the last one's tokens are read.
    """

    def __init__(self, config: EngineConfig, runner: Runner, *, depth: int = 1):
        self.config = config
        self.runner = runner
        self.depth = depth
        self.identity = object()  # what its snapshots are known by
        self.requests: dict[str, Request] = {}  # the unfinished ones, in order of arrival
        self._in_flight: deque[tuple[Plan, Any, float]] = deque()
        self._is_broken = False
        self._last_done = 0.0
        self.stats = Stats()
        self.scheduler = self._new_scheduler()

    def add(self, request: Request) -> None:
        """Queue a request; its request_id must not be in use."""
        if request.request_id in self.requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request"
            )
        with self._consistent():
            self.requests[request.request_id] = request
            for seq in request.sequences:
                self.scheduler.add(seq)

    def abort(self, request_id: str) -> Request | None:
        """End an unfinished request as "abort"; returns it, or None when there is none of that
        id.
        """
        request = self.requests.get(request_id)
        if request is not None:
            with self._consistent():
                for seq in request.sequences:
                    if (
                        seq.status is not Status.FINISHED
                    ):  # as one that ended in a step which then failed
                        self.scheduler.finish(seq, "abort")
                self.scheduler.finished = [
                    seq for seq in self.scheduler.finished if seq.request is not request
                ]
                self._forget(request)
        return request

    def fits(self, num_tokens: int) -> bool:
        """Whether the whole pool can hold a sequence of so many tokens."""
        blocks = self.scheduler.blocks
        return blocks.blocks_for(num_tokens) <= blocks.num_blocks

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Request]:
        """Dispatch the next step, commit the oldest in flight, return the requests that ended.
        Idle: [] at once.

        Any exception leaves the engine consistent: what was running is queued again and recomputed.
        """
        with self._consistent():
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            if plan is not None:
                batch = pack(plan, self.config)
                self.stats.count(batch, len(plan.copies), self.scheduler.blocks.num_used)
                self._move_out(plan.swap_outs)
                for swapped, block_ids in plan.swap_ins:
                    self.runner.write_blocks(swapped.data, block_ids)
                    self.stats.swap_in_bytes += len(block_ids) * self.runner.block_bytes
                handle = self.runner.dispatch(batch)
                self._in_flight.append((plan, handle, started))
            if self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
                self._commit_oldest(started)
            ended = {
                seq.request: None
                for seq in self.scheduler.take_finished()
                if seq.request.is_finished
            }
            for request in ended:
                self._forget(request)
        return list(ended)

    def recover(self) -> None:
        """Start over from the unfinished sequences: a fresh block manager, nothing cached, nothing
        in flight.
        """
        self._is_broken = True
        self._in_flight.clear()
        self.runner.recover()
        self.scheduler = self._new_scheduler()
        for request in self.requests.values():
            if request.is_finished:
                self.scheduler.finished.append(request.sequences[0])
            else:
                for seq in request.restart():
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

    def snapshot(self) -> EngineState:
        """What is queued and running, as a value; steps in flight are waited for first."""
        with self._consistent():
            while self._in_flight:
                self._commit_oldest(time.perf_counter())
            self._move_out(self.scheduler.take_swap_outs())
            block_ids = self.scheduler.blocks.in_use()
            blocks = self.runner.read_blocks(block_ids)
            requests, scheduler = copy.deepcopy((self.requests, self.scheduler))
        scheduler.blocks.forget_free()  # their content is not kept
        return EngineState(
            requests=requests, scheduler=scheduler, block_ids=block_ids, blocks=blocks
        )

    def restore(self, state: EngineState) -> None:
        """Go back to a snapshot of this engine; whatever was added since is gone. A snapshot can be
        restored again.
        """
        with self._consistent():
            self._in_flight.clear()
            self.requests, self.scheduler = copy.deepcopy((state.requests, state.scheduler))
            self.scheduler.preemptions = self.stats.preemptions
            for seq in self.scheduler.running:
                seq.is_new = True
            self.runner.write_blocks(state.blocks, state.block_ids)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and what the host keeps of preempted sequences."""
        for request in self.requests.values():
            for seq in request.sequences:
                self.scheduler.drop_swapped(seq)
        self.scheduler.blocks.reset()

    def report(self) -> dict[str, Any]:
        """The totals of Stats, what follows from them, and the blocks in use now."""
        stats, blocks, preemptions = self.stats, self.scheduler.blocks, self.stats.preemptions
        computed = stats.prefill_tokens + stats.decode_tokens
        totals = {
            name: value for name, value in vars(stats).items() if not isinstance(value, Counter)
        }
        return {
            **totals,
            "step_sizes": {
                "prefill": dict(stats.prefill_sizes),
                "decode": dict(stats.decode_sizes),
            },
            "steps": stats.prefill_steps + stats.decode_steps,
            "padding_waste": 1 - computed / stats.padded_tokens if stats.padded_tokens else 0.0,
            "prefix_hit_rate": stats.cached_tokens / stats.prompt_tokens
            if stats.prompt_tokens
            else 0.0,
            "preemptions": preemptions.total(),
            "preemptions_swapped": preemptions["swapped"],
            "preemptions_recomputed": preemptions["recomputed"],
            "blocks_in_use": blocks.num_used,
            "num_blocks": blocks.num_blocks,
            "host_blocks_in_use": self.scheduler.host_blocks - self.scheduler.free_host_blocks,
            "host_blocks": self.scheduler.host_blocks,
        }

    def _move_out(self, swap_outs: Iterable[tuple[Swapped, list[int]]]) -> None:
        for swapped, block_ids in swap_outs:
            swapped.data = self.runner.read_blocks(block_ids)
            self.stats.swap_out_bytes += len(block_ids) * self.runner.block_bytes

    def _commit_oldest(self, started: float) -> None:
        plan, handle, dispatched = self._in_flight.popleft()
        waiting = time.perf_counter()
        result = self.runner.fetch(handle)
        fetched = time.perf_counter()
        self.scheduler.commit(plan, result)
        done = time.perf_counter()
        self.stats.device_time_s += fetched - waiting
        self.stats.host_time_s += (waiting - started) + (done - fetched)
        dispatched, self._last_done = (
            max(dispatched, self._last_done),
            done,
        )  # what overlaps counts once
        if plan.phase == "prefill":
            self.stats.prefill_time_s += done - dispatched
        else:
            self.stats.decode_time_s += done - dispatched

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.stats.prompt_tokens += request.sequences[0].prompt_len
        self.stats.cached_tokens += request.sequences[0].num_cached
        self.stats.generated_tokens += sum(seq.num_generated for seq in request.sequences)

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        assert config.num_blocks is not None, "the engine's config is not resolved"
        return Scheduler(
            BlockManager(
                config.num_blocks,
                config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            decode_steps=config.decode_steps or 1,
            host_blocks=int(config.swap_space_gib * 2**30) // self.runner.block_bytes,
            swap_min_tokens=config.swap_min_tokens,
            preemptions=self.stats.preemptions,
        )


class Stats:
    """Running totals of one engine. Times in seconds; tokens, steps and preemptions are counts.

    prompt_tokens, cached_tokens, generated_tokens: of the requests that have ended. dispatches: a
    prefill with the draw after it, or up to decode_steps steps of decode (those that run at most).
    host_time_s: scheduling, packing, dispatching and committing. device_time_s: waiting for
    results. padded_tokens: rows of tokens computed, padding included. preemptions: by kind,
    "swapped" or "recomputed".
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.prefill_steps = self.decode_steps = self.prefill_tokens = self.decode_tokens = (
            self.padded_tokens
        ) = 0
        self.prefill_time_s = self.decode_time_s = self.host_time_s = self.device_time_s = 0.0
        self.copied_blocks = self.swap_out_bytes = self.swap_in_bytes = self.peak_blocks_in_use = 0
        self.dispatches = 0
        self.preemptions: Counter[str] = Counter()
        self.prefill_sizes: Counter[int] = Counter()  # steps by their number of tokens
        self.decode_sizes: Counter[int] = Counter()  # and of rows

    def count(self, batch: Batch, copied_blocks: int, blocks_in_use: int) -> None:
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, blocks_in_use)
        self.padded_tokens += batch.padded_tokens
        self.copied_blocks += copied_blocks
        self.dispatches += 1
        if batch.bucket.phase == "prefill":
            self.prefill_steps += 1
            self.prefill_tokens += batch.num_tokens
            self.prefill_sizes[batch.num_tokens] += 1
        else:
            self.decode_steps += batch.steps
            self.decode_tokens += batch.num_tokens
            self.decode_sizes[batch.num_rows] += batch.steps
