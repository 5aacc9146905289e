"""jpaged.generate end to end on CPU: the scenarios that go through the public API, and what is kept
between calls.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import (
    CapacityError,
    ConfigError,
    GenerationError,
    Params,
    SamplingParams,
)
from jpaged.engine.engine import Engine
from jpaged.kept import sessions as kept_sessions
from jpaged.runtime.runner import Runner
from jpaged.runtime.transfers import Transfers
from jpaged.session import Session
from tests.hlo import filled
from tests.tiny import (
    CONFIG,
    ENGINE,
    EOS,
    compiles,
    config,
    dense_greedy,
    dense_logprobs,
    engine,
    engine_of,
    make_params,
    make_prompts,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = make_prompts(1, 4, 17, 40, 16)


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module", autouse=True)
def _only_our_engines() -> Iterator[None]:
    jpaged.release(compiled=True)
    yield
    jpaged.release(compiled=True)


def generate(
    params: Any, prompts: Any, sampling: Any = GREEDY, **options: Any
) -> list[jpaged.RequestOutput]:
    options.setdefault("engine_config", ENGINE)
    return jpaged.generate(params, prompts, sampling, **options)


def kept() -> tuple[Session, Engine, Runner]:
    """The session that the last call used."""
    session = kept_sessions()[-1]
    return session, engine_of(session), session.runner


def assert_nothing_left() -> None:
    session, running, runner = kept()
    assert running.requests == {}
    assert running.replicas[0].blocks.num_used == 0
    running.replicas[0].check_integrity()
    assert runner.params is None and session.served.params is None


def cold(
    params: Any, prompts: Any, sampling: Any = GREEDY, **options: Any
) -> list[jpaged.RequestOutput]:
    """A run that finds nothing cached."""
    if kept_sessions():
        kept()[1].reset_prefix_cache()
    return generate(params, prompts, sampling, **options)


# The main path


def test_greedy_equals_the_dense_model(params: Params) -> None:
    """Prompts from one token to 2.5 chunks, in one call, against the model run anew for every
    token.
    """
    outputs = generate(params, PROMPTS)
    assert tokens_of(outputs) == [dense_greedy(params, prompt, 10) for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (completion,) = output.outputs
        expected = dense_logprobs(params, prompt + completion.token_ids)[len(prompt) - 1 : -1]
        rows = np.arange(len(completion.token_ids))
        np.testing.assert_allclose(
            completion.token_logprobs, expected[rows, completion.token_ids], atol=1e-4
        )
        assert completion.token_logprobs.dtype == np.float32
        assert completion.cumulative_logprob == pytest.approx(
            float(completion.token_logprobs.sum()), abs=1e-4
        )
        assert (
            output.prompt_token_ids == prompt and output.prompt is None and completion.text is None
        )
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")
        assert output.finished and output.error is None and output.weight_version == 1
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == len(PROMPTS), "streams differ"


def test_forms_of_a_prompt(params: Params) -> None:
    prompt = PROMPTS[1]
    forms = [
        prompt,
        np.array(prompt),
        jnp.array(prompt, jnp.int32),
        {"prompt_token_ids": prompt},
        {"prompt_token_ids": np.array(prompt), "prompt": "kept"},
        tuple(prompt),
        [np.int64(token) for token in prompt],
    ]
    outputs = generate(params, forms)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 1
    assert [output.prompt for output in outputs] == [None] * 4 + ["kept"] + [None] * 2
    for one in (prompt, np.array(prompt), {"prompt_token_ids": prompt}):
        assert tokens_of(generate(params, one)) == tokens_of(outputs[:1])
    assert generate(params, []) == []


def test_raw_trees_need_a_config(params: Params) -> None:
    with pytest.raises(ConfigError, match=r"need config="):
        generate(dict(params), PROMPTS)
    outputs = generate({"params": dict(params)}, PROMPTS[:1], config=CONFIG)
    assert tokens_of(outputs) == [dense_greedy(params, PROMPTS[0], 10)]


# Scenarios


def test_scenario_02_a_fully_cached_prompt(params: Params) -> None:
    (prompt,) = make_prompts(12, seed=2)
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=5)
    first, warm = cold(params, [prompt], sampling)[0], generate(params, [prompt], sampling)[0]
    assert (first.num_cached_tokens, warm.num_cached_tokens) == (0, 8), (
        "the last block's tokens are computed"
    )
    assert tokens_of([warm]) == tokens_of([first])
    assert first.outputs[0].logprobs is not None and warm.outputs[0].logprobs is not None
    for a, b in zip(first.outputs[0].logprobs, warm.outputs[0].logprobs, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(
            [x.logprob for x in a.values()], [x.logprob for x in b.values()], atol=1e-5
        )


def test_scenario_05_chunks_over_a_pool_of_nan(params: Params) -> None:
    """What nothing has written is never read: 40 tokens in chunks of 16, then decode."""
    expected = cold(params, [PROMPTS[3]])[0]
    _, running, runner = kept()
    running.reset_prefix_cache()
    assert runner._state is not None
    kv = tuple(filled(pool, jnp.nan) for pool in runner.pools)
    runner._state = dataclasses.replace(runner._state, kv=kv)
    steps = running.stats.prefill_steps
    (output,) = generate(params, [PROMPTS[3]])
    assert running.stats.prefill_steps == steps + 3
    assert tokens_of([output]) == tokens_of([expected])
    np.testing.assert_array_equal(
        output.outputs[0].token_logprobs, expected.outputs[0].token_logprobs
    )
    jpaged.release()


def test_scenario_08_decode_equals_prefill(params: Params) -> None:
    (output,) = cold(params, [PROMPTS[2]])
    tokens, decoded = output.outputs[0].token_ids, output.outputs[0].token_logprobs
    scored: Any = jpaged.score(params, [PROMPTS[2] + tokens], engine_config=ENGINE)
    np.testing.assert_allclose(decoded, scored[0][len(PROMPTS[2]) - 1 :], atol=1e-4)
    one = SamplingParams(temperature=0, max_tokens=1)
    prefilled = cold(params, [PROMPTS[2] + tokens[:i] for i in range(len(tokens))], one)
    assert [t for (t,) in tokens_of(prefilled)] == tokens
    np.testing.assert_allclose(
        [float(o.outputs[0].token_logprobs[0]) for o in prefilled], decoded, atol=1e-4
    )


def test_a_request_that_outgrows_the_pool_fails_alone(params: Params) -> None:
    """Nothing to preempt and no block left: that request ends with an error, the others are
    whole.
    """
    small = engine(num_blocks=8)
    long, short = (
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=3),
    )
    prompts = make_prompts(9, 3, 5, seed=9)
    outputs = generate(
        params, prompts, [long, short, short], engine_config=small, on_error="return"
    )
    assert isinstance(outputs[0].error, CapacityError) and "raise num_blocks" in str(
        outputs[0].error
    )
    assert outputs[0].outputs[0].finish_reason == "error"
    whole = dense_greedy(params, prompts[0], 40)
    made = outputs[0].outputs[0].token_ids
    assert len(made) >= 20 and (made == whole[: len(made)] or EOS in made), (
        "what was made before it failed is kept"
    )
    assert tokens_of(outputs[1:]) == [dense_greedy(params, prompt, 3) for prompt in prompts[1:]]
    with pytest.raises(
        GenerationError, match=r"1 of 3 requests failed; request 0: .*raise num_blocks"
    ) as caught:
        generate(params, prompts, [long, short, short], engine_config=small)
    assert tokens_of(caught.value.outputs) == tokens_of(outputs)
    with pytest.raises(
        CapacityError, match=r"prompt of 33 tokens does not fit the KV pool of 8 blocks of 4"
    ):
        generate(params, make_prompts(33), engine_config=small)
    assert_nothing_left()


# Scenario 15: interrupted anywhere


class Stop(Exception):
    pass


def interrupt(
    where: str, at: int, error: type[BaseException], patch: pytest.MonkeyPatch, runner: Runner
) -> None:
    """Make the `at`-th pass of one place raise."""
    passed = 0

    def then_raise(call: Any, *args: Any, first: bool) -> Any:
        nonlocal passed
        passed += 1
        if passed == at and first:
            raise error("interrupted")
        result = call(*args)
        if passed == at:
            raise error("interrupted")
        return result

    if (
        where == "between dispatch and rebinding"
    ):  # the step has consumed the pool; its result is never bound
        patch.setattr(runner, "_ready", {})  # of the steps that the table has now
        table = runner.compiled._steps
        for bucket, step in [item for item in table.items() if item[0].phase != "sample"]:
            patch.setitem(table, bucket, lambda *a, step=step: then_raise(step, *a, first=False))
        return
    owner, name, first = {
        "before a step": (Engine, "step", True),
        "after a step": (Engine, "step", False),
        "before an upload": (Transfers, "put", True),
        "before a download": (Transfers, "get", True),
        "after a download": (Transfers, "get", False),
    }[where]
    method = getattr(owner, name)
    patch.setattr(
        owner, name, lambda self, *a: then_raise(lambda *b: method(self, *b), *a, first=first)
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("at", [1, 2, 6], ids=["prefill", "second", "decode"])
@pytest.mark.parametrize(
    "where",
    [
        "before a step",
        "after a step",
        "before an upload",
        "before a download",
        "after a download",
        "between dispatch and rebinding",
    ],
)
def test_scenario_15(params: Params, where: str, at: int, error: type[BaseException]) -> None:
    prompts = PROMPTS[1:4]
    expected = tokens_of(cold(params, prompts))
    _, _, runner = kept()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        interrupt(where, at, error, patch, runner)
        cold(params, prompts)
    assert_nothing_left()
    if where == "between dispatch and rebinding":
        assert runner._state is None, "its buffer is gone: the next step starts from zeros"
    again = generate(params, prompts)
    assert tokens_of(again) == expected
    if where == "between dispatch and rebinding":
        assert [output.num_cached_tokens for output in again] == [0, 0, 0], (
            "the prefix cache went with the pool"
        )
    assert_nothing_left()


def test_scenario_15_while_new_weights_are_taken(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after the new weights were noted, before the old prefix cache was dropped."""
    other, prompts = make_params(1), PROMPTS[2:3]
    expected = tokens_of(cold(other, prompts))
    cold(params, prompts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            Engine, "reset_prefix_cache", lambda self: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        generate(other, prompts)
    again = generate(other, prompts)
    assert again[0].num_cached_tokens == 0 and tokens_of(again) == expected


@pytest.mark.own_steps
def test_scenario_15_while_the_pool_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between the new pool's runner and its engine: the old ones stay, and work."""
    params = make_params(0, config(num_layers=1))
    settings = engine(num_blocks=None)
    expected = tokens_of(generate(params, PROMPTS[:1], engine_config=settings))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            "jpaged.served_pool.Engine",
            lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt()),
        )
        generate(params, PROMPTS, engine_config=settings)
    with compiles() as names:
        again = generate(params, PROMPTS[:1], engine_config=settings)
    assert tokens_of(again) == expected and names == []


