"""Layers with windows: their KV is a group of its own, which gives back the blocks that have left
the window; the tokens are the dense model's all the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, Params, RequestOutput, SamplingParams
from tests.hlo import filled
from tests.tiny import (
    assert_idle,
    config,
    dense_greedy,
    dense_logprobs,
    engine,
    engine_of,
    make_params,
    make_prompts,
    tokens_of,
)

# As Qwen2 and as Mistral have them; a window of 7 in blocks of 4 is never at a block's edge.
SOME, ALL = config(sliding_windows=(None, 7)), config(sliding_windows=(7, 7))
ROWS: dict[str, Any] = {"max_num_seqs": 12, "seq_buckets": (12,), "max_logprobs": 12}
# Too few for the prompts below at once.
CROWDED = {SOME: engine(num_blocks=24, **ROWS), ALL: engine(num_blocks=10, **ROWS)}
LOCAL = {SOME: 1, ALL: 0}  # the group that has the window
PROMPTS = make_prompts(5, 21, 40, 33)
SHORT = make_prompts(3, 2, 4, 3, 1, 2)  # admitted with a block each, of which they need more later
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MODELS = pytest.mark.parametrize("model", [SOME, ALL], ids=["some layers", "all layers"])


@functools.cache
def params_of(model: Any) -> Params:
    return make_params(0, model)


@pytest.fixture(scope="module")
def llm_of() -> Callable[..., LLM]:
    """The one LLM of a model and these settings in this file."""

    @functools.cache
    def make(model: Any, **changes: Any) -> LLM:
        return LLM(params_of(model), **vars(dataclasses.replace(CROWDED[model], **changes)))

    return make


@functools.cache
def dense(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    params = Params(params_of(model), dataclasses.replace(model, eos_token_ids=()))
    tokens = list(prompt)
    for _ in range(count):
        tokens += dense_greedy(params, tokens, 1)
    return tokens[len(prompt) :]


def run(llm: LLM, prompts: Any, sampling: Any = GREEDY) -> list[RequestOutput]:
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    assert_idle(llm)
    return outputs


def check(model: Any, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    """Tokens and logprobs of every completion are the dense model's."""
    params = params_of(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            tokens = completion.token_ids
            assert tokens == dense(model, tuple(prompt), len(tokens))
            expected = dense_logprobs(params, prompt + tokens)[len(prompt) - 1 : -1]
            expected = expected[range(len(tokens)), tokens]
            np.testing.assert_allclose(completion.token_logprobs, expected, atol=1e-4)


SWAP: dict[str, Any] = {"swap_space_gib": 0.01, "swap_min_tokens": 0}
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "swapped": SWAP,
    "4 steps": {"decode_steps": 4},
    "mixed": {"mixed": True},
    "deterministic": {"deterministic": True, "seq_buckets": None},
    "no prefix cache": {"enable_prefix_caching": False},
}
MIDDLE = [(ALL, "4 steps"), (ALL, "mixed"), (ALL, "deterministic"), (SOME, "no prefix cache")]
CASES = [
    pytest.param(m, way, marks=pytest.mark.middle if (m, way) in MIDDLE else (), id=f"{name}-{way}")
    for name, m in {"some layers": SOME, "all layers": ALL}.items()
    for way in WAYS
]


@pytest.mark.parametrize(("model", "way"), CASES)
def test_the_dense_models_tokens(llm_of: Callable[..., LLM], model: Any, way: str) -> None:
    """Chunks of 16 tokens, rows that come and go, preemptions; then once more over warm blocks."""
    llm = llm_of(model, **WAYS[way])
    before = llm.stats()
    prompts = [*SHORT, *PROMPTS]
    check(model, prompts, run(llm, prompts))
    after = llm.stats()
    kind = "preemptions_swapped" if way == "swapped" else "preemptions_recomputed"
    assert after[kind] > before[kind]
    check(model, PROMPTS[2:3], run(llm, PROMPTS[2:3]))
    (again,) = llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False)
    check(model, PROMPTS[2:3], [again])
    assert (again.num_cached_tokens > 0) == (way != "no prefix cache")


