"""AsyncLLM: the tokens of LLM, streams, aborts, errors, and nothing left behind."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import (
    LLM,
    AsyncLLM,
    ConfigError,
    PeerError,
    RequestError,
    SamplingParams,
    engine_thread,
)
from jpaged.engine.integrity import check
from tests import tiny
from tests.tiny import ENGINE, assert_same_completion, make_params, make_prompts

SETTINGS: dict[str, Any] = {
    name: getattr(ENGINE, name)
    for name in (
        *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
        *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
    )
}
SAMPLED = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)


def make_llm(seed: int = 0) -> LLM:
    return LLM(make_params(seed), **SETTINGS)


@pytest.fixture(scope="module")
def expected() -> Iterator[LLM]:
    llm = make_llm()
    yield llm
    llm.close()


def run(work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    """Do some work with a model of its own; then nothing of it is left in the engine."""

    async def main() -> Any:
        async with AsyncLLM(make_llm()) as llm:
            result = await work(llm)
            if llm.error is None:
                await assert_nothing_left(llm)
            return result

    return asyncio.run(main())


async def assert_nothing_left(llm: AsyncLLM) -> None:
    def left(llm: LLM) -> tuple[int, int, int]:
        engine: Any = llm.session.engine
        check(engine.replicas[0].queues)
        report = llm.stats()
        return len(engine.requests), report["blocks_in_use"], report["sequences_running"]

    assert await llm.call(left) == (0, 0, 0)


def added_up(chunks: list[jpaged.CompletionChunk], n: int) -> list[jpaged.CompletionOutput]:
    """Completions of their pieces."""
    found = []
    for i in range(n):
        own = [chunk for chunk in chunks if chunk.index == i]
        assert [c.finish_reason is not None for c in own] == [False] * (len(own) - 1) + [True]
        pieces = [chunk.text_delta for chunk in own]
        logprobs = [x for c in own for x in c.token_logprobs_delta]
        tops = [c.logprobs_delta for c in own]
        found.append(
            jpaged.CompletionOutput(
                index=i,
                text=None if None in pieces else "".join(p or "" for p in pieces),
                token_ids=[t for chunk in own for t in chunk.token_ids_delta],
                token_logprobs=np.array(logprobs, np.float32),
                cumulative_logprob=sum(logprobs),
                logprobs=None if None in tops else [x for top in tops for x in top or []],
                finish_reason=own[-1].finish_reason,  # pyright: ignore[reportArgumentType]
                stop_reason=own[-1].stop_reason,
            )
        )
    return found


async def streamed(llm: AsyncLLM, prompt: Any, asked: SamplingParams) -> Any:
    chunks = [chunk async for chunk in llm.generate(prompt, asked)]
    return added_up(chunks, asked.n)


def test_pieces_and_whole_are_those_of_llm(expected: LLM):
    """With a seed, whatever runs beside; n, logprobs and stop ids too."""
    prompts = make_prompts(5, 9, 3, 14, 8, 8)
    asked = [
        SAMPLED,
        SamplingParams(n=3, seed=3, max_tokens=6, logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[*range(0, 96, 3)]),
        *[SAMPLED] * 3,
    ]
    whole = expected.generate(prompts, asked, use_tqdm=False)

    async def both(llm: AsyncLLM) -> tuple[list[Any], list[Any]]:
        one = [llm.complete(p, a) for p, a in zip(prompts, asked, strict=True)]
        other = [streamed(llm, p, a) for p, a in zip(prompts, asked, strict=True)]
        return await asyncio.gather(*one), await asyncio.gather(*other)

    completed, pieces = run(both)
    for output, own, chunks in zip(whole, completed, pieces, strict=True):
        for a, b, c in zip(output.outputs, own.outputs, chunks, strict=True):
            assert_same_completion(b, a)
            assert_same_completion(c, a)


def test_without_seeds_it_draws_as_llm_does():
    """The calls of one object are counted into the seed; the first is the first of LLM."""
    prompt, asked = make_prompts(6)[0], SamplingParams(max_tokens=10)
    llm = make_llm()
    tokens = [llm.generate([prompt], asked, use_tqdm=False)[0].outputs[0].token_ids for _ in "12"]
    llm.close()

    async def twice(llm: AsyncLLM) -> Any:
        return [(await llm.complete(prompt, asked)).outputs[0].token_ids for _ in "12"]

    assert run(twice) == tokens and tokens[0] != tokens[1]


def test_a_stream_that_is_left_is_aborted_and_others_go_on(expected: LLM):
    [prompt, other] = make_prompts(10, 7)
    alone = expected.generate([other], LONG, use_tqdm=False)[0].outputs[0]

    async def leave(llm: AsyncLLM) -> None:
        going_on = asyncio.create_task(llm.complete(other, LONG))
        stream = llm.generate(prompt, LONG)
        async for chunk in stream:
            assert chunk.finish_reason is None
            break
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        cancelled = asyncio.create_task(llm.complete(prompt, LONG))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert_same_completion((await going_on).outputs[0], alone)

    run(leave)


def test_aborts_at_any_moment_leave_nothing(expected: LLM):
    """Before the prompt is made, while it waits, between steps; more rows than run at once."""
    prompts = make_prompts(*range(3, 35))

    async def many(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(llm.complete(p, LONG)) for p in prompts]
        for i, task in enumerate(tasks):
            if i % 4:
                await asyncio.sleep(0.001 * (i % 4 - 1))
                task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(ended[i], jpaged.RequestOutput) for i in range(0, 32, 4))
        assert any(isinstance(e, asyncio.CancelledError) for e in ended)

    run(many)


def test_errors_are_their_own_requests(expected: LLM):
    prompt = make_prompts(6)[0]
    alone = expected.generate([prompt], SAMPLED, use_tqdm=False)[0].outputs[0]

    async def bad(llm: AsyncLLM) -> None:
        good = asyncio.create_task(llm.complete(prompt, SAMPLED))
        for broken, asked in (([99], SAMPLED), ([1] * 64, SAMPLED), ("text", SAMPLED), ([], None)):
            with pytest.raises(RequestError):
                await llm.complete(broken, asked)
        with pytest.raises(RequestError, match="temperature"):
            async for _ in llm.generate(prompt, SamplingParams(temperature=-1)):
                pass
        assert_same_completion((await good).outputs[0], alone)

    run(bad)


class Trouble(RuntimeError):
    pass


def break_steps(llm: LLM, error: BaseException, times: int) -> None:
    """Have the next dispatches raise."""
    runner: Any = llm.session.runner
    whole, left = runner.dispatch, [times]

    def dispatch(batch: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise error
        return whole(batch)

    runner.dispatch = dispatch


def test_a_step_that_fails_once_is_taken_again(expected: LLM, caplog: Any):
    prompt = make_prompts(9)[0]
    alone = expected.generate([prompt], SAMPLED, use_tqdm=False)[0].outputs[0]

    async def work(llm: AsyncLLM) -> None:
        await llm.call(break_steps, Trouble("of one step"), 1)
        [again] = await streamed(llm, prompt, SAMPLED)
        assert_same_completion(again, alone)

    run(work)
    assert "a step failed" in caplog.text


def test_steps_that_go_on_failing_end_what_runs_and_nothing_else(expected: LLM):
    prompt = make_prompts(9)[0]
    alone = expected.generate([prompt], SAMPLED, use_tqdm=False)[0].outputs[0]

    async def work(llm: AsyncLLM) -> None:
        await llm.call(break_steps, Trouble("of two steps"), 2)
        ended = await asyncio.gather(
            llm.complete(prompt, LONG), streamed(llm, prompt, LONG), return_exceptions=True
        )
        assert Trouble in map(type, ended)
        assert_same_completion((await llm.complete(prompt, SAMPLED)).outputs[0], alone)

    run(work)


def test_a_peer_that_is_gone_ends_the_thread():
    async def work(llm: AsyncLLM) -> None:
        await llm.call(break_steps, PeerError("process 1 is gone"), 1)
        with pytest.raises(PeerError):
            await llm.complete([1, 2, 3])
        assert isinstance(llm.error, PeerError)
        with pytest.raises(PeerError):
            await llm.complete([1, 2, 3])

    run(work)


def test_calls_run_between_steps(expected: LLM):
    """New weights are the next request's; with mode="abort" what runs ends at once."""
    prompt, fresh = make_prompts(9)[0], make_params(1)
    other = LLM(fresh, **SETTINGS)
    alone = other.generate([prompt], SAMPLED, use_tqdm=False)[0].outputs[0]
    other.close()

    async def work(llm: AsyncLLM) -> None:
        stream = llm.generate(prompt, LONG)
        await anext(stream)
        with pytest.raises(RequestError, match="unfinished"):
            await llm.call(LLM.update_params, fresh)
        await llm.call(lambda llm: llm.update_params(fresh, mode="abort"))
        rest = [chunk async for chunk in stream]
        assert sum(len(chunk.token_ids_delta) for chunk in rest) < 49
        assert [chunk.finish_reason for chunk in rest][-1] == "abort"
        assert_same_completion((await llm.complete(prompt, SAMPLED)).outputs[0], alone)
        with pytest.raises(ZeroDivisionError):
            await llm.call(lambda llm: 1 // 0)

    run(work)


STEPPING: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(make_prompts(20), LONG, use_tqdm=False),
    "beam_search": lambda llm: llm.beam_search(make_prompts(5), 2, 60, use_tqdm=False),
    "score": lambda llm: llm.score(make_prompts(60, 61, 62)),
    "stream": lambda llm: list(llm.stream(make_prompts(9), LONG)),
    "step": lambda llm: [llm.step() for _ in range(60)],
}