def test_scenario_15_a_failing_callback(params: Params) -> None:
    """An exception while the tokens of a step are taken in, when one row of it has ended
    already.
    """

    class Tokenizer:
        eos_token_id, chat_template, fails = EOS, None, False

        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            if self.fails and len(ids) == 3:
                raise Stop("broken tokenizer")
            return "".join(chr(33 + i) for i in ids)

    tokenizer = Tokenizer()
    sampling = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=6, stop="never"),
    ]
    prompts = make_prompts(9, 5, seed=15)
    expected = tokens_of(generate(params, prompts, sampling, tokenizer=tokenizer))
    tokenizer.fails = True
    with pytest.raises(Stop):
        generate(params, prompts, sampling, tokenizer=tokenizer)
    assert_nothing_left()
    tokenizer.fails = False
    again = generate(params, prompts, sampling, tokenizer=tokenizer)
    assert tokens_of(again) == expected
    assert_nothing_left()


# Scenarios 17 and 18: a row's tokens depend on nothing but its request

MIX = [
    SamplingParams(temperature=0, max_tokens=8),
    SamplingParams(temperature=2.0, max_tokens=8),
    SamplingParams(temperature=1.5, top_k=3, max_tokens=8),
    SamplingParams(temperature=1.5, top_p=0.7, max_tokens=8),
    SamplingParams(temperature=1.5, min_p=0.1, seed=5, max_tokens=8),
    SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, max_tokens=8),
    SamplingParams(
        temperature=0, repetition_penalty=1.7, logit_bias={7: 4.0}, logprobs=2, max_tokens=8
    ),
    SamplingParams(temperature=1.0, seed=6, min_tokens=4, stop_token_ids=[1, 2], max_tokens=8),
]
MIX = [SamplingParams(**{**vars(p), "ignore_eos": p.min_tokens == 0}) for p in MIX]
MIX_PROMPTS = make_prompts(3, 7, 20, 5, 9, 18, 11, 4, seed=17)


