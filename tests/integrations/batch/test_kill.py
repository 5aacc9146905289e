"""SIGKILL at random moments of real runs on a real model, resumed each time: every line once, and
as if undisturbed.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jpaged.integrations.batch import command as serve_batch
from jpaged.runtime.resolve import MOST_COST
from kernels_cpu.library import unavailable
from kernels_cpu.rates import rates
from tests.batch_engine import ROOT
from tests.text_model import write_folder

ENGINE = (
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "64",
    "--block-size",
    "8",
    "--num-blocks",
    "64",
    "--token-buckets",
    "64",
    "--seq-buckets",
    "8",
)


def lines() -> list[dict[str, Any]]:
    """Greedy and seeded lines of each form, with a few that are errors."""
    made: list[dict[str, Any]] = []
    for i in range(120):
        body = {
            "prompt": f"line {i}",
            "max_tokens": 4 + i % 24,
            "temperature": i % 3 / 2,
            "ignore_eos": True,
        }
        match i % 4:
            case 0:
                made.append(body)
            case 1:
                made.append({"id": f"bare-{i}", **body})
            case 2:
                made.append(
                    {
                        "custom_id": f"openai-{i}",
                        "method": "POST",
                        "url": "/v1/completions",
                        "body": body,
                    }
                )
            case _:
                made.append({**body, "prompt": "~" * 99} if i % 8 == 3 else {**body, "n": 2})
    return made


def flags_of(folder: Path, output: str, *flags: str) -> list[str]:
    files = [folder / "in.jsonl", "--output", folder / output]
    return [*map(str, files), "--window", "16", *flags]


def answers(path: Path) -> dict[int, Any]:
    """What was answered, by line number; that no line is there twice."""
    found: dict[int, Any] = {}
    for raw in path.read_bytes().splitlines():
        row = json.loads(raw)
        number = row["line"] if "line" in row else int(row["id"].rpartition("_")[2])
        assert number not in found
        body = row["response"]["body"] if row.get("response") else row
        found[number] = body.get("error") or [c["text"] for c in body.get("choices", [body])]
    return found


def small(folder: Path) -> tuple[str, ...]:
    """Flags of a tiny model in f32 and a crowded engine."""
    write_folder(folder / "model")
    return ("--model", str(folder / "model"), *ENGINE)


def survive(
    folder: Path, kills: int, seed: int, made: list[dict[str, Any]], status: int, *flags: str
) -> list[str]:
    """Kill a run of these lines so many times and let it end, with this exit status; a row of a
    table for each kill.
    """
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    program = [sys.executable, str(ROOT / "scripts" / "serve_batch.py")]
    assert serve_batch.main(flags_of(folder, "whole.jsonl", *flags)) == status
    whole, output = answers(folder / "whole.jsonl"), folder / "out.jsonl"
    assert len(whole) == len(made)
    # A random byte of the output each, so that a kill falls into the work; some fall into the start
    # instead.
    rng, size, table = random.Random(seed), (folder / "whole.jsonl").stat().st_size, []
    targets = sorted(rng.randrange(size) for _ in range(kills))
    for i, target in enumerate(targets):
        early = kills > 2 and rng.random() < 0.2
        process = subprocess.Popen(
            [*program, *flags_of(folder, "out.jsonl", *(["--resume"] if i else []), *flags)],
            env=env,
            stderr=-3,
            stdout=-3,
        )
        limit = time.monotonic() + (rng.uniform(0, 4) if early else 600)
        while process.poll() is None and time.monotonic() < limit:
            if output.exists() and output.stat().st_size >= target:
                break
            time.sleep(rng.uniform(0, 0.002))
        process.kill()
        process.wait()
        data = output.read_bytes() if output.exists() else b""
        torn = "" if data.endswith(b"\n") or not data else ", the last one torn"
        table.append(
            f"kill {i + 1:2}: {'at the start' if early else 'at work'}, "
            f"{data.count(b'\n')} rows{torn}"
        )
    assert serve_batch.main(flags_of(folder, "out.jsonl", "--resume", *flags)) == status
    assert answers(output) == whole
    return table


def test_two_kills(tmp_path: Path) -> None:
    print("\n".join(survive(tmp_path, 2, 0, lines(), 2, *small(tmp_path))))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--ordered",)])
def test_ten_kills(tmp_path: Path, flags: tuple[str, ...]) -> None:
    print("\n".join(survive(tmp_path, 10, 1, lines(), 2, *small(tmp_path), *flags)))


@pytest.mark.skipif(
    unavailable() is not None or rates().worst > MOST_COST,
    reason="bits do not depend on the request alone here unless --deterministic",
)
def test_six_kills_of_the_embedded_model(tmp_path: Path) -> None:
    """In bf16 at temperature 1, with no flag: every text is that of the undisturbed run."""
    texts = [{"prompt": f"def f{i}(x, y):\n", "max_tokens": 40} for i in range(84)]
    print("\n".join(survive(tmp_path, 6, 3, texts, 0)))
