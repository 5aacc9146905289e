"""LLM.snapshot and restore: from a snapshot on, everything happens again as it did, as often as one
likes.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jpaged
from jpaged import LLM, EngineConfig, Params, RequestError, RequestOutput, SamplingParams
from jpaged.engine.sequence import Status
from jpaged.session import Snapshot
from tests.text_model import make_tokenizer
from tests.tiny import (
    CROWDED,
    ROOMY,
    assert_idle,
    assert_same,
    compile_cache,
    engine_of,
    make_params,
    make_prompts,
    tokens_of,
)

SWAP = dataclasses.replace(CROWDED, swap_space_gib=0.01)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True)
TOKENIZER = make_tokenizer()


def vary(sampling: SamplingParams, **changes: Any) -> SamplingParams:
    return dataclasses.replace(sampling, **changes)


# The last of them waits for blocks while the others run.
PROMPTS = make_prompts(9, 14, 6, 11, 3, 30)
SAMPLING = [
    GREEDY,
    vary(SAMPLED, seed=1, logprobs=2),
    vary(SAMPLED, n=2),
    vary(SAMPLED, seed=2, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    vary(SAMPLED, seed=3, stop=[chr(32 + i) for i in range(0, 94, 5)] + ["ab"], min_tokens=12),
    vary(SAMPLED, logit_bias={3: 2.0}),
]


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of the same shapes load the same compiled steps."""
    with compile_cache(tmp_path_factory.getbasetemp() / "compiled"):
        yield


@pytest.fixture(scope="module")
def llm_of(params: Params) -> Callable[[EngineConfig], LLM]:
    """The one LLM of these settings in this file."""
    return functools.cache(functools.partial(make_llm, params))


@pytest.fixture
def llm(llm_of: Callable[[EngineConfig], LLM]) -> Iterator[LLM]:
    """With a crowded pool, swap space and nothing cached; a test must leave it idle."""
    llm = llm_of(SWAP)
    llm.reset_prefix_cache()
    yield llm
    assert_idle(llm)


def add(llm: LLM) -> list[str]:
    return [llm.add_request(prompt, p) for prompt, p in zip(PROMPTS, SAMPLING, strict=True)]


def finish(llm: LLM) -> dict[str, RequestOutput]:
    """Run to the end; the outputs by request id."""
    outputs: list[RequestOutput] = []
    while llm.has_unfinished():
        outputs += llm.step()
        engine_of(llm.session).replicas[0].check_integrity()
    assert len({out.request_id for out in outputs}) == len(outputs)
    return {out.request_id: out for out in outputs}


def assert_equal(found: dict[str, RequestOutput], expected: dict[str, RequestOutput]) -> None:
    assert list(found) == list(expected), "in the same order too"
    assert_same(list(found.values()), list(expected.values()))


def make_llm(params: Params, settings: EngineConfig) -> LLM:
    return LLM(params, tokenizer=TOKENIZER, **vars(settings))


def states(llm: LLM) -> set[str]:
    """What the unfinished sequences are doing: "swapped" waits with blocks in the store."""
    found, cache = set(), llm.session.engine.replicas[0].blocks.cache
    for request in llm.session.engine.requests.values():
        for seq in request.sequences:
            if seq.status is Status.WAITING:
                is_stored = seq.num_generated and cache.match(seq).num_loaded
                kind = "preempted" if seq.num_generated else "new"
                found.add("swapped" if is_stored else kind)
            elif seq.status is Status.RUNNING:
                found.add("in its prompt" if seq.is_prefilling else "decoding")
    return found


@pytest.mark.parametrize("steps", [0, 1, 3, 12, 24])
@pytest.mark.parametrize(
    "settings", [SWAP, CROWDED, ROOMY], ids=["swap", "recompute", "room for all"]
)
def test_the_same_again(
    llm_of: Callable[[EngineConfig], LLM], settings: EngineConfig, steps: int
) -> None:
    """At any moment of many requests: in the middle of a prompt, with some that wait, on the host
    or have ended.
    """
    llm = llm_of(settings)
    llm.reset_prefix_cache()
    ids = add(llm)
    before = [out for _ in range(steps) for out in llm.step()]
    snapshot = llm.snapshot()
    first = finish(llm)
    assert {*first, *(out.request_id for out in before)} == set(ids)
    assert_idle(llm)
    for _ in range(2):
        llm.restore(snapshot)
        assert_equal(finish(llm), first)
        assert_idle(llm)


