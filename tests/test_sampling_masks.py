"""Sampling masks: which tokens each draw was from, wherever a row has been; and the trainer's half,
which draws from these alone.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, RequestError, RequestOutput, SamplingParams
from jpaged.engine.shapes import shape_table
from jpaged.models.forward import bind
from jpaged.runtime import sampler_reference
from kernels_cpu.library import unavailable
from tests.openai.live import serving
from tests.test_trainer import IN_BF16
from tests.text_model import write_folder
from tests.tiny import CROWDED, ENGINE, config, dense_logprobs, make_params, make_prompts

PARAMS = make_params(1)
PROMPTS = make_prompts(5, 17, 4, 9)
ROOM = 12  # of a mask
SETTINGS = dataclasses.replace(ENGINE, max_sampling_mask=ROOM)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "top_p": 0.8, "top_k": 12},
    {"temperature": 1.3, "top_k": 5, "n": 2},
    {"temperature": 0.7, "min_p": 0.2, "top_k": 9},
    {"temperature": 1.0, "top_k": 1},
)


def masked(**changes: Any) -> SamplingParams:
    asked: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "seed": 3}
    asked |= {"sampling_mask": True, "logprobs_mode": "processed"}
    return SamplingParams(**(asked | changes))


ASKED = [masked(**way) for way in WAYS]


def run(llm: LLM, asked: Any = ASKED) -> list[RequestOutput]:
    return llm.generate(PROMPTS, asked, use_tqdm=False)


def facts(outs: list[RequestOutput]) -> list[Any]:
    """What a completion says of its draws."""
    return [
        (c.token_ids, c.sampling_mask.tolist(), c.kept_logprobs)
        for out in outs
        for c in out.outputs
        if c.sampling_mask is not None and c.kept_logprobs is not None
    ]


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted) > 0
    for (tokens, mask, mass), (tokens_2, mask_2, mass_2) in zip(found, wanted, strict=True):
        assert (tokens, mask) == (tokens_2, mask_2)
        np.testing.assert_allclose(mass, mass_2, atol=1e-5)


@functools.cache
def expected() -> list[Any]:
    llm = LLM(PARAMS, **vars(SETTINGS))
    found = facts(run(llm))
    llm.close()
    return found


def test_what_a_token_was_drawn_from() -> None:
    """The upper set of the model's own logits that the filters keep, and its share of them."""
    outs = run(LLM(PARAMS, **vars(SETTINGS)))
    for out, way in zip(outs, WAYS, strict=True):
        filters = {k: v for k, v in way.items() if k != "n"}
        for c in out.outputs:
            assert c.sampling_mask is not None and c.kept_logprobs is not None
            tokens = out.prompt_token_ids + c.token_ids
            logits = dense_logprobs(PARAMS, tokens)[len(out.prompt_token_ids) - 1 : -1]
            assert c.sampling_mask.shape == (10, way["top_k"]) and c.kept_logprobs.shape == (10,)
            for t, token in enumerate(c.token_ids):
                kept = sampler_reference.distribution(logits[t], **filters)
                ids = np.flatnonzero(kept.z_V > -np.inf)
                ids = ids[np.argsort(-logits[t][ids], kind="stable")].tolist()
                told = c.sampling_mask[t]
                assert told.tolist() == ids + [-1] * (way["top_k"] - len(ids)) and token in ids
                scaled = logits[t].astype(np.float64) / way["temperature"]
                share = np.logaddexp.reduce(scaled[ids]) - np.logaddexp.reduce(scaled)
                assert c.kept_logprobs[t] == pytest.approx(share, abs=2e-5)


VARIED: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "token_buckets": (7,)},
    "several steps": {"decode_steps": 4},
    "mixed": {"mixed": True},
    "guesses": {"speculative": {"method": "ngram", "num_tokens": 3}},
    "separate draw": {"separate_draw": True},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("changes", VARIED.values(), ids=VARIED)
