"""The store beneath the prefix cache, over real pools: the same outputs with it and without,
whatever a pool is of and wherever it lies.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import LLM, RequestOutput, SamplingParams
from jpaged.engine.cache.store import HostStore, Slot
from tests.tiny import (
    ROOMY,
    assert_idle,
    assert_same,
    assert_same_completion,
    config,
    make_params,
    make_prompts,
)

PARAMS = make_params()
WINDOWED = make_params(0, config(sliding_windows=(None, 7)))
PROMPTS = make_prompts(25, 30, 22, 27, 33, 24, seed=5)
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=8, seed=3, n=2, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=8, seed=4, presence_penalty=1.0, ignore_eos=True),
] * 2
SMALL: dict[str, Any] = {"num_blocks": 24, "swap_min_tokens": 0}  # of the 60 and more for all
STORE: dict[str, Any] = {"swap_space_gib": 0.01}


def make(params: jpaged.Params = PARAMS, **settings: Any) -> LLM:
    return LLM(params, **vars(dataclasses.replace(ROOMY, **settings)))


def turns(llm: LLM) -> list[RequestOutput]:
    """All prompts, and then a next turn of each."""
    first = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
    longer = [p + out.outputs[0].token_ids + [5, 6] for p, out in zip(PROMPTS, first, strict=True)]
    second = llm.generate(longer, SAMPLING, use_tqdm=False)
    assert_idle(llm)
    return first + second


def compare(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal but for what they found in the cache."""
    assert_same(
        [dataclasses.replace(out, num_cached_tokens=0) for out in found],
        [dataclasses.replace(out, num_cached_tokens=0) for out in expected],
    )


PLACES: dict[str, tuple[jpaged.Params, dict[str, Any]]] = {
    "one device": (PARAMS, {}),
    "windows": (WINDOWED, {}),
    "8 bits": (PARAMS, {"kv_cache_dtype": "int8"}),
    "two devices": (PARAMS, {"tensor_parallel_size": 2}),
    "two replicas": (PARAMS, {"data_parallel_size": 2}),
    "private": (PARAMS, {"enable_prefix_caching": False}),
}


QUICK = ("one device", "private")


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=() if p in QUICK else pytest.mark.middle) for p in PLACES],
)
def test_outputs_are_those_without_a_store(place: str) -> None:
    params, settings = PLACES[place]
    roomy, small = make(params, **settings), make(params, **settings, **SMALL, **STORE)
    expected = turns(roomy)
    for _ in range(2):
        compare(turns(small), expected)
    stats = small.stats()
    assert stats["loaded_blocks"] > 0 and stats["swap_in_bytes"] > 0
    if place != "private":  # a third of the second turns' blocks do not fit the pool
        without = make(params, **settings, **SMALL)
        for _ in range(2):
            compare(turns(without), expected)
        assert stats["prefix_hit_rate"] > without.stats()["prefix_hit_rate"]
        without.close()
    roomy.close()
    small.close()


def test_a_wrong_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: a store that gives another block changes tokens."""

    def wrong(self: HostStore, slot: Slot) -> Any:
        return jax.tree.map(np.zeros_like, slot.data)

    expected, llm = turns(make()), make(**SMALL, **STORE)
    monkeypatch.setattr(HostStore, "get", wrong)
    with pytest.raises(AssertionError):
        for _ in range(2):
            compare(turns(llm), expected)
    llm.close()


def test_new_weights_find_nothing_old() -> None:
    llm, fresh = make(**SMALL, **STORE), make_params(1)
    turns(llm)
    assert llm.stats()["host_blocks_in_use"] > 0
    llm.update_params(fresh)
    assert llm.stats()["host_blocks_in_use"] == 0
    roomy = make(fresh)
    expected = turns(roomy)
    found = turns(llm)
    for ours, alone in zip(found, expected, strict=True):
        assert ours.weight_version == 2
        for a, b in zip(ours.outputs, alone.outputs, strict=True):
            assert_same_completion(a, b)
    roomy.close()
    llm.close()


@pytest.mark.middle
def test_blocks_pass_between_replicas() -> None:
    """What was read of one replica is written to the other, also where a replica is two devices."""
    llm = make(data_parallel_size=2, tensor_parallel_size=2, num_blocks=16)
    runner = llm.session.runner
    llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
    first, second = (runner.fetch_blocks(runner.read_blocks([[1, 2, 5]], i)) for i in range(2))
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, first, second)
    runner.write_blocks(first, [[7, 8, 9]], 1)
    moved = runner.fetch_blocks(runner.read_blocks([[7, 8, 9]], 1))
    jax.tree.map(np.testing.assert_array_equal, moved, first)
    jax.tree.map(
        np.testing.assert_array_equal,
        runner.fetch_blocks(runner.read_blocks([[1, 2, 5]], 1)),
        second,
    )
    llm.close()


def test_more_blocks_than_a_move_takes() -> None:
    """They go in parts, of which no two are on the device at once."""
    llm = make(num_blocks=90, max_model_len=32)
    runner = llm.session.runner
    ids = [list(range(70))]
    llm.generate(PROMPTS[:3], SAMPLING[:3], use_tqdm=False)
    before = runner.transfers.downs
    blocks = runner.fetch_blocks(runner.read_blocks(ids))
    assert len(blocks[0]) == 70 and runner.transfers.downs - before == -(-70 // 8)
    runner.write_blocks(blocks, [list(range(10, 80))])
    moved = runner.fetch_blocks(runner.read_blocks([list(range(10, 80))]))
    jax.tree.map(np.testing.assert_array_equal, moved, blocks)
    llm.close()