@pytest.fixture(scope="module")
def mixed(params: Params) -> list[jpaged.RequestOutput]:
    return cold(params, MIX_PROMPTS, MIX, seed=3)


def same(outputs: list[jpaged.RequestOutput], expected: list[jpaged.RequestOutput]) -> None:
    assert tokens_of(outputs) == tokens_of(expected)
    for a, b in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(
            a.outputs[0].token_logprobs, b.outputs[0].token_logprobs, atol=1e-4
        )


def test_scenario_17_each_row_as_if_alone(
    params: Params, mixed: list[jpaged.RequestOutput]
) -> None:
    for i, (prompt, sampling) in enumerate(zip(MIX_PROMPTS, MIX, strict=True)):
        # Alone it is prompt 0 of its call, so an unseeded row needs neighbours in place; they end
        # at once.
        one = SamplingParams(temperature=0, max_tokens=1)
        outputs = cold(params, [[1]] * i + [prompt], [one] * i + [sampling], seed=3)
        same(outputs[-1:], mixed[i : i + 1])
    assert len({tuple(tokens) for tokens in tokens_of(mixed)}) == len(MIX)


def test_scenario_18_prefix_hits(params: Params, mixed: list[jpaged.RequestOutput]) -> None:
    cold(params, MIX_PROMPTS, MIX, seed=3)
    warm = generate(params, MIX_PROMPTS, MIX, seed=3)
    assert sum(output.num_cached_tokens for output in warm) > 20
    same(warm, mixed)