def test_wherever_a_row_has_been(changes: dict[str, Any]) -> None:
    llm = LLM(PARAMS, **vars(dataclasses.replace(SETTINGS, **changes)))
    assert_alike(facts(run(llm)), expected())
    assert_alike(facts(run(llm)), expected())  # from the prefix cache
    llm.close()


@pytest.mark.parametrize("swap", [0.0, 0.01])
def test_preempted(swap: float) -> None:
    settings = dataclasses.replace(CROWDED, max_sampling_mask=ROOM, swap_space_gib=swap)
    llm = LLM(PARAMS, **vars(settings))
    asked = [dataclasses.replace(one, n=3, max_tokens=20) for one in ASKED]
    found = facts(run(llm, asked))
    assert llm.stats()["preemptions"] > 0
    roomy = LLM(PARAMS, **vars(dataclasses.replace(settings, num_blocks=200)))
    assert_alike(found, facts(run(roomy, asked)))


def test_snapshots_and_outputs_that_go_on() -> None:
    llm = LLM(PARAMS, **vars(SETTINGS))
    ids = [llm.add_request(prompt, one) for prompt, one in zip(PROMPTS, ASKED, strict=True)]
    for _ in range(5):
        llm.step()
    snapshot = llm.snapshot()
    for _ in range(2):
        done: dict[str, RequestOutput] = {}
        while llm.has_unfinished():
            done |= {out.request_id: out for out in llm.step()}
        assert_alike(facts([done[i] for i in ids]), expected())
        llm.restore(snapshot)
    cut: list[Any] = [llm.abort(i) for i in ids]
    assert all(0 < len(out.outputs[0].token_ids) < 10 for out in cut)
    assert_alike(facts(llm.generate(cut, ASKED, use_tqdm=False)), expected())
    for changes in ({"top_k": 3}, {"sampling_mask": False}):
        other = dataclasses.replace(ASKED[0], **changes)
        (out,) = llm.generate(cut[:1], other, use_tqdm=False, on_error="return")
        assert isinstance(out.error, RequestError)
        assert "the output that goes on has one of top_k=12" in str(out.error)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2,), ("tp",)), pytest.param((2, 2), ("data", "tp"), marks=pytest.mark.middle)],
)
def test_on_meshes(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes)
    llm = LLM(PARAMS, mesh=mesh, **vars(SETTINGS))
    assert_alike(facts(run(llm)), expected())
    llm.close()


