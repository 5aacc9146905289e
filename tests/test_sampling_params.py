"""SamplingParams: every bad value is refused by name, every good one passes."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams

CONFIG = EngineConfig(max_logprobs=5, max_logit_bias=4)
VOCAB = 50
REALS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
WHOLES = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
FLAGS = ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"]


def validate(**fields: Any) -> None:
    SamplingParams(**fields).validate(CONFIG, VOCAB)


def refused(name: str, value: Any, **others: Any) -> None:
    with pytest.raises(RequestError, match=rf"\b{name}\b"):
        validate(**{name: value}, **others)


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": np.float32(0.7), "top_k": np.int64(3)},
    {
        "temperature": np.float16(0.5),
        "min_p": np.array(0.5),
        "max_tokens": np.array(5),
        "seed": np.uint64(2**63),
    },
    {"temperature": 1e38},
    {"top_p": 1e-6, "min_p": 1.0},
    {"top_k": -1},
    {"top_k": 10**6},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"seed": jnp.int32(3), "top_k": jnp.int32(3)},
    {"max_tokens": None, "min_tokens": 1000},
    {"max_tokens": 3, "min_tokens": 3},
    {"logprobs": 0, "prompt_logprobs": 5, "logprobs_mode": "processed"},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.1},
    {"repetition_penalty": 1e-6},
    {"repetition_penalty": 1e6},
    {"stop": "x", "stop_token_ids": (0, 49)},
    {"stop": ["x", "yz"], "stop_token_ids": []},
    {"stop": []},
    {"logit_bias": {}},
    {"logit_bias": {0: -100, 49: 3.5, np.int32(7): np.float32(1)}},
    {"logit_bias": {0: -1e30, 1: 1e30}},
    {"temperature": 1e-300},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_values(fields: dict[str, Any]):
    validate(**fields)


BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 1e-45),
    ("repetition_penalty", 1e-20),
    ("repetition_penalty", 9e-7),
    ("repetition_penalty", 1.1e6),
    ("n", 0),
    ("n", 257),
    ("n", -1),
    ("top_k", -2),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 6),
    ("prompt_logprobs", 6),
    ("logprobs_mode", "cooked"),
    ("logprobs_mode", None),
    ("logprobs_mode", ["raw"]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 3),
    ("stop", {"a"}),
    ("stop", [None]),
    ("stop", b"ab"),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 7),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", {1}),
    ("logit_bias", [1, 2]),
    ("logit_bias", {VOCAB: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"3": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", {3: math.inf}),
    ("logit_bias", {3: "1"}),
    ("logit_bias", dict.fromkeys(range(5), 1.0)),
    ("logit_bias", {3: 1e39}),
    ("logit_bias", {3: 3e38}),
    ("logit_bias", {3: -1.1e30}),
    ("logit_bias", {3: -math.inf}),
    ("logit_bias", {3: 10**400}),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_values(name: str, value: Any):
    refused(name, value)


def test_min_tokens_above_max_tokens():
    refused("min_tokens", 5, max_tokens=4)


NO_NUMBERS = [
    "1",
    "abc",
    None,
    [1.0],
    (),
    {},
    ...,
    1j,
    b"1",
    np.array([1, 2]),
    np.array([0.5, 0.5]),
    np.bool_(True),
]


@pytest.mark.parametrize("value", [*NO_NUMBERS, True, False], ids=repr)
@pytest.mark.parametrize("name", REALS)
def test_a_real_is_a_number(name: str, value: Any):
    refused(name, value)


@pytest.mark.parametrize(
    "value", [*NO_NUMBERS, 1.0, 0.5, math.nan, math.inf, True, False, np.float32(1)], ids=repr
)
@pytest.mark.parametrize("name", WHOLES)
def test_a_whole_is_an_integer(name: str, value: Any):
    if value is None and name not in ("n", "top_k", "min_tokens"):
        validate(**{name: None})
    else:
        refused(name, value)


@pytest.mark.parametrize("value", [0, 1, "yes", None, np.bool_(True)], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_a_bool(name: str, value: Any):
    refused(name, value)


@given(
    name=st.sampled_from(REALS),
    value=st.sampled_from([math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, -(10**400)]),
)
def test_no_real_is_beyond_float32(name: str, value: Any):
    refused(name, value)


@given(name=st.sampled_from(REALS), value=st.floats(max_value=-2.001) | st.integers(max_value=-3))
def test_no_real_is_negative(name: str, value: Any):
    refused(name, value)


@given(
    name=st.sampled_from([name for name in WHOLES if name != "seed"]),
    value=st.integers(max_value=-2),
)
def test_no_whole_is_negative(name: str, value: int):
    refused(name, value)


@given(st.integers(-(2**70), 2**70))
def test_seeds_have_64_bits(seed: int):
    if -(2**63) <= seed < 2**64:
        validate(seed=seed)
    else:
        refused("seed", seed)


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 1e30),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(-1, 2**40),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(1e-6, 1e6),
        max_tokens=st.none() | st.integers(1, 10**9),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-1e30, 1e30), max_size=4),
    )
)
def test_everything_in_range_passes(params: SamplingParams):
    params.validate(CONFIG, VOCAB)


@pytest.mark.parametrize(
    ("fields", "sampler"),
    [
        ({}, "plain"),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5}, "plain"),
        ({"temperature": 0.5, "seed": 3, "top_k": -1}, "plain"),
        ({"temperature": 0.0, "min_p": 0.1}, "plain"),
        ({"temperature": 0.5, "min_p": 0.1}, "filtered"),
        ({"top_p": 0.9}, "filtered"),
        (
            {
                "temperature": 0.5,
                "top_k": 3,
                "top_p": 0.5,
                "min_p": 0.1,
                "seed": 3,
                "stop_token_ids": [1],
            },
            "filtered",
        ),
        ({"logit_bias": {}}, "plain"),
        ({"logit_bias": {1: 1.0}}, "full"),
        ({"min_tokens": 1}, "full"),
        ({"logprobs": 0}, "full"),
        ({"presence_penalty": 0.1}, "full"),
        ({"frequency_penalty": -0.1}, "full"),
        ({"repetition_penalty": 1.1}, "full"),
    ],
    ids=str,
)
def test_which_step_serves_it(fields: dict[str, Any], sampler: str):
    assert SamplingParams(**fields).sampler == sampler
    assert SamplingParams(**fields).has_penalties is any("penalty" in name for name in fields)


def test_stop_strings():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
