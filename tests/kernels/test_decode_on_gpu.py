"""The decode step as a GPU is launched with it: one graph, and few kernels a layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts._common import cannot_compile
from tests.kernels.aot_decode import launched

THUNKS = """
000: kCommandBuffer [source | next=003 (1)]
    001: kCustomKernel [source | sink] loop_fusion
    002: kDynamicSliceFusion [source | sink] params=6
        002: kCustomCall [source | sink] kCustomCall
003: kWhile         [prev=000 (1) | sink]
condition:
    004: kCustomKernel [source | sink] wrapped_compare
  body:
    005: kCopy [source | sink] kCopy
"""


def test_thunks_are_counted() -> None:
    assert launched(THUNKS) == {"graphs": 2, "kernels": 4}


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile("cuda") is not None, reason=str(cannot_compile("cuda")))
def test_decode_is_one_graph() -> None:
    """Nothing in it waits for the host, where nobody asks for top_k or top_p: the control does.
    Four products, of which XLA splits two and adds their parts up with the residual; beside these
    two norms, what prepares attention, attention, and the gate: 11 kernels a layer.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-m", "tests.kernels.aot_decode"]
    how = {"cwd": Path(__file__).parents[2], "env": environment, "capture_output": True}
    child = subprocess.run(command, text=True, timeout=900, **how)
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    two, three, control = (json.loads(line) for line in child.stdout.splitlines())
    assert two["graphs"] == three["graphs"] == 1 < control["graphs"]
    assert three["kernels"] - two["kernels"] <= 11
