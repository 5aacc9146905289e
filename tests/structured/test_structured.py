"""Answers of a given form: every text is of its form, rows beside them get what they get alone, and
what cannot be is that request's error.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

import jpaged
from jpaged import LLM, ConfigError, RequestError, SamplingParams
from jpaged.engine import scheduler
from jpaged.integrations.batch import command as serve_batch
from jpaged.structured import grammars, spec
from tests.byte_tokenizer import END, EOS, make_tokenizer, params
from tests.tiny import ENGINE, dense_logprobs

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bb"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}
COMPACT = {"disable_any_whitespace": True}
JSON = {"json_schema": SCHEMA} | COMPACT
PROMPTS = ["make ", "x = ", "answer:", "q"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    n: bool


def make_llm(**changes: Any) -> LLM:
    how: dict[str, Any] = vars(ENGINE) | {"max_model_len": 160, "num_blocks": 96} | changes
    return LLM(params(), tokenizer=make_tokenizer(), **how)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def run(llm: LLM, sampling: Any, prompts: Any = PROMPTS) -> list[Any]:
    return [out.outputs[0] for out in llm.generate(prompts, sampling, use_tqdm=False)]


def ask(structured: Any, seed: int = 0, **how: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": seed, "structured": structured} | how)


def is_answer(text: str | None) -> bool:
    assert text is not None
    found = json.loads(text)
    return set(found) == {"kind", "ok"} and found["kind"] in ("a", "bb") and found["ok"] in (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_form(llm: LLM, temperature: float) -> None:
    forms: list[tuple[Any, Any]] = [
        (JSON, is_answer),
        ({"json_schema": json.dumps(SCHEMA)} | COMPACT, is_answer),
        ({"json_schema": Answer} | COMPACT, Answer.model_validate_json),
        ({"regex": "[ab]{3}-[0-9]+x"}, lambda text: re.fullmatch("[ab]{3}-[0-9]+x", text)),
        ({"choice": ["true", 'say "so"', "no"]}, lambda t: t in ("true", 'say "so"', "no")),
        ({"grammar": 'start: "<" ("a" | "b") ">"'}, lambda t: t in ("<a>", "<b>")),
        ({"grammar": 'root ::= "<" [ab] ">"'}, lambda t: t in ("<a>", "<b>")),
    ]
    for form, accepts in forms:
        for done in run(llm, [ask(form, i, temperature=temperature) for i in range(4)]):
            if done.finish_reason == "stop":
                assert accepts(done.text), (form, done.text)
                assert done.token_ids[-1] == EOS and done.stop_reason is None
            else:  # cut off: a number may be long
                assert done.finish_reason == "length" and "regex" in form
    objects = run(llm, [ask({"json_object": True}, i, max_tokens=30) for i in range(4)])
    assert all(done.text.startswith("{") for done in objects)


def test_rows_beside_it_draw_what_they_draw_alone(llm: LLM) -> None:
    free = [SamplingParams(max_tokens=20, seed=i, temperature=0.9) for i in range(4)]
    alone, formed = run(llm, free), run(llm, [ask(JSON, i) for i in range(4)])
    mixed = [free[0], ask(JSON, 1), free[2], ask(JSON, 3)]
    pairs = zip(run(llm, mixed), (alone[0], formed[1], alone[2], formed[3]), strict=True)
    for found, expected in pairs:
        assert found.token_ids == expected.token_ids
        np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, atol=1e-5)


def test_an_answer_depends_on_the_request_alone(llm: LLM) -> None:
    """Not on preemption, swapping, chunks, prefix hits, decode steps or what draws."""
    sampling = [ask(JSON, i, logprobs_mode="processed") for i in range(8)]
    prompts = [f"{'some more of it ' * 3}{i}" for i in range(8)]
    expected = run(llm, sampling, prompts)
    crowded = make_llm(num_blocks=48)
    variants = [llm, crowded, make_llm(num_blocks=48, swap_space_gib=0.01, swap_min_tokens=1)]
    variants += [make_llm(separate_draw=False), make_llm(decode_steps=3), make_llm(mixed=True)]
    for other in variants:
        for found, wanted in zip(run(other, sampling, prompts), expected, strict=True):
            assert found.token_ids == wanted.token_ids
            np.testing.assert_allclose(found.token_logprobs, wanted.token_logprobs, atol=1e-5)
    assert crowded.stats()["preemptions"] > 0


@pytest.mark.parametrize(
    "shape",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "decode_steps": 2},
    ],
    ids=str,
)
def test_on_a_mesh(llm: LLM, shape: dict[str, int]) -> None:
    """Shares of the vocabulary, replicas, both; rows without a form beside them."""
    sampling = [ask(JSON, i, logprobs_mode="tempered") for i in range(6)]
    sampling[2] = SamplingParams(max_tokens=20, seed=2)
    prompts = [f"{'a b ' * i}{i}" for i in range(6)]
    other = make_llm(**shape)
    pairs = zip(run(other, sampling, prompts), run(llm, sampling, prompts), strict=True)
    for found, expected in pairs:
        assert found.token_ids == expected.token_ids
        np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, atol=1e-4)
        if expected.allowed_logprobs is not None:
            both = found.allowed_logprobs, expected.allowed_logprobs
            np.testing.assert_allclose(*both, atol=1e-4)
    ids = [make_tokenizer().encode(prompts[0]) + run(llm, sampling, prompts)[0].token_ids]
    how: dict[str, Any] = {"structured": JSON, "prompt_lens": [1]}
    np.testing.assert_allclose(other.score(ids, **how)[0], llm.score(ids, **how)[0], atol=1e-4)


def test_samples_and_streams(llm: LLM) -> None:
    asked = ask(JSON, 5, n=3)
    (out,) = llm.generate("make ", asked, use_tqdm=False)
    assert all(is_answer(done.text) for done in out.outputs)
    assert len({tuple(done.token_ids) for done in out.outputs}) > 1
    texts = ["", "", ""]
    for chunk in llm.stream("make ", asked):
        texts[chunk.index] += chunk.text_delta or ""
    assert texts == [done.text for done in out.outputs]


def test_snapshots(llm: LLM) -> None:
    expected = run(llm, [ask(JSON, i) for i in range(2)], PROMPTS[:2])
    for prompt, asked in zip(PROMPTS[:2], [ask(JSON, i) for i in range(2)], strict=True):
        llm.add_request(prompt, asked)
    for _ in range(6):
        llm.step()
    taken = llm.snapshot()
    for _ in range(2):
        llm.restore(taken)
        ended = []
        while llm.has_unfinished():
            ended += llm.step()
        texts = {out.prompt: out.outputs[0].text for out in ended}
        assert texts == {p: done.text for p, done in zip(PROMPTS[:2], expected, strict=True)}


def test_what_ends_a_text(llm: LLM) -> None:
    """min_tokens, ignore_eos, stop ids and strings hold as far as the form leaves anything else."""
    digits = {"regex": "[0-9]+"}
    for done in run(llm, [ask(digits, i, min_tokens=12) for i in range(4)]):
        assert EOS not in done.token_ids[:12] and re.fullmatch("[0-9]{12,}", done.text)
    for done in run(llm, [ask({"choice": ["true", "no"]}, i, min_tokens=9) for i in range(4)]):
        assert done.finish_reason == "stop" and done.text in ("true", "no")
    for done in run(llm, [ask(digits, i, ignore_eos=True, max_tokens=25) for i in range(4)]):
        assert done.finish_reason == "length" and len(done.token_ids) == 25
    for done in run(llm, [ask({"choice": ["no"]}, i, ignore_eos=True) for i in range(4)]):
        assert (done.text, done.finish_reason) == ("no", "stop")
    for done in run(llm, [ask(JSON, i, stop='"ok"') for i in range(4)]):
        assert done.stop_reason == '"ok"' and done.text in ('{"kind":"a",', '{"kind":"bb",')
    colon = make_tokenizer().encode('":')[0]
    for done in run(llm, [ask(JSON, i, stop_token_ids=[colon]) for i in range(4)]):
        assert done.stop_reason == colon and done.token_ids[-1] == colon
    for done in run(llm, [ask(JSON, i, stop_token_ids=[END]) for i in range(4)]):
        assert is_answer(done.text)  # a form never has it


def test_penalties_biases_and_top_lists(llm: LLM) -> None:
    """A mask comes after all that moves logits, and no top list has what it forbids."""
    a, b = make_tokenizer().encode("ab")
    how: dict[str, Any] = {"presence_penalty": 2.0, "logit_bias": {a: 3.0, EOS: 5.0}, "logprobs": 3}
    how |= {"logprobs_mode": "processed", "top_p": 0.9, "top_k": 5}
    for done in run(llm, [ask({"regex": "(a|b){6}"}, i, **how) for i in range(4)]):
        assert re.fullmatch("[ab]{6}", done.text)
        for found in done.logprobs[:6]:
            assert {t for t, p in found.items() if np.isfinite(p.logprob)} <= {a, b}
        assert done.token_logprobs[6] == 0.0  # EOS alone was left


def test_logprobs(llm: LLM) -> None:
    """ "processed" is the model's distribution over what the mask allows; "tempered" with the mass
    of that beside it comes to the same; "raw" knows nothing of it.
    """
    tokens = make_tokenizer().encode("23456789")
    for temperature in (1.0, 0.7):
        how = {"temperature": temperature, "max_tokens": 6}
        modes = [ask({"regex": "[2-9]{6}"}, 3, logprobs_mode=m, **how) for m in MODES]
        raw, tempered, processed = run(llm, modes, [PROMPTS[0]] * 3)
        assert raw.token_ids == tempered.token_ids == processed.token_ids
        ids = [*make_tokenizer().encode(PROMPTS[0]), *raw.token_ids]
        start = len(ids) - 6
        full = all_logprobs(ids, start, temperature)
        inside = np.logaddexp.reduce(full[:, tokens], axis=1)
        own = full[np.arange(6), raw.token_ids]
        np.testing.assert_allclose(tempered.token_logprobs, own, atol=1e-5)
        np.testing.assert_allclose(tempered.allowed_logprobs, inside, atol=1e-5)
        np.testing.assert_allclose(processed.token_logprobs, own - inside, atol=1e-5)
        at_one = all_logprobs(ids, start, 1.0)[np.arange(6), raw.token_ids]
        np.testing.assert_allclose(raw.token_logprobs, at_one, atol=1e-5)
        assert raw.allowed_logprobs is None and processed.allowed_logprobs is None


MODES = ("raw", "tempered", "processed")


def all_logprobs(ids: list[int], start: int, temperature: float) -> np.ndarray:
    """Of every token in the place of each from `start` on, by the dense model."""
    return dense_logprobs(params(), ids, temperature)[start - 1 : -1]


@pytest.mark.parametrize(
    "form",
    [
        "json",
        {},
        {"json_schema": {}, "regex": "a"},
        {"json_schema": 3},
        {"json_schema": "{"},
        {"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}},
        {"json_schema": {"$ref": "http://10.0.0.1/x"}},
        {"json_schema": {"type": "no such type"}},
        {"json_object": {}},
        {"regex": "("},
        {"regex": ""},
        {"choice": []},
        {"choice": "ab"},
        {"grammar": "start: missing"},
        {"grammar": 3},
        {"regex": "a", "disable_any_whitespace": 1},
        {"guidance": "x"},
    ],
    ids=str,
)
def test_what_is_no_form_is_that_requests_error(llm: LLM, form: Any) -> None:
    with pytest.raises(RequestError, match=r"request 1: structured[:=]"):
        llm.generate(PROMPTS[:2], [SamplingParams(), ask(form)], use_tqdm=False)
    outs = llm.generate(PROMPTS[:2], [ask(JSON), ask(form)], on_error="return", use_tqdm=False)
    assert is_answer(outs[0].outputs[0].text) and isinstance(outs[1].error, RequestError)


def test_a_form_that_fails_on_its_way_harms_no_other(llm: LLM) -> None:
    nothing = {"grammar": 'start: "a" X\nX: /b/ & /c/'}  # after "a" no text goes on
    outs = llm.generate(PROMPTS[:3], [ask(JSON), ask(nothing), ask(JSON, 2)], on_error="return")
    assert [out.error is None for out in outs] == [True, False, True]
    assert "structured: after 1 tokens: " in str(outs[1].error)
    assert is_answer(outs[0].outputs[0].text) and is_answer(outs[2].outputs[0].text)
    assert llm.stats()["blocks_in_use"] == 0


def test_no_tokenizer_no_form() -> None:
    plain = LLM(params(), **vars(ENGINE))
    with pytest.raises(RequestError, match="structured output needs a tokenizer"):
        plain.generate([[1, 2]], ask(JSON), use_tqdm=False)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'jpaged\[structured\]'"):
        make_llm().generate("a", ask(JSON), use_tqdm=False)


def test_the_functions_take_forms() -> None:
    how = {"tokenizer": make_tokenizer(), "engine_config": dataclasses.replace(ENGINE)}
    (out,) = jpaged.generate(params(), "q", ask({"choice": ["no"]}), **how)
    assert out.outputs[0].text == "no"
    jpaged.release(compiled=True)


@pytest.mark.own_steps
@pytest.mark.parametrize("separate", [True, False])
def test_a_strict_engine_compiles_nothing_later(separate: bool) -> None:
    small = {"strict": True, "max_num_seqs": 8, "separate_draw": separate}
    with pytest.raises(RequestError, match="structured_output=True"):
        run(make_llm(**small), [ask(JSON)], PROMPTS[:1])
    llm = make_llm(**small, structured_output=True)
    before = llm.stats()["num_compiles"]
    kinds = [ask(JSON), ask(JSON, presence_penalty=1.0), SamplingParams(), ask(JSON, top_k=2)]
    run(llm, kinds)
    assert llm.stats()["num_compiles"] == before
    assert any(bucket.masks and bucket.hits for bucket in llm.buckets())


def test_score_under_the_mask(llm: LLM) -> None:
    """What a rollout's "processed" logprobs are, whatever the chunks; nothing changes before it."""
    asked = [ask(JSON, i, logprobs_mode="processed", temperature=0.8) for i in range(3)]
    outs = llm.generate(PROMPTS[:3], asked, use_tqdm=False)
    ids = [out.prompt_token_ids + out.outputs[0].token_ids for out in outs]
    lens = [len(out.prompt_token_ids) for out in outs]
    how: dict[str, Any] = {"temperature": 0.8, "structured": JSON, "prompt_lens": lens}
    plain: Any = llm.score(ids, temperature=0.8)
    masked: Any = llm.score(ids, **how)
    for found, out, n, before in zip(masked, outs, lens, plain, strict=True):
        np.testing.assert_allclose(found[n - 1 :], out.outputs[0].token_logprobs, atol=1e-5)
        np.testing.assert_array_equal(found[: n - 1], before[: n - 1])
        assert found[n - 1 :].sum() > before[n - 1 :].sum()
    with pytest.raises(RequestError, match=r"sequence 1: token \d+ at position \d+ is not of it"):
        llm.score([ids[0], ids[1][:-1] + ids[1][-2:]], **{**how, "prompt_lens": lens[:2]})
    wrongs: list[Any] = [{"prompt_lens": None}, {"prompt_lens": lens[:1]}, {"structured": None}]
    for wrong in wrongs:
        with pytest.raises(RequestError, match="prompt_lens"):
            llm.score(ids, **(how | wrong))


