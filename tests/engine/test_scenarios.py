"""SCENARIOS: the cases that every change of the host side must survive. The device is a mock; see
mock.py.
"""

import random

import pytest

from jpaged.engine.plan import Phase, Plan, PlanEntry
from jpaged.engine.policy import MOST_IN_A_ROW
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.sequence import Sequence, Status
from jpaged.errors import CapacityError, RequestError
from tests.engine.host import Host, cases
from tests.engine.mock import expected, generated

P1, P2, T = [11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def test_scenario_01_stale_hash(depth: int):
    host = Host(depth, num_blocks=3)
    for own in (P1, P2, P1):
        (seq,) = host.generate([*own, *T, 5], max_tokens=3)
        assert generated(seq) == expected(seq)
    (again,) = host.generate([*P1, *T, 5], max_tokens=3)
    assert again.num_cached == 8


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_scenario_02_fully_cached_prompt(depth: int, blocks: int):
    host = Host(depth)
    cold, warm = (host.generate(prompt(4 * blocks))[0] for _ in range(2))
    assert (cold.num_cached, warm.num_cached) == (0, 4 * (blocks - 1))
    assert generated(cold) == generated(warm)


def test_scenario_03_prefix_in_flight(depth: int):
    host = Host(depth, max_num_batched_tokens=8)
    shared = prompt(12)
    host.add([*shared, 1, 2], max_tokens=4)
    host.step()  # dispatches the first 8 of 14 tokens
    assert host.runner.dispatched == [("prefill", [(0, 8)])]
    second = host.add([*shared, 3], max_tokens=4)
    host.step()  # the third block is written by the first entry of this very plan
    assert host.runner.dispatched[-1] == ("prefill", [(8, 14), (12, 13)])
    assert second.num_cached == 12
    host.run()


def test_scenario_03_nothing_unwritten_is_hit(depth: int):
    host = Host(depth, max_num_batched_tokens=8)
    shared = prompt(20)
    host.add([*shared, 1], max_tokens=4)
    host.step()
    scheduler = host.engine.replicas[0]
    assert host.found(host.sequence([*shared, 2])) == list(
        scheduler.queues.running.copy().popitem()[0].block_tables[0][:2]
    )
    second = host.add([*shared, 2], max_tokens=4)
    host.run()
    assert second.num_cached == 20  # admitted once the first one's last chunk had left it a budget


def test_scenario_04_preempted_while_its_blocks_are_cached(depth: int):
    host = Host(depth, num_blocks=8)
    old, young = host.add(prompt(10), max_tokens=14), host.add(prompt(10, seed=1), max_tokens=20)
    seen = watch_admissions(host.engine.replicas[0])
    host.run()
    assert host.engine.replicas[0].queues.preemptions.total() > 0
    readmitted = [entry for entry in seen if entry[0] is young and entry[3] > 0]
    assert readmitted and any(cached > 0 for _, cached, _, _ in readmitted)
    for _, cached, scheduled, generated_before in seen:
        assert cached + scheduled <= 10 + generated_before
    assert old.num_cached == young.num_cached == 0  # what the first admission found


def watch_admissions(scheduler: Scheduler) -> list[tuple[Sequence, int, int, int]]:
    """(sequence, tokens cached, tokens scheduled, tokens generated before) of each admission from
    now on.
    """
    seen, make_plan = [], scheduler.plan

    def watched(phase: Phase, entries: list[PlanEntry]) -> Plan:
        plan = make_plan(phase, entries)
        for entry in plan.entries:
            if entry.is_new:
                seen.append((entry.seq, entry.start, entry.num_tokens, entry.seq.num_generated))
        return plan

    scheduler.plan = watched  # pyright: ignore[reportAttributeAccessIssue]
    return seen


def test_scenario_05_two_and_a_half_chunks(depth: int):
    whole, chunked = Host(depth, max_num_batched_tokens=32), Host(depth, max_num_batched_tokens=8)
    (one,), (other,) = (host.generate(prompt(20)) for host in (whole, chunked))
    assert [s for p, s in chunked.runner.dispatched if p == "prefill"] == [
        [(0, 8)],
        [(8, 16)],
        [(16, 20)],
    ]
    assert generated(one) == generated(other)


@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_scenario_06_07_preempted_at_every_offset_in_a_block(depth: int, length: int):
    host = Host(depth)
    seq = host.add(prompt(5), max_tokens=16)
    while len(seq) < length:
        host.step()
    host.engine.replicas[0].queues.preempt(seq)
    before, host.runner.dispatched = len(seq), []
    host.run()
    assert generated(seq) == expected(seq)
    prefills = [spans for phase, spans in host.runner.dispatched if phase == "prefill"]
    (_, end), *_ = prefills[-1]
    assert end == before + (
        depth - 1
    )  # the generated tokens too, and the one that was in flight when it was preempted
    # Re-prefill emits its token: every other one takes a decode step, of which the last one may be
    # surplus.
    decodes = sum(phase == "decode" for phase, _ in host.runner.dispatched)
    assert decodes == len(seq) - end - 1


def test_scenario_07_generated_tokens_are_prefilled_again(depth: int):
    host = Host(depth, enable_prefix_caching=False)
    seq = host.add(prompt(6), max_tokens=12)
    for _ in range(8):
        host.step()
    host.engine.replicas[0].queues.preempt(seq)
    while seq.in_flight:
        host.step()
    known, before = len(seq), host.runner.computed("prefill")
    assert known > 6
    host.run()
    assert host.runner.computed("prefill") - before == known


def test_scenario_08_decode_equals_prefill(depth: int):
    """The token that decode draws at position i is the one that a prefill of the first i tokens
    draws.
    """
    host = Host(depth)
    (seq,) = host.generate(prompt(7), max_tokens=10)
    for length in range(8, 17):
        (again,) = host.generate(seq.token_ids[:length], max_tokens=1)
        assert again.token_ids == seq.token_ids[: length + 1]


def test_scenario_09_larger_than_the_pool(depth: int):
    host = Host(depth, num_blocks=4)
    fits, huge, too = host.generate(prompt(6), prompt(17), prompt(9), max_tokens=3)
    assert (
        isinstance(huge.error, CapacityError)
        and huge.finish_reason == "error"
        and "num_blocks" in str(huge.error)
    )
    assert (
        fits.error is None
        and too.error is None
        and (fits.num_generated, too.num_generated) == (3, 3)
    )


def test_scenario_09_lone_sequence_outgrows_the_pool(depth: int):
    host = Host(depth, num_blocks=4)
    grows, other = host.generate(prompt(6), prompt(5, seed=1), max_tokens=20)
    fits = host.generate(prompt(9), max_tokens=8)[0]
    assert isinstance(grows.error, CapacityError) and isinstance(other.error, CapacityError)
    assert len(grows) == len(other) == 17  # every slot was used; the last token needs none
    assert fits.error is None and generated(grows) == expected(grows)[:11]


def test_scenario_10_ten_prompts_two_rows(depth: int):
    host = Host(depth, max_num_seqs=2)
    seqs = [host.add(prompt(3 + i, seed=i), max_tokens=6) for i in range(10)]
    ended = host.run()
    assert all(len(spans) <= 2 for _, spans in host.runner.dispatched)
    assert sorted(ended, key=seqs.index) == seqs
    order = [seqs.index(seq) for seq in ended]
    assert all(i - 2 < place < i + 2 for place, i in enumerate(order))  # first come, first served


def test_scenario_11_same_prompt_in_one_call(depth: int):
    host = Host(depth, max_num_batched_tokens=64)
    seqs = [host.add(prompt(17), max_tokens=2 if i == 0 else 9) for i in range(4)]
    host.step()
    assert host.runner.computed("prefill") == 20
    assert host.runner.dispatched[0][1] == [(0, 17), (16, 17), (16, 17), (16, 17)]
    first, *others = seqs
    shared = list(first.block_tables[0][:4])
    assert all(list(seq.block_tables[0][:4]) == shared for seq in others)
    assert host.blocks.num_used == 4 + 4
    while first.status is not Status.FINISHED:
        host.step()
    assert [host.blocks.groups[0].blocks[b].ref_count for b in shared] == [3] * 4
    late = host.add(prompt(17), max_tokens=3)
    host.step()
    assert late.num_cached == 16 and list(late.block_tables[0][:4]) == shared
    host.run()


def test_scenario_12_two_engines(depth: int):
    small, large = Host(depth, block_size=4), Host(depth, block_size=16, num_blocks=8)
    seqs = [host.add(prompt(9), max_tokens=9) for host in (small, large)]
    while small.engine.has_unfinished() or large.engine.has_unfinished():
        small.step()
        large.step()
    assert generated(seqs[0]) == generated(seqs[1]) == expected(seqs[0])


def test_scenario_13_stops_at_max_model_len(depth: int):
    host = Host(depth, max_model_len=20)
    seqs = host.generate(prompt(15), prompt(19, seed=1), prompt(4, seed=2), max_tokens=50)
    assert [(seq.num_generated, seq.finish_reason) for seq in seqs] == [
        (5, "length"),
        (1, "length"),
        (16, "length"),
    ]


def test_scenario_14_block_size_one(depth: int):
    host = Host(depth, block_size=1, num_blocks=24)
    shared = prompt(5)
    seqs = host.generate(*([*shared, i] for i in range(6)), max_tokens=9)
    assert host.engine.replicas[0].queues.preemptions.total() > 0 and [
        seq.num_cached for seq in seqs
    ] == [
        0,
        5,
        5,
        5,
        5,
        5,
    ]
    assert host.generate([*shared, 0])[0].num_cached == 5


@pytest.mark.parametrize("method", ["dispatch", "fetch"])
@pytest.mark.parametrize("call", cases(range(12), [0, 1, 3, 7]))
def test_scenario_15_the_runner_fails(depth: int, method: str, call: int):
    """The call's own requests end; the next call starts clean."""
    host = Host(depth, num_blocks=8)
    host.runner.fail = {(method, call)}
    seqs = [host.add(prompt(6, seed=i), max_tokens=7) for i in range(4)]
    with pytest.raises(RuntimeError, match=f"{method} fails"):
        host.run()
    for seq in seqs:
        host.engine.abort(seq.request_id)
    assert not host.engine.has_unfinished() and host.engine.step() == []
    host.engine.replicas[0].check_integrity()
    assert host.blocks.num_used == 0
    assert all(generated(seq) == expected(seq)[: seq.num_generated] for seq in seqs)
    assert all(seq.num_cached == 0 for seq in host.generate(prompt(6), prompt(6, seed=1)))


@pytest.mark.parametrize("method", ["dispatch", "fetch"])
@pytest.mark.parametrize("call", cases(range(0, 12, 2), [0, 4, 10]))
def test_scenario_15_stepping_on_after_a_failure(depth: int, method: str, call: int):
    """What was running is computed again, from the tokens that had been committed."""
    host = Host(depth, num_blocks=8)
    host.runner.fail = {(method, call)}
    seqs = [host.add(prompt(6, seed=i), max_tokens=7) for i in range(4)]
    ended, had = [], []
    with pytest.raises(RuntimeError):
        while True:
            had = [generated(seq) for seq in seqs]
            ended += host.step()
    host.engine.replicas[0].check_integrity()
    assert [generated(seq) for seq in seqs] == had  # nothing is taken back
    ended += host.run()
    assert sorted(ended, key=seqs.index) == seqs
    assert all(generated(seq) == expected(seq) for seq in seqs)


def test_scenario_16_steady_arrivals(depth: int):
    host = Host(depth, max_num_seqs=8, num_blocks=64)
    runs = host.add(prompt(5), max_tokens=40)
    others = 0
    while runs.status is not Status.FINISHED:
        others += 1
        host.add(
            prompt(30, seed=others), max_tokens=2
        )  # two prefill steps each: more than there are steps
        host.step()
    prefill_streak, longest = 0, 0
    phases = [phase for phase, _ in host.runner.dispatched]
    for phase in phases[phases.index("decode") :]:
        prefill_streak = prefill_streak + 1 if phase == "prefill" else 0
        longest = max(longest, prefill_streak)
    assert longest == MOST_IN_A_ROW["prefill"]
    assert all(
        (s, e) for phase, spans in host.runner.dispatched if phase == "decode" for s, e in spans
    )
    host.run()


def test_scenario_16_every_row_decodes_in_every_decode_step(depth: int):
    host = Host(depth, num_blocks=64)
    rows = [host.add(prompt(5, seed=i), max_tokens=12) for i in range(3)]
    for i in range(60):
        host.add(prompt(17, seed=9 + i), max_tokens=1)
        host.step()
    decodes = [spans for phase, spans in host.runner.dispatched if phase == "decode"]
    assert all(len(spans) == 3 for spans in decodes[:11]) and all(
        row.finish_reason == "length" for row in rows
    )
    host.run()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 1},
        {"num_blocks": 7},
        {"block_size": 1, "num_blocks": 128},
        {"block_size": 8},
        {"enable_prefix_caching": False},
        {"token_buckets": (5, 16), "seq_buckets": (1, 2, 4)},
    ],
    ids=str,
)
def test_scenario_18_same_tokens_however_scheduled(depth: int, settings: dict):
    """Seeds are the device's; on the host: each row's key and position do not depend on how it was
    scheduled.
    """
    plain, other = Host(1), Host(depth, **settings)
    prompts = [[*prompt(6), *prompt(3 * i, seed=i)] for i in range(6)]
    for one, two in zip(plain.generate(*prompts), other.generate(*prompts), strict=True):
        assert one.token_ids == two.token_ids and one.generated == two.generated


