"""The Runner: what a steady engine compiles (nothing), transfers (one up, one down) and keeps."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, ConfigError, SamplingParams
from jpaged.engine.commit import Committed, commit
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.queues import Queues
from jpaged.engine.shapes import DecodeShape, shape_table
from jpaged.runtime.runner import Handle, Runner
from tests.tiny import (
    ENGINE,
    STEPS,
    ZEROS,
    compiles,
    config,
    engine,
    make_params,
    make_prompts,
    tokens_of,
)

PROMPTS = make_prompts(5, 21, 40)
PLAIN = SamplingParams(temperature=0.8, top_k=5, max_tokens=6, ignore_eos=True)
FULL = SamplingParams(temperature=0, max_tokens=6, logprobs=2, logit_bias={3: 1.0}, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.8, presence_penalty=0.5, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)

# jit(zeros) is no step: a fresh pool (and fresh counts) are zeros that the device makes itself;
# sending them up would be the one large transfer of a run. One trivial computation a shape.
pytestmark = pytest.mark.own_steps


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(make_params(), **vars(ENGINE))
    yield llm
    llm.close()


def runner_of(llm: LLM) -> Runner:
    return llm.session.runner


def run(llm: LLM, sampling: SamplingParams, prompts: Any = PROMPTS) -> list[list[int]]:
    llm.reset_prefix_cache()  # or the second run would take other chunks
    return tokens_of(llm.generate(prompts, sampling, use_tqdm=False))


def test_compiles_equal_the_buckets_used(llm: LLM) -> None:
    """Each bucket once, when it is first met; no helper beside them; the same counts in stats()."""
    runner = runner_of(llm)
    for sampling in (PLAIN, PLAIN, FULL, SCORED, FULL, PLAIN):
        before = set(runner.usage)
        with compiles() as names:
            run(llm, sampling)
        met = [f"jit({bucket.phase})" for bucket in set(runner.usage) - before]
        assert sorted(name for name in names if name != ZEROS) == sorted(met)
        assert set(met) <= set(STEPS)
    with compiles() as names:
        run(llm, PENALISED)
        run(llm, PENALISED)
    assert set(names) <= {"jit(set_counts)"}, (
        "the counts of rows with penalties are entered by one small step more"
    )
    assert set(runner.usage) == set(shape_table(runner.config)), (
        "one prefill and one decode shape: the whole table"
    )
    stats = llm.stats()
    assert (
        stats["num_compiles"] == len(stats["buckets"]) == len(runner.usage) + 1
        and stats["compile_time_s"] > 0
    )


@pytest.mark.parametrize(
    "sampling", [PLAIN, FULL, SCORED, PENALISED], ids=["plain", "full", "prompt", "penalised"]
)
@pytest.mark.parametrize("with_calls", [True, False])
def test_steady_state(
    llm: LLM, sampling: SamplingParams, with_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a first call, the same again traces nothing and moves nothing but through put and get.
    The last is seen where put moves arrays by itself: calls that take them let any in.
    """
    monkeypatch.setattr(runner_of(llm).transfers, "with_calls", with_calls)
    seeded = SamplingParams(**{**vars(sampling), "seed": 1})
    first = run(llm, seeded)
    with jax.no_tracing(), jax.transfer_guard("disallow"), compiles() as names:
        assert run(llm, seeded) == first
    assert names == []


def test_a_callers_transfer_guard_is_no_hindrance() -> None:
    """From the first call on: fresh pool and counts, casts, numpy weights, keys and arrays as
    prompts.
    """
    params = jax.device_get(make_params(0, config(num_layers=1)))
    key, prompt = jax.random.key(1), jnp.arange(3)
    with jax.transfer_guard("disallow"):
        llm = LLM(params, seed=key, **vars(engine(dtype="bfloat16")))
        assert llm.generate([prompt], PENALISED, use_tqdm=False)
    llm.close()


def test_the_guards_can_fail() -> None:
    x = jnp.ones(3)
    with jax.no_tracing(), pytest.raises(RuntimeError):
        jax.jit(lambda x: x + 1)(x)
    double = jax.jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(Exception, match="Disallowed host-to-device"),
    ):
        double(np.ones(3, np.float32))


@pytest.mark.parametrize("sampling", [PLAIN, FULL, SCORED], ids=["plain", "full", "prompt"])
def test_one_transfer_each_way_a_step(
    llm: LLM, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(llm, sampling)
    put, device_put = [], jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda x, *a, **k: (put.append(np.shape(x)), device_put(x, *a, **k))[1]
    )
    monkeypatch.delattr(jax, "device_get")
    monkeypatch.setattr(runner_of(llm).transfers, "with_calls", False)
    before = llm.stats()
    run(llm, sampling)
    after = llm.stats()
    steps, up, down = (after[key] - before[key] for key in ("dispatches", "uploads", "downloads"))
    # Two prefills draw nothing yet and send nothing back, unless they score; three do both and have
    # a buffer for each.
    assert (
        steps > 5 and up == steps == len(put) and down == steps + (3 if sampling is SCORED else -2)
    )


