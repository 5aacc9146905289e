"""score: log p(token t+1 | tokens <= t), as the dense forward has it."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import jpaged
from jpaged import CapacityError, Params, RequestError
from tests.tiny import (
    CONFIG,
    ENGINE,
    compiles,
    dense_greedy,
    dense_logprobs,
    engine,
    make_params,
    make_prompts,
)

LISTS = make_prompts(2, 9, 41, 16, 64)


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


def score(params: Params, token_lists: object, **options: object) -> list[np.ndarray]:
    return jpaged.score(params, token_lists, **{"engine_config": ENGINE} | options)  # pyright: ignore


@pytest.mark.own_steps
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_equals_the_dense_model(params: Params, temperature: float) -> None:
    """One to four chunks each, packed together; up to the whole context; every temperature without
    a compile.
    """
    score(params, LISTS[:1])
    with compiles() as names:
        found = score(params, LISTS, temperature=temperature)
    assert names == []
    for tokens, row in zip(LISTS, found, strict=True):
        expected = dense_logprobs(params, tokens, temperature)
        assert row.dtype == np.float32 and row.shape == (len(tokens) - 1,)
        np.testing.assert_allclose(row, expected[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-4)


def test_greedy_flags(params: Params) -> None:
    """True exactly where the next token is the most likely one; both kinds occur."""
    tokens = LISTS[1] + dense_greedy(params, LISTS[1], 6)
    logprobs, greedy = score(params, [tokens, LISTS[2]], return_greedy=True)
    for row, flags, given in zip(logprobs, greedy, [tokens, LISTS[2]], strict=True):
        assert flags.dtype == bool and flags.shape == row.shape
        best = dense_logprobs(params, given)[:-1].argmax(axis=1)
        np.testing.assert_array_equal(flags, best == given[1:])
    assert greedy[0][len(LISTS[1]) - 1 :].all() and not greedy[1].all()


def test_short_and_none(params: Params) -> None:
    one, two = score(params, [[5], [5, 6]])
    assert one.shape == (0,) and one.dtype == np.float32 and two.shape == (1,)
    assert score(params, []) == []
    assert score(params, [], return_greedy=True) == ([], [])
    flags = jpaged.score(params, [[5]], engine_config=ENGINE, return_greedy=True)[1][0]
    assert flags.shape == (0,) and flags.dtype == bool


def test_forms(params: Params) -> None:
    expected = score(params, [LISTS[1]])
    for form in (
        LISTS[1],
        np.array(LISTS[1]),
        [np.array(LISTS[1])],
        {"prompt_token_ids": LISTS[1]},
    ):
        np.testing.assert_array_equal(score(params, form), expected)


def test_takes_no_prefix_hits_and_leaves_none_wrong(params: Params) -> None:
    """Scored after a generation that cached its prefix, and generated after it was scored."""
    sampling = jpaged.SamplingParams(temperature=0, max_tokens=1)
    fresh = score(params, [LISTS[2]])[0]
    first = jpaged.generate(params, [LISTS[2]], sampling, engine_config=ENGINE)
    np.testing.assert_allclose(score(params, [LISTS[2]])[0], fresh, atol=1e-5)
    again = jpaged.generate(params, [LISTS[2]], sampling, engine_config=ENGINE)
    assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("token_lists", "options", "message"),
    [
        ([[1, 2]], {"temperature": 0}, r"temperature=0: a greedy distribution"),
        ([[1, 2]], {"temperature": -1.0}, r"temperature=-1.0"),
        ([[1, 2]], {"temperature": math.nan}, r"temperature=nan"),
        ([[1, 2], []], {}, r"empty"),
        ([[1, 97]], {}, r"token id 97 is outside the vocabulary"),
        ([[1, 2], [1] * 65], {}, r"sequence 1 of 65 tokens is longer than max_model_len=64"),
        (["text"], {}, r"needs a tokenizer"),
    ],
)
def test_bad_input(
    params: Params, token_lists: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        score(params, token_lists, **options)


def test_does_not_fit_the_pool(params: Params) -> None:
    with pytest.raises(
        CapacityError, match=r"does not fit the KV pool of 8 blocks of 4.*num_blocks"
    ):
        score(params, [[1] * 33], engine_config=engine(num_blocks=8))


def test_a_vocabulary_smaller_than_the_top_list() -> None:
    """max_logprobs is a width of the compiled step; a toy vocabulary may be smaller."""
    toy = dataclasses.replace(CONFIG, num_layers=1, vocab_size=11, eos_token_ids=(10,))
    params = make_params(0, toy)
    (row,) = score(params, [[1, 2, 3]], engine_config=engine(max_logprobs=20))
    np.testing.assert_allclose(row, dense_logprobs(params, [1, 2, 3])[[0, 1], [2, 3]], atol=1e-4)


def test_bf16(params: Params) -> None:
    """f32 logits and softmax over bfloat16 weights: near the dense forward of the same weights."""
    half = make_params(0, dtype=jax.numpy.bfloat16)
    (row,) = score(half, [LISTS[2]])
    expected = dense_logprobs(half, LISTS[2])[np.arange(40), LISTS[2][1:]]
    assert np.abs(row - expected).max() < 0.3 and np.abs(row - expected).mean() < 0.05
