"""`quantization`: an engine serves what the quantised weights stand for, made of a trainer's params
at once.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import LLM, EngineConfig, Params, SamplingParams
from jpaged.errors import ConfigError, UnsupportedError
from jpaged.models.quantized import dequantized, experts_are_plain, is_quantized
from jpaged.models.served import quantized_tree
from jpaged.runtime.choices import interleaves_at
from jpaged.runtime.footprint import form_of
from kernels_cpu import library, quantized
from kernels_pallas.experts import triton
from tests.tiny import ENGINE, compiles, config, make_params, make_prompts, routed

MODEL = config(head_dim=32, intermediate_size=64)
MIXTURE = config(
    family="qwen3_moe",
    head_dim=32,
    num_experts=5,
    experts_per_token=2,
    expert_size=64,
)
PROMPTS = make_prompts(5, 23, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
FOUR = {"tensor_parallel_size": 4}
FORMS: tuple[Any, ...] = ("int8", "int4", "fp8")


def params_of(seed: int = 0, dtype: Any = np.float32) -> Params:
    return make_params(seed, MODEL, dtype)


def rounded(params: Params, form: Any) -> Params:
    """Plain weights that are what the quantised ones stand for."""

    def one(leaf: Any) -> Any:
        if not is_quantized(leaf):
            return leaf
        return dequantized(leaf.values, leaf.scales, leaf.form).astype(leaf.dtype)

    tree = jax.tree.map(one, quantized_tree(params, form), is_leaf=is_quantized)
    return Params(tree, params.config)


def answers(llm: LLM) -> list[tuple[list[int], np.ndarray]]:
    outs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].token_logprobs) for out in outs]


def served(params: Params, **settings: Any) -> LLM:
    return LLM(params, **{**vars(ENGINE), **settings})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_it_serves_what_the_weights_stand_for(form: Any, tensor_parallel_size: int) -> None:
    params = params_of()
    plain = served(rounded(params, form))
    llm = served(params, quantization=form, tensor_parallel_size=tensor_parallel_size)
    for (ours, logprobs), (theirs, expected) in zip(answers(llm), answers(plain), strict=True):
        assert ours == theirs and np.abs(logprobs - expected).max() < 2e-5
    whole = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, answers(plain), strict=True)]
    for ours, theirs in zip(llm.score(whole), plain.score(whole), strict=True):
        assert np.abs(np.subtract(ours, theirs)).max() < 2e-5
    unquantised = served(params)
    assert any(
        np.abs(a[1] - b[1]).max() > 1e-4
        for a, b in zip(answers(plain), answers(unquantised), strict=True)
    ), "a control: rounding shows"


@pytest.mark.middle
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_over_four_devices(form: Any) -> None:
    """Which hold each of two KV heads twice: repeated first, quantised then."""
    params = params_of()
    plain, llm = served(rounded(params, form)), served(params, quantization=form, **FOUR)
    for (ours, logprobs), (theirs, expected) in zip(answers(llm), answers(plain), strict=True):
        assert ours == theirs and np.abs(logprobs - expected).max() < 2e-5


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_fp8_by_fp8(monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int) -> None:
    """As on a card that multiplies it: rounding x costs about as much as rounding weights."""
    monkeypatch.setattr("jpaged.runtime.choices.choose_products", lambda *_, **__: None)
    params = params_of(dtype=jnp.bfloat16)
    how = {"quantization": "fp8", "tensor_parallel_size": tensor_parallel_size}
    plain, widened = served(params).score(PROMPTS), served(params, **how).score(PROMPTS)
    monkeypatch.setattr("jpaged.runtime.choices.multiplies_fp8", lambda _: True)
    monkeypatch.setattr("jpaged.models.quantized.ROUNDED_FROM", 1)
    rounded = served(params, **how).score(PROMPTS)

    def apart(some: Any, others: Any) -> float:
        return float(np.mean(np.abs(np.concatenate(some) - np.concatenate(others))))

    assert 0.3 < apart(rounded, widened) / apart(widened, plain) < 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_experts_too(form: Any, tensor_parallel_size: int) -> None:
    params = make_params(0, routed(MIXTURE, shared_expert_size=64))
    llm = served(params, quantization=form, tensor_parallel_size=tensor_parallel_size)
    plain = served(rounded(params, form))
    for (ours, logprobs), (theirs, expected) in zip(answers(llm), answers(plain), strict=True):
        assert ours == theirs and np.abs(logprobs - expected).max() < 2e-5


@pytest.mark.own_steps
@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.middle)])
@pytest.mark.parametrize("form", FORMS)
def test_experts_in_bf16(form: Any, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for arrays are not for those in 8 and 4 bits, which products in C++ multiply one by
    one, where there is a compiler.
    """
    model = dataclasses.replace(MIXTURE, expert_size=96)  # that no other test has traced
    params = make_params(0, model, jnp.bfloat16)
    tree = quantized_tree(params, form)
    assert experts_are_plain(dict(params)) and not experts_are_plain(tree)
    plain, asked = answers(served(rounded(params, form))), list[tuple[int, ...]]()
    multiply = quantized.linear

    def watched(x: Any, values: Any, *rest: Any, interleaved: bool) -> Any:
        asked.append(values.shape)
        return multiply(x, values, *rest, interleaved=interleaved)

    monkeypatch.setattr(quantized, "linear", watched)
    if not native:
        monkeypatch.setattr("jpaged.runtime.choices.choose_products", lambda *_, **__: None)
    found = answers(served(params, quantization=form))
    inputs = model.hidden_size // (2 if form == "int4" else 1)
    is_asked = (2 * model.expert_size, inputs) in asked
    assert is_asked == (native and library.unavailable() is None)
    apart = [np.abs(a[1] - b[1])[0] for a, b in zip(found, plain, strict=True)]
    assert max(apart) < 0.1, "of first tokens, drawn after the same text"