def test_what_is_certain_is_taken_side_by_side(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens and logprobs in fewer steps, beside a row without a form too."""
    wordy = {"regex": "(the same beginning of it|another such beginning) [ab]{2}( and an ending)"}
    sampling = [ask(wordy, i, logprobs=2) for i in range(3)] + [SamplingParams(seed=3)]
    before = llm.stats()["dispatches"]
    found = run(llm, sampling)
    between = llm.stats()["dispatches"]
    monkeypatch.setattr(scheduler, "LEAST_RUN", 0)
    for one, other in zip(found, run(llm, sampling), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-5)
        assert one.logprobs is None or [set(x) for x in one.logprobs] == [
            set(x) for x in other.logprobs
        ]
    assert between - before < 25 < 35 < llm.stats()["dispatches"] - between


@pytest.mark.middle
def test_guesses_are_under_their_masks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a form that guess, of their own text or by a model, get what they get without."""
    monkeypatch.setattr(scheduler, "LEAST_RUN", 0)  # nothing is taken for certain
    shown = '{"kind":"bb","ok":true} {"kind":"a","ok":false} '
    prompts = [f"{shown}{i}" for i in range(4)]
    asked = [ask(JSON, i, logprobs_mode="processed", min_tokens=3 * i) for i in range(3)]
    asked.append(SamplingParams(max_tokens=20, temperature=0))
    expected = run(llm, asked, prompts)
    for how in ({"method": "ngram"}, {"method": "draft", "model": params()}):
        guessing = make_llm(speculative={"num_tokens": 3, "adaptive": False, **how})
        for found, wanted in zip(run(guessing, asked, prompts), expected, strict=True):
            assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)
            np.testing.assert_allclose(found.token_logprobs, wanted.token_logprobs, atol=1e-5)
        assert guessing.stats()["accepted_tokens"] > 0


