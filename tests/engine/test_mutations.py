"""A fixed load of everything that shares, copies, moves and comes back: it must notice every broken
rule of sharing, of groups with windows or states, of the store and of mixed steps.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.engine import packing, scheduler
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.kinds import GONE, CacheKind, Copies, State
from jpaged.engine.cache.prefix_cache import Contents, Match, PrefixCache
from jpaged.engine.cache.store import HostStore, Move, Slot, Traffic
from jpaged.engine.engine import Engine, EngineState
from jpaged.engine.packing import Batch
from jpaged.engine.plan import Phase, Plan, PlanEntry
from jpaged.engine.queues import Queues
from jpaged.engine.scheduler import PrefillPlanner, Scheduler
from jpaged.engine.sequence import Sequence
from jpaged.search.beam import BeamSearch
from tests.engine.host import Host
from tests.engine.mock import ROOTS, MockRunner, Window
from tests.engine.test_engine import FEW, SEEDS, no_parent_check, stale_hash_entry

ADAPTERS = [None, None, *(AdapterVersion(name="a", version=i, rank=1, data=None) for i in (1, 2))]
loaded: Counter[str] = Counter()  # by all runs of the load


def sharing_workload(depth: int, seed: int, **settings: Any) -> None:
    """Forty requests, in a pool that is too small."""
    rng = random.Random(seed)
    size: dict[str, Any] = {
        "block_size": rng.choice([2, 4]),
        "num_blocks": rng.choice([14, 20]),
        "max_logprobs": 12,
        "max_num_batched_tokens": rng.choice([6, 24]),
    }
    host = Host(
        depth,
        swap_space_gib=8 / 1024,
        swap_min_tokens=0,
        max_loras=2,
        **size | settings,
    )
    engine, state = host.engine, None
    for i in range(40):
        prompt = [*rng.choice(ROOTS)[: rng.randrange(1, 14)], rng.randrange(1, 4)]
        eos_ids = frozenset(rng.sample(range(100), 2))
        if rng.random() < 0.4:
            host.add_beams(
                prompt, 3, rng.randrange(1, 9), eos_ids=eos_ids, salt=rng.choice([None, "a"])
            )
        else:
            options = {"eos_ids": eos_ids, "adapter": rng.choice(ADAPTERS)}
            host.add_samples(prompt, rng.randrange(1, 5), rng.randrange(1, 9), **options)
        for _ in range(rng.randrange(1, 7)):
            host.step()
        if engine.replicas[0].queues.running and rng.random() < 0.4:
            engine.replicas[0].queues.preempt(rng.choice(list(engine.replicas[0].queues.running)))
        if rng.random() < 0.1:
            host.reset()
            state = None
        if state is not None and rng.random() < 0.4:
            engine.restore(state)
            host.check()
            state = None
        elif i % 8 == 0:
            state = engine.snapshot()
    host.run()
    loaded["blocks"] += engine.stats.loaded_blocks


def fork_without_counting(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: BlockManager, parent: Sequence, child: Sequence) -> None:
        fork(self, parent, child)
        for group, table in zip(self.groups, child.block_tables, strict=True):
            for block_id in table:
                group.blocks[block_id].ref_count -= 1

    fork = BlockManager.fork
    patch.setattr(BlockManager, "fork", mutated)


def written_in_place(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: BlockManager, seq: Sequence, position: int) -> bool:
        is_there = position // self.block_size < len(seq.block_tables[0])
        return is_there or make_writable(self, seq, position)

    make_writable = BlockManager.make_writable
    patch.setattr(BlockManager, "make_writable", mutated)


def copy_skipped(patch: pytest.MonkeyPatch) -> None:
    take = BlockManager.take_copies
    patch.setattr(
        BlockManager, "take_copies", lambda self: tuple(pairs[1:] for pairs in take(self))
    )


def hash_list_shared(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: BlockManager, parent: Sequence, child: Sequence) -> None:
        fork(self, parent, child)
        child.hashes = parent.hashes

    fork = BlockManager.fork
    patch.setattr(BlockManager, "fork", mutated)


def load_dropped(patch: pytest.MonkeyPatch) -> None:
    """What an admission counts as computed never comes."""
    take = Traffic.take_loads
    patch.setattr(Traffic, "take_loads", lambda self: take(self)[1:])


def loads_misaligned(patch: pytest.MonkeyPatch) -> None:
    """Loaded blocks come in one another's place."""

    def mutated(self: Traffic) -> tuple[Move, ...]:
        loads = take(self)
        turned = zip(loads, [*loads[1:], *loads[:1]], strict=True)
        return tuple(Move(load.slot, other.block_id) for load, other in turned)

    take = Traffic.take_loads
    patch.setattr(Traffic, "take_loads", mutated)


