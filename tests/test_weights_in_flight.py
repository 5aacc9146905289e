"""New weights under running requests: what draws the next token, what computes the keys and values
that it reads, and what each completion knows of it. tests/engine/test_machine.py has them at any
step, over a device on which a wrong one shows.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, Params, RequestError, RequestOutput, SamplingParams, WeightSpan
from tests.heads import counting, counting_head, counting_mtp
from tests.recurrent import HYBRID
from tests.test_guessing_states import PARAMS as WITH_STATES
from tests.test_lora import make_lora
from tests.tiny import ENGINE, assert_idle, config, make_params, make_prompts

ONE_LAYER = config(num_layers=1)
SETTINGS: dict[str, Any] = {**vars(ENGINE)}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = make_prompts(5, 9, 17)
SECONDS = 300.0


def other_head(params: Params) -> Params:
    """The same model but for its head: it has the same keys and values."""
    others = dict(params)
    others["lm_head"] = jax.tree.map(lambda x: x[..., ::-1] * 1.5, params["lm_head"])
    return Params(others, params.config)


@pytest.fixture(scope="module")
def weights() -> list[Params]:
    first = make_params(0, ONE_LAYER)
    return [first, make_params(1, ONE_LAYER), other_head(first)]


@pytest.fixture(scope="module")
def llm(weights: list[Params]) -> Iterator[LLM]:
    llm = LLM(weights[0], **SETTINGS)
    yield llm
    llm.close()


def swapped(
    llm: LLM, old: Params, new: Any, mode: Any, steps: int, asked: SamplingParams = GREEDY
) -> list[RequestOutput]:
    """The outputs of requests that begin under the old weights and end under the new ones."""
    llm.update_params(old)
    names = [llm.add_request(prompt, asked) for prompt in PROMPTS]
    outputs = {out.request_id: out for _ in range(steps) for out in llm.step()}
    llm.update_params(new, mode=mode)
    while llm.has_unfinished():
        outputs |= {out.request_id: out for out in llm.step()}
    assert_idle(llm)
    return [outputs[name] for name in names]


def scored_by(params: Params, out: RequestOutput, index: int = 0) -> np.ndarray:
    """The logprobs that weights give to a completion's tokens."""
    tokens = out.outputs[index].token_ids
    logprobs = jpaged.score(params, [[*out.prompt_token_ids, *tokens]], engine_config=ENGINE)[0]
    assert isinstance(logprobs, np.ndarray)
    return logprobs[len(out.prompt_token_ids) - 1 :]


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_the_next_token_is_the_new_weights(llm: LLM, weights: list[Params], mode: str) -> None:
    """By a model that differs in its head alone, whose logprobs are those of `score` in either
    mode; so the spans say to the token where it came.
    """
    for out in swapped(llm, weights[0], weights[2], mode, steps=6):
        (completion,) = out.outputs
        old, new = completion.weight_versions
        assert 0 == old.start < old.end == new.start < new.end == 24
        assert (old.version, new.version) == (llm.weight_version - 1, llm.weight_version)
        assert out.weight_version == old.version
        for span, params in ((old, weights[0]), (new, weights[2])):
            part = slice(span.start, span.end)
            want = scored_by(params, out)[part]
            np.testing.assert_allclose(completion.token_logprobs[part], want, atol=1e-4)


def test_recompute_is_score_from_there_on_and_keep_is_not(llm: LLM, weights: list[Params]) -> None:
    far = {}
    for mode in ("recompute", "keep"):
        worst = 0.0
        for out in swapped(llm, weights[0], weights[1], mode, steps=8):
            _, new = out.outputs[0].weight_versions
            want = scored_by(weights[1], out)[new.start :]
            worst = max(worst, np.abs(out.outputs[0].token_logprobs[new.start :] - want).max())
        far[mode] = worst
    assert far["recompute"] < 1e-4 < 0.01 < far["keep"]


