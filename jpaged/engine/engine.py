"""The loop: schedule, dispatch, commit. The runner is handed in, so a mock model can stand in for
the device.

An engine runs one or several replicas of a model side by side on one device program, each with a
pool, rows and queues (a Scheduler). Every step is one dispatch of one shape, so all replicas take
steps of one phase; one that has nothing to do in it is idle. Nothing passes between replicas, and
their number changes nothing that is compiled.
"""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.buckets import choose_buckets, common_buckets
from jpaged.engine.device import Device
from jpaged.engine.drafting import Drafter, ModelDrafter, drafter_of
from jpaged.engine.in_flight import InFlight
from jpaged.engine.packing import Batch, join, pack
from jpaged.engine.plan import Moves, Plan, StepResult, joined
from jpaged.engine.queues import Queues
from jpaged.engine.routing import Router
from jpaged.engine.scheduler import Scheduler, schedule, schedule_drafts, should_wait_for_tokens
from jpaged.engine.sequence import Request, Status
from jpaged.engine.stats import Stats
from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's requests, queues and tables, and the content of the blocks in use by replica."""

    requests: dict[str, Request]
    replicas: tuple[Scheduler, ...]
    placed: dict[str, int]  # the replica of each request
    block_ids: list[list[list[int]]]
    blocks: list[Any]