def test_batch_files_draw_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every field that asks for the form, and the same seeds: the library's texts."""
    llm = make_llm()
    expected = [run(llm, ask(JSON, i), [f"say {i}: "])[0] for i in range(3)]
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice = run(llm, ask({"choice": ["no", "true"]}, 3), ["say 3: "])[0]
    compact = {"json": SCHEMA} | COMPACT
    bodies: list[dict[str, Any]] = [
        {"structured_outputs": compact},
        {"structured": JSON},
        {"structured_outputs": compact},
        {"guided_choice": ["no", "true"]},
        {"response_format": named},
        {"guided_regex": "("},
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": f"say {i}: ", "max_tokens": 60, "seed": i} | fields}
        for i, fields in enumerate(bodies)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(serve_batch, "make_llm", lambda args: llm)
    assert serve_batch.main([str(source), "--output", str(target)]) == 2  # the last line failed
    found = {a["custom_id"]: a for a in map(json.loads, target.read_text().splitlines())}
    texts = [found[str(i)]["response"]["body"]["choices"][0]["text"] for i in range(5)]
    assert texts[:4] == [done.text for done in (*expected, choice)]
    assert texts[4].lstrip().startswith("{")
    assert "structured: regex: " in json.dumps(found["5"])


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"regex": "(.*a.{200})"},
        {"regex": ".*".join("abcdefghij" * 5)},
        {"json_schema": '{"type":"array","items":' * 5000 + "{}" + "}" * 5000},
        {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
        {"json_schema": {"enum": [f"value-{i}" for i in range(20000)]}},
        {"json_schema": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": "start: e\ne: e e | /a/"},
        {"grammar": "a" * 2_000_000},
    ],
    ids=lambda form: str(form)[:40],
)
def test_forms_of_an_attacker_are_served_or_refused(llm: LLM, form: Any) -> None:
    sampling = [ask(form, max_tokens=12), ask(JSON)]
    outs = llm.generate(PROMPTS[:2], sampling, on_error="return", use_tqdm=False)
    assert outs[0].error is None or isinstance(outs[0].error, RequestError)
    assert is_answer(outs[1].outputs[0].text) and llm.stats()["blocks_in_use"] == 0