def test_the_same_numbers_in_other_arrays_change_nothing(llm: LLM, weights: list[Params]) -> None:
    """Several samples, with penalties and scored prompts, swapped at each of the first steps."""
    asked = SamplingParams(
        n=2, seed=5, max_tokens=8, ignore_eos=True, repetition_penalty=1.1, prompt_logprobs=1
    )
    copies = Params(jax.tree.map(lambda x: x + 0, dict(weights[0])), weights[0].config)
    alone = swapped(llm, weights[0], copies, "wait", 0, asked)
    for mode in ("keep", "recompute"):
        for steps in (1, 2, 3, 6):
            for out, want in zip(
                swapped(llm, weights[0], copies, mode, steps, asked), alone, strict=True
            ):
                for one, other in zip(out.outputs, want.outputs, strict=True):
                    assert one.token_ids == other.token_ids
                    np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-4)
                assert out.prompt_logprobs is not None and want.prompt_logprobs is not None
                assert len(out.prompt_logprobs) == len(want.prompt_logprobs)


def test_a_prompt_is_scored_by_one_version(llm: LLM, weights: list[Params]) -> None:
    """One that is in the midst of its chunks begins anew, also where the KV is kept."""
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (prompt,) = make_prompts(40)
    for mode in ("keep", "recompute"):
        llm.update_params(weights[0])
        llm.add_request(prompt, asked)
        for _ in range(2):  # of three chunks
            llm.step()
        llm.update_params(weights[1], mode=mode)
        outputs: list[RequestOutput] = []
        while llm.has_unfinished():
            outputs += llm.step()
        want = jpaged.score(weights[1], [prompt], engine_config=ENGINE)[0]
        scores = outputs[0].prompt_logprobs
        assert scores is not None and outputs[0].weight_version == llm.weight_version
        found = [row[token].logprob for row, token in zip(scores[1:], prompt[1:], strict=True)]  # pyright: ignore
        np.testing.assert_allclose(found, want, atol=1e-4)


def test_old_kv_is_never_found(llm: LLM, weights: list[Params]) -> None:
    """A request of the same prompt as one that goes on over kept KV computes all of its own."""
    llm.update_params(weights[0])
    (prompt,) = make_prompts(30)
    llm.add_request(prompt, GREEDY)
    for _ in range(6):
        llm.step()
    llm.update_params(weights[1], mode="keep")
    out = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert out.num_cached_tokens == 0 and out.weight_version == llm.weight_version
    np.testing.assert_allclose(out.outputs[0].token_logprobs, scored_by(weights[1], out), atol=1e-4)
    while llm.has_unfinished():
        llm.step()


@pytest.mark.middle
@pytest.mark.parametrize(
    "how",
    [
        {"swap_space_gib": 0.01, "num_blocks": 24, "swap_min_tokens": 0},
        {"quantization": "int8"},
        {"speculative": {"method": "ngram", "num_tokens": 3, "adaptive": False}},
        {"decode_steps": 3},
        {"deterministic": True},
    ],
    ids=lambda how: next(iter(how)),
)
def test_recompute_with(weights: list[Params], how: dict[str, Any]) -> None:
    """What the device keeps beside the pool, or makes of the weights, is the new ones' too."""
    settings = SETTINGS | how
    if "deterministic" in how:
        settings |= {"token_buckets": None, "seq_buckets": None}
    llm = LLM(weights[0], **settings)
    outs = swapped(llm, weights[0], weights[1], "recompute", steps=8)
    for out in outs:
        (completion,) = out.outputs
        new = completion.weight_versions[-1]
        assert new.version == llm.weight_version and new.start > 0
        want = llm.score([[*out.prompt_token_ids, *completion.token_ids]])[0]
        want = want[len(out.prompt_token_ids) - 1 :][new.start :]
        np.testing.assert_allclose(completion.token_logprobs[new.start :], want, atol=2e-3)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_head_guesses_under_new_weights(method: str) -> None:
    """A head that is right mostly, then less: what is drawn is the new weights' in either case, and
    the head reads states of theirs.
    """
    params, head = (counting(ONE_LAYER), None) if method == "eagle" else counting_mtp(WITH_STATES)
    head = counting_head(params, exact=True) if head is None else head
    old, guesser = (Params(jax.tree.map(as_f32, dict(p)), p.config) for p in (params, head))
    new = make_params(1, old.config)
    asked = {"method": method, "model": guesser, "num_tokens": 3, "adaptive": False}
    settings: dict[str, Any] = SETTINGS | {"speculative": asked}
    llm = LLM(old, **settings)
    far = {}
    for mode in ("recompute", "keep"):
        worst, before = 0.0, llm.stats()["accepted_tokens"]
        for out in swapped(llm, old, new, mode, steps=4):
            (completion,) = out.outputs
            span = completion.weight_versions[-1]
            assert span.version == llm.weight_version and 0 < span.start < span.end == 24
            want = llm.score([[*out.prompt_token_ids, *completion.token_ids]])[0]
            want = want[len(out.prompt_token_ids) - 1 :][span.start :]
            worst = max(worst, float(np.abs(completion.token_logprobs[span.start :] - want).max()))
        far[mode] = worst
        assert llm.stats()["accepted_tokens"] > before
    assert far["recompute"] < 1e-3 < 0.01 < far["keep"]
    llm.close()


