"""Samples of a prompt, equal prompts and salts, which share KV blocks; and preemption by swapping:
through the API.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, CompletionOutput, Params, RequestError, RequestOutput, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.kept import sessions as kept_sessions
from jpaged.request.outputs import collect
from jpaged.runtime.transfers import Transfers
from tests.text_model import make_tokenizer
from tests.tiny import (
    CROWDED,
    ROOMY,
    assert_idle,
    assert_same,
    assert_same_completion,
    compile_cache,
    compiles,
    config,
    dense_greedy,
    engine_of,
    make_params,
    make_prompts,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0, max_tokens=10)
SAMPLED = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)
PROMPTS = make_prompts(1, 4, 17, 40, 16)
SWAP = dataclasses.replace(CROWDED, swap_space_gib=0.01)
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module", autouse=True)
def _only_our_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of the same shapes load the same compiled steps."""
    jpaged.release(compiled=True)
    with compile_cache(tmp_path_factory.getbasetemp() / "compiled"):
        yield
    jpaged.release(compiled=True)


@pytest.fixture(scope="module")
def one_llm(params: Params) -> Iterator[LLM]:
    llm = LLM(params, tokenizer=TOKENIZER, **vars(ROOMY))
    yield llm
    llm.close()


@pytest.fixture
def llm(one_llm: LLM) -> Iterator[LLM]:
    """With nothing cached; a test must leave it idle."""
    one_llm.reset_prefix_cache()
    yield one_llm
    assert_idle(one_llm)


def generate(
    params: Any, prompts: Any, sampling: Any = GREEDY, **options: Any
) -> list[RequestOutput]:
    """jpaged.generate, with nothing cached."""
    options = {"engine_config": ROOMY, "tokenizer": TOKENIZER} | options
    for session in kept_sessions():
        if session.pool.has_engine:
            session.engine.reset_prefix_cache()
    return jpaged.generate(params, prompts, sampling, **options)


def kept() -> Engine:
    """The engine that the last call used; it must have nothing left."""
    engine = engine_of(kept_sessions()[-1])
    assert not engine.requests and engine.replicas[0].blocks.num_used == 0
    engine.replicas[0].check_integrity()
    return engine


def run(llm: LLM, prompts: Any, sampling: Any = GREEDY, **how: Any) -> list[RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False, **how)


def grown(llm: LLM, before: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value - before[key] for key, value in llm.stats().items() if isinstance(value, int)
    }