def test_scenario_18_another_engine(params: Params, mixed: list[jpaged.RequestOutput]) -> None:
    """Other chunks, other buckets, another block size, fewer rows, and a pool so small that rows
    are preempted.
    """
    other = engine(
        max_num_batched_tokens=7,
        token_buckets=(8, 16),
        block_size=3,
        max_num_seqs=5,
        num_blocks=14,
        max_model_len=40,
    )
    outputs = generate(params, MIX_PROMPTS, MIX, seed=3, engine_config=other)
    assert kept()[1].replicas[0].queues.preemptions.total() > 0
    same(outputs, mixed)
    assert_nothing_left()


def test_another_seed_is_another_sample(params: Params, mixed: list[jpaged.RequestOutput]) -> None:
    outputs = cold(params, MIX_PROMPTS, MIX, seed=4)
    equal = [a == b for a, b in zip(tokens_of(outputs), tokens_of(mixed), strict=True)]
    assert equal == [p.temperature == 0 or p.seed is not None for p in MIX]


def test_seeds_and_keys(params: Params) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    prompts = [PROMPTS[1]] * 2
    by_int = tokens_of(generate(params, prompts, sampling, seed=11))
    for seed in (np.int64(11), jnp.int32(11), jax.random.key(11), jax.random.PRNGKey(11)):
        assert tokens_of(generate(params, prompts, sampling, seed=seed)) == by_int
    folded = jax.random.fold_in(jax.random.key(11), 1)
    for other in (12, -11, 11 + 2**32, folded, jax.random.key(11, impl="rbg")):
        assert tokens_of(generate(params, prompts, sampling, seed=other)) != by_int
    seeded = SamplingParams(temperature=2.0, max_tokens=8, seed=5, ignore_eos=True)
    a, b = tokens_of(generate(params, prompts, seeded, seed=1))
    assert a == b, "equal prompts with equal seeds give equal samples"
    assert tokens_of(generate(params, prompts[:1], seeded, seed=2)) == [a]