def another_block_is_stored(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: BlockManager) -> tuple[Move, ...]:
        stores = take(self)
        sizes = [group.num_blocks for group in self.groups]
        return tuple(Move(s, (block_id + 1) % sizes[s.group]) for s, block_id in stores)

    take = BlockManager.take_stores
    patch.setattr(BlockManager, "take_stores", mutated)


def store_gives_another_block(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: HostStore, slot: Slot) -> Any:
        others = [s for s in self if s.data is not None and s.group == slot.group]
        return others[0].data if others else get(self, slot)

    get = HostStore.get
    patch.setattr(HostStore, "get", mutated)


def store_finds_another_block(patch: pytest.MonkeyPatch) -> None:
    """Whatever has equal tokens, whatever it follows."""

    def mutated(self: HostStore, content: Content, group: int) -> Slot | None:
        alike = (s for s in self if s.content.token_ids == content.token_ids and s.group == group)
        return next((s for s in alike if s.data is not None), None)

    patch.setattr(HostStore, "find", mutated)


def adapters_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Blocks of one adapter serve another."""
    patch.setattr(AdapterVersion, "salt", b"")


def stored_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a read come into one another's slots."""
    fetch = MockRunner.fetch_blocks
    patch.setattr(
        MockRunner, "fetch_blocks", lambda self, handle: [ids[::-1] for ids in fetch(self, handle)]
    )


def stored_after_the_step(patch: pytest.MonkeyPatch) -> None:
    """The host reads blocks that the next step has written already."""

    def mutated(self: MockRunner, batch: Batch) -> Any:
        handle = dispatch(self, batch)
        for data, block_ids in self.__dict__.pop("unread", ()):
            data[:] = read(self, block_ids)
        return handle

    def postponed(self: MockRunner, block_ids: list[list[int]], replica: int = 0) -> list:
        data = read(self, block_ids)
        self.__dict__.setdefault("unread", []).append((data, block_ids))
        return data

    dispatch, read = MockRunner.dispatch, MockRunner.read_blocks
    patch.setattr(MockRunner, "dispatch", mutated)
    patch.setattr(MockRunner, "read_blocks", postponed)


def restored_without_blocks(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Engine, state: EngineState) -> None:
        restore(self, dataclasses.replace(state, block_ids=[[]], blocks=[[]]))

    restore = Engine.restore
    patch.setattr(Engine, "restore", mutated)


def free_blocks_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "forget_free", lambda self: None)


def snapshot_not_copied(patch: pytest.MonkeyPatch) -> None:
    """Stepping on changes it."""
    snapshot = Engine.snapshot

    def mutated(self: Engine) -> EngineState:
        return dataclasses.replace(snapshot(self), requests=self.requests, replicas=self.replicas)

    patch.setattr(Engine, "snapshot", mutated)


def extended_before_forking(patch: pytest.MonkeyPatch) -> None:
    """A beam that goes on in two ways gets its token first, and its fork has that one too."""

    def mutated(self: BeamSearch, queues: Queues) -> None:
        first = {option.beam: option for option in reversed(self.choose().continued)}

        def extended(self: Sequence) -> Sequence:
            twin, option = copy(self), first[self]
            twin.append(option.token, option.logprob, option.weight_version)
            twin.settle()
            return twin

        patch.setattr(Sequence, "copy", extended)
        steer(self, queues)
        patch.setattr(Sequence, "copy", copy)

    copy, steer = Sequence.copy, BeamSearch.steer
    patch.setattr(BeamSearch, "steer", mutated)


def host_budget_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostStore, "_drop", lambda self, content: self._slots.pop(content))


def host_survives_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostStore, "clear", lambda self: None)


def weights_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What was computed with the weights before a reset is known and kept after it."""
    patch.setattr(Contents, "reset", lambda self: None)
    patch.setattr(HostStore, "clear", lambda self: None)


def evicted_twice(patch: pytest.MonkeyPatch) -> None:
    """A block is still found in its pool after it was taken for something else."""
    patch.setattr(CacheKind, "forget", lambda self, block: None)


def joined_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Forks come last in the plan, not right after the row whose prompt they share."""
    plan = PrefillPlanner.plan
    patch.setattr(
        PrefillPlanner, "plan", lambda self: sorted(plan(self), key=lambda e: e.num_tokens == 0)
    )


SHARING_MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_parent_check,
    stale_hash_entry,
    fork_without_counting,
    written_in_place,
    copy_skipped,
    hash_list_shared,
    load_dropped,
    loads_misaligned,
    another_block_is_stored,
    store_gives_another_block,
    store_finds_another_block,
    adapters_forgotten,
    stored_in_the_wrong_order,
    stored_after_the_step,
    restored_without_blocks,
    free_blocks_remembered,
    snapshot_not_copied,
    extended_before_forking,
    host_budget_kept,
    host_survives_a_reset,
    weights_forgotten,
    evicted_twice,
    joined_anywhere,
]


