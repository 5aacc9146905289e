"""Long tails: a rollout leaves off when enough have ended, and an output that was cut is a prompt
that goes on as if it had not been.
"""

import asyncio
import dataclasses
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from jpaged.engine.keys import fold_in
from jpaged.rollout import AsyncRollout
from tests import byte_tokenizer
from tests.tiny import ENGINE, assert_idle, assert_same, config, make_params, make_prompts

SETTINGS: dict[str, Any] = {**vars(ENGINE), "max_model_len": 64}
PROMPTS = make_prompts(5, 9, 17, 3)
# Each with what is counted from the first token on.
ASKED = [
    SamplingParams(temperature=0, max_tokens=24, min_tokens=20),
    SamplingParams(n=3, seed=7, max_tokens=24, top_p=0.9, logprobs=2, prompt_logprobs=1),
    SamplingParams(
        n=2, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True
    ),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, logprobs_mode="tempered"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    tokenizer = byte_tokenizer.make_tokenizer()
    llm = LLM(byte_tokenizer.params(), tokenizer=tokenizer, **SETTINGS)
    yield llm
    llm.close()


def cut_after(llm: LLM, requests: list[Any], steps: int) -> list[RequestOutput]:
    """The outputs of requests that are aborted after so many steps, or have ended before."""
    prompts = [llm.session.request(*request) for request in requests]
    names = [llm.session.add(request) for request in prompts]
    outputs = {out.request_id: out for _ in range(steps) for out in llm.step()}
    for name in names:
        if name not in outputs and (output := llm.abort(name)) is not None:
            outputs[name] = output
    outputs |= {out.request_id: out for out in llm.step()}
    return [outputs[name] for name in names]


def asked_of(llm: LLM, seed: int) -> list[Any]:
    """The requests of `generate` by this seed."""
    key = llm.keys.of(seed)
    return [(p, s, fold_in(key, i)) for i, (p, s) in enumerate(zip(PROMPTS, ASKED, strict=True))]


@pytest.mark.middle
def test_what_was_cut_goes_on_as_if_it_had_not_been(llm: LLM) -> None:
    """Cut at any step, twice, and pickled in between; greedy and seeded, with several samples of
    which some have ended, penalties, a least number of tokens, scored prompts and alternatives.
    """
    whole = llm.generate(PROMPTS, ASKED, seed=3, use_tqdm=False)
    before = llm.stats()["generated_tokens"]
    for steps in (0, 1, 3, 9, 40):
        cut = cut_after(llm, asked_of(llm, 3), steps)
        assert any(out.unfinished for out in cut) == (steps < 40)
        again: list[RequestOutput] = pickle.loads(pickle.dumps(cut))
        names = [llm.add_request(out, asked) for out, asked in zip(again, ASKED, strict=True)]
        ended: dict[str, RequestOutput] = {}
        for _ in range(3):
            ended |= {out.request_id: out for out in llm.step()}
        again = [ended.get(name) or llm.abort(name) for name in names]  # pyright: ignore
        outs = llm.generate(again, ASKED, seed=99, use_tqdm=False)
        assert_same(outs, whole)
        for out, want in zip(outs, whole, strict=True):
            assert out.unfinished is None and out.weight_version == want.weight_version
            assert [c.weight_versions for c in out.outputs] == [
                c.weight_versions for c in want.outputs
            ]
            assert (out.prompt_logprobs is None) == (want.prompt_logprobs is None)
            assert len(out.prompt_logprobs or ()) == len(want.prompt_logprobs or ())
        # Each token is counted once.
        drawn = sum(len(c.token_ids) for out in whole for c in out.outputs)
        assert llm.stats()["generated_tokens"] - before == drawn
        before += drawn
    assert_idle(llm)


def test_a_rollout_leaves_off_when_enough_have_ended(llm: LLM) -> None:
    """Whole groups, in order of ending; the rest, with fresh prompts, goes on to the tokens that it
    would have had.
    """
    lengths = [30, 6, 18, 9]
    asked = [SamplingParams(n=2, max_tokens=n, ignore_eos=True) for n in lengths]
    whole = llm.generate(PROMPTS, asked, seed=5, use_tqdm=False)
    with llm.rollout(PROMPTS, asked, enough=2, seed=5) as done:
        with pytest.raises(RequestError, match="rest: there once"):
            _ = done.rest
        groups = list(done)
    assert [group.index for group in groups] == [1, 3]
    assert_same(groups, [whole[1], whole[3]])
    assert list(done) == [] and [out.index for out in done.rest] == [0, 2]
    for out in done.rest:
        assert {c.finish_reason for c in out.outputs} == {"abort"} and out.unfinished
        for c, want in zip(out.outputs, whole[out.index].outputs, strict=True):
            assert 0 < len(c.token_ids) < lengths[out.index]
            assert c.token_ids == want.token_ids[: len(c.token_ids)]
    fresh = make_prompts(6)
    outs = llm.generate([*done.rest, *fresh], [asked[0], asked[2], asked[1]], use_tqdm=False)
    assert_same(outs[:2], [whole[0], whole[2]])
    arrays = jpaged.to_arrays([*groups, *done.rest], max_completion_len=30)
    assert arrays["completion_lens"].shape == (8,) and arrays["finished"].sum() == 0
    assert_idle(llm)


def test_leaving_the_block_loses_nothing(llm: LLM) -> None:
    """What was not yielded, ended or not, is in `rest`; also where an error leaves the block."""
    asked = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (24, 5, 5, 5)]
    whole = llm.generate(PROMPTS, asked, seed=1, use_tqdm=False)
    done = llm.rollout(PROMPTS, asked, enough=4, seed=1)
    with pytest.raises(RequestError, match="in its block"):
        iter(done)
    firsts: list[RequestOutput] = []
    with pytest.raises(ValueError, match="mine"), done:
        firsts.append(next(done))
        raise ValueError("mine")
    assert [out.index for out in done.rest] == sorted({0, 1, 2, 3} - {firsts[0].index})
    rest = llm.generate(done.rest, [asked[out.index] for out in done.rest], use_tqdm=False)
    assert_same(rest, [whole[out.index] for out in done.rest])
    with pytest.raises(RequestError, match="runs once"):
        done.__enter__()
    for enough in (0, 5, True, None):
        with pytest.raises(RequestError, match="enough"):
            llm.rollout(PROMPTS, asked, enough=enough)  # pyright: ignore[reportArgumentType]
    assert_idle(llm)


