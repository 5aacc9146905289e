"""scripts/bench_prefix.py: a tier finds more than the one before it, and a restart what it had."""

import json

import bench_prefix
import pytest

SIZES = {"sessions": 6, "turns": 2, "system": 16, "first": 24, "message": 8, "tokens": 4}


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    flags += ["--block-size", "8", "--swap-min-tokens", "0", "--store-gib", "0.1"]
    assert bench_prefix.main(["--random", "tiny", *flags, "--shares", "0.3"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    rates = {tier: line[f"0.3 {tier}"]["hit_rate"] for tier in bench_prefix.TIERS}
    assert rates["none"] == 0 < rates["device"] < rates["host"] == rates["disk"] < rates["restart"]
    assert line["0.3 disk"]["file_mib"] > 0 == line["0.3 host"]["file_mib"]
    assert line["0.3 restart"]["computed"] < line["0.3 host"]["computed"]
    assert all(line[f"0.3 {tier}"]["first_p90_ms"] > 0 for tier in bench_prefix.TIERS)


def test_bad_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_prefix.main(["--random", "tiny", "--tiers", "restart"])
    assert "--tiers restart: reads the files that disk has left" in capsys.readouterr().err