def test_every_state(llm: LLM, llm_of: Callable[[EngineConfig], LLM]) -> None:
    """One snapshot with rows decoding, swapped and new; the outcome is that of a pool with room for
    all.
    """
    ids = add(llm)
    ended: list[RequestOutput] = []
    while not {"swapped", "decoding", "new"} <= states(llm):
        ended += llm.step()
    assert not ended
    snapshot = llm.snapshot()
    held = llm.stats()
    assert held["host_blocks_in_use"] > 0
    first = finish(llm)
    llm.restore(snapshot)
    now = llm.stats()
    assert all(now[key] == held[key] for key in ("blocks_in_use", "host_blocks_in_use")) and states(
        llm
    ) >= {"swapped"}
    assert_equal(finish(llm), first)
    seeded = [i for i, p in enumerate(SAMPLING) if p.seed is not None or p.temperature == 0]
    expected = llm_of(ROOMY).generate(
        [PROMPTS[i] for i in seeded], [SAMPLING[i] for i in seeded], use_tqdm=False
    )
    assert_same([first[ids[i]] for i in seeded], expected)
    assert any(c.finish_reason == "stop" for out in first.values() for c in out.outputs)


def test_a_prompt_in_two_parts(llm: LLM) -> None:
    """Between two chunks of a prompt, with penalties to be counted when the row first runs and
    after.
    """
    (prompt,) = make_prompts(30, seed=1)
    for sampling in (GREEDY, SAMPLING[3]):
        (expected,) = llm.generate(prompt, sampling, use_tqdm=False)
        llm.reset_prefix_cache()
        request_id = llm.add_request(prompt, sampling)
        assert llm.step() == [] and states(llm) == {"in its prompt"}
        snapshot = llm.snapshot()
        for _ in range(2):
            assert_same([finish(llm)[request_id]], [expected])
            llm.restore(snapshot)
        llm.abort(request_id)


def test_branches(llm: LLM) -> None:
    """Another request added after restore runs beside the old ones and disturbs none; it is in no
    later branch.
    """
    (prompt,) = make_prompts(10, seed=2)
    (alone,) = llm.generate(prompt, vary(SAMPLED, seed=9, n=2), use_tqdm=False)
    ids = add(llm)
    for _ in range(8):
        llm.step()
    snapshot = llm.snapshot()
    first = finish(llm)
    llm.restore(snapshot)
    extra = llm.add_request(prompt, vary(SAMPLED, seed=9, n=2))
    assert extra not in ids
    branch = finish(llm)
    assert_same([branch.pop(extra)], [alone])
    assert_same([branch[i] for i in sorted(branch)], [first[i] for i in sorted(first)])
    llm.restore(snapshot)
    gone = llm.add_request(prompt, GREEDY)
    llm.step()
    llm.restore(snapshot)
    assert llm.abort(gone) is None, "what was added since is gone"
    inner = llm.snapshot()
    llm.abort(ids[0])
    for state in (snapshot, inner):
        llm.restore(state)
        assert_equal(finish(llm), first)


def test_randomness_goes_back_too(llm: LLM) -> None:
    """Calls without a seed draw from the LLM's own, by their number since the snapshot."""
    snapshot = llm.snapshot()
    first = tokens_of(llm.generate(PROMPTS[:2], SAMPLED, use_tqdm=False))
    second = tokens_of(llm.generate(PROMPTS[:2], SAMPLED, use_tqdm=False))
    assert first != second
    llm.restore(snapshot)
    assert tokens_of(llm.generate(PROMPTS[:2], SAMPLED, use_tqdm=False)) == first
    assert tokens_of(llm.generate(PROMPTS[:2], SAMPLED, use_tqdm=False)) == second


