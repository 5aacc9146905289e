"""Who gets what: streams, calls and `step` on one LLM, whoever steps the engine."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM, CapacityError, CompletionChunk, RequestError, SamplingParams
from tests.tiny import ENGINE, assert_idle, assert_same, config, make_params, make_prompts

SETTINGS: dict[str, Any] = {**vars(ENGINE), "num_blocks": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=15, n=2, ignore_eos=True, logprobs=1)
PROMPTS = make_prompts(5, 9, 17, 3)


def make_llm(**settings: Any) -> LLM:
    return LLM(make_params(0, config(num_layers=1)), **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def kept() -> Iterator[LLM]:
    llm = make_llm()
    yield llm
    llm.close()


@pytest.fixture
def llm(kept: LLM) -> Iterator[LLM]:
    yield kept
    assert_idle(kept)


def tokens_of(chunks: list[CompletionChunk], request: int, index: int = 0) -> list[int]:
    mine = [c for c in chunks if (c.request_index, c.index) == (request, index)]
    assert [c.finish_reason is None for c in mine] == [True] * (len(mine) - 1) + [False]
    return [token for chunk in mine for token in chunk.token_ids_delta]


def generated(llm: LLM, prompts: Any, asked: Any) -> Any:
    return llm.generate(prompts, asked, use_tqdm=False)


STEPPERS: dict[str, Any] = {
    "generate": lambda llm: generated(llm, PROMPTS[2], GREEDY),
    "score": lambda llm: llm.score([PROMPTS[1]]),
    "beam_search": lambda llm: llm.beam_search(PROMPTS[1], 2, 20, use_tqdm=False),
    "step": lambda llm: [llm.step() for _ in range(30)],
    "stream": lambda llm: list(llm.stream(PROMPTS[2], GREEDY)),
}


@pytest.mark.parametrize("stepper", STEPPERS)
def test_a_stream_beside_what_else_steps(llm: LLM, stepper: str) -> None:
    """It gets all its pieces, and nobody else gets its request."""
    alone = generated(llm, PROMPTS[:2], SAMPLED)
    result = STEPPERS[stepper](llm)
    stream = llm.stream(PROMPTS[:2], SAMPLED)
    chunks = [next(stream)]
    beside = STEPPERS[stepper](llm)
    assert llm.step() == []
    chunks += list(stream)
    for i, output in enumerate(alone):
        for j, completion in enumerate(output.outputs):
            assert tokens_of(chunks, i, j) == completion.token_ids
    if stepper == "generate":
        assert_same(beside, result)
    assert llm.step() == [] and not llm.has_unfinished()


def test_what_add_request_queued_is_steps_alone(llm: LLM) -> None:
    """A stream and a call that step it to its end keep it for `step`."""
    (alone,) = generated(llm, PROMPTS[3], GREEDY)
    for stepper in ("generate", "stream", "beam_search"):
        name = llm.add_request(PROMPTS[3], GREEDY)
        STEPPERS[stepper](llm)
        while llm.session.engine.has_unfinished():
            assert llm.step() == []
        (found,) = llm.step()
        assert found.request_id == name and llm.step() == []
        assert_same([found], [alone])


def test_streams_side_by_side(llm: LLM) -> None:
    """Taken from in turns, and by fits and starts."""
    asked = [SamplingParams(seed=i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(4)]
    alone = generated(llm, PROMPTS, asked)
    rng = random.Random(0)
    streams = {i: llm.stream(PROMPTS[i], asked[i]) for i in range(4)}
    chunks: dict[int, list[CompletionChunk]] = {i: [] for i in range(4)}
    while streams:
        i = rng.choice(list(streams))
        try:
            chunks[i].append(next(streams[i]))
        except StopIteration:
            del streams[i]
    for i, output in enumerate(alone):
        assert tokens_of(chunks[i], 0) == output.outputs[0].token_ids


def test_a_stream_ends_as_its_requests_do(llm: LLM) -> None:
    """By an abort, and by the error of one of them, after the pieces that there are."""
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    llm.step()
    llm.update_params(llm.session.served.params, mode="abort")
    rest = list(stream)
    assert tokens_of([first, *rest], 0) and rest[-1].finish_reason == "abort"
    assert llm.step() == [], "it was the stream's"

    small = make_llm(num_blocks=6, max_num_seqs=2, seq_buckets=(2,))
    stream = small.stream(PROMPTS[2], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    chunks = []
    with pytest.raises(CapacityError, match="do not fit the KV pool of 6 blocks"):
        for chunk in stream:
            chunks.append(chunk)
            small.step()
    assert sum(len(chunk.token_ids_delta) for chunk in chunks) == 6 * 4 - 17 + 1
    assert_idle(small)
    small.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_stream_that_is_left(llm: LLM, closes: bool) -> None:
    """Closed, or forgotten in a cycle that the garbage collector finds: its requests end before
    anything else happens to the engine.
    """
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    if closes:
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
    assert not llm.has_unfinished() and llm.stats()["blocks_in_use"] == 0


# Ids


def test_the_llms_own_ids_are_no_callers(llm: LLM) -> None:
    """Whatever a caller calls its requests: before, beside and after those of other calls."""
    (alone,) = generated(llm, PROMPTS[0], GREEDY)
    names = [str(i) for i in range(100)]
    for name in names:
        llm.add_request(PROMPTS[0], GREEDY, request_id=name)
    for output in generated(llm, [PROMPTS[0]] * 100, GREEDY):
        assert output.error is None
    assert len(llm.score([PROMPTS[1]])) == 1
    done = {out.request_id: out for out in llm.step()}
    while llm.has_unfinished():
        done |= {out.request_id: out for out in llm.step()}
    assert list(done) == names or sorted(done) == sorted(names)
    assert_same(list(done.values()), [alone] * 100)


def next_id(llm: LLM, ahead: int) -> str:
    """What the LLM will call the request that it makes after so many others."""
    (output,) = generated(llm, PROMPTS[3], SamplingParams(max_tokens=1))
    stem, _, number = output.request_id.rpartition("-")
    return f"{stem}-{int(number) + 1 + ahead}"


def test_a_caller_that_guesses_an_own_id(llm: LLM) -> None:
    """The LLM takes another for its own request then; the caller's runs on."""
    (alone,) = generated(llm, PROMPTS[0], GREEDY)
    name = next_id(llm, ahead=1)
    llm.add_request(PROMPTS[0], GREEDY, request_id=name)  # makes a request, which takes a number
    (other,) = generated(llm, PROMPTS[1], SamplingParams(max_tokens=2))
    assert other.error is None and other.request_id != name
    done = []
    while llm.has_unfinished():
        done += llm.step()
    assert [out.request_id for out in done] == [name]
    assert_same(done, [alone])


