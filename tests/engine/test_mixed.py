"""Rows that decode join the prefill steps: the same tokens, and one in every step."""

import itertools
import random
from typing import Any

import pytest

from jpaged.engine.plan import StepResult
from jpaged.engine.policy import MOST_IN_A_ROW
from jpaged.engine.sequence import Sequence, Status
from tests.engine.host import CheckedScheduler, Host
from tests.engine.mock import expected, generated
from tests.engine.test_engine import FEW, workload

BUDGET = 8


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def running(depth: int, **settings) -> tuple[Host, Sequence]:
    """A host whose one row decodes."""
    host = Host(depth, max_num_batched_tokens=BUDGET, num_blocks=64, **settings)
    seq = host.add(prompt(5), 60)
    while not seq.num_generated:
        host.step()
    return host, seq


def gaps(host: Host, seq: Sequence, arrivals: list[tuple[int, int]], steps: int) -> list[int]:
    """Steps from each token of a row to its next one, while prompts of (length, step) arrive."""
    counts = []
    for step in range(steps):
        for length, when in arrivals:
            if step == when:
                host.add(prompt(length, step + 1), 3)
        host.step()
        counts.append(seq.num_generated)
    told = [step for step in range(1, steps) if counts[step] > counts[step - 1]]
    return [after - before for before, after in itertools.pairwise(told)]


def test_a_token_in_every_step_while_a_long_prompt_arrives(depth: int):
    arrivals = [(100, 5)]
    host, seq = running(depth, mixed=True)
    assert set(gaps(host, seq, arrivals, 30)) == {1}
    host.run()
    assert generated(seq) == expected(seq)
    host, seq = running(depth)
    assert max(gaps(host, seq, arrivals, 30)) == MOST_IN_A_ROW["prefill"] + 1
    host.run()
    assert generated(seq) == expected(seq)


def test_scenario_16_steady_arrivals(depth: int):
    host, seq = running(depth, mixed=True, max_num_seqs=6)
    assert set(gaps(host, seq, [(30, step) for step in range(40)], 45)) == {1}
    spans = [rows for phase, rows in host.runner.dispatched if phase == "prefill"]
    assert all(sum(end - start for start, end in rows) <= BUDGET for rows in spans)
    host.run()


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_the_same_tokens_with_and_without(depth: int, decode_steps: int):
    tokens = []
    for mixed in (False, True):
        before = CheckedScheduler.mixed
        host = Host(depth, mixed=mixed, max_num_batched_tokens=BUDGET, decode_steps=decode_steps)
        seqs = [host.add(prompt(7), 20, eos_ids=frozenset(range(0, 100, 9)), min_tokens=3)]
        for i in range(6):
            seqs += host.add_samples(prompt(3 + 5 * i, i), 1 + i % 3, 9)
            host.step()
        host.run()
        tokens.append([generated(seq) for seq in seqs])
        assert (CheckedScheduler.mixed > before) == mixed
    assert tokens[0] == tokens[1]


def test_prompts_wait_where_all_of_the_budget_decodes(depth: int):
    """With as many rows as a step has tokens, prefill and decode take turns."""
    host = Host(depth, mixed=True, max_num_batched_tokens=2, max_num_seqs=3, num_blocks=64)
    seqs = [host.add(prompt(3, i), 12) for i in range(5)]
    host.run()
    assert [generated(seq) for seq in seqs] == [expected(seq) for seq in seqs]


def test_a_row_that_stopped_on_the_device_draws_no_more():
    """Its stop is not known to the host yet when the mixed step after it is dispatched."""
    stop = expected(Host().sequence(prompt(5), 60))[7]
    host = Host(2, mixed=True, max_num_batched_tokens=BUDGET, num_blocks=64)
    seq = host.add(prompt(5), 60, stop_token_ids=[stop])
    results: list[StepResult] = []
    fetch = host.runner.fetch

    def watched(handle: Any) -> list[StepResult]:
        results.extend(fetched := fetch(handle))
        return fetched

    host.runner.fetch = watched
    while seq.num_generated < 3:
        host.step()
    host.add(prompt(90, 1), 3)
    while seq.status is not Status.FINISHED:
        host.step()
    assert generated(seq) == expected(seq) and seq.stop_reason == stop
    host.step()
    (last,) = [r for r in results if r.num_drawn == [0]]  # the chunk beside it draws nothing either
    assert results.index(last) == len(results) - 1
    host.run()


def test_an_open_block_is_copied_in_a_mixed_step(depth: int):
    host = Host(depth, mixed=True, max_num_batched_tokens=16, num_blocks=64)
    seqs = host.add_samples(prompt(10), 3)
    host.step()
    seqs.append(host.add(prompt(40, 1), 5))
    mixed = CheckedScheduler.mixed
    host.step()
    assert CheckedScheduler.mixed == mixed + 1 and host.engine.stats.copied_blocks == 2
    host.run()


def test_counts_of_a_mixed_step(depth: int):
    """Tokens are counted by what they are for, the step as a prefill."""
    host, _ = running(depth, mixed=True)
    before = host.engine.report()
    host.add(prompt(30, 1), 1)
    host.step()
    after = host.engine.report()
    assert after["prefill_steps"] - before["prefill_steps"] == 1
    assert after["prefill_tokens"] - before["prefill_tokens"] == BUDGET - 1
    assert after["decode_tokens"] - before["decode_tokens"] == 1
    host.run()


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_the_workload_passes(depth: int, decode_steps: int, seeds: range):
    for seed in seeds:
        workload(depth, seed, mixed=True, decode_steps=decode_steps)