def groups_workload(depth: int, seed: int) -> None:
    """The same with windows and with mixed steps."""
    kinds: list[tuple[Window, ...]] = [(None, 5), (None, "state"), (6,), ("state",), (3, None)]
    settings: dict[str, Any] = {"windows": kinds[seed % 5], "windowed_blocks": 12}
    if "state" in settings["windows"]:
        settings["max_num_batched_tokens"] = 5  # chunks that end within a block
        settings["speculative"] = {"method": "ngram", "num_tokens": 3, "adaptive": False}
    sharing_workload(depth, seed, **settings, mixed=seed % 3 < 2, decode_steps=1 + seed % 2)


def trims_too_much(patch: pytest.MonkeyPatch) -> None:
    """One block that the next query sees."""

    def mutated(self: BlockManager, seq: Sequence) -> None:
        trim(self, seq)
        for at, group in enumerate(self.groups):
            first = seq.first_held[at]
            if group.window is not None and 0 < first < len(seq.block_tables[at]):
                group.release(seq.block_tables[at][first])
                seq.block_tables[at][first] = GONE
                seq.first_held[at] += 1

    trim = BlockManager.trim
    patch.setattr(BlockManager, "trim", mutated)


def trims_within_the_plan(patch: pytest.MonkeyPatch) -> None:
    """What the step still reads may be written by it."""

    def mutated(self: Scheduler, phase: Phase, entries: list[PlanEntry]) -> Plan:
        plan = make_plan(self, phase, entries)
        for entry in plan.entries:
            self.blocks.trim(entry.seq)
        return plan

    make_plan = Scheduler.plan
    patch.setattr(Scheduler, "plan", mutated)


def match_ignores_windows(patch: pytest.MonkeyPatch) -> None:
    """What the groups that see everything have is enough."""

    def mutated(
        self: PrefixCache,
        contents: list[Content],
        tables: tuple[list[int], ...],
        slots: tuple[dict[int, Slot], ...],
        num_known: int,
    ) -> Match:
        length = len(tables[0])
        within = tuple({i: s for i, s in own.items() if i < length} for own in slots)
        return Match(contents[:length], tables, within, num_known)

    patch.setattr(PrefixCache, "_cut", mutated)


def sees_a_token_less(patch: pytest.MonkeyPatch) -> None:
    first_seen = CacheKind.first_seen
    patch.setattr(CacheKind, "first_seen", lambda self, position: first_seen(self, position + 1))


def windows_not_extended(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        self: BlockManager, seq: Sequence, num_tokens: int, *, one_by_one: bool = False
    ) -> None:
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if group.window is None:
                group.extend(table, num_tokens, one_by_one=one_by_one)

    patch.setattr(BlockManager, "extend", mutated)


def copies_of_one_group(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: BlockManager) -> Copies:
        return tuple(() if at else copies for at, copies in enumerate(take(self)))

    take = BlockManager.take_copies
    patch.setattr(BlockManager, "take_copies", mutated)


def loaded_windows_misaligned(patch: pytest.MonkeyPatch) -> None:
    """The loaded blocks of a window come in one another's place."""

    def mutated(self: BlockManager) -> tuple[Move, ...]:
        loads = list(take(self))
        for group in self.groups:
            places = [i for i, load in enumerate(loads) if load.slot.group == group.index]
            if group.window is not None and len(places) > 1:
                first, last = loads[places[0]], loads[places[-1]]
                loads[places[0]] = Move(first.slot, last.block_id)
                loads[places[-1]] = Move(last.slot, first.block_id)
        return tuple(loads)

    take = BlockManager.take_loads
    patch.setattr(BlockManager, "take_loads", mutated)


def trim_leaks(patch: pytest.MonkeyPatch) -> None:
    """A kind forgets a block that its window has left, and does not give it back."""

    def mutated(
        self: CacheKind, table: Any, first_held: int, position: int, first_drawn: int
    ) -> int:
        first = max(self.first_seen(position), first_held)
        for i in range(first_held, first):
            table[i] = GONE
        return first

    patch.setattr(CacheKind, "trim", mutated)


def states_closed_unwritten(patch: pytest.MonkeyPatch) -> None:
    """A chunk that passes the end of a block closes the state that it found there."""
    patch.setattr(State, "is_whole", lambda self, i, step_end: True)


def states_read_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    """A row goes on from a state that another row of the same step leaves."""
    patch.setattr(State, "matched", CacheKind.matched)


