"""The loop: schedule, dispatch, commit. The runner is handed in, so a mock model can stand in for
the device.
"""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.blocks import GroupSize
from jpaged.engine.buckets import Buckets, choose_buckets
from jpaged.engine.drafting import Drafter, ModelDrafter, drafter_of, wants_tokens
from jpaged.engine.in_flight import InFlight
from jpaged.engine.packing import Batch, pack
from jpaged.engine.plan import Moves, Plan, StepResult
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.sequence import Request, Status
from jpaged.engine.stats import Stats
from jpaged.errors import RequestError


class Device(Protocol):
    """What the engine needs of the device."""

    @property
    def kv_groups(self) -> tuple[GroupSize, ...]:
        """The blocks of each group of layers."""
        ...

    def fit(self, buckets: Buckets) -> Buckets:
        """What to run for these: themselves, or larger ones that give the same."""
        ...

    def dispatch(self, batch: Batch) -> Any:
        """Start a step, all but a draw under masks, and return a handle at once."""
        ...

    def draw(self, handle: Any, masks_SW: np.ndarray) -> Any:
        """Start the draw under masks (see engine.masks) of a dispatched step; its handle then."""
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a step and read its results."""
        ...

    def read_blocks(self, block_ids: list[list[int]], replica: int = 0) -> Any:
        """Copy blocks of each group to the host, as they are after the steps dispatched so far."""
        ...

    def write_blocks(self, data: Any, block_ids: list[list[int]], replica: int = 0) -> None:
        """Put what read_blocks gave into these blocks, before the next step; -1 leaves one out."""
        ...

    def recover(self) -> None:
        """Make the device state usable again after an exception, wherever it fell."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's requests, queues and tables, and the content of the blocks in use."""

    requests: dict[str, Request]
    scheduler: Scheduler
    block_ids: list[list[int]]
    blocks: Any


class Engine:
    """All requests in flight over one pool.

    config: resolved, with num_blocks. depth: dispatches in flight; with 2 the next goes out before
    the last one's tokens are read. replica: which of the device's. stats, drafter: others' too.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Device,
        *,
        depth: int = 1,
        replica: int = 0,
        stats: Stats | None = None,
        drafter: Drafter | None = None,
    ):
        self.config = config
        self.runner = runner
        self.replica = replica
        self.identity = object()  # what its snapshots are known by
        self.requests: dict[str, Request] = {}  # the unfinished ones, in order of arrival
        self._is_broken = False
        self.stats = Stats() if stats is None else stats
        self.in_flight = InFlight(depth, self.stats)
        self.drafter = drafter_of(config) if drafter is None else drafter
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
                self.scheduler.queues.add(seq)

    def abort(self, request_id: str) -> Request | None:
        """End an unfinished request as "abort"; returns it, None where there is none of that id."""
        request = self.requests.get(request_id)
        if request is not None:
            self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """End this request as "abort", unless it has left the engine: a later request may have its
        id.
        """
        if not self.holds(request):
            return
        with self._consistent():
            queues = self.scheduler.queues
            for seq in request.sequences:
                if seq.status is not Status.FINISHED:  # else it ended in a step that failed
                    queues.finish(seq, "abort")
            queues.finished = [s for s in queues.finished if s.request is not request]
            self._forget(request)

    def holds(self, request: Request) -> bool:
        """Whether this very request is unfinished here."""
        return self.requests.get(request.request_id) is request

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Request]:
        """Dispatch the next step, commit the oldest in flight, return the requests that ended.
        Idle: [] at once.

        Any exception leaves the engine consistent: what was running is queued again and recomputed.
        """
        with self._consistent():
            started = time.perf_counter()
            if self.in_flight and wants_tokens(self.scheduler.queues):
                self._drain(started)
            if isinstance(self.drafter, ModelDrafter) and not self.in_flight:
                make_drafts(self, self.drafter)
            plan = self.scheduler.schedule()
            if plan is not None:
                self._dispatch(plan, started)
            if plan is None and self.in_flight:
                self._commit_oldest(started)
            while self.in_flight.is_full:
                self._commit_oldest(started)
            self.in_flight.draw_oldest(self.runner, [self.scheduler.queues])
            return self.take_ended()

    def take_ended(self) -> list[Request]:
        """The requests that ended since the last call."""
        finished = self.scheduler.queues.take_finished()
        ended = dict.fromkeys(s.request for s in finished if s.request.is_finished)
        for request in ended:
            self._forget(request)
        return list(ended)

    def fits(self, num_tokens: int) -> bool:
        """Whether the pool alone could hold a sequence of so many tokens."""
        return self.scheduler.blocks.fits(num_tokens)

    def recover(self) -> None:
        """Start over from the unfinished sequences: a fresh block manager, nothing cached, nothing
        in flight.
        """
        self._is_broken = True
        self.in_flight.clear()
        self.runner.recover()
        self.scheduler = self._new_scheduler()
        for request in self.requests.values():
            if request.is_finished:
                self.scheduler.queues.finished.append(request.sequences[0])
            else:
                for seq in request.restart():
                    self.scheduler.queues.add(seq)
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
            self._drain(time.perf_counter())
            self._move_out(self.scheduler.swapping.take_outs())
            block_ids = self.scheduler.blocks.in_use()
            blocks = self.runner.read_blocks(block_ids, self.replica)
            requests, scheduler = copy.deepcopy((self.requests, self.scheduler))
        scheduler.blocks.cache.forget_free()  # their content is not kept
        return EngineState(
            requests=requests, scheduler=scheduler, block_ids=block_ids, blocks=blocks
        )

    def restore(self, state: EngineState) -> None:
        """Go back to a snapshot of this engine; whatever was added since is gone. A snapshot can be
        restored again.
        """
        with self._consistent():
            self.in_flight.clear()
            self.requests, self.scheduler = copy.deepcopy((state.requests, state.scheduler))
            self.scheduler.queues.preemptions = self.stats.preemptions
            for seq in self.scheduler.queues.running:
                seq.is_new = True
            self.scheduler.queues.adapters.load_again()
            self.runner.write_blocks(state.blocks, state.block_ids, self.replica)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and what the host keeps of preempted sequences."""
        for request in self.requests.values():
            for seq in request.sequences:
                self.scheduler.swapping.drop(seq)
        self.scheduler.blocks.cache.reset()
        self.scheduler.queues.adapters.load_again()  # their tables may be gone, as the weights are

    def report(self) -> dict[str, Any]:
        """The totals of Stats, what follows from them, and the blocks in use now."""
        return self.stats.report() | _report_of(self.scheduler)

    def _dispatch(self, plan: Plan, started: float) -> None:
        batch = pack(plan, self.config, self.runner.fit(choose_buckets(plan, self.config)))
        self.stats.count(plan, batch, self.scheduler.blocks.num_used)
        self.move_blocks(plan)
        self.in_flight.start(self.runner, [plan], batch, started)
        if plan.verifies:
            self._drain(started)  # where each row goes on is known then

    def move_blocks(self, plan: Plan) -> None:
        """Between the pools and the host, before a plan is dispatched."""
        self._move_out(plan.swap_outs)
        for swapped, block_ids in plan.swap_ins:
            self.runner.write_blocks(swapped.data, block_ids, self.replica)
            self.stats.swap_in_bytes += _bytes_of(block_ids, self.scheduler)

    def _move_out(self, swap_outs: Moves) -> None:
        for swapped, block_ids in swap_outs:
            swapped.data = self.runner.read_blocks(block_ids, self.replica)
            self.stats.swap_out_bytes += _bytes_of(block_ids, self.scheduler)

    def _drain(self, started: float) -> None:
        while self.in_flight:
            self._commit_oldest(started)

    def _commit_oldest(self, started: float) -> None:
        oldest = self.in_flight.take_oldest(self.runner, [self.scheduler.queues])
        (plan,), waiting = oldest.plans, time.perf_counter()
        result, fetched = self.runner.fetch(oldest.handle), time.perf_counter()
        self.commit(plan, result)
        took = self.stats.time(plan, oldest.started, started, waiting, fetched)
        if self.drafter is not None:
            self.drafter.observe(plan, *took)

    def commit(self, plan: Plan, result: StepResult) -> None:
        """Take in what a plan computed."""
        for request in self.scheduler.commit(plan, result):
            request.steer(self.scheduler.queues)

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.stats.prompt_tokens += request.sequences[0].prompt_len
        self.stats.cached_tokens += request.sequences[0].num_cached
        self.stats.generated_tokens += sum(seq.num_generated for seq in request.sequences)

    def _new_scheduler(self) -> Scheduler:
        return scheduler_of(self.config, self.runner.kv_groups, self.stats, self.drafter)


