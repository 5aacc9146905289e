"""Speculation changes the number of steps and nothing else: bits, with deterministic serving, over
every control.
"""

from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import (
    LLM,
    ConfigError,
    EngineConfig,
    ModelConfig,
    RequestOutput,
    SamplingParams,
    UnsupportedError,
)
from jpaged.config import Speculative
from jpaged.kept import sessions as kept_sessions
from tests.heads import counting, counting_head
from tests.test_lora import make_lora
from tests.tiny import (
    ENGINE,
    assert_idle,
    compiles,
    config,
    make_params,
    make_prompts,
    tokens_of,
)

# As many rows as a draft needs beside the row itself, in bf16 by kernels of one bit.
MODEL = config(num_layers=1, head_dim=32, intermediate_size=64)
WINDOWED = config(num_layers=2, sliding_windows=(9, None))
SIZES = vars(ENGINE) | {"max_logprobs": 12, "num_blocks": 40, "max_loras": 1, "max_lora_rank": 4}
SETTINGS: dict[str, Any] = SIZES | {"deterministic": True, "swap_space_gib": 0.01}
GUESSING: dict[str, Any] = {"method": "ngram", "num_tokens": 3, "adaptive": False}
DRAFT = config(num_layers=1, hidden_size=16, head_dim=16, intermediate_size=32)
SMALL: dict[str, Any] = vars(ENGINE) | {"speculative": GUESSING}
PROMPTS = [[*prompt, *prompt, *prompt[:-2]] for prompt in make_prompts(5, 7, 4, 9)]
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3, "min_tokens": 4, "stop_token_ids": list(range(0, 90, 9))[:3]},
    {"temperature": 0, "logit_bias": {7: 3.0, 50: 2.0}},
    {"temperature": 0.4, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 2},
    {"temperature": 0, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 0.5, "seed": 3, "n": 3, "logprobs_mode": "tempered"},
    {"temperature": 0.6, "seed": 4, "prompt_logprobs": 1, "ignore_eos": True},
]


def sampled(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, **how})


def served(params: Any, **settings: Any) -> LLM:
    return LLM(params, **{**SETTINGS, **settings})


def bits(outs: list[RequestOutput]) -> list[Any]:
    def of(values: Any) -> Any:
        return [{t: x.logprob for t, x in top.items()} if top else None for top in values or ()]

    return [
        (
            *(c.token_ids, c.token_logprobs.tobytes(), of(c.logprobs)),
            *(c.finish_reason, c.stop_reason, of(out.prompt_logprobs)),
        )
        for out in outs
        for c in out.outputs
    ]


def run(llm: LLM) -> dict[str, Any]:
    """What comes out, by what was asked; every control with every other in one batch."""
    asked = [sampled(24, **how) for how in CONTROLS]
    prompts: list[Any] = [PROMPTS[i % len(PROMPTS)] for i in range(len(asked))]
    prompts[2] = {"prompt_token_ids": prompts[2], "adapter": "a"}
    found = {"together": bits(llm.generate(prompts, asked, use_tqdm=False))}
    for i, (prompt, how) in enumerate(zip(prompts, asked, strict=True)):
        found[f"alone {i}"] = bits(llm.generate([prompt], [how], use_tqdm=False))
    found["beams"] = bits(llm.beam_search(PROMPTS[:2], 3, 8, use_tqdm=False))
    ids = [llm.add_request(prompt, SamplingParams(max_tokens=24)) for prompt in PROMPTS]
    ended = {out.request_id: out for _ in range(4) for out in llm.step()}
    snapshot = llm.snapshot()
    for turn in range(2):
        done = dict(ended)
        while llm.has_unfinished():
            done |= {out.request_id: out for out in llm.step()}
        found[f"snapshot {turn}"] = bits([done[i] for i in ids])
        llm.restore(snapshot)
    while llm.has_unfinished():
        llm.step()
    assert_idle(llm)
    return found


def drafting(draft: Any) -> dict[str, Any]:
    return {**GUESSING, "method": "draft", "model": draft}


@pytest.mark.parametrize(
    "of_draft", [MODEL, pytest.param(DRAFT, marks=pytest.mark.middle)], ids=["same", "smaller"]
)
def test_lossless(of_draft: ModelConfig) -> None:
    """Greedy and seeded rows, which repeat themselves or not; a draft model that is as good as the
    model itself draws with the same noise, and so is nearly always right.
    """
    params = make_params(0, MODEL, "bfloat16")
    asked = [sampled(30, **CONTROLS[i]) for i in (0, 3, 0, 0)]
    draft = make_params(0, of_draft, "bfloat16")
    outs, rates = [], []
    for how in (None, GUESSING, drafting(draft)):
        llm = served(params, max_loras=0, speculative=how)
        outs.append(bits(llm.generate(PROMPTS, asked, use_tqdm=False)))
        rates.append(llm.stats().get("acceptance_rate"))
    assert outs[1:] == outs[:1] * 2
    assert rates[1] > 0 and (rates[2] > 0.95) == (of_draft == MODEL)


