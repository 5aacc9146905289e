"""Layers that keep a state or latents, compiled for chips that are not there: pools are changed in
place, and a step's kernel moves what it has to and no more.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels_pallas.gated_delta import interface as gated_delta
from kernels_pallas.gated_delta import xla as delta_xla
from kernels_pallas.mamba2 import interface as mamba2
from kernels_pallas.mamba2 import xla as mamba2_xla
from scripts._common import CARDS, cannot_compile
from scripts._state_calls import FULL
from tests.kernels.aot_states import PROGRAMS, is_copied, programs_of

H, D, ROWS = FULL.heads, FULL.width, FULL.rows
RULE = gated_delta.Shapes(num_key_heads=H, num_value_heads=H, key_dim=D, value_dim=D)
SCAN = mamba2.Shapes(num_heads=2 * H, num_groups=H // 4, head_dim=D // 2, state_dim=D)
# What a plan counts for XLA's forms; for the kernels it is 0.
SCRATCH = {
    "delta": delta_xla.scratch_bytes(RULE, 1, ROWS),
    "KDA": delta_xla.scratch_bytes(RULE, D, ROWS),
    "Mamba-2": mamba2_xla.scratch_bytes(SCAN, ROWS),
}
CHIPS = {"sm_80": "cuda", "sm_90a": "cuda", "v5e:2x2": "tpu", "tpu7x:2x2x1": "tpu"}


@pytest.mark.parametrize("chip", CHIPS)
def test_pools_are_changed_in_place(chip: str) -> None:
    platform = CHIPS[chip]
    if reason := cannot_compile(platform):
        pytest.skip(reason)
    compiled = compiled_for(platform, chip)
    assert list(compiled) == programs_of(platform)
    for name, program in compiled.items():
        assert (program["pool_copies"] > 0) == is_copied(platform, name)
        # XLA's forms gather the states of rows; the chunks of 2048 tokens are more.
        most = (12 if is_copied(platform, name) else 6) * PROGRAMS[name].moved
        assert program["temporary_bytes"] < max(most, 64 << 20)
    if platform == "tpu":
        ours, theirs = (compiled[f"latents step, {way}"] for way in ("tpu", "xla"))
        assert ours["temporary_bytes"] < 1e-3 * theirs["temporary_bytes"]
    if platform == "cuda":
        for rule, phase in itertools.product(("delta", "KDA", "Mamba-2"), ("step", "chunks")):
            ours, theirs = (compiled[f"{rule} {phase}, {way}"] for way in ("triton", "xla"))
            assert ours["temporary_bytes"] < 1e-4 * theirs["temporary_bytes"]
            assert theirs["asked"] == (phase == "chunks")  # the control of what follows
            planned = SCRATCH[rule]
            assert theirs["temporary_bytes"] < planned
            assert theirs["temporary_bytes"] > planned / 4 or phase == "step"
        assert compiled["convolution of prompts"]["asked"] == 0
        for name, program in compiled.items():
            # A step's program waits for nothing, but for XLA's loop over blocks of a context.
            assert program["asked"] == 0 or "step" not in name or name == "latents step, xla"
            assert program["asked"] == 0 or "triton" not in name


@pytest.mark.parametrize("chip", CARDS)
def test_prompts_fit_every_card(chip: str) -> None:
    """In the shared memory that it has, without a question to the host, and in registers: what
    spills is a few numbers of a thread of the delta rule.
    """
    if reason := cannot_compile("cuda"):
        pytest.skip(reason)
    names = [f"{rule} chunks, triton" for rule in ("delta", "KDA", "Mamba-2")]
    for name, program in compiled_for("cuda", chip, *names).items():
        assert program["asked"] == program["pool_copies"] == 0
        assert program["temporary_bytes"] < 1024
        assert 0 < program["registers"] <= 255
        assert program["spills"] <= (0 if name.startswith("Mamba-2") else 128)


def compiled_for(platform: str, chip: str, *names: str) -> dict[str, dict[str, Any]]:
    """Return what aot_states prints, by name. It optimizes as engines do."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aot_states", platform, chip, *names],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    return {record["name"]: record for record in map(json.loads, child.stdout.splitlines())}