def make_drafts(engine: Engine, drafter: ModelDrafter) -> None:
    """Have the draft model guess, where that is worth it, and wait for what it does."""
    plan, runner = engine.scheduler.schedule_drafts(), engine.runner
    if plan is not None:
        batch = pack(plan, engine.config, runner.fit(choose_buckets(plan, engine.config)))
        engine.move_blocks(plan)
        drafter.take(plan, runner.fetch(runner.dispatch(batch)))


def scheduler_of(
    config: EngineConfig, groups: tuple[GroupSize, ...], stats: Stats, drafter: Drafter | None
) -> Scheduler:
    """A scheduler with nothing in it. groups: of layers. stats: where preemptions are counted."""
    caching = config.enable_prefix_caching
    return Scheduler(
        BlockManager(groups, config.block_size, enable_prefix_caching=caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        decode_steps=config.decode_steps or 1,
        mixed=config.mixed,
        host_bytes=int(config.swap_space_gib * 2**30),
        swap_min_tokens=config.swap_min_tokens,
        preemptions=stats.preemptions,
        max_loras=config.max_loras,
        drafter=drafter,
    )


def _bytes_of(block_ids: list[list[int]], scheduler: Scheduler) -> int:
    groups = scheduler.blocks.groups
    return sum(len(ids) * g.block_bytes for ids, g in zip(block_ids, groups, strict=True))


def _report_of(scheduler: Scheduler) -> dict[str, Any]:
    """The blocks that there are and those in use, on device and host, and who uses them; and what
    became of drafts.
    """
    blocks, swapping = scheduler.blocks, scheduler.swapping
    block_bytes = sum(group.block_bytes for group in blocks.groups)
    groups = [
        {"window": g.window, "num_blocks": g.num_blocks, "in_use": g.num_used}
        for g in blocks.groups
    ]
    drafter = scheduler.queues.drafter
    drafts = {} if drafter is None else drafter.report()
    return drafts | {
        "sequences_running": len(scheduler.queues.running),
        "sequences_waiting": len(scheduler.queues.waiting),
        "blocks_in_use": blocks.num_used,
        "num_blocks": blocks.num_blocks,
        "kv_groups": groups,
        "host_blocks": swapping.host_bytes // block_bytes,
        "host_blocks_in_use": -(-swapping.used_bytes // block_bytes),
    }