@pytest.mark.middle
@pytest.mark.parametrize("method", ["ngram", "draft", "eagle"])
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("bfloat16", {}),
        ("float32", {}),
        ("bfloat16", {"num_blocks": 16}),  # preempted
        ("bfloat16", {"mixed": True}),
        ("bfloat16", {"enable_prefix_caching": False}),
        ("bfloat16", {"decode_steps": 3}),
    ],
)
def test_every_control_to_the_bit(method: str, dtype: str, changes: dict[str, Any]) -> None:
    params = make_params(0, MODEL, dtype) if method != "eagle" else counting(MODEL, 0, dtype)
    how = GUESSING
    if method == "draft":  # near the model, and yet another
        other = make_params(1, MODEL, dtype)
        how = drafting(jax.tree.map(lambda a, b: a + 0.1 * b, params, other))
    elif method == "eagle":
        how = {**drafting(counting_head(params)), "method": "eagle"}
    plain = served(params, **changes)
    guessing = served(params, **changes, speculative=how)
    assert guessing.engine_config.deterministic
    for llm in (plain, guessing):
        llm.add_adapter("a", make_lora(1, model=MODEL))
    wanted, found = run(plain), run(guessing)
    assert {name for name in wanted if wanted[name] != found[name]} == set()
    stats = guessing.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["wasted_tokens"] == stats["drafted_tokens"] - stats["accepted_tokens"]
    assert stats["steps"] < plain.stats()["steps"] and stats["verify_steps"] > 0


@pytest.mark.middle
def test_replicas_guess_together() -> None:
    """Every control, over replicas whose steps are one dispatch: the bits of one that guesses
    nothing.
    """
    params = make_params(0, MODEL, "bfloat16")
    found = []
    for how in (None, GUESSING):
        llm = served(params, speculative=how, data_parallel_size=2)
        llm.add_adapter("a", make_lora(1, model=MODEL))
        found.append(run(llm))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == set()
    stats = llm.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.middle
def test_windows() -> None:
    """What a refused draft has pushed out of a window is still there."""
    params = make_params(0, WINDOWED)
    asked = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outs = [
        LLM(params, **dict[str, Any](SMALL, speculative=how)).generate(
            PROMPTS, asked, use_tqdm=False
        )
        for how in (None, GUESSING)
    ]
    assert [o.outputs[0].token_ids for o in outs[0]] == [o.outputs[0].token_ids for o in outs[1]]


@pytest.mark.middle
@pytest.mark.own_steps
def test_it_compiles_nothing_of_its_own() -> None:
    llm = LLM(make_params(0, MODEL), **dict[str, Any](SMALL, strict=True))
    with compiles() as names:
        asked = SamplingParams(temperature=0, max_tokens=24)
        llm.generate(PROMPTS, asked, use_tqdm=False)
    assert names == [] and llm.stats()["verify_steps"] > 0


def test_a_full_batch_drafts_nothing() -> None:
    llm = LLM(make_params(0, MODEL), **SMALL)
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate([PROMPTS[0]] * 8, asked, use_tqdm=False)
    assert llm.stats()["drafted_tokens"] == 0


