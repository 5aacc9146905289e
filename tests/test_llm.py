"""LLM: a checkpoint folder with its tokenizer, one object, every method of the contract."""

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import LLM, CapacityError, Params, RequestError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.engine.sequence import Request, Sequence
from tests.text_model import CONFIG_EOS, TILDE, TOKENIZER_EOS, write_folder
from tests.tiny import (
    ENGINE,
    compiles,
    dense_greedy,
    dense_logits,
    engine,
    engine_of,
    make_prompts,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
USER = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def params(folder: Path) -> Params:
    return jpaged.load_params(folder)


@pytest.fixture(scope="module")
def strict_llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, **vars(engine(strict=True)))
    yield llm
    llm.close()


@pytest.fixture
def llm(strict_llm: LLM) -> Iterator[LLM]:
    """The one LLM of this file; a test must leave it idle and with every block free."""
    strict_llm.reset_prefix_cache()
    yield strict_llm
    assert not strict_llm.has_unfinished() and strict_llm.stats()["blocks_in_use"] == 0
    engine_of(strict_llm.session).replicas[0].check_integrity()


def generate(
    llm: LLM, prompts: Any, sampling: Any = GREEDY, **how: Any
) -> list[jpaged.RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False, **how)


def chat(llm: LLM, messages: Any, sampling: Any = GREEDY, **how: Any) -> list[jpaged.RequestOutput]:
    return llm.chat(messages, sampling, use_tqdm=False, **how)


def text_of(llm: LLM, tokens: list[int]) -> str:
    return llm.tokenizer.decode(tokens, skip_special_tokens=True)


# Settings


def test_strict_compiles_the_whole_table_at_once(llm: LLM) -> None:
    # Two kinds of prefill, three of draw, decode (the model alone), set_counts, copies of blocks.
    assert len({*llm.stats()["buckets"]}) == llm.stats()["num_compiles"] == 8
    full = SamplingParams(
        max_tokens=3, logprobs=1, prompt_logprobs=1, presence_penalty=0.5, min_tokens=1
    )
    with compiles() as names:
        generate(llm, ["a", "bb", "c" * 30], [GREEDY, full, full])
    assert names == [], "pool and counts were filled at the start"


def test_stats(llm: LLM) -> None:
    before = llm.stats()
    generate(llm, ["hello there"] * 2, ENDLESS)
    after = llm.stats()
    grown = {key: after[key] - before[key] for key in after if isinstance(after[key], int)}
    assert grown["prompt_tokens"] == 22 and grown["generated_tokens"] == 16
    assert (
        grown["cached_tokens"] == 11
        and grown["prefill_tokens"] == 22 - 11
        and grown["decode_tokens"] == 2 * 7
    )
    assert grown["prefill_steps"] == 1 and grown["decode_steps"] == 7 and grown["steps"] == 8
    assert grown["preemptions"] == grown["num_compiles"] == after["blocks_in_use"] == 0
    assert after["num_blocks"] == 128 and after["block_bytes"] == 2 * 2 * 4 * 2 * 16 * 4
    assert 0 < after["padding_waste"] < 1 and after["padded_tokens"] > after["prefill_tokens"]
    for key in ("prefill_time_s", "decode_time_s", "host_time_s", "device_time_s"):
        assert after[key] > before[key]
    assert after["compile_time_s"] == before["compile_time_s"] > 0
    json.dumps(after)


# Text


def test_text(llm: LLM, params: Params) -> None:
    """A str prompt through the folder's tokenizer; text is the tokens', without the EOS."""
    prompts = ["def f(x):", [40, 50, 60], {"prompt": "abc"}]
    outputs = generate(llm, prompts)
    assert [output.prompt for output in outputs] == ["def f(x):", None, "abc"]
    for output in outputs:
        (completion,) = output.outputs
        expected = dense_greedy(params, output.prompt_token_ids, 8)
        ends = [
            i for i, token in enumerate(expected) if token in (TILDE, TOKENIZER_EOS, CONFIG_EOS)
        ]
        assert completion.token_ids == expected[: ends[0] + 1 if ends else 8]
        assert completion.finish_reason == ("stop" if ends else "length")
        assert completion.text == text_of(llm, completion.token_ids[: ends[0] if ends else 8])
    assert outputs[0].prompt_token_ids == [ord(c) - 32 for c in "def f(x):"]