class Engine:
    """All requests in flight over the pools of one device program.

    config: resolved, with num_blocks; that of each replica, but for swap_space_gib, which they
    share. depth: dispatches in flight; with 2 the next one goes out before the last one's tokens
    are read.
    """

    def __init__(
        self, config: EngineConfig, runner: Device, *, num_replicas: int = 1, depth: int = 1
    ):
        self.config = config
        self.runner = runner
        self.identity = object()  # what its snapshots are known by
        self.requests: dict[str, Request] = {}  # the unfinished ones, in order of arrival
        self.stats = Stats()
        self.in_flight = InFlight(depth, self.stats)
        self.drafter = drafter_of(config)
        self.replicas = self._new_replicas(num_replicas)
        blocks = self.replicas[0].blocks
        self._router = Router(
            num_replicas, blocks.cache, remembered=num_replicas * blocks.num_blocks
        )
        self._ended: list[Request] = []  # requests that no step has returned yet
        self._is_broken = False

    def add(self, request: Request) -> None:
        """Queue a request with all its samples at one replica; its request_id must not be in
        use.
        """
        if request.request_id in self.requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request"
            )
        with self._consistent():
            self.requests[request.request_id] = request
            replica = self._router.place(request)
            for seq in request.sequences:
                self.replicas[replica].queues.add(seq)

    def abort(self, request_id: str) -> Request | None:
        """End an unfinished request as "abort"; returns it, None where there is none of that id."""
        request = self.requests.get(request_id)
        if request is None:  # it may have ended in a step that failed
            request = next((r for r in self._ended if r.request_id == request_id), None)
        if request is not None:
            self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """End this request as "abort", unless it has left the engine: a later request may have its
        id.
        """
        self._ended = [ended for ended in self._ended if ended is not request]
        if not self.holds(request):
            return
        with self._consistent():
            queues = self.replicas[self._router.replica_of(request)].queues
            for seq in request.sequences:
                if seq.status is not Status.FINISHED:  # else it ended in a step that failed
                    queues.finish(seq, "abort")
            queues.finished = [s for s in queues.finished if s.request is not request]
            self._forget(request)

    def holds(self, request: Request) -> bool:
        """Whether this very request is unfinished here."""
        return self.requests.get(request.request_id) is request

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self.requests or self._ended)

    def step(self) -> list[Request]:
        """Dispatch the next step, commit the oldest in flight, return the requests that ended.
        Idle: [] at once.

        Any exception leaves the engine consistent: what was running is queued again and recomputed.
        """
        with self._consistent():
            started = time.perf_counter()
            if self.drafter is not None:
                self._prepare_drafts(self.drafter, started)
            plans = self._plan()
            if plans:
                self._dispatch(plans, started)
            elif self.in_flight:
                self._commit_oldest(started)
            while self.in_flight.is_full:
                self._commit_oldest(started)
            self.in_flight.draw_oldest(self.runner, self._queues)
            return self._take_ended()

    def fits(self, num_tokens: int) -> bool:
        """Whether the pool of a replica alone could hold a sequence of so many tokens."""
        return self.replicas[0].blocks.fits(num_tokens)

    def recover(self) -> None:
        """Start over from the unfinished sequences: fresh block managers, nothing cached, nothing
        in flight.
        """
        self._is_broken = True
        self.in_flight.clear()
        self.runner.recover()
        self.replicas = self._new_replicas(len(self.replicas))
        for request in self._ended:  # an interrupt may have fallen before they were forgotten
            self.requests.pop(request.request_id, None)
        self._router.keep(self.requests.values())
        for request in self.requests.values():
            queues = self.replicas[self._router.replica_of(request)].queues
            if request.is_finished:
                queues.finished.append(request.sequences[0])
            else:
                for seq in request.restart():
                    queues.add(seq)
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
        """Return what is queued and running, as a value; steps in flight are waited for first."""
        with self._consistent():
            self._drain(time.perf_counter())
            for index, replica in enumerate(self.replicas):
                self._move_out(index, replica.swapping.take_outs())
            block_ids = [replica.blocks.in_use() for replica in self.replicas]
            blocks = [self.runner.read_blocks(ids, i) for i, ids in enumerate(block_ids)]
            requests, replicas = copy.deepcopy((self.requests, self.replicas))
        for replica in replicas:
            replica.blocks.cache.forget_free()  # their content is not kept
        return EngineState(
            requests=requests,
            replicas=replicas,
            placed={request_id: self._router.replica_of(r) for request_id, r in requests.items()},
            block_ids=block_ids,
            blocks=blocks,
        )

    def restore(self, state: EngineState) -> None:
        """Go back to a snapshot of this engine; whatever was added since is gone. A snapshot can be
        restored again.
        """
        with self._consistent():
            self.in_flight.clear()
            self._ended.clear()
            self.requests, self.replicas = copy.deepcopy((state.requests, state.replicas))
            self._router.restore(self.requests.values(), state.placed)
            for index, replica in enumerate(self.replicas):
                replica.queues.preemptions = self.stats.preemptions
                for seq in replica.queues.running:
                    seq.lose_row_state()
                replica.queues.adapters.load_again()
                self.runner.write_blocks(state.blocks[index], state.block_ids[index], index)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and what the host keeps of preempted sequences."""
        for request in self.requests.values():
            for seq in request.sequences:
                self.replicas[self._router.replica_of(request)].swapping.drop(seq)
        for replica in self.replicas:
            replica.blocks.cache.reset()
            # The adapters' tables may be gone, as the weights are.
            replica.queues.adapters.load_again()

    def report(self) -> dict[str, Any]:
        """Return the totals of Stats, what follows from them, and the blocks in use now."""
        drafts = {} if self.drafter is None else self.drafter.report()
        return self.stats.report() | drafts | _summed([r.report() for r in self.replicas])

    @property
    def _queues(self) -> list[Queues]:
        return [replica.queues for replica in self.replicas]

    def _prepare_drafts(self, drafter: Drafter, started: float) -> None:
        """Wait for the tokens in flight where the next plan would rather know them, and have the
        draft model guess what comes after them.
        """
        if self.in_flight and should_wait_for_tokens(self.replicas):
            self._drain(started)
        if isinstance(drafter, ModelDrafter) and not self.in_flight:
            plans = schedule_drafts(self.replicas, drafter)
            if plans:
                handle = self.runner.dispatch(join(self._pack(plans), self.config))
                drafter.take(plans, self.runner.fetch(handle))

    def _plan(self) -> list[Plan]:
        """Plan the next step of each replica, all of one phase; [] if nothing can go out."""
        if not self.config.pinned:
            return schedule(self.replicas)
        # All steps are of one shape, so replicas need not wait for each other.
        planned = [schedule((replica,)) for replica in self.replicas]
        busy = next((plans[0] for plans in planned if plans), None)
        if busy is None:
            return []
        idle = Plan(phase=busy.phase, entries=())
        return [dataclasses.replace(p[0], phase=busy.phase) if p else idle for p in planned]

    def _pack(self, plans: list[Plan]) -> list[Batch]:
        """Move the blocks that these plans need, and lay each plan out for one common step."""
        chosen = [choose_buckets(plan, self.config) for plan in plans if plan.entries]
        buckets = self.runner.fit(common_buckets(chosen, self.config))
        for index, plan in enumerate(plans):
            self._move_out(index, plan.swap_outs)
            self._move_in(index, plan)
        return [pack(plan, self.config, buckets) for plan in plans]

    def _dispatch(self, plans: list[Plan], started: float) -> None:
        batch = join(self._pack(plans), self.config)
        whole = joined(plans)
        self.stats.count(whole, batch, sum(r.blocks.num_used for r in self.replicas))
        self.in_flight.start(self.runner, plans, batch, started)
        if whole.verifies:
            self._drain(started)  # where each row goes on is known then

    def _move_in(self, replica: int, plan: Plan) -> None:
        for swapped, block_ids in plan.swap_ins:
            self.runner.write_blocks(swapped.data, block_ids, replica)
            self.stats.swap_in_bytes += self._bytes_of(block_ids)

    def _move_out(self, replica: int, swap_outs: Moves) -> None:
        for swapped, block_ids in swap_outs:
            swapped.data = self.runner.read_blocks(block_ids, replica)
            self.stats.swap_out_bytes += self._bytes_of(block_ids)

    def _bytes_of(self, block_ids: list[list[int]]) -> int:
        groups = self.replicas[0].blocks.groups
        return sum(len(ids) * g.block_bytes for ids, g in zip(block_ids, groups, strict=True))

    def _drain(self, started: float) -> None:
        while self.in_flight:
            self._commit_oldest(started)

    def _commit_oldest(self, started: float) -> None:
        oldest = self.in_flight.take_oldest(self.runner, self._queues)
        waiting = time.perf_counter()
        results, fetched = self.runner.fetch(oldest.handle), time.perf_counter()
        self.commit(oldest.plans, results)
        whole = joined(oldest.plans)
        took = self.stats.time(whole, oldest.started, started, waiting, fetched)
        if self.drafter is not None:
            self.drafter.observe(whole, *took)

    def commit(self, plans: List[Plan], results: list[StepResult]) -> None:
        """Take in what a step computed for each replica's plan."""
        for replica, plan, result in zip(self.replicas, plans, results, strict=True):
            if plan.entries:
                for request in replica.commit(plan, result):
                    request.steer(replica.queues)

    def _take_ended(self) -> list[Request]:
        """Return the requests that ended since the last call."""
        for replica in self.replicas:
            finished = replica.queues.take_finished()
            for request in dict.fromkeys(s.request for s in finished if s.request.is_finished):
                self._ended.append(request)
                self._forget(request)
        ended, self._ended = self._ended, []
        return ended

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._router.leave(request)
        self.stats.prompt_tokens += request.sequences[0].prompt_len
        self.stats.cached_tokens += request.sequences[0].num_cached
        self.stats.generated_tokens += sum(seq.num_generated for seq in request.sequences)

    def _new_replicas(self, count: int) -> tuple[Scheduler, ...]:
        return tuple(self._new_replica(count) for _ in range(count))

    def _new_replica(self, count: int) -> Scheduler:
        """Return a scheduler with nothing in it, one of so many."""
        config = self.config
        blocks = BlockManager(
            self.runner.kv_groups,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        return Scheduler(
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            decode_steps=config.decode_steps or 1,
            mixed=config.mixed,
            host_bytes=int(config.swap_space_gib * 2**30 / count),
            swap_min_tokens=config.swap_min_tokens,
            preemptions=self.stats.preemptions,
            max_loras=config.max_loras,
            drafter=self.drafter,
        )


def _summed(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what the replicas report."""
    groups = [
        {"window": each[0]["window"]}
        | {name: sum(group[name] for group in each) for name in ("num_blocks", "in_use")}
        for each in zip(*(report["kv_groups"] for report in reports), strict=True)
    ]
    names = [name for name in reports[0] if name != "kv_groups"]
    return {name: sum(r[name] for r in reports) for name in names} | {"kv_groups": groups}