def test_what_is_refused() -> None:
    params = make_params(0, MODEL)
    with pytest.raises(UnsupportedError, match="method='medusa' is not built"):
        LLM(params, speculative={"method": "medusa"})
    with pytest.raises(ConfigError, match="method='mtp' needs a model: a folder"):
        LLM(params, speculative={"method": "mtp"})
    other = make_params(1, config(vocab_size=90))
    with pytest.raises(ConfigError, match="vocab_size=90, the model has 97"):
        LLM(params, **dict[str, Any](SMALL, speculative=drafting(other)))
    short = make_params(1, config(max_position_embeddings=32))
    with pytest.raises(ConfigError, match="max_position_embeddings=32 is below max_model_len=64"):
        LLM(params, **dict[str, Any](SMALL, speculative=drafting(short)))
    with pytest.raises(ConfigError, match="method='draft' needs a model"):
        LLM(params, **dict[str, Any](SMALL, speculative={"method": "draft"}))
    with pytest.raises(ConfigError, match="only with method='draft', 'eagle' or 'mtp'"):
        LLM(params, speculative={"model": "folder"})
    with pytest.raises(ConfigError, match="a config takes a folder"):
        EngineConfig(speculative={"method": "draft", "model": params})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="draft weights need"):
        jpaged.generate(params, PROMPTS, engine_config=ENGINE, draft=params)
    with pytest.raises(ConfigError, match="method='x': must be 'ngram', 'draft'"):
        EngineConfig(speculative={"method": "x"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="must be a dict of method, num_tokens, adaptive, model"):
        LLM(params, speculative={"tokens": 4})
    with pytest.raises(ConfigError, match="num_tokens=0"):
        LLM(params, speculative={"num_tokens": 0})
    assert EngineConfig(speculative=Speculative()) == EngineConfig(speculative={})  # pyright: ignore[reportArgumentType]


@pytest.mark.middle
@pytest.mark.parametrize("method", ["draft", "eagle"])
def test_guesses_of_a_model_on_replicas(method: str) -> None:
    """The rows of two replicas get their guesses in one step, and the tokens of one engine."""
    params = make_params(0, MODEL)
    guesses = drafting(params if method == "draft" else counting_head(params))
    asked = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    plain: dict[str, Any] = SMALL | {"speculative": None}
    replicas = {"data_parallel_size": 2, "speculative": {**guesses, "method": method}}
    tokens, stats = [], {}
    for settings in (plain, plain | replicas):
        llm = LLM(params, **settings)
        tokens.append(tokens_of(llm.generate(PROMPTS, asked, use_tqdm=False)))
        stats = llm.stats()
    assert tokens[0] == tokens[1]
    assert stats["draft_steps"] > 0 and stats["drafted_tokens"] > 0
    if method == "draft":
        assert stats["accepted_tokens"] > 0.9 * stats["drafted_tokens"]


def test_new_drafts() -> None:
    """Other weights of a draft model are served at once, without a compile, and change no token and
    no cached prefix; those of a folder are read.
    """
    jpaged.release(compiled=True)
    params, asked = make_params(0, MODEL), SamplingParams(temperature=0, max_tokens=12)
    how: Any = {"method": "draft", "num_tokens": 3, "adaptive": False}
    settings: Any = {"engine_config": EngineConfig(**{**SMALL, "speculative": how})}
    poor = make_params(2, MODEL)
    wanted = jpaged.generate(params, PROMPTS, asked, draft=poor, **settings)
    with compiles() as names:
        outs = jpaged.generate(params, PROMPTS, asked, draft=params, **settings)
    assert names == [] and [o.outputs[0].token_ids for o in outs] == [
        o.outputs[0].token_ids for o in wanted
    ]
    (session,) = kept_sessions()
    assert session.served.draft is not None and session.served.draft.params is None, (
        "nothing of it is kept"
    )
    with pytest.raises(ConfigError, match="needs a model"):
        jpaged.generate(params, PROMPTS, asked, **settings)
    jpaged.release(compiled=True)
    llm = LLM(params, **dict[str, Any](SMALL, speculative={**how, "model": poor}))
    before = llm.generate(PROMPTS, asked, use_tqdm=False)
    rate = llm.stats()["acceptance_rate"]
    llm.update_params(params, draft=params)
    llm.sleep()
    llm.wake()
    again = llm.generate(PROMPTS, asked, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in before]
    assert llm.weight_version == 1 and llm.stats()["acceptance_rate"] > rate
    with pytest.raises(ConfigError, match="draft params of another architecture"):
        llm.update_params(params, draft=make_params(0, DRAFT))


def test_generate_takes_it() -> None:
    """As an engine_config, whose form it is part of."""
    params, asked = make_params(0, MODEL), SamplingParams(temperature=0, max_tokens=12)
    config = EngineConfig(**SMALL)
    outs = jpaged.generate(params, PROMPTS, asked, engine_config=config)
    plain = jpaged.generate(params, PROMPTS, asked, engine_config=ENGINE)
    for a, b in zip(outs, plain, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        np.testing.assert_allclose(
            a.outputs[0].token_logprobs, b.outputs[0].token_logprobs, atol=1e-4
        )
    jpaged.release(compiled=True)


def test_the_memory_plan_counts_both() -> None:
    """Weights, temporaries and KV of a draft model, in blocks for as many tokens as the model's."""
    how = EngineConfig(**{**SMALL, "num_blocks": None, "speculative": {"method": "draft"}})
    alone = jpaged.plan_memory(MODEL, how, compiled=False)
    both = jpaged.plan_memory(MODEL, how, draft=DRAFT, compiled=False)
    assert both.weights > alone.weights and both.needs.total > alone.needs.total
    assert both.pool.groups[:1] == alone.pool.groups
    assert len(both.pool.groups) == 2 and both.num_blocks == alone.num_blocks