def test_other_calls_step_and_a_rollout_is_cut_all_the_same(llm: LLM) -> None:
    """Another thread's call takes the steps in which enough end; a pause takes none."""
    asked = SamplingParams(max_tokens=30, ignore_eos=True, seed=2)
    few = SamplingParams(max_tokens=4, ignore_eos=True, seed=2)
    whole = llm.generate(PROMPTS, asked, use_tqdm=False)
    beside = llm.add_request(PROMPTS[0], asked)
    with llm.rollout(PROMPTS, [asked, few, few, asked], enough=2) as done:
        ended: list[RequestOutput] = []
        while llm.has_unfinished() and not ended:
            ended = llm.step()
        groups = list(done)
    assert sorted(group.index for group in groups) == [1, 2]
    assert [out.request_id for out in ended] == [beside]
    with llm.paused():
        with llm.rollout(done.rest, asked, enough=1) as again:
            pass
        assert [out.outputs[0].token_ids for out in again.rest] == [
            out.outputs[0].token_ids for out in done.rest
        ]
    outs = llm.generate(again.rest, asked, use_tqdm=False)
    assert_same(outs, [whole[0], whole[3]])
    assert_idle(llm)


def test_tasks_have_rollouts_too() -> None:
    """An AsyncLLM's yields the same groups, beside other tasks; a task that leaves its block, or is
    cancelled in it, cuts what runs and has the rest; so does a loop that closes over it.
    """
    params = make_params(0, config(num_layers=1))
    asked = [SamplingParams(n=2, max_tokens=n, ignore_eos=True) for n in (30, 6, 18, 9)]

    async def work(llm: AsyncLLM, whole: list[RequestOutput]) -> None:
        beside = asyncio.create_task(llm.complete(PROMPTS[0], asked[1]))
        async with llm.rollout(PROMPTS, asked, enough=2, seed=5) as done:
            with pytest.raises(RequestError, match="rest: there once"):
                _ = done.rest
            groups = [group async for group in done]
            assert [group.index for group in groups] == [1, 3]
        assert_same(groups, [whole[1], whole[3]])
        assert [out.index for out in done.rest] == [0, 2] and all(o.unfinished for o in done.rest)
        goes_on = [llm.complete(out, asked[out.index]) for out in done.rest]
        assert_same(await asyncio.gather(*goes_on), [whole[0], whole[2]])
        await beside

        async with llm.rollout(PROMPTS, asked, enough=4, seed=5) as left:
            firsts = [await anext(left)]
        assert [out.index for out in left.rest] == sorted({0, 1, 2, 3} - {firsts[0].index})
        kept: list[Any] = []
        began = asyncio.Event()

        async def endless() -> None:
            async with llm.rollout(PROMPTS, asked, enough=4, seed=5) as done:
                kept.append(done)
                async for _ in done:
                    began.set()
                    await asyncio.sleep(1e9)

        task = asyncio.create_task(endless())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(kept[0].rest) == 3
        await asyncio.to_thread(forget, await llm.call(lambda made: made))
        with pytest.raises(RequestError, match="enough=5"):
            async with llm.rollout(PROMPTS, asked, enough=5):
                pass
        await llm.call(assert_idle_soon)

    async def begin(llm: LLM) -> None:
        jobs = llm.session.completions(PROMPTS, asked, (0, 0), "raise")
        AsyncRollout(llm.session, llm.engine_thread(), jobs, enough=1, raises=True).start()

    def forget(llm: LLM) -> None:
        asyncio.run(begin(llm))  # whose loop is closed then

    def assert_idle_soon(llm: LLM) -> None:
        while llm.has_unfinished():
            llm.step()
        assert_idle(llm)

    async def main() -> None:
        made = LLM(params, **SETTINGS)
        whole = made.generate(PROMPTS, asked, seed=5, use_tqdm=False)
        async with AsyncLLM(made) as llm:
            await work(llm, whole)

    asyncio.run(main())