def test_nothing_stale_is_found(llm: LLM) -> None:
    """Blocks were overwritten since: what was cached at the snapshot, or is cached now, is no
    prefix after restore.
    """
    sampling = vary(GREEDY, max_tokens=6)
    prompts = make_prompts(17, 21, 13, 18, 22, seed=3)
    expected = [tokens_of(llm.generate(prompt, sampling, use_tqdm=False)) for prompt in prompts]
    llm.reset_prefix_cache()
    llm.generate(prompts[:2], sampling, use_tqdm=False)
    request_id = llm.add_request(prompts[2], sampling)
    llm.step()
    snapshot = llm.snapshot()
    for _ in range(2):
        llm.generate(
            prompts[3:], sampling, use_tqdm=False
        )  # while the first one runs, and its blocks are freed
        llm.restore(snapshot)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        assert [tokens_of([out]) for out in outputs] == expected
        assert [out.num_cached_tokens for out in outputs] == [0, 0, 12, 0, 0], (
            "but what the snapshot's request holds"
        )
        assert tokens_of(llm.step()) == expected[2]
        llm.restore(snapshot)
    llm.abort(request_id)


def test_what_ended_and_was_not_fetched(llm: LLM) -> None:
    """Outputs that wait for `step` belong to the state."""
    short = llm.add_request(PROMPTS[4], vary(GREEDY, max_tokens=2))
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    snapshot = llm.snapshot()
    for _ in range(2):
        assert [out.request_id for out in llm.step()] == [short]
        assert not llm.has_unfinished()
        llm.restore(snapshot)
    assert [out.request_id for out in llm.step()] == [short]


def test_beams(llm: LLM) -> None:
    """In the middle of a search, whose beams share blocks, beside an ordinary request."""
    (expected,) = llm.beam_search(PROMPTS[1], 4, 14, use_tqdm=False)
    beside = llm.add_request(PROMPTS[0], GREEDY)
    search = llm.session.builder.beam_search(
        llm.session.inputs.prompt(PROMPTS[1]), 4, 14, 1.0, False
    )
    llm.session.add(search)
    for _ in range(6):
        assert llm.step() == []
    snapshot = llm.snapshot()
    first = finish(llm)
    assert_same([first[search.request_id]], [expected])
    assert set(first) == {search.request_id, beside}
    for _ in range(2):
        llm.restore(snapshot)
        assert_equal(finish(llm), first)


@pytest.mark.parametrize("seed", range(4))
def test_at_random(llm: LLM, llm_of: Callable[[EngineConfig], LLM], seed: int) -> None:
    """Snapshots, restores of any of them, resets of the cache at random moments: the outcome is the
    undisturbed one.
    """
    fixed = [vary(p, seed=i) for i, p in enumerate(SAMPLING)]
    expected = llm_of(ROOMY).generate(PROMPTS, fixed, use_tqdm=False)
    expected += llm_of(ROOMY).beam_search(PROMPTS[1], 4, 14, use_tqdm=False)
    ids = [llm.add_request(prompt, p) for prompt, p in zip(PROMPTS, fixed, strict=True)]
    search = llm.session.builder.beam_search(
        llm.session.inputs.prompt(PROMPTS[1]), 4, 14, 1.0, False
    )
    llm.session.add(search)
    rng = random.Random(seed)
    found: dict[str, RequestOutput] = {}
    taken: list[tuple[Snapshot, dict[str, RequestOutput]]] = []
    for _ in range(150):
        action = rng.random()
        if action < 0.05:
            llm.reset_prefix_cache()
        elif action < 0.12:
            taken.append((llm.snapshot(), dict(found)))
        elif action < 0.17 and taken:
            snapshot, before = rng.choice(taken)
            llm.restore(snapshot)
            found = dict(before)
        else:
            found |= {out.request_id: out for out in llm.step()}
    found |= finish(llm)
    assert_same([found[i] for i in [*ids, search.request_id]], expected)


def test_the_hit_rate_stays_a_rate(params: Params) -> None:
    llm = make_llm(params, SWAP)
    llm.generate(PROMPTS[5], GREEDY, use_tqdm=False)
    llm.add_request(PROMPTS[5], GREEDY)
    llm.step()
    snapshot = llm.snapshot()
    for _ in range(4):
        llm.restore(snapshot)
        finish(llm)
    assert 0 < llm.stats()["prefix_hit_rate"] <= 1
    llm.close()


