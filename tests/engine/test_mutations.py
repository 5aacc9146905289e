"""A fixed load of everything that shares, copies, moves and comes back: it must notice every broken
rule of sharing, of groups with windows and of mixed steps.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.engine import packing, scheduler
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.blocks import GONE, BlockGroup, Content, Copies
from jpaged.engine.engine import Engine, EngineState
from jpaged.engine.packing import Batch
from jpaged.engine.plan import Moves, Phase, Plan, PlanEntry
from jpaged.engine.prefill import PrefillPlanner
from jpaged.engine.prefix_cache import Match, PrefixCache
from jpaged.engine.queues import Queues
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.sequence import Sequence
from jpaged.engine.swapping import Swapping
from jpaged.search.beam import BeamSearch
from tests.engine.host import Host
from tests.engine.mock import ROOTS, MockRunner
from tests.engine.test_engine import FEW, SEEDS, no_parent_check, stale_hash_entry


def sharing_workload(depth: int, seed: int, **settings: Any) -> None:
    """Forty requests, in a pool that is too small."""
    rng = random.Random(seed)
    size = {
        "block_size": rng.choice([2, 4]),
        "num_blocks": rng.choice([14, 20]),
        "max_logprobs": 12,
    }
    host = Host(
        depth,
        max_num_batched_tokens=rng.choice([6, 24]),
        swap_space_gib=8 / 1024,
        swap_min_tokens=0,
        **size,
        **settings,
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
            host.add_samples(prompt, rng.randrange(1, 5), rng.randrange(1, 9), eos_ids=eos_ids)
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
    assert engine.replicas[0].swapping.free_bytes == engine.replicas[0].swapping.host_bytes


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


def swap_in_forgets(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Swapping) -> Moves:
        return tuple((swapped, [[-1] * len(b) for b in blocks]) for swapped, blocks in take(self))

    take = Swapping.take_ins
    patch.setattr(Swapping, "take_ins", mutated)


def swap_out_of_other_blocks(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Swapping) -> Moves:
        n = self.blocks.groups[0].num_blocks
        return tuple(
            (swapped, [[(block + 1) % n for block in ids] for ids in blocks])
            for swapped, blocks in take(self)
        )

    take = Swapping.take_outs
    patch.setattr(Swapping, "take_outs", mutated)


def swapped_after_the_step(patch: pytest.MonkeyPatch) -> None:
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
    patch.setattr(Swapping, "drop", lambda self, seq: setattr(seq, "swapped", None))


def host_survives_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "reset_prefix_cache", lambda self: self.replicas[0].blocks.cache.reset())


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
    swap_in_forgets,
    swap_out_of_other_blocks,
    swapped_after_the_step,
    restored_without_blocks,
    free_blocks_remembered,
    snapshot_not_copied,
    extended_before_forking,
    host_budget_kept,
    host_survives_a_reset,
    joined_anywhere,
]


def groups_workload(depth: int, seed: int) -> None:
    """The same with windows and with mixed steps."""
    windows = [(None, 5), (6,), (3, None), (None, 9)][seed % 4]
    sharing_workload(
        depth,
        seed,
        windows=windows,
        windowed_blocks=12,
        mixed=seed % 3 < 2,
        decode_steps=1 + seed % 2,
    )


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

    def mutated(self: PrefixCache, contents: list[Content], tables: tuple[list[int], ...]) -> Match:
        return Match(contents, tables)

    patch.setattr(PrefixCache, "_within_windows", mutated)


def sees_a_token_less(patch: pytest.MonkeyPatch) -> None:
    first_seen = BlockGroup.first_seen
    patch.setattr(BlockGroup, "first_seen", lambda self, position: first_seen(self, position + 1))


def windows_not_extended(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: BlockManager, seq: Sequence, num_tokens: int) -> None:
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if group.window is None:
                self._extend(group, table, num_tokens)

    patch.setattr(BlockManager, "extend", mutated)


def copies_of_one_group(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: BlockManager) -> Copies:
        return tuple(() if at else copies for at, copies in enumerate(take(self)))

    take = BlockManager.take_copies
    patch.setattr(BlockManager, "take_copies", mutated)


def swapped_windows_misaligned(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a window come back in one another's place."""

    def mutated(self: Swapping) -> Moves:
        groups = self.blocks.groups
        return tuple(
            (
                swapped,
                [
                    ids if group.window is None else [*ids[1:], *ids[:1]]
                    for group, ids in zip(groups, blocks, strict=True)
                ],
            )
            for swapped, blocks in take(self)
        )

    take = Swapping.take_ins
    patch.setattr(Swapping, "take_ins", mutated)


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
    swapped_windows_misaligned,
    follows_ignored,
    decodes_hashed_at_dispatch,
]
NEED_DEPTH_2 = (follows_ignored, decodes_hashed_at_dispatch)  # where a token is on the device alone


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize("load", [sharing_workload, groups_workload], ids=lambda f: f.__name__)
def test_the_workload_passes(depth: int, load: Callable, seeds: range):
    for seed in seeds:
        load(depth, seed)


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
