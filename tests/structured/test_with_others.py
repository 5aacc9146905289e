"""Forms with what else an engine does: beams, determinism, cached prefixes, schemas that double."""

import itertools
import time
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, GenerationError, RequestError, SamplingParams
from tests.byte_tokenizer import EOS, make_tokenizer, params
from tests.structured.test_structured import JSON, PROMPTS, ask, is_answer, make_llm, run
from tests.tiny import dense_logprobs

pytest.importorskip("llguidance")

HOW: dict[str, Any] = {"use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(max_logprobs=40)


def under_masks(prompt: str, texts: list[str]) -> dict[str, float]:
    """The logprob of each of these texts where each token is one of those that go on to one."""
    encode = make_tokenizer().encode
    found = {}
    for text in texts:
        ids, total = encode(prompt), 0.0
        for at, token in enumerate([*encode(text), EOS]):
            beginnings = [t for t in texts if t.startswith(text[:at])]
            next_ones = {encode(t)[at] if at < len(t) else EOS for t in beginnings}
            logprobs_V = dense_logprobs(params(), [*ids, token], 1.0)[-2]
            total += logprobs_V[token] - np.logaddexp.reduce(logprobs_V[sorted(next_ones)])
            ids.append(token)
        found[text] = total
    return found


def out_score(expected: dict[str, float], text: str) -> float:
    """By which beams are put in order: length_penalty is 1."""
    return expected[text] / (len(text) + 1)


def test_as_many_beams_as_there_are_texts_find_each(llm: LLM) -> None:
    """With its logprob under the masks, best first."""
    texts = ["".join(text) for text in itertools.product("ab", repeat=3)]
    forms: list[tuple[Any, list[str], int]] = [
        ({"regex": "[ab]{3}"}, texts, 8),
        ({"choice": ["no", "q"]}, ["no", "q"], 4),  # fewer than beams
    ]
    for form, texts, width in forms:
        [out] = llm.beam_search(PROMPTS[0], width, structured=form, **HOW)
        expected = under_masks(PROMPTS[0], texts)
        found = [done.text or "" for done in out.outputs]
        assert found == sorted(texts, key=lambda text: -(out_score(expected, text)))
        for done in out.outputs:
            assert done.finish_reason == "stop" and done.token_ids[-1] == EOS
            assert done.cumulative_logprob == pytest.approx(expected[done.text or ""], abs=1e-4)


def test_beams_keep_to_their_form(llm: LLM) -> None:
    """Beside others, in a pool that is too small for all of them, and cut off too."""
    small = make_llm(max_logprobs=40, num_blocks=48)
    prompts = [f"{'some more of it ' * 3}{i}" for i in range(4)]
    expected = llm.beam_search(prompts, 3, 60, structured=JSON, **HOW)
    found = small.beam_search(prompts, 3, 60, structured=JSON, **HOW)
    assert small.stats()["preemptions"] > 0
    for out, same in zip(expected, found, strict=True):
        assert [d.token_ids for d in out.outputs] == [d.token_ids for d in same.outputs]
        assert len(out.outputs) == 3 and all(is_answer(done.text) for done in out.outputs)
        assert len({tuple(done.token_ids) for done in out.outputs}) == 3
    (cut,) = llm.beam_search("q", 2, 3, structured={"regex": "[0-9]{9}"}, **HOW)
    assert [done.finish_reason for done in cut.outputs] == ["length", "length"]
    assert all((done.text or "").isdecimal() for done in cut.outputs)


def test_beams_of_a_form_that_is_none(llm: LLM) -> None:
    with pytest.raises(RequestError, match="request 0: structured: regex"):
        llm.beam_search("a", 2, structured={"regex": "("}, **HOW)
    nothing = {"grammar": 'start: "a" X\nX: /b/ & /c/'}  # after "a" no text goes on
    with pytest.raises(GenerationError, match="structured: "):
        llm.beam_search("a", 2, structured=nothing, **HOW)
    assert llm.stats()["blocks_in_use"] == 0


def test_deterministic_in_any_company() -> None:
    """Bit for bit: alone, in a batch, preempted, and scored."""
    llm, crowded = make_llm(deterministic=True), make_llm(deterministic=True, num_blocks=48)
    prompts = [f"{'some more of it ' * 3}{i}" for i in range(8)]
    sampling = [ask(JSON, i, logprobs_mode="processed", temperature=0.8) for i in range(8)]
    together = run(llm, sampling, prompts)
    for i in (0, 5):
        [alone] = run(llm, sampling[i], prompts[i : i + 1])
        assert alone.token_ids == together[i].token_ids and is_answer(alone.text)
        np.testing.assert_array_equal(alone.token_logprobs, together[i].token_logprobs)
    for found, expected in zip(run(crowded, sampling, prompts), together, strict=True):
        assert found.token_ids == expected.token_ids
        np.testing.assert_array_equal(found.token_logprobs, expected.token_logprobs)
    assert crowded.stats()["preemptions"] > 0
    encode = make_tokenizer().encode
    ids = [encode(p) + done.token_ids for p, done in zip(prompts, together, strict=True)]
    lens = [len(encode(p)) for p in prompts]
    how: dict[str, Any] = {"temperature": 0.8, "structured": JSON, "prompt_lens": lens}
    for found, done, length in zip(llm.score(ids, **how), together, lens, strict=True):
        np.testing.assert_array_equal(found[length - 1 :], done.token_logprobs)


@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_deterministic_beside_other_draws(mode: Any) -> None:
    """Bit for bit, whatever step the rows beside them need: plain, filtered or with penalties; and
    these rows too.
    """
    llm = make_llm(deterministic=True)
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9, "top_k": 30}, {"presence_penalty": 0.5}]
    kinds = [kind | {"logprobs_mode": mode, "temperature": 0.8} for kind in kinds]
    forms = [ask(JSON, i, **kind) for i, kind in enumerate(kinds)]
    others = [
        SamplingParams(seed=i, max_tokens=9, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    prompts = [f"{'some of it ' * 3}{i}" for i in range(6)]
    asked = [*forms, *others]
    alone = [run(llm, one, [prompt])[0] for one, prompt in zip(asked, prompts, strict=True)]
    pairs = [(i, j) for i in range(6) for j in range(6) if i < j]
    for beside in (*pairs, range(6)):
        found = run(llm, [asked[i] for i in beside], [prompts[i] for i in beside])
        for i, done in zip(beside, found, strict=True):
            assert done.token_ids == alone[i].token_ids
            np.testing.assert_array_equal(done.token_logprobs, alone[i].token_logprobs)
    llm.close()


def test_a_cached_prefix_changes_nothing(llm: LLM) -> None:
    prompt = "a prompt that is longer than a block or two: "
    fresh = make_llm(enable_prefix_caching=False)
    cached: list[int] = []
    for seed in (0, 1, 0):
        (out,) = llm.generate(prompt, ask(JSON, seed), **HOW)
        (expected,) = fresh.generate(prompt, ask(JSON, seed), **HOW)
        assert out.outputs[0].token_ids == expected.outputs[0].token_ids
        assert expected.num_cached_tokens == 0
        cached.append(out.num_cached_tokens)
    assert cached[0] == 0 < cached[1] == cached[2]


def test_a_schema_that_doubles_is_told_in_time(llm: LLM) -> None:
    """2 ** 12 strings in each other: refused, or served, for a bounded time of a processor."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(12):
        deep = {"anyOf": [{"type": "object", "properties": {"a": deep, "b": deep}}]}
    began = time.process_time()
    sampling = [ask({"json_schema": deep}, max_tokens=12), ask(JSON)]
    outs = llm.generate(PROMPTS[:2], sampling, on_error="return", **HOW)
    assert time.process_time() - began < 30
    assert outs[0].error is None or isinstance(outs[0].error, RequestError)
    assert is_answer(outs[1].outputs[0].text)