def as_f32(x: jax.Array) -> jax.Array:
    return x.astype(np.float32)


def test_a_folder_of_weights(llm: LLM, weights: list[Params], tmp_path: Path) -> None:
    """Is read and served, under what runs, as the arrays that it was written of."""
    jpaged.save_params(weights[2], tmp_path)
    outs = swapped(llm, weights[0], str(tmp_path), "keep", steps=6)
    for out, want in zip(outs, swapped(llm, weights[0], weights[2], "keep", steps=6), strict=True):
        assert out.outputs[0].token_ids == want.outputs[0].token_ids
        assert [s[1:] for s in out.outputs[0].weight_versions] == [
            s[1:] for s in want.outputs[0].weight_versions
        ]
    with pytest.raises(jpaged.CheckpointError):
        llm.update_params(tmp_path / "missing")


@pytest.mark.middle
@pytest.mark.parametrize(
    ("axis", "settings"),
    [("tp", {}), ("dp", {"data_parallel_size": 2})],
)
def test_states_on_two_devices(axis: str, settings: dict[str, Any]) -> None:
    """Of a model with states, heads over two devices or sequences in two replicas: the states, too,
    are the new weights' after `recompute`, and the old ones' after `keep`.
    """
    old, new = (make_params(seed, HYBRID) for seed in (0, 1))
    mesh = Mesh(np.array(jax.devices()[:2]), (axis,))
    llm = LLM(old, mesh=mesh, **SETTINGS | settings)
    far = {}
    for mode in ("recompute", "keep"):
        worst = 0.0
        for out in swapped(llm, old, new, mode, steps=8):
            (completion,) = out.outputs
            span = completion.weight_versions[-1]
            assert span.version == llm.weight_version and span.start > 0
            found = completion.token_logprobs[span.start :]
            want = llm.score([[*out.prompt_token_ids, *completion.token_ids]])[0]
            want = want[len(out.prompt_token_ids) - 1 :][span.start :]
            worst = max(worst, float(np.abs(found - want).max()))
        far[mode] = worst
    assert far["recompute"] < 1e-3 < 0.01 < far["keep"]
    llm.close()


