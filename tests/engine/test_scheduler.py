"""Scheduler: what is in a plan, who is admitted, who is preempted, and that nobody starves."""

import random

import pytest

from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.kinds import GroupSize
from jpaged.engine.commit import commit
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.policy import MOST_IN_A_ROW, Policy
from jpaged.engine.scheduler import Scheduler, schedule
from jpaged.engine.scoring import Scoring
from jpaged.engine.sequence import Request, Sequence, Status
from jpaged.request.detokenizer import TextStream
from jpaged.sampling_params import SamplingParams
from tests.engine.host import Host, Letters
from tests.engine.mock import expected, generated


def scheduler(
    num_blocks: int = 32, block_size: int = 4, *, rows: int = 4, tokens: int = 16
) -> Scheduler:
    return Scheduler(
        BlockManager([GroupSize(num_blocks)], block_size),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
    )


def add(s: Scheduler, length: int, max_tokens: int = 8, *, first: int = 0) -> Sequence:
    seq = Sequence(
        f"{first}",
        list(range(first, first + length)),
        SamplingParams(max_tokens=max_tokens),
        max_model_len=4096,
    )
    s.queues.waiting.add(Request([seq]).sequences[0])
    return seq


def next_plan(s: Scheduler) -> Plan | None:
    """The next plan of a scheduler alone."""
    plans = schedule((s,))
    return plans[0] if plans else None


def drawn(plan: Plan, token: int = 7, logprob: float = 0.0) -> StepResult:
    """Every row that draws draws this token."""
    counts = [entry.draws for entry in plan.entries if entry.draws]
    return StepResult(
        weight_version=1,
        num_drawn=counts,
        tokens=[[token] * n for n in counts],
        logprobs=[[logprob] * n for n in counts],
    )


def step(s: Scheduler) -> Plan | None:
    plan = next_plan(s)
    if plan is not None:
        commit(s.queues, plan, drawn(plan, logprob=-0.5))
    s.check_integrity()
    return plan


def spans(plan: Plan | None) -> list[tuple[str, int, int, bool, bool]]:
    """(request, start, end, whether it draws, first) of each row."""
    assert plan is not None
    return [(e.seq.request_id, e.start, e.end, e.draws > 0, e.is_new) for e in plan.entries]


def test_idle():
    s = scheduler()
    assert next_plan(s) is None and not s.queues.waiting and s.queues.finished == []


def test_prefill_fills_its_budget_and_no_more():
    s = scheduler(tokens=10)
    for i, length in enumerate((4, 9, 5)):
        add(s, length, first=100 * i)
    assert spans(step(s)) == [("0", 0, 4, True, True), ("100", 0, 6, False, True)]
    assert spans(step(s)) == [("100", 6, 9, True, False), ("200", 0, 5, True, True)]
    plan = step(s)
    assert plan is not None and plan.phase == "decode" and plan.num_tokens == 3


def test_decode_has_every_row():
    s = scheduler(tokens=64)
    for i, length in enumerate((5, 11, 8)):
        add(s, length, first=100 * i)
    step(s)
    assert spans(step(s)) == [
        ("0", 5, 6, True, False),
        ("100", 11, 12, True, False),
        ("200", 8, 9, True, False),
    ]


def test_nothing_is_planned_past_the_end():
    """With dispatches in flight, no more tokens are dispatched than a sequence may have."""
    s = scheduler()
    seq = add(s, 4, max_tokens=3)
    plans = [next_plan(s) for _ in range(5)]
    assert [plan and plan.phase for plan in plans] == ["prefill", "decode", "decode", None, None]
    assert (seq.pending, seq.in_flight, seq.num_dispatched) == (3, 3, 6)
    for token, plan in enumerate(plans[:3]):
        assert plan is not None and seq.status is Status.RUNNING
        commit(s.queues, plan, drawn(plan, token))
    assert seq.finish_reason == "length" and generated(seq) == [0, 1, 2] and seq.in_flight == 0


def test_admission_is_first_come_first_served():
    s = scheduler(num_blocks=8, tokens=64)
    first, large, small = add(s, 16), add(s, 20, first=100), add(s, 3, first=200)
    step(s)
    assert list(s.queues.running) == [first] and list(s.queues.waiting) == [
        large,
        small,
    ]  # the small one does not overtake
    while first.status is not Status.FINISHED:
        step(s)
    assert spans(step(s))[:2] == [("100", 0, 20, True, True), ("200", 0, 3, True, True)]


