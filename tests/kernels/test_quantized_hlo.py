"""Whether XLA writes the widened weight to memory for a product with one in 8 or 4 bits, on chips
that are not there.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from scripts._common import cannot_compile
from tests.kernels import aot_quantized

CHIPS = [("cuda", "sm_90a"), ("tpu", "v5e:2x2")]


def facts(platform: str, chip: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.kernels.aot_quantized", platform, chip]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(fact := json.loads(line))["form"]: fact for line in out.splitlines()}


def test_what_is_read_of_hlo() -> None:
    wide = f"  %w = bf16[{aot_quantized.N},{aot_quantized.E}]{{1,0}} fusion(%a), kind=kLoop"
    entry = "ENTRY %main (a: s8[6144,1024]) -> bf16[16,6144] {"
    assert aot_quantized.written(f"{entry}\n{wide}\n}}") == [wide.strip()]
    fused = "%fused_computation (a: s8[6144,1024]) -> bf16[6144,1024] {"
    assert aot_quantized.written(f"{fused}\n{wide}\n}}\n{entry}\n  %a = bf16[16,6144] dot()") == []


def test_products_of_fp8_are_told_from_widened_ones() -> None:
    head = "%fused (a: f8e4m3fn[16,8], b: f8e4m3fn[4,8]) -> f32[16,4] {"
    product = "  ROOT %dot = f32[16,4]{1,0} dot(%a, %b)"
    assert aot_quantized.in_fp8(f"HloModule m\n\n{head}\n{product}\n}}\n") == 1
    widened = f"  %c = bf16[4,8] convert(%b)\n{product}"
    assert aot_quantized.in_fp8(f"{head}\n{widened}\n}}\n") == 0
    assert aot_quantized.in_fp8(f"{head.replace('f8e4m3fn[16', 'bf16[16')}\n{product}\n}}\n") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "chip"), CHIPS)
def test_no_weight_is_widened_in_memory(platform: str, chip: str) -> None:
    if reason := cannot_compile(platform):
        pytest.skip(reason)
    found = facts(platform, chip)
    print(found)
    assert found["control"]["written"] > 0, "what would be seen"
    for form in ("int8", "fp8", "int4", "fp8 in blocks", "int4 with zeros"):
        written = found[form]["written"]
        # A TPU writes the scales of blocks beside each other, in the memory of its core.
        assert written <= (platform == "tpu" and form == "fp8 in blocks"), form
        assert found[form]["temporaries"] < 2**20, form
        assert found[form]["in_fp8"] == 0, form
    if platform == "cuda":
        assert found["fp8 by fp8"]["in_fp8"] == 1 and found["fp8 by fp8"]["written"] == 0
        for form in ("mxfp4", "int8", "fp8", "int4"):
            xla = found[f"experts in {form}, tiles"]
            assert xla["loops"] == 1
            for way in ("mosaic_gpu", "triton"):
                ours = found[f"experts in {form}, {way}"]
                assert (ours["loops"], ours["written"]) == (0, 0), way
                assert ours["temporaries"] < xla["temporaries"], way
