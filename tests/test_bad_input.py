"""Scenario 13: what cannot run is a typed error that names the number, and harms no neighbour."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import CapacityError, ConfigError, Params, RequestError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.kept import sessions as kept_sessions
from tests.tiny import ENGINE, config, engine_of, make_params, make_prompts, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = make_prompts(1, 4)


@pytest.fixture(scope="module")
def params() -> Iterator[Params]:
    jpaged.release(compiled=True)
    yield make_params(0, config(num_layers=1))
    jpaged.release(compiled=True)


def generate(
    params: Params, prompts: Any, sampling: Any = GREEDY, **options: Any
) -> list[jpaged.RequestOutput]:
    return jpaged.generate(params, prompts, sampling, engine_config=ENGINE, **options)


def assert_nothing_left() -> None:
    (session,) = kept_sessions()
    if session.pool.has_engine:  # it is made when something can run
        assert session.engine.requests == {} and engine_of(session).replicas[0].blocks.num_used == 0


BAD = {  # scenario 13: (prompt, sampling params, what the error says)
    "no tokens asked for": ([1, 2], SamplingParams(max_tokens=0), "max_tokens=0"),
    "empty prompt": ([], GREEDY, "empty"),
    "longer than the context": ([1] * 65, GREEDY, "max_model_len=64"),
    "no room for a token": ([1] * 64, GREEDY, "max_model_len=64"),
    "token too large": ([1, 97], GREEDY, "token id 97 is outside the vocabulary of 97"),
    "token negative": ([1, -1], GREEDY, "token id -1 is outside"),
    "temperature nan": ([1], SamplingParams(temperature=math.nan), "temperature=nan"),
    "temperature inf": ([1], SamplingParams(temperature=math.inf), "temperature=inf"),
    "temperature negative": ([1], SamplingParams(temperature=-0.1), "temperature=-0.1"),
    "top_p nan": ([1], SamplingParams(top_p=math.nan), "top_p=nan"),
    "top_p zero": ([1], SamplingParams(top_p=0.0), "top_p=0.0"),
    "top_p above one": ([1], SamplingParams(top_p=1.1), "top_p=1.1"),
    "top_k negative": ([1], SamplingParams(top_k=-2), "top_k=-2"),
    "top_k fraction": ([1], SamplingParams(top_k=1.5), "top_k=1.5"),  # pyright: ignore[reportArgumentType]
    "min_p negative": ([1], SamplingParams(min_p=-0.5), "min_p=-0.5"),
    "presence nan": ([1], SamplingParams(presence_penalty=math.nan), "presence_penalty=nan"),
    "frequency inf": ([1], SamplingParams(frequency_penalty=-math.inf), "frequency_penalty=-inf"),
    "repetition zero": ([1], SamplingParams(repetition_penalty=0.0), "repetition_penalty=0.0"),
    "bias nan": ([1], SamplingParams(logit_bias={3: math.nan}), "nan"),
    "bias beyond draws": ([1], SamplingParams(logit_bias={3: 3e38}), "between -1e"),
    "repetition beyond draws": (
        [1],
        SamplingParams(repetition_penalty=1e-45),
        "repetition_penalty=1e-45: must be a finite number between 1e-06 and 1000000.0",
    ),
    "bias of no token": ([1], SamplingParams(logit_bias={97: 1.0}), "logit_bias key=97"),
    "too many biases": (
        [1],
        SamplingParams(logit_bias=dict.fromkeys(range(5), 1.0)),
        "max_logit_bias=4",
    ),
    "too many logprobs": ([1], SamplingParams(logprobs=6), "max_logprobs=5"),
    "prompt logprobs negative": ([1], SamplingParams(prompt_logprobs=-1), "prompt_logprobs=-1"),
    "stop id of no token": ([1], SamplingParams(stop_token_ids=[97]), "stop_token_ids=97"),
    "too many stops": (
        [1],
        SamplingParams(stop_token_ids=[1, 2, 3, 4], min_tokens=1),
        "max_stop_ids=4",
    ),
    "stop without tokenizer": ([1], SamplingParams(stop="a"), "stop strings needs a tokenizer"),
    "min above max": ([1], SamplingParams(min_tokens=17), "min_tokens=17"),
    "too many samples": ([1], SamplingParams(n=257), "n=257 is above max_n=256"),
    "unknown mode": ([1], SamplingParams(logprobs_mode="log"), "logprobs_mode='log'"),  # pyright: ignore
    "seed a string": ([1], SamplingParams(seed="a"), "seed='a'"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (np.zeros((2, 3), np.int32), r"2-D array of int32: pass unpadded lists"),
        (jnp.zeros((2, 3), jnp.int32), r"2-D array of int32: pass unpadded lists"),
        (np.zeros(3, np.float32), r"1-D array of float32: pass unpadded lists"),
        (np.array(["a", "b"]), r"1-D array of <U1: pass a list, as its tolist\(\) makes"),
        ([np.zeros((1, 3), np.int32)], r"prompt is a 2-D array"),
        (7, r"prompts of type int"),
        (b"text", r"prompts of type bytes"),
        ([bytearray(b"text")], r"prompt of type bytearray"),
        (["text"], r"a str prompt needs a tokenizer"),
        ([[1, 2.5]], r"prompt token id 2.5: must be an integer"),
        ([[1, jnp.float32(2.5)]], r"prompt token id .*2.5.*: must be an integer"),
        ([[True, 2]], r"prompt token id True"),
        ([{"prompt_ids": [1]}], r"prompt with keys \['prompt_ids'\]"),
        ([None], r"prompt of type NoneType"),
    ],
)
def test_what_is_no_prompt(params: Params, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(params, prompts)


@pytest.mark.parametrize("name", BAD)
def test_scenario_13_raise(params: Params, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error that names the request and the number, before anything runs."""
    monkeypatch.setattr(Engine, "step", lambda self: pytest.fail("a step ran"))
    prompt, sampling, message = BAD[name]
    with pytest.raises(RequestError, match="request 1: ") as caught:
        generate(params, [[1, 2], prompt, [3]], [GREEDY, sampling, GREEDY])
    assert message in str(caught.value)
    assert isinstance(caught.value, CapacityError) == ("max_model_len" in message)
    assert_nothing_left()


