"""jpaged inside a training loop: no compile after warmup, memory given back, arrays and logprobs as
the trainer's.
"""

import dataclasses
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpaged
from jpaged import LLM, CapacityError, ConfigError, Params, RequestError, SamplingParams
from jpaged.kept import sessions as kept_sessions
from jpaged.models.forward import bind
from jpaged.runtime.runner import Runner
from tests.text_model import write_folder
from tests.tiny import EOS, compiles, config, engine, make_params, make_prompts, tokens_of

MODEL = config(num_layers=1)
SETTINGS = engine(
    num_blocks=None,
    token_buckets=(16, 32),
    max_num_batched_tokens=32,
    seq_buckets=(8, 16),
    max_num_seqs=16,
)
# One shape of each step, where the shapes do not matter.
SMALL = dataclasses.replace(SETTINGS, token_buckets=(32,), seq_buckets=(16,))
MAX_PROMPT, MAX_TOKENS, GROUPS, SAMPLES = 20, 8, 3, 4


@pytest.fixture(autouse=True)
def fresh():
    jpaged.release(compiled=True)
    yield
    jpaged.release(compiled=True)


def logprobs_of(params: Params, arrays: Any, temperature: float) -> jax.Array:
    """[B, C]: what a trainer recomputes: log_softmax(logits / temperature) of the completions,
    left-padded prompts.
    """
    tokens_BT = jnp.concatenate([arrays["prompt_ids"], arrays["completion_ids"]], axis=1)
    real_BT = jnp.concatenate([arrays["prompt_mask"], arrays["completion_mask"]], axis=1)
    # Padding on the left: rolled away, so that the dense forward sees each sequence from its first
    # token on.
    pad_B = jnp.argmax(real_BT, axis=1)
    rolled_BT = jax.vmap(lambda row, n: jnp.roll(row, -n))(tokens_BT, pad_B)
    model = bind(params.config, dict(params))
    logits_BTV = model.logits(model(rolled_BT)[0]) / temperature
    at_BC = (arrays["prompt_lens"][:, None] - 1) + jnp.arange(arrays["completion_ids"].shape[1])[
        None, :
    ]
    logits_BCV = jnp.take_along_axis(logits_BTV, at_BC[:, :, None], axis=1)
    chosen = jax.nn.log_softmax(logits_BCV)
    return jnp.take_along_axis(chosen, arrays["completion_ids"][:, :, None], axis=2)[:, :, 0]


def make_step(optimizer: optax.GradientTransformation) -> Any:
    """One GRPO update (arXiv:2402.03300) on fixed shapes; jitted once."""

    def loss_of(params: Params, arrays: Any, advantages_B: jax.Array) -> jax.Array:
        ratio = jnp.exp(logprobs_of(params, arrays, 0.7) - arrays["logprobs"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        gain = jnp.minimum(ratio * advantages_B[:, None], clipped * advantages_B[:, None])
        mask = arrays["completion_mask"]
        return -jnp.sum(gain * mask) / jnp.maximum(jnp.sum(mask), 1)

    @jax.jit
    def step(
        params: Params, state: Any, arrays: Any, advantages_B: jax.Array
    ) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, arrays, advantages_B)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss  # pyright: ignore[reportReturnType]

    return step


@pytest.mark.own_steps
@pytest.mark.train
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.slow), "bfloat16"])
def test_twenty_updates_compile_nothing(dtype: str | None) -> None:
    """Prompts of other lengths each time, generate and score, f32 masters; then a batch of one in
    the same step.
    """
    params = make_params(0, MODEL)
    settings = dataclasses.replace(SETTINGS, dtype=dtype)
    assert (
        jpaged.warmup(params, MAX_PROMPT, MAX_TOKENS, GROUPS * SAMPLES, engine_config=settings) > 0
    )
    optimizer = optax.adam(1e-3)
    state, step, rng = optimizer.init(params), make_step(optimizer), np.random.default_rng(0)  # pyright: ignore
    sampling = SamplingParams(
        n=SAMPLES,
        temperature=0.7,
        top_p=0.9,
        max_tokens=MAX_TOKENS,
        logprobs_mode="tempered",
        logprobs=0,
    )
    shapes: dict[str, Any] = {"max_prompt_len": MAX_PROMPT, "max_completion_len": MAX_TOKENS}

    def iterate(params: Params, state: Any, update: int) -> tuple[Params, Any]:
        prompts = make_prompts(*rng.integers(1, MAX_PROMPT + 1, GROUPS).tolist(), seed=update)
        outs = jpaged.generate(params, prompts, sampling, engine_config=settings, seed=update)
        assert {out.weight_version for out in outs} == {update + 1} and not any(
            out.num_cached_tokens for out in outs
        )
        arrays = jpaged.to_arrays(outs, **shapes)
        rewards = (
            (arrays["completion_ids"] * arrays["completion_mask"]).mean(axis=1).astype(np.float32)
        )
        jpaged.score(
            params,
            [out.prompt_token_ids + out.outputs[0].token_ids for out in outs],
            engine_config=settings,
        )
        params, state, loss = step(params, state, arrays, rewards - rewards.mean())
        assert np.isfinite(loss)
        return params, state

    params, state = iterate(params, state, 0)
    with compiles() as names:
        for update in range(1, 20):
            params, state = iterate(params, state, update)
    assert names == [] and step._cache_size() == 1
    one = jpaged.generate(
        params, make_prompts(5), SamplingParams(max_tokens=4), engine_config=settings
    )
    step(params, state, jpaged.to_arrays(one, **shapes), np.ones(1, np.float32))
    assert step._cache_size() == 2, "a batch of one is another shape, and a valid one"


