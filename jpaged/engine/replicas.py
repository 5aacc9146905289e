"""Replicas: engines side by side on one device program, each with a pool and rows of its own.

Every step is one dispatch of one shape, so all take steps of one phase; who has nothing to do in it
is idle. Nothing passes between replicas, and how many there are changes nothing that is compiled.
"""

import contextlib
import dataclasses
import time
from collections import ChainMap
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Protocol

from jpaged.config import EngineConfig
from jpaged.engine.buckets import choose_buckets, common_buckets
from jpaged.engine.drafting import decoding, drafter_of, wants_tokens
from jpaged.engine.engine import Device, Engine, EngineState
from jpaged.engine.in_flight import InFlight
from jpaged.engine.packing import join, pack
from jpaged.engine.plan import Phase, Plan, StepResult
from jpaged.engine.queues import Queues
from jpaged.engine.routing import Router
from jpaged.engine.scheduler import MAX_PREFILL_STREAK, Scheduler
from jpaged.engine.sequence import Request
from jpaged.engine.stats import Stats

# Steps of each phase in a row while there is work for the other. A prefill that waits for company
# costs a few rows some steps; one that does not, every other replica one.
MOST = {"prefill": MAX_PREFILL_STREAK, "decode": 3}


class ReplicatedDevice(Device, Protocol):
    """What Replicas needs of the device: it takes joined batches."""

    def fetch_parts(self, handle: Any) -> list[StepResult]:
        """Wait for a step and read its results, of each replica."""
        ...


class Turns:
    """Which phase the replicas take next. config: of each."""

    def __init__(self, config: EngineConfig):
        self._config = config
        # The last phase that went before the other, and how often in a row it did.
        self._last: Phase = "prefill"
        self._streak = 0

    def next(self, schedulers: list[Scheduler]) -> tuple[Phase, Phase]:
        """The phase to plan: what more replicas have work for, but no other waits too long for it;
        then the other, for where nothing comes of the first.
        """
        prefill = sum(scheduler.can_prefill for scheduler in schedulers)
        decode = sum(scheduler.can_decode for scheduler in schedulers)
        most = self._config.max_num_batched_tokens
        joined = self._config.mixed and all(len(s.queues.running) < most for s in schedulers)
        is_first = prefill > 0 if joined or not decode else prefill >= decode
        if prefill and decode and not joined:
            if self._streak >= MOST[self._last]:
                is_first = self._last == "decode"
            phase: Phase = "prefill" if is_first else "decode"
            self._streak = self._streak + 1 if phase == self._last else 1
            self._last = phase
        else:
            self._streak = 0
        return ("prefill", "decode") if is_first else ("decode", "prefill")