def test_an_empty_prompt_and_none_at_all(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"request 0: prompt '' is empty"):
        generate(llm, "")
    assert generate(llm, []) == [] == chat(llm, [])
    with pytest.raises(RequestError, match=r"1 sampling_params for 2 prompts"):
        generate(llm, ["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match=r"n=300"):
        generate(llm, "a", SamplingParams(n=300))
    with pytest.raises(RequestError, match=r"2-D array"):
        generate(llm, np.zeros((2, 2), np.int32))


# What ends a completion


@pytest.mark.parametrize("eos", [TILDE, TOKENIZER_EOS, CONFIG_EOS])
def test_eos_is_a_union(llm: LLM, eos: int) -> None:
    """config.json's, generation_config's and the tokenizer's: each ends the text and is no part of
    it.
    """
    push = {"temperature": 0, "logit_bias": {eos: 100.0}}
    (stopped,) = generate(llm, "abc", SamplingParams(**push, max_tokens=5))
    assert stopped.outputs[0].token_ids == [eos] and stopped.outputs[0].text == ""
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", None)
    (ignored,) = generate(llm, "abc", SamplingParams(**push, max_tokens=5, ignore_eos=True))
    assert (
        ignored.outputs[0].token_ids == [eos] * 5 and ignored.outputs[0].finish_reason == "length"
    )


@pytest.mark.parametrize("how", ["eos", "stop ids", "stop string"])
def test_min_tokens(llm: LLM, how: str) -> None:
    """Three tokens come first, whatever would end the text."""
    token = CONFIG_EOS if how == "eos" else 33
    stops: dict[str, Any] = {
        "eos": {},
        "stop ids": {"stop_token_ids": [33]},
        "stop string": {"stop": "AA"},
    }[how]
    sampling = SamplingParams(
        temperature=0, max_tokens=8, min_tokens=3, logit_bias={token: 100.0}, **stops
    )
    completion = generate(llm, "abc", sampling)[0].outputs[0]
    assert completion.finish_reason == "stop"
    if (
        how == "stop string"
    ):  # nothing bans it: the first string that lies whole after the third token ends it
        assert completion.token_ids == [33] * 5 and completion.text == "AAA"
    else:
        assert (
            len(completion.token_ids) == 4
            and completion.token_ids[3] == token not in completion.token_ids[:3]
        )


def test_stop_token_ids(llm: LLM) -> None:
    whole = generate(llm, "abc", ENDLESS)[0].outputs[0].token_ids
    stop = whole[4]
    at = whole.index(stop)
    completion = generate(
        llm,
        "abc",
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop]),
    )
    assert completion[0].outputs[0].token_ids == whole[: at + 1]
    assert (completion[0].outputs[0].finish_reason, completion[0].outputs[0].stop_reason) == (
        "stop",
        stop,
    )
    assert completion[0].outputs[0].text == text_of(llm, whole[:at])


def test_stop_strings(llm: LLM) -> None:
    whole = generate(llm, "abc", ENDLESS)[0].outputs[0]
    assert whole.text is not None and len(whole.text) == 8
    stop = whole.text[3:5]
    at = whole.text.index(stop)
    for include in (False, True):
        sampling = SamplingParams(
            temperature=0,
            max_tokens=8,
            ignore_eos=True,
            stop=["zzz", stop],
            include_stop_str_in_output=include,
        )
        completion = generate(llm, "abc", sampling)[0].outputs[0]
        assert completion.text == whole.text[: at + 2 if include else at]
        assert completion.token_ids == whole.token_ids[: at + 2]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_the_context_is_a_limit(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = generate(llm, "x" * 50, sampling)
    assert len(output.outputs[0].token_ids) == 14 and output.outputs[0].finish_reason == "length"
    with pytest.raises(
        CapacityError, match=r"prompt of 64 tokens leaves no room in max_model_len=64"
    ):
        generate(llm, "x" * 64)


def test_no_sampling_params_are_the_plain_ones(llm: LLM) -> None:
    """Not the file's defaults: with the same seed and key the same tokens as SamplingParams()."""
    llm.keys.count = 0
    none = generate(llm, "abc", None)
    llm.keys.count = 0
    assert tokens_of(none) == tokens_of(generate(llm, "abc", SamplingParams()))
    llm.keys.count = 0
    assert tokens_of(none) != tokens_of(generate(llm, "abc", SamplingParams(temperature=0.1)))


# Logprobs


@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_logprobs_modes(llm: LLM, params: Params, mode: Any) -> None:
    """Against the dense logits: the model's own, divided by the temperature, or after every
    control.
    """
    bias, top_k, temperature = {30: 2.0, 31: -3.0}, 4, 0.7
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        logit_bias=bias,
        repetition_penalty=1.3,
        seed=1,
        max_tokens=6,
        ignore_eos=True,
        logprobs=3,
        logprobs_mode=mode,
    )
    (output,) = generate(llm, "hello", sampling)
    (completion,) = output.outputs
    assert completion.logprobs is not None and len(completion.logprobs) == 6
    for i, (token, top) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        seen = output.prompt_token_ids + completion.token_ids[:i]
        z = dense_logits(params, seen)[-1].astype(np.float64)
        if mode == "tempered":
            z = z / temperature
        if mode == "processed":
            for biased, value in bias.items():
                z[biased] += value
            for again in set(seen):
                z[again] = z[again] / 1.3 if z[again] > 0 else z[again] * 1.3
            z = np.where(z >= np.sort(z)[-top_k], z / temperature, -np.inf)
        expected = z - np.log(np.exp(z - z.max()).sum()) - z.max()
        best = np.argsort(-expected)[:3].tolist()
        assert next(iter(top)) == token and set(top) == {token, *best}
        for other, found in top.items():
            assert found.logprob == pytest.approx(expected[other], abs=2e-4)
            assert found.rank == 1 + int((expected > expected[other]).sum())
            assert found.decoded_token == llm.tokenizer.decode([other])
        assert completion.token_logprobs[i] == pytest.approx(top[token].logprob)