# What a snapshot is not good for


def test_not_for_other_weights(params: Params) -> None:
    llm = make_llm(params, SWAP)
    add(llm)
    llm.step()
    snapshot = llm.snapshot()
    llm.update_params(jpaged.Params(dict(params), params.config), mode="abort")
    llm.restore(snapshot)  # the same arrays: the same weights
    llm.update_params(make_params(1), mode="abort")
    with pytest.raises(
        RequestError, match=r"snapshot of weight version 1: its KV is not that of 2"
    ):
        llm.restore(snapshot)
    aborted = finish(llm)
    assert all(c.finish_reason == "abort" for out in aborted.values() for c in out.outputs)
    assert_idle(llm)
    with pytest.raises(RequestError):
        llm.restore(snapshot)
    llm.close()


@pytest.mark.parametrize("changes", [{"num_blocks": 21}, {"block_size": 5}])
def test_not_for_another_pool(llm: LLM, params: Params, changes: dict[str, int]) -> None:
    llm.add_request(PROMPTS[0], GREEDY, request_id="mine")
    llm.step()
    snapshot = llm.snapshot()
    other = make_llm(params, dataclasses.replace(SWAP, **changes))
    with pytest.raises(
        RequestError, match=r"snapshot of another LLM, or of a pool that has since been replaced"
    ):
        other.restore(snapshot)
    assert not other.has_unfinished()
    assert_idle(other)
    other.close()
    llm.abort("mine")


@pytest.mark.parametrize("same_weights", [False, True])
def test_not_for_another_llm(llm: LLM, params: Params, same_weights: bool) -> None:
    """Of the same pool: with other weights, or with fewer slots than the rows of the snapshot may
    have.
    """
    snapshot = llm.snapshot()
    settings = dataclasses.replace(SWAP, max_num_seqs=3) if same_weights else SWAP
    other = make_llm(params if same_weights else make_params(1), settings)
    with pytest.raises(RequestError):
        other.restore(snapshot)
    other.close()


def test_a_stream_takes_no_output_with_it(llm: LLM) -> None:
    """The snapshot's own request ends in the very step in which the stream finds out that it is
    gone.
    """
    stream = llm.stream(PROMPTS[1], vary(GREEDY, max_tokens=2))
    next(stream)
    llm.restore(llm.snapshot())
    with pytest.raises(RequestError, match=r"the LLM was restored to a snapshot"):
        next(stream)
    assert len(finish(llm)) == 1


@pytest.mark.parametrize("where", ["before", "after", "here"])
def test_a_stream_does_not_outlive_a_restore(llm: LLM, where: str) -> None:
    """Opened before or after the snapshot: it says so, and leaves nothing of its own behind."""
    other = llm.add_request(PROMPTS[0], GREEDY)
    snapshot = llm.snapshot()
    stream = llm.stream(PROMPTS[1:3], vary(SAMPLED, n=2))
    next(stream)
    if where != "after":  # the snapshot has the stream's requests
        snapshot = llm.snapshot()
    if where == "before":
        next(stream)
    llm.restore(snapshot)
    with pytest.raises(RequestError, match=r"the LLM was restored to a snapshot"):
        for _ in stream:
            pass
    assert list(stream) == []
    found = finish(llm)
    assert found.pop(other).outputs[0].finish_reason == "length"
    assert len(found) == (0 if where == "after" else 2), (
        "the snapshot's own requests go on, for `step`"
    )
    assert all(c.finish_reason == "length" for out in found.values() for c in out.outputs)


def test_a_stream_that_ended_before_the_restore(llm: LLM) -> None:
    snapshot = llm.snapshot()
    stream = llm.stream(PROMPTS[1], vary(SAMPLED, max_tokens=3))
    assert len(list(stream)) == 3
    llm.restore(snapshot)
    assert list(stream) == [] and not llm.has_unfinished()
    unstarted = llm.stream(PROMPTS[1], vary(GREEDY, max_tokens=3))
    llm.restore(snapshot)
    assert len(list(unstarted)) == 3, "one that had not begun loses nothing"