def is_whole(form: dict[str, Any], text: str) -> bool:
    """Whether a text is one of the form."""
    import llguidance  # pyright: ignore[reportMissingImports]

    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, spec.grammar_of(form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_white_space_is_bounded_unless_the_schema_says_more() -> None:
    spaced = ['{"a":1}', '{"a": 1}', '{\n    "a": 1\n}', '{"a":  1}', '{"a":' + "\n" * 9 + "1}"]
    said: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [1, 1, 1, 0, 0]),
        ({"lenient": True}, [1, 1, 1, 0, 0]),
        ({"whitespace_flexible": True}, [1, 1, 1, 1, 1]),
        ({"whitespace_flexible": False}, [1, 0, 0, 0, 0]),
        ({"whitespace_pattern": "[ ]+"}, [1, 1, 0, 1, 0]),
    ]
    assert [is_whole({"json_object": True}, text) for text in spaced] == said[0][1]
    for guidance, expected in said:
        schema = {"type": "object", **({"x-guidance": guidance} if guidance else {})}
        escaped = json.dumps(schema).replace("x-guidance", "x\\u002dguidance")
        for form in ({"json_schema": schema}, {"json_schema": escaped}):
            assert [is_whole(form, text) for text in spaced] == expected, guidance
            assert [is_whole(form | COMPACT, text) for text in spaced] == [1, 0, 0, 0, 0], guidance
    with pytest.raises(RequestError, match=r"^structured: json_schema: x-guidance=3: must be"):
        spec.grammar_of({"json_schema": {"x-guidance": 3}})