def test_logprobs_of_the_token_alone(llm: LLM) -> None:
    none = generate(llm, "abc", ENDLESS)[0].outputs[0]
    zero = generate(llm, "abc", SamplingParams(**{**vars(ENDLESS), "logprobs": 0}))[0].outputs[0]
    assert none.logprobs is None and zero.logprobs is not None
    assert [list(top) for top in zero.logprobs] == [[token] for token in zero.token_ids]
    np.testing.assert_allclose(none.token_logprobs, zero.token_logprobs, atol=1e-5)


def test_logit_bias_forbids_and_forces(llm: LLM) -> None:
    plain = generate(llm, "abc", ENDLESS)[0].outputs[0].token_ids
    never = SamplingParams(**{**vars(ENDLESS), "logit_bias": {plain[0]: -100.0}})
    assert plain[0] not in generate(llm, "abc", never)[0].outputs[0].token_ids
    always = SamplingParams(**{**vars(ENDLESS), "logit_bias": {7: 100.0}})
    assert generate(llm, "abc", always)[0].outputs[0].token_ids == [7] * 8


# Chat


def test_chat(llm: LLM) -> None:
    (one,) = chat(llm, USER)
    assert one.prompt_token_ids == llm.tokenizer.encode("u:2+2?;a:") == llm.render_chat(USER)
    both = chat(
        llm,
        [USER, [*USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "so?"}]],
    )
    assert tokens_of(both[:1]) == tokens_of([one])
    assert both[1].prompt_token_ids == llm.tokenizer.encode("u:2+2?;a:4;u:so?;a:")
    assert tokens_of([one]) == tokens_of(generate(llm, "u:2+2?;a:"))


def test_chat_options(llm: LLM) -> None:
    encode = llm.tokenizer.encode
    (toned,) = chat(llm, USER, chat_template_kwargs={"tone": "dry"})
    assert toned.prompt_token_ids == encode("u:2+2?;(dry)a:")
    (bare,) = chat(llm, USER, add_generation_prompt=False)
    assert bare.prompt_token_ids == encode("u:2+2?;")
    (going_on,) = chat(
        llm, [*USER, {"role": "assistant", "content": "It is"}], continue_final_message=True
    )
    assert going_on.prompt_token_ids == encode("u:2+2?;a:It is")


