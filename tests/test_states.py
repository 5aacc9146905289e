"""Layers that keep a state a sequence, beside layers of attention: whatever happens to a sequence,
its tokens are the dense model's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, EngineConfig, Params, RequestOutput, SamplingParams, kept
from jpaged.errors import ConfigError
from jpaged.models.layers.conv import ConvConfig
from jpaged.runtime import memory
from jpaged.runtime.footprint import form_of, probe_runner
from jpaged.runtime.mesh import Placement
from kernels_cpu.library import unavailable
from tests.hlo import filled
from tests.recurrent import HYBRID, hybrid
from tests.tiny import (
    assert_idle,
    config,
    dense_greedy,
    dense_logprobs,
    engine,
    engine_of,
    make_params,
    make_prompts,
    tokens_of,
)

HERE = Placement(mesh=None, axis=None, device=jax.devices()[0])
PARAMS = make_params(0, HYBRID)
# Too few blocks for the prompts below at once.
ROWS: dict[str, Any] = {"max_num_seqs": 12, "seq_buckets": (12,), "max_logprobs": 12}
CROWDED = engine(num_blocks=24, **ROWS)
PROMPTS = make_prompts(5, 21, 40, 33)
SHORT = make_prompts(3, 2, 4, 3, 1, 2)  # admitted with a block each, of which they need more later
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SWAP: dict[str, Any] = {"swap_space_gib": 0.01, "swap_min_tokens": 0}


@functools.cache
def llm_of(**changes: Any) -> LLM:
    """The one LLM of these settings in this file."""
    return LLM(PARAMS, **vars(dataclasses.replace(CROWDED, **changes)))


@functools.cache
def dense(prompt: tuple[int, ...], count: int) -> list[int]:
    params = Params(PARAMS, dataclasses.replace(HYBRID, eos_token_ids=()))
    tokens = list(prompt)
    for _ in range(count):
        tokens += dense_greedy(params, tokens, 1)
    return tokens[len(prompt) :]


def checked(llm: LLM) -> dict[str, RequestOutput]:
    """Run to the end, all that must hold checked after each step."""
    found: dict[str, RequestOutput] = {}
    while llm.has_unfinished():
        found |= {output.request_id: output for output in llm.step()}
        for replica in engine_of(llm.session).replicas:
            replica.check_integrity()
    assert_idle(llm)
    return found


def run(llm: LLM, prompts: Any, sampling: SamplingParams = GREEDY) -> list[RequestOutput]:
    ids = [llm.add_request(prompt, sampling) for prompt in prompts]
    found = checked(llm)
    return [found[i] for i in ids]


def check(prompts: list[list[int]], outputs: list[RequestOutput], atol: float = 1e-4) -> None:
    """Tokens and logprobs of every completion are the dense model's."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            tokens = completion.token_ids
            assert tokens == dense(tuple(prompt), len(tokens))
            expected = dense_logprobs(PARAMS, prompt + tokens)[len(prompt) - 1 : -1]
            expected = expected[range(len(tokens)), tokens]
            np.testing.assert_allclose(completion.token_logprobs, expected, atol=atol)


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "few states": {"num_blocks": 200, "num_states": 9},
    "swapped": SWAP,
    "4 steps": {"decode_steps": 4},
    "mixed": {"mixed": True},
    "chunks of 7": {"max_num_batched_tokens": 7, "token_buckets": (7,), "mixed": True},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_dense_models_tokens(way: str) -> None:
    """Chunks of 16 tokens, rows that come and go, preemptions; then once more over warm blocks."""
    llm = llm_of(**WAYS[way])
    llm.reset_prefix_cache()
    before = llm.stats()
    prompts = [*SHORT, *PROMPTS]
    check(prompts, run(llm, prompts))
    kind = "preemptions_swapped" if way == "swapped" else "preemptions_recomputed"
    after = llm.stats()
    assert after[kind] > before[kind] or way == "few states"
    assert [group["num_blocks"] for group in after["kv_groups"]] == {
        "few states": [9, 200],
        "4 steps": [12 * 4, 24],
    }.get(way, [12 * 3, 24])
    check(PROMPTS[2:3], run(llm, PROMPTS[2:3]))
    again = run(llm, PROMPTS[2:3])
    check(PROMPTS[2:3], again)
    assert (again[0].num_cached_tokens > 0) == (way != "no prefix cache")


