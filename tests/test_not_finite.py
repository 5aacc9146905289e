"""Weights that hold NaN fail the requests that meet them, and none after them."""

import math

import pytest

import jpaged
from jpaged.errors import NotFiniteError
from tests.tiny import CONFIG, engine, make_params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_whose_embedding_is_nan(temperature: float) -> None:
    params, spoiled = make_params(), 7
    embed = params["embed"]["weight"].at[spoiled].set(math.nan)
    weights = jpaged.Params(dict(params) | {"embed": {"weight": embed}}, CONFIG)

    def run(prompt: list[int]) -> jpaged.RequestOutput:
        sampling = jpaged.SamplingParams(
            max_tokens=4,
            temperature=temperature,
            ignore_eos=True,
            logit_bias={spoiled: -100.0},  # a good request does not draw it
        )
        args = weights, [prompt], sampling
        (output,) = jpaged.generate(*args, engine_config=engine(), on_error="return")
        return output

    bad, good = run([3, spoiled, 5]), run([3, 4, 5])
    assert isinstance(bad.error, NotFiniteError) and not bad.outputs[0].token_ids
    assert bad.outputs[0].finish_reason == "error"
    assert good.error is None and len(good.outputs[0].token_ids) == 4