def test_chat_fills_the_context_by_default(llm: LLM) -> None:
    (output,) = llm.chat(USER, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert len(tokens) > 16 or output.outputs[0].finish_reason == "stop"
    assert (
        output.outputs[0].finish_reason == "stop"
        or len(tokens) + len(output.prompt_token_ids) == 64
    )


def test_chat_that_the_template_refuses(llm: LLM) -> None:
    tool = [{"role": "tool", "content": "x"}]
    with pytest.raises(
        RequestError, match=r"request 1: chat: the template refused the messages: no tools here"
    ):
        chat(llm, [USER, tool])
    outputs = chat(llm, [USER, tool, USER], on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    assert tokens_of(outputs[:1]) == tokens_of(outputs[2:]) == tokens_of(chat(llm, USER))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", "messages of type str: pass a list of {'role'"),
        ({"role": "user", "content": "hi"}, "messages of type dict: "),
        (7, "messages of type int: "),
        (["hi"], "request 0: chat: messages of type str: "),
        ([USER, [1]], "request 1: chat: messages of type list of int: "),
    ],
    ids=str,
)
def test_what_is_no_conversation(llm: LLM, messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        chat(llm, messages)


# Streams


@pytest.mark.parametrize("stop", [None, "tail"])
def test_stream_adds_up_to_generate(llm: LLM, stop: str | None) -> None:
    """Also when the end of one text may be the beginning of a stop string: it is held back, then
    dropped or given.
    """
    prompts = ["abc", "hello world, this is long", [5, 6]]
    sampling: list[SamplingParams] = [GREEDY, ENDLESS, ENDLESS]
    if stop is not None:
        text = generate(llm, prompts[1], ENDLESS)[0].outputs[0].text
        assert text is not None
        ends = SamplingParams(**{**vars(ENDLESS), "stop": [text[4:7], text[-1] + "never"]})
        sampling = [GREEDY, ends, ENDLESS]
    expected = generate(llm, prompts, sampling)
    chunks = list(llm.stream(prompts, sampling))
    for i, output in enumerate(expected):
        mine = [chunk for chunk in chunks if chunk.request_index == i]
        assert "".join(chunk.text_delta or "" for chunk in mine) == output.outputs[0].text
        assert [t for chunk in mine for t in chunk.token_ids_delta] == output.outputs[0].token_ids
        assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == output.outputs[0].finish_reason and mine[-1].index == 0
        assert len(mine) > 3, "in pieces"
    order = [chunk.request_index for chunk in chunks]
    assert order != sorted(order), "the requests run together"


def test_closing_a_stream_aborts_the_rest(llm: LLM) -> None:
    before = llm.stats()["generated_tokens"]
    stream = llm.stream(["abc", "hello world"], ENDLESS)
    assert not llm.has_unfinished(), "nothing runs before the first piece is asked for"
    next(stream)
    assert llm.has_unfinished() and llm.stats()["blocks_in_use"] > 0
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not llm.has_unfinished() and llm.stats()["blocks_in_use"] == 0
    assert llm.stats()["generated_tokens"] < before + 16
    for chunk in llm.stream(["abc", "hello world"], ENDLESS):
        if chunk.request_index == 1:
            break  # the generator is dropped, and closed with it
    assert not llm.has_unfinished()


def test_a_bad_prompt_fails_before_the_stream_begins(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"request 1: prompt '' is empty"):
        llm.stream(["abc", ""], GREEDY)


# One request at a time


def finish(llm: LLM) -> dict[str, jpaged.RequestOutput]:
    done: dict[str, jpaged.RequestOutput] = {}
    while llm.has_unfinished():
        done |= {output.request_id: output for output in llm.step()}
    return done


def test_add_request_and_step(llm: LLM) -> None:
    expected = tokens_of(generate(llm, ["abc", "hello"], ENDLESS))
    assert llm.step() == [] and not llm.has_unfinished()
    first = llm.add_request("abc", ENDLESS)
    second = llm.add_request(
        "hello", SamplingParams(**{**vars(ENDLESS), "max_tokens": 3}), request_id="mine"
    )
    assert second == "mine" != first and llm.has_unfinished()
    with pytest.raises(RequestError, match=r"request_id 'mine' is in use"):
        llm.add_request("abc", request_id="mine")
    done = finish(llm)
    assert done.keys() == {first, "mine"}
    assert (
        done[first].outputs[0].token_ids == expected[0]
        and done["mine"].outputs[0].token_ids == expected[1][:3]
    )
    assert llm.add_request("abc", request_id="mine") == "mine", (
        "an id is free again once its request has ended"
    )
    finish(llm)
    with pytest.raises(RequestError, match="is empty"):
        llm.add_request([])


def test_abort(llm: LLM) -> None:
    whole = generate(llm, "abc", ENDLESS)[0].outputs[0].token_ids
    running = llm.add_request("abc", ENDLESS)
    for _ in range(4):
        llm.step()
    waiting = llm.add_request("hello", ENDLESS)
    assert llm.abort("nobody") is None
    output, never_ran = llm.abort(running), llm.abort(waiting)
    assert output is not None and never_ran is not None
    # The fourth token was still on its way.
    assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == whole[:3]
    assert output.outputs[0].text == text_of(llm, whole[:3])
    assert never_ran.outputs[0].token_ids == [] and never_ran.outputs[0].finish_reason == "abort"
    assert llm.abort(running) is None and llm.step() == []


def test_generate_beside_added_requests(llm: LLM) -> None:
    """Whoever steps, each output goes to its own caller."""
    expected = tokens_of(generate(llm, ["abc", "hello", "xyz"], ENDLESS))
    mine = llm.add_request("abc", ENDLESS)
    assert tokens_of(generate(llm, "hello", ENDLESS)) == expected[1:2]
    assert "".join(c.text_delta or "" for c in llm.stream("xyz", ENDLESS)) == text_of(
        llm, expected[2]
    )
    assert llm.has_unfinished(), "the added one has ended, and waits to be taken"
    (output,) = llm.step()
    assert output.request_id == mine and output.outputs[0].token_ids == expected[0]


def test_an_interrupted_call_leaves_added_requests_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(generate(llm, ["abc", "hello"], ENDLESS))
    mine = llm.add_request("abc", ENDLESS)
    step, passed = Engine.step, 0

    def interrupted(self: Engine) -> Any:
        nonlocal passed
        passed += 1
        if passed == 3:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "step", interrupted)
        generate(llm, "hello", ENDLESS)
    assert finish(llm)[mine].outputs[0].token_ids == expected[0]
    assert tokens_of(generate(llm, "hello", ENDLESS)) == expected[1:]


# Weights and cache


def test_reset_prefix_cache(llm: LLM) -> None:
    prompt = "a prompt of twenty-one"
    cached = [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)]
    llm.reset_prefix_cache()
    cached.append(generate(llm, prompt)[0].num_cached_tokens)
    assert cached == [0, 20, 0]