def streams(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def vary(sampling: SamplingParams, **changes: Any) -> SamplingParams:
    return dataclasses.replace(sampling, **changes)


# Samples of one prompt


def test_greedy_samples_are_all_the_greedy_one(params: Params) -> None:
    alone = generate(params, PROMPTS)
    assert tokens_of(alone) == [dense_greedy(params, prompt, 10) for prompt in PROMPTS]
    for out, one in zip(generate(params, PROMPTS, vary(GREEDY, n=4)), alone, strict=True):
        assert [c.index for c in out.outputs] == [0, 1, 2, 3]
        for completion in out.outputs:
            assert_same_completion(completion, one.outputs[0])
    assert kept().stats.copied_blocks > 0


def test_samples_differ_and_repeat(params: Params) -> None:
    """Sample i is drawn by its index: how many others there are changes nothing."""
    by_n = {n: generate(params, PROMPTS[2:3], vary(SAMPLED, n=n), seed=7)[0] for n in (1, 4, 8)}
    assert [c.index for c in by_n[8].outputs] == list(range(8))
    assert len({tuple(tokens) for tokens in streams(by_n[8])}) == 8
    for n in (1, 4):
        for a, b in zip(by_n[n].outputs, by_n[8].outputs[:n], strict=True):
            assert_same_completion(a, b)
    assert_same(generate(params, PROMPTS[2:3], vary(SAMPLED, n=4), seed=7), [by_n[4]])
    other = streams(generate(params, PROMPTS[2:3], vary(SAMPLED, n=4), seed=8)[0])
    assert not {tuple(t) for t in other} & {tuple(t) for t in streams(by_n[8])}
    more_than_rows = generate(params, PROMPTS[2:3], vary(SAMPLED, n=15), seed=7)[0]
    assert streams(more_than_rows)[:8] == streams(by_n[8])
    assert len({tuple(tokens) for tokens in streams(more_than_rows)}) == 15


def test_samples_depend_on_nothing_but_their_request(params: Params) -> None:
    """Neighbours, chunks, caching and preemptions while blocks are shared (scenario 20) change no
    sample.
    """
    sampling, prompts = vary(SAMPLED, n=3), [PROMPTS[2], PROMPTS[4], PROMPTS[1], PROMPTS[0]]
    expected = generate(params, prompts, sampling, seed=3)
    for i in range(len(prompts)):
        assert_same(generate(params, prompts[: i + 1], sampling, seed=3)[i:], expected[i : i + 1])
    chunks = dataclasses.replace(ROOMY, max_num_batched_tokens=7)
    assert_same(generate(params, prompts, sampling, seed=3, engine_config=chunks), expected)
    uncached = dataclasses.replace(ROOMY, enable_prefix_caching=False)
    assert_same(generate(params, prompts, sampling, seed=3, engine_config=uncached), expected)
    for settings in (CROWDED, SWAP):
        assert_same(generate(params, prompts, sampling, seed=3, engine_config=settings), expected)
        assert kept().report()["preemptions"] > 0


def test_a_seed_is_the_requests_own(params: Params) -> None:
    sampling, prompt = vary(SAMPLED, n=3, seed=5), PROMPTS[1]
    first = generate(params, [prompt, prompt], sampling, seed=1)
    assert_same(first[1:], first[:1])
    assert_same(generate(params, prompt, sampling, seed=2), first[:1])
    assert len({tuple(tokens) for tokens in streams(first[0])}) == 3
    assert streams(generate(params, prompt, vary(sampling, seed=6))[0]) != streams(first[0])


STOPS = [chr(32 + i) for i in range(0, 94, 9)] + ["ab", "cd"]
SEED = 100  # with which the penalised samples would repeat a token without it
CONTROLS = {
    "greedy": vary(GREEDY, logprobs=2),
    "sampled": vary(SAMPLED, top_k=20, logprobs=0, logprobs_mode="tempered"),
    "stop": vary(SAMPLED, stop=STOPS, stop_token_ids=[7, 8, 9]),
    "stop included": vary(SAMPLED, stop=STOPS, include_stop_str_in_output=True, min_tokens=3),
    "presence": vary(SAMPLED, presence_penalty=2.0, logprobs=5, logprobs_mode="processed"),
    "frequency": vary(SAMPLED, temperature=0.7, frequency_penalty=2.0),
    "repetition": vary(SAMPLED, temperature=0.5, repetition_penalty=3.0, logit_bias={5: 3.0}),
    "greedy repetition": vary(
        GREEDY, repetition_penalty=2.0, presence_penalty=1.0, ignore_eos=True
    ),
}


def alone(llm: LLM, prompt: list[int], sampling: SamplingParams, index: int) -> CompletionOutput:
    """One sample of a request, with no other row in any step."""
    request = llm.session.request(prompt, sampling, (0, 0))
    request.sequences = [request.sequences[index]]
    llm.reset_prefix_cache()
    llm.session.run([request])
    return collect(request, llm.session.inputs.tokenizer).outputs[0]


def test_every_control_holds_for_each_sample(llm: LLM) -> None:
    """All in one call, in rows that change hands; the token counts of penalties are kept by row."""
    sampling = [vary(p, n=3, seed=SEED + i) for i, p in enumerate(CONTROLS.values())]
    prompts = make_prompts(*[5 + 3 * i for i in range(len(sampling))], seed=20)
    outputs = run(llm, prompts, sampling)
    for name, prompt, p, out in zip(CONTROLS, prompts, sampling, outputs, strict=True):
        for i, completion in enumerate(out.outputs):
            assert completion.index == i, name
            assert_same_completion(completion, alone(llm, prompt, p, i))
    by_name = dict(zip(CONTROLS, outputs, strict=True))
    assert all(
        len({str(s) for s in streams(out)}) == (1 if "greedy" in name else 3)
        for name, out in by_name.items()
    )
    ends = {
        (c.finish_reason, type(c.stop_reason))
        for name in CONTROLS
        if "stop" in name
        for c in by_name[name].outputs
    }
    assert ("stop", str) in ends, "a sample met a stop string"
    plain = run(llm, prompts, [vary(SAMPLED, n=3, seed=SEED + i) for i in range(len(sampling))])
    assert streams(by_name["presence"]) != streams(plain[4]), "penalties do something"


def test_prompt_logprobs_are_computed_once(llm: LLM) -> None:
    (prompt,) = make_prompts(22, seed=21)
    sampling = vary(SAMPLED, prompt_logprobs=2, seed=1)
    (one,) = run(llm, prompt, sampling)
    before = llm.stats()
    (out,) = run(llm, prompt, vary(sampling, n=3))
    assert grown(llm, before)["prefill_tokens"] == 22 and out.num_cached_tokens == 0
    assert one.prompt_logprobs is not None and out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == 22
    for top, other in zip(out.prompt_logprobs[1:], one.prompt_logprobs[1:], strict=True):
        assert top is not None and other is not None and list(top) == list(other)
        np.testing.assert_allclose(
            [x.logprob for x in top.values()], [x.logprob for x in other.values()], atol=1e-4
        )
    assert_same_completion(out.outputs[0], one.outputs[0])


def test_to_arrays(params: Params) -> None:
    """A row for each sample, in order, with the group it belongs to."""
    sampling = [
        vary(SAMPLED, n=n, ignore_eos=False, stop_token_ids=list(range(0, 90, 6)))
        for n in (3, 1, 2)
    ]
    outputs = generate(params, PROMPTS[:3], sampling)
    arrays = jpaged.to_arrays(outputs, pad_id=-1)
    assert arrays["group_ids"].tolist() == [0, 0, 0, 1, 2, 2]
    assert arrays["sample_index"].tolist() == [0, 1, 2, 0, 0, 1]
    completions = [c for out in outputs for c in out.outputs]
    for row, c in enumerate(completions):
        mask = arrays["completion_mask"][row]
        assert arrays["completion_ids"][row][mask].tolist() == c.token_ids
        np.testing.assert_array_equal(arrays["logprobs"][row][mask], c.token_logprobs)
        assert arrays["finished"][row] == (c.finish_reason == "stop")
        group = arrays["group_ids"][row]
        assert arrays["prompt_ids"][row][arrays["prompt_mask"][row]].tolist() == PROMPTS[group]


def test_stream(llm: LLM) -> None:
    sampling = vary(SAMPLED, n=2, seed=9, stop=STOPS[:3])
    expected = run(llm, PROMPTS[1:3], sampling)
    found: dict[tuple[int, int], tuple[str, list[int], list[str | None]]] = {}
    order = []
    for chunk in llm.stream(PROMPTS[1:3], sampling):
        text, tokens, reasons = found.setdefault((chunk.request_index, chunk.index), ("", [], []))
        assert chunk.text_delta is not None
        delta = (
            text + chunk.text_delta,
            tokens + chunk.token_ids_delta,
            [*reasons, chunk.finish_reason],
        )
        found[chunk.request_index, chunk.index] = delta
        order.append((chunk.request_index, chunk.index))
    assert sorted(order[:4]) == [(0, 0), (0, 1), (1, 0), (1, 1)], "side by side"
    for (request, index), (text, tokens, reasons) in found.items():
        completion = expected[request].outputs[index]
        assert (text, tokens) == (completion.text, completion.token_ids)
        assert reasons[-1] == completion.finish_reason and set(reasons[:-1]) <= {None}


def test_a_closed_stream_aborts_all_samples(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[2], vary(SAMPLED, n=4))
    assert {next(stream).index for _ in range(4)} == {0, 1, 2, 3}
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_abort(llm: LLM) -> None:
    (expected,) = run(llm, PROMPTS[4], vary(SAMPLED, n=2, seed=4))
    doomed = llm.add_request(PROMPTS[2], vary(SAMPLED, n=4))
    other = llm.add_request(PROMPTS[4], vary(SAMPLED, n=2, seed=4))
    for _ in range(5):
        assert llm.step() == []
    out = llm.abort(doomed)
    assert out is not None and [c.finish_reason for c in out.outputs] == ["abort"] * 4
    assert [c.index for c in out.outputs] == [0, 1, 2, 3] and all(
        0 < len(c.token_ids) < 10 for c in out.outputs
    )
    assert llm.abort(doomed) is None
    finished = []
    while llm.has_unfinished():
        finished += llm.step()
    assert [f.request_id for f in finished] == [other]
    assert_same(finished, [expected])


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2", None])
def test_a_bad_n(llm: LLM, n: Any) -> None:
    with pytest.raises(RequestError, match=r"request 1: n="):
        run(llm, PROMPTS[:2], [GREEDY, vary(GREEDY, n=n)])


def test_n_above_max_n(params: Params) -> None:
    settings = dataclasses.replace(ROOMY, max_n=3)
    with pytest.raises(RequestError, match=r"request 0: n=4 is above max_n=3 of EngineConfig"):
        generate(params, PROMPTS[:1], vary(GREEDY, n=4), engine_config=settings)
    sampling = [vary(GREEDY, n=4), vary(GREEDY, n=3)]
    bad, good = generate(params, PROMPTS[:2], sampling, engine_config=settings, on_error="return")
    assert "max_n=3" in str(bad.error) and good.error is None and len(good.outputs) == 3


# Blocks are shared


@pytest.mark.parametrize("length", [37, 38, 40])
def test_the_pool_holds_a_prompt_once(params: Params, length: int) -> None:
    """Ten samples: whole blocks of the prompt once, then what each writes. The open block is copied
    by all but one.
    """
    llm = LLM(params, **vars(ROOMY))
    (prompt,) = make_prompts(length, seed=length)
    (out,) = run(llm, prompt, vary(SAMPLED, n=10, max_tokens=7))
    assert len({str(s) for s in streams(out)}) == 10
    stats = llm.stats()
    shared, whole = length // 4, -(-(length + 6) // 4)  # the last token's KV is never written
    assert stats["peak_blocks_in_use"] == shared + 10 * (whole - shared) < 10 * whole / 3
    assert stats["copied_blocks"] == (9 if length % 4 else 0)
    assert stats["prefill_tokens"] == stats["prompt_tokens"] == length
    assert_idle(llm)
    llm.close()


def test_equal_prompts_of_one_call(llm: LLM) -> None:
    """Computed once, though nothing was cached; each draws its own samples."""
    (prompt,) = make_prompts(30, seed=25)
    before = llm.stats()
    outputs = run(llm, [prompt] * 5, [vary(SAMPLED, seed=i, n=1 + i % 2) for i in range(5)])
    found = grown(llm, before)
    assert found["prefill_tokens"] == 30 and [out.num_cached_tokens for out in outputs] == [
        0,
        30,
        30,
        30,
        30,
    ]
    assert found["copied_blocks"] == 6, "7 rows in the open block, the last of which may keep it"
    for i, out in enumerate(outputs):
        for j, completion in enumerate(out.outputs):
            assert_same_completion(
                completion, alone(llm, prompt, vary(SAMPLED, seed=i, n=1 + i % 2), j)
            )


@pytest.mark.own_steps
def test_nothing_compiles_for_more_samples(llm: LLM) -> None:
    sampling = [vary(GREEDY, ignore_eos=True), vary(CONTROLS["presence"], seed=1)]
    run(llm, PROMPTS[2:4], sampling)
    run(llm, PROMPTS[2:3], vary(sampling[0], n=2))  # compiles the copy of a block
    count = llm.stats()["num_compiles"]
    with compiles() as names:
        run(llm, PROMPTS[2:4], [vary(p, n=4) for p in sampling])
        run(llm, PROMPTS[2:3], vary(sampling[0], n=11))
    assert names == [] and llm.stats()["num_compiles"] == count


# Salts


def salted(prompt: list[int], salt: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "cache_salt": salt}


def test_cache_salt(llm: LLM) -> None:
    """Cached blocks are found under their own salt only, and the salt changes no token."""
    (prompt,) = make_prompts(23, seed=22)
    first = run(llm, [prompt, salted(prompt, "a"), salted(prompt, "b")])
    assert [out.num_cached_tokens for out in first] == [0, 0, 0], (
        "no sharing within the call either"
    )
    again = run(
        llm,
        [
            salted(prompt, "b"),
            salted(prompt, "c"),
            prompt,
            salted(prompt, "a"),
            salted(prompt, "aa"),
        ],
    )
    assert [out.num_cached_tokens for out in again] == [20, 0, 20, 20, 0]
    assert len({str(streams(out)) for out in [*first, *again]}) == 1
    twins = run(llm, [salted(prompt, "d")] * 2, vary(GREEDY, n=2))
    assert [out.num_cached_tokens for out in twins] == [0, 23]
    assert llm.stats()["prefix_hit_rate"] > 0
    (text,) = run(llm, {"prompt": "some text", "cache_salt": "a"})
    assert text.prompt == "some text" and text.num_cached_tokens == 0


@pytest.mark.parametrize("salt", ["", 5, b"a", ["a"], True])
def test_a_bad_salt(llm: LLM, salt: Any) -> None:
    with pytest.raises(RequestError, match=r"request 1: cache_salt=.* must be a non-empty str"):
        run(llm, [PROMPTS[1], salted(PROMPTS[1], salt)])
    good, bad = run(llm, [PROMPTS[1], salted(PROMPTS[1], salt)], on_error="return")
    assert isinstance(bad.error, RequestError) and good.error is None and good.outputs[0].token_ids


def test_a_salt_that_is_no_text(llm: LLM) -> None:
    """Half of a surrogate pair, as JSON may hold."""
    good, bad = run(llm, [PROMPTS[1], salted(PROMPTS[1], "\ud800")], on_error="return")
    assert isinstance(bad.error, RequestError) and good.error is None and good.outputs[0].token_ids


def test_prefix_hit_rate(params: Params) -> None:
    """Prompt tokens found in the cache / prompt tokens, since the start; nothing is found after a
    reset.
    """
    llm = LLM(params, **vars(ROOMY))
    assert llm.stats()["prefix_hit_rate"] == 0.0
    (prompt,) = make_prompts(20, seed=23)
    for hits in (0, 16, 32):
        run(llm, prompt)
        assert llm.stats()["prefix_hit_rate"] == pytest.approx(hits / llm.stats()["prompt_tokens"])
    llm.reset_prefix_cache()
    (out,) = run(llm, prompt)
    assert out.num_cached_tokens == 0 and llm.stats()["prefix_hit_rate"] == pytest.approx(32 / 80)
    assert llm.stats()["blocks_in_use"] == 0
    llm.close()


# Preemption


MIX = [
    vary(GREEDY, max_tokens=20, ignore_eos=True),
    vary(SAMPLED, max_tokens=20, seed=1, logprobs=2),
    vary(SAMPLED, max_tokens=20, seed=2, n=2, presence_penalty=1.5, frequency_penalty=0.5),
    vary(GREEDY, max_tokens=20, repetition_penalty=2.0, ignore_eos=True),
    vary(SAMPLED, max_tokens=20, seed=3, stop="never to be seen"),
]
MIX_PROMPTS = make_prompts(9, 14, 6, 11, 3, seed=24)
SOME = 6 * 2048 / 2**30  # GiB: 6 blocks of 2 layers, 4 tokens, 2 KV heads, K and V, 16 floats


@pytest.mark.parametrize(
    "settings, kinds",
    [
        (CROWDED, {"recomputed"}),
        (SWAP, {"swapped"}),
        (dataclasses.replace(SWAP, swap_min_tokens=64), {"recomputed"}),
        (dataclasses.replace(SWAP, swap_space_gib=SOME), {"swapped", "recomputed"}),
        (dataclasses.replace(SWAP, enable_prefix_caching=False), {"swapped"}),
    ],
    ids=["no swap space", "swap", "all too short", "little swap space", "no prefix caching"],
)
def test_preempted_rows_go_on_as_if_undisturbed(
    params: Params, llm: LLM, settings: jpaged.EngineConfig, kinds: set[str]
) -> None:
    expected = run(llm, MIX_PROMPTS, MIX)
    crowded = LLM(params, tokenizer=TOKENIZER, **vars(settings))
    assert_same(run(crowded, MIX_PROMPTS, MIX), expected)
    stats = crowded.stats()
    counts = {kind: stats[f"preemptions_{kind}"] for kind in ("swapped", "recomputed")}
    assert {kind for kind, count in counts.items() if count} == kinds
    assert stats["preemptions"] == sum(counts.values())
    assert stats["host_blocks"] == int(settings.swap_space_gib * 2**30) // stats["block_bytes"]
    moved = [stats["swap_out_bytes"], stats["swap_in_bytes"]]
    assert all(n % stats["block_bytes"] == 0 for n in moved)
    assert (moved[0] > 0) == (settings.swap_space_gib > 0) and (moved[1] > 0) == (
        "swapped" in kinds
    )
    assert_idle(crowded)
    crowded.close()


def test_strict_compiles_the_moves_too(params: Params) -> None:
    llm = LLM(params, tokenizer=TOKENIZER, **vars(dataclasses.replace(SWAP, strict=True)))
    count = llm.stats()["num_compiles"]
    with compiles() as names:
        run(llm, MIX_PROMPTS, MIX)
    assert llm.stats()["preemptions_swapped"] > 0 and llm.stats()["num_compiles"] == count
    assert [name for name in names if name != "jit(zeros)"] == []
    assert_idle(llm)
    llm.close()


def test_what_the_host_keeps_outlives_an_abort(params: Params) -> None:
    """It may be another's prefix; a reset forgets it."""
    llm = LLM(params, tokenizer=TOKENIZER, **vars(SWAP))
    ids = [llm.add_request(prompt, p) for prompt, p in zip(MIX_PROMPTS, MIX, strict=True)]
    while not llm.stats()["host_blocks_in_use"]:
        llm.step()
    for request_id in ids:
        llm.abort(request_id)
    assert_idle(llm)
    assert llm.stats()["host_blocks_in_use"] > 0
    llm.reset_prefix_cache()
    assert llm.stats()["host_blocks_in_use"] == 0
    llm.close()


@pytest.mark.parametrize("where", ["get_blocks", "put_blocks", "get"])
def test_interrupted(params: Params, llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a move to the host, one back, or the wait for a step: all is computed again, and
    stepping goes on.
    """
    expected = run(llm, MIX_PROMPTS, MIX)
    crowded = LLM(params, tokenizer=TOKENIZER, **vars(SWAP))
    method, passed = getattr(Transfers, where), 0

    def interrupted(self: Transfers, *args: Any) -> Any:
        nonlocal passed
        result, passed = method(self, *args), passed + 1
        if passed in (1, 3, 14):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Transfers, where, interrupted)
    ids = [crowded.add_request(prompt, p) for prompt, p in zip(MIX_PROMPTS, MIX, strict=True)]
    found: dict[str, RequestOutput] = {}
    interrupts = 0
    while crowded.has_unfinished():
        try:
            found |= {out.request_id: out for out in crowded.step()}
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts >= 1
    assert_same([found[i] for i in ids], expected)
    assert_idle(crowded)
    crowded.close()


def test_on_a_mesh() -> None:
    """KV heads over two devices: samples, copies and swaps give the tokens of one device."""
    params = make_params(0, config(num_layers=1))
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("fsdp", "tp"))
    llm = LLM(params, mesh=mesh, **vars(SWAP))
    outputs = run(llm, MIX_PROMPTS[:3], vary(GREEDY, n=3, max_tokens=20))
    for prompt, out in zip(MIX_PROMPTS, outputs, strict=False):
        assert streams(out) == [dense_greedy(params, prompt, 20)] * 3
    stats = llm.stats()
    assert (
        stats["copied_blocks"] > 0
        and stats["preemptions_swapped"] > 0
        and stats["swap_in_bytes"] > 0
    )
    assert llm.session.runner.placement.axis_size == 2
    assert_idle(llm)
    llm.close()