def test_a_hit_at_every_block() -> None:
    """A prompt is found again up to where a chunk of it ended: at its last whole block, and where
    another prompt parted from it.
    """
    llm, (prompt,) = llm_of(), make_prompts(32, seed=1)
    llm.reset_prefix_cache()
    hits, before = [], llm.stats()
    for shared in (32, 28, 24, 20, 16, 12, 8, 4, 2):
        for other in (91, 92):  # the first leaves a state where it parts, the second finds it
            tokens = prompt[:shared] + [other] * (40 - shared)
            output = run(llm, [tokens])
            check([tokens], output)
            hits.append(output[0].num_cached_tokens)
    assert hits[0] == 0 and hits[1::2] == [32, 28, 24, 20, 16, 12, 8, 4, 0]
    counts = {name: llm.stats()[name] - before[name] for name in ("state_hits", "state_misses")}
    assert counts == {"state_hits": sum(x > 0 for x in hits), "state_misses": 6}, hits
    names = ("gated_delta", "short_conv", "experts")  # this mixer is none of the engine's
    assert [llm.stats()[name] for name in names] == [None] * 3


def test_states_that_are_kept_have_a_budget() -> None:
    """There are as many as num_states, and stats says what they take; what is no longer kept
    counts as a miss, and those least recently used go first.
    """
    llm = llm_of(**WAYS["few states"])
    llm.reset_prefix_cache()
    states, keys = llm.stats()["kv_groups"]
    assert (states["per"], states["num_blocks"], states["cached"]) == ("block", 9, 0)
    pools = llm.session.runner.pools
    assert [g["block_bytes"] for g in (states, keys)] == [p.block_bytes for p in pools]
    prompts = make_prompts(*[12] * 12, seed=7)  # with one state each, at the end
    counts, after = [], llm.stats()
    for prompt in [*prompts, prompts[-1], prompts[0]]:
        before = llm.stats()
        check([[*prompt, 5]], run(llm, [[*prompt, 5]], dataclasses.replace(GREEDY, max_tokens=1)))
        after = llm.stats()
        counts.append(tuple(after[x] - before[x] for x in ("state_hits", "state_misses")))
        assert after["kv_groups"][0]["in_use"] == 0 and after["kv_groups"][0]["cached"] <= 9
    assert counts == [(0, 0)] * len(prompts) + [(1, 0), (0, 1)]
    # The ninth is of an open block.
    assert [group["cached"] for group in after["kv_groups"]] == [8, 12 * 3]


def test_forks_and_beams() -> None:
    """Samples of a prompt share its state, which each copies before it goes on."""
    llm = llm_of()
    llm.reset_prefix_cache()
    outputs = run(llm, PROMPTS[1:3], dataclasses.replace(GREEDY, n=4))
    assert [len(output.outputs) for output in outputs] == [4, 4]
    check(PROMPTS[1:3], outputs)
    prompt = PROMPTS[1]
    (output,) = llm.beam_search([prompt], beam_width=3, max_tokens=10, use_tqdm=False)
    assert_idle(llm)
    assert len(output.outputs) == 3
    for completion in output.outputs:
        tokens = completion.token_ids
        expected = dense_logprobs(PARAMS, prompt + tokens)[len(prompt) - 1 : -1]
        expected = expected[range(len(tokens)), tokens]
        np.testing.assert_allclose(completion.token_logprobs, expected, atol=1e-4)


def test_a_snapshot_in_the_middle() -> None:
    llm = llm_of(**SWAP)
    llm.reset_prefix_cache()
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(7):
        llm.step()
    snapshot = llm.snapshot()
    for _ in range(2):
        found = checked(llm)
        check(PROMPTS, [found[i] for i in ids])
        run(llm, make_prompts(50))  # other states in these blocks
        llm.restore(snapshot)
    for i in ids:
        llm.abort(i)
    checked(llm)


