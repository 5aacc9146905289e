"""Memory does not grow with the input: only a few bytes a line are kept, for ids and for the
figures at the end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch_engine import ROOT

LINE = json.dumps(
    {"prompt": "a request of some hundred bytes, as real ones are at the least " * 2}
)[1:]
# Runs over each of some files, in a process of their own; prints the most memory that it held so
# far after each, in bytes.
DRIVER = """
import sys
from tests.batch_engine import FakeLLM, peak_memory, serve
for source in sys.argv[1:]:
    assert serve(source, "--output", source + ".out", llm=FakeLLM(at_once=True)) == 0
    print("peak", peak_memory())
"""


def peaks(folder: Path, *counts: int) -> list[int]:
    """Bytes that runs over so many lines hold at their largest, one after the other."""
    paths = [folder / f"{count}.jsonl" for count in counts]
    for path, count in zip(paths, counts, strict=True):
        with open(path, "w") as file:
            file.writelines(
                f'{{"id": "request-{i}", "max_tokens": 4, {LINE[:40]}"}}\n' for i in range(count)
            )
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", DRIVER, *map(str, paths)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for path, count in zip(paths, counts, strict=True):
        with open(f"{path}.out") as file:
            assert sum(1 for _ in file) == count
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak ")]


def check(folder: Path, few: int, many: int, most: int) -> None:
    small, large = peaks(folder, few, many)
    print(f"{few} lines: {small / 1e6:.0f} MB at most, {many} lines: {large / 1e6:.0f} MB")
    assert large - small < most


def test_thousands(tmp_path: Path) -> None:
    check(tmp_path, 2_000, 26_000, 8 << 20)


@pytest.mark.slow
def test_a_million(tmp_path: Path) -> None:
    check(tmp_path, 1_000, 1_000_000, 100_000_000)