def test_among_others_and_other_controls() -> None:
    """A row without a mask has the tokens that it has in an engine without masks; biases, bans and
    penalties come before the mask.
    """
    plain = dataclasses.replace(ASKED[0], sampling_mask=False)
    controls = masked(
        temperature=1.0,
        top_k=6,
        top_p=0.9,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={7: 3.0, 9: -50.0},
        min_tokens=4,
        logprobs=2,
    )
    asked = [plain, controls, ASKED[2], dataclasses.replace(plain, temperature=0.0)]
    outs = run(LLM(PARAMS, **vars(SETTINGS)), asked)
    unmasked = [dataclasses.replace(one, sampling_mask=False) for one in asked]
    alone = run(LLM(PARAMS, **vars(ENGINE)), unmasked)
    for a, b in zip(outs, alone, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        np.testing.assert_allclose(a.outputs[0].token_logprobs, b.outputs[0].token_logprobs)
    told = outs[1].outputs[0]
    assert outs[0].outputs[0].sampling_mask is None and told.sampling_mask is not None
    for token, ids in zip(told.token_ids, told.sampling_mask, strict=True):
        assert token in ids and 9 not in ids


def rollout(params: jpaged.Params, **asked: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    settings = dataclasses.replace(SETTINGS, deterministic=None)
    sampling = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, n=8, **asked)
    outs = jpaged.generate(params, PROMPTS, sampling, engine_config=settings, seed=1)
    return outs, jpaged.to_arrays(outs)


FILTERED: dict[str, Any] = {"top_p": 0.8, "top_k": 12, "logprobs_mode": "processed"}


def test_ratios_of_a_trainer_that_draws_from_the_mask() -> None:
    """1 with the mask; far below without, since what was not kept has a share as well."""
    outs, arrays = rollout(PARAMS, **FILTERED, sampling_mask=True)
    drawn = arrays["completion_mask"]
    new = functools.partial(jpaged.logprobs, PARAMS, arrays, temperature=0.9)
    ratios = {
        masked: np.exp(np.asarray(new(sampling_mask=masked)) - arrays["logprobs"])[drawn]
        for masked in (True, False)
    }
    assert ratios[True].mean() == pytest.approx(1.0, abs=1e-5)
    assert np.abs(ratios[True] - 1).max() < 1e-4
    assert ratios[False].mean() < 0.9
    # Of the trainer's own distribution it is what the kept tokens have of all.
    apart = np.log(ratios[False]) - arrays["kept_logprobs"][drawn]
    assert np.abs(apart).max() < 1e-4
    longer = jpaged.to_arrays(outs, max_completion_len=30)
    padded = jpaged.logprobs(PARAMS, longer, temperature=0.9, sampling_mask=True)
    np.testing.assert_array_equal(padded[:, 24:], 0)
    np.testing.assert_allclose(padded[:, :24], new(sampling_mask=True), atol=1e-6)


def test_the_trainers_half_by_hand() -> None:
    """masked_logprobs, logprobs and their gradients are a log_softmax over -inf for the rest."""
    _, arrays = rollout(PARAMS, **FILTERED, sampling_mask=True)
    lens, width = arrays["prompt_lens"], arrays["completion_ids"].shape[1]
    ids = arrays["completion_ids"]
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(*ids.shape, 97)).astype(np.float32) * 3)
    mask = arrays["sampling_mask"]
    weigh = jnp.asarray(rng.normal(size=ids.shape).astype(np.float32))

    def by_hand(logits: jax.Array) -> jax.Array:
        rows = (mask[..., None] == np.arange(97)).any(axis=2)
        z = jnp.where(rows, logits / 0.7, -jnp.inf)
        return jnp.take_along_axis(jax.nn.log_softmax(z), ids[:, :, None], axis=2)[:, :, 0]

    def ours(logits: jax.Array) -> jax.Array:
        return jpaged.masked_logprobs(logits, jnp.asarray(ids), mask, temperature=0.7)

    assert (mask[:, :, 0] >= 0).all() and width == 24 and lens.shape == (32,)
    np.testing.assert_allclose(ours(logits), by_hand(logits), atol=1e-5)
    grads = [jax.grad(lambda z, f=f: jnp.sum(f(z) * weigh))(logits) for f in (ours, by_hand)]
    np.testing.assert_allclose(*grads, atol=1e-5)
    at_one = jpaged.masked_logprobs(logits, jnp.asarray(ids), mask)
    none = jpaged.masked_logprobs(logits, jnp.asarray(ids), jnp.full_like(mask, -1))
    assert np.abs(at_one - ours(logits)).max() > 0.1 and np.abs(none).max() == 0
    with pytest.raises(RequestError, match=r"tokens \[32, 24\] and sampling_mask \[32, 23, 12\]"):
        jpaged.masked_logprobs(logits, jnp.asarray(ids), mask[:, 1:])

    def loss(params: jpaged.Params) -> jax.Array:
        new, entropy = jpaged.logprobs(params, arrays, sampling_mask=True, entropy=True, chunk=40)
        return jnp.sum(new * weigh) + jnp.sum(entropy)

    def plainly(params: jpaged.Params) -> jax.Array:
        tokens = np.concatenate([arrays["prompt_ids"], ids], axis=1)
        tokens = np.stack([np.roll(row, n - 17) for row, n in zip(tokens, lens, strict=True)])
        model = bind(params.config, dict(params))
        hidden = model(jnp.asarray(tokens))[0]
        at = lens[:, None] - 1 + np.arange(width)
        logits = model.unembedding(jnp.take_along_axis(hidden, at[:, :, None], axis=1))
        z = jnp.take_along_axis(logits, np.maximum(mask, 0), axis=2)
        logp = jax.nn.log_softmax(jnp.where(mask >= 0, z, -1e30))
        new = jpaged.masked_logprobs(logits, jnp.asarray(ids), mask)
        return jnp.sum(new * weigh) - jnp.sum(jnp.exp(logp) * logp)

    assert loss(PARAMS) == pytest.approx(float(plainly(PARAMS)), rel=1e-4)
    for a, b in zip(
        jax.tree.leaves(jax.grad(loss)(PARAMS)),
        jax.tree.leaves(jax.grad(plainly)(PARAMS)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-3, rtol=1e-3)


@pytest.mark.skipif(unavailable() is not None, reason="the C++ kernels cannot be built")
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_exact_to_the_bit(model: str) -> None:
    params = make_params(0, IN_BF16[model], jnp.bfloat16)
    settings = dataclasses.replace(SETTINGS, deterministic=True)
    sampling = SamplingParams(
        temperature=0.7, max_tokens=8, ignore_eos=True, n=3, sampling_mask=True, **FILTERED
    )
    outs = jpaged.generate(params, make_prompts(5, 11, 3), sampling, engine_config=settings, seed=3)
    arrays = jpaged.to_arrays(outs)
    new = functools.partial(jpaged.logprobs, temperature=0.7, sampling_mask=True)
    exactly = jax.jit(functools.partial(new, exact=True, chunk=30))(params, arrays)
    np.testing.assert_array_equal(exactly, arrays["logprobs"])
    assert np.abs(np.asarray(jax.jit(new)(params, arrays)) - arrays["logprobs"]).max() > 1e-4


def test_ties_at_the_end_of_top_k() -> None:
    """Half of the head's rows are the other half's: every logit is there twice, and top_k=5 ends
    between two equal ones. Of these the lower id stays, and is what comes.
    """
    params = make_params(2, config(tie_word_embeddings=False))
    head = np.array(params["lm_head"]["weight"])
    head[49:] = head[1:49]
    params = jpaged.Params({**params, "lm_head": {"weight": jnp.asarray(head)}}, params.config)
    sampling = masked(temperature=2.0, top_k=5, n=8, max_tokens=12)
    (out,) = jpaged.generate(params, PROMPTS[:1], sampling, engine_config=SETTINGS)
    beyond = 0
    for c in out.outputs:
        assert c.sampling_mask is not None
        for token, ids in zip(c.token_ids, c.sampling_mask.tolist(), strict=True):
            assert -1 not in ids and token in ids
            twins = [i for i in ids if (i + 48 if i < 49 else i - 48) not in ids]
            beyond += len([i for i in twins if 0 < i < 49])
            assert all(i < 49 for i in twins), "of a pair that is cut the lower id stays"
    assert beyond > 50
    arrays = jpaged.to_arrays([out])
    new = jpaged.logprobs(params, arrays, temperature=2.0, sampling_mask=True)
    np.testing.assert_allclose(new, arrays["logprobs"], atol=1e-5)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"temperature": 0.0}, ROOM, "sampling_mask=True with temperature=0: a greedy token"),
    ({"top_k": 0}, ROOM, "sampling_mask=True with top_k=0: top_k bounds the mask, from 1 to"),
    ({"top_k": 13}, ROOM, "with top_k=13: above max_sampling_mask=12 of EngineConfig"),
    ({"top_k": 1}, 0, "with top_k=1: above max_sampling_mask=0 of EngineConfig"),
    ({"sampling_mask": 1}, ROOM, "sampling_mask=1: must be True or False"),
]


