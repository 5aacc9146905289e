"""scripts/profile_step.py: a run on a tiny random model, the reading of HLO, and the sharing out of
time.
"""

import re

import profile_step
import pytest


@pytest.mark.usefixtures("few_shapes")
def test_run(random_folder, capsys, tmp_path):
    small = f"--random {random_folder} --rows 8 --context 20 --steps 2 --phase both --ops 3"
    small += " --max-model-len 64 --block-size 4 --num-blocks 200"
    assert profile_step.main([*small.split(), "--trace", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for phase in ("prefill", "decode"):
        table = printed.split(f"{phase}: ")[1].split("\n\n")
        assert re.match(r"\d+\.\d\d ms a step, \d+ page faults, untraced \(2 steps\)", table[0])
        shares = {
            line.split()[0]: float(line.split()[-1][:-1])
            for line in table[1].splitlines()[1:]
            if line[0] != " "
        }
        assert {"attention/paged_attention", "mlp", "(no"} < shares.keys()
        assert sum(shares.values()) == pytest.approx(200, abs=1)  # all the scopes, and "all"
        # qkv, once in each of two layers; the last layer's others have fewer rows in a prefill.
        assert re.search(r"bf16\[\d+, 32\] . bf16\[128, 32\] +2 ", table[2])
    assert "GB/s in a plain read" in printed
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_arguments(capsys):
    for wrong in ([], ["folder", "--random", "tiny"], ["--random", "tiny", "--phase", "both!"]):
        with pytest.raises(SystemExit):
            profile_step.parse_args(wrong)
    capsys.readouterr()


def test_parse_hlo():
    ops = profile_step.parse_hlo(
        """HloModule jit_step

%inside (p0: bf16[8,64], p1: bf16[32,64]) -> f32[8,32] {
  %p0 = bf16[8,64]{1,0} parameter(0)
  %p1 = bf16[32,64]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (x: bf16[8,64], w: bf16[32,64]) -> (f32[8,32], s32[]) {
  %x = bf16[8,64]{1,0} parameter(0), metadata={op_name="x"}
  %w = bf16[32,64]{1,0} parameter(1)
  %fused = f32[8,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%inside, FUSED
  %copy.2 = f32[8,32]{1,0} copy(%fused)
  ROOT %loop = (f32[8,32]{1,0}, s32[]) while(%copy.2), body=%b, metadata={op_name="jit(f)/while"}
}
""".replace("FUSED", 'metadata={op_name="jit(f)/mlp/while/body/up/dot"}')
    )
    assert ops["fused"].scope == "mlp/up"
    assert ops["fused"].matmul == profile_step.Matmul(
        operands="bf16[8, 64] . bf16[32, 64]", flops=2 * 8 * 32 * 64, weight_bytes=32 * 64 * 2
    )
    assert (ops["copy.2"].scope, ops["loop"].scope, ops["loop"].opcode) == (
        "(unnamed)",
        "(step)",
        "while",
    )


def test_wall_shares():
    events = [
        profile_step.Event(start, end, "op", ("", ""))
        for start, end in ((0, 10), (5, 20), (30, 40))
    ]
    assert profile_step.wall_shares(events) == ([7.5, 12.5, 10], 10)
