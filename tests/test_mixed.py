"""mixed=True: rows that decode join the chunks of prompts that arrive; no row's tokens change."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM, Params, RequestOutput, SamplingParams
from jpaged.engine.plan import StepResult
from jpaged.engine.shapes import shape_table
from jpaged.runtime.runner import Handle
from tests.tiny import (
    CONFIG,
    EOS,
    assert_idle,
    assert_same,
    engine,
    engine_of,
    make_params,
    make_prompts,
)

SETTINGS = engine(max_num_seqs=12, seq_buckets=(12,), max_stop_ids=24)
BASE = SamplingParams(temperature=0.9, max_tokens=14, ignore_eos=True)
PROMPTS = make_prompts(5, 21, 9, 33, 40, 3, 17, 26, 11)
SAMPLING = [
    dataclasses.replace(BASE, **changes)
    for changes in (
        {"temperature": 0, "max_tokens": 24},
        {"seed": 1, "top_p": 0.9, "logprobs": 3},
        {"seed": 2, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"seed": 3, "logit_bias": {7: 3.0}, "logprobs_mode": "processed"},
        {"n": 3, "seed": 4},
        {"temperature": 0, "prompt_logprobs": 2},
        {"seed": 5, "stop_token_ids": range(0, EOS, 6), "max_tokens": 30},
        {"seed": 6, "ignore_eos": False, "stop_token_ids": range(0, EOS, 5), "min_tokens": 8},
        {"temperature": 0, "logprobs": 1, "logprobs_mode": "tempered"},
    )
]

Requests = list[tuple[list[int], SamplingParams]]
MANY: Requests = list(zip(PROMPTS, SAMPLING, strict=True))
SEED = 100  # with which every row stops
# A token in six stops a row, while the chunks of others arrive in every step.
STOPPING: Requests = [
    (
        prompt,
        dataclasses.replace(
            BASE,
            seed=SEED + i,
            presence_penalty=0.5,
            stop_token_ids=range(0, EOS, 6),
            max_tokens=30,
        ),
    )
    for i, prompt in enumerate(make_prompts(*[24] * 10))
]


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module")
def llm(params: Params) -> Iterator[LLM]:
    llm = LLM(params, mixed=True, **_settings())
    yield llm
    llm.close()


def _settings(**changes: Any) -> dict[str, Any]:
    settings = vars(dataclasses.replace(SETTINGS, **changes))
    return {name: value for name, value in settings.items() if name != "mixed"}


def trickle(llm: LLM, every: int, requests: Requests = MANY) -> list[RequestOutput]:
    """Requests that arrive one by one, so many steps apart, while those before them decode."""
    llm.reset_prefix_cache()
    waiting, ids = list(requests), []
    found: dict[str, RequestOutput] = {}
    steps = 0
    while waiting or llm.has_unfinished():
        if waiting and steps % every == 0:
            ids.append(llm.add_request(*waiting.pop(0)))
        found |= {output.request_id: output for output in llm.step()}
        engine_of(llm.session).replicas[0].check_integrity()
        steps += 1
    assert_idle(llm)
    return [found[i] for i in ids]


@pytest.fixture(scope="module")
def apart(params: Params) -> Iterator[LLM]:
    """What it must equal: prefill and decode each in steps of their own."""
    llm = LLM(params, mixed=False, **_settings())
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def expected(apart: LLM) -> list[RequestOutput]:
    return trickle(apart, 3)


@pytest.mark.parametrize("every", [2, pytest.param(5, marks=pytest.mark.middle)])
def test_the_same_outputs(llm: LLM, expected: list[RequestOutput], every: int) -> None:
    """Greedy, seeded, penalised, biased, samples, prompt logprobs, stops, min_tokens; tokens and
    logprobs.
    """
    batches = spy(llm)
    assert_same(trickle(llm, every), expected)
    prefills = [handle.batch for handle, _ in batches if handle.batch.bucket.phase == "prefill"]
    mixed = [b for b in prefills if b.num_rows > 1 and b.num_tokens > b.num_rows]
    assert mixed, "no step held chunks and rows that decode"
    assert {handle.batch.bucket.phase for handle, _ in batches} == {"prefill", "decode"}


def test_a_row_that_stopped_draws_nothing_more(llm: LLM, apart: LLM) -> None:
    """It stops in a step that the host has not seen yet; the next, a prefill, leaves it out on the
    device: no token, and nothing counted to its penalties.
    """
    batches = spy(llm)
    found = trickle(llm, 1, STOPPING)
    left_out = [
        row
        for handle, result in batches
        if handle.batch.bucket.phase == "prefill"
        for row, number in enumerate(result.num_drawn)
        if number == 0
    ]
    assert left_out and all(c.finish_reason == "stop" for out in found for c in out.outputs)
    assert_same(found, trickle(apart, 1, STOPPING))


def spy(llm: LLM) -> list[tuple[Handle, StepResult]]:
    """What the runner of this LLM fetches from now on."""
    seen: list[tuple[Handle, StepResult]] = []
    runner = llm.session.runner
    fetch = type(runner).fetch.__get__(runner)

    def fetch_and_note(handle: Handle) -> list[StepResult]:
        results = fetch(handle)
        seen.extend((handle, result) for result in results)
        return results

    runner.fetch = fetch_and_note
    return seen


def test_crowded_and_several_steps(params: Params, expected: list[RequestOutput]) -> None:
    """Preempted and resumed in mixed steps, with 4 tokens a dispatch where there are no chunks."""
    crowded = _settings(num_blocks=20, decode_steps=4, swap_space_gib=0.01, swap_min_tokens=8)
    llm = LLM(params, mixed=True, **crowded)
    assert_same(trickle(llm, 2), expected)
    stats = llm.stats()
    assert stats["preemptions_swapped"] and stats["preemptions_recomputed"]
    llm.close()


def test_no_shape_more() -> None:
    plain, mixed = (
        set(shape_table(dataclasses.replace(SETTINGS, mixed=m).resolve(CONFIG)))
        for m in (False, True)
    )
    assert plain == mixed
