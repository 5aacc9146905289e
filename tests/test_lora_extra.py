"""Adapters of the embedding, of the head and of experts, against weights that they were merged
into: on rows of one batch with others and without any.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import Adapter, ConfigError, ModelConfig, Params, SamplingParams
from jpaged.models.lora import EXTRA
from jpaged.models.quantized import dequantized, is_quantized
from jpaged.models.served import quantized_tree
from tests.test_lora import GREEDY, ONE_LAYER, PROMPTS, SAMPLED, generate, make_lora, served
from tests.tiny import (
    ENGINE,
    assert_idle,
    assert_same,
    compiles,
    config,
    engine,
    make_params,
    routed,
    tokens_of,
)

TIED = config(num_layers=1, tie_word_embeddings=True)
OF_EXPERTS = routed(
    config(num_layers=1, num_experts=4, experts_per_token=2, expert_size=24, norm_topk_prob=True)
)
ENDS = ("embedding", "head")
pytestmark = pytest.mark.middle


def one_extra(seed: int, model: ModelConfig, *extra: str, rank: int = 3) -> Any:
    """Pairs of these kinds alone, of a tenth of the strength for the embedding."""
    names = [name for kind in extra for name in EXTRA[kind]]
    parts = [name.removesuffix(".gate_up").removesuffix(".down") for name in names]
    return Adapter(make_lora(seed, rank, model, parts, tuple(extra)), 0.3)


def assert_merged(model: ModelConfig, each: list[Any], sampling: SamplingParams = GREEDY) -> None:
    """Of rows with these adapters, in one batch, each is that of its own merged weights."""
    params = make_params(0, model)
    outs = generate(params, PROMPTS, sampling, lora=each)
    for i, lora in enumerate(each):
        own = params if lora is None else jpaged.merged(params, lora)
        expected = generate(own, PROMPTS, sampling)
        assert_same([outs[i]], [expected[i]])
    plain = generate(params, PROMPTS, sampling)
    assert tokens_of(outs) != tokens_of(plain), "they change nothing"


@pytest.mark.parametrize("extra", ENDS)
@pytest.mark.parametrize("model", [ONE_LAYER, TIED], ids=["untied", "tied"])
def test_the_embedding_or_the_head_alone(model: ModelConfig, extra: str) -> None:
    """Of a tied model too, whose other end stays as it is."""
    params, lora = make_params(0, model), one_extra(1, model, extra)
    merged = jpaged.merged(params, lora)
    assert not merged.config.tie_word_embeddings
    outs = generate(params, PROMPTS, SAMPLED, lora=lora)
    assert_same(outs, generate(merged, PROMPTS, SAMPLED))
    assert tokens_of(outs) != tokens_of(generate(params, PROMPTS, SAMPLED))


@pytest.mark.parametrize("model", [ONE_LAYER, TIED], ids=["untied", "tied"])
def test_rows_with_different_adapters(model: ModelConfig) -> None:
    each = [
        one_extra(1, model, *ENDS),
        None,
        Adapter(make_lora(2, 2, model, None, ENDS), 0.2),
        one_extra(3, model, "head", rank=1),
    ]
    for sampling in (GREEDY, SAMPLED):
        assert_merged(model, each, sampling)


def test_prompt_logprobs_and_scores() -> None:
    """The head's adapter counts there too, a tile of tokens at a time."""
    params, lora = make_params(0, ONE_LAYER), one_extra(4, ONE_LAYER, *ENDS)
    merged = jpaged.merged(params, lora)
    found = jpaged.score(params, PROMPTS[1:], lora=[lora, None, lora], engine_config=ENGINE)
    expected = jpaged.score(merged, PROMPTS[1:], engine_config=ENGINE)
    plain = jpaged.score(params, PROMPTS[1:], engine_config=ENGINE)
    for i, other in enumerate((expected, plain, expected)):
        np.testing.assert_allclose(found[i], other[i], atol=1e-4)
    assert np.abs(np.asarray(expected[1]) - np.asarray(plain[1])).max() > 0.01


def test_controls_samples_and_beams() -> None:
    params, lora = make_params(0, ONE_LAYER), one_extra(5, ONE_LAYER, *ENDS)
    merged, settings = jpaged.merged(params, lora), engine(max_logprobs=12)
    how: Any = {"beam_width": 3, "max_tokens": 5, "engine_config": settings}
    found = jpaged.beam_search(params, PROMPTS[1:3], lora=lora, **how)
    assert_same(found, jpaged.beam_search(merged, PROMPTS[1:3], **how))
    asked = SamplingParams(n=3, max_tokens=5, prompt_logprobs=2, seed=1, presence_penalty=0.5)
    outs = generate(params, PROMPTS[1:3], asked, lora=lora, engine_config=settings)
    assert_same(outs, generate(merged, PROMPTS[1:3], asked, engine_config=settings))


