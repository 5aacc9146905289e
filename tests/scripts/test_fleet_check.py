"""scripts/fleet_check.py: its traces, its fit of step times, and the two predictions beside each
other; two real replicas beside them.
"""

import dataclasses
import json
from pathlib import Path

import fleet
import fleet_check
import pytest
from _fleet_device import EngineReplica, StepTimes

TIMES = StepTimes(
    prefill_step=2e-3,
    prefill_token=5e-5,
    decode_step=2e-3,
    decode_row=1e-4,
    decode_context=1e-7,
    kv_bytes=1024,
)


def test_a_trace_is_whole_and_is_read_again(tmp_path: Path) -> None:
    asks = fleet_check.make_trace(TIMES, 2, 60, 0.5, 0)
    assert 20 < len(asks) <= 60 and asks[0].at == 0.0
    last = dict[int, int]()
    for asked in asks:
        assert asked.before == last.get(asked.session, asked.system)
        last[asked.session] = asked.prompt + asked.answer
        ids = fleet_check.vocabulary_ids(asked)
        assert len(ids) == asked.prompt and max(ids) < 4096
        assert all(ids[i] == fleet_check.ANSWER for a, b in asked.answers for i in range(a, b))
    assert len(last) < len(asks), "sessions have several turns"
    fleet_check.write_trace(tmp_path / "trace.jsonl", asks)
    assert fleet_check.read_trace(tmp_path / "trace.jsonl") == asks


def test_predictions_agree_with_each_other() -> None:
    asks = fleet_check.make_trace(TIMES, 2, 80, 0.4, 1)
    model, host = (
        fleet_check.predicted(TIMES, asks, 2, run) for run in (fleet.simulate, fleet.run_engines)
    )
    for name in fleet_check.COUNTS:
        assert model[name] == pytest.approx(host[name], rel=0.01), name
    assert model["first_p50_s"] == pytest.approx(host["first_p50_s"], rel=0.25)


def test_a_turn_waits_for_the_answer_before_it() -> None:
    first = fleet_check.Asked(0.0, 0, 0, 40, 40, 0, 60, ())
    turn = fleet_check.Asked(0.01, 0, 0, 140, 40, 100, 4, ((40, 100),))
    host = fleet_check.predicted(TIMES, [first, turn], 1, fleet.run_engines)
    assert host["cached_tokens"] == 96, "of the prompt and the answer before, in whole blocks"
    assert host["first_p90_s"] < TIMES.prefill(60) + 2 * TIMES.decode(1, 200), "after it was sent"


def test_a_request_waits_for_the_step_that_is_dispatched() -> None:
    replica = EngineReplica(
        dataclasses.replace(TIMES, decode_row=0.0, decode_context=0.0, host_step=1e-3),
        pool_tokens=4096,
        host_tokens=0,
        block_size=16,
        rows=4,
    )
    replica.submit("alone", list(range(40)), 20, 0.0)
    replica.submit("amid", list(range(100, 140)), 2, 0.0155)
    replica.run()
    prompt, step = 2e-3 + 40 * 5e-5, 2e-3
    assert replica.firsts["alone"] == pytest.approx(1e-3 + prompt), "the host's time before it"
    ends = 1e-3 + prompt + 6 * step  # of the step that runs at 0.0155 s, behind which is another
    assert replica.firsts["amid"] == pytest.approx(ends - 0.0155 + step + prompt)


def test_fit() -> None:
    facts = [(1, x) for x in (10, 50, 200)]
    assert fleet_check._fit(facts, [2 + 3 * x for _, x in facts]) == pytest.approx([2, 3])
    assert fleet_check._fit(facts, [3 * x - 20 for _, x in facts])[0] == 0.0


@pytest.mark.slow
def test_counts_of_real_replicas(tmp_path: Path) -> None:
    flags = ["--clock", "processor", "--requests", "30", "--out", str(tmp_path)]
    assert fleet_check.main(flags) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["measured"]["cached_tokens"] > 0
    assert StepTimes.read(tmp_path / "step_times.json").prefill_token > 0