def test_scores() -> None:
    """Prompts are scored chunk by chunk, the later chunks as well."""
    llm = llm_of()
    for prompt, scores in zip(PROMPTS, llm.score(PROMPTS), strict=True):
        expected = dense_logprobs(PARAMS, prompt)[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_a_pool_of_nan() -> None:
    """What nothing has written is never read: a sequence begins from zeros."""
    llm = llm_of()
    llm.reset_prefix_cache()
    expected = run(llm, PROMPTS[2:3])
    llm.reset_prefix_cache()
    runner = llm.session.runner
    assert runner._state is not None
    kv = tuple(filled(pool, jnp.nan) for pool in runner.pools)
    runner._state = dataclasses.replace(runner._state, kv=kv)
    output = run(llm, PROMPTS[2:3])
    runner.release()
    assert tokens_of(output) == tokens_of(expected)


@pytest.mark.parametrize(
    ("axes", "settings"),
    [({"tp": 2}, {}), ({"dp": 2}, {"data_parallel_size": 2, "num_blocks": 12})],
    ids=["tp", "dp"],
)
def test_on_two_devices(axes: dict[str, int], settings: dict[str, Any]) -> None:
    """Heads of the state are split, or sequences go to two replicas; one of them is preempted."""
    mesh = Mesh(np.array(jax.devices()[:2]), tuple(axes))
    llm = LLM(PARAMS, mesh=mesh, **vars(dataclasses.replace(CROWDED, **settings)))
    check(PROMPTS, run(llm, PROMPTS))
    check(PROMPTS[1:3], run(llm, PROMPTS[1:3], dataclasses.replace(GREEDY, n=2)))
    llm.close()


def test_keys_in_8_bits_beside_states() -> None:
    """A state keeps its dtype: the same model with attention alone is as far off."""
    llm = llm_of(kv_cache_dtype="int8")
    (state, keys) = llm.session.runner.pools
    dtypes = [{n: str(x.dtype) for n, x in p.of_rows(1).items()} for p in (state, keys)]
    assert dtypes == [
        {"state": "float32", "inputs": "float32"},
        {"kv": "int8", "scales": "float32"},
    ]
    for prompt, output in zip(PROMPTS, run(llm, PROMPTS), strict=True):
        tokens = output.outputs[0].token_ids
        expected = dense_logprobs(PARAMS, prompt + tokens)[len(prompt) - 1 : -1]
        expected = expected[range(len(tokens)), tokens]
        np.testing.assert_allclose(output.outputs[0].token_logprobs, expected, atol=0.2)


def test_states_are_asked_of_models_that_keep_them() -> None:
    with pytest.raises(ConfigError, match=r"num_states=4: this model keeps no state"):
        LLM(make_params(), **vars(engine(num_states=4)))
    with pytest.raises(ConfigError, match=r"num_states=1"):
        engine(num_states=1)


def test_a_pool_that_grows() -> None:
    """States for a power of two of the sequences of a call, and no fewer ever after."""
    settings = dataclasses.replace(CROWDED, num_blocks=None)
    sizes = []
    for prompts in (PROMPTS[:1], PROMPTS[:3], PROMPTS[:1]):
        outputs = jpaged.generate(PARAMS, prompts, GREEDY, engine_config=settings)
        check(prompts, outputs)
        runner = kept.sessions()[-1].runner
        sizes.append([pool.num_blocks for pool in runner.pools])
    jpaged.release(compiled=True)
    assert [states for states, _ in sizes] == [3, 12, 12]


def test_states_take_no_more_than_keys_and_values() -> None:
    """Where memory is short. Where keys and values fit for all rows, all rows have states."""
    model = hybrid(max_position_embeddings=4096)
    settings = EngineConfig(dtype="float32", block_size=16, max_num_seqs=64)

    def planned(gib: float, **changes: Any) -> memory.MemoryPlan:
        limits = memory.Limits(total=int(gib * 2**30))
        changed = dataclasses.replace(settings, **changes)
        return jpaged.plan_memory(model, changed, limits=limits, compiled=False)

    plenty = planned(4)
    assert plenty.num_states == 64 * 3 and plenty.num_seqs == 64
    assert plenty.num_blocks == 64 * 4096 // 16
    pool = plenty.pool
    assert pool.states is not None
    rest = sum(plenty.account.values()) - plenty.account["pool"]
    short = planned((rest + 100 * pool.states.nbytes) / 2**30)
    keys = short.num_blocks * pool.groups[0].nbytes
    assert short.waste >= 0 and short.num_states < 64 * 3
    assert 0 <= keys - short.num_states * pool.states.nbytes < pool.states.nbytes
    assert short.num_seqs == short.num_states // 2 < 64
    few = planned((rest + 100 * pool.states.nbytes) / 2**30, num_states=10)
    assert few.num_states == 10 and few.num_blocks > short.num_blocks and few.num_seqs == 5
    # None: fewer rows than 64 leave room for more states, and more would not all have theirs.
    limit = (rest + 100 * pool.states.nbytes) / 2**30
    rows = planned(limit, max_num_seqs=None).max_num_seqs
    assert rows == planned(limit, max_num_seqs=rows).num_seqs > short.num_seqs
    assert planned(limit, max_num_seqs=rows * 31 // 30 + 1).num_seqs <= rows * 31 // 30
    runner = probe_runner(model, settings.resolve(model), HERE, form_of(model, HERE, "float32"))
    assert [pool.num_blocks for pool in runner.pools] == [3, 4096 // 16]


def with_bits_of_requests_alone(params: Params, others: list[list[int]]) -> tuple[LLM, list[bytes]]:
    """An LLM with deterministic=True, in which the logprobs of PROMPTS have the bits that they have
    alone: beside others, preempted, from a state that was kept, and in chunks of 7. And the bits.
    """

    def bits(llm: LLM, prompts: list[list[int]]) -> list[bytes]:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [output.outputs[0].token_logprobs.tobytes() for output in outputs]

    llm = LLM(params, **vars(dataclasses.replace(CROWDED, deterministic=True)))
    assert not llm.session.engine_config.pinned
    alone = list[bytes]()
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        alone += bits(llm, [prompt])
    llm.reset_prefix_cache()
    for _ in range(2):
        assert bits(llm, [*PROMPTS, *others])[: len(PROMPTS)] == alone
    stats = llm.stats()
    assert stats["preemptions_recomputed"] > 0 and stats["state_hits"] > 0
    sizes: dict[str, Any] = {"max_num_batched_tokens": 7, "token_buckets": (7,), "max_num_seqs": 3}
    settings = engine(num_blocks=200, deterministic=True, seq_buckets=(3,), **sizes)
    assert bits(LLM(params, **vars(settings)), PROMPTS) == alone
    return llm, alone


@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_bits_are_those_of_a_request_alone() -> None:
    """Short convolutions with deterministic=True: in a batch, preempted, from a state that was
    kept, and in chunks of 7.
    """
    model = config(num_layers=3, head_dim=32, intermediate_size=64)
    conv = ConvConfig(channels=model.hidden_size)
    layers = [dataclasses.replace(layer, mixer=conv) for layer in model.layers[:2]]
    model = dataclasses.replace(model, layers=[*layers, model.layers[2]])
    params = make_params(0, model, jnp.bfloat16)

    llm, _ = with_bits_of_requests_alone(params, SHORT)
    llm.close()


def test_fewer_states_than_rows_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A row that runs needs two: with room for 6, three rows run of the 12 that are asked for, and
    none else are asked for where memory plans them.
    """
    llm = LLM(PARAMS, **vars(dataclasses.replace(CROWDED, num_blocks=None, num_states=6)))
    assert "3 sequences run at once, not max_num_seqs=12" in caplog.text
    llm.close()
    caplog.clear()
    LLM(PARAMS, **vars(dataclasses.replace(CROWDED, num_blocks=None))).close()
    sizes: dict[str, Any] = {"num_blocks": None, "num_states": 6, "max_num_seqs": None}
    llm = LLM(PARAMS, **vars(dataclasses.replace(CROWDED, **sizes)))
    assert llm.session.engine_config.max_num_seqs == 3
    llm.close()
    assert "run at once" not in caplog.text
