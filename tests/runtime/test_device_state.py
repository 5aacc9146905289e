"""DeviceState: of a row whose last token is still in flight, the device alone knows the token and
the length; what the host would say of them is not read.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine import engine as engine_module
from jpaged.engine.packing import ON_DEVICE, Batch, _views
from tests.tiny import engine, make_params, make_prompts, tokens_of

PROMPTS = make_prompts(5, 21, 9)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=[1, 4], ids=["1 step", "4 steps"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(make_params(), **vars(engine(decode_steps=request.param)))
    yield llm
    llm.close()


def run(llm: LLM) -> list[list[int]]:
    llm.reset_prefix_cache()
    return tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def spoil(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[np.ndarray], np.ndarray]) -> list[int]:
    """Write other lengths over those of the chosen rows of each decode; how many those were."""
    pack, spoiled = engine_module.pack, []

    def pack_and_spoil(*planned: Any) -> Batch:
        batch = pack(*planned)
        if batch.bucket.phase == "decode":
            _, view = _views(batch.bucket, planned[1], batch.packed)
            rows = chosen(view["tokens"]) & (view["context_lens"] > 0)
            view["context_lens"][rows] = 3
            spoiled.append(int(rows.sum()))
        return batch

    monkeypatch.setattr(engine_module, "pack", pack_and_spoil)
    return spoiled


def test_lengths_of_rows_in_flight_are_the_devices(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(llm)
    spoiled = spoil(monkeypatch, lambda tokens: tokens == ON_DEVICE)
    assert run(llm) == expected
    assert sum(spoiled) > 3


def test_the_control(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows whose token the host gives, the length is the host's: a wrong one shows."""
    expected = run(llm)
    device_knows = spoil(monkeypatch, lambda tokens: tokens >= 0)
    in_flight = llm.session.engine.in_flight
    depth = in_flight.depth
    monkeypatch.setattr(in_flight, "depth", 1)  # nothing is in flight when it plans
    assert run(llm) != expected and sum(device_knows) > 3 and depth == 2