def test_what_cannot_go_on_is_said(llm: LLM) -> None:
    asked = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    (cut,) = cut_after(llm, [(PROMPTS[0], asked, (0, 1))], 6)
    length = max(len(c.token_ids) for c in cut.outputs)

    def refused(match: str, prompt: Any = cut, **changes: Any) -> None:
        changed = SamplingParams(**{"n": 2, "max_tokens": 20, "ignore_eos": True, **changes})
        with pytest.raises(RequestError, match=match):
            llm.generate(prompt, changed, use_tqdm=False)

    refused("n=3: the output that goes on has 2", n=3)
    refused(f"max_tokens={length}: completion 0 that goes on has", max_tokens=length)
    refused("logprobs=1: the output that goes on has none", logprobs=1)
    refused("prompt_logprobs=0: the output that goes on has none", prompt_logprobs=0)
    refused("beam search cannot go on", llm.beam_search([PROMPTS[0]], 2, 4, use_tqdm=False)[0])
    long = [[1] * 70]
    refused("failed cannot go on", llm.generate(long, on_error="return", use_tqdm=False)[0])
    with pytest.raises(RequestError, match="beam_search takes prompts"):
        llm.beam_search(cut, 2, 4, use_tqdm=False)
    with pytest.raises(RequestError, match="score and hidden take prompts"):
        llm.score(cut)
    assert_idle(llm)