def test_scenario_13_return(params: Params) -> None:
    """The whole list in one call, good neighbours between: errors in place, the neighbours as if
    alone.
    """
    alone = tokens_of(generate(params, PROMPTS[:2]))
    prompts, sampling, expected = [], [], []
    for prompt, bad, message in BAD.values():
        prompts += [prompt, PROMPTS[0], PROMPTS[1]]
        sampling += [bad, GREEDY, GREEDY]
        expected += [message, alone[0], alone[1]]
    outputs = generate(params, prompts, sampling, on_error="return")
    assert len(outputs) == len(prompts)
    for output, wanted in zip(outputs, expected, strict=True):
        if isinstance(wanted, str):
            assert isinstance(output.error, RequestError) and wanted in str(output.error)
            assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []
        else:
            assert output.error is None and output.outputs[0].token_ids == wanted
    assert_nothing_left()


def test_scenario_13_stops_at_the_context(params: Params) -> None:
    (prompt,) = make_prompts(60, seed=13)
    for max_tokens in (100, None, 5, 4):
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = generate(params, [prompt], sampling)
        assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"


def test_settings_of_the_call_are_checked(params: Params) -> None:
    with pytest.raises(RequestError, match=r"2 sampling_params for 3 prompts"):
        generate(params, [[1], [2], [3]], [GREEDY] * 2)
    with pytest.raises(RequestError, match=r"sampling_params of type dict"):
        generate(params, [[1]], {"temperature": 0})
    with pytest.raises(RequestError, match=r"on_error='ignore'"):
        generate(params, [[1]], on_error="ignore")
    wrong: dict[str, Any] = {"engine_config": {}, "mesh": "tp", "tokenizer": "x"}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"{name}\b.*: pass "):
            settings: dict[str, Any] = {"engine_config": ENGINE, name: value}
            jpaged.generate(params, [[1]], **settings)
    for call in (lambda x: generate(params, x), lambda x: generate(params, [[1]], seed=x[0])):
        with pytest.raises(RequestError, match=r"(prompt|seed) is a tracer: "):
            jax.jit(call)(jnp.arange(3))
    with jax.disable_jit(), pytest.raises(ConfigError, match="jax_disable_jit is on"):
        generate(params, [[1]])
    assert_nothing_left()
    for seed in ("a", 1.5, True, [1, 2], np.array([1, 2]), np.ones(2), jnp.arange(4)):
        with pytest.raises(RequestError, match=r"pass an int or a jax key"):
            generate(params, [[1]], seed=seed)
