"""scripts/bench_images.py: jpaged alone, on a small model."""

import json

import bench_images
import pytest

SMALL = ["--models", "qwen3_vl", "--dtypes", "float32", "--sides", "64", "--shrink", "4"]
SMALL += ["--layers", "2", "--tower-layers", "3", "--tokens", "3", "--rounds", "1"]


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    """That a picture is encoded once for its three requests is asserted by the script."""
    assert bench_images.main(SMALL) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["qwen3_vl float32 64"]
    assert all(record[f"{kind}_first_ms"] > 0 for kind in bench_images.KINDS)
    assert record["new_between_ms"] > 0 and record["reads_ms"] > 0 and "equal" not in record


def test_shares() -> None:
    assert bench_images.equal_share([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert bench_images.equal_share([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5


def test_bad_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_images.main([*SMALL, "--threads", "100000"])
    assert "--threads 100000: this process may run on" in capsys.readouterr().err
