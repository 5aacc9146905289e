"""scripts/bench_growth.py: one short run, its arithmetic, and limits that are broken. Nothing is
held to a time.
"""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from tests.tiny import CONFIG


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "scripts" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for imported in ("bench", "soak", "sweep_report"):
    load_script(imported)
growth = load_script("bench_growth")


def test_a_short_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(growth.MODELS, "tiny", CONFIG)
    file = tmp_path / "growth.json"
    argv = [
        "--queue",
        "16",
        "8",
        "--context",
        "130",
        "64",
        "70",
        "--rows",
        "2",
        "--steps",
        "3",
        "--tokens",
        "100",
    ]
    argv += ["--repeat", "2", "--dtype", "float32", "--json", str(file), "--max-growth", "1000"]
    assert growth.main(argv) == 0
    out, err = capsys.readouterr()
    record = json.loads(file.read_text())
    assert [row["queue"] for row in record["queues"]] == [8, 16]
    assert [row["context"] for row in record["contexts"]] == [64, 70, 130]
    for row in (*record["queues"], *record["contexts"]):
        assert (
            row["us_per_token"] > 0
            and 0 < row["step_p50_ms"] <= row["step_p99_ms"] <= row["step_max_ms"]
        )
    assert record["fits"] == growth.fits(record["queues"], record["contexts"])
    for part in ("queues", "contexts"):
        assert growth.table(record[part]) in out
    assert (
        out.endswith(growth.summary(record["fits"]) + "\n")
        and "times what the others foretell\n" in out
    )
    assert err == ""


def test_steps_are_sorted_into_waves() -> None:
    class Queue:
        """Two waves of a prefill step and two decode steps."""

        done = 0

        def has_unfinished(self) -> bool:
            return self.done < 6

        def step(self) -> None:
            self.done += 1

        def stats(self) -> dict[str, int]:
            return {
                "prefill_steps": -(-self.done // 3),
                "decode_steps": self.done - -(-self.done // 3),
            }

    run = growth.run_out(Queue())
    assert len(run["waves"]) == 2 and len(run["decode"]) == 4 and run["growth_mib"] == 0.0


def test_best_turns() -> None:
    slow, fast = (
        {"queue": 1, "us_per_token": 9.0, "growth_mib": 3.0},
        {"queue": 1, "us_per_token": 4.0, "growth_mib": 1.0},
    )
    assert growth.best([[slow], [fast], [slow]]) == [fast | {"growth_mib": 3.0}]


def test_fits() -> None:
    queues = [{"queue": 10**i, "us_per_token": 100.0 + 5 * i, "growth_mib": 0.5} for i in (1, 2, 3)]
    contexts = [
        {"context": 1024 * n, "step_p50_ms": 2 + 0.5 * n, "growth_mib": -1.0} for n in (1, 4, 32)
    ]
    found = growth.fits(queues, contexts)
    wanted = {
        "queue_ratio": 115 / 105,
        "queue_us_per_token_per_decade": 5.0,
        "context_ms_per_1024_tokens": 0.5,
    }
    assert found == pytest.approx(
        wanted | {"context_ms_at_0": 2.0, "context_r2": 1.0, "context_bend": 1.0, "growth_mib": 0.5}
    )
    bent = [row | {"step_p50_ms": (row["context"] / 1024) ** 2} for row in contexts]
    assert growth.fits(queues, bent)["context_bend"] == pytest.approx(1024 / 156)
    few = growth.fits(queues, contexts[:1])
    assert math.isnan(few["context_r2"]) and math.isnan(few["context_bend"])


def test_broken_limits() -> None:
    found = {"queue_ratio": 1.6, "context_r2": math.nan, "context_bend": 1.5, "growth_mib": 20.0}
    args = argparse.Namespace(max_queue_ratio=1.5, min_r2=0.98, max_bend=1.25, max_growth=16.0)
    said = growth.broken_limits(found, args)
    assert said == [
        "time a token grows 1.60 times with the queue, over 1.5",
        "R^2 of step time in context is nan, under 0.98",
        "step time at the longest context is 1.50 times what the shorter ones foretell, over 1.25",
        "resident memory grows by 20.0 MiB, over 16",
    ]
    within = {"queue_ratio": 1.5, "context_r2": 0.98, "context_bend": 1.25, "growth_mib": 16.0}
    assert growth.broken_limits(within, args) == []
    assert growth.broken_limits(found, argparse.Namespace(**dict.fromkeys(vars(args)))) == []


def test_a_broken_limit_is_a_sentence_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"us_per_token": 5.0, "step_p50_ms": 1.0, "growth_mib": 0.0}
    monkeypatch.setattr(
        growth, "measure_queues", lambda sizes, *_: [{"queue": n, **times} for n in sizes]
    )
    monkeypatch.setattr(
        growth, "measure_contexts", lambda sizes, *_: [{"context": n, **times} for n in sizes]
    )
    assert growth.main(["--max-queue-ratio", "0.5"]) == 1
    assert (
        capsys.readouterr().err
        == "bench_growth: time a token grows 1.00 times with the queue, over 0.5\n"
    )


@pytest.mark.parametrize("wrong", [["--queue", "10", "15"], ["--rows", "0"], ["--context", "-1"]])
def test_wrong_flags(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        growth.parse_args(wrong)