@pytest.mark.middle
def test_stop_strings_and_forms_go_on(llm: LLM) -> None:
    """A stop string that began before the cut ends the text after it; a form, too, goes on from
    its place, and its mass is joined; streams give what was there first.
    """
    stops = SamplingParams(max_tokens=24, seed=3, logit_bias=dict.fromkeys((97, 98), 12.0))
    text = llm.generate("abab", stops, use_tqdm=False)[0].outputs[0].text
    assert text is not None
    word = text[9:12]
    cases = [
        SamplingParams(max_tokens=24, seed=3, logit_bias=stops.logit_bias, stop=word),
        SamplingParams(
            max_tokens=24, seed=4, structured={"regex": "[ab]{6}[cd]{9}"}, logprobs_mode="tempered"
        ),
    ]
    cut: list[RequestOutput] = []
    for asked in cases:
        want = llm.generate("abab", asked, use_tqdm=False)
        for steps in (3, 11, 13):
            cut = cut_after(llm, [("abab", asked, (0, 0))], steps)
            assert_same(llm.generate(cut, asked, use_tqdm=False), want)
        cut = cut_after(llm, [("abab", asked, (0, 0))], 6)
        assert cut[0].unfinished and cut[0].outputs[0].token_ids
        outs = llm.generate(cut, asked, use_tqdm=False)
        mass, known = outs[0].outputs[0].allowed_logprobs, want[0].outputs[0].allowed_logprobs
        if known is not None and mass is not None:
            np.testing.assert_allclose(mass, known, atol=1e-4)
        pieces = list(llm.stream(cut, asked))
        (whole,) = want[0].outputs
        assert [t for piece in pieces for t in piece.token_ids_delta] == whole.token_ids
        assert "".join(piece.text_delta or "" for piece in pieces) == whole.text
        spans = [span for piece in pieces for span in piece.weight_versions_delta]
        assert [(s.start, s.end) for s in spans] == _places(pieces)
    with pytest.raises(RequestError, match="is not of this form"):
        other = SamplingParams(max_tokens=24, structured={"regex": "x+"}, logprobs_mode="tempered")
        llm.generate(cut, other, use_tqdm=False)
    cut = cut_after(llm, [("abab", stops, (0, 0))], 13)
    written = (cut[0].outputs[0].text or "")[1:4]
    with pytest.raises(RequestError, match=re.escape(f"stop={written!r}: completion 0")):
        llm.generate(cut, dataclasses.replace(stops, stop=written), use_tqdm=False)
    assert_idle(llm)


@pytest.mark.slow
def test_deterministic_is_to_the_bit() -> None:
    """What is computed again has the bits of what was computed token by token."""
    settings = SETTINGS | {"token_buckets": None, "seq_buckets": None, "deterministic": True}
    llm = LLM(make_params(0, config(num_layers=1)), **settings)
    asked = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[1], asked, use_tqdm=False)
    (cut,) = cut_after(llm, [(PROMPTS[1], asked, (0, 0))], 8)
    llm.reset_prefix_cache()
    others = make_prompts(7, 11)
    again, *_ = llm.generate([cut, *others], [asked, *[SamplingParams()] * 2], use_tqdm=False)
    for one, other, part in zip(again.outputs, whole.outputs, cut.outputs, strict=True):
        assert 0 < len(part.token_ids) < 20 and one.token_ids == other.token_ids
        assert one.token_logprobs.tobytes() == other.token_logprobs.tobytes()
    llm.close()


def _places(pieces: list[jpaged.CompletionChunk]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(piece.token_ids_delta) for piece in pieces]).tolist()
    return [(a, b) for a, b in zip([0, *ends], ends, strict=False) if a < b]
