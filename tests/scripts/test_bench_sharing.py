"""scripts/bench_sharing.py: what it prints and writes of a tiny model, and what it makes of its
figures.
"""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import jpaged.config
from tests.text_model import write_folder


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "scripts" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_script("bench_sharing")


def test_a_run_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROWS", 8)
    monkeypatch.setattr(jpaged.config, "TOKEN_BUCKETS", (128,))  # one prefill step to compile
    folder, file = write_folder(tmp_path / "model"), tmp_path / "found.json"
    flags = [
        "--prompt",
        "18",
        "--output",
        "6",
        "--n",
        "4",
        "--beam-width",
        "3",
        "--block-size",
        "4",
        "--repeat",
        "1",
    ]
    assert (
        bench.main(
            [str(folder), *flags, "--lengths", "24", "--num-blocks", "14", "--json", str(file)]
        )
        == 0
    )
    record = json.loads(file.read_text())
    n, identical, distinct = record["samples"].values()
    assert [r["prefill_tokens"] for r in (n, identical, distinct)] == [18, 18, 72]
    assert [r["peak_blocks"] for r in (n, identical, distinct)] == [
        4 + 4 * 2,
        4 + 4 * 2,
        4 * 6,
    ]  # 4 full ones shared
    assert [r["copied_blocks"] for r in (n, identical, distinct)] == [
        3,
        3,
        0,
    ]  # the last owner writes the original
    beams = record["beams"]
    assert 0 < beams["peak_blocks"] < beams["dense_blocks"] <= 18 and beams["seconds_a_token"] > 0
    [row] = record["preemption"]["rows"]
    recompute, swap = row["recompute"], row["swap"]
    assert (
        recompute["preemptions_recomputed"]
        > 0
        == recompute["preemptions_swapped"]
        == recompute["swap_out_bytes"]
    )
    assert swap["preemptions_swapped"] > 0 == swap["preemptions_recomputed"] < swap["swap_in_bytes"]
    assert row["swap_us"] > 0 and 12 <= row["mean_tokens"] <= 24
    out = capsys.readouterr().out
    assert bench.tables(record) + "\n" == out
    for title in (
        "1. samples",
        "one request, n=4",
        "4 distinct requests",
        "2. beam search, width 3",
        "3. preemption",
    ):
        assert out.count(title) == 1


def test_costs_of_a_preempted_token() -> None:
    recompute = {"prefill_tokens": 1500, "prefill_time_s": 0.9, "preemptions_recomputed": 10}
    swap = {"prefill_tokens": 500, "prefill_time_s": 0.5, "swap_in_bytes": 2000 * 64}
    swap |= {"in_seconds": 0.1, "out_seconds": 0.3}
    found = bench.costs(recompute, swap, token_bytes=64)
    assert found == pytest.approx({"recompute_us": 500.0, "swap_us": 200.0, "mean_tokens": 100.0})
    nothing = dict.fromkeys(("recompute_us", "swap_us", "mean_tokens"))
    assert bench.costs(recompute, swap | {"swap_in_bytes": 0}, token_bytes=64) == nothing
    assert bench.costs(swap, swap, token_bytes=64) == nothing


def test_break_even() -> None:
    def rows(*us: tuple[float, float | None, float | None]) -> list[dict[str, Any]]:
        return [
            dict(zip(("mean_tokens", "recompute_us", "swap_us"), row, strict=True)) for row in us
        ]

    assert bench.break_even(rows((10, 5, 9), (40, 5, 4), (90, 5, 3))) == 40
    assert bench.break_even(rows((10, 5, 4), (40, 5, 6), (90, 5, 3))) == 90
    assert bench.break_even(rows((10, 5, 4), (40, 5, 6))) is None
    assert bench.break_even([{"mean_tokens": None, "recompute_us": None, "swap_us": None}]) is None


def test_medians_leave_out_the_first_round_and_variants_take_turns() -> None:
    order: list[str] = []
    figures = itertools.count()

    def variant(name: str) -> dict[str, float]:
        order.append(name)
        return {"x": next(figures)}

    assert bench.in_turn({name: lambda name=name: variant(name) for name in "ab"}, 3) == {
        "a": {"x": 4},
        "b": {"x": 5},
    }
    assert "".join(order) == "abababab"


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench_sharing: ") and err.count("\n") == 1
    with pytest.raises(SystemExit):
        bench.main(["--repeat", "0"])