def test_adapters_go_on_over_new_weights(weights: list[Params]) -> None:
    settings: dict[str, Any] = SETTINGS | {"max_loras": 2, "max_lora_rank": 8}
    llm = LLM(weights[0], **settings)
    llm.add_adapter("a", make_lora(0, model=ONE_LAYER))
    name = llm.add_request({"prompt_token_ids": PROMPTS[1], "adapter": "a"}, GREEDY)
    for _ in range(6):
        llm.step()
    llm.update_params(weights[1], mode="recompute")
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished():
        outputs |= {out.request_id: out for out in llm.step()}
    out = outputs[name]
    _, new = out.outputs[0].weight_versions
    tokens = [*out.prompt_token_ids, *out.outputs[0].token_ids]
    want = llm.score([{"prompt_token_ids": tokens, "adapter": "a"}])[0]
    found = out.outputs[0].token_logprobs[new.start :]
    np.testing.assert_allclose(found, want[len(PROMPTS[1]) - 1 :][new.start :], atol=1e-4)
    llm.close()


def test_to_arrays_has_the_versions(llm: LLM, weights: list[Params]) -> None:
    outs = swapped(llm, weights[0], weights[1], "keep", steps=6)
    arrays = jpaged.to_arrays(outs, max_completion_len=30)
    versions = arrays["weight_versions"]
    assert versions.shape == (3, 30) and versions.dtype == np.int32
    for row, out in zip(versions, outs, strict=True):
        old, new = out.outputs[0].weight_versions
        want = [old.version] * old.end + [new.version] * (24 - old.end) + [0] * 6
        assert row.tolist() == want
    cut = jpaged.to_arrays(outs, max_completion_len=2, overflow="truncate")
    assert cut["weight_versions"].tolist() == versions[:, :2].tolist()
    first = outs[0].outputs[0].weight_versions[0]
    assert first == WeightSpan(first.version, 0, first.end)


def test_wait_and_abort(llm: LLM, weights: list[Params]) -> None:
    waited = swapped(llm, weights[0], weights[1], "wait", steps=6)
    assert all(len(out.outputs[0].weight_versions) == 1 for out in waited)
    assert {out.weight_version for out in waited} == {llm.weight_version - 1}
    aborted = swapped(llm, weights[0], weights[1], "abort", steps=6)
    assert {out.outputs[0].finish_reason for out in aborted} == {"abort"}
    llm.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        llm.update_params(weights[0])
    with pytest.raises(RequestError, match="mode='kept': must be"):
        llm.update_params(weights[0], mode="kept")  # pyright: ignore[reportArgumentType]
    while llm.has_unfinished():
        llm.step()


def test_nobody_steps_in_a_pause(llm: LLM, weights: list[Params]) -> None:
    """Threads wait; this one, which paused, is told; weights are updated under what runs."""
    llm.update_params(weights[0])
    steps = [0]
    step = llm.session.engine.step

    def counted() -> Any:
        steps[0] += 1
        return step()

    llm.session.engine.step = counted  # pyright: ignore[reportAttributeAccessIssue]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with ThreadPoolExecutor(4) as pool:
        try:
            calls = [pool.submit(llm.generate, p, long, use_tqdm=False) for p in PROMPTS]
            while steps[0] < 6:
                threading.Event().wait(0.001)
            with llm.paused():
                before = steps[0]
                for refused in (
                    lambda: llm.generate(PROMPTS[0], GREEDY, use_tqdm=False),
                    lambda: list(llm.stream(PROMPTS[0], GREEDY)),
                    lambda: llm.step(),
                    lambda: llm.update_params(weights[2], mode="wait"),
                ):
                    with pytest.raises(RequestError, match="paused"):
                        refused()
                llm.update_params(weights[2], mode="keep")
                with pytest.raises(RequestError, match="unfinished"):
                    llm.update_params(weights[0])
                threading.Event().wait(0.2)
                assert steps[0] == before
            outs = [call.result(SECONDS)[0] for call in calls]
        finally:
            llm.resume()
            del llm.session.engine.step
    assert any(len(out.outputs[0].weight_versions) == 2 for out in outs)
    for out in outs:
        last = out.outputs[0].weight_versions[-1]
        want = scored_by(weights[2] if last.version == llm.weight_version else weights[0], out)
        part = slice(last.start, last.end)
        np.testing.assert_allclose(out.outputs[0].token_logprobs[part], want[part], atol=1e-4)
    assert_idle(llm)
