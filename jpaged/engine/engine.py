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
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jpaged.config import EngineConfig
from jpaged.engine.cache.block_files import BlockKey
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.costs import Costs
from jpaged.engine.cache.disk import Disk
from jpaged.engine.cache.handover import Handover
from jpaged.engine.cache.kinds import Replay
from jpaged.engine.cache.prefix_cache import Contents
from jpaged.engine.cache.read_ahead import ReadAhead
from jpaged.engine.cache.store import BlockStore, Move, Slot
from jpaged.engine.cache.tiers import TieredStore, make_stores
from jpaged.engine.commit import commit
from jpaged.engine.device import Device
from jpaged.engine.drafting import Drafter, ModelDrafter, drafter_of
from jpaged.engine.masks import masks_of
from jpaged.engine.packing import Batch, join, pack
from jpaged.engine.plan import Plan, joined
from jpaged.engine.policy import Router
from jpaged.engine.routes import chosen_experts
from jpaged.engine.scheduler import Scheduler, schedule, schedule_drafts, should_wait_for_tokens
from jpaged.engine.sequence import Request, Sequence, Status
from jpaged.engine.shapes import Shape, choose_shapes, common_shapes, decode_shape
from jpaged.engine.stats import Stats
from jpaged.engine.types import BlockData, BlocksHandle, Report, StepHandle
from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's requests, queues and tables, and the content of the blocks in use by replica."""

    requests: dict[str, Request]
    replicas: tuple[Scheduler, ...]
    placed: dict[str, int]  # the replica of each request
    block_ids: list[list[list[int]]]
    blocks: list[list[list[BlockData]]]


FLUSHED_AT_ONCE = 64  # blocks that are on their way from a pool to files


class Read(NamedTuple):
    """Blocks of one replica on their way to its store. handle: see Device.read_blocks."""

    replica: int
    moves: tuple[Move, ...]
    handle: BlocksHandle


@dataclasses.dataclass
class Dispatched:
    """A step, of a plan for each replica. whole: the plans as one. rows: of a draw that waits for
    its masks, None where nothing waits. reads: of blocks that left the pools before it. num_shapes:
    how many shapes had run before it.
    """

    plans: list[Plan]
    whole: Plan
    handle: StepHandle
    started: float
    rows: int | None
    reads: list[Read]
    num_shapes: int