@pytest.mark.parametrize("stepping", STEPPING)
def test_calls_that_step_cut_nothing_off(expected: LLM, stepping: str):
    """Streams and whole requests that end in the steps of another call get all that is theirs; and
    the pieces come while that call still runs.
    """
    prompts = make_prompts(9, 4, 13)
    asked = SamplingParams(max_tokens=40, ignore_eos=True, seed=2, n=2)
    alone = expected.generate(prompts, asked, use_tqdm=False)
    calls = STEPPING[stepping]
    result = calls(expected)

    async def work(llm: AsyncLLM) -> None:
        streams = [asyncio.create_task(streamed(llm, prompt, asked)) for prompt in prompts]
        whole = [asyncio.create_task(llm.complete(prompt, asked)) for prompt in prompts]
        first = llm.generate(prompts[0], asked)
        chunks = [await anext(first)]
        for _ in range(2):
            found = await llm.call(calls)
            if stepping == "generate":
                tiny.assert_same(found, result)
        chunks += [chunk async for chunk in first]
        for output, completions in zip(alone, await asyncio.gather(*streams), strict=True):
            for one, other in zip(completions, output.outputs, strict=True):
                assert_same_completion(one, other)
        tiny.assert_same(list(await asyncio.gather(*whole)), alone)
        for one, other in zip(added_up(chunks, 2), alone[0].outputs, strict=True):
            assert_same_completion(one, other)

    run(work)