def test_an_id_in_use_is_refused_and_its_request_runs_on(llm: LLM) -> None:
    llm.add_request(PROMPTS[0], GREEDY, request_id="mine")
    llm.step()
    with pytest.raises(RequestError, match="request_id 'mine' is in use"):
        llm.add_request(PROMPTS[1], GREEDY, request_id="mine")
    for bad in ("", 6, b"mine"):
        with pytest.raises(RequestError, match=r"request_id=.*: must be a str"):
            llm.add_request(PROMPTS[1], GREEDY, request_id=bad)  # pyright: ignore[reportArgumentType]
    done = []
    while llm.has_unfinished():
        done += llm.step()
    assert [out.request_id for out in done] == ["mine"]


def test_abort_ends_what_add_request_queued_alone(llm: LLM) -> None:
    """And not a stream's request, whose id nobody was given."""
    name = next_id(llm, ahead=0)
    stream = llm.stream(PROMPTS[0], GREEDY)
    chunks = [next(stream)]
    assert llm.session.engine.requests[name]
    assert llm.abort(name) is None
    chunks += list(stream)
    assert len(tokens_of(chunks, 0)) == 12


def test_a_failed_call_aborts_its_own_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By identity: a request that took the id of one of them since runs on."""
    add = llm.session.engine.add
    name = next_id(llm, ahead=0)
    queued: list[str] = []

    def interrupted(request: Any) -> None:
        add(request)
        llm.session.engine.remove(request)
        monkeypatch.undo()
        queued.append(llm.add_request(PROMPTS[0], GREEDY, request_id=name))
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.session.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generated(llm, PROMPTS[1], GREEDY)
    done = []
    while llm.has_unfinished():
        done += llm.step()
    assert [out.request_id for out in done] == queued == [name]
    assert done[0].outputs[0].finish_reason == "length"
