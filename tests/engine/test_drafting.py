"""What is guessed, and whether it is tried."""

import itertools
from typing import Any
from unittest import mock

import pytest

from jpaged.config import Speculative
from jpaged.engine.drafting import (
    DECAY,
    DOUBT_FACTOR,
    LONGEST_PAUSE,
    LOOKUP_SHARE,
    MIN_RATE,
    MIN_SAMPLES,
    MIN_SPEEDUP,
    PRIOR_RATE,
    RETRIES_IN_A_ROW,
    RETRY_AFTER,
    SAMPLES,
    TIMED_EVERY,
    Costs,
    Drafter,
    _Row,
    can_draft,
)
from jpaged.engine.plan import Plan, PlanEntry
from jpaged.engine.sequence import Sequence
from jpaged.sampling_params import SamplingParams
from tests.engine.host import Host

ALWAYS = Speculative(num_tokens=3, adaptive=False)


def sequence(tokens: list[int], **asked: Any) -> Sequence:
    return Sequence("r", tokens, SamplingParams(max_tokens=50, **asked), max_model_len=1000)


def step(rows: int, drafted: int = 0, steps: int = 1) -> Plan:
    entries = []
    for i in range(rows):
        count, draft = (1 + drafted, (1,) * drafted) if i == 0 else (1, ())
        count *= steps
        entries.append(
            PlanEntry(
                sequence([1, 2]),
                1,
                count,
                count,
                True,
                False,
                0,
                (1, *draft) if draft else (),
                bool(draft),
            )
        )
    return Plan(phase="prefill" if drafted else "decode", entries=tuple(entries))