@pytest.mark.parametrize("sampling", [PLAIN, SCORED], ids=["plain", "prompt"])
def test_results_set_out_before_they_are_asked_for(
    llm: LLM, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a dispatch or a draw is to bring back is on its way to the host when it returns."""
    runner, sent, waiting = runner_of(llm), [], []
    kind = type(jnp.zeros(1))
    copy = kind.copy_to_host_async
    monkeypatch.setattr(kind, "copy_to_host_async", lambda x: (sent.append(x), copy(x))[1])

    def watched(function: Callable[..., Handle]) -> Callable[..., Handle]:
        def start(*args: Any) -> Handle:
            handle = function(*args)
            waiting.extend(any(out is x for x in sent) for out in handle.outs)
            return handle

        return start

    for name in ("dispatch", "draw"):
        monkeypatch.setattr(runner, name, watched(getattr(runner, name)))
    run(llm, sampling)
    assert len(waiting) > 5 and all(waiting)


def test_penalties_upload_their_counts_once_a_request(llm: LLM) -> None:
    run(llm, PENALISED)
    before = llm.stats()
    run(llm, PENALISED)
    after = llm.stats()
    steps = after["dispatches"] - before["dispatches"]
    assert after["downloads"] - before["downloads"] == steps - 2
    assert after["uploads"] - before["uploads"] == steps + 4 * len(PROMPTS)


def test_the_pool_keeps_its_place(llm: LLM) -> None:
    """Donated and rebound: one buffer for the whole run."""
    run(llm, PLAIN)
    state = runner_of(llm)._state
    assert state is not None
    old = state.kv[0]["kv"]
    place = old.unsafe_buffer_pointer()
    run(llm, PLAIN)
    state = runner_of(llm)._state
    assert old.is_deleted() and state is not None
    assert state.kv[0]["kv"].unsafe_buffer_pointer() == place


def test_recover_makes_only_what_is_gone(llm: LLM) -> None:
    expected = run(llm, FULL)
    runner = runner_of(llm)
    state, counts = runner._state, runner._counts_RV
    runner.recover()
    assert runner._state is state and runner._counts_RV is counts and runner.pool_bytes
    assert state is not None and counts is not None
    state.rows.last_token_R.delete()
    runner.recover()
    assert runner._state is None and runner._counts_RV is counts
    assert run(llm, FULL) == expected
    state, counts = runner._state, runner._counts_RV
    assert state is not None and counts is not None
    counts.delete()
    runner.recover()
    assert runner._state is state and runner._counts_RV is None
    assert run(llm, FULL) == expected
    state = runner._state
    assert state is not None
    state.kv[0]["kv"].delete()
    runner.recover()
    assert runner._state is None and run(llm, FULL) == expected
    runner.release()
    assert runner.pool_bytes == 0 and run(llm, FULL) == expected


def test_a_sealed_table_refuses_other_shapes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(llm)
    run(llm, PLAIN)
    monkeypatch.setattr(runner.compiled, "is_sealed", True)
    assert run(llm, PLAIN)
    with pytest.raises(ConfigError, match=r"strict=True: DecodeShape\(tokens=64.*not in the table"):
        runner.compiled[DecodeShape(rows=64, tables=1, blocks=16)]


@pytest.mark.parametrize("with_calls", [True, False])
def test_put_and_get_are_counted(
    llm: LLM, with_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one device an array goes with the call that takes it, and by itself to several."""
    transfers = runner_of(llm).transfers
    assert transfers.with_calls
    monkeypatch.setattr(transfers, "with_calls", with_calls)
    up, down = transfers.ups, transfers.downs
    put = transfers.put(np.arange(3, dtype=np.int32))
    assert isinstance(put, np.ndarray if with_calls else jax.Array)
    take = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.int32)).compile()
    with jax.transfer_guard("disallow"), transfers.sending():
        array = take(put)
    assert isinstance(array, jax.Array) and transfers.get(array).tolist() == [1, 2, 3]
    assert isinstance(transfers.get(array), np.ndarray)
    assert (transfers.ups - up, transfers.downs - down) == (1, 2)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed"):
        take(np.arange(3, dtype=np.int32))


def test_two_engines_of_different_block_size(llm: LLM) -> None:
    """Scenarios 12 and 14: in one process, stepping in turn; the other one's blocks hold one
    token.
    """
    other = LLM(make_params(), **vars(engine(block_size=1, num_blocks=160, max_model_len=48)))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = run(llm, greedy)
    llm.reset_prefix_cache()
    ids = [[engine.add_request(prompt, greedy) for prompt in PROMPTS] for engine in (llm, other)]
    found: dict[tuple[int, str], list[int]] = {}
    while llm.has_unfinished() or other.has_unfinished():
        for i, engine_ in enumerate((llm, other)):
            found |= {(i, out.request_id): out.outputs[0].token_ids for out in engine_.step()}
    assert [[found[i, request] for request in requests] for i, requests in enumerate(ids)] == [
        expected
    ] * 2
    other.close()


def test_results_carry_the_version_of_the_weights_that_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = LLM(make_params(), **vars(ENGINE))
    drawn: list[tuple[int, list[int]]] = []

    def watched(queues: Queues, plan: Plan, result: StepResult) -> Committed:
        done = commit(queues, plan, result)
        drawn.extend(
            (e.seq.request.weight_version, e.seq.generated.weight_versions) for e in plan.entries
        )
        return done

    monkeypatch.setattr("jpaged.engine.engine.commit", watched)
    for version in (1, 2, 3):
        drawn.clear()
        run(other, FULL)
        assert len(drawn) > len(PROMPTS) and other.weight_version == version
        assert all(request == version and set(each) <= {version} for request, each in drawn)
        assert sum(len(each) == FULL.max_tokens for _, each in drawn) >= len(PROMPTS)
        other.update_params(make_params(version))
    other.close()