class Replicas:
    """What an Engine does, over `count` of them.

    config: of each replica; all together keep swap_space_gib on the host. depth: as Engine's.
    """

    def __init__(self, config: EngineConfig, runner: ReplicatedDevice, count: int, *, depth: int):
        self.config, self.runner = config, runner
        self.identity = object()  # what its snapshots are known by
        self.stats = Stats()
        own = dataclasses.replace(config, swap_space_gib=config.swap_space_gib / count)
        self.drafter = drafter_of(config)
        shared: Any = {"stats": self.stats, "drafter": self.drafter}
        self.engines = tuple(Engine(own, runner, replica=i, **shared) for i in range(count))
        blocks = self.engines[0].scheduler.blocks
        self._router = Router(count, blocks.cache, remembered=count * blocks.num_blocks)
        self.in_flight = InFlight(depth, self.stats)
        self._ended: list[Request] = []  # that no step has returned yet
        self._is_broken = False
        self._turns = Turns(config)

    @property
    def requests(self) -> MutableMapping[str, Request]:
        """The unfinished ones by id."""
        return ChainMap(*(engine.requests for engine in reversed(self.engines)))

    def add(self, request: Request) -> None:
        """Queue a request with all its samples at one replica; its request_id must not be in
        use.
        """
        if (holder := self._holder(request.request_id)) is not None:
            return holder.add(request)  # which refuses it
        with self._consistent():
            replica = self._router.choose(request)
            self.engines[replica].add(request)
            self._router.enter(request, replica)

    def abort(self, request_id: str) -> Request | None:
        """End an unfinished request as "abort"; returns it, None where there is none of that id."""
        holder = self._holder(request_id)
        if holder is None:  # it may have ended in a step that failed
            ended = next((r for r in self._ended if r.request_id == request_id), None)
            self._ended = [request for request in self._ended if request is not ended]
            return ended
        with self._consistent():
            request = holder.abort(request_id)
            self._router.leave(request_id)
        return request

    def remove(self, request: Request) -> None:
        """End this request as "abort", unless it has left the engine: see Engine."""
        self._ended = [ended for ended in self._ended if ended is not request]
        if self.holds(request):
            self.abort(request.request_id)

    def holds(self, request: Request) -> bool:
        """Whether this very request is unfinished here."""
        return self.requests.get(request.request_id) is request

    def has_unfinished(self) -> bool:
        return bool(self._ended) or any(engine.has_unfinished() for engine in self.engines)

    def step(self) -> list[Request]:
        """Dispatch the next step of all, commit the oldest in flight, return the requests that
        ended. Idle: [] at once.

        Any exception leaves all consistent: what was running is queued again and recomputed.
        """
        with self._consistent():
            started = time.perf_counter()
            if self.in_flight and wants_tokens(*self._queues):
                self._drain(started)
            plans = self._schedule()
            if plans is not None:
                self._dispatch(plans, started)
                if any(plan.verifies for plan in plans):
                    self._drain(started)  # where each row goes on is known then
            if plans is None and self.in_flight:
                self._commit_oldest(started)
            while self.in_flight.is_full:
                self._commit_oldest(started)
            self.in_flight.draw_oldest(self.runner, self._queues)
            for engine in self.engines:
                self._ended += (ended := engine.take_ended())
                for request in ended:
                    self._router.leave(request.request_id)
            ended, self._ended = self._ended, []
        return ended

    def fits(self, num_tokens: int) -> bool:
        """Whether the pool of a replica could hold a sequence of so many tokens."""
        return self.engines[0].fits(num_tokens)

    def recover(self) -> None:
        """Start all over from the unfinished sequences: see Engine."""
        self._is_broken = True
        self.in_flight.clear()
        for engine in self.engines:
            engine.recover()
        self._count_again()
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

    def snapshot(self) -> tuple[EngineState, ...]:
        """What is queued and running, of each replica; steps in flight are waited for first."""
        with self._consistent():
            self._drain(time.perf_counter())
            return tuple(engine.snapshot() for engine in self.engines)

    def restore(self, state: tuple[EngineState, ...]) -> None:
        """Go back to a snapshot of these replicas: see Engine."""
        with self._consistent():
            self.in_flight.clear()
            self._ended.clear()
            for engine, own in zip(self.engines, state, strict=True):
                engine.restore(own)
            self._count_again()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and what the host keeps of preempted sequences."""
        for engine in self.engines:
            engine.reset_prefix_cache()

    def report(self) -> dict[str, Any]:
        """What an Engine reports, blocks added up."""
        return _summed([engine.report() for engine in self.engines])

    def _holder(self, request_id: str) -> Engine | None:
        """The replica that has a request."""
        return next((e for e in self.engines if request_id in e.requests), None)

    @property
    def _queues(self) -> list[Queues]:
        return [engine.scheduler.queues for engine in self.engines]

    def _count_again(self) -> None:
        pairs = enumerate(self.engines)
        self._router.restart((r, i) for i, e in pairs for r in e.requests.values())

    def _schedule(self) -> list[Plan] | None:
        """A plan of one phase for each replica, without entries for one that has nothing to do in
        it; None where nothing can be dispatched before the next commit.
        """
        plans = self._plans()
        found = [plan for plan in plans if plan is not None]
        if not found:
            return None
        phase = found[0].phase
        joined = all(e.decodes and not e.run for plan in found for e in plan.entries)
        if not self.config.pinned and joined:
            phase = "decode"  # prefills in which only rows that join them came about
        idle = Plan(phase=phase, entries=())
        return [idle if p is None else dataclasses.replace(p, phase=phase) for p in plans]

    def _plans(self) -> Sequence[Plan | None]:
        schedulers = [engine.scheduler for engine in self.engines]
        if self.config.pinned:  # all steps are of one shape
            return [scheduler.schedule() for scheduler in schedulers]
        running = (seq for queues in self._queues for seq in queues.running)
        masked = any(seq.structured is not None for seq in running)
        steps = 1 if masked else self.config.decode_steps or 1
        for phase in self._turns.next(schedulers):
            runs: dict[Any, list[int]] = {}
            if phase == "decode" and self.drafter is not None:
                runs = self.drafter.runs(*map(decoding, self._queues))
            plans = [
                s.schedule_runs(runs) if runs else s.schedule_for(phase, steps) for s in schedulers
            ]
            if any(plan is not None for plan in plans):
                return plans
        return ()

    def _dispatch(self, plans: list[Plan], started: float) -> None:
        config, whole = self.config, _joined(plans)
        chosen = [choose_buckets(plan, config) for plan in plans if plan.entries]
        buckets = self.runner.fit(common_buckets(chosen, config))
        batch = join([pack(plan, config, buckets) for plan in plans], config)
        used = sum(engine.scheduler.blocks.num_used for engine in self.engines)
        self.stats.count(whole, batch, used)
        for engine, plan in zip(self.engines, plans, strict=True):
            engine.move_blocks(plan)
        self.in_flight.start(self.runner, plans, batch, started)

    def _commit_oldest(self, started: float) -> None:
        oldest = self.in_flight.take_oldest(self.runner, self._queues)
        plans, waiting = oldest.plans, time.perf_counter()
        results = self.runner.fetch_parts(oldest.handle)
        fetched = time.perf_counter()
        for engine, plan, result in zip(self.engines, plans, results, strict=True):
            if plan.entries:
                engine.commit(plan, result)
        whole = _joined(plans)
        took = self.stats.time(whole, oldest.started, started, waiting, fetched)
        if self.drafter is not None:
            self.drafter.observe(whole, *took)

    def _drain(self, started: float) -> None:
        while self.in_flight:
            self._commit_oldest(started)


def _summed(reports: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("blocks_in_use", "num_blocks", "host_blocks", "host_blocks_in_use")
    names += ("sequences_running", "sequences_waiting")
    groups = [
        {"window": own[0]["window"]}
        | {name: sum(group[name] for group in own) for name in ("num_blocks", "in_use")}
        for own in zip(*(report["kv_groups"] for report in reports), strict=True)
    ]
    sums = {name: sum(report[name] for report in reports) for name in names}
    return reports[0] | sums | {"kv_groups": groups}


def _joined(plans: Sequence[Plan]) -> Plan:
    """What all replicas do in one dispatch, as one plan."""
    return Plan(
        phase=plans[0].phase,
        entries=tuple(entry for plan in plans for entry in plan.entries),
        copies=tuple(copies for plan in plans for copies in plan.copies),
    )
