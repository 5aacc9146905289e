"""Replicas over a mesh's data axis: what a user sees of them, and equal results."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jpaged
from jpaged import LLM, ConfigError, Params, SamplingParams
from jpaged.kept import sessions as kept_sessions
from jpaged.runtime.weights import place_params
from tests.tiny import (
    STEPS,
    assert_idle,
    assert_same,
    compiles,
    config,
    dense_greedy,
    engine,
    make_params,
    make_prompts,
    tokens_of,
)

PROMPTS = make_prompts(3, 17, 33, 5, 9, 21)
SETTINGS = engine(num_blocks=64)
SIZES = {k: v for k, v in vars(SETTINGS).items() if k != "data_parallel_size"}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "n": 2},
    {"temperature": 0, "presence_penalty": 0.7, "logprobs": 2},
    {"temperature": 1.2, "seed": 1, "top_k": 20},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0, "logit_bias": {5: 4.0}},
]
MIX = [SamplingParams(max_tokens=8, ignore_eos=True, **kind) for kind in KINDS]


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params(0, config(num_layers=1))


def test_tokens_are_those_of_one_device(params: Params) -> None:
    """Of every kind of request at once, the second time from each replica's own cache."""
    one, two = (LLM(params, data_parallel_size=size, **SIZES) for size in (1, 2))
    expected = one.generate(PROMPTS, MIX, use_tqdm=False)
    for _ in range(2):
        assert_same(two.generate(PROMPTS, MIX, use_tqdm=False), expected)
    stats, running = two.stats(), two.session.engine
    assert len(running.replicas) == 2 and stats["data_parallel_size"] == 2
    assert stats["num_blocks"] == 2 * 64 and stats["cached_tokens"] > 0
    hashed = [[b for g in e.blocks.groups for b in g.blocks if b.content] for e in running.replicas]
    assert all(hashed), "both worked"
    assert stats["idle_replica_steps"] < stats["dispatches"] / 2
    assert_idle(two)
    scores: Any = two.score(PROMPTS), one.score(PROMPTS)
    for a, b in zip(*scores, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    one.close()
    two.close()


@pytest.mark.own_steps
def test_the_number_of_replicas_compiles_nothing_more(params: Params) -> None:
    counts = {}
    for size in (1, 4):
        llm = LLM(params, data_parallel_size=size, **SIZES)
        with compiles() as names:
            llm.generate(PROMPTS, MIX[0], use_tqdm=False)
        counts[size] = sorted(name for name in names if name in STEPS)
        llm.close()
    assert counts[1] == counts[4] == sorted(STEPS)


def test_every_other_axis_holds_replicas(params: Params) -> None:
    """Of a mesh that is given, or that the params lie on: FSDP shards are served by each device."""
    grid = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    where = place_params(params, SETTINGS, grid)
    assert (where.axis, where.axis_size) == ("tp", 2)
    assert (where.data_axes, where.replicas) == (("fsdp",), 2)
    assert where.devices_of(1) == jax.devices()[2:4]
    alone = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    shards = jax.tree.map(
        lambda x: NamedSharding(
            alone, PartitionSpec(*[None] * (x.ndim - 1), None if x.shape[-1] % 2 else "fsdp")
        ),
        params,
    )
    greedy = SamplingParams(temperature=0, max_tokens=8)
    outs = jpaged.generate(jax.device_put(params, shards), PROMPTS, greedy, engine_config=SETTINGS)
    assert tokens_of(outs) == [dense_greedy(params, p, 8) for p in PROMPTS]
    assert len(kept_sessions()[-1].engine.replicas) == 2


def test_sizes_that_do_not_fit_the_mesh(params: Params) -> None:
    grid = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tp"))
    with pytest.raises(ConfigError, match=r"data_parallel_size=4: the mesh has 2 replicas"):
        place_params(params, dataclasses.replace(SETTINGS, data_parallel_size=4), grid)
    with pytest.raises(
        ConfigError, match=r"data_parallel_size=4, tensor_parallel_size=4: there are 8 devices"
    ):
        place_params(params, engine(data_parallel_size=4, tensor_parallel_size=4), None)
    with pytest.raises(ConfigError, match="data_parallel_size=0"):
        dataclasses.replace(SETTINGS, data_parallel_size=0)
    made = place_params(
        params, dataclasses.replace(SETTINGS, data_parallel_size=2, tensor_parallel_size=2), None
    )
    assert made.mesh is not None and dict(made.mesh.shape) == {"data": 2, "tp": 2}


def test_streams_aborts_and_rollouts(params: Params) -> None:
    llm = LLM(params, data_parallel_size=2, **SIZES)
    expected = tokens_of(llm.generate(PROMPTS, MIX[0], use_tqdm=False))
    found: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    for chunk in llm.stream(PROMPTS, MIX[0]):
        found[chunk.request_index] += chunk.token_ids_delta
    assert list(found.values()) == expected
    first = llm.add_request(PROMPTS[0], MIX[0])
    second = llm.add_request(PROMPTS[1], MIX[0])
    llm.step()
    ended = llm.abort(first)
    assert ended is not None and ended.outputs[0].finish_reason == "abort"
    done = []
    while llm.has_unfinished():
        done += llm.step()
    assert [out.request_id for out in done] == [second] and tokens_of(done) == [expected[1]]
    asked = [dataclasses.replace(MIX[0], max_tokens=n) for n in (40, 8, 8, 40, 8, 40)]
    whole = llm.generate(PROMPTS, asked, use_tqdm=False)
    with llm.rollout(PROMPTS, asked, enough=2) as rollout:
        groups = list(rollout)
    assert {out.index for out in groups} < {1, 2, 4} and len(groups) == 2
    assert all(out.unfinished for out in rollout.rest if out.index in (0, 3, 5))
    again = llm.generate(rollout.rest, [asked[out.index] for out in rollout.rest], use_tqdm=False)
    left = [out.index for out in rollout.rest]
    assert sorted([*left, *[out.index for out in groups]]) == [*range(6)]
    assert_same([*groups, *again], [whole[i] for i in [*[out.index for out in groups], *left]])
    assert_idle(llm)
    llm.close()
