"""What is guessed, and whether it is tried."""

from typing import Any

import pytest

from jpaged.config import Speculative
from jpaged.engine.drafting import (
    DECAY,
    MAX_SLOWDOWN,
    MEASURED_FOR,
    MIN_RATE,
    MIN_SAMPLES,
    MIN_SPEEDUP,
    ROW_COOLDOWN,
    SAMPLES,
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
    assert len(drafter.drafts([seq])[seq]) == 4
    for _ in range(4):
        drafter.learn(seq, 4, 0)
    assert drafter._row(seq).rate < MIN_RATE and drafter.drafts([seq]) == {}
    assert (drafter.drafted, drafter.accepted) == (16, 0)
    assert drafter._row(sequence([1, 2])).rate < MIN_RATE, "a new row is taken for one like it"
    looked_up = []
    for i in range(36):  # 3, 4, 5, 6, 1, 2, 3, ...
        seq.token_ids.append([3, 4, 5, 6, 1, 2][i % 6])
        before = len(drafter._row(seq).before)
        drafter.chosen([seq])
        looked_up.append(len(drafter._row(seq).before) > before)
    assert drafter.drafts([seq])[seq][:2] == [3, 4]
    assert looked_up[:8] == 2 * [*[False] * (ROW_COOLDOWN - 1), True], "not at each token"
    del seq.token_ids[6:]  # as after a failed step
    assert drafter.drafts([seq]) == {}


def test_a_row_that_does_not_repeat_itself_is_looked_up_rarely() -> None:
    drafter, seq = Drafter(Speculative(num_tokens=4), 16), sequence([1, 2, 3, 4])
    for _ in range(MIN_SAMPLES):
        drafter.costs.observe(step(1), 1.0)
    assert not drafter.chosen([seq])
    seq.token_ids += [1, 2]
    assert not drafter.chosen([seq]), "too soon"
    seq.token_ids += [3, 4]
    assert drafter.chosen([seq])
    always = Drafter(ALWAYS, 16)
    seq = sequence([1, 2, 3, 4])
    assert not always.chosen([seq])
    seq.token_ids += [1, 2]
    assert always.chosen([seq]), "where each draft is tried each token is looked up"


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


def test_costs() -> None:
    """A step with drafts is worth it where the tokens that it gives cost less than without."""
    costs = Costs()

    def pays(drafted: int, gain: float, rows: int = 1) -> bool:
        return costs.pays(drafted, [MIN_SPEEDUP * (1 + gain) - 1] * rows)

    assert not pays(4, 4.0), "nothing is known of steps without"
    for _ in range(MIN_SAMPLES):
        costs.observe(step(1), 1.0)
    assert pays(4, 0.1), "nor of steps with: try them"
    costs.observe(step(1, drafted=4), 50.0)  # a compile
    for _ in range(MIN_SAMPLES - 1):
        costs.observe(step(1, drafted=4), 2.0)
    assert pays(4, 1.1) and not pays(4, 0.9)
    assert not pays(4, 4.0, rows=8), "of so many rows nothing is known"
    for _ in range(SAMPLES):
        costs.observe(step(1, drafted=4), 3.0)
    assert pays(4, 2.1) and not pays(4, 1.9)
    costs.observe(step(1), 1.0)  # late
    for _ in range(SAMPLES):
        costs.observe(step(1, steps=4), 8.0)  # four tokens a dispatch, and the machine is slower
    assert pays(4, 0.6) and not pays(4, 0.4)


def test_times_are_measured_anew() -> None:
    """What was slow for a moment is tried again, if rarely."""
    costs = Costs()
    for _ in range(MIN_SAMPLES):
        costs.observe(step(1), 1.0)
    for _ in range(MIN_SAMPLES):
        costs.observe(step(1, drafted=4), 9.0)
    for _ in range(MEASURED_FOR - 2 * MIN_SAMPLES):
        assert not costs.pays(4, [4.0])
        costs.observe(step(1), 1.0)
    for _ in range(MIN_SAMPLES):
        assert not costs.pays(4, [4.0])
        costs.observe(step(1), 1.0)
    for _ in range(MIN_SAMPLES):
        assert costs.pays(4, [4.0])
        costs.observe(step(1, drafted=4), 2.0)
    assert costs.pays(4, [4.0]) and not costs.pays(4, [1.0])


def test_steps_that_are_waited_for_together() -> None:
    """The first takes what both do."""
    costs = Costs()
    for _ in range(SAMPLES):
        costs.observe(step(1), 1.99)
        costs.observe(step(1), 0.01)
    for _ in range(SAMPLES):
        costs.observe(step(1, drafted=4), 2.0)
    assert costs.pays(4, [1.8]) and not costs.pays(4, [1.2])


def test_a_draft_costs_that_the_next_plain_step_cannot_run_ahead() -> None:
    costs = Costs()

    def pays(gain: float) -> bool:
        return costs.pays(4, [MIN_SPEEDUP * (1 + gain) - 1])

    for _ in range(MIN_SAMPLES):
        costs.observe(step(1), 1.0)
    for _ in range(MIN_SAMPLES):
        costs.observe(step(1, drafted=4), 2.5)
        costs.observe(step(1), 1.5)
        costs.observe(step(1), 1.0)
    assert pays(2.1) and not pays(1.9), "2.5, and 0.5 of the next plain step"
    costs.observe(step(1, drafted=4), 2.5)
    assert pays(1.6) and not pays(1.4), "a draft after another"


def test_rows_without_a_guess_do_not_wait() -> None:
    """However much the others gain."""
    costs = Costs()
    for _ in range(MIN_SAMPLES):
        costs.observe(step(4), 1.0)
    for _ in range(SAMPLES):
        costs.observe(step(4, drafted=12), 2.0)
    assert costs.pays(12, [3.0] * 4) and not costs.pays(12, [6.0, 6.0, 6.0, 0.0])
    assert costs.pays(12, [5.0, 5.0, 1.0, 1.0]), "those that go on as fast lose nothing"
    for _ in range(SAMPLES):
        costs.observe(step(4, drafted=12), 1.0 + MAX_SLOWDOWN / 2)
    assert costs.pays(12, [6.0, 6.0, 0.0, 0.0]), "nor do they where a draft costs little"
    drafter = Drafter(Speculative(num_tokens=4), 32)
    drafter.costs = costs
    seqs = [sequence([1, 2, 3, 4, 5, 6, 1, 2]) for _ in range(3)] + [sequence([1, 2, 3, 4])]
    for seq in seqs:
        drafter._row(seq).learn(50, 50)
    assert set(drafter.drafts(seqs)) == set(seqs[:3])
    for _ in range(SAMPLES):
        costs.observe(step(4, drafted=12), 2.0)
    assert drafter.drafts(seqs) == {}
    drafter._rows.pop(seqs[3])
    seqs[3].token_ids = seqs[0].token_ids
    drafter._row(seqs[3]).learn(50, 50)
    assert set(drafter.drafts(seqs)) == set(seqs)


def test_a_row_that_never_drafts_keeps_no_other_from_it() -> None:
    """Its longer step counts among the tokens of all; a row with penalties is such a row."""
    costs = Costs()
    for _ in range(MIN_SAMPLES):
        costs.observe(step(4), 1.0)
    for _ in range(MIN_SAMPLES):
        costs.observe(step(4, drafted=12), 2.0)
    assert not costs.pays(12, [6.0, 6.0, 6.0, 0.0])
    assert costs.pays(12, [6.0, 6.0, 6.0], others=1)
    least = 4 * (2 * MIN_SPEEDUP - 1)  # tokens that must be expected beside one of each row
    assert costs.pays(12, [least - 3.9, 2.0, 2.0], others=1)
    assert not costs.pays(12, [least - 4.1, 2.0, 2.0], others=1)

    drafter = Drafter(Speculative(num_tokens=3), 16)
    drafter.costs = costs
    repeats = [sequence([1, 2, 3, 4] * 4) for _ in range(3)]
    for seq in repeats:
        drafter._row(seq).learn(40, 40)
    assert drafter.drafts([*repeats, sequence([5, 6, 7, 8] * 4)]) == {}, "it might have gained"
    with_penalty = sequence([1, 2, 3, 4] * 4, presence_penalty=0.5)
    assert drafter.drafts([*repeats, with_penalty]).keys() == set(repeats)


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
