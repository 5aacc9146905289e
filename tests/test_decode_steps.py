"""decode_steps through the API: the same outputs for 1, 4 and 16, whatever a request asks for."""

import dataclasses
import functools
from typing import Any

import pytest

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.runtime import choices
from tests.tiny import assert_idle, assert_same, engine, make_params, make_prompts

PROMPTS = make_prompts(5, 21, 40, 3, 9)
MIX = [
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs_mode="tempered"),
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=0.9,
        seed=1,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        min_tokens=6,
        max_tokens=14,
    ),
    SamplingParams(n=3, seed=4, max_tokens=10, prompt_logprobs=1),
    SamplingParams(
        temperature=1.0, seed=5, max_tokens=15, stop_token_ids=range(0, 96, 9), logit_bias={7: 2.0}
    ),
]


@functools.cache
def run(steps: int, **changes: Any) -> tuple[list[jpaged.RequestOutput], dict[str, Any]]:
    llm = LLM(make_params(), **vars(engine(decode_steps=steps, **changes)))
    outputs = llm.generate(PROMPTS, MIX, use_tqdm=False)
    stats = llm.stats()
    assert_idle(llm)
    llm.close()
    return outputs, stats


@pytest.mark.parametrize("steps", [4, pytest.param(16, marks=pytest.mark.middle)])
def test_the_same_outputs(steps: int) -> None:
    """Seeds, penalties, bans, top lists, samples, stop ids: all as with one step a dispatch."""
    (outputs, stats), (one, one_stats) = run(steps), run(1)
    assert_same(outputs, one)
    assert any(c.finish_reason == "stop" for out in outputs for c in out.outputs), (
        "nothing stopped early"
    )
    assert stats["dispatches"] < one_stats["dispatches"] and stats["uploads"] < one_stats["uploads"]


def test_counted_steps_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where a dispatch takes all of its steps though every row has stopped."""
    choose, made = choices.choose, []
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=10, stop_token_ids=range(0, 96, 5))

    def outputs() -> list[jpaged.RequestOutput]:
        llm = LLM(make_params(), **vars(engine(decode_steps=4)))
        return llm.generate(PROMPTS, params, use_tqdm=False)

    def counted(*args: Any) -> choices.Choices:
        made.append(dataclasses.replace(choose(*args), counts_steps=True))
        return made[-1]

    ending_early = outputs()
    monkeypatch.setattr("jpaged.runtime.resolve.choose", counted)
    assert_same(outputs(), ending_early)
    assert made and any(out.outputs[0].finish_reason == "stop" for out in ending_early)


def test_a_crowded_pool_gives_the_same() -> None:
    outputs, stats = run(8, num_blocks=16)
    assert stats["preemptions"] > 0
    assert_same(outputs, run(1)[0])


def test_a_stream_gives_several_tokens_at_a_time() -> None:
    llm = LLM(make_params(), **vars(engine(decode_steps=4)))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    want = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
    chunks = list(llm.stream(PROMPTS[0], params))
    assert [t for chunk in chunks for t in chunk.token_ids_delta] == want
    assert [len(chunk.token_ids_delta) for chunk in chunks if chunk.token_ids_delta] == [1, 4, 4, 1]
    llm.close()
