"""scripts/convert.py as a user runs it."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoint import load_params

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "convert.py"


def convert(*args: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def test_convert(make: Callable[..., Path], small: dict[str, Any], tmp_path: Path) -> None:
    folder = make(small, shards=2)
    run = convert(folder, tmp_path / "out", "--dtype", "bfloat16")
    assert (run.returncode, run.stderr) == (0, "")
    want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), load_params(folder))
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "out"), want)


def test_one_sentence_and_no_traceback(
    make: Callable[..., Path],
    small: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = make(small)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    strange = make(small | {"model_type": "gpt2"}, name="strange")
    for folder, out, said in (
        (tmp_path / "nowhere", tmp_path / "out", "no such folder"),
        (cut, tmp_path / "out", "truncated"),
        (strange, tmp_path / "out", "'gpt2' (model_type 'gpt2') is not supported"),
        (cut, strange, "not an empty folder"),
    ):
        assert runpy.run_path(str(SCRIPT))["main"]([str(folder), str(out)]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("jpaged convert: ") and said in printed.err
        assert printed.err.count("\n") == 1 and printed.out == ""
    assert not (tmp_path / "out").exists()
    run = convert(tmp_path / "nowhere", tmp_path / "out")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
