"""Every face from several threads: tokens as if alone, turns in order, and no thread's error or
interrupt is another's.
"""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import LLM, Params, RequestError, SamplingParams, kept
from jpaged.adapters import Adapters
from jpaged.kept import sessions as kept_sessions
from jpaged.session import Session
from tests import byte_tokenizer
from tests.test_lora import make_lora
from tests.tiny import ENGINE, assert_idle, assert_same, config, engine, make_params, make_prompts

ONE_LAYER = config(num_layers=1)
SETTINGS: dict[str, Any] = {**vars(ENGINE)}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=7, n=2, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = make_prompts(5, 9, 17, 3)
SECONDS = 300.0  # after which threads that should have ended hang
Work = Callable[[], Any]


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    yield
    left = [t for t in threading.enumerate() if t.name.startswith("work")]
    assert not left, "threads wait for ever"


@pytest.fixture(scope="module")
def weights() -> Iterator[list[Params]]:
    jpaged.release(compiled=True)
    yield [make_params(seed, ONE_LAYER) for seed in range(2)]
    jpaged.release(compiled=True)


@pytest.fixture(scope="module")
def llm(weights: list[Params]) -> Iterator[LLM]:
    llm = LLM(weights[0], **SETTINGS)
    yield llm
    llm.close()


def in_threads(jobs: list[Work], count: int | None = None) -> list[Any]:
    """The results of jobs that so many threads do at once, each as many of them."""
    count = count or len(jobs)
    results: list[Any] = [None] * len(jobs)
    begin = threading.Barrier(count)

    def work(first: int) -> None:
        begin.wait(SECONDS)
        for i in range(first, len(jobs), count):
            try:
                results[i] = jobs[i]()
            except BaseException as e:
                results[i] = e

    threads = [threading.Thread(target=work, args=(i,), name=f"work {i}") for i in range(count)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return results


def assert_equal(found: Any, wanted: Any) -> None:
    """Outputs of any function here."""
    if isinstance(found, BaseException):
        raise found
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], jpaged.RequestOutput):
        assert_same(found, wanted)
    elif isinstance(wanted, list) and wanted and isinstance(wanted[0], np.ndarray):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    else:
        assert found == wanted


def streamed(llm: LLM, prompts: Any, asked: SamplingParams) -> dict[tuple[int, int], list[int]]:
    tokens: dict[tuple[int, int], list[int]] = {}
    for chunk in llm.stream(prompts, asked):
        tokens.setdefault((chunk.request_index, chunk.index), []).extend(chunk.token_ids_delta)
    return tokens


# jpaged's functions


def test_generate_from_eight_threads(weights: list[Params]) -> None:
    def generate() -> Any:
        return jpaged.generate(weights[0], PROMPTS, SAMPLED, engine_config=ENGINE)

    alone = generate()
    for found in in_threads([generate] * 8):
        assert_equal(found, alone)


def functions(weights: list[Params], lora: list[Any]) -> list[Work]:
    """Every function, with weights and adapters in turn."""
    jobs: list[Work] = []
    for params in weights:
        how: dict[str, Any] = {"engine_config": ENGINE}
        jobs += [
            lambda p=params, how=how: jpaged.generate(p, PROMPTS, SAMPLED, **how),
            lambda p=params, how=how: jpaged.generate(p, PROMPTS[1], GREEDY, lora=lora[0], **how),
            lambda p=params, how=how: jpaged.generate(p, PROMPTS[:2], GREEDY, lora=lora, **how),
            lambda p=params, how=how: jpaged.score(p, PROMPTS, **how),
            lambda p=params, how=how: jpaged.score(p, PROMPTS[:2], lora=lora[1], **how),
            lambda p=params, how=how: jpaged.beam_search(p, PROMPTS[0], 2, 5, **how),
        ]
    return jobs