@pytest.mark.train
def test_tempered_logprobs_are_the_trainers() -> None:
    """At temperature 0.7 under top_p 0.9: what is drawn is filtered, the logprobs are
    log_softmax(logits / 0.7).
    """
    params = make_params(0, MODEL)
    sampling = SamplingParams(
        n=4, temperature=0.7, top_p=0.9, max_tokens=12, logprobs_mode="tempered"
    )
    outs = jpaged.generate(params, make_prompts(5, 17, 9), sampling, engine_config=SMALL)
    arrays = jpaged.to_arrays(outs, max_prompt_len=20, max_completion_len=12)
    recomputed = np.asarray(logprobs_of(params, arrays, 0.7))
    mask = arrays["completion_mask"]
    np.testing.assert_allclose(recomputed[mask], arrays["logprobs"][mask], atol=1e-4)
    assert mask.sum() > 50
    raw = dataclasses.replace(sampling, logprobs_mode="raw", seed=1)
    processed = dataclasses.replace(raw, logprobs_mode="processed")
    lists = [
        jpaged.generate(params, make_prompts(9), p, engine_config=SMALL)[0]
        for p in (raw, processed)
    ]
    assert tokens_of(lists[:1]) == tokens_of(lists[1:])
    a, b = (out.outputs[0].token_logprobs for out in lists)
    assert (b > a).any() and (np.exp(b) <= 1 + 1e-6).all()


def test_warmup_checks_its_sizes() -> None:
    params = make_params(0, MODEL)
    good: dict[str, Any] = {"max_prompt_len": 4, "max_tokens": 4, "batch": 2}
    for name, bad in {"batch": 0, "max_tokens": True, "max_prompt_len": 2.0}.items():
        with pytest.raises(ConfigError, match=f"{name}={bad}: must be an integer of at least 1"):
            jpaged.warmup(params, **(good | {name: bad}), engine_config=SETTINGS)
    with pytest.raises(
        CapacityError, match="max_prompt_len \\+ max_tokens = 80 is beyond max_model_len=64"
    ):
        jpaged.warmup(params, 60, 20, 1, engine_config=SETTINGS)


def test_generate_and_score_share_an_engine_whatever_the_tokenizer(tmp_path: Any) -> None:
    folder = write_folder(tmp_path / "model", "model", MODEL)
    params, tokenizer = jpaged.load_params(folder), jpaged.LLM(folder, **vars(SMALL)).tokenizer
    options: dict[str, Any] = {"engine_config": SMALL}
    greedy = SamplingParams(temperature=0, max_tokens=4)
    outs = jpaged.generate(params, make_prompts(5), greedy, tokenizer=tokenizer, **options)
    jpaged.score(params, [outs[0].prompt_token_ids + outs[0].outputs[0].token_ids], **options)  # pyright: ignore
    assert len(kept_sessions()) == 1
    again = jpaged.generate(folder, make_prompts(5), greedy, tokenizer=tokenizer, **options)
    assert tokens_of(again) == tokens_of(outs), "a folder will do as well"


# Memory


def live_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_weights_bytes_come_back(dtype: str | None) -> None:
    """After `del params`; copies that were made for serving stay until release."""
    before = live_bytes()
    params = make_params(0, MODEL)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    settings = dataclasses.replace(SMALL, dtype=dtype)
    jpaged.generate(params, make_prompts(5), SamplingParams(max_tokens=2), engine_config=settings)
    with_engine = live_bytes()
    del params
    assert with_engine - live_bytes() == size
    jpaged.release()
    assert live_bytes() == before


