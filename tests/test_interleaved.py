"""Weights of int8 and int4 that lie interleaved: what they stand for, where they are made, and that
what is served by them is what rows serve.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, EngineConfig, Params, SamplingParams
from jpaged.models.param_spec import ParamSpec
from jpaged.models.quantized import INT4, INT8, QuantizedWeight, is_quantized, quantized
from jpaged.models.served import in_order, quantized_tree
from jpaged.models.weight import Weight
from jpaged.runtime.choices import interleaves_on
from jpaged.runtime.placing import Placer
from kernels_cpu import library
from kernels_cpu.quantized import interleaves
from tests.tiny import ENGINE, compiles, config, make_params, make_prompts

MODEL = config(head_dim=32, intermediate_size=64, tie_word_embeddings=True, vocab_size=96)
PROMPTS = make_prompts(5, 23)
DRAWN = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True, logprobs=1)
native = pytest.mark.skipif(
    not interleaves("int8", 16, "int16"), reason=f"the CPU kernels: {library.unavailable()}"
)


def forms_of(llm: LLM) -> dict[str, bool]:
    """Whether each quantised weight that is bound lies interleaved, by form and shape."""
    params = llm.session.served.params
    assert params is not None
    modules = llm.session.served.weights.modules(params)
    leaves = jax.tree.leaves(modules, is_leaf=is_quantized)
    return {f"{x.form.name} {x.shape}": x.form.interleaved for x in leaves if is_quantized(x)}


def answers(llm: LLM) -> list[tuple[list[int], np.ndarray]]:
    outs = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].token_logprobs) for out in outs]


def served(params: Any, **settings: Any) -> LLM:
    values: Any = vars(ENGINE) | {"dtype": "bfloat16"} | settings
    return LLM(params, **values)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("form", "shape", "num_outputs"),
    [
        (INT8, (48, 128), 1),
        (INT8, (4, 8, 96), 2),
        (INT8, (32, 3, 64), 1),
        (INT4, (48, 128), 1),
        (INT4, (4, 8, 96), 2),
    ],
)
def test_it_stands_for_the_same(form: Any, shape: Any, num_outputs: int, zeros: bool) -> None:
    plain = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
    rows = quantized(plain, form, num_outputs)
    if zeros:
        rows = dataclasses.replace(rows, zeros=jnp.round(rows.scales * 100) % 7)
    made = jax.jit(QuantizedWeight.interleaved)(rows)
    assert (made.shape, made.values.nbytes) == (rows.shape, rows.values.nbytes)
    assert not np.array_equal(made.values, rows.values)
    back = made.in_rows()
    assert back.form == rows.form and back.in_rows() is back
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(rows), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(made.whole(), rows.whole())
    if len(shape) == 2:
        at = jnp.asarray([[0, 17], [47, 99]])  # the last one past the end
        assert np.array_equal(made.take(at), rows.take(at))
        x = jnp.ones((3, shape[1]), jnp.float32)
        assert np.array_equal(made.linear(x), rows.linear(x)), "where no product takes it"


@native
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_is_made_to_be_served_is(form: Any) -> None:
    """A rollout has the bits of its score, and what rows of the same weights serve is close."""
    params = make_params(0, MODEL, jnp.bfloat16)
    settings = {"quantization": form, "quantized_activations": "int16"}
    llm = served(params, **settings)
    assert len(forms_of(llm)) >= 4 and all(forms_of(llm).values())
    found = answers(llm)
    whole = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, found, strict=True)]
    for prompt, (_, drawn), scored in zip(PROMPTS, found, llm.score(whole), strict=True):
        assert np.array_equal(drawn, np.asarray(scored, np.float32)[len(prompt) - 1 :])
    held = Params(quantized_tree(params, form), params.config)
    rows = served(held, quantized_activations="int16")
    assert not any(forms_of(rows).values()), "what a caller holds stays as it lies"
    plain = served(params).score(whole)
    for ours, theirs, exact in zip(llm.score(whole), rows.score(whole), plain, strict=True):
        near, far = (np.abs(np.subtract(ours, other)).max() for other in (theirs, exact))
        assert near < 0.05 < far, "a control: what weights lose to fewer bits is more"
    again = served(llm.session.served.params, quantized_activations="int16", quantization=form)
    assert [ids for ids, _ in answers(again)] == [ids for ids, _ in found]


@native
@pytest.mark.parametrize("is_first", [True, False])
def test_new_weights_take_the_order_of_the_first(is_first: bool) -> None:
    """Compiled steps take no other. is_first: the first ones are made interleaved."""
    plain, newer = (make_params(seed, MODEL, jnp.bfloat16) for seed in (0, 1))
    made, rows = (
        Params(quantized_tree(newer, "int8", interleaved=order), MODEL) for order in (True, False)
    )
    held = Params(quantized_tree(plain, "int8"), MODEL)
    settings: dict[str, Any] = {"quantized_activations": "int16"}
    llm = served(plain, quantization="int8", **settings) if is_first else served(held, **settings)
    before = answers(llm)
    found = []
    with compiles() as names:
        for params in (made, rows):
            llm.update_params(params)
            assert set(forms_of(llm).values()) == {is_first}
            found.append(answers(llm))
    assert set(names) == {"jit(interleaved)" if is_first else "jit(in_rows)"}, "no step"
    for (ours, logprobs), (theirs, expected) in zip(*found, strict=True):
        assert ours == theirs and np.array_equal(logprobs, expected)
    assert [ids for ids, _ in found[0]] != [ids for ids, _ in before]


@native
def test_where_it_is_not() -> None:
    params = make_params(0, MODEL, jnp.bfloat16)
    for settings in (
        {"quantized_activations": "plain"},
        {"tensor_parallel_size": 2, "quantized_activations": "int16"},
        {"dtype": "float32"},
    ):
        llm = served(params, quantization="int8", **settings)
        assert not any(forms_of(llm).values()), settings
    device, ours = jax.devices()[0], EngineConfig(quantized_activations="int16")
    assert interleaves_on(device, jnp.bfloat16, ours)
    assert not interleaves_on(device, jnp.float32, ours)
    odd = ParamSpec("mlp.down", "E, F", "down", split="F").placed({"E": 40, "F": 64}, 0)
    even = ParamSpec("mlp.down", "E, F", "down", split="F").placed({"E": 48, "F": 64}, 0)
    experts = ParamSpec("experts.down", "X, E, F", "down").placed({"X": 4, "E": 48, "F": 64}, 0)
    kept = [in_order(INT8, spec, True).interleaved for spec in (odd, even, experts)]
    assert kept == [False, True, False]
    assert not in_order(INT8, even, False).interleaved


def test_one_that_others_made_is_put_in_rows_where_none_takes_it() -> None:
    """As in params of another engine."""
    spec = ParamSpec("mlp.down", "E, F", "down", split="F").placed({"E": 48, "F": 64}, 0)
    rows = quantized(jax.random.normal(jax.random.key(0), spec.shape), INT8, 1)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    made, placer = jax.device_put(rows.interleaved(), here), Placer(lambda _: here)
    for interleaved in (True, False):
        weight = Weight(spec=spec, source=made, interleaved=interleaved)
        assert placer.is_placed(weight) == interleaved
        placed: Any = placer(weight)
        assert placed.form.interleaved == interleaved and (placed is made) == interleaved
        assert np.array_equal(placed.whole(), rows.whole())
