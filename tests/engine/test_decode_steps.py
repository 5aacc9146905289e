"""Several tokens of a row in one dispatch: the same streams, blocks allocated ahead, nothing past a
stop.
"""

import dataclasses
from collections.abc import Callable

import pytest

from jpaged.engine import commit, scheduler
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.prefix_cache import PrefixCache
from jpaged.engine.plan import PlanEntry, StepResult
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Sequence, Status
from jpaged.request.detokenizer import TextStream
from tests.engine.host import Host, Letters
from tests.engine.mock import ROOTS, expected, generated
from tests.engine.test_engine import FEW, workload

STEPS = (1, 4, 16)


def decodes(host: Host) -> list[list[tuple[int, int]]]:
    """(start, end) of each row of each decode so far."""
    return [spans for phase, spans in host.runner.dispatched if phase == "decode"]


def prompt(length: int, first: int = 1) -> range:
    return range(first, first + length)


@pytest.mark.parametrize("steps", STEPS)
def test_the_same_tokens_whatever_the_steps(depth: int, steps: int):
    host = Host(depth, decode_steps=steps)
    seqs = [host.add(prompt(3 + i, 10 * i), 6 + 7 * i) for i in range(4)]
    seqs += [host.add(prompt(5, 70), 30, eos_ids=frozenset(range(0, 100, 9)), min_tokens=3)]
    host.run()
    assert [generated(seq) for seq in seqs] == [expected(seq) for seq in seqs]
    assert seqs[-1].finish_reason == "stop"
    if steps > 1:
        assert max(end - start for spans in decodes(host) for start, end in spans) == min(steps, 26)


def test_fewer_dispatches(depth: int):
    counts = []
    for steps in STEPS:
        host = Host(depth, decode_steps=steps)
        host.generate(prompt(3), max_tokens=33)
        counts.append(len(decodes(host)))
        stats = host.engine.report()
        assert (stats["decode_steps"], stats["decode_tokens"]) == (32, 32) and stats[
            "dispatches"
        ] == counts[-1] + 1
        assert stats["step_sizes"] == {"prefill": {3: 1}, "decode": {1: 32}}
    assert counts == [32, 8, 2]


def test_a_stop_ends_the_row_within_its_dispatch(depth: int):
    """And the dispatch that is already under way leaves the row out."""
    host = Host(depth, decode_steps=8)
    probe = host.generate(prompt(4), max_tokens=30)[0]
    stop = generated(probe)[11]
    at = generated(probe).index(stop)
    host.runner.dispatched.clear()
    seq = host.generate(prompt(4), max_tokens=30, stop_token_ids=[stop])[0]
    assert generated(seq) == generated(probe)[: at + 1] and seq.stop_reason == stop
    written = [span for spans in decodes(host) for span in spans]
    assert sum(end - start for start, end in written) == at  # the last token's KV is nobody's need
    assert len(written) == -(-at // 8) + (depth - 1) and (
        depth == 1 or written[-1][0] == written[-1][1]
    )


def test_tokens_after_a_stop_string_are_surplus(depth: int):
    alone = Host(depth).generate(prompt(4), max_tokens=20)[0]
    text = "".join(chr(ord("a") + t % 26) for t in generated(alone))
    stop = text[6:8]
    host = Host(depth, decode_steps=16)
    stream = TextStream(Letters(), stop=[stop])
    seq = host.add(prompt(4), 20, text=stream)
    host.run()
    assert generated(seq) == generated(alone)[: text.index(stop) + 2] and seq.stop_reason == stop


def test_more_stop_ids_than_the_device_is_told(depth: int):
    host = Host(depth, decode_steps=8, max_stop_ids=2)
    seq = host.generate(prompt(4), max_tokens=30, eos_ids=frozenset(range(0, 100, 7)))[0]
    assert generated(seq) == expected(seq) and seq.finish_reason == "stop"