def test_pieces_come_while_another_call_steps(expected: LLM):
    """Of a stream beside a call of more tokens than it has."""
    prompt = make_prompts(9)[0]
    seen: list[int] = []

    async def work(llm: AsyncLLM) -> None:
        async def watch() -> None:
            async for chunk in llm.generate(prompt, SamplingParams(max_tokens=20, seed=1)):
                seen.append(len(chunk.token_ids_delta))

        def step_until_it_has_come(llm: LLM) -> int:
            name = llm.add_request(prompt, LONG)
            steps = 0
            while len(seen) < 5 and steps < 10_000:
                llm.step()
                steps += 1
                time.sleep(0.001)
            llm.abort(name)
            return steps

        watching = asyncio.create_task(watch())
        while not seen:
            await asyncio.sleep(0.001)
        assert await llm.call(step_until_it_has_come) < 10_000
        await watching

    run(work)


def test_a_restore_ends_streams_with_an_error():
    """And what the snapshot has of them is for `step`."""
    prompt = make_prompts(9)[0]

    async def work(llm: AsyncLLM) -> None:
        stream = llm.generate(prompt, LONG)
        await anext(stream)
        whole = asyncio.create_task(llm.complete(prompt, LONG))
        await asyncio.sleep(0)
        snapshot = await llm.call(LLM.snapshot)
        await llm.call(LLM.restore, snapshot)
        with pytest.raises(RequestError, match="restored to a snapshot"):
            async for _ in stream:
                pass
        with pytest.raises(RequestError, match="restored to a snapshot"):
            await whole

        def finish(llm: LLM) -> list[Any]:
            done = []
            while llm.has_unfinished():
                done += llm.step()
            return done

        assert {len(out.outputs[0].token_ids) for out in await llm.call(finish)} == {50}

    run(work)


def test_what_a_call_queues_is_for_its_own_steps(expected: LLM):
    prompt = make_prompts(9)[0]
    alone = expected.generate([prompt], SAMPLED, use_tqdm=False)

    async def work(llm: AsyncLLM) -> None:
        stream = llm.generate(prompt, LONG)
        await anext(stream)
        name = await llm.call(LLM.add_request, prompt, SAMPLED)
        assert [chunk async for chunk in stream][-1].finish_reason == "length"
        found = await llm.call(LLM.step)
        assert [out.request_id for out in found] == [name]
        tiny.assert_same(found, alone)

    run(work)