def test_scenario_22_duplicate_and_unknown_ids(depth: int):
    host = Host(depth)
    assert (
        host.engine.step() == [] and host.engine.step() == [] and host.runner.calls["dispatch"] == 0
    )
    seq = host.add(prompt(5), request_id="a")
    with pytest.raises(RequestError, match="'a' is in use"):
        host.add(prompt(6), request_id="a")
    assert host.engine.abort("b") is None
    host.step()
    with pytest.raises(RequestError, match="'a' is in use"):
        host.add(prompt(6), request_id="a")
    assert host.engine.abort("b") is None
    assert host.run() == [seq] and seq.num_generated == 8
    assert host.engine.abort("a") is None  # it has ended
    assert host.engine.step() == []
    again = host.add(prompt(6), request_id="a")  # the id is free again
    assert host.run() == [again]


@pytest.mark.parametrize("steps", cases(range(8), [0, 2, 5]))
def test_scenario_22_abort_at_any_time(depth: int, steps: int):
    host = Host(depth, max_num_seqs=2, max_num_batched_tokens=4)
    seqs = [host.add(prompt(7, seed=i), max_tokens=5, request_id=str(i)) for i in range(4)]
    for _ in range(steps):
        host.step()
    for i in (0, 3):
        assert host.engine.abort(str(i)) is seqs[i].request and host.engine.abort(str(i)) is None
        host.engine.replicas[0].check_integrity()
        assert (
            seqs[i].finish_reason == "abort"
            and generated(seqs[i]) == expected(seqs[i])[: seqs[i].num_generated]
        )
    again = host.add(prompt(7), max_tokens=5, request_id="0")
    assert sorted(host.run(), key=lambda seq: seq.request_id) == [again, seqs[1], seqs[2]]