@pytest.mark.middle
@pytest.mark.parametrize(("form", "tensor_parallel_size"), [("int8", 1), ("int4", 2)])
def test_experts_by_triton(
    monkeypatch: pytest.MonkeyPatch, form: Any, tensor_parallel_size: int
) -> None:
    """As on a card, interpreted."""
    params = make_params(0, MIXTURE, jnp.bfloat16)
    how = {"quantization": form, "tensor_parallel_size": tensor_parallel_size}
    plain = answers(served(params, **how))
    module = mock.Mock(wraps=triton)
    module.experts = mock.Mock(wraps=functools.partial(triton.experts, interpret=True))
    chosen = SimpleNamespace(module=lambda: module, is_batch_invariant=lambda: False)
    monkeypatch.setattr("jpaged.runtime.choices._experts", lambda *_: chosen)
    found = answers(served(params, **how))
    apart = [np.abs(a[1] - b[1])[0] for a, b in zip(found, plain, strict=True)]
    assert max(apart) < 0.05, "of first tokens, drawn after the same text"
    assert module.experts.called


@pytest.mark.own_steps
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_new_weights_are_quantised_at_once(form: Any) -> None:
    params, newer = params_of(), params_of(1)
    before = [np.array(leaf) for leaf in jax.tree.leaves(params)]
    settings = dataclasses.replace(ENGINE, quantization=form)
    first = jpaged.generate(params, PROMPTS, GREEDY, engine_config=settings)
    with compiles() as names:
        second = jpaged.generate(newer, PROMPTS, GREEDY, engine_config=settings)
    assert names == []
    expected = answers(served(newer, quantization=form))
    assert [out.outputs[0].token_ids for out in second] == [ids for ids, _ in expected]
    assert [out.outputs[0].token_ids for out in first] != [ids for ids, _ in expected]
    after = jax.tree.leaves(params)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    jpaged.release()


def test_sleep_and_wake() -> None:
    llm = served(params_of(), quantization="int8")
    expected = answers(llm)
    llm.sleep()
    llm.wake()
    for (ours, logprobs), (theirs, others) in zip(answers(llm), expected, strict=True):
        assert ours == theirs and np.array_equal(logprobs, others)


@pytest.mark.parametrize("form", FORMS)
def test_a_value_that_is_not_finite_is_named(form: Any) -> None:
    params = params_of()
    mlp = params["layers"]["1"]["mlp"]
    mlp["down"] = jnp.asarray(mlp["down"]).at[3, 5].set(np.nan)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down holds a value that is not finite"):
        served(params, quantization=form)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_arithmetic_of_products_has_a_name(form: Any) -> None:
    """What `auto` takes is what it is asked for by name, and stats say which served."""
    params = params_of(dtype=jnp.bfloat16)
    served_by: dict[str, Any] = {}
    names = (
        ("auto", "plain", "int8", "int16") if library.unavailable() is None else ("auto", "plain")
    )
    for name in names:
        llm = served(params, quantization=form, quantized_activations=name)
        served_by[name] = (llm.stats()["quantized_activations"], answers(llm))
    for name in names[1:]:
        assert served_by[name][0] == name
    chosen, found = served_by["auto"]
    best = library.level()
    assert chosen == ("plain" if library.unavailable() or best is None else best.activations)

    def bits(results: Any) -> list[bytes]:
        return [logprobs.tobytes() for _, logprobs in results]

    assert bits(found) == bits(served_by[chosen][1])
    assert len({tuple(bits(results)) for _, results in served_by.values()}) == len(names) - 1
    assert served(params).stats()["quantized_activations"] is None