@pytest.mark.parametrize(("changes", "room", "error"), REFUSED)
def test_what_is_refused(changes: dict[str, Any], room: int, error: str) -> None:
    """That request alone."""
    llm = LLM(PARAMS, **vars(dataclasses.replace(SETTINGS, max_sampling_mask=room)))
    asked = [masked(**({"top_k": 5} | changes)), SamplingParams(temperature=0, max_tokens=3)]
    bad, good = llm.generate(PROMPTS[:2], asked, use_tqdm=False, on_error="return")
    assert isinstance(bad.error, RequestError) and error in str(bad.error)
    assert good.error is None and len(good.outputs[0].token_ids) == 3


def test_arrays_are_all_or_nothing() -> None:
    llm = LLM(PARAMS, **vars(SETTINGS))
    outs = run(llm, [*ASKED[:3], dataclasses.replace(ASKED[3], sampling_mask=False)])
    with pytest.raises(RequestError, match="some completions have a sampling_mask"):
        jpaged.to_arrays(outs)
    arrays = jpaged.to_arrays(outs[:3])
    assert arrays["sampling_mask"].shape == (4, 10, 12)
    assert (arrays["sampling_mask"][1:3, :, 5:] == -1).all()
    without = jpaged.to_arrays(outs[3:])
    assert "sampling_mask" not in without and "kept_logprobs" not in without
    with pytest.raises(RequestError, match="arrays lack 'sampling_mask'"):
        jpaged.logprobs(PARAMS, without, sampling_mask=True)