def test_what_followed_the_last_tokens() -> None:
    drafter = Drafter(ALWAYS, 8)

    def draft(tokens: list[int], **asked: Any) -> list[int] | None:
        seq = sequence(tokens, **asked)
        return drafter.drafts([seq]).get(seq)

    assert draft([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5]
    assert draft([7, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2], "the longest ending"
    assert draft([1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1, 2], "of equal ones the last"
    assert draft([1, 1, 1, 1]) == [1], "up to what is known"
    assert draft([1, 2, 3, 4]) is None and draft([5]) is None
    assert draft([1, 2, 3, 1, 2], presence_penalty=0.5) is None
    assert not can_draft(sequence([1], repetition_penalty=1.5))


def test_a_step_is_shared() -> None:
    """Rows and drafts together are no more than a step draws; a full batch drafts nothing."""
    seqs = [sequence([1, 2, 3, 4, 5, 1, 2]) for _ in range(4)]
    for most, wanted in (
        (16, [3, 3, 3, 3]),
        (9, [2, 1, 1, 1]),
        (6, [1, 1, 0, 0]),
        (4, [0] * 4),
        (3, [0] * 4),
    ):
        drafts = Drafter(ALWAYS, most).drafts(seqs)
        assert [len(drafts.get(seq, ())) for seq in seqs] == wanted
    seqs[0].pending = 1
    assert Drafter(ALWAYS, 16).drafts(seqs) == {}, "not before its tokens are known"
    seqs[0].pending = 0
    seqs[3].waits_for_host = True
    assert set(Drafter(ALWAYS, 16).drafts(seqs)) == set(seqs[:3]), "others do beside a beam"


def test_never_past_the_end() -> None:
    seq = sequence([1, 2, 3, 4, 5, 1, 2])
    for left, wanted in ((4, 3), (3, 2), (2, 1), (1, 0)):
        seq.end = len(seq) + left
        assert len(Drafter(ALWAYS, 16).drafts([seq]).get(seq, ())) == wanted


def test_rows_that_gain_nothing_stop() -> None:
    """And come back by guesses that nobody tried."""
    drafter, seq = Drafter(Speculative(num_tokens=4), 16), sequence([1, 2, 3, 4, 5, 6, 1, 2])
    for _ in range(MIN_SAMPLES):
        drafter.costs.observe(step(1), 1.0)
    assert len(drafter.drafts([seq])[seq]) == 2, "half of an unknown row's are right"
    for _ in range(4):
        drafter.learn(seq, 4, 0)
    assert drafter._row(seq).rate < MIN_RATE and drafter.drafts([seq]) == {}
    assert (drafter.drafted, drafter.accepted) == (16, 0)
    for i in range(36):  # 3, 4, 5, 6, 1, 2, 3, ...; not looked up at each of them, at first
        seq.token_ids.append([3, 4, 5, 6, 1, 2][i % 6])
        drafter.observe(step(1), 1.0, ran_ahead=False)
        drafter.chosen([seq])
    assert drafter.drafts([seq])[seq][:2] == [3, 4]
    for _ in range(12):
        drafter.learn(seq, 4, 4)
    assert len(drafter.drafts([seq])[seq]) == 4
    del seq.token_ids[6:]  # as after a failed step
    assert drafter.drafts([seq]) == {}


def test_a_guess_is_checked_by_all_that_came() -> None:
    """A row that was not looked up for some tokens tells by them how good its guess was."""
    row, tokens = _Row(), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert row.look_up(tokens, 4) == [3, 4, 5, 6] and row.rate == 0.5
    tokens += [3, 4, 5, 6, 7, 9]  # five right, then one wrong
    row.look_up(tokens, 4)
    assert row.rate == pytest.approx((DECAY**6 + 5) / (2 * DECAY**6 + 6))
    tokens += [1, 2]
    assert row.look_up(tokens, 4) == [3, 4, 5, 6]
    before = row.rate
    row.look_up(tokens, 4)
    assert row.rate == before, "nothing came"


def test_looking_up_in_vain_is_paid_for() -> None:
    """By steps in which nothing is looked up; none of that where each draft is tried."""
    for asked in (Speculative(num_tokens=4), ALWAYS):
        drafter, seq = Drafter(asked, 16), sequence([1, 2, 3, 4])
        for _ in range(MIN_SAMPLES):
            drafter.costs.observe(step(1), 1.0)
        assert not drafter.chosen([seq])
        seq.token_ids += [1, 2]
        if not asked.adaptive:
            assert drafter.chosen([seq])
            continue
        assert drafter.lookup_paused and not drafter.chosen([seq])
        drafter.observe(step(1), drafter._spent / LOOKUP_SHARE / 2, ran_ahead=True)
        assert drafter.lookup_paused and not drafter.chosen([seq])
        drafter.observe(step(1), 2 * drafter._spent / LOOKUP_SHARE, ran_ahead=True)
        assert not drafter.lookup_paused and drafter.chosen([seq]) and not drafter.lookup_paused


def test_looking_up_for_rows_not_known_to_gain_is_rarer() -> None:
    """As long as one of them may gain, it costs the others no more than ever."""

    def spent(*rates: float) -> float:
        drafter = Drafter(Speculative(num_tokens=4), 16)
        for _ in range(MIN_SAMPLES):
            drafter.costs.observe(step(len(rates)), 1.0)
        seqs = [sequence([1, 2, 3, 4]) for _ in rates]
        for seq, rate in zip(seqs, rates, strict=True):
            row = drafter._row(seq)
            row.right, row.tried = rate, 1.0
        with mock.patch("jpaged.engine.drafting.time.perf_counter", itertools.count().__next__):
            assert not drafter.chosen(seqs)
        return drafter._spent

    assert spent(0.9) == spent(0.6) == spent(0.1, 0.9) == spent(0.9, 0.1) == 1.0
    assert spent(PRIOR_RATE) == spent(0.1, 0.2) == DOUBT_FACTOR


def test_costs() -> None:
    """A step with drafts is worth it where the tokens that it gives cost less than without."""
    costs = Costs()

    def pays(drafted: int, expected: float, rows: int = 1) -> bool:
        return costs.pays(drafted, MIN_SPEEDUP * (rows + expected) - rows, [expected / rows] * rows)

    assert not pays(4, 4.0), "nothing is known of steps without"
    for _ in range(MIN_SAMPLES):
        costs.observe(step(1), 1.0)
    assert pays(4, 0.1), "nor of steps with: try them"
    costs.observe(step(1, drafted=4), 50.0)  # a compile
    for _ in range(MIN_SAMPLES):
        costs.observe(step(1, drafted=4), 2.0)
    assert costs.pays(4, 1.1, [1.1]) and not costs.pays(4, 0.9, [0.9]), "no gain is asked yet"
    for _ in range(SAMPLES):
        costs.observe(step(1, drafted=4), 2.0)
    assert pays(4, 1.1) and not pays(4, 0.9)
    assert not pays(4, 4.0, rows=8), "of so many rows nothing is known"
    for _ in range(SAMPLES):
        costs.observe(step(1), 3.0)  # the machine is slower now, and so are both
    assert pays(4, 1.1) and not pays(4, 0.9)
    for _ in range(SAMPLES):
        costs.observe(step(1, drafted=4), 4.5)
    assert pays(4, 0.6) and not pays(4, 0.4)
    tried = [i for i in range(4 * LONGEST_PAUSE) if pays(4, 0.4)]
    times = [i for i in tried if i - 1 not in tried]
    assert len(tried) == RETRIES_IN_A_ROW * len(times), "now and then again"
    apart = [b - a for a, b in itertools.pairwise(times)]
    assert apart == [2 * RETRY_AFTER, 4 * RETRY_AFTER, *[LONGEST_PAUSE] * (len(apart) - 2)], (
        "ever more rarely"
    )
    assert times[0] < RETRY_AFTER and 4 <= len(apart) <= 5
    assert pays(4, 0.6) and sum(pays(4, 0.4) for _ in range(RETRY_AFTER)) == RETRIES_IN_A_ROW, (
        "soon after a gain"
    )
    for _ in range(SAMPLES):
        costs.observe(step(1, steps=4), 4.0)  # four tokens a dispatch
    for _ in range(SAMPLES):
        costs.observe(step(1, drafted=4), 4.0)
    assert pays(4, 3.1) and not pays(4, 2.9)


def test_steps_that_are_waited_for_together() -> None:
    """The first takes what both do; and of plain steps in a row not each is timed."""
    costs = Costs()
    for _ in range(TIMED_EVERY * SAMPLES):
        costs.observe(step(1), 1.99, ran_ahead=True)
        costs.observe(step(1), 0.01, ran_ahead=True)
    for _ in range(SAMPLES):
        costs.observe(step(1, drafted=4), 2.0)
    assert costs.pays(4, 1.8, [1.8]) and not costs.pays(4, 1.3, [1.3])


def test_costs_beside_steps_that_run_ahead() -> None:
    """A draft costs that they do: what the first plain step after it waits, too."""
    costs = Costs()

    def pays(expected: float) -> bool:
        return costs.pays(4, MIN_SPEEDUP * (1 + expected) - 1, [expected])

    for _ in range(TIMED_EVERY * MIN_SAMPLES):
        costs.observe(step(1), 1.0, ran_ahead=True)
    for _ in range(SAMPLES):
        costs.observe(step(1, drafted=4), 2.5)
        costs.observe(step(1), 2.7, ran_ahead=False)
        for seconds in (*[1.0] * 10, 0.3):  # the last was done while the host looked for drafts
            costs.observe(step(1), seconds, ran_ahead=True)
    assert pays(2.6) and not pays(2.4), "2.5, and 1 of the steps beside it"
    costs.observe(step(1, drafted=4), 2.5)
    assert pays(1.6) and not pays(1.4), "a draft after another"
    for i in range(LONGEST_PAUSE):
        costs.observe(step(1, drafted=4), 2.5, ran_ahead=i % 2 == 0)
    assert not pays(4.0), "plain steps are measured anew"
    for _ in range(SAMPLES + MIN_SAMPLES):
        costs.observe(step(1), 0.5, ran_ahead=True)
        costs.observe(step(1, drafted=4), 2.5)
    costs.observe(step(1), 0.5, ran_ahead=True)
    assert pays(4.1) and not pays(3.9)


def test_rows_without_a_guess_wait_for_the_next_plain_step_too() -> None:
    """Where plain steps run ahead: what the first one after a draft takes longer counts."""
    costs = Costs()
    for _ in range(TIMED_EVERY * MIN_SAMPLES):
        costs.observe(step(4), 1.0, ran_ahead=True)
    for _ in range(SAMPLES):
        costs.observe(step(4, drafted=12), 1.2)
        costs.observe(step(4), 2.0, ran_ahead=False)
        for _ in range(TIMED_EVERY):
            costs.observe(step(4), 1.0, ran_ahead=True)
    assert costs.pays(12, 12.0, [6.0, 4.0, 1.0, 1.0])
    assert not costs.pays(12, 12.0, [6.0, 6.0, 0.0, 0.0]), "0.2 of that draft, 1.0 of the next step"
    costs.observe(step(4, drafted=12), 1.2)
    assert costs.pays(12, 12.0, [6.0, 6.0, 0.0, 0.0]), "a draft after another"


def test_rows_without_a_guess_do_not_wait_long() -> None:
    """As many tokens a second in all, and the rows that gain nothing take twice their time."""
    costs = Costs()
    for _ in range(MIN_SAMPLES):
        costs.observe(step(4), 1.0)
    for _ in range(SAMPLES):
        costs.observe(step(4, drafted=12), 2.0)
    assert costs.pays(12, 12.0, [3.0] * 4) and not costs.pays(12, 12.0, [6.0, 6.0, 0.0, 0.0])
    assert costs.pays(12, 12.0, [5.0, 5.0, 1.0, 1.0]), "those that go on as fast lose nothing"
    for _ in range(SAMPLES):
        costs.observe(step(4, drafted=12), 1.1)
    assert costs.pays(12, 12.0, [6.0, 6.0, 0.0, 0.0]), "nor do they where a draft costs little"
    drafter = Drafter(Speculative(num_tokens=4), 32)
    drafter.costs = costs
    seqs = [sequence([1, 2, 3, 4, 5, 6, 1, 2]) for _ in range(3)] + [sequence([1, 2, 3, 4])]
    for seq in seqs:
        drafter._row(seq).learn(50, 50)
    assert set(drafter.drafts(seqs)) == set(seqs[:3])
    for _ in range(SAMPLES):
        costs.observe(step(4, drafted=12), 2.0)
    assert drafter.drafts(seqs) == {}
    drafter._spent, seqs[3].token_ids = 0.0, seqs[0].token_ids
    assert set(drafter.drafts(seqs)) == set(seqs)
    drafter._spent, seqs[3].token_ids = 0.0, [1, 2, 3, 4, 5]
    assert set(drafter.drafts(seqs)) == set(seqs[:3]), "one that finds nothing just now"


def test_on_the_host() -> None:
    """Fewer steps, equal tokens, nothing held; KV of refused drafts is in no cached block."""
    plain, host = Host(2), Host(2, speculative={"num_tokens": 4, "adaptive": False})
    for each in (plain, host):
        seqs = [each.add([1, 2, 3, i], 30) for i in range(2)]
        each.run()
        each.tokens = [seq.token_ids for seq in seqs]  # pyright: ignore[reportAttributeAccessIssue]
    assert plain.tokens == host.tokens  # pyright: ignore[reportAttributeAccessIssue]
    report = host.engine.report()
    assert 0 < report["accepted_tokens"] < report["drafted_tokens"]
    assert len(host.runner.dispatched) < len(plain.runner.dispatched) * 2 // 3
    assert host.blocks.num_used == 0 == report["sequences_running"]
