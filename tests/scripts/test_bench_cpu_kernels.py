"""scripts/bench_cpu_kernels.py: a run on small shapes, and where the kernels cannot run."""

import json
from pathlib import Path

import bench_cpu_kernels as bench
import pytest

from kernels_cpu.library import unavailable


@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WEIGHTS", [(96, 64)])
    monkeypatch.setattr(bench, "ROWS", (8,))
    monkeypatch.setattr(bench, "QUANTIZED_ROWS", (1,))
    monkeypatch.setattr(bench, "ATTENTION", [("60m", 2, 70, None), ("60m", 1, 65, 65)])
    monkeypatch.setattr(bench, "BYTES", 1 << 20)
    monkeypatch.setattr(bench, "EXPERTS", (4, 2, 64, 32))
    monkeypatch.setattr(bench, "EXPERT_ROWS", (8,))
    monkeypatch.setattr(bench, "DELTA", (1, 2, 32))
    monkeypatch.setattr(bench, "SCAN", (2, 1, 16, 16))
    monkeypatch.setattr(bench, "STATE_ROWS", ((64, 1), (1, 65)))
    monkeypatch.setattr(bench, "LONG", [((4, 2, 32), 1, 128)])
    assert bench.main(["--rounds", "2", "--json", str(tmp_path / "rows")]) == 0
    rows = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    steps, by_channel, chunks, _, scanned, _, product, decode, prefill, *rest = rows
    in_bf16, in_int8, experts, weights = rest
    assert (steps["gated delta"], chunks["gated delta"]) == ("64 x 1", "1 x 65")
    assert (by_channel["gated delta"], scanned["Mamba-2"]) == ("64 x 1 by channel", "64 x 1")
    assert steps["ratio"] == pytest.approx(steps["native_ms"] / steps["xla_ms"], rel=1e-4)
    assert steps["native_gb_s"] * steps["native_ms"] == pytest.approx(2 * 0.524288, rel=1e-3)
    assert (
        product["product"] == "[8, 64] . [96, 64]"
        and product["xla_gflops"] / product["native_gflops"] > 0
    )
    assert product["ratio"] == pytest.approx(
        product["xla_gflops"] / product["native_gflops"], rel=1e-4
    )
    assert weights["weights"] == "[1, 64] . [96, 64]" and weights["read_gb_s"] > 0
    assert weights["int8_ratio"] == pytest.approx(weights["bf16_ms"] / weights["int8_ms"], rel=1e-4)
    size = {"bf16": 2 * 96 * 64, "int8": 96 * 64 + 4 * 96, "int4": 96 * 32 + 4 * 96 * 2}
    for name, nbytes in size.items():
        assert weights[f"{name}_gb_s"] * weights[f"{name}_ms"] == pytest.approx(nbytes / 1e6, 1e-3)
    assert (decode["attention"], prefill["attention"]) == (
        "60m decode 2 x 70",
        "60m prefill 1 x 65",
    )
    assert decode["ratio"] == pytest.approx(decode["native_ms"] / decode["xla_ms"], rel=1e-4)
    assert in_bf16["decode"] == "bfloat16 K 2 G 2 D 32, 1 x 128"
    assert in_int8["decode"] == "int8 K 2 G 2 D 32, 1 x 128"
    for row, nbytes in ((in_bf16, 2 * 2 * 128 * 2 * 32), (in_int8, 2 * 128 * 2 * (32 + 4))):
        assert row["native_gb_s"] * row["native_ms"] == pytest.approx(nbytes / 1e6, rel=1e-3)
        assert row["share"] == pytest.approx(row["native_gb_s"] / row["read_gb_s"], rel=1e-3)
    assert experts["experts"] == "8 tokens, 4 of 4"
    assert experts["ratio"] == pytest.approx(experts["native_ms"] / experts["dense_ms"], rel=1e-4)
    assert experts["native_gb_s"] * experts["native_ms"] == pytest.approx(0.049152, rel=1e-3)
    printed = capsys.readouterr().out
    assert "[8, 64] . [96, 64]" in printed and f"{prefill['native_ms']:.2f}" in printed


def test_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "unavailable", lambda: "no compiler")
    assert bench.main([]) == 1 and "no compiler" in capsys.readouterr().err