@pytest.mark.parametrize("form", [{"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}])
def test_a_model_that_likes_white_space_ends(llm: LLM, form: Any) -> None:
    """Documents end by themselves, however likely white space is."""
    spaces = {make_tokenizer().encode(space)[0]: 50.0 for space in " \n\t"}
    asked = [ask(form, seed, max_tokens=150, logit_bias=spaces) for seed in range(8)]
    for done in run(llm, asked, PROMPTS * 2):
        assert done.finish_reason == "stop" and is_answer(done.text)


def test_a_lexer_that_neighbours_fill(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one form share a lexer, which has so many states: none fails by the others'."""
    form = {"regex": "([a-h]*a[a-h]{12}x)|([a-h]*b[a-h]{14}y)"}
    sampling = [ask(form, seed, max_tokens=40, temperature=4.0) for seed in range(24)]
    prompts = ["abaab"] * len(sampling)
    alone = [done.token_ids for done in run(llm, sampling, prompts)]
    monkeypatch.setitem(grammars.LIMITS, "max_lexer_states", 200)
    monkeypatch.setattr(llm.session.builder, "_grammars", None)
    made: list[Any] = []
    renewed = grammars.Grammars.renewed

    def counted(self: grammars.Grammars, form: grammars.Form) -> grammars.Form | None:
        made.append(renewed(self, form))
        return made[-1]

    monkeypatch.setattr(grammars.Grammars, "renewed", counted)
    crowded = run(llm, sampling, prompts)
    assert [done.token_ids for done in crowded] == alone and made and all(made)


@pytest.mark.parametrize("form", [{"regex": "[a-z ]{3,20}"}, {"regex": "[A-Za-z0-9 ]+[.]"}, JSON])
def test_masks_are_those_of_every_token_by_itself(llm: LLM, form: Any) -> None:
    """What llguidance takes all at once (grammars.WORDS) changes no mask."""
    import llguidance  # pyright: ignore[reportMissingImports]

    matcher = llm.session.builder.matcher(form)
    grammars, rng = matcher.grammars, np.random.default_rng(0)
    plain = grammars._tokenizer.with_slices([])
    alone = llguidance.LLMatcher(plain, spec.grammar_of(form), log_level=0)
    for _ in range(12):
        masks = np.zeros((2, grammars.words), np.int32)
        grammars.fill([(matcher, 0)], masks)
        alone.unsafe_compute_mask_ptr(masks[1].ctypes.data, masks[1].nbytes)
        assert masks[0].any() and (masks[0] == masks[1]).all()
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token in grammars.eos_ids:
            break
        matcher.push(token)
        alone.consume_token(token)
