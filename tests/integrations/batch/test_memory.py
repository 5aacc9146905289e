"""Memory does not grow with the input: only a few bytes a line are kept, for ids and for the
figures at the end.
"""

import json
import os
from pathlib import Path

import pytest

from tests.batch_engine import start

LINE = json.dumps(
    {"prompt": "a request of some hundred bytes, as real ones are at the least " * 2}
)[1:]


def peak(folder: Path, count: int) -> int:
    """Bytes that a run over so many lines holds at its largest."""
    source, output = folder / f"{count}.jsonl", folder / f"{count}.out"
    with open(source, "w") as file:
        file.writelines(
            f'{{"id": "request-{i}", "max_tokens": 4, {LINE[:40]}"}}\n' for i in range(count)
        )
    os.environ["PEAK"] = "1"
    try:
        with start(source, "--output", output, stdout=-1) as process:
            out, err = process.communicate()
    finally:
        del os.environ["PEAK"]
    assert process.returncode == 0, err[-2000:]
    with open(output) as file:
        assert sum(1 for _ in file) == count
    source.unlink()
    output.unlink()
    return int(out.decode().rpartition("peak ")[2])


def check(folder: Path, few: int, many: int, most: int) -> None:
    small, large = peak(folder, few), peak(folder, many)
    print(f"{few} lines: {small / 1e6:.0f} MB at most, {many} lines: {large / 1e6:.0f} MB")
    assert large - small < most


def test_thousands(tmp_path: Path) -> None:
    check(tmp_path, 2_000, 40_000, 12 << 20)


@pytest.mark.slow
def test_a_million(tmp_path: Path) -> None:
    check(tmp_path, 1_000, 1_000_000, 100_000_000)
