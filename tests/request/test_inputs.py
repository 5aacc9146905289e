"""The forms of a prompt, and what is refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.adapters import AdapterVersion
from jpaged.errors import CapacityError, RequestError
from jpaged.request.inputs import Inputs, Prompt, as_key, as_list, match_sampling_params
from jpaged.sampling_params import SamplingParams
from tests.tiny import config

VOCAB = 30
A, B = SamplingParams(temperature=0.5), SamplingParams(temperature=0.7)


class Words:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


class Strict:
    """As tokenizers does."""

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeError:
            raise TypeError("TextInputSequence must be str") from None
        return [1]


def inputs(tokenizer: Any = None) -> Inputs:
    return Inputs(config(vocab_size=VOCAB), 100, tokenizer, None)


def test_half_a_surrogate_pair():
    with pytest.raises(RequestError, match="cannot be tokenized"):
        inputs(Strict()).prompt("a\ud800")


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ([], 0),
        ("one text", 1),
        ([1, 2, 3], 1),
        ([np.int64(1), 2], 1),
        (np.array([1, 2]), 1),
        (jnp.array([1, 2]), 1),
        ({"prompt": "x"}, 1),
        ({"prompt_token_ids": [1]}, 1),
        (["a", "b"], 2),
        (("a", "b"), 2),
        ([[1, 2], [3]], 2),
        ([[1], "a", np.array([2]), jnp.array([3]), {"prompt": "x"}, {"prompt_token_ids": [4]}], 6),
        ([[]], 1),
        ([1, "a"], 2),  # its first prompt is refused later, by itself
    ],
    ids=str,
)
def test_as_list(prompts: Any, count: int):
    assert len(as_list(prompts)) == count


@pytest.mark.parametrize(
    "prompts",
    [np.zeros((2, 3), np.int32), jnp.zeros((2, 3), jnp.int32), np.zeros(3), 3, None, ..., 1.5],
    ids=repr,
)
def test_as_list_refuses(prompts: Any):
    with pytest.raises(RequestError, match=r"unpadded|pass a str"):
        as_list(prompts)


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("a bb ccc", ("a bb ccc", [1, 2, 3])),
        ([4, 5], (None, [4, 5])),
        ((4, 5), (None, [4, 5])),
        ([np.int32(4), np.uint8(5)], (None, [4, 5])),
        (np.array([6], np.uint16), (None, [6])),
        (jnp.array([6, 7]), (None, [6, 7])),
        (list(jnp.array([6, 7])), (None, [6, 7])),
        ({"prompt": "a"}, ("a", [1])),
        ({"prompt_token_ids": [8]}, (None, [8])),
        ({"prompt_token_ids": np.array([8])}, (None, [8])),
        ({"prompt": "zz", "prompt_token_ids": [9]}, ("zz", [9])),
        ([0, VOCAB - 1], (None, [0, VOCAB - 1])),
    ],
    ids=str,
)
def test_tokenize(prompt: Any, want: tuple[str | None, list[int]]):
    made = inputs(Words()).prompt(prompt)
    assert (made.text, list(made.ids)) == want and all(type(i) is int for i in made.ids)
    assert inputs().prompt(made) is made, "what is a Prompt already is returned as it is"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ([], "is empty"),
        (np.zeros(0, np.int32), "is empty"),
        ([VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([3, -1, 99], "token id -1 is outside"),
        (np.array([3, 99]), "token id 99 is outside"),
        ([2**70], "is outside"),
        ([1, 2.0], "2.0: must be an integer"),
        ([True, 1], "True: must be an integer"),
        ([np.bool_(True)], "must be an integer"),
        ([1, None], "None: must be an integer"),
        (["a"], "'a': must be an integer"),
        ([[1, 2]], "must be an integer"),
        ([np.array([1, 2])], "must be an integer"),
        ([np.array([1.5])], "must be an integer"),
        (np.zeros((2, 2), np.int32), "unpadded"),
        (np.zeros(2), "unpadded"),
        (np.array([True]), "unpadded"),
        (jnp.zeros((1, 2), jnp.int32), "unpadded"),
        (7, "prompt of type int"),
        (None, "prompt of type NoneType"),
        (b"ab", "bytes"),
        ({}, "with keys"),
        ({"text": "a"}, r"keys \['text'\]"),
        ({"prompt": 3}, "with keys"),
        ({"prompt": "a", "seed": 1}, "with keys"),
        ({"prompt_token_ids": [99]}, "is outside"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids"),
        ({"prompt_token_ids": {"prompt": "a"}}, "prompt_token_ids"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "'prompt'"),
        ({1: 2}, "with keys"),
    ],
    ids=str,
)
def test_tokenize_refuses(prompt: Any, message: str):
    with pytest.raises(RequestError, match=message):
        inputs(Words()).prompt(prompt)


def test_only_text_needs_a_tokenizer():
    assert inputs().prompt([1]) == Prompt(None, (1,))
    for prompt in ("a", {"prompt": "a"}):
        with pytest.raises(RequestError, match="a str prompt needs a tokenizer"):
            inputs().prompt(prompt)


def test_a_prompt_must_leave_room_for_a_token():
    """A sequence that is scored need not, and is measured by who scores it."""
    for prompt in ([1] * 100, np.ones(100, np.int32), " ".join(["a"] * 100)):
        with pytest.raises(CapacityError, match="prompt of 100 tokens leaves no room"):
            inputs(Words()).prompt(prompt)
        assert len(inputs(Words()).prompt(prompt, must_fit=False).ids) == 100
    assert len(inputs().prompt([1] * 99).ids) == 99


def test_what_cached_blocks_are_shared_under():
    adapters = {name: AdapterVersion(name=name, version=1, rank=1, data=None) for name in "ab"}
    made = Inputs(config(vocab_size=VOCAB), 100, None, None, adapters)
    of_call, named = adapters["a"], {"prompt_token_ids": [1], "adapter": "b"}
    assert made.prompt([1], of_call).adapter is of_call and made.prompt([1]).adapter is None
    assert made.prompt(named, of_call).adapter is adapters["b"], "a prompt's own name counts"
    with pytest.raises(RequestError, match=r"adapter 'c' is unknown: there are a, b; add_adapter"):
        made.prompt({"prompt_token_ids": [1], "adapter": "c"})
    assert made.prompt({"prompt_token_ids": [1], "cache_salt": "x"}).salt == "x"
    for salt in ("", "a\n", 3):
        with pytest.raises(RequestError, match=r"cache_salt=.*non-empty str"):
            made.prompt({"prompt_token_ids": [1], "cache_salt": salt})


def test_match_sampling_params():
    assert match_sampling_params(None, 2) == [SamplingParams(), SamplingParams()]
    assert (
        match_sampling_params(A, 2) == [A, A]
        and match_sampling_params([A, B], 2) == [A, B]
        and match_sampling_params((A,), 1) == [A]
    )
    assert match_sampling_params([], 0) == match_sampling_params(A, 0) == []


@pytest.mark.parametrize("given", [[A], [A, B, A], []], ids=len)
def test_match_sampling_params_refuses_another_length(given: list[SamplingParams]):
    with pytest.raises(RequestError, match=f"{len(given)} sampling_params for 2 prompts"):
        match_sampling_params(given, 2)


@pytest.mark.parametrize("given", [{"temperature": 1}, "x", 3, [A, None], [{}, {}]], ids=str)
def test_match_sampling_params_refuses_other_types(given: Any):
    with pytest.raises(RequestError, match="sampling_params of type"):
        match_sampling_params(given, 2)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 2**200, True, 1.0, "1", None])
def test_a_seed_that_would_be_cut_off_is_refused(seed: Any):
    with pytest.raises(RequestError, match="seed="):
        as_key(seed)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63), np.uint64(2**63)])
def test_a_seed_has_64_bits(seed: Any):
    assert as_key(seed) == ((int(seed) >> 32) % 2**32, int(seed) % 2**32)
