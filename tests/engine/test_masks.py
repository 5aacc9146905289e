"""Rows that draw under masks: each as if alone, in step with those that need none."""

import contextlib
import random
from typing import Any

import pytest

from jpaged.errors import RequestError
from tests.engine.host import Host
from tests.engine.mock import ROOTS, Form, expected, generated
from tests.engine.test_interrupts import interrupt_at
from tests.engine.test_replicas import Team

KINDS: list[dict[str, Any]] = [
    {},
    {"separate_draw": True},
    {"decode_steps": 3},
    {"mixed": True},
    {"deterministic": True},
    {"num_blocks": 14},
    {"num_blocks": 14, "swap_space_gib": 1.0, "swap_min_tokens": 1},
]


def fill(host: Host, rng: random.Random, count: int = 7) -> list[Any]:
    """Sequences with and without a form, in no order, two of them of one request."""
    added = []
    for i in range(count):
        prompt = [*ROOTS[i % 2][: rng.randrange(1, 12)], 90 + i % 3]
        how: dict[str, Any] = {"max_tokens": rng.randrange(1, 14)}
        how |= {
            "eos_ids": frozenset({7, 8, 9}),
            "min_tokens": min(rng.randrange(4), how["max_tokens"]),
        }
        if i % 3:
            how["structured"] = Form(frozenset({7, 8, 9}))
        added.append(host.add(prompt, **how))
        for _ in range(rng.randrange(3)):
            host.step()
    return added


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_as_if_alone(kind: dict[str, Any], depth: int) -> None:
    for seed in range(4):
        host = Host(depth, **kind)
        fill(host, random.Random(seed))
        host.run()  # which compares each with what it gets alone


@pytest.mark.parametrize(
    "settings", [{}, {"separate_draw": True}, {"decode_steps": 3}, {"mixed": True}]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_replicas(settings: dict[str, Any], depth: int) -> None:
    for seed in range(3):
        team = Team(2, depth, **settings)
        fill(team, random.Random(seed), count=10)
        team.run()


def test_the_model_runs_before_the_tokens_are_known() -> None:
    """A step of masked rows is dispatched while the one before it is in flight."""
    host = Host(2)
    host.add(ROOTS[0][:6], 8, structured=Form())
    seen = []
    for _ in range(6):
        host.step()
        seen.append(len(host.engine.in_flight))
    assert seen == [1] * 6
    assert host.runner.calls["draw"] == 6 == host.runner.calls["fetch"] + 1


def test_a_form_that_fails_ends_its_sequence_alone() -> None:
    for depth in (1, 2):
        host = Host(depth)
        bad = host.add(ROOTS[0], 9, structured=Form(fails_after=6))
        good = host.add(ROOTS[1], 9, structured=Form())
        host.run()
        assert isinstance(bad.error, RequestError) and "out of words" in str(bad.error)
        assert len(generated(bad)) == 6 and good.error is None


@pytest.mark.parametrize("call", ["dispatch", "draw", "fetch"])
def test_a_failed_call_leaves_no_leftovers(call: str) -> None:
    for at in range(1, 5):
        host = Host(2)
        host.runner.fail = {(call, at)}
        seqs = [host.add(ROOTS[i % 2], 6, structured=Form() if i else None) for i in range(3)]
        with pytest.raises(RuntimeError, match=call):
            host.run()
        host.runner.fail = set()
        host.run()
        assert all(seq.finish_reason == "length" for seq in seqs)


def test_an_interrupt_anywhere_leaves_no_leftovers() -> None:
    for line in range(0, 2400, 97):
        host = Host(2)
        seqs = [host.add(ROOTS[i % 2], 6, structured=Form() if i else None) for i in range(3)]
        with contextlib.suppress(KeyboardInterrupt), interrupt_at(line):
            host.run()
        host.run()
        assert all(seq.finish_reason == "length" for seq in seqs), line
        assert all(generated(seq) == expected(seq) for seq in seqs), line


def test_snapshots_hold_where_each_stands() -> None:
    host = Host(2)
    seqs = [host.add(ROOTS[i % 2], 9, structured=Form()) for i in range(3)]
    for _ in range(4):
        host.step()
    state = host.engine.snapshot()
    host.run()
    for _ in range(2):
        host.engine.restore(state)
        ended = host.run()
        assert sorted(generated(s) for s in ended) == sorted(generated(s) for s in seqs)


def test_what_is_certain_is_taken_side_by_side() -> None:
    """Three tokens of six are: the steps are as few as that allows, and the tokens the same."""
    kinds: list[Any] = [{}, {"separate_draw": True}, {"mixed": True}, {"deterministic": True}]
    for kind in kinds:
        host = Host(2, max_num_seqs=32, max_num_batched_tokens=32, **kind)
        seqs = [host.add(ROOTS[i % 2][:6], 24, structured=Form()) for i in range(3)]
        host.run()
        spans = [span for _, step in host.runner.dispatched for span in step]
        longest = max(end - start for start, end in spans if start >= 6)
        assert longest == 3 and len(host.runner.dispatched) < 20
        assert all(generated(seq) == expected(seq) for seq in seqs)


def test_a_row_without_a_form_keeps_its_steps() -> None:
    """Beside masked rows it decodes in every step, as they do."""
    host = Host(2)
    host.add(ROOTS[0][:6], 8)
    host.add(ROOTS[1][:6], 8, structured=Form())
    host.run()
    assert len(host.runner.dispatched) == 8  # as many as it draws tokens


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_rows_of_a_form_guess_too(method: str) -> None:
    """Each draw of a run under its own mask, also where the form refuses a guess, or fails after
    it; beams beside them wait as ever.
    """
    how = {"method": method, "num_tokens": 3, "adaptive": False}
    sizes: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 32,
        "max_logprobs": 12,
    }
    host = Host(2, speculative=how, num_blocks=64, **sizes)
    seqs = [host.add(ROOTS[i % 2][:6], 24, structured=Form() if i else None) for i in range(3)]
    bad = host.add(ROOTS[0], 12, structured=Form(fails_after=7))
    host.add_beams(ROOTS[1], 2)
    host.run()
    assert all(generated(seq) == expected(seq) for seq in seqs)
    assert isinstance(bad.error, RequestError) and bad.num_generated == 7
    report = host.engine.report()
    assert 10 < report["accepted_tokens"] < report["drafted_tokens"]