def test_arithmetic_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"quantized_activations='int8'.*float32.*'plain'"):
        served(params_of(), quantization="int8", quantized_activations="int8")
    with pytest.raises(ConfigError, match="quantized_activations='int4': must be one of auto, pl"):
        EngineConfig(quantized_activations="int4")  # pyright: ignore[reportArgumentType]


def test_a_form_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="quantization='int3': must be int8, int4, fp8 or None"):
        EngineConfig(quantization="int3")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_planned_for_what_is_served(form: Any) -> None:
    llm = served(params_of(dtype=jnp.bfloat16), quantization=form)
    placement, config = llm.session.served.placement, EngineConfig(quantization=form)
    interleaved = interleaves_at(placement, jnp.bfloat16, config)
    planned = form_of(MODEL, placement, jnp.bfloat16, form, interleaved=interleaved)
    theirs, ours = llm.session.runner.compiled.form, planned
    assert jax.tree.structure(theirs) == jax.tree.structure(ours)
    pairs = zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True)
    assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


@pytest.mark.skipif(
    library.unavailable() is not None, reason=f"the CPU kernels: {library.unavailable()}"
)
@pytest.mark.parametrize("form", FORMS)
def test_bits_depend_on_the_request_alone(form: Any) -> None:
    """In bf16, by the C++ products: deterministic without pinned steps."""
    llm = served(params_of(dtype=jnp.bfloat16), quantization=form, deterministic=True)
    assert not llm.session.engine_config.pinned
    together = answers(llm)
    whole = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, together, strict=True)]
    for prompt, (ids, logprobs), row in zip(PROMPTS, together, llm.score(whole), strict=True):
        (alone,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == ids
        assert np.array_equal(alone.outputs[0].token_logprobs, logprobs)
        assert np.array_equal(row[len(prompt) - 1 :], logprobs)


def test_a_rollout_is_corrected_by_importance_ratios() -> None:
    """Means over what the quantised model draws, weighed by p / q, are those of the trainer's
    model; unweighed they are not (docs/research.md).
    """
    params, prompt = params_of(), PROMPTS[0]
    llm, trainer = served(params, quantization="int4", max_n=512), served(params)
    every = [[*prompt, token] for token in range(MODEL.vocab_size)]
    p, q = (np.array([scores[-1] for scores in each.score(every)]) for each in (trainer, llm))
    assert abs(np.exp(p).sum() - 1) < 1e-4 and abs(np.exp(q).sum() - 1) < 1e-4
    sampling = SamplingParams(temperature=1.0, max_tokens=1, n=512, seed=1, ignore_eos=True)
    (out,) = llm.generate([prompt], sampling, use_tqdm=False)
    drawn = np.array([completion.token_ids[0] for completion in out.outputs])
    rollout = np.array([completion.token_logprobs[0] for completion in out.outputs])
    assert np.abs(rollout - q[drawn]).max() < 2e-5, "logprobs are the quantised model's"
    ratio, value = np.exp(p[drawn] - rollout), (p - q)[drawn]
    exact = (np.exp(p) * (p - q)).sum()  # KL(p | q), above 0; of q's own draws it is below

    def error(found: np.ndarray) -> float:
        return abs(found.mean() - exact) / (found.std() / len(found) ** 0.5)

    print(f"exact {exact:.4f}, weighed {(ratio * value).mean():.4f}, not {value.mean():.4f}")
    assert error(ratio * value) < 4 and abs(ratio.mean() - 1) < 4 * ratio.std() / len(ratio) ** 0.5
    assert error(value) > 4, "a control"


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_inputs_that_are_not_whole_32s(form: Any) -> None:
    """The C++ products take whole 32s of inputs; XLA multiplies by others."""
    model = config(hidden_size=16, intermediate_size=40, num_layers=1)
    settings = vars(ENGINE) | {"dtype": "bfloat16", "quantization": form}
    llm = LLM(make_params(0, model), **settings)
    (out,) = llm.generate(
        [[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
    )
    assert len(out.outputs[0].token_ids) == 3
