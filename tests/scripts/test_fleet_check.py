"""scripts/fleet_check.py: its traces, its fit of step times, and the two predictions beside each
other; two real replicas beside them.
"""

import json
from pathlib import Path

import fleet
import fleet_check
import pytest
from _fleet_device import StepTimes

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