@pytest.mark.middle
def test_64_threads_mix_functions_weights_and_adapters(weights: list[Params]) -> None:
    """4 calls each; releases and warm-ups come between them."""
    jobs = functions(weights, [make_lora(0), make_lora(1)])
    alone = [job() for job in jobs]
    order = [i % len(jobs) for i in range(256)]
    random.Random(0).shuffle(order)
    work = [jobs[i] for i in order]
    work[10::50] = [jpaged.release] * len(work[10::50])
    work[30::90] = [lambda: jpaged.warmup(weights[0], 17, 7, 8, engine_config=ENGINE) > 0] * len(
        work[30::90]
    )
    for i, (job, found) in enumerate(zip(work, in_threads(work, 64), strict=True)):
        if job is jobs[order[i]]:
            assert_equal(found, alone[order[i]])
        else:
            assert found is None or found is True
    assert len(kept_sessions()) <= 2
    for session in kept_sessions():
        assert not session.engine.has_unfinished()


def test_an_error_is_of_its_own_call(weights: list[Params]) -> None:
    def good() -> Any:
        return jpaged.generate(weights[0], PROMPTS, GREEDY, engine_config=ENGINE)

    def bad() -> Any:
        return jpaged.generate(weights[0], [[999]], GREEDY, engine_config=ENGINE)

    def deleted() -> Any:
        params = make_params(5, ONE_LAYER)
        for leaf in jax.tree.leaves(params):
            leaf.delete()
        return jpaged.generate(params, PROMPTS, GREEDY, engine_config=ENGINE)

    alone = good()
    jobs = [good, bad, deleted] * 8
    for job, found in zip(jobs, in_threads(jobs), strict=True):
        if job is good:
            assert_equal(found, alone)
        else:
            assert isinstance(found, jpaged.JpagedError)


