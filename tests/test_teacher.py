"""score as a teacher: likeliest tokens, candidates and entropy as arrays, from any token on; hidden
states that stay on the device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, Params, RequestError, SamplingParams, Scores
from jpaged.kept import sessions
from jpaged.request.scores import ScoreOptions
from jpaged.session import Session
from tests.recurrent import HYBRID
from tests.test_lora import make_lora
from tests.test_quantization import rounded
from tests.tiny import (
    ENGINE,
    assert_idle,
    compiles,
    config,
    dense_logits,
    dense_logprobs,
    engine,
    make_params,
    make_prompts,
)

# The first scores one token, the longest are chunks of several steps.
LISTS = make_prompts(2, 9, 41, 16, 64)
STARTS = [1, 4, 30, 0, 16]
K = 40  # beyond max_logprobs


def served(params: Params, **settings: Any) -> LLM:
    return LLM(params, **{**vars(ENGINE), **settings})


def tied(params: Params) -> Params:
    """The same with tokens that are always as likely as others."""
    head = params["lm_head"]["weight"]
    return Params({**params, "lm_head": {"weight": head.at[60:80].set(head[20:40])}}, params.config)


@pytest.fixture(scope="module")
def params() -> Iterator[Params]:
    yield tied(make_params())
    jpaged.release(compiled=True)


def candidates(seed: int, starts: Sequence[int] = STARTS, width: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = [len(tokens) - max(start, 1) for tokens, start in zip(LISTS, starts, strict=True)]
    return [rng.integers(0, 97, (count, width)) for count in rows]


def check(
    scores: Sequence[Scores],
    reference: Params,
    *,
    starts: Sequence[int] = STARTS,
    at: Sequence[np.ndarray] | None = None,
    temperature: float = 1.0,
    atol: float = 2e-5,
) -> None:
    """They are gathers of a dense forward's log_softmax, with ties in the order of ids."""
    assert len(scores) == len(LISTS)
    for i, (tokens, start, one) in enumerate(zip(LISTS, starts, scores, strict=True)):
        first = max(start, 1)
        wanted = dense_logprobs(reference, tokens, temperature)[first - 1 : -1]
        likeliest = np.argsort(-wanted.astype(np.float32), axis=1, kind="stable")
        assert one.start == first and one.logprobs.shape == (len(tokens) - first,)
        own = np.take_along_axis(wanted, np.array(tokens[first:])[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(one.logprobs, own, atol=atol)
        assert one.top_ids is not None and one.top_logprobs is not None
        assert (one.top_ids.dtype, one.top_logprobs.dtype) == (np.int32, np.float32)
        assert one.top_ids.shape == one.top_logprobs.shape == (len(wanted), K)
        np.testing.assert_array_equal(one.top_ids, likeliest[:, :K])
        tops = np.take_along_axis(wanted, likeliest[:, :K], axis=1)
        np.testing.assert_allclose(one.top_logprobs, tops, atol=atol)
        np.testing.assert_array_equal(one.greedy, np.array(tokens[first:]) == likeliest[:, 0])
        if at is not None:
            assert one.at_logprobs is not None and one.at_logprobs.dtype == np.float32
            those = np.take_along_axis(wanted, at[i], axis=1)
            np.testing.assert_allclose(one.at_logprobs, those, atol=atol)
        if one.entropy is not None:
            entropy = -(np.exp(wanted) * wanted).sum(axis=1)
            np.testing.assert_allclose(one.entropy, entropy, atol=atol)


@pytest.mark.own_steps
def test_equals_the_dense_model(params: Params) -> None:
    """One to four chunks each, packed together. Another K, temperature or start compiles nothing,
    no token is drawn, and rows are the same bits from whatever token they begin.
    """
    jpaged.release()  # the session of another test has run other steps
    at = candidates(0)
    first = jpaged.score(
        params, LISTS, start=STARTS, top_k=K, at=at, entropy=True, engine_config=ENGINE
    )
    check(first, params, at=at)
    with compiles() as names:
        warm = jpaged.score(
            params,
            LISTS,
            start=np.array(STARTS),
            top_k=K,
            at=[jax.numpy.asarray(ids) for ids in at],
            entropy=True,
            temperature=1.7,
            engine_config=ENGINE,
        )
        fewer = jpaged.score(
            params, LISTS, start=STARTS, top_k=35, at=at, entropy=True, engine_config=ENGINE
        )
    assert [name for name in names if name.startswith("jit(prefill")] == []
    check(warm, params, at=at, temperature=1.7)
    for one, other in zip(first, fewer, strict=True):
        assert one.top_logprobs is not None and other.top_logprobs is not None
        np.testing.assert_array_equal(other.top_logprobs, one.top_logprobs[:, :35])
    ran = {(x.phase, x.features) for x in sessions()[-1].buckets() if x.hits}
    assert ran == {("prefill", "prompt, top 128, candidates 32, entropy, part")}


def test_more_of_a_score_leaves_its_logprobs(params: Params) -> None:
    """Old callers get what they got, and `start` cuts it."""
    whole = jpaged.score(params, LISTS, engine_config=ENGINE)
    assert isinstance(whole, list)
    cut = jpaged.score(params, LISTS, start=STARTS, engine_config=ENGINE)
    logprobs, greedy = jpaged.score(
        params, LISTS, start=STARTS, return_greedy=True, engine_config=ENGINE
    )
    (top,) = jpaged.score(params, LISTS[2:3], top_k=1, engine_config=ENGINE)
    np.testing.assert_array_equal(top.logprobs, whole[2])
    assert top.at_logprobs is None is top.entropy and top.start == 1
    for i, start in enumerate(STARTS):
        np.testing.assert_array_equal(cut[i], whole[i][max(start, 1) - 1 :])
        np.testing.assert_array_equal(logprobs[i], cut[i])
        assert len(greedy[i]) == len(cut[i])
    none = jpaged.score(params, [[5], [5, 6]], start=[1, 2], top_k=2, engine_config=ENGINE)
    assert [one.logprobs.shape for one in none] == [(0,), (0,)]
    assert none[0].top_ids is not None and none[0].top_ids.shape == (0, 2)
    assert jpaged.score(params, [], entropy=True, engine_config=ENGINE) == []


def test_what_comes_before_is_found_in_the_cache(params: Params) -> None:
    """A prompt that a rollout has left there is not computed again to score what followed it."""
    llm = served(params)
    (out,) = llm.generate([LISTS[2]], SamplingParams(max_tokens=9, ignore_eos=True, seed=1))
    tokens = [*LISTS[2], *out.outputs[0].token_ids]
    before = llm.stats()
    logprobs = llm.score([tokens], start=[41])[0]
    after = llm.stats()
    np.testing.assert_allclose(logprobs, out.outputs[0].token_logprobs, atol=1e-5, rtol=5e-6)
    assert after["cached_tokens"] - before["cached_tokens"] == 40
    assert after["generated_tokens"] == before["generated_tokens"]
    llm.score([tokens], start=[3])
    assert llm.stats()["cached_tokens"] == after["cached_tokens"]
    assert_idle(llm)
    llm.close()


def hybrid() -> tuple[LLM, Params]:
    params = make_params(0, HYBRID)
    return served(params), params


def on_a_mesh() -> tuple[LLM, Params]:
    params, devices = tied(make_params()), np.array(jax.devices()[:4])
    mesh = Mesh(devices.reshape(2, 2), ("data", "tp"))
    return served(params, mesh=mesh), params


def in_8_bits() -> tuple[LLM, Params]:
    params = make_params(0, config(head_dim=32, intermediate_size=64))
    return served(params, quantization="int8"), rounded(params, "int8")


@pytest.mark.parametrize(
    "make", [hybrid, on_a_mesh, in_8_bits], ids=["hybrid", "data 2, tp 2", "int8"]
)
def test_wherever_it_is_served(make: Callable[[], tuple[LLM, Params]]) -> None:
    """A model with states, two replicas of two devices each, weights in 8 bits."""
    llm, reference = make()
    at = candidates(1)
    scores = llm.score(LISTS, start=STARTS, top_k=K, at=at, entropy=True)
    # What is rounded in 8 bits rounds what it is multiplied with in another order.
    check(scores, reference, at=at, atol=3e-5)
    states = llm.hidden(LISTS, max_len=64)
    for tokens, state in zip(LISTS, states, strict=True):
        logits = np.asarray(jpaged.logits(reference, state))
        wanted = dense_logits(reference, tokens)
        np.testing.assert_allclose(logits[: len(tokens)], wanted, atol=1e-4)
        assert not np.any(np.asarray(state)[len(tokens) :])
    assert_idle(llm)
    llm.close()


def test_adapters(params: Params) -> None:
    lora = make_lora(5, model=params.config)
    loras = [lora, None, lora, None, lora]
    options: dict[str, Any] = {"start": STARTS, "top_k": K, "engine_config": ENGINE}
    scores = jpaged.score(params, LISTS, lora=loras, **options)
    merged = jpaged.score(jpaged.merged(params, lora), LISTS, **options)
    plain = jpaged.score(params, LISTS, **options)
    for i, one in enumerate(scores):
        other = plain[i] if loras[i] is None else merged[i]
        np.testing.assert_array_equal(one.top_ids, other.top_ids)
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=2e-5)


def test_hidden_states_stay_on_the_device(params: Params) -> None:
    jpaged.hidden(params, LISTS[:2], max_len=64, engine_config=ENGINE)
    with jax.transfer_guard_device_to_host("disallow"), compiles() as names:
        states = jpaged.hidden(params, LISTS, max_len=64, engine_config=ENGINE)
    assert names == []
    exact = jpaged.hidden(params, [LISTS[3], [5]], engine_config=ENGINE)
    assert [state.shape for state in exact] == [(16, 32), (1, 32)]
    np.testing.assert_array_equal(exact[0], states[3][:16])
    logits = jax.jit(jpaged.logits)
    for tokens, state in zip(LISTS, states, strict=True):
        assert isinstance(state, jax.Array) and state.dtype == params["embed"]["weight"].dtype
        assert state.devices() == params["embed"]["weight"].devices()
        wanted = dense_logits(params, tokens)
        np.testing.assert_allclose(logits(params, state)[: len(tokens)], wanted, atol=1e-4)


@pytest.mark.as_users
def test_the_same_bits_in_any_company() -> None:
    """With deterministic=True a row's scores do not depend on what else is scored, nor on where
    scoring starts; and its own logprobs are those of the rollout.
    """
    params = make_params(0, dtype=jax.numpy.bfloat16)
    llm = served(params, deterministic=True)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)
    (out,) = llm.generate([LISTS[2]], sampling)
    tokens = [*LISTS[2], *out.outputs[0].token_ids]
    (alone,) = llm.score([tokens], start=[41], top_k=K, entropy=True)
    both = llm.score([LISTS[4], tokens], start=[20, 30], top_k=K, entropy=True)
    np.testing.assert_array_equal(alone.logprobs, out.outputs[0].token_logprobs)
    for name in ("logprobs", "top_ids", "top_logprobs", "entropy"):
        np.testing.assert_array_equal(getattr(both[1], name)[11:], getattr(alone, name))
    llm.close()


