"""Embeddings in place of tokens in models with positions on three axes, against transformers:
positions, logits of the dense forward, greedy tokens of the paged engine.

`tests/golden/make_golden.py spans` makes the numbers.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import LLM, EmbeddingSpan, EngineConfig, Params, SamplingParams
from jpaged.engine.spans import rows_of
from jpaged.models.embedded import Embedded
from jpaged.models.forward import bind
from jpaged.request.embeddings import spans_of
from tests.golden import make_golden_spans as made
from tests.golden.reference import Model

STORED = Path(__file__).parents[1] / "golden" / "spans.npz"
ENGINE = EngineConfig(
    block_size=4,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    token_buckets=(32,),
    seq_buckets=(8,),
    num_blocks=160,
    max_embeddings=24,
)
GREEDY = SamplingParams(temperature=0, max_tokens=made.NEW_TOKENS, ignore_eos=True)


@functools.cache
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED, allow_pickle=False) as arrays:
        assert json.loads(str(arrays["meta"])) == json.loads(json.dumps(made.SPANNED)), (
            "run tests/golden/make_golden.py spans, a config changed"
        )
        return dict(arrays)


@pytest.fixture(scope="module", params=made.SPANNED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return name_and_params(request.param, tmp_path_factory.mktemp(request.param))


def name_and_params(name: str, folder: Path) -> tuple[str, Params]:
    from tests.golden.weights import checksum, state_dict

    config = made.SPANNED[name]
    sha = checksum(state_dict(name, config))
    golden = Model(name=name, config=config, prompts=(), weights_sha256=sha)
    return name, jpaged.load_params(golden.write(folder))


def prompt_of(name: str, prompt: str) -> dict[str, Any]:
    """The prompt as a caller passes it."""
    embeddings = {}
    for start, grid in made.PROMPTS[prompt][1].items():
        rows, extra = made.rows_of(name, prompt, start, grid, made.SPANNED[name])
        extra = extra if len(extra) else None
        embeddings[start] = EmbeddingSpan(rows, grid=grid, deepstack=extra)
    ids = stored()[f"{name}/{prompt}/token_ids"].tolist()
    return {"prompt_token_ids": ids, "embeddings": embeddings}


def greedy_of(name: str, prompt: str) -> list[int]:
    return stored()[f"{name}/{prompt}/greedy"].tolist()


def test_positions_are_those_of_transformers(model: Any) -> None:
    name, params = model
    for prompt, (length, grids) in made.PROMPTS.items():
        asked = prompt_of(name, prompt)
        spans = spans_of(asked["embeddings"], length, params.config)
        expected = stored()[f"{name}/{prompt}/positions"]
        if spans is None:
            assert not grids and (expected == np.arange(length)).all()
            continue
        if not params.config.has_axes:
            assert spans.positions is None and spans.offset == 0
            continue
        np.testing.assert_array_equal(spans.positions, expected)
        assert spans.offset == expected.max() + 1 - length


@pytest.mark.parametrize("prompt", ["one", "three"])
def test_logits_of_the_dense_forward(model: Any, prompt: str) -> None:
    name, params = model
    forward, length = bind(params.config, dict(params)), made.PROMPTS[prompt][0]
    asked = prompt_of(name, prompt)
    spans = spans_of(asked["embeddings"], length, params.config)
    assert spans is not None
    rows = rows_of(list(spans.pieces(0, length)), params.config.num_deepstack, np.float32)
    row = np.full((1, length), -1, np.int32)
    row[0, np.concatenate([np.arange(s.start, s.end) for s in spans])] = range(len(rows))
    ends = np.zeros(length, np.int32)
    spans.write_ends(ends, 0)
    axes = np.broadcast_to(np.arange(length), (3, length))
    axes = axes if spans.positions is None else spans.positions
    tokens, places = jnp.asarray([asked["prompt_token_ids"]]), stored()[f"{name}/{prompt}/places"]

    @jax.jit
    def logits(rows: Any, axes: Any, ends: Any) -> Any:
        embedded = Embedded(row=jnp.asarray(row), rows=rows, ends=ends[None])
        hidden, _ = forward(tokens, embedded=embedded, axes=axes)
        return forward.logits(hidden)[0, places]

    def differs(rows: Any, axes: Any, ends: Any) -> float:
        expected = stored()[f"{name}/{prompt}/logits"]
        return float(np.abs(np.asarray(logits(rows, axes[:, None], ends)) - expected).max())

    assert differs(rows, axes, ends) < 1e-4
    # Positions show, what is added after each of the first layers, and what images see.
    plain = np.broadcast_to(np.arange(length), (3, length))
    assert (differs(rows, plain, ends) > 0.1) == params.config.has_axes
    assert (differs(rows, axes, 0 * ends) > 0.1) == params.config.sees_images
    for layer in range(params.config.num_deepstack):
        changed = rows.copy()
        changed[:, 1 + layer] = 0
        assert differs(changed, axes, ends) > 0.1


@pytest.fixture(scope="module")
def llm(model: Any) -> LLM:
    return LLM(model[1], **vars(ENGINE))


def test_greedy_tokens_of_the_engine(model: Any, llm: LLM) -> None:
    """All prompts at once, in chunks that cut images where that may be, then by hits."""
    prompts = [prompt_of(model[0], prompt) for prompt in made.PROMPTS]
    expected = [greedy_of(model[0], prompt) for prompt in made.PROMPTS]
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens > 0 for output in again] == [True] * len(prompts)


def test_forks_and_tokens_that_are_computed_again(model: Any, llm: LLM) -> None:
    """What was drawn stands at positions after the images, whichever step computes it."""
    prompts = [prompt_of(model[0], prompt) for prompt in made.PROMPTS]
    expected = [greedy_of(model[0], prompt) for prompt in made.PROMPTS]
    longer = [
        prompt | {"prompt_token_ids": prompt["prompt_token_ids"] + greedy[:7]}
        for prompt, greedy in zip(prompts, expected, strict=True)
    ]
    llm.reset_prefix_cache()
    rest = dataclasses.replace(GREEDY, max_tokens=5)
    outputs = llm.generate(longer, rest, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [x[7:] for x in expected]
    outputs = llm.generate(prompts, dataclasses.replace(GREEDY, n=2), use_tqdm=False)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[x, x] for x in expected]


def test_preempted_rows_and_several_steps(model: Any) -> None:
    prompts = [prompt_of(model[0], prompt) for prompt in made.PROMPTS]
    expected = [greedy_of(model[0], prompt) for prompt in made.PROMPTS]
    llm = LLM(model[1], **vars(dataclasses.replace(ENGINE, num_blocks=28, decode_steps=3)))
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.stats()["preemptions"] > 0