class Engine:
    """All requests in flight over the pools of one device program.

    config: resolved, with num_blocks; that of each replica, but for swap_space_gib, which they
    share. depth: dispatches in flight; with 2 the next one goes out before the last one's tokens
    are read. disk: files of blocks, by the identity of the weights and of all else that KV depends
    on, which is `stored`; None where there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Device,
        *,
        num_replicas: int = 1,
        depth: int = 1,
        disk: Disk | None = None,
        stored: bytes | None = None,
    ):
        self.config = config
        self.disk, self._stored = disk, stored
        if disk is not None:
            assert stored is not None, "files need an identity"
            disk.identity = stored.hex()
        self.runner = runner
        self.identity = object()  # what its snapshots are known by
        self.requests: dict[str, Request] = {}  # the unfinished ones, in order of arrival
        self.stats = Stats()
        self.in_flight = InFlight(depth, runner, self.stats)
        self.drafter = drafter_of(config)
        self.read_ahead: ReadAhead | None = None  # of the replicas' store, if it has files
        self.handover: Handover | None = None  # if all blocks are written to it
        if disk is not None and config.prefix_store_policy == "write_through":
            self.handover = Handover(disk)
        # What has run, and so is compiled: shapes of steps; loads, by their blocks of each group.
        self._shapes_run: set[Shape | None] = set()
        self._loads_run: set[tuple[int, ...]] = set()
        self.replicas = self._new_replicas(num_replicas)
        blocks = self.replicas[0].blocks
        self.most_tokens = blocks.most_tokens  # of a sequence that a pool could hold alone
        self._router = Router(
            num_replicas, blocks.cache, remembered=num_replicas * blocks.num_blocks
        )
        self._ended: list[Request] = []  # requests that no step has returned yet
        self._is_broken = False
        self._secrets = itertools.count()

    def add(self, request: Request) -> None:
        """Queue a request with all its samples that have not ended at one replica; its request_id
        must not be in use.
        """
        if request.request_id in self.requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request"
            )
        with self._consistent():
            self.requests[request.request_id] = request
            if not self.config.enable_prefix_caching:
                request.hide(next(self._secrets))
            replica = self._router.place(request)
            queues = self.replicas[replica].queues
            if request.is_finished:  # every sample had ended before
                queues.finished.append(request.sequences[0])
            elif self.read_ahead is None or not self.read_ahead.begin(
                request, replica, queues.blocks.cache
            ):
                for seq in request.sequences:
                    if seq.status is not Status.FINISHED:
                        queues.waiting.add(seq)

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
            if self.read_ahead is not None:
                self.read_ahead.remove(request)
            queues = self.replicas[self._router.replica_of(request)].queues
            for seq in request.sequences:
                if seq.status is not Status.FINISHED:  # else it ended in a step that failed
                    queues.finish(seq, "abort")
            if queues.blocks.of_experts is not None:
                self._read_experts(self._router.replica_of(request), request.sequences)
            queues.finished = [s for s in queues.finished if s.request is not request]
            self._forget(request)

    def holds(self, request: Request) -> bool:
        """Return whether this very request is unfinished here."""
        return self.requests.get(request.request_id) is request

    def has_unfinished(self) -> bool:
        """Return whether `step` has anything left to do or to return."""
        return bool(self.requests or self._ended)

    def step(self) -> list[Request]:
        """Dispatch the next step, commit the oldest in flight, return the requests that ended.
        Idle: [] at once.

        Any exception leaves the engine consistent: what was running is queued again and recomputed.
        """
        with self._consistent():
            started = time.perf_counter()
            if self.read_ahead is not None:
                self._queue_read(self.read_ahead.take_ready() if self.read_ahead else ())
                self.read_ahead.release_running()
            if self.drafter is not None:
                self._prepare_drafts(self.drafter, started)
            plans = self._plan()
            if plans:
                (whole, batch), reads = self._pack(plans), self._start_moves(plans)
                blocks_in_use = sum([r.blocks.num_used for r in self.replicas])
                self.stats.count(whole, batch, blocks_in_use)
                num_shapes = len(self._shapes_run)
                if self.disk is not None:
                    self._shapes_run.update((batch.bucket, batch.sample))
                handle, rows = self.runner.dispatch(batch), None
                if batch.sample is not None:
                    if batch.sample.masked:
                        rows = batch.sample.rows
                    else:
                        handle = self.runner.draw(handle)
                step = Dispatched(plans, whole, handle, started, rows, reads, num_shapes)
                self.in_flight.steps.append(step)
            elif self.in_flight.steps:
                self._commit_oldest(started)
            elif self.read_ahead:
                self.read_ahead.wait()
            elif self.handover is not None:
                self.handover.wait()
            while self.in_flight.is_full:
                self._commit_oldest(started)
            self.in_flight.draw_oldest(self.replicas)
            if self.handover is not None:
                self._write_through()
            return self._take_ended()

    def recover(self) -> None:
        """Start over from the unfinished sequences: fresh block managers, nothing cached, nothing
        in flight.
        """
        self._is_broken = True
        self.in_flight.steps.clear()
        self.runner.recover()
        if self.read_ahead is not None:
            self.read_ahead.clear()
        self.replicas = self._new_replicas(len(self.replicas))
        for request in self._ended:  # an interrupt may have fallen before they were forgotten
            self.requests.pop(request.request_id, None)
        self._router.keep(self.requests.values())
        for request in self.requests.values():
            queues = self.replicas[self._router.replica_of(request)].queues
            for seq in request.sequences:
                seq.leave_blocks(())  # they are gone
            if request.is_finished:
                queues.finished.append(request.sequences[0])
            else:
                for seq in request.restart():
                    queues.waiting.add(seq)
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
            if self.read_ahead is not None:
                self._queue_read(self.read_ahead.take_all())
            for index, replica in enumerate(self.replicas):
                if replica.blocks.of_experts is not None:
                    self._read_experts(index, replica.queues.finished)
            moves = [replica.blocks.take_stores() for replica in self.replicas]
            self._finish_reads(
                [self._start_read(index, moved) for index, moved in enumerate(moves) if moved]
            )
            block_ids = [replica.blocks.in_use() for replica in self.replicas]
            reads = [self.runner.read_blocks(ids, i) for i, ids in enumerate(block_ids)]
            blocks = [self.runner.fetch_blocks(handle) for handle in reads]
            requests, replicas = copy.deepcopy((self.requests, self.replicas))
        for replica in replicas:
            replica.blocks.cache.forget_free()  # their content is not kept
            if replica.blocks.traffic is not None:
                replica.blocks.traffic.through.clear()
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
            self.in_flight.steps.clear()
            self._ended.clear()
            if self.read_ahead is not None:
                self.read_ahead.clear()
            self.requests, self.replicas = copy.deepcopy((state.requests, state.replicas))
            self._read_through(self.replicas)
            self._router.restore(self.requests.values(), state.placed)
            for index, replica in enumerate(self.replicas):
                replica.queues.preemptions = self.stats.preemptions
                replica.queues.states = self.stats.states
                for seq in replica.queues.running:
                    seq.lose_row_state()
                replica.queues.adapters.load_again()
                self.runner.write_blocks(state.blocks[index], state.block_ids[index], index)

    def reset_prefix_cache(self, *, files: bool = False) -> None:
        """Forget every cached prefix, on the device and in host memory. files: in files too, for
        all processes that would find it.
        """
        if files and self.disk is not None:
            self.disk.forget()
        for replica in self.replicas:
            replica.blocks.cache.reset()
            # The adapters' tables may be gone, as the weights are.
            replica.queues.adapters.load_again()

    def identify(self, stored: bytes | None) -> None:
        """Write and find blocks in files under this identity once the prefix cache was reset."""
        if self.disk is not None:
            assert stored is not None, "files need an identity"
            self._stored, self.disk.identity = stored, stored.hex()
            for replica in self.replicas:
                replica.blocks.cache.contents.stored = stored

    def flush_files(self, seconds: float) -> int:
        """Write what the pools and host memory hold to files, what was used last first, for at most
        so long. Return how many blocks were left out for want of time.
        """
        if self.disk is None:
            return 0
        until, now, left = time.monotonic() + seconds, time.time(), 0
        stores = dict[int, TieredStore]()
        with self._consistent():
            self._drain(time.perf_counter())
            for index, replica in enumerate(self.replicas):
                traffic = replica.blocks.traffic
                assert traffic is not None and isinstance(traffic.store, TieredStore)
                stores[id(traffic.store)] = traffic.store
                wanted = list(replica.blocks.latest_first())
                for first in range(0, len(wanted), FLUSHED_AT_ONCE):
                    part = wanted[first : first + FLUSHED_AT_ONCE]
                    if time.monotonic() > until:
                        left += len(part)
                        continue
                    kept = [
                        Move(slot, block_id)
                        for content, group, block_id in part
                        if (slot := traffic.store.keep(content, group)) is not None
                    ]
                    if not kept:
                        continue
                    slots, block_ids = self._by_group(tuple(kept))
                    blocks = self.runner.fetch_blocks(self.runner.read_blocks(block_ids, index))
                    for slots_of_group, blocks_of_group in zip(slots, blocks, strict=True):
                        for slot, data in zip(slots_of_group, blocks_of_group, strict=True):
                            now -= 1e-6
                            left += not traffic.store.put_flushed(slot, data, now, until)
            for store in stores.values():
                left += store.flush_host(now, until)
        if not self.disk.flush(max(until - time.monotonic(), 1.0)):
            left += 1
        return left

    def drain(self) -> list[Request]:
        """Wait for the steps in flight; return the requests that ended."""
        with self._consistent():
            self._drain(time.perf_counter())
            return self._take_ended()

    def renew(self, *, recompute: bool) -> None:
        """Go on under the weights of now with what began under others; nothing is in flight, and no
        prefix of before is cached. The KV of running sequences stays; with `recompute` they compute
        it again. A prompt whose scores are not complete is scored from its first token again: all
        of its scores are by one version.
        """
        with self._consistent():
            assert not self.in_flight, "drain first"
            for replica in self.replicas:
                queues = replica.queues
                for seq in reversed(list(queues.running)):  # the oldest is to be the first again
                    if recompute or seq.is_being_scored:
                        queues.preempt(seq)
            for request in self.requests.values():
                for seq in request.sequences:
                    if seq.is_being_scored:
                        seq.score_again()

    def report(self) -> Report:
        """Return the totals of Stats, what follows from them, and the blocks in use now."""
        drafts = {} if self.drafter is None else self.drafter.report()
        totals = self.stats.report() | drafts | _summed([r.report() for r in self.replicas])
        block_bytes = sum(size.block_bytes for size in self.runner.kv_groups)
        traffic = (replica.blocks.traffic for replica in self.replicas)
        stores = {id(kept.store): kept.store for kept in traffic if kept is not None}.values()
        if self.disk is not None and self.read_ahead is not None:
            costs = self.disk.costs.report()
            totals |= self.disk.report() | self.read_ahead.report() | costs
            late = 0 if self.handover is None else self.handover.late
            totals |= {"store_handed_late": late}
        return totals | {
            "host_blocks": sum(store.num_bytes for store in stores) // block_bytes,
            "host_blocks_in_use": -(-sum(store.used_bytes for store in stores) // block_bytes),
        }

    def _queue_read(self, ready: Iterable[tuple[Request, int]]) -> None:
        """Queue requests that wait for files no longer. ready: with their replicas."""
        for request, replica in ready:
            for seq in request.sequences:
                if seq.status is not Status.FINISHED:
                    self.replicas[replica].queues.waiting.add(seq)

    def _prepare_drafts(self, drafter: Drafter, started: float) -> None:
        """Commit the steps in flight if drafting would pay once their tokens are known, and have
        the draft model guess what comes after them.
        """
        if self.in_flight and should_wait_for_tokens(self.replicas):
            self._drain(started)
        if isinstance(drafter, ModelDrafter) and not self.in_flight:
            plans = schedule_drafts(self.replicas, drafter)
            if plans:
                (_, batch), reads = self._pack(plans), self._start_moves(plans)
                handle = self.runner.dispatch(batch)
                drafter.take(plans, self.runner.fetch(handle))
                self._finish_reads(reads)

    def _plan(self) -> list[Plan]:
        """Plan the next step of each replica, all of one phase; [] if nothing can go out."""
        if not self.config.pinned:
            return schedule(self.replicas, self._steps_of)
        # All steps are of one shape, so replicas need not wait for each other.
        planned = [schedule((replica,)) for replica in self.replicas]
        busy = next((plans[0] for plans in planned if plans), None)
        if busy is None:
            return []
        idle = Plan(phase=busy.phase, entries=())
        return [dataclasses.replace(p[0], phase=busy.phase) if p else idle for p in planned]

    def _steps_of(self, rows: list[list[Sequence]]) -> int:
        """Return how many tokens of each of these rows the next decode may draw: those of config,
        but one where the program that draws several is yet to be compiled, and runs in two.
        """
        config = self.config
        assert config.decode_steps is not None and config.stream_steps is not None
        steps = config.decode_steps
        if steps > config.stream_steps:
            streamed = [seq for seqs in rows for seq in seqs if seq.request.is_streamed]
            steps = config.stream_steps if streamed else steps
        if steps == 1:
            return steps
        shapes = [decode_shape(seqs, config) for seqs in rows if seqs]
        return min(steps, self.runner.steps_at_once(shapes[0].widened(shapes[1:])))

    def _pack(self, plans: list[Plan]) -> tuple[Plan, Batch]:
        """Lay the plans out for one common step. Return them as one plan, and its batch."""
        if len(plans) == 1:
            buckets = self.runner.fit(choose_shapes(plans[0], self.config))
            return plans[0], pack(plans[0], self.config, buckets)
        chosen = [choose_shapes(plan, self.config) for plan in plans if plan.entries]
        buckets = self.runner.fit(common_shapes(chosen, self.config))
        batches = [pack(plan, self.config, buckets) for plan in plans]
        return joined(plans), join(batches, self.config)

    def _start_moves(self, plans: list[Plan]) -> list[Read]:
        """Move the blocks that these plans need, before their step is dispatched. Returns the reads
        that are under way.
        """
        reads = list[Read]()
        for index, plan in enumerate(plans):
            if plan.block_stores:  # first: what they hold is about to be written over
                reads.append(self._start_read(index, plan.block_stores))
            if plan.block_loads:
                store = self._store_of(index)
                slots, block_ids = self._by_group(plan.block_loads)
                data = [[store.get(slot) for slot in slots_of_group] for slots_of_group in slots]
                began, size = time.perf_counter(), self._bytes_of(block_ids)
                self.runner.write_blocks(data, block_ids, index)
                if self.disk is not None:
                    counts = tuple(map(len, block_ids))
                    if counts in self._loads_run:
                        self.disk.costs.host.add(size, time.perf_counter() - began)
                    self._loads_run.add(counts)
                self.stats.loaded_blocks += len(plan.block_loads)
                self.stats.swap_in_bytes += size
        return reads

    def _start_read(self, replica: int, moves: tuple[Move, ...]) -> Read:
        _, block_ids = self._by_group(moves)
        self.stats.swap_out_bytes += self._bytes_of(block_ids)
        return Read(replica, moves, self.runner.read_blocks(block_ids, replica))

    def _finish_reads(self, reads: list[Read]) -> None:
        """Put blocks that were read into their slots. They have arrived with the step after
        them.
        """
        for read in reads:
            slots, _ = self._by_group(read.moves)
            blocks, store = self.runner.fetch_blocks(read.handle), self._store_of(read.replica)
            for slots_of_group, blocks_of_group in zip(slots, blocks, strict=True):
                for slot, data in zip(slots_of_group, blocks_of_group, strict=True):
                    store.put(slot, data)

    def _write_through(self) -> None:
        """Start to read what was written to the pools and is to go to files, as far as there is
        room for it. It arrives with the last step in flight.
        """
        for index, replica in enumerate(self.replicas):
            assert replica.blocks.traffic is not None
            if moves := replica.blocks.traffic.take_through():
                read = self._start_read(index, moves)
                if self.in_flight.steps:
                    self.in_flight.steps[-1].reads.append(read)
                else:
                    self._finish_reads([read])

    def _unwritten(self, disk: Disk) -> set[BlockKey]:
        """Return what is to be written to files: what is in the pools alone, too."""
        unwritten = set[BlockKey]()
        for replica in self.replicas:
            traffic = replica.blocks.traffic
            assert traffic is not None and isinstance(traffic.store, TieredStore)
            through = traffic.through.items()
            names = [disk.name_of(content, group) for (group, _), content in through]
            unwritten.update(name.key for name in names if name is not None)
            unwritten |= traffic.store.unwritten()
        return unwritten

    def _read_experts(self, replica: int, sequences: list[Sequence]) -> None:
        """Have sequences that ended know which experts their tokens took, if that is kept: before
        the next dispatch, which may write to their blocks.
        """
        group = self.replicas[replica].blocks.of_experts
        assert group is not None, "nothing is kept"
        ended = [seq for seq in sequences if seq.left_blocks]
        block_ids: list[list[int]] = [[] for _ in self.runner.kv_groups]
        block_ids[group] = [block_id for seq in ended for block_id in seq.left_blocks]
        if not block_ids[group]:
            return
        blocks = self.runner.fetch_blocks(self.runner.read_blocks(block_ids, replica))[group]
        first = 0
        for seq in ended:
            count = len(seq.left_blocks)
            seq.take_experts(chosen_experts(blocks[first : first + count]))
            first += count

    def _store_of(self, replica: int) -> BlockStore:
        traffic = self.replicas[replica].blocks.traffic
        assert traffic is not None, "blocks are moved without a store"
        return traffic.store

    def _by_group(self, moves: tuple[Move, ...]) -> tuple[list[list[Slot]], list[list[int]]]:
        """Return the slots and the block ids of moves, a list a group."""
        slots: list[list[Slot]] = [[] for _ in self.runner.kv_groups]
        block_ids: list[list[int]] = [[] for _ in self.runner.kv_groups]
        for slot, block_id in moves:
            slots[slot.group].append(slot)
            block_ids[slot.group].append(block_id)
        return slots, block_ids

    def _bytes_of(self, block_ids: list[list[int]]) -> int:
        sizes = self.runner.kv_groups
        return sum(len(ids) * s.block_bytes for ids, s in zip(block_ids, sizes, strict=True))

    def _drain(self, started: float) -> None:
        while self.in_flight.steps:
            self._commit_oldest(started)

    def _commit_oldest(self, started: float) -> None:
        """Wait for the oldest step in flight, and take in what it computed for each replica."""
        self.in_flight.draw_oldest(self.replicas)
        oldest = self.in_flight.steps.popleft()
        fetch_began_at = time.perf_counter()
        results, fetch_ended_at = self.runner.fetch(oldest.handle), time.perf_counter()
        if oldest.reads:
            self._finish_reads(oldest.reads)
        replays = list[list[list[Replay]]]()
        for replica, plan, result in zip(self.replicas, oldest.plans, results, strict=True):
            done = commit(replica.queues, plan, result)
            replays.append(done.replays)
            for request in done.to_steer:
                request.steer(replica.queues)
        if any(replays):
            self.runner.replay(oldest.handle, _rounds(replays))
        took = self.stats.time(
            oldest.whole,
            dispatched_at=oldest.started,
            step_began_at=started,
            fetch_began_at=fetch_began_at,
            fetch_ended_at=fetch_ended_at,
        )
        if self.drafter is not None:
            self.drafter.observe(oldest.whole, *took)
        if self.disk is not None:
            self._measure(self.disk.costs, oldest, took[0])

    def _measure(self, costs: Costs, step: Dispatched, seconds: float) -> None:
        """Count what computing a prompt costs, unless steps may have been compiled meanwhile."""
        is_prompt = step.whole.phase == "prefill" and not step.whole.verifies
        if is_prompt and step.num_shapes == len(self._shapes_run):
            costs.prefill.add(step.whole.num_tokens, seconds)

    def _take_ended(self) -> list[Request]:
        """Return the requests that ended since the last call."""
        for index, queues in enumerate([replica.queues for replica in self.replicas]):
            if queues.blocks.of_experts is not None:
                self._read_experts(index, queues.finished)
            finished, queues.finished = queues.finished, []
            for request in dict.fromkeys([s.request for s in finished if s.request.is_finished]):
                self._ended.append(request)
                self._forget(request)
        ended, self._ended = self._ended, []
        if ended and self.handover is not None and self.disk is not None:
            ended, self._ended = self.handover.split(ended, self._unwritten(self.disk))
        return ended

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._router.leave(request)
        self.stats.prompt_tokens += request.sequences[0].prompt_len
        self.stats.cached_tokens += request.sequences[0].num_cached
        drawn = [seq.num_generated - seq.num_resumed for seq in request.sequences]
        self.stats.generated_tokens += sum(drawn)

    def _new_replicas(self, count: int) -> tuple[Scheduler, ...]:
        """Return schedulers with nothing in them, which know the same contents and share a store
        where the device lets them.
        """
        config, runner = self.config, self.runner
        dtype = config.kv_cache_dtype or config.dtype
        contents = Contents(f"{dtype} in blocks of {config.block_size}", self._stored)
        num_stores = 1 if runner.shares_blocks else count
        sizes = [size.block_bytes for size in runner.kv_groups]
        stores = make_stores(config, num_stores, sizes, self.disk)
        new = tuple(self._new_replica(contents, stores[i % num_stores]) for i in range(count))
        self._read_through(new)
        return new

    def _read_through(self, replicas: tuple[Scheduler, ...]) -> None:
        """Have what is read from files come to these replicas' store."""
        traffic = replicas[0].blocks.traffic
        if self.disk is not None and traffic is not None:
            assert isinstance(traffic.store, TieredStore), "files are read through host memory"
            if self.read_ahead is None:
                self.read_ahead = ReadAhead(traffic.store, self.disk.costs)
            self.read_ahead.store = traffic.store

    def _new_replica(self, contents: Contents, store: BlockStore | None) -> Scheduler:
        config = self.config
        blocks = BlockManager(
            self.runner.kv_groups,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching or store is not None,
            contents=contents,
            store=store,
            min_loaded=config.swap_min_tokens,
            costs=None if self.disk is None else self.disk.costs,
        )
        return Scheduler(
            blocks,
            max_num_seqs=config.num_rows,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_embeddings=config.max_embeddings,
            decode_steps=config.decode_steps or 1,
            mixed=config.mixed,
            preemptions=self.stats.preemptions,
            states=self.stats.states,
            max_loras=config.max_loras,
            drafter=self.drafter,
        )