def test_admission_leaves_a_block_for_every_row_that_runs():
    s = scheduler(num_blocks=6, tokens=64)
    for i, length in enumerate((8, 12, 3)):  # 2, 3 and 1 blocks
        add(s, length, first=100 * i)
    step(s)
    assert [seq.prompt_len for seq in s.queues.running] == [8, 12] and s.blocks.num_used == 5


def test_hits_within_a_plan_follow_the_order_of_its_entries():
    s = scheduler(tokens=64)
    one, two = add(s, 9), Sequence("b", [*range(8), 50], SamplingParams(), max_model_len=64)
    s.queues.waiting.add(two)
    assert spans(step(s)) == [("0", 0, 9, True, True), ("b", 8, 9, True, True)]
    assert one.block_tables[0][:2] == two.block_tables[0][:2] and (
        one.num_cached,
        two.num_cached,
    ) == (0, 8)


def test_preempts_the_youngest_and_readmits_in_order():
    s = scheduler(num_blocks=9, tokens=64)
    seqs = [add(s, 4, max_tokens=16, first=100 * i) for i in range(4)]
    step(s)
    assert len(s.queues.running) == 4
    preempted = []
    while s.queues.running or s.queues.waiting:
        before = list(s.queues.running)
        step(s)
        gone = [
            seq for seq in before if seq not in s.queues.running and seq.status is Status.WAITING
        ]
        assert gone == before[len(before) - len(gone) :]  # always from the young end
        preempted += gone
        assert [*s.queues.running, *s.queues.waiting] == [
            seq for seq in seqs if seq.status is not Status.FINISHED
        ]  # by arrival
    assert preempted and seqs[0] not in preempted and s.queues.preemptions.total() >= len(preempted)
    assert [seq.finish_reason for seq in s.queues.finished] == ["length"] * 4


def test_the_oldest_is_never_preempted():
    host = Host(num_blocks=6, block_size=2, max_num_seqs=6)
    seqs = [host.add([i, i, i], max_tokens=8) for i in range(8)]
    while host.engine.has_unfinished():
        oldest = next(iter(host.engine.requests.values())).sequences[0]
        was_running, epoch = oldest.status is Status.RUNNING, oldest.epoch
        host.step()
        assert not was_running or oldest.epoch == epoch
    assert host.engine.replicas[0].queues.preemptions.total() and all(
        seq.error is None for seq in seqs
    )


def test_work_is_not_thrown_away_again_and_again(depth: int):
    """Under a pool of a third of the need each request is computed few times over."""
    host = Host(depth, num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64)
    rng = random.Random(0)
    seqs = [
        host.add(rng.choices(range(90), k=rng.randrange(4, 12)), rng.randrange(10, 40))
        for _ in range(40)
    ]
    host.run()
    tokens = sum(len(seq) for seq in seqs)
    assert host.engine.replicas[0].queues.preemptions.total() <= 2 * len(seqs)
    assert host.runner.computed("prefill") <= 2 * tokens


def test_a_preempted_row_waits_for_its_step_in_flight():
    s = scheduler()
    seq = add(s, 5)
    step(s)
    plan = next_plan(s)
    assert plan is not None and seq.in_flight == 1
    s.queues.preempt(seq)
    s.check_integrity()
    assert next_plan(s) is None  # its last token is on its way
    commit(s.queues, plan, drawn(plan, 3))
    assert generated(seq) == [7, 3] and seq.pending == 0 and s.blocks.num_used == 0
    assert spans(step(s)) == [("0", 4, 7, True, True)]  # one block was still there


def test_a_preempted_row_may_end_while_it_waits():
    s = scheduler()
    seq, other = add(s, 5, max_tokens=2), add(s, 5, first=50)
    step(s)
    plan = next_plan(s)
    assert plan is not None
    s.queues.preempt(seq)
    commit(s.queues, plan, drawn(plan, 3))
    assert (
        seq.finish_reason == "length" and not s.queues.waiting and list(s.queues.running) == [other]
    )
    s.check_integrity()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_slots_are_distinct_and_come_back(depth: int, rows: int):
    host = Host(depth, max_num_seqs=rows, num_blocks=8)
    for i in range(9):
        host.add([i, i + 1, i + 2], max_tokens=5)
    host.run()
    assert sorted(host.engine.replicas[0].queues.free_rows) == list(range(rows))


def test_decode_comes_at_least_every_so_many_steps():
    s = scheduler(num_blocks=256, rows=64, tokens=4)
    add(s, 4, max_tokens=30)
    step(s)
    for i in range(20):
        add(s, 8, max_tokens=1, first=100 * i)
    phases = []
    while s.queues.waiting:
        plan = step(s)
        phases.append(plan.phase if plan is not None else None)
    streaks = "".join(phase[0] for phase in phases if phase is not None).split("d")
    assert max(map(len, streaks)) == MOST_IN_A_ROW["prefill"] and len(streaks) > 5


