"""scripts/bench_batch.py: both ways answer the same requests, and its figures are of them."""

import re
import sys

import pytest

from tests.batch_engine import ROOT, load_script


@pytest.fixture
def bench_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    return load_script("bench_batch")


def test_a_random_model(bench_batch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "3", "--input", "4", "9", "--output", "3", "6", "--max-model-len", "32", "--num-blocks", "8"]
    shape = ["--dtype", "float32", "--max-num-seqs", "8", "--repeat", "2"]
    assert bench_batch.main(["--random", "tiny", *shape, *flags]) == 0
    out = capsys.readouterr().out
    for clock in ("wall", "CPU"):
        for name in ("generate", "batch"):
            found = re.search(rf"^{clock} +{name} +([\d.]+) output tok/s at best; seconds: [\d.]+, [\d.]+$", out, re.M)
            assert found is not None and float(found[1]) > 0
        assert re.search(rf"^{clock} +ratio +[\d.]+ of the best runs, [\d.]+ of the medians$", out, re.M)


def test_errors_are_one_sentence(bench_batch, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_batch.main([str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench_batch: ") and err.count("\n") == 1
