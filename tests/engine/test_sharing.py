"""Sharing of KV blocks over the mock device: forks and their copies, and what the cache
keeps.

Host.step holds every ended stream to what it would be alone, every search to a naive one, and all
reference counts.
"""

import random
from typing import Any

import pytest

from jpaged.engine.plan import Phase, Plan, PlanEntry
from jpaged.engine.sequence import Sequence, Status
from jpaged.errors import CapacityError
from tests.engine.host import CountedQueues, Host, cases, check_ended
from tests.engine.mock import expected, generated

MIB = 2**20  # of a block of the mock device


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def roomy(depth: int, **settings: Any) -> Host:
    """A host in which nothing is ever preempted."""
    return Host(depth, **{"num_blocks": 64, "max_num_batched_tokens": 128, **settings})


def watch(host: Host) -> list[tuple[Plan, list[int]]]:
    """Each plan from now on, with the blocks that it writes; in a decode step none of them may be
    another's too.
    """
    scheduler, plans = host.engine.replicas[0], []
    make_plan = scheduler.plan

    def watched(phase: Phase, entries: list[PlanEntry]) -> Plan:
        plan = make_plan(phase, entries)
        if plan.entries:
            size = host.config.block_size
            places = {(e.seq, p // size) for e in plan.entries for p in range(e.start, e.end)}
            written = [seq.block_tables[0][i] for seq, i in places]
            if plan.phase == "decode":
                assert all(host.blocks.groups[0].blocks[b].ref_count == 1 for b in written), (
                    "a shared block is written"
                )
            plans.append((plan, written))
        return plan

    scheduler.plan = watched  # pyright: ignore[reportAttributeAccessIssue]
    return plans


def prefills(host: Host) -> list[list[tuple[int, int]]]:
    return [spans for phase, spans in host.runner.dispatched if phase == "prefill"]


def preempted(host: Host, *seqs: Sequence) -> list[int]:
    """Preempt running sequences; how many blocks their KV lay in."""
    held = [host.blocks.blocks_for(seq.num_dispatched) for seq in seqs]
    for seq in seqs:
        host.engine.replicas[0].queues.preempt(seq)
    host.check()
    return held


# Identical prompts


def test_identical_prompts_with_an_open_tail(depth: int):
    """18 tokens in blocks of 4: four closed blocks and an open one of 2 tokens, computed once and
    shared by all four.

    Each writes its first token into the open block: three copy it first, the last one owns it alone
    by then.
    """
    host = roomy(depth)
    plans = watch(host)
    seqs = [host.add(prompt(18)) for _ in range(4)]
    host.step()
    assert prefills(host) == [[(0, 18), (18, 18), (18, 18), (18, 18)]] and host.blocks.num_used == 5
    assert [seq.num_cached for seq in seqs] == [0, 18, 18, 18]
    shared = list(seqs[0].block_tables[0])
    assert all(list(seq.block_tables[0]) == shared for seq in seqs)
    host.step()
    decode, _ = plans[1]
    assert [source for source, _ in decode.copies[0]] == [
        shared[4]
    ] * 3 and host.blocks.num_used == 4 + 4
    assert seqs[3].block_tables[0][4] == shared[4]
    host.run()
    assert host.runner.computed("prefill") == 18 and host.engine.stats.copied_blocks == 3


def test_identical_prompts_with_a_tail_of_one(depth: int):
    """17 tokens: the fifth block would hold one token, which is cheaper to compute than the block
    is to copy.
    """
    host = roomy(depth)
    host.generate(*[prompt(17)] * 4)
    assert (
        prefills(host) == [[(0, 17), (16, 17), (16, 17), (16, 17)]]
        and host.engine.stats.copied_blocks == 0
    )


def test_identical_prompts_later(depth: int):
    """After the first call only closed blocks can be found: the tail is computed once more, and
    shared once more.
    """
    host = roomy(depth)
    host.generate(prompt(18))
    host.generate(*[prompt(18)] * 3)
    assert prefills(host) == [[(0, 18)], [(16, 18), (18, 18), (18, 18)]]


def test_other_salts_share_nothing(depth: int):
    host = roomy(depth)
    seqs = [host.add(prompt(18), salt=salt) for salt in (None, "a", "b", "ab")]
    host.step()
    assert host.runner.computed("prefill") == 4 * 18 and host.blocks.num_used == 4 * 5
    host.run()
    assert (
        all(generated(seq) == expected(seqs[0]) for seq in seqs)
        and host.engine.stats.copied_blocks == 0
    )
    late = [host.add(prompt(18), salt=salt) for salt in ("b", "c", "a", None)]
    host.run()
    assert [seq.num_cached for seq in late] == [16, 0, 16, 16]


def test_equal_salts_share(depth: int):
    host = roomy(depth)
    seqs = [host.add(prompt(18), salt=salt) for salt in ("a", "b", "a", "b")]
    host.step()
    assert prefills(host) == [[(0, 18), (18, 18), (0, 18), (18, 18)]]
    assert (
        seqs[0].block_tables[0] == seqs[2].block_tables[0]
        and seqs[1].block_tables[0] == seqs[3].block_tables[0]
    )
    host.run()


def test_without_prefix_caching_samples_alone_share(depth: int):
    """What the caller asks for as one request is forked; requests that merely look alike are kept
    apart.
    """
    host = roomy(depth, enable_prefix_caching=False)
    host.generate(*[prompt(18)] * 4)
    assert host.runner.computed("prefill") == 4 * 18 and host.engine.stats.copied_blocks == 0
    host.add_samples(prompt(18), 4)
    host.step()
    assert (
        prefills(host)[-1] == [(0, 18), (18, 18), (18, 18), (18, 18)] and host.blocks.num_used == 5
    )
    host.run()
    assert host.engine.stats.copied_blocks == 3


# Samples


@pytest.mark.parametrize("budget", [300, 8192])
def test_a_long_prompt_is_held_once(depth: int, budget: int):
    """2,000 tokens are 31 blocks of 64 and 16 tokens over: 32 blocks for ten samples, then a tail
    for each.
    """
    host = Host(
        depth,
        block_size=64,
        num_blocks=64,
        max_num_seqs=10,
        max_num_batched_tokens=budget,
        max_model_len=4096,
    )
    seqs = host.add_samples(prompt(2000), 10, max_tokens=4)
    while any(seq.status is Status.WAITING for seq in seqs):
        host.step()
    assert host.blocks.num_used == 32 and host.runner.computed("prefill") == 2000
    decoded = len(host.runner.dispatched)
    while len(host.runner.dispatched) == decoded:
        host.step()
    assert host.blocks.num_used == 31 + 10
    host.run()
    assert host.runner.computed("prefill") == 2000 and host.engine.stats.copied_blocks == 9
    assert len({tuple(generated(seq)) for seq in seqs}) == 10


@pytest.mark.parametrize("steps", cases(range(6), [0, 1, 3]))
@pytest.mark.parametrize("which", cases(range(4), [0, 3]))
@pytest.mark.parametrize("host_blocks", [16, 0])
def test_scenario_20_preempted_while_forked(depth: int, host_blocks: int, which: int, steps: int):
    """The preempted one gives up its part of what is shared and nothing else, whenever it
    happens; its closed blocks are still in the pool when it comes back.
    """
    host = roomy(depth, swap_space_gib=host_blocks / 1024, swap_min_tokens=0)
    seqs = host.add_samples(prompt(10), 4)
    for _ in range(1 + steps):
        host.step()
    shared = seqs[which].block_tables[0][0]
    host.engine.replicas[0].queues.preempt(seqs[which])
    host.check()
    assert host.blocks.groups[0].blocks[shared].ref_count == 3
    host.step()
    host.run()
    assert host.engine.stats.preemptions == {"preempted": 1, "recomputed": 1}
    assert host.engine.stats.loaded_blocks == 0 and all(seq.num_generated == 8 for seq in seqs)


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_scenario_20_preempted_for_want_of_blocks(depth: int, host_blocks: int):
    host = Host(depth, num_blocks=9, swap_space_gib=host_blocks / 1024, swap_min_tokens=0)
    seqs = host.add_samples(prompt(10), 4, max_tokens=14)
    host.run()
    assert host.engine.stats.preemptions["swapped" if host_blocks else "recomputed"] > 0
    assert all(seq.num_generated == 14 for seq in seqs)


@pytest.mark.parametrize("steps", cases(range(5), [0, 1, 3]))
@pytest.mark.parametrize("which", cases(range(4), [0, 3]))
def test_scenario_20_one_of_four_is_aborted(depth: int, which: int, steps: int):
    """Before, while and after the open block is copied; the request ends with the other three."""
    host = roomy(depth)
    seqs = host.add_samples(prompt(10), 4)
    for _ in range(steps):
        host.step()
    host.engine.replicas[0].queues.finish(seqs[which], "abort")
    host.check()
    assert host.run() == seqs
    assert [seq.finish_reason for seq in seqs] == [
        "abort" if i == which else "length" for i in range(4)
    ]
    for seq in seqs:
        check_ended(host, seq)


def test_scenario_20_a_search_drops_beams(depth: int):
    """A beam that nothing continues is gone at once, though others were forked from it and share
    its blocks.
    """
    dropped, splits = 0, CountedQueues.forks["split"]
    for seed in range(4):
        host = roomy(depth)
        search, seen = host.add_beams(prompt(6, seed), 3, 12, eos_ids=frozenset({3})), set()
        while host.engine.has_unfinished():
            seen |= set(search.sequences)
            host.step()
            for seq in seen - set(search.sequences):
                assert not seq.block_tables and seq.status is Status.FINISHED
        dropped += len(seen - set(search.sequences))
        assert host.blocks.num_used == 0 and host.engine.stats.copied_blocks > 0
    assert dropped > 3 and CountedQueues.forks["split"] - splits > 3


@pytest.mark.parametrize("length", [4, 8, 16])
def test_scenario_21_no_open_block_no_copy(depth: int, length: int):
    """A prompt of whole blocks: each sample opens a block of its own, and `watch` sees no shared
    one written.
    """
    host = roomy(depth)
    plans = watch(host)
    seqs = host.add_samples(prompt(length), 4)
    host.step()
    shared = set(seqs[0].block_tables[0])
    host.run()
    assert host.engine.stats.copied_blocks == 0 and not any(plan.copies[0] for plan, _ in plans)
    assert not any(shared & set(written) for _, written in plans[1:])


@pytest.mark.parametrize("n", cases([2, 3, 4], [2, 4]))
@pytest.mark.parametrize("length", cases([1, 5, 6, 7, 15], [1, 6, 15]))
def test_scenario_21_one_copy_a_writer(depth: int, length: int, n: int):
    """All copies are of the one open block, in the first decode step; the last writer needs
    none.
    """
    host = roomy(depth)
    plans = watch(host)
    seqs = host.add_samples(prompt(length), n)
    host.step()
    shared = list(seqs[0].block_tables[0])
    host.run()
    (copies,) = [plan.copies[0] for plan, _ in plans if plan.copies[0]]
    assert plans[1][0].copies[0] is copies and [source for source, _ in copies] == [shared[-1]] * (
        n - 1
    )
    assert len({target for _, target in copies} | {*shared}) == n - 1 + len(shared)


def test_more_samples_than_rows(depth: int):
    """Samples 0 and 1 share the prompt; 2 and 3 find its closed blocks and share what they compute;
    4 is alone.
    """
    host = roomy(depth, max_num_seqs=2)
    seqs = host.add_samples(prompt(10), 5, max_tokens=4)
    host.run()
    assert prefills(host) == [[(0, 10), (10, 10)], [(8, 10), (10, 10)], [(8, 10)]]
    assert [seq.num_cached for seq in seqs] == [0, 10, 8, 10, 8]


def test_samples_of_a_chunked_prompt(depth: int):
    """Forks come after the last chunk, in its step, and take none of its budget."""
    host = roomy(depth, max_num_batched_tokens=4)
    host.add_samples(prompt(10), 3)
    host.run()
    assert prefills(host) == [[(0, 4)], [(4, 8)], [(8, 10), (10, 10), (10, 10)]]


def test_samples_with_prompt_logprobs(depth: int):
    """Sample 0 alone scores the prompt, so it computes all of it although it is cached; the others
    fork from it.
    """
    host = roomy(depth)
    host.generate(prompt(10))
    seqs = host.add_samples(prompt(10), 3, prompt_logprobs=1)
    host.run()
    assert prefills(host)[1:] == [[(0, 10), (10, 10), (10, 10)]]
    assert [len(seq.prompt_logprobs) for seq in seqs] == [10, 1, 1]
    check_ended(host, seqs[0])


# Beams in a small pool


@pytest.mark.parametrize("host_blocks", [0, 2, 32])
@pytest.mark.parametrize("num_blocks", [7, 8, 10])
def test_beams_take_turns(depth: int, num_blocks: int, host_blocks: int):
    """7 blocks of 2 hold one beam of 6 + 7 tokens: the others wait without blocks until it has
    drawn, and so on.
    """
    size: dict[str, Any] = {"block_size": 2, "num_blocks": num_blocks, "max_logprobs": 12}
    host = Host(depth, swap_space_gib=host_blocks / 1024, swap_min_tokens=0, **size)
    searches = [host.add_beams(prompt(6, seed), 3, 8) for seed in range(2)]
    other = host.add(prompt(5), 6)
    host.run()
    assert not any(search.error for search in searches) and other.error is None
    assert host.engine.stats.preemptions.total() > 0


@pytest.mark.parametrize("host_blocks", [0, 32])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("steps", cases(range(2, 8), [2, 5]))
def test_a_beam_is_preempted(depth: int, steps: int, rows: int, host_blocks: int):
    """Also while its step is in flight, whose candidates count: it then waits for its search, not
    for blocks.
    """
    host = roomy(
        depth,
        max_num_seqs=rows,
        max_logprobs=12,
        swap_space_gib=host_blocks / 1024,
        swap_min_tokens=0,
    )
    search = host.add_beams(prompt(6), 3, 8)
    for _ in range(steps):
        host.step()
    preempted(host, list(host.engine.replicas[0].queues.running)[-1])
    decoded = host.runner.computed("decode")
    host.run()
    assert search.error is None and host.runner.computed("decode") - decoded <= 3 * 8


def test_a_search_that_cannot_fit_fails_alone(depth: int):
    """10 slots for beams of 6 + 7 tokens: all beams end with the error; what fits goes on."""
    host = Host(depth, block_size=2, num_blocks=5, max_logprobs=12)
    search, other = host.add_beams(prompt(6), 3, 8), host.add(prompt(4), 6)
    huge, small = host.add_beams(prompt(11), 2, 8), host.add_beams(prompt(4), 2, 5)
    host.run()
    for failed in (search, huge):
        assert isinstance(failed.error, CapacityError) and all(
            seq.error for seq in failed.sequences
        )
        assert all(h.finish_reason in ("error", "stop") for h in failed.results())
    assert other.num_generated == 6 and small.error is None and len(small.results()) == 2


# What the cache keeps


def test_least_recently_freed_is_reused_first(depth: int):
    """12 blocks hold two ended prompts of 4 blocks and what a third one takes: all from the one
    that ended first.
    """
    host = Host(depth, num_blocks=12)
    for seed in range(2):
        host.generate(prompt(16, seed), max_tokens=1)
    host.generate(prompt(32, 2), max_tokens=1)
    found = [len(host.found(host.sequence([*prompt(16, seed), 1]))) for seed in range(2)]
    assert found == [0, 4]


def test_blocks_that_nothing_can_find_go_first(depth: int):
    """Ended sequences leave open tails: a later request takes those, though they were freed after
    the cached ones.
    """
    host = Host(depth, num_blocks=12)
    for seed in range(4):  # two closed blocks and a tail each
        host.generate(prompt(10, seed), max_tokens=1)
    host.generate(prompt(15, 9), max_tokens=1)  # 4 blocks: there were 4 that nothing could find
    assert [len(host.found(host.sequence(prompt(10, seed)))) for seed in range(4)] == [2] * 4


def test_a_shared_prefix_outlives_its_tails(depth: int):
    """Freed last block first: under pressure the tails go, then the prefix from its end."""
    host = Host(depth, num_blocks=10)
    host.generate(
        [*prompt(8), *prompt(8, 1)], [*prompt(8), *prompt(8, 2)], max_tokens=1
    )  # 2 + 2 + 2 blocks, cached
    left = []
    for seed in range(10, 14):
        host.generate(prompt(4 + 8 * (seed - 10), seed), max_tokens=1)
        left.append(
            [len(host.found(host.sequence([*prompt(8), *prompt(8, i), 1]))) for i in (1, 2)]
        )
    assert left == sorted(left, reverse=True) and left[0] == [4, 4] and left[-1] == [0, 0]
    assert any(min(found) > 0 and max(found) < 4 for found in left)


def test_a_prompt_after_new_weights_is_no_fork_of_an_equal_one_before_them(depth: int):
    """The first one keeps the KV that its first chunk has of the old weights; the second one, which
    came after the new weights, is computed by them alone.
    """
    host = Host(depth, max_num_batched_tokens=8)
    prompt = list(range(1, 13))
    before = host.add(prompt, 4)
    host.step()
    assert 0 < before.num_dispatched < len(prompt)
    host.renew(recompute=False)
    after = host.add(prompt, 4)
    while after.num_dispatched < len(prompt):
        host.step()
    host.engine.drain()
    table = after.block_tables[0]
    eras = [era for block in table for era in host.runner._get(0, block)[1]]
    assert min(eras[: len(prompt)]) >= host.era, "it reads KV of the old weights"
    host.run()
    assert generated(before) == generated(after)
