"""scripts/bench_batch.py: both ways answer the same requests, and its figures are of them."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import jpaged
from tests.batch_engine import ROOT, load_script
from tests.tiny import CONFIG, ENGINE, make_params


@pytest.fixture
def bench_batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    return load_script("bench_batch")


def test_both_ways(
    bench_batch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    llm = jpaged.LLM(
        make_params(), **{f.name: getattr(ENGINE, f.name) for f in dataclasses.fields(ENGINE)}
    )
    monkeypatch.setattr(
        bench_batch.bench, "make_llm", lambda *args: llm
    )  # its steps are compiled already, elsewhere
    flags = [
        "--requests",
        "3",
        "--input",
        "4",
        "9",
        "--output",
        "3",
        "6",
        "--max-model-len",
        "32",
        "--repeat",
        "2",
    ]
    assert bench_batch.main(["--random", str(tmp_path), *flags]) == 0
    _, outputs = bench_batch.bench.Workload(
        requests=3, input=(4, 9), output=(3, 6), ids=(10, 96), temperature=1.0, max_len=32
    ).requests_of()
    assert llm.stats()["generated_tokens"] == 2 * 3 * sum(outputs)
    llm.close()
    out = capsys.readouterr().out
    for clock in ("wall", "CPU"):
        for name in ("generate", "batch"):
            found = re.search(
                rf"^{clock} +{name} +([\d.]+) output tok/s at best; seconds: [\d.]+, [\d.]+$",
                out,
                re.M,
            )
            assert found is not None and float(found[1]) > 0
        assert re.search(
            rf"^{clock} +ratio +[\d.]+ of the best runs, [\d.]+ of the medians$", out, re.M
        )


def test_errors_are_one_sentence(
    bench_batch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_batch.main([str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench_batch: ") and err.count("\n") == 1
