"""The decode step as a GPU is launched with it: one graph, and few kernels a layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts._common import cannot_compile
from tests.kernels.aot_decode import CASES, asked, launched, readings

THUNKS = """
000: kCommandBuffer [source | next=003 (1)]
    001: kCustomKernel [source | sink] loop_add_fusion grid: [2048] threads: [64]
    002: kDynamicSliceFusion [source | sink] params=6
        002: kCustomCall [source | sink] kCustomCall
    002: kCustomKernel [prev=001 (1)  | next=003 (1) ] gemm_fusion_dot grid: [8192] threads: [64]
    002: kCustomKernel [prev=001 (1)  | next=003 (1) ] loop_add_fusion_1 grid: [2048] threads: [64]
    002: kCustomKernel [prev=001 (1)  | next=003 (1) ] loop_add_fusion_2 grid: [2048] threads: [64]
003: kWhile         [prev=000 (1) | sink]
condition:
    004: kCustomKernel [source | sink] wrapped_compare
  body:
    005: kCopy [source | sink] kCopy
"""


HLO = """HloModule jit_decode

%fused_computation.product (param_0: bf16[9,4], param_1: bf16[2,4]) -> f32[2,9] {
  ROOT %dot = f32[2,9]{1,0} dot(%param_1, %param_0)
}

%fused_reduce (param_0: f32[2,9]) -> f32[2] {
  ROOT %reduce = f32[2]{0} reduce(%param_0, %constant)
}

%fused_select (param_0: f32[2,9], param_1: s32[2]) -> f32[2,3] {
  ROOT %gather = f32[2,3]{1,0} gather(%param_0, %param_1)
}

ENTRY %main (weight: bf16[9,4]) -> f32[2] {
  %call = (f32[2]) custom-call(%product, %tau), custom_call_target="triton", \
operand_layout_constraints={f32[2,9]{1,0}, f32[2]{0}}
}
"""


def test_readings_are_counted() -> None:
    assert readings(HLO, "f32[2,9]") == 2 and readings(HLO, "f32[3,9]") == 0


def test_thunks_are_counted() -> None:
    assert launched(THUNKS) == {"graphs": 2, "kernels": 7, "beside": 5}


LOOPS = """
  %while.1 = (s32[], f32[2]) while(%tuple), condition=%c, body=%b, \
backend_config={"known_trip_count":{"n":"8"}}
  %while.2 = (s32[], f32[2]) while(%tuple.2), condition=%d, body=%e
  %conditional = f32[2] conditional(%pred, %a, %b), branch_computations={%f, %g}
  %gte = f32[2] get-tuple-element(%while.2), index=1
"""


def test_what_asks_the_host_is_counted() -> None:
    assert asked(LOOPS) == 2 and asked(HLO) == 0


def test_a_search_of_few_rows_is_no_reading() -> None:
    searched = HLO.replace("%call = ", "%row_thresholds = ")
    assert readings(searched, "f32[2,9]") == 1


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile("cuda") is not None, reason=str(cannot_compile("cuda")))
def test_decode_is_one_graph() -> None:
    """Nothing in it waits for the host, whatever rows ask for, nor in a dispatch of 8 steps: the
    controls do. Four products, of which XLA splits two and adds their parts up with the residual;
    beside these two norms, what prepares attention, attention, and the gate: 11 kernels a layer,
    five beside the products. The logits are read once, with top_k or top_p twice.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-m", "tests.kernels.aot_decode"]
    root = Path(__file__).parents[2]
    child = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    steps = {x["name"]: x for x in map(json.loads, child.stdout.splitlines())}
    assert list(steps) == list(CASES)
    two, three = steps["plain, 2 layers"], steps["plain, 3 layers"]
    assert two["graphs"] == three["graphs"] == steps["filtered, 2 layers"]["graphs"] == 1
    assert three["kernels"] - two["kernels"] <= 11
    assert three["beside"] - two["beside"] <= 5
    assert two["readings"] == three["readings"] == 1
    assert steps["filtered, 2 layers"]["readings"] == 2
    assert steps["control: thresholds by XLA"]["readings"] > 2
    for name, figures in steps.items():
        assert (figures["asked"] > 0) == name.startswith("control")