@MODELS
def test_forks(llm_of: Callable[..., LLM], model: Any) -> None:
    """n=4: the prompt is computed once and its blocks are shared, those of the window too."""
    greedy = dataclasses.replace(GREEDY, n=4)
    outputs = run(llm_of(model), PROMPTS[1:3], greedy)
    assert [len(output.outputs) for output in outputs] == [4, 4]
    check(model, PROMPTS[1:3], outputs)


@MODELS
def test_beams(llm_of: Callable[..., LLM], model: Any) -> None:
    """Beams fork and end all the time: each one's logprobs are what the dense model gives it."""
    llm, prompt = llm_of(model), PROMPTS[1]
    llm.reset_prefix_cache()
    (output,) = llm.beam_search([prompt], beam_width=3, max_tokens=10, use_tqdm=False)
    assert_idle(llm)
    assert len(output.outputs) == 3
    for completion in output.outputs:
        tokens = completion.token_ids
        expected = dense_logprobs(params_of(model), prompt + tokens)[len(prompt) - 1 : -1]
        expected = expected[range(len(tokens)), tokens]
        np.testing.assert_allclose(completion.token_logprobs, expected, atol=1e-4)


@MODELS
def test_snapshot(llm_of: Callable[..., LLM], model: Any) -> None:
    """Taken in the middle, when blocks have left the window: every group comes back."""
    llm = llm_of(model, **SWAP)
    llm.reset_prefix_cache()
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(7):
        llm.step()
    snapshot = llm.snapshot()
    for _ in range(2):
        found: dict[str, RequestOutput] = {}
        while llm.has_unfinished():
            found |= {output.request_id: output for output in llm.step()}
            engine_of(llm.session).replicas[0].check_integrity()
        check(model, PROMPTS, [found[i] for i in ids])
        run(llm, make_prompts(50))  # other KV in these blocks
        llm.restore(snapshot)
    for i in ids:
        llm.abort(i)
    while llm.has_unfinished():
        llm.step()
    assert_idle(llm)


@MODELS
def test_a_pool_of_nan(llm_of: Callable[..., LLM], model: Any) -> None:
    """Scenario 5: what nothing has written is never read, in any group."""
    llm = llm_of(model)
    (expected,) = run(llm, PROMPTS[2:3])
    llm.reset_prefix_cache()
    runner = llm.session.runner
    assert runner._state is not None
    kv = tuple(filled(pool, jnp.nan) for pool in runner.pools)
    runner._state = dataclasses.replace(runner._state, kv=kv)
    (output,) = run(llm, PROMPTS[2:3])
    runner.release()
    assert tokens_of([output]) == tokens_of([expected])
    np.testing.assert_array_equal(
        output.outputs[0].token_logprobs, expected.outputs[0].token_logprobs
    )


@MODELS
def test_a_window_holds_few_blocks(llm_of: Callable[..., LLM], model: Any) -> None:
    """A row of 52 tokens, 13 blocks: what has a window holds 3 of them once its prompt is done, and
    no more than a chunk besides before.
    """
    llm = llm_of(model)
    llm.reset_prefix_cache()
    llm.add_request(PROMPTS[2], GREEDY)
    most: dict[str, list[int]] = {"prompt": [0, 0], "decode": [0, 0]}
    while llm.has_unfinished():
        llm.step()
        stats = llm.stats()
        (request,) = llm.session.engine.requests.values() or [None]
        phase = "decode" if request and request.sequences[0].num_generated else "prompt"
        for group, held in enumerate(stats["kv_groups"]):
            most[phase][group] = max(most[phase][group], held["in_use"])
    groups = llm.stats()["kv_groups"]
    assert [group["window"] for group in groups] == list(dict.fromkeys(model.sliding_windows))
    assert all(group["in_use"] == 0 for group in groups)
    local = LOCAL[model]
    assert most["decode"][local] <= 4 and most["prompt"][local] <= 2 + 1 + 16 // 4
    if model is SOME:
        assert most["decode"][0] == 13
    assert_idle(llm)


def test_long_prompts_in_the_smallest_pool() -> None:
    """A window and a chunk a row are enough, however long the prompt: 64 tokens in 8 blocks."""
    settings = engine(num_blocks=8, **(ROWS | {"max_num_seqs": 2}))
    llm = LLM(params_of(ALL), **vars(settings))
    prompts = make_prompts(52, 45, 50)
    check(ALL, prompts, run(llm, prompts))
    assert llm.stats()["peak_blocks_in_use"] <= 8
    llm.close()
