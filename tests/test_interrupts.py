"""A KeyboardInterrupt at every place in the host's code at which a signal may strike: what runs for
others comes whole and once, whoever was interrupted.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, Params, RequestOutput, SamplingParams, engine_thread, rollout, session
from jpaged.engine_thread import Delivery, News
from jpaged.request.outputs import CompletionChunk, LiveCompletions
from tests.interrupts import interrupt_at
from tests.test_turns import Waiting
from tests.tiny import ENGINE, assert_idle, assert_same, config, make_params, make_prompts

SECONDS = 60.0  # after which what should have come is lost
PROMPTS = make_prompts(5, 9, 17, 3)
LAST = (RequestOutput, Exception)  # after the pieces


@pytest.fixture(scope="module")
def weights() -> list[Params]:
    return [make_params(seed, config(num_layers=1)) for seed in range(2)]


@pytest.fixture(scope="module")
def llm(weights: list[Params]) -> Iterator[LLM]:
    llm = LLM(weights[0], **vars(ENGINE))
    yield llm
    llm.close()


def at_every_place(work: Callable[[int], bool]) -> int:
    """Do some work, interrupted at a place, until it is not interrupted any more; return how many
    places there were.
    """
    place = 0
    while work(place):
        place += 1
    return place


class Taker:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.news: list[News] = []

    def put(self, news: list[News]) -> None:
        self.news += news


def step_to_the_end(llm: LLM) -> None:
    while llm.has_unfinished():
        llm.step()


@pytest.mark.parametrize(
    "how",
    [pytest.param("they end", marks=pytest.mark.middle), "they are cut", "they are lost"],
)
def test_who_steps_for_others_is_interrupted(llm: LLM, how: str) -> None:
    """A future, and a stream and its output, of which this thread takes the steps; or whose
    requests it ends, or loses to a snapshot.
    """
    asked = SamplingParams(max_tokens=2, seed=3, ignore_eos=True)
    wanted = llm.generate(PROMPTS[:2], asked, use_tqdm=False)
    thread, empty = llm.engine_thread(), llm.snapshot()
    enders: dict[str, Callable[[], Any]] = {
        "they end": lambda: step_to_the_end(llm),
        "they are cut": lambda: llm.update_params(llm.session.served.params, mode="abort"),
        "they are lost": lambda: llm.restore(empty),
    }

    def work(place: int) -> bool:
        taker, was_interrupted = Taker(), False
        with llm.session.stepping.role(Waiting()) as steps:  # the other thread takes none
            assert steps
            future = llm.submit(PROMPTS[0], asked)
            request = llm.session.request(PROMPTS[1], asked, (0, 0))
            job = Delivery(request, taker, 0, LiveCompletions([request], None))
            thread.add([job])
            thread.call(lambda: None).result(SECONDS)
            llm.step()
            try:
                with interrupt_at(place, engine_thread, session):
                    enders[how]()
            except KeyboardInterrupt:
                was_interrupted = True
            enders[how]()
            error = future.exception(SECONDS)
            until = time.monotonic() + SECONDS
            while not (taker.news and isinstance(taker.news[-1][1], LAST)):
                assert time.monotonic() < until, "its output was lost"
                time.sleep(0.001)
        *pieces, (_, last) = taker.news
        if how == "they are lost" and error is not None:
            assert "restored" in str(error) and "restored" in str(last)
            return was_interrupted
        outputs = [future.result(), last]
        tokens = [x for _, p in pieces if isinstance(p, CompletionChunk) for x in p.token_ids_delta]
        assert isinstance(last, RequestOutput) and tokens == last.outputs[0].token_ids
        if how == "they end":
            assert_same(outputs, wanted)
        else:
            assert [out.outputs[0].finish_reason for out in outputs] == ["abort"] * 2
        return was_interrupted

    assert at_every_place(work) > 20
    assert_idle(llm)


def test_who_reads_a_rollout_is_interrupted(llm: LLM) -> None:
    """Each prompt is either yielded or in the rest, with the tokens that it has so far."""
    asked = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (7, 2, 5, 2)]
    whole = llm.generate(PROMPTS, asked, seed=5, use_tqdm=False)

    def work(place: int) -> bool:
        groups, was_interrupted = list[RequestOutput](), False
        done = llm.rollout(PROMPTS, asked, enough=2, seed=5)
        try:
            with interrupt_at(place, rollout), done:
                for group in done:
                    groups.append(group)
        except KeyboardInterrupt:
            was_interrupted = True
        done.close()
        assert len(groups) == 2 or was_interrupted
        found = sorted([*groups, *done.rest], key=lambda out: out.index)
        assert [out.index for out in found] == [0, 1, 2, 3]
        for out, want in zip(found, whole, strict=True):
            drawn = out.outputs[0].token_ids
            assert drawn == want.outputs[0].token_ids[: len(drawn)]
        return was_interrupted

    assert at_every_place(work) > 15
    assert_idle(llm)


@pytest.mark.middle
def test_an_update_is_interrupted(llm: LLM, weights: list[Params]) -> None:
    """Of weights under what runs: either the old ones serve on, or all that runs is computed again
    under the new ones.
    """
    asked = SamplingParams(max_tokens=5, seed=2, ignore_eos=True)

    def work(place: int) -> bool:
        was_interrupted = False
        llm.update_params(weights[0])
        before = llm.weight_version
        name = llm.add_request(PROMPTS[1], asked)
        for _ in range(3):
            llm.step()
        try:
            with interrupt_at(place, session):
                llm.update_params(weights[1], mode="recompute")
        except KeyboardInterrupt:
            was_interrupted = True
        ended = {out.request_id: out for _ in range(9) for out in llm.step()}
        output = ended[name].outputs[0]
        last = output.weight_versions[-1]
        served: Any = llm.session.served.params
        are_new = served["embed"]["weight"] is weights[1]["embed"]["weight"]
        assert (are_new and llm.weight_version > before) or was_interrupted
        assert (last.start == 0) == (llm.weight_version == before)
        llm.reset_prefix_cache()
        (scores,) = llm.score([PROMPTS[1] + output.token_ids])
        drawn = scores[len(PROMPTS[1]) - 1 :][last.start :]
        np.testing.assert_allclose(output.token_logprobs[last.start :], drawn, atol=1e-4)
        return was_interrupted

    assert at_every_place(work) > 10
    llm.update_params(weights[0])
    assert_idle(llm)