def state_written_in_place(patch: pytest.MonkeyPatch) -> None:
    """A row goes on from a state that it shares, and writes its own over it."""

    def mutated(self: State, table: Any, i: int) -> None:
        if i == len(table):
            table.append(self.take())

    patch.setattr(State, "make_writable", mutated)


def replayed_by_one_token_less(patch: pytest.MonkeyPatch) -> None:
    """The state of the token before the last one that was right."""

    def mutated(self: BlockManager, tables: Any, place: int, start: int, count: int) -> Any:
        return replays(self, tables, place, start, max(count - 1, 1))

    replays = BlockManager.replays
    patch.setattr(BlockManager, "replays", mutated)


def never_replayed(patch: pytest.MonkeyPatch) -> None:
    """A row goes on from the state before its guesses."""
    patch.setattr(State, "can_rewind", True)


def replayed_past_the_end_of_a_block(patch: pytest.MonkeyPatch) -> None:
    """A block that closes within guesses gets no state of its own."""

    def mutated(self: BlockManager, tables: Any, place: int, start: int, count: int) -> Any:
        made = replays(self, tables, place, start, count)
        whole = made[-1]._replace(
            place=place, start=start, num_tokens=count, read=made[0].read, written=made[-1].written
        )
        return [whole]

    replays = BlockManager.replays
    patch.setattr(BlockManager, "replays", mutated)


def state_of_another_block(patch: pytest.MonkeyPatch) -> None:
    """A match goes on from the state of some other block that is cached."""

    def mutated(self: State, content: Content, *, in_files: bool) -> Any:
        others = [b for c, b in self.cached.items() if c is not content]
        return others[0] if others else matched(self, content, in_files=in_files)

    matched = State.matched
    patch.setattr(State, "matched", mutated)


def states_leak(patch: pytest.MonkeyPatch) -> None:
    """A kind that has a state forgets the last block of a row that leaves."""
    release = CacheKind.release_all
    patch.setattr(State, "release_all", lambda self, table, contents: release(self, table[:-1], []))


def follows_ignored(patch: pytest.MonkeyPatch) -> None:
    """A row that has stopped on the device draws in a mixed step."""

    def mutated(view: packing.Views, draws: list[Any], config: EngineConfig) -> None:
        pack_rows(view, draws, config)
        if "follows" in view:
            view["follows"][:] = 0

    pack_rows = packing._pack_rows
    patch.setattr(packing, "_pack_rows", mutated)


def decodes_hashed_at_dispatch(patch: pytest.MonkeyPatch) -> None:
    """As chunks are, though the last token may be on the device alone."""

    def mutated(blocks: BlockManager, rows: list[Sequence], most: int) -> list[PlanEntry]:
        entries = decode_entries(blocks, rows, most)
        for entry in entries:
            blocks.cache.close(entry.seq, entry.end)
        return entries

    decode_entries = scheduler.decode_entries
    patch.setattr(scheduler, "decode_entries", mutated)


GROUP_MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    trims_too_much,
    trims_within_the_plan,
    match_ignores_windows,
    sees_a_token_less,
    windows_not_extended,
    copies_of_one_group,
    loaded_windows_misaligned,
    trim_leaks,
    states_closed_unwritten,
    states_read_before_they_are_written,
    state_written_in_place,
    replayed_by_one_token_less,
    never_replayed,
    replayed_past_the_end_of_a_block,
    state_of_another_block,
    states_leak,
    follows_ignored,
    decodes_hashed_at_dispatch,
]
NEED_DEPTH_2 = (follows_ignored, decodes_hashed_at_dispatch)  # where a token is on the device alone


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize("load", [sharing_workload, groups_workload], ids=lambda f: f.__name__)
def test_the_workload_passes(depth: int, load: Callable, seeds: range):
    loaded.clear()
    for seed in seeds:
        load(depth, seed)
    assert loaded["blocks"] > 0 or len(seeds) == 1, "nothing came back from the store"


def assert_noticed(load: Callable, depth: int) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)) as noticed:
        for seed in SEEDS:
            load(depth, seed)
    print(f"\n{noticed.typename}: {noticed.value}"[:160])


@pytest.mark.parametrize("mutate", SHARING_MUTATIONS, ids=lambda f: f.__name__)
def test_a_broken_rule_of_sharing_is_noticed(
    depth: int, mutate: Callable, monkeypatch: pytest.MonkeyPatch
):
    mutate(monkeypatch)
    assert_noticed(sharing_workload, depth)


@pytest.mark.parametrize("mutate", GROUP_MUTATIONS, ids=lambda f: f.__name__)
def test_a_broken_rule_of_groups_is_noticed(
    depth: int, mutate: Callable, monkeypatch: pytest.MonkeyPatch
):
    mutate(monkeypatch)
    assert_noticed(groups_workload, 2 if mutate in NEED_DEPTH_2 else depth)