def test_nothing_is_made_where_nobody_may_ask() -> None:
    """The steps of an engine without room for masks are those of one with it, but for the full
    draw; and that has a mask only where there is room.
    """
    texts = {}
    for room in (0, ROOM):
        llm = LLM(PARAMS, **vars(dataclasses.replace(SETTINGS, max_sampling_mask=room)))
        steps = llm.session.runner.compiled
        texts[room] = {
            (shape.phase, shape.sampler): steps.lower(shape).as_text()
            for shape in shape_table(llm.session.runner.config)
        }
        llm.close()
    kinds = texts[0].keys()
    assert {sampler for _, sampler in kinds} >= {"plain", "filtered", "full"}
    for kind in kinds:
        assert (texts[0][kind] == texts[ROOM][kind]) == (kind[1] != "full"), kind


def test_streams_have_masks_too() -> None:
    llm = LLM(PARAMS, **vars(SETTINGS))
    found: list[list[int]] = []
    shares: list[float] = []
    for chunk in llm.stream(PROMPTS[0], ASKED[0]):
        assert chunk.sampling_mask_delta is not None and chunk.kept_logprobs_delta is not None
        assert len(chunk.sampling_mask_delta) == len(chunk.token_ids_delta)
        found += chunk.sampling_mask_delta.tolist()
        shares += chunk.kept_logprobs_delta.tolist()
    _, mask, mass = expected()[0]
    assert found == mask
    np.testing.assert_allclose(shares, mass, atol=1e-6)


def test_a_server_sends_them(tmp_path: Path) -> None:
    """Whole and in a stream, the ids that were kept alone; and says what it has no room for."""
    body = {"prompt": "abcd", "max_tokens": 5, "seed": 2, "top_k": 4, "top_p": 0.9}
    body |= {"sampling_mask": True, "return_token_ids": True, "ignore_eos": True}
    folder = write_folder(tmp_path / "tiny")
    with serving(LLM(folder, **vars(dataclasses.replace(SETTINGS, max_model_len=32)))) as live:
        (choice,) = live.post("/v1/completions", body)["choices"]
        assert len(choice["sampling_mask"]) == len(choice["kept_logprobs"]) == 5
        for token, ids in zip(choice["token_ids"], choice["sampling_mask"], strict=True):
            assert token in ids and 1 <= len(ids) <= 4 and min(ids) >= 0
        pieces = [e["choices"][0] for e in live.events("/v1/completions", body) if e["choices"]]
        for name in ("sampling_mask", "kept_logprobs"):
            assert [x for piece in pieces for x in piece.get(name, [])] == choice[name]
        without = live.post("/v1/completions", body | {"sampling_mask": False})["choices"][0]
        assert without["token_ids"] == choice["token_ids"] and "sampling_mask" not in without
        status, answer, _ = live.request("/v1/completions", body | {"top_k": 40})
        assert status == 400 and "max_sampling_mask=12" in answer["error"]["message"]