def _rounds(replays: list[list[list[Replay]]]) -> list[list[list[Replay]]]:
    """Return the first replay of each row, then the second ones, and so on: a list for each
    replica.
    """
    most = max(len(of_row) for of_replica in replays for of_row in of_replica)
    return [
        [[of_row[i] for of_row in of_replica if i < len(of_row)] for of_replica in replays]
        for i in range(most)
    ]


def _summed(reports: list[Report]) -> Report:
    """Add up what the replicas report."""
    groups = [
        {name: parts[0][name] for name in ("window", "per", "block_bytes")}
        | {name: sum(part[name] for part in parts) for name in ("num_blocks", "in_use", "cached")}
        for parts in zip(*(report["kv_groups"] for report in reports), strict=True)
    ]
    names = [name for name in reports[0] if name != "kv_groups"]
    return {name: sum(r[name] for r in reports) for name in names} | {"kv_groups": groups}


class InFlight:
    """Steps of one device, the oldest first. depth: how many there may be before the next. stats:
    the totals that making masks adds to.
    """

    def __init__(self, depth: int, runner: Device, stats: Stats):
        self.depth = depth
        self.steps: deque[Dispatched] = deque()
        self._runner, self._stats = runner, stats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def has_prefill(self) -> bool:
        """Whether the device is at, or comes to, one of prompts."""
        return any(plan.phase == "prefill" for step in self.steps for plan in step.plans)

    @property
    def is_full(self) -> bool:
        """Whether the oldest is to be committed before the next is dispatched. A draw that waits
        for its masks does so for the one before it; after a step with guesses all are committed,
        since where its rows go on is known only then.
        """
        if not self.steps or self.steps[-1].whole.verifies:
            return bool(self.steps)
        waits = bool([step for step in self.steps if step.rows is not None])
        return len(self.steps) >= (min(self.depth, 2) if waits else self.depth)

    def draw_oldest(self, replicas: tuple[Scheduler, ...]) -> None:
        """Start the draw of the oldest, if it waits for masks: all that came before it is
        committed, and the model runs meanwhile. replicas: of each of its plans.
        """
        if self.steps and (rows := self.steps[0].rows) is not None:
            oldest = self.steps[0]
            queues = [replica.queues for replica in replicas]
            with self._stats.masking():
                masks_SW = masks_of(list(zip(oldest.plans, queues, strict=True)), rows)
            oldest.handle, oldest.rows = self._runner.draw(oldest.handle, masks_SW), None