def test_score(llm: LLM) -> None:
    """As the function, over the LLM's own pool."""
    lists = make_prompts(9, 30)
    found = llm.score(lists, temperature=0.5, return_greedy=True)
    expected = jpaged.score(
        llm.session.served.params, lists, temperature=0.5, return_greedy=True, engine_config=ENGINE
    )
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    assert len(llm.score("abcd")[0]) == 3
    jpaged.release(compiled=True)


def test_seeds_mean_the_same_to_generate_and_to_an_llm(llm: LLM) -> None:
    """A seed repeats its tokens, which are equal in both; without one both draw anew."""
    prompts, asked = make_prompts(9, 5), SamplingParams(max_tokens=12, ignore_eos=True)
    params = llm.session.served.params

    def of_llm(seed: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, asked, seed=seed, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def of_function(seed: Any) -> list[list[int]]:
        outputs = jpaged.generate(params, prompts, asked, seed=seed, engine_config=ENGINE)
        return [output.outputs[0].token_ids for output in outputs]

    def without_a_seed() -> list[list[int]]:
        of_both = [
            jpaged.generate(params, prompts, asked, engine_config=ENGINE),
            llm.generate(prompts, asked, use_tqdm=False),
        ]
        return [output.outputs[0].token_ids for outputs in of_both for output in outputs]

    for seed in (0, 7, jax.random.key(7), -1):
        assert of_llm(seed) == of_llm(seed) == of_function(seed) == of_function(seed)
    assert of_llm(0) != of_llm(7)
    assert of_llm(None) != of_llm(None) and of_function(None) != of_function(None)
    first, second = without_a_seed(), without_a_seed()
    assert all(a != b for a, b in zip(first, second, strict=True))
    pieces: list[list[int]] = [[], []]
    for chunk in llm.stream(prompts, asked, seed=7):
        pieces[chunk.request_index] += chunk.token_ids_delta
    assert pieces == of_llm(7)
    chat = {"seed": 7, "use_tqdm": False}
    answers = [llm.chat(USER, asked, **chat)[0].outputs[0].token_ids for _ in range(2)]
    assert answers[0] == answers[1] != llm.chat(USER, asked, use_tqdm=False)[0].outputs[0].token_ids
    jpaged.release(compiled=True)


def test_ended_requests_are_freed_without_a_collection(llm: LLM) -> None:
    """Nothing that a request leaves behind waits for the garbage collector: host memory stays
    flat.
    """

    def alive() -> set[int]:
        return {id(x) for x in gc.get_objects() if isinstance(x, Sequence | Request)}

    generate(llm, ["abc", "hello"], ENDLESS)
    gc.collect()
    of_other_tests = alive()
    gc.disable()
    try:
        generate(llm, ["abc", "hello"], ENDLESS)
        llm.step()  # commits what was still in flight
        assert alive() <= of_other_tests
    finally:
        gc.enable()
