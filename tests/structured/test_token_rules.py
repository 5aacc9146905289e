"""bad_words and allowed_token_ids: which tokens a request may draw, whatever their probability."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.demo import MODEL_PATH
from jpaged.errors import GenerationError, RequestError
from jpaged.structured.token_rules import RuledTokens, TokenRules, word_tokens
from tests.text_model import make_tokenizer, write_folder
from tests.tiny import ENGINE

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
LONG = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(write_folder(tmp_path_factory.mktemp("rules") / "tiny"), **SETTINGS)
    yield llm
    llm.close()


def drawn(llm: LLM, params: SamplingParams, prompt: Any = "hello there") -> list[list[int]]:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return [list(done.token_ids) for done in output.outputs]


def vary(params: SamplingParams, **fields: Any) -> SamplingParams:
    return dataclasses.replace(params, **fields)


def test_only_allowed_tokens_are_drawn(llm: LLM) -> None:
    allowed = [40, 41, 50, 70]
    for tokens in drawn(llm, vary(LONG, allowed_token_ids=allowed, n=3)):
        assert set(tokens) <= set(allowed) and len(tokens) == 30
    assert drawn(llm, vary(LONG, allowed_token_ids=[44], max_tokens=3)) == [[44] * 3]
    everything = list(range(llm.model_config.vocab_size))
    assert drawn(llm, vary(LONG, allowed_token_ids=everything)) == drawn(llm, LONG)


def test_eos_is_drawn_only_if_it_is_allowed(llm: LLM) -> None:
    eos = min(llm.session.inputs.eos_ids)
    ends = vary(LONG, ignore_eos=False, temperature=2.0)
    assert all(len(t) == 30 for t in drawn(llm, vary(ends, allowed_token_ids=[40, 41], n=4)))
    lengths = {len(t) for t in drawn(llm, vary(ends, allowed_token_ids=[40, eos], n=4))}
    assert min(lengths) < 30
    least = vary(ends, allowed_token_ids=[40, eos], n=4, min_tokens=9)
    assert all(len(t) > 9 for t in drawn(llm, least))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_word_is_not_written(llm: LLM, size: int) -> None:
    """Up to the place where it would have come, the answer is what it was."""
    greedy = vary(LONG, temperature=0.0, seed=None)
    [before] = drawn(llm, greedy)
    word = before[4 : 4 + size]
    text = "".join(make_tokenizer().convert_ids_to_tokens(word))
    assert len(text) == size
    [after] = drawn(llm, vary(greedy, bad_words=[text]))
    runs = [after[i : i + size] for i in range(len(after) - size + 1)]
    assert word not in runs and len(after) == 30
    first = next(i for i in range(len(before)) if before[i : i + size] == word)
    assert after[: first + size - 1] == before[: first + size - 1]
    assert after[first + size - 1] != before[first + size - 1]


def test_others_in_the_batch_are_as_alone(llm: LLM) -> None:
    asked = [LONG, vary(LONG, bad_words=["e", "th"]), vary(LONG, allowed_token_ids=[40, 41])]
    together = llm.generate(["hello there"] * 3, asked, use_tqdm=False)
    for output, params in zip(together, asked, strict=True):
        assert [list(output.outputs[0].token_ids)] == drawn(llm, params)


def test_what_was_cut_goes_on_as_before(llm: LLM) -> None:
    params = vary(LONG, bad_words=["e", "rr", " a"])
    [whole] = drawn(llm, params)
    request_id = llm.add_request("hello there", params)
    for _ in range(9):
        llm.step()
    cut = llm.abort(request_id)
    assert cut is not None and 0 < len(cut.outputs[0].token_ids) < 30
    assert drawn(llm, params, cut) == [whole]


def test_guesses_change_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    params = vary(LONG, bad_words=["e", "rr"], temperature=0.0)
    texts = []
    guessing: dict[str, Any] = {"speculative": {"method": "ngram", "num_tokens": 3}}
    for more in ({}, guessing):
        llm = LLM(folder, **SETTINGS, **more)
        texts.append(drawn(llm, params, "rrVrrVrrVrr"))
        llm.close()
    assert texts[0] == texts[1]


def test_a_form_and_a_rule() -> None:
    pytest.importorskip("llguidance")
    sizes: dict[str, Any] = SETTINGS | {"token_buckets": (64,), "seq_buckets": (8,)}
    llm = LLM(str(MODEL_PATH), **sizes)
    structured = {"regex": "[a-f]{8}"}
    words = ["a", "be", "ca", "de"]
    params = SamplingParams(max_tokens=20, structured=structured, bad_words=words)
    banned = word_tokens(llm.tokenizer, words)
    for seed in range(6):
        [output] = llm.generate(["So?"], vary(params, seed=seed), use_tqdm=False)
        [done] = output.outputs
        assert re.fullmatch(structured["regex"], done.text or "")
        tokens = list(done.token_ids)
        for word in banned:
            assert word not in [tuple(tokens[i : i + len(word)]) for i in range(len(tokens))]
    llm.close()


def test_nothing_left_is_an_error(llm: LLM) -> None:
    text = make_tokenizer().convert_ids_to_tokens(44)
    params = vary(LONG, allowed_token_ids=[44], bad_words=[text])
    with pytest.raises(GenerationError, match="allowed_token_ids or bad_words"):
        drawn(llm, params)
    [output] = llm.generate(["a"], params, use_tqdm=False, on_error="return")
    assert output.error is not None
    assert drawn(llm, vary(LONG, max_tokens=2))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids=1000000"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids='a'"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5"),
    ],
)
def test_wrong_values(llm: LLM, fields: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        drawn(llm, vary(LONG, **fields))


def test_words_of_none_ask_for_nothing(llm: LLM) -> None:
    assert drawn(llm, vary(LONG, bad_words=[])) == drawn(llm, LONG)


def test_a_constraint_goes_back_and_forth() -> None:
    rules = TokenRules(70, None, [(3,), (1, 2), (1, 1, 69)], frozenset({5}))
    assert rules.words == 3
    ruled = RuledTokens(rules)

    def banned(one: RuledTokens) -> set[int]:
        mask = np.zeros((1, 3), np.int32)
        rules.fill([(one, 0)], mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert not bits[70:].any()  # beyond the vocabulary
        return set(np.flatnonzero(bits[:70] == 0).tolist())

    assert banned(ruled) == {3}
    ruled.push(1)
    assert banned(ruled) == {3, 2}
    twin = ruled.copy()
    ruled.advance([1])
    assert banned(ruled) == {3, 2, 69} and banned(twin) == {3, 2}
    ruled.go_back(2)
    assert banned(ruled) == {3}
    ruled.rewind([1, 1])
    assert banned(ruled) == {3, 2, 69} and ruled.error is None and ruled.forced() == []


def test_words_are_sequences_at_the_beginning_and_after_a_space() -> None:
    ids = make_tokenizer().convert_tokens_to_ids
    assert word_tokens(make_tokenizer(), ["ab"]) == [
        (ids("a"), ids("b")),
        (ids(" "), ids("a"), ids("b")),
    ]