@pytest.mark.own_steps
@pytest.mark.middle
def test_a_warmup_knows_how_score_will_be_called(params: Params) -> None:
    """After it such calls compile nothing, longer and shorter lists of the same widths too."""
    llm = served(params)
    calls: Any = {"top_k": K, "at": 3, "entropy": True, "start": True}
    assert llm.warmup(score=calls, use_tqdm=False) > 0
    starts = [1, 4, 30, 5, 16]  # the first shares its step with others
    with compiles() as names:
        for width in (3, 32):
            at = candidates(1, starts, width)
            scores = llm.score(LISTS, start=starts, top_k=K, at=at, entropy=True)
            check(scores, params, starts=starts, at=at)
    assert [name for name in names if name.startswith("jit(prefill")] == []
    for bad, said in (
        ({"top": 3}, "score={'top': ...}: it has top_k, at, entropy, start"),
        ({"top_k": 0}, "score={'top_k'}=0: must be at least 1"),
        ({"at": 513}, "score={'at'}=513: must be at least 1 and at most 512"),
        ({"start": [1]}, r"score={'start': \[1\]}: must be True or False"),
    ):
        with pytest.raises(jpaged.ConfigError, match=said):
            llm.warmup(score=bad, use_tqdm=False)  # pyright: ignore[reportArgumentType]
    llm.close()