def test_blocks_ahead_preempt_nobody(depth: int):
    """8 blocks of 4, two rows of 9 tokens: each may be 16 long, so neither gets all of its 16 steps
    at once.
    """
    host = Host(depth, decode_steps=16, num_blocks=8)
    seqs = [host.add(prompt(9, first), 8) for first in (1, 40)]
    host.run()
    assert host.engine.replicas[0].queues.preemptions.total() == 0 and all(
        seq.finish_reason == "length" for seq in seqs
    )
    crowded = Host(depth, decode_steps=16, num_blocks=7, enable_prefix_caching=False)
    seqs = [crowded.add(prompt(9, first), 8) for first in (1, 40)]
    while not decodes(crowded):
        crowded.step()
    assert [end - start for start, end in decodes(crowded)[0]] == [
        7,
        3,
    ]  # one block was left, and the first row has it
    crowded.run()
    assert [generated(seq) for seq in seqs] == [expected(seq) for seq in seqs]


def test_beams_take_one_step_at_a_time():
    host = Host(decode_steps=8, max_logprobs=12)
    host.add_beams(ROOTS[0][:5], 2, 6)
    host.run()
    assert all(end - start == 1 for spans in decodes(host) for start, end in spans)


def all_drawn_is_kept(patch: pytest.MonkeyPatch) -> None:
    """What comes after a stop string, an unknown stop id or an abort is appended too."""

    def mutated(queues: Queues, entry: PlanEntry, row: int, result: StepResult) -> None:
        for step in range(result.num_drawn[row]):
            entry.seq.status = Status.RUNNING
            commit._append(queues, entry.seq, row, step, result)

    patch.setattr(commit, "_append_drawn", mutated)


def no_blocks_ahead(patch: pytest.MonkeyPatch) -> None:
    def mutated(blocks: BlockManager, seq: Sequence, most: int, *, one_by_one: bool = True) -> int:
        with patch.context() as within:
            within.setattr(blocks, "extend", lambda *args, one_by_one: None)
            return steps_ahead(blocks, seq, most, one_by_one=one_by_one)

    steps_ahead = scheduler._steps_ahead
    patch.setattr(scheduler, "_steps_ahead", mutated)


def drawn_once(patch: pytest.MonkeyPatch) -> None:
    """All tokens of a dispatch count as one in flight."""

    dispatch = Sequence.dispatch
    patch.setattr(Sequence, "dispatch", lambda self, end, draws: dispatch(self, end, min(draws, 1)))


def hashed_too_early(patch: pytest.MonkeyPatch) -> None:
    """A block is hashed when its last token is drawn, before that token's KV is written."""

    def mutated(queues: Queues, entry: PlanEntry, row: int, result: StepResult) -> None:
        append(queues, dataclasses.replace(entry, start=entry.start + 1), row, result)

    append = commit._append_drawn
    patch.setattr(commit, "_append_drawn", mutated)


def never_hashed(patch: pytest.MonkeyPatch) -> None:
    close = PrefixCache.close
    patch.setattr(
        PrefixCache, "close", lambda self, seq, n, _=None: close(self, seq, min(n, seq.prompt_len))
    )


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize("steps", STEPS[1:])
def test_the_workload_passes(depth: int, steps: int, seeds: range):
    for seed in seeds:
        workload(depth, seed, decode_steps=steps)


MUTATIONS = (all_drawn_is_kept, no_blocks_ahead, drawn_once, hashed_too_early)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_broken_rule_is_noticed(depth: int, mutate: Callable, monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(6):
            workload(depth, seed, decode_steps=4, max_stop_ids=1)


def test_generated_blocks_are_found_again(depth: int, monkeypatch: pytest.MonkeyPatch):
    def cached() -> int:
        host = Host(depth, decode_steps=4)
        first = host.generate(prompt(6), max_tokens=11)[0]
        return host.generate(first.token_ids, max_tokens=2)[0].num_cached

    assert cached() == 16  # of 17: the last token's KV was not written
    never_hashed(monkeypatch)
    assert cached() == 4
