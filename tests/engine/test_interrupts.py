"""SCENARIO 15: a call that is interrupted on any line, and whoever goes on after it."""

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged.engine import engine
from jpaged.engine.sequence import Request, Sequence, Status
from jpaged.request.detokenizer import TextStream
from tests.engine.host import Host, Letters
from tests.engine.mock import expected, generated, next_kv, prompt_score

FOLDER = str(Path(engine.__file__).parent)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def requests(host: Host) -> list[Sequence]:
    """Shared prefixes, chunks, preemption, text, logprobs, stops: every path of a step."""
    eos = frozenset(expected(host.sequence(prompt(6, seed=1)))[4:5])
    return [
        host.sequence([*prompt(6), 1], 9, logprobs=2, text=TextStream(Letters(), stop=["never"])),
        host.sequence(prompt(6, seed=1), 9, eos_ids=eos),
        host.sequence([*prompt(6), 2], 7, prompt_logprobs=1, text=TextStream(Letters())),
        host.sequence([*prompt(6), 3], 5),
    ]


@contextlib.contextmanager
def interrupt_at(line: int) -> Iterator[None]:
    """KeyboardInterrupt before the given one of the lines that jpaged.engine executes in the block,
    counted from 0.
    """
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if FOLDER not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt  # which ends the tracing too
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted(host: Host, line: int) -> tuple[list[Sequence], bool]:
    """A host's requests, whose run was interrupted before a line, and whether the run was that
    long.
    """
    seqs = requests(host)
    try:
        with interrupt_at(line):
            for seq in seqs:
                host.engine.add(Request([seq]))
            for _ in range(500):
                if host.engine.requests:
                    host.engine.step()
    except KeyboardInterrupt:
        return seqs, True
    assert not host.engine.has_unfinished()
    assert host.engine.stats.preemptions.total()
    return seqs, False


def make_host(depth: int) -> Host:
    return Host(depth, num_blocks=8, max_num_batched_tokens=8)


# Every so many lines, with a stride that meets different lines of the loops each time around.
STRIDES = [
    pytest.param(997, id="few"),
    pytest.param(37, id="some", marks=pytest.mark.middle),
    pytest.param(11, id="many", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("stride", STRIDES)
def test_scenario_15_interrupted_on_any_line(depth: int, stride: int):
    """The call aborts its requests, as generate does; the next call must not notice."""
    for line in itertools.count(0, stride):
        host = make_host(depth)
        seqs, hit = interrupted(host, line)
        if not hit:
            assert line > 1000
            break
        for seq in seqs:
            host.engine.abort(seq.request_id)
        host.engine.replicas[0].check_integrity()
        assert not host.engine.has_unfinished() and host.engine.step() == [], line
        host.engine.replicas[0].check_integrity()
        assert host.blocks.num_used == 0
        for seq in (again := requests(host)):
            host.engine.add(Request([seq]))
        assert len(host.run()) == len(again)


@pytest.mark.parametrize("stride", STRIDES)
def test_scenario_15_stepping_on_after_an_interrupt(depth: int, stride: int):
    """Who goes on instead gets every stream, its text and its logprobs as if nothing had
    happened.
    """
    for line in itertools.count(0, stride):
        host = make_host(depth)
        seqs, hit = interrupted(host, line)
        host.engine.replicas[0].check_integrity()
        for seq in seqs:
            if seq.request_id not in host.engine.requests and seq.status is not Status.FINISHED:
                host.engine.add(Request([seq]))
        host.run()
        for seq in seqs:
            assert seq.status is Status.FINISHED and generated(seq) == expected(seq), line
            assert seq.generated.logprobs == [-t / 8 for t in generated(seq)]
            assert seq.text is None or seq.text.finish() == Letters().decode(generated(seq))
        assert [top[0] for top in seqs[0].generated.top_logprobs] == [
            (t, -t / 8, 1) for t in generated(seqs[0])
        ]
        kv = list(itertools.accumulate(seqs[2].token_ids[:7], next_kv, initial=0))[1:]
        scores = [top[0][1] for top in seqs[2].prompt_logprobs[1:] if top is not None]
        assert scores == [prompt_score(kv[i], seqs[2].token_ids[i + 1]) for i in range(6)]
        assert seqs[1].finish_reason == "stop"
        if not hit:
            break


@pytest.mark.parametrize("owner", ["runner", "engine", "third request"])
def test_scenario_15_interrupted_again_while_recovering(
    depth: int, owner: str, monkeypatch: pytest.MonkeyPatch
):
    host = Host(depth)
    seqs = [host.add(prompt(6, seed=i), max_tokens=7) for i in range(4)]
    for _ in range(3):
        host.step()
    target, method = {
        "runner": (host.runner, "recover"),
        "engine": (host.engine, "_new_replicas"),
        "third request": (seqs[2].request, "restart"),
    }[owner]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host.runner, "dispatch", _interrupt)
        patch.setattr(target, method, _interrupt)
        host.step()
    for seq in seqs[1:]:
        assert host.engine.abort(seq.request_id) is seq.request
        host.engine.replicas[0].check_integrity()
    assert host.run() == [seqs[0]] and generated(seqs[0]) == expected(seqs[0])
    host.generate(prompt(6), prompt(6, seed=1))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