ROWS = [[0] * 2]  # candidates of [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, r"top_k=0: must be at least 1 and at most 97"),
        ({"top_k": 98}, r"top_k=98: must be .* at most 97"),
        ({"top_k": 2.0}, r"top_k=2.0"),
        ({"top_k": 2, "return_greedy": True}, r"return_greedy=True.*Scores.greedy"),
        ({"entropy": 1}, r"entropy=1: must be True or False"),
        ({"entropy": True, "temperature": 0}, r"temperature=0"),
        ({"entropy": True, "temperature": math.inf}, r"temperature=inf"),
        ({"temperature": np.ones(2)}, r"temperature=array\(.*must be a number"),
        ({"start": 1}, r"start=1: must be a list of 1, one a sequence"),
        ({"start": [1, 1]}, r"start=.*must be a list of 1"),
        ({"start": [3]}, r"start\[0\]=3: must be at least 0 and at most 2"),
        ({"start": [-1]}, r"start\[0\]=-1"),
        ({"at": []}, r"at: 0 arrays for 1 sequences"),
        ({"at": 32}, r"at of type int: must be a list of arrays"),
        ({"at": [[[1, 2], [3]]]}, r"at\[0\] is no array: "),
        ({"at": [[0, 1]]}, r"at\[0\] of int64\[2\]: must be integers \[1, K\]"),
        ({"at": [ROWS * 2]}, r"at\[0\] of int64\[2, 2\]: must be integers \[1, K\]"),
        ({"at": [ROWS], "start": [2]}, r"must be integers \[0, K\]"),
        ({"at": [[[0.5]]]}, r"at\[0\] of float64\[1, 1\]"),
        ({"at": [[[]]]}, r"at\[0\] of float64\[1, 0\]"),
        ({"at": [np.zeros((1, 513), int)]}, r"at\[0\] has 513 candidates a row: must be 1 to 512"),
        ({"at": [[[3, 97]]]}, r"at\[0\]: token id 97 is outside the vocabulary of 97"),
    ],
    ids=str,
)
def test_bad_input(params: Params, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        jpaged.score(params, [[1, 2]], engine_config=ENGINE, **options)


def test_refusals(params: Params) -> None:
    with pytest.raises(RequestError, match=r"max_len=8: must be at least 9"):
        jpaged.hidden(params, LISTS[:2], max_len=8, engine_config=ENGINE)
    with pytest.raises(RequestError, match=r"sequence 1 of 65 tokens is longer than"):
        jpaged.hidden(params, [[1], [1] * 65], engine_config=ENGINE)
    states = jax.numpy.zeros((1, 32))
    with pytest.raises(jpaged.ConfigError, match=r"params='folder': logits takes loaded params"):
        jpaged.logits("folder", states)
    with pytest.raises(jpaged.ConfigError, match=r"params of type dict under jit.*params_from"):
        jax.jit(jpaged.logits)({**params}, states)
    strict = Session(params, engine(strict=True), None, grows=True)
    for options in (ScoreOptions(top_k=2), ScoreOptions(entropy=True), ScoreOptions(at=[ROWS])):
        with pytest.raises(RequestError, match=r"strict=True has no steps for top_k"):
            strict.score([[1, 2]], options)
    with pytest.raises(RequestError, match=r"strict=True has no steps for .*hidden"):
        strict.hidden([[1, 2]], None)
    with pytest.raises(RequestError, match=r"strict=True has no steps for top_k"):
        strict.warmup({"top_k": 2}, use_tqdm=False)