@pytest.mark.own_steps
def test_sleep_and_wake() -> None:
    """Pool and copies are freed, new weights may come meanwhile, and nothing compiles again."""
    params, other = make_params(0, MODEL), make_params(1, MODEL)
    expected = [
        tokens_of(
            jpaged.generate(
                p, make_prompts(9, 4), SamplingParams(temperature=0), engine_config=SMALL
            )
        )
        for p in (params, other)
    ]
    jpaged.release(compiled=True)
    before = live_bytes()
    llm = LLM(params, **vars(dataclasses.replace(SMALL, num_blocks=64, dtype="bfloat16")))
    greedy = SamplingParams(temperature=0, max_tokens=8)
    first = llm.generate(make_prompts(9, 4), greedy, use_tqdm=False)
    awake = live_bytes()
    runner = llm.session.runner
    copies = sum(x.nbytes for x in jax.tree.leaves(params)) // 2
    assert awake - before >= runner.pool_bytes + copies > 0
    llm.sleep()
    assert live_bytes() == before and runner.pool_bytes == 0 and llm.stats()["weight_version"] == 1
    for use in (
        lambda: llm.generate([1, 2], use_tqdm=False),
        lambda: llm.add_request([1, 2]),
        lambda: llm.score([[1, 2]]),
        llm.warmup,
    ):
        with pytest.raises(ConfigError, match="sleeps: call wake"):
            use()
    llm.sleep()
    with compiles() as names:
        llm.wake()
        assert runner.pool_bytes and live_bytes() == awake
        again = llm.generate(make_prompts(9, 4), greedy, use_tqdm=False)
    assert (
        names == []
        and tokens_of(again) == tokens_of(first)
        and not any(o.num_cached_tokens for o in again)
    )
    assert again[0].weight_version == first[0].weight_version == 1, "the same weights"
    llm.sleep()
    llm.update_params(other)
    assert live_bytes() == before
    llm.wake()
    llm.wake()
    moved = llm.generate(make_prompts(9, 4), greedy, use_tqdm=False)
    assert moved[0].weight_version == llm.weight_version == 2
    assert tokens_of(moved) != tokens_of(again)
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.wake()
    assert expected[0] != expected[1]


def test_sleep_with_requests() -> None:
    llm = LLM(make_params(0, MODEL), **vars(dataclasses.replace(SMALL, num_blocks=64)))
    llm.add_request(make_prompts(9)[0], SamplingParams(max_tokens=8, ignore_eos=True))
    llm.step()
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        llm.sleep()
    with pytest.raises(RequestError, match="mode='now'"):
        llm.sleep(mode="now")  # pyright: ignore[reportArgumentType]
    llm.sleep(mode="abort")
    assert [out.outputs[0].finish_reason for out in llm.step()] == ["abort"]
    llm.wake()
    assert llm.generate(
        [1, 2, EOS - 1], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
    )[0].outputs


def test_a_wake_without_memory_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(make_params(0, MODEL), **vars(dataclasses.replace(SMALL, num_blocks=64)))
    llm.sleep()
    before = live_bytes()

    def refused(self: Any, *, full: bool = False) -> None:
        raise CapacityError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "allocate", refused)
        with pytest.raises(CapacityError, match="no memory"):
            llm.wake()
    assert live_bytes() == before
    with pytest.raises(ConfigError, match="sleeps"):
        llm.generate([1, 2], use_tqdm=False)
    llm.wake()
    assert llm.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[
        0
    ].outputs


def test_refused_params_change_nothing() -> None:
    """Not even with donate: the old ones are deleted only once the new ones are known to serve."""
    params = make_params(0, MODEL)
    llm = LLM(params, **vars(dataclasses.replace(SMALL, num_blocks=64)))
    greedy = SamplingParams(temperature=0, max_tokens=4)
    first = llm.generate(make_prompts(9), greedy, use_tqdm=False)
    with pytest.raises(ConfigError, match="built for float32"):
        llm.update_params(make_params(1, MODEL, dtype=jnp.bfloat16), donate=True)
    again = llm.generate(make_prompts(9), greedy, use_tqdm=False)
    assert tokens_of(again) == tokens_of(first) and again[0].num_cached_tokens > 0


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_donated_params_are_deleted(dtype: str | None) -> None:
    """All but the arrays that the new ones share, before the new copies are made."""
    params, other = make_params(0, MODEL), make_params(1, MODEL)
    llm = LLM(params, **vars(dataclasses.replace(SMALL, num_blocks=64, dtype=dtype)))
    llm.generate(make_prompts(9), SamplingParams(max_tokens=4), use_tqdm=False)
    shared = Params({**other, "embed": params["embed"]}, MODEL)
    llm.update_params(shared, donate=True)
    gone = [leaf.is_deleted() for leaf in jax.tree.leaves(params)]
    kept = [leaf is params["embed"]["weight"] for leaf in jax.tree.leaves(params)]
    assert sum(kept) == 1 and gone == [not k for k in kept]
    fresh = LLM(
        Params(dict(shared), MODEL),
        **vars(dataclasses.replace(SMALL, num_blocks=64, dtype=dtype)),
    )
    greedy = SamplingParams(temperature=0, max_tokens=6)
    found, expected = (
        tokens_of(x.generate(make_prompts(9), greedy, use_tqdm=False)) for x in (llm, fresh)
    )
    assert found == expected