def test_event_loops_of_several_threads_and_one_that_ends(expected: LLM):
    prompt = make_prompts(9)[0]
    alone = expected.generate([prompt], SAMPLED, use_tqdm=False)[0].outputs[0]

    async def work(llm: AsyncLLM) -> None:
        here = asyncio.create_task(llm.complete(prompt, SAMPLED))
        there = asyncio.to_thread(lambda: asyncio.run(llm.complete(prompt, SAMPLED)))
        for output in (await there, await here):
            assert_same_completion(output.outputs[0], alone)

        async def give_up() -> None:
            await asyncio.wait_for(llm.complete(prompt, LONG), 0.005)

        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(lambda: asyncio.run(give_up()))

        def forget() -> None:  # a loop that is closed over running tasks
            loop = asyncio.new_event_loop()
            task = loop.create_task(llm.complete(prompt, LONG))
            loop.run_until_complete(asyncio.sleep(0.005))
            loop.close()
            task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]

        await asyncio.to_thread(forget)
        await llm.complete(prompt, LONG)

    run(work)


def test_closing_tells_what_runs():
    async def main() -> None:
        llm = AsyncLLM(make_llm())
        running = asyncio.create_task(llm.complete([1, 2, 3], LONG))
        stream = llm.generate([1, 2, 3], LONG)
        await anext(stream)
        await llm.close()
        with pytest.raises(ConfigError, match="closed"):
            await running
        with pytest.raises(ConfigError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(ConfigError, match="closed"):
            await llm.complete([1, 2, 3])

    asyncio.run(main())


def test_what_it_cannot_be_made_of(expected: LLM):
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM(expected, max_num_seqs=3)
    name = expected.add_request([1, 2, 3])
    with pytest.raises(ConfigError, match="unfinished"):
        AsyncLLM(expected)
    expected.abort(name)


def test_the_first_step_waits_for_who_is_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prompts are in it; who does not come is waited for no longer than a moment."""
    prompts = make_prompts(5, 7)

    async def work(llm: AsyncLLM) -> None:
        monkeypatch.setattr(engine_thread, "GATHER_S", 30.0)
        monkeypatch.setattr(engine_thread, "COMING_S", 0.001)
        with contextlib.closing(llm.expect()) as coming:
            first = asyncio.create_task(llm.complete(prompts[0], SAMPLED))
            while not llm._thread._jobs:
                await asyncio.sleep(0.001)
            async with llm.run([prompts[1]], SAMPLED, coming=coming) as inbox:
                await inbox.take()
                await first
        assert llm.stats()["prefill_steps"] == 1
        monkeypatch.setattr(engine_thread, "GATHER_S", 0.02)
        with contextlib.closing(llm.expect()):  # and never runs
            await llm.complete(prompts[0], SAMPLED)

    run(work)


def test_a_step_behind_prompts_waits_for_who_is_coming(
    expected: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the device is at a prefill, and not while it decodes."""
    monkeypatch.setattr(engine_thread, "GATHER_S", 30.0)
    thread = engine_thread.EngineThread(expected.session)  # not started: this thread is it

    def job(length: int) -> engine_thread.Delivery:
        (prompt,) = make_prompts(length)
        request = expected.session.request(prompt, LONG, expected.keys.next())
        return engine_thread.Delivery(request, inbox, 0, None)

    async def new_inbox() -> engine_thread.Inbox:
        return engine_thread.Inbox()

    inbox = asyncio.run(new_inbox())

    long, other = job(2 * SETTINGS["max_num_batched_tokens"]), job(5)
    thread._add(long, None)
    thread._step()
    assert expected.session.engine.in_flight.has_prefill
    coming = engine_thread.Coming(thread)
    arrives = threading.Timer(0.1, lambda: (thread.add([other]), coming.close()))
    arrives.start()
    thread._obey(wait=False)
    arrives.join()
    assert set(thread._jobs) == {long.request, other.request}
    while expected.session.engine.in_flight.has_prefill:
        thread._step()
    with contextlib.closing(engine_thread.Coming(thread)):
        began = time.monotonic()
        thread._obey(wait=False)
        assert time.monotonic() - began < 15
    thread.abort([long, other])
    thread._obey(wait=False)
    assert not thread._jobs