def test_prefill_alone_has_no_limit():
    s = scheduler(tokens=4)
    add(s, 40, max_tokens=2)
    plans = [step(s) for _ in range(11)]
    assert [plan and plan.phase for plan in plans] == ["prefill"] * 10 + ["decode"]


def test_prompt_logprobs_take_no_hits(depth: int):
    host = Host(depth)
    plain = host.generate(range(10))[0]
    scored = host.generate(range(10), prompt_logprobs=2)[0]
    assert plain.num_cached == scored.num_cached == 0 and generated(scored) == generated(plain)
    assert len(scored.prompt_logprobs) == 10 and scored.prompt_logprobs[0] is None
    assert [len(top) for top in scored.prompt_logprobs[1:] if top is not None] == [3] * 9
    assert host.generate(range(10))[0].num_cached == 8


def test_scoring_samples_nothing(depth: int):
    host = Host(depth)
    seq = host.add(range(21), 5, prompt_logprobs=0, scoring=Scoring())
    other = host.add(range(21), 5)
    host.run()
    assert seq.scored is not None and seq.scored.count == 20
    assert generated(seq) == [] and seq.finish_reason == "length"
    assert generated(other) == expected(other)
    assert all(phase == "prefill" or len(rows) == 1 for phase, rows in host.runner.dispatched)


def test_a_waiting_crowd_costs_nothing():
    """A step, and giving up one request, look at the head of the queue only."""

    class Crowd(Policy):
        seen = 0

        def __iter__(self):
            for seq in super().__iter__():
                self.seen += 1
                yield seq

        def _may_run(self, seq: Sequence) -> bool:
            self.seen += 1
            return super()._may_run(seq)

    s = scheduler(num_blocks=4, rows=2)
    s.queues.waiting = crowd = Crowd(2)
    seqs = [add(s, 6, max_tokens=9, first=10 * i) for i in range(100)]
    for i in range(40):
        crowd.seen = 0
        s.queues.finish(seqs[99 - i], "abort")
        plan = next_plan(s)
        assert plan is not None
        commit(s.queues, plan, drawn(plan))
        assert crowd.seen <= 6, "a few questions, however many wait"
    assert len(s.queues.finished) > 42


def test_stops(depth: int):
    host = Host(depth)
    free = expected(host.sequence(range(6), 12))
    at = next(i for i in range(3, 12) if free[i] not in free[:i])
    cases = {
        "eos": ({"eos_ids": frozenset({free[at]})}, ("stop", None, at + 1)),
        "id": ({"stop_token_ids": [free[at]]}, ("stop", free[at], at + 1)),
        "ignored": ({"eos_ids": frozenset({free[at]}), "ignore_eos": True}, ("length", None, 12)),
        "both": (
            {"eos_ids": frozenset({free[at]}), "stop_token_ids": [free[at]]},
            ("stop", None, at + 1),
        ),
    }
    for options, want in cases.values():
        seq = host.add(range(6), 12, **options)
        host.run()
        assert (seq.finish_reason, seq.stop_reason, seq.num_generated) == want
        assert (
            generated(seq) == free[: seq.num_generated]
            and len(seq.generated.logprobs) == seq.num_generated
        )


def test_min_tokens_bans_until_then(depth: int):
    host = Host(depth)
    free = expected(host.sequence(range(6), 12))
    for minimum in range(5):
        seq = host.add(range(6), 12, eos_ids=frozenset(free[:3]), min_tokens=minimum)
        host.run()
        assert not set(generated(seq)[:minimum]) & set(free[:3])
        assert seq.num_generated > minimum


def test_min_tokens_and_stop_strings(depth: int):
    """A stop string may end with the first token after min_tokens, not with an earlier one."""
    host = Host(depth)
    letters = Letters().decode(expected(host.sequence(range(6), 12)))
    at = next(i for i in range(2, 12) if letters[i] not in letters[:i])
    for minimum in range(at + 3):
        seq = host.add(
            range(6), 12, min_tokens=minimum, text=TextStream(Letters(), stop=[letters[at]])
        )
        host.run()
        again = letters.find(letters[at], max(minimum, at))
        assert seq.num_generated == (again + 1 if again >= 0 else 12)
        assert (seq.stop_reason, seq.finish_reason) == (
            (letters[at], "stop") if again >= 0 else (None, "length")
        )
