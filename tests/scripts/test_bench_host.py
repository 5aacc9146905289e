"""scripts/bench_host.py: a line for each number of rows, each with positive times."""

import re

import bench_host
import pytest

LINE = r" *(\d+) +(\d+) us +(\d+) us +(\d+) us +([\d.]+) ms a step, +([\d.]+) us a sequence"


def test_a_line_for_each_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_host.main(["--rows", "1", "5", "20", "--steps", "4", "--block-size", "8"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["rows", "schedule", "pack", "commit", "schedule", "+", "commit"]
    found = [re.fullmatch(LINE, line) for line in lines]
    assert [match and int(match[1]) for match in found] == [1, 5, 20]
    assert all(float(match[6]) > 0 for match in found if match)


def test_every_part_is_measured() -> None:
    parts = bench_host.measure(rows=3, steps=2, block_size=16)
    assert set(parts) == {"schedule", "pack", "commit"} and min(parts.values()) > 0