def test_calls_by_the_same_arrays_join_and_others_take_turns(weights: list[Params]) -> None:
    """No two calls by different weights run at once, those by the same do, and each comes."""
    running: list[int] = []
    together, together_by = 0, set[int]()
    run = Session.run

    def counted(self: Any, jobs: Any, **options: Any) -> Any:
        nonlocal together
        if not jobs:
            return run(self, jobs, **options)
        running.append(id(self.served.params["embed"]["weight"]))
        assert len(set(running)) == 1, "two weights at once"
        if len(running) > 1:
            together += 1
            together_by.add(running[0])
        try:
            return run(self, jobs, **options)
        finally:
            running.pop()

    jobs = [
        lambda p=params: jpaged.generate(p, PROMPTS[3], GREEDY, engine_config=ENGINE)
        for params in weights
    ]
    alone = [job() for job in jobs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", counted)
        found = in_threads([*[jobs[0]] * 4, *[jobs[1]] * 4] * 6, 8)
    for i, outputs in enumerate(found):
        assert_equal(outputs, alone[i // 4 % 2])
    assert together > 0
    assert len(kept_sessions()) <= 2 and not kept._leases


def test_arrays_that_are_replaced_meanwhile_are_not_taken_for_the_old(
    weights: list[Params],
) -> None:
    """A thread that calls with a tree whose arrays another call still runs by waits for it."""
    tree = jax.tree.map(lambda x: x, dict(weights[0]))  # dicts of its own
    params = Params(tree, ONE_LAYER)
    alone = jpaged.generate(params, PROMPTS[1], LONG, engine_config=ENGINE)
    results: list[Any] = []
    with kept.session(params, None, None, ENGINE) as session:
        names = [session.add(session.request(PROMPTS[1], LONG, (0, 7)))]
        session.advance()
        tree["embed"]["weight"] = weights[1]["embed"]["weight"]
        now = Params(jax.tree.map(lambda x: x, tree), ONE_LAYER)
        other = threading.Thread(
            target=lambda: results.append(
                jpaged.generate(params, PROMPTS[1], LONG, engine_config=ENGINE)
            ),
            name="work",
            daemon=True,
        )
        other.start()
        outputs: list[Any] = []
        while not outputs:
            outputs += session.step()
        assert outputs[0].request_id == names[0] and not results
        assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    other.join(SECONDS)
    assert_equal(results[0], jpaged.generate(now, PROMPTS[1], LONG, engine_config=ENGINE))
    assert results[0][0].outputs[0].token_ids != alone[0].outputs[0].token_ids


def test_an_adapter_is_one_version_to_calls_that_join(
    weights: list[Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very same tree in eight calls at once is read once, and has one slot."""
    tree, made = make_lora(5), Adapters.made
    reads: list[Any] = []

    def slowly(self: Adapters, source: Any, name: str | None = None) -> Any:
        reads.append(source)
        time.sleep(0.05)
        return made(self, source, name)

    def generate() -> int:
        (out,) = jpaged.generate(weights[0], PROMPTS[0], GREEDY, lora=tree, engine_config=ENGINE)
        return out.adapter_version

    monkeypatch.setattr(Adapters, "made", slowly)
    versions = in_threads([generate] * 8)
    assert len(set(versions)) == 1 and versions[0] > 0, versions
    assert len(reads) == 1


@pytest.mark.middle
def test_a_pool_that_grows_waits_for_what_runs(weights: list[Params]) -> None:
    """Threads that begin with small calls and need a larger pool and larger tables of adapters."""
    settings = engine(num_blocks=None, max_num_seqs=8)
    adapter = make_lora(3)
    jobs: list[Work] = [
        lambda n=n, lora=lora: jpaged.generate(
            weights[0], PROMPTS[:n], LONG, engine_config=settings, lora=lora
        )
        for n, lora in ((1, None), (4, None), (2, adapter))
    ]
    found = in_threads(jobs * 2)
    for job, outputs in zip(jobs * 2, found, strict=True):
        assert_equal(outputs, job())


# One LLM


def test_one_llm_from_many_threads(llm: LLM) -> None:
    """generate, score, beam_search, stream, requests that are queued, aborted and stepped, stats,
    resets of the cache, snapshots: 16 threads, 8 calls each.
    """
    outputs: dict[str, jpaged.RequestOutput] = {}

    def queued() -> Any:
        name = llm.add_request(PROMPTS[2], GREEDY)
        while name not in outputs:
            outputs.update((out.request_id, out) for out in llm.step())
        return [outputs[name]]

    def aborted() -> Any:
        name = llm.add_request(PROMPTS[2], LONG)
        if llm.abort(name) is None:  # another thread stepped it to its end
            while name not in outputs:
                outputs.update((out.request_id, out) for out in llm.step())
        return True

    jobs: list[Work] = [
        lambda: llm.generate(PROMPTS, SAMPLED, use_tqdm=False),
        lambda: llm.generate(PROMPTS[1], GREEDY, use_tqdm=False),
        lambda: llm.score(PROMPTS),
        lambda: llm.beam_search(PROMPTS[0], 2, 5, use_tqdm=False),
        lambda: streamed(llm, PROMPTS, SAMPLED),
        lambda: streamed(llm, PROMPTS[1], LONG),
        queued,
        aborted,
        lambda: llm.stats()["num_blocks"],
        lambda: llm.reset_prefix_cache(),
        lambda: llm.snapshot().num_calls >= 0,
        lambda: llm.warmup(use_tqdm=False) >= 0,
    ]
    alone = [job() for job in jobs]
    order = [i % len(jobs) for i in range(128)]
    random.Random(1).shuffle(order)
    for i, found in zip(order, in_threads([jobs[i] for i in order], 16), strict=True):
        assert_equal(found, alone[i])
    assert_idle(llm)


def test_calls_share_their_steps(llm: LLM) -> None:
    """16 threads that generate one prompt each take few more steps than one of them."""
    prompts = make_prompts(*range(3, 11)) * 2
    alone = [llm.generate(prompt, LONG, use_tqdm=False) for prompt in prompts]
    before = llm.stats()["decode_steps"]
    jobs: list[Work] = [lambda p=p: llm.generate(p, LONG, use_tqdm=False) for p in prompts]
    for found, wanted in zip(in_threads(jobs), alone, strict=True):
        assert_equal(found, wanted)
    assert llm.stats()["decode_steps"] - before < 8 * 40
    assert_idle(llm)


def test_futures(llm: LLM) -> None:
    """Tokens of generate; a bad prompt is its own future's error; cancel aborts."""
    alone = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    futures = in_threads([lambda p=p: llm.submit(p, SAMPLED) for p in PROMPTS])
    bad = llm.submit([999], SAMPLED)
    endless = [llm.submit(PROMPTS[0], LONG) for _ in range(3)]
    assert endless[0].cancel() and endless[0].cancelled()
    beside = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    assert_same(beside, alone)
    assert_same([future.result(SECONDS) for future in futures], alone)
    with pytest.raises(RequestError, match="999"):
        bad.result(SECONDS)
    (wanted,) = llm.generate(PROMPTS[0], LONG, use_tqdm=False)
    for future in endless[1:]:
        assert future.result(SECONDS).outputs[0].token_ids == wanted.outputs[0].token_ids
        assert not future.cancel()
    drawn = llm.submit(PROMPTS[0], SamplingParams(max_tokens=6, ignore_eos=True), seed=4)
    asked = SamplingParams(max_tokens=6, ignore_eos=True)
    assert_same([drawn.result(SECONDS)], llm.generate(PROMPTS[0], asked, seed=4, use_tqdm=False))
    while llm.has_unfinished():
        time.sleep(0.001)
    assert_idle(llm)


def test_outputs_as_they_end(llm: LLM) -> None:
    lengths = [30, 4, 18, 9]
    asked = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    alone = llm.generate(PROMPTS, asked, use_tqdm=False)
    assert [out.index for out in alone] == [0, 1, 2, 3]
    outputs = list(llm.as_completed(PROMPTS, asked))
    assert [out.index for out in outputs] == [1, 3, 2, 0]
    assert_same(sorted(outputs, key=lambda out: out.index), alone)
    for out in llm.as_completed(PROMPTS, LONG):
        assert len(out.outputs[0].token_ids) == 40
        break
    with pytest.raises(RequestError, match=r"request 1: .*999"):
        llm.as_completed([PROMPTS[0], [999]], GREEDY)
    both = list(llm.as_completed([PROMPTS[0], [999]], GREEDY, on_error="return"))
    assert [(out.index, out.error is None) for out in both] == [(1, False), (0, True)]
    while llm.has_unfinished():
        time.sleep(0.001)
    assert_idle(llm)


def test_a_failed_step_and_an_end(weights: list[Params]) -> None:
    """A step that raises once is taken again; again and again, every future has the error, and
    the next request runs. A closed LLM leaves no future unresolved, and takes no other.
    """
    llm = LLM(weights[0], **SETTINGS)
    (wanted,) = llm.generate(PROMPTS[0], LONG, use_tqdm=False)
    step, fails = llm.session.engine.step, [1]

    def failing() -> Any:
        if fails[0]:
            fails[0] -= 1
            raise RuntimeError("the device is away")
        return step()

    llm.session.engine.step = failing  # pyright: ignore[reportAttributeAccessIssue]
    future = llm.submit(PROMPTS[0], LONG)
    assert future.result(SECONDS).outputs[0].token_ids == wanted.outputs[0].token_ids
    with llm.paused():  # both are there when it fails
        futures = [llm.submit(PROMPTS[0], LONG) for _ in range(2)]
        llm.engine_thread().call(lambda: None).result(SECONDS)
        fails[0] = 2
    assert {str(future.exception(SECONDS)) for future in futures} == {"the device is away"}
    future = llm.submit(PROMPTS[0], LONG)
    assert future.result(SECONDS).outputs[0].token_ids == wanted.outputs[0].token_ids
    with llm.paused():
        futures = [llm.submit(PROMPTS[0], LONG) for _ in range(2)]
        llm.close()
    for future in futures:
        with pytest.raises(jpaged.ConfigError, match="this LLM is closed"):
            future.result(SECONDS)
    with pytest.raises(jpaged.ConfigError, match="this LLM is closed"):
        llm.submit(PROMPTS[0], LONG)


def test_an_llm_that_is_gone_ends_its_thread(weights: list[Params]) -> None:
    llm = LLM(weights[0], **SETTINGS)
    llm.submit(PROMPTS[0], GREEDY).result(SECONDS)
    thread = llm.engine_thread()
    del llm
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_fork_is_told(llm: LLM) -> None:
    """It neither runs what it inherited nor waits for threads that it has not."""
    llm.submit(PROMPTS[0], GREEDY).result(SECONDS)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork of a process with threads, as users do it
        child = os.fork()
    if not child:
        said = []
        for call in (lambda: llm.submit(PROMPTS[0], GREEDY), lambda: llm.stats()):
            try:
                call()
            except jpaged.ConfigError as e:
                said.append(str(e))
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        said = lines.read().splitlines()
    os.waitpid(child, 0)
    assert len(said) == 2 and all("forked" in line for line in said)


def test_the_interpreter_ends_with_requests_under_way() -> None:
    program = (
        "import jpaged\n"
        "from tests.tiny import ENGINE, make_params, config\n"
        "llm = jpaged.LLM(make_params(0, config(num_layers=1)), **vars(ENGINE))\n"
        "asked = jpaged.SamplingParams(max_tokens=50, ignore_eos=True)\n"
        "futures = [llm.submit([1, 2, 3], asked) for _ in range(64)]\n"
        "futures[0].result()\n"
        "print('ends')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_models_made_in_several_threads(weights: list[Params]) -> None:
    """At once, each used by its own thread, beside jpaged.generate."""
    alone = jpaged.generate(weights[1], PROMPTS, GREEDY, engine_config=ENGINE)

    def made() -> Any:
        llm = LLM(weights[1], **SETTINGS)
        try:
            return llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        finally:
            llm.close()

    def generate() -> Any:
        return jpaged.generate(weights[1], PROMPTS, GREEDY, engine_config=ENGINE)

    for found in in_threads([made, made, generate, made]):
        assert_equal(found, alone)


def test_what_changes_an_llm_takes_its_turn(weights: list[Params]) -> None:
    """New weights, sleep and wake, snapshots and restores beside calls of other threads: each
    answer is of one version of the weights, from its first token to its last.
    """
    llm = LLM(weights[0], **SETTINGS)
    wanted = []
    for params in weights:
        llm.update_params(params)
        wanted.append(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    ended = threading.Event()

    def generate() -> Any:
        return [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(12)]

    def update() -> Any:
        count = 0
        while not ended.is_set():
            llm.update_params(weights[count % 2])
            count += 1
        return count

    def restore() -> Any:
        count = 0
        while not ended.is_set():
            snapshot = llm.snapshot()
            try:
                llm.restore(snapshot)
            except RequestError as e:
                assert "weight version" in str(e)
            count += 1
        return count

    jobs = [generate] * 6
    with ThreadPoolExecutor(2) as pool:
        changes = [pool.submit(update), pool.submit(restore)]
        found = in_threads(jobs)
        ended.set()
        assert all(change.result(SECONDS) > 2 for change in changes)
    tokens = [[out.outputs[0].token_ids for out in outputs] for outputs in wanted]
    seen = set()
    for results in found:
        assert not isinstance(results, BaseException), results
        for outputs in results:
            version = tokens.index([out.outputs[0].token_ids for out in outputs])
            assert len({out.weight_version for out in outputs}) == 1
            seen.add(version)
    assert seen == {0, 1}
    assert_idle(llm)
    llm.close()


def test_sleep_waits_for_calls_and_closing_too(weights: list[Params]) -> None:
    llm = LLM(weights[0], **SETTINGS)
    alone = llm.generate(PROMPTS, LONG, use_tqdm=False)

    def nap() -> None:
        llm.sleep()
        llm.wake()

    jobs: list[Work] = [lambda: llm.generate(PROMPTS, LONG, use_tqdm=False), nap] * 6
    for found in in_threads(jobs):
        if found is not None:
            try:
                assert_equal(found, alone)
            except jpaged.ConfigError as e:  # between a sleep and its wake
                assert "sleeps" in str(e)
    jobs = [lambda: llm.generate(PROMPTS, LONG, use_tqdm=False)] * 4 + [llm.close]
    for found in in_threads(jobs):
        if isinstance(found, BaseException):
            assert isinstance(found, jpaged.ConfigError) and "closed" in str(found)
        elif found is not None:
            assert_equal(found, alone)


def test_a_stream_holds_nothing_between_its_pieces(llm: LLM) -> None:
    """A consumer that is slow, or never comes back, keeps no other thread from anything."""
    alone = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    (wanted,) = llm.generate(PROMPTS[1], LONG, use_tqdm=False)
    slow, left = llm.stream(PROMPTS[1], LONG), llm.stream(PROMPTS[2], LONG)
    tokens = list(next(slow).token_ids_delta)
    next(left)
    jobs: list[Work] = [
        lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False),
        lambda: llm.stats()["num_blocks"] and None,
        lambda: llm.add_request(PROMPTS[0], GREEDY) and None,
        lambda: llm.reset_prefix_cache(),
    ] * 3
    for found in in_threads(jobs):
        if found is not None:
            assert_equal(found, alone)
    tokens += [token for chunk in slow for token in chunk.token_ids_delta]
    assert tokens == wanted.outputs[0].token_ids
    cycle: list[Any] = [left]
    cycle.append(cycle)
    del left, cycle
    in_threads([gc.collect] * 2)  # closed by a thread that has never called
    while llm.has_unfinished():
        llm.step()
    assert_idle(llm)


def test_what_comes_in_between_two_steps_of_a_call(llm: LLM) -> None:
    """An abort, a request and its steps by other threads, while a call of this one runs."""
    (alone,) = llm.generate(PROMPTS[2], LONG, use_tqdm=False)
    began, ended = threading.Event(), threading.Event()
    step = llm.session.engine.step
    counts = [0]

    def slow_step() -> Any:
        began.set()
        counts[0] += 1
        if counts[0] == 3:  # other threads have asked for the engine by then
            ended.wait(0.05)
        return step()

    def beside() -> Any:
        began.wait(SECONDS)
        name = llm.add_request(PROMPTS[0], LONG)
        output = llm.abort(name)
        ended.set()
        return output, counts[0]

    llm.session.engine.step = slow_step  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jobs: list[Work] = [lambda: llm.generate(PROMPTS[2], LONG, use_tqdm=False), beside]
        found, (output, steps) = in_threads(jobs)
    finally:
        del llm.session.engine.step
    assert_equal(found, [alone])
    assert output is not None and output.outputs[0].finish_reason == "abort"
    assert steps < counts[0], "it did not wait for the call to end"


def test_no_two_calls_draw_by_one_key(llm: LLM) -> None:
    """Calls without a seed, from many threads, of one prompt: as many samples as one after the
    other.
    """
    asked = SamplingParams(max_tokens=8, ignore_eos=True)
    keys = in_threads([llm.keys.next] * 64)
    assert len(set(keys)) == 64
    found = in_threads([lambda: llm.generate(PROMPTS[0], asked, use_tqdm=False)] * 16)
    assert len({tuple(out[0].outputs[0].token_ids) for out in found}) == 16


# Calls within calls


class Curious:
    """A tokenizer that calls jpaged, when it encodes or while it decodes."""

    def __init__(self, call: Work, when: str):
        self._tokenizer, self._call, self._when = byte_tokenizer.make_tokenizer(), call, when
        self.results: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer":  # it would be asked in this one's place
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def _ask(self, when: str) -> None:
        if self._when == when and not self.results:
            self.results.append(None)
            self.results[0] = self._call()

    def encode(self, text: str) -> list[int]:
        self._ask("encode")
        return self._tokenizer.encode(text)

    def decode(self, *args: Any, **how: Any) -> str:
        self._ask("decode")
        return self._tokenizer.decode(*args, **how)


BYTES = {**SETTINGS, "max_model_len": 64}


def test_a_call_within_a_call_does_not_wait_for_itself() -> None:
    params = byte_tokenizer.params()
    settings = engine(max_model_len=64)
    ids = [1, 2, 3]
    (alone,) = jpaged.generate(params, [ids], GREEDY, engine_config=settings)

    def inner() -> Any:
        return jpaged.generate(params, [ids], GREEDY, engine_config=settings, tokenizer=tokenizer)

    tokenizer = Curious(inner, "encode")
    outer = jpaged.generate(params, ["abc"], GREEDY, engine_config=settings, tokenizer=tokenizer)
    assert tokenizer.results[0][0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len(outer[0].outputs[0].token_ids) == 6
    assert len(kept_sessions()) <= 2

    tokenizer = Curious(lambda: llm.generate([ids], GREEDY, use_tqdm=False), "encode")
    llm = LLM(params, tokenizer=tokenizer, **BYTES)
    llm.generate("abc", GREEDY, use_tqdm=False)
    assert tokenizer.results[0][0].outputs[0].token_ids == alone.outputs[0].token_ids
    llm.close()


@pytest.mark.parametrize("name", ["generate", "stats", "add_request", "update_params"])
def test_a_call_from_inside_a_step_is_refused(name: str) -> None:
    """While the engine is between two states: it says so, and the LLM works on."""
    params = byte_tokenizer.params()
    inner: dict[str, Work] = {
        "generate": lambda: llm.generate([[1]], GREEDY, use_tqdm=False),
        "stats": lambda: llm.stats(),
        "add_request": lambda: llm.add_request([1], GREEDY),
        "update_params": lambda: llm.update_params(params),
    }
    tokenizer = Curious(inner[name], "decode")
    llm = LLM(params, tokenizer=tokenizer, **BYTES)
    with pytest.raises(RequestError, match="came from inside a step"):
        list(llm.stream("abc", GREEDY))
    assert_idle(llm)
    assert len(list(llm.stream("abc", GREEDY))) > 0
    llm.close()


# Interrupts


@pytest.mark.parametrize("face", ["generate", "LLM"])
def test_interrupts_of_the_main_thread_harm_no_other(
    weights: list[Params], llm: LLM, face: str
) -> None:
    """Ctrl-C at moments of all kinds, while other threads generate and stream."""

    def generate() -> Any:
        if face == "LLM":
            return llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
        return jpaged.generate(weights[0], PROMPTS, SAMPLED, engine_config=ENGINE)

    def stream() -> Any:
        return streamed(llm, PROMPTS, SAMPLED)

    alone = [generate(), stream()]
    ended = threading.Event()
    results: list[list[Any]] = [[], [], []]

    def work(i: int, job: Work) -> None:
        while not ended.is_set():
            try:
                results[i].append(job())
            except BaseException as e:
                results[i].append(e)

    jobs = [generate, stream, generate]
    threads = [
        threading.Thread(target=work, args=(i, job), name=f"work {i}", daemon=True)
        for i, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    main = threading.main_thread().ident
    assert main is not None
    rng, interrupts = random.Random(0), 0
    for _ in range(40):
        timer = threading.Timer(
            rng.uniform(0.001, 0.05), signal.pthread_kill, (main, signal.SIGINT)
        )
        try:
            timer.start()
            while True:
                generate()
        except KeyboardInterrupt:
            interrupts += 1
        timer.join()
    ended.set()
    for thread in threads:
        thread.join(SECONDS)
    assert interrupts == 40 and all(len(found) > 1 for found in results)
    for i, found in enumerate(results):
        for each in found:
            assert_equal(each, alone[i % 2])
    assert_equal(generate(), alone[0])
    assert_idle(llm)
