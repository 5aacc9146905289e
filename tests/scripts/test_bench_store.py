"""scripts/bench_store.py: with a store nearly everything is found again, as in a pool for all."""

import json

import bench_store
import pytest


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--documents", "10", "--length", "32", "--asks", "2", "--tokens", "2"]
    flags = [
        *sizes,
        "--rounds",
        "1",
        "--block-size",
        "8",
        "--swap-min-tokens",
        "8",
        "--store-gib",
        "0.1",
    ]
    assert bench_store.main(["--random", "tiny", *flags]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    none, store, whole = (line[name] for name in ("no store", "store", "whole pool"))
    assert store["hit_rate"] == whole["hit_rate"] > none["hit_rate"]
    assert store["in_mib"] > 0 == none["out_mib"] == whole["in_mib"]
    assert all(own["first_p90_ms"] >= own["first_ms"] > 0 for own in (none, store, whole))


def test_bad_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_store.main(["--random", "tiny", "--tokens", "1"])
    assert "--tokens 1: must be at least 2" in capsys.readouterr().err