@pytest.mark.own_steps
def test_scenario_19_new_params(params: Params) -> None:
    """New weights are served at once, with nothing cached and nothing compiled; the same ones again
    hit the prefix.
    """
    other = make_params(1)
    prompts = PROMPTS[2:4]
    expected = [tokens_of(cold(p, prompts)) for p in (params, other)]
    assert expected[0] != expected[1]
    generate(params, prompts)
    with compiles() as names:
        fresh = generate(other, prompts)
        again = generate(other, prompts)
        back = generate(jax.tree.map(lambda x: x, params), prompts)
    assert names == []
    assert [output.num_cached_tokens for output in fresh] == [0, 0] and tokens_of(
        fresh
    ) == expected[1]
    assert [output.num_cached_tokens for output in again] == [16, 36] and tokens_of(
        again
    ) == expected[1]
    assert [output.num_cached_tokens for output in back] == [0, 0] and tokens_of(back) == expected[
        0
    ]
    assert [o[0].weight_version for o in (again, back)] == [
        fresh[0].weight_version,
        fresh[0].weight_version + 1,
    ]


def test_scenario_23_prompt_logprobs(params: Params) -> None:
    """After a warm prefix they equal a cold run's, and the dense model's; such a request takes no
    hits.
    """
    (prompt,) = make_prompts(37, seed=23)
    sampling = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    first = cold(params, [prompt], sampling)[0]
    generate(params, [prompt])
    warm = generate(params, [prompt], sampling)[0]
    assert warm.num_cached_tokens == 0
    assert first.prompt_logprobs is not None and warm.prompt_logprobs is not None
    assert (
        len(first.prompt_logprobs) == 37
        and first.prompt_logprobs[0] is None is warm.prompt_logprobs[0]
    )
    dense = dense_logprobs(params, prompt)
    for i in range(1, 37):
        cold_top, warm_top = first.prompt_logprobs[i], warm.prompt_logprobs[i]
        assert cold_top is not None and warm_top is not None and cold_top.keys() == warm_top.keys()
        best = np.argsort(-dense[i - 1])[:2].tolist()
        assert next(iter(cold_top)) == prompt[i] and set(cold_top) == {prompt[i], *best}
        for token, found in cold_top.items():
            assert found.logprob == pytest.approx(dense[i - 1][token], abs=1e-4)
            assert found.logprob == pytest.approx(warm_top[token].logprob, abs=1e-5)
            assert found.rank == 1 + int((dense[i - 1] > dense[i - 1][token]).sum())
    assert tokens_of([first]) == tokens_of([warm]) == [dense_greedy(params, prompt, 3)]


def test_scenario_24_one_prompt_eight_times(params: Params) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)
    first = tokens_of(generate(params, [PROMPTS[2]] * 8, sampling, seed=0))
    assert len({tuple(tokens) for tokens in first}) == 8
    assert tokens_of(generate(params, [PROMPTS[2]] * 8, sampling, seed=0)) == first
    assert tokens_of(generate(params, [PROMPTS[2]] * 8, sampling)) != first