def test_tables_are_asked_for() -> None:
    """By an LLM, whose tables are of one form; each kind by its name."""
    params = make_params(0, ONE_LAYER)
    both = one_extra(1, ONE_LAYER, *ENDS)
    plain = served(params, max_loras=2)
    with pytest.raises(
        ConfigError, match=r"the adapter changes the embedding; .*\('embedding', 'h"
    ):
        plain.add_adapter("a", both)
    llm = served(params, max_loras=2, lora_extra=ENDS)
    first = make_lora(1)
    for name, lora in {"a": both, "b": first}.items():
        llm.add_adapter(name, lora)
    prompts: list[Any] = [{"prompt_token_ids": PROMPTS[2], "adapter": name} for name in "ab"]
    outs = llm.generate([*prompts, PROMPTS[2]], GREEDY, use_tqdm=False)
    with compiles() as names:
        for seed in (2, 3):
            lora = one_extra(seed, ONE_LAYER, *ENDS)
            llm.add_adapter("a", lora)
            again = llm.generate([*prompts, PROMPTS[2]], GREEDY, use_tqdm=False)
            assert tokens_of(again[1:]) == tokens_of(outs[1:])
            own = generate(jpaged.merged(params, lora), [PROMPTS[2]])
            assert tokens_of(again[:1]) == tokens_of(own)
    assert not [name for name in names if "merged" not in name and "step" in name]
    for out, lora in zip(outs, (both, first), strict=False):
        assert tokens_of([out]) == tokens_of(generate(jpaged.merged(params, lora), [PROMPTS[2]]))
    assert tokens_of(outs[2:]) == tokens_of(generate(params, [PROMPTS[2]]))
    assert_idle(llm)


def test_strict_has_every_shape() -> None:
    params = make_params(0, ONE_LAYER)
    llm = served(params, max_loras=2, lora_extra=ENDS, strict=True, structured_output=True)
    llm.add_adapter("a", one_extra(1, ONE_LAYER, *ENDS))
    prompts: list[Any] = [{"prompt_token_ids": p, "adapter": "a"} for p in PROMPTS]
    with compiles() as names:
        for sampling in (GREEDY, SAMPLED, SamplingParams(prompt_logprobs=1, max_tokens=2)):
            llm.generate([*prompts, PROMPTS[1]], sampling, use_tqdm=False)
    assert names == []


def test_experts() -> None:
    """Each with a pair of its own, beside pairs of attention."""
    each = [
        one_extra(1, OF_EXPERTS, "experts"),
        None,
        Adapter(make_lora(2, 2, OF_EXPERTS, None, ("experts",)), 0.3),
        one_extra(3, OF_EXPERTS, "experts", rank=1),
    ]
    assert_merged(OF_EXPERTS, each)


def test_shared_and_biased_experts() -> None:
    """Of families whose experts have more to them."""
    shared = config(
        family="qwen2_moe",
        qk_norm=False,
        num_layers=2,
        num_experts=3,
        experts_per_token=2,
        expert_size=24,
        shared_expert_size=26,
        dense_layers=(1,),
    )
    lora = Adapter(make_lora(1, 2, shared, None, tuple(EXTRA)), 0.2)
    assert_merged(shared, [lora, None, lora, None], SAMPLED)


MESHES = [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4, "data_parallel_size": 2}]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [ONE_LAYER, TIED, OF_EXPERTS], ids=["untied", "tied", "experts"])
def test_on_meshes(model: ModelConfig, mesh: dict[str, Any]) -> None:
    """Vocabulary and experts' widths are split, and what adapters add to them."""
    extra = tuple(EXTRA) if model is OF_EXPERTS else ENDS
    params, how = make_params(0, model), {"max_loras": 2, "lora_extra": extra}
    one, many = served(params, **how), served(params, **how, **mesh)
    for llm in (one, many):
        for i, name in enumerate("abc"):
            llm.add_adapter(name, Adapter(make_lora(i, 3, model, None, extra), 0.2))
    names = [*"abcab", None]
    prompts = [{"prompt_token_ids": p, "adapter": n} for n in names for p in PROMPTS[1:3]]
    outs = [llm.generate(prompts, GREEDY, use_tqdm=False) for llm in (many, one)]
    assert_same(*outs)
    for ours, theirs in zip(many.score(prompts), one.score(prompts), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert_idle(many)


def test_on_a_quantised_base() -> None:
    """Experts and the head in 8 bits."""
    sizes: Any = {"head_dim": 32, "intermediate_size": 64, "expert_size": 32}
    model = dataclasses.replace(OF_EXPERTS, **sizes)
    base, lora = make_params(0, model), Adapter(make_lora(1, 3, model, None, tuple(EXTRA)), 0.2)
    tree = jax.tree.map(
        lambda x: dequantized(x.values, x.scales, x.form) if is_quantized(x) else x,
        quantized_tree(base, "int8"),
        is_leaf=is_quantized,
    )
    outs = generate(base, PROMPTS, lora=lora, engine_config=engine(quantization="int8"))
    assert_same(outs, generate(jpaged.merged(Params(tree, model), lora), PROMPTS))


def test_to_train_from() -> None:
    """They begin as the model itself, and gradients flow into both sides of each."""
    params = make_params(0, OF_EXPERTS)
    parts = ("embed.weight", "lm_head.weight", "mlp.experts.gate", "mlp.experts.down")
    tree = jpaged.initial_lora(OF_EXPERTS, 2, jax.random.key(0), parts=parts)
    assert_same(generate(params, PROMPTS[:2], lora=tree), generate(params, PROMPTS[:2]))
    tree = jax.tree.map(lambda x: x + 0.1, tree)

    def loss(tree: Any) -> jax.Array:
        merged = jpaged.merged(params, tree)
        own = (merged["embed"], merged["lm_head"], merged["layers"]["0"]["mlp"]["experts"])
        return sum((jnp.sum(x**2) for x in jax.tree.leaves(own)), jnp.float32(0))

    grads = jax.tree.leaves(jax.jit(jax.grad(loss))(tree))
    assert len(grads) == 8 and all(jnp.abs(g).max() > 0 for g in grads)
