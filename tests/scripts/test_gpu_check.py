"""scripts/gpu_check.sh in its dry mode: every part runs, writes its JSON, and ends in the table;
and the other implementations that it times do the same work as ours.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _common as common
import gpu_check
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention.cases import BENCH, BENCH_DRY, Case
from tests.kernels import aot_cuda, on_device
from tests.kernels.suite import Inputs, call
from tests.tiny import CONFIG

ROOT = Path(__file__).resolve().parents[2]
DECODE, FRESH, CACHED = BENCH_DRY
deprecated = pytest.mark.filterwarnings(
    "ignore:.*(paged_attention is|Triton backend is) deprecated"
)


STUB = """#!/bin/sh
echo "$@" >> "$CALLS"
test "$2" != report || echo a table
test "$2" != peers
"""


def test_every_part_is_called_whatever_the_others_do(tmp_path: Path) -> None:
    """A Python that notes its calls stands in; its peers fail."""
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(STUB)
    python.chmod(0o755)
    out.mkdir()
    environment = os.environ | {"DRY": "1", "PYTHON": str(python), "CALLS": str(calls)}
    command = ["bash", "scripts/gpu_check.sh", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "peers: failed (1)" in done.stdout
    check, checks = "scripts/gpu_check.py", "-m tests.kernels.on_device"
    parts = [f"{check} torch", checks, *(f"{check} {x}" for x in ("kernels", "peers", "engine"))]
    assert calls.read_text().splitlines() == [
        *(f"{part} --out {out} --dry" for part in parts),
        f"{check} report --out {out}",
    ]
    assert (out / "report.txt").read_text() == "a table\n" and done.stdout.endswith("a table\n")


def check_parts(out: Path, names: set[str]) -> None:
    """What a dry run writes, with these implementations."""
    parts = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    assert parts.keys() == {"checks", *gpu_check.PARTS} and set(parts["checks"]) == names
    for name, checked in parts["checks"].items():
        assert checked["passed"] > 0 and not checked["failed"], name
    for times in parts["kernels"]["times"].values():
        assert times.keys() == names and all(isinstance(s, float) for s in times.values())
    peers = parts["peers"]["times"]
    for case, peer in ((DECODE, "jax_triton"), (DECODE, "cudnn"), (FRESH, "cudnn")):
        assert isinstance(peers[case.name][peer], float), peers
    assert "decode alone" in peers[FRESH.name]["jax_triton"]
    assert "cached prefix" in peers[CACHED.name]["cudnn"]
    # A reason: only CUDA has it.
    assert all(isinstance(peers[case.name]["cudnn_paged"], str) for case in BENCH_DRY)
    assert all(record["output_tok_s"] > 0 for record in parts["engine"].values())
    assert set(parts["engine"]) == {"auto", "xla"}
    report = gpu_check.report_part(out)
    assert "of limit" in report and report.count("decode 2x40") == len(names) + 4
    assert "engine auto" in report


@deprecated
@pytest.mark.usefixtures("few_shapes")
def test_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part, as in programs of their own: no strict promotion. Without the Mosaic kernels,
    which take longest to interpret.
    """
    cases = {case.queries is None: case for case in on_device.DRY}
    monkeypatch.setattr(on_device, "DRY", tuple(cases.values()))
    monkeypatch.setattr(on_device, "IMPLEMENTATIONS", ("triton",))
    monkeypatch.setattr(gpu_check, "IMPLEMENTATIONS", ("triton", "xla"))
    monkeypatch.setitem(common.MODELS, "tiny", CONFIG)
    flags = ["--out", str(tmp_path), "--dry"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert on_device.main(flags) == 0
        for part in gpu_check.PARTS:
            assert gpu_check.main([part, *flags]) == 0
    check_parts(tmp_path, {"triton", "xla"})


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path: Path) -> None:
    environment = os.environ | {"DRY": "1", "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    command = ["bash", "scripts/gpu_check.sh", str(tmp_path)]
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=600, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    check_parts(tmp_path, {"mosaic_gpu", "triton", "xla"})
    report = (tmp_path / "report.txt").read_text()
    assert report == gpu_check.report_part(tmp_path) + "\n" and done.stdout.endswith(report)


def test_report_of_what_is_there(tmp_path: Path) -> None:
    """A wrong kernel is named; a part that never ran is left out."""
    checks = {"triton": {"passed": 1, "failed": {"case random": "AssertionError: "}}}
    (tmp_path / "checks.json").write_text(json.dumps(checks))
    marks = {"device": "card", "jax": "1", "copy_gb_s": 1e3, "matmul_tflop_s": 1.0}
    seconds = gpu_check.moved_bytes(DECODE) / 500e9
    times = {"mosaic_gpu": seconds, "triton": "ValueError: no"}
    kernels = marks | {"times": {DECODE.name: times}}
    (tmp_path / "kernels.json").write_text(json.dumps(kernels))
    peers = {"times": {DECODE.name: {"cudnn": seconds / 2, "jax_triton": "no"}}}
    (tmp_path / "peers.json").write_text(json.dumps(peers))
    report = gpu_check.report_part(tmp_path)
    assert "triton      1 right, 1 wrong, 0 cases not taken\n  WRONG case random: Asser" in report
    lines = [line.split() for line in report.splitlines() if line.startswith(DECODE.name)]
    ours, refused, sdpa, cudnn, _ = (line[len(DECODE.name.split()) :] for line in lines)
    assert (ours[0], ours[2], ours[-3:]) == ("mosaic_gpu", "500", ["50.0%", "50.0%", "cudnn"])
    assert refused[-2:] == ["ValueError:", "no"] and sdpa[-2:] == ["not", "timed"]
    assert cudnn[-1] == "100.0%" and "engine" not in report


@deprecated
@pytest.mark.parametrize(
    ("peer", "case"), [("jax_triton", DECODE), ("cudnn", DECODE), ("cudnn", FRESH)]
)
def test_peers_compute_the_same(peer: str, case: Case) -> None:
    """Within twice the reference's own error, from the same keys and values; cuDNN's place is taken
    by XLA.
    """
    rows, K, D, P = len(case.contexts), case.K, case.D, case.P
    S = -(-case.contexts[0] // P) * P
    k, v = jax.random.normal(jax.random.key(0), (2, rows, S, K, D), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (sum(case.query_lens), case.H, D), jnp.bfloat16)
    pool = np.stack([k, v], axis=3).reshape(-1, P, 2 * K, D)
    starts = None if case.queries is None else np.cumsum([0, *case.queries])
    table = np.arange(len(pool)).reshape(rows, -1)
    inputs = Inputs(np.asarray(q), pool, 0, table, np.asarray(case.contexts), starts)
    exact = call(reference, case, inputs, exact=True)
    function, arrays = gpu_check.PEERS[peer](case, k, v, True)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention counts on it
        result = function(q, *arrays)
    error, own = (
        np.abs(np.asarray(o, np.float64) - exact).max()
        for o in (result, call(reference, case, inputs))
    )
    assert 0 < own < 0.02 and error <= 2 * own


TIMED = [
    DECODE,
    FRESH,
    *(case for case in BENCH if "x2048" in case.name and case.query_lens[0] in (1, 2048)),
]


@deprecated
@pytest.mark.parametrize("case", TIMED, ids=str)
@pytest.mark.parametrize("peer", gpu_check.PEERS)
def test_peers_lower_for_cuda(peer: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments made for them; cuDNN's version is asked of a library that is not there."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    S = -(-case.contexts[0] // case.P) * case.P
    shapes = [
        (sum(case.query_lens), case.H, case.D),
        *[(len(case.contexts), S, case.K, case.D)] * 2,
    ]

    def run(q: Any, k: Any, v: Any) -> Any:
        function, arrays = gpu_check.PEERS[peer](case, k, v, False)
        return function(q, *arrays)

    if peer == "jax_triton" and case.queries is not None:
        with pytest.raises(NotImplementedError, match="decode alone"):
            run(*(jnp.zeros((1, 1, 1, 1)) for _ in range(3)))
        return
    text = aot_cuda.lower(run, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert ("triton" if peer == "jax_triton" else "__cudnn$fmhaSoftmax") in text


def test_bytes_and_operations() -> None:
    """Of one row of 3 tokens, 2 of them queries, which see 2 and 3."""
    case = dataclasses.replace(FRESH, contexts=(3,), queries=(2,), H=4, K=2, D=8)
    assert gpu_check.moved_bytes(case) == 2 * (3 * 2 * 2 * 8 + 2 * 2 * 4 * 8)
    assert gpu_check.flops(case) == 4 * 5 * 4 * 8


def test_a_wrong_kernel_fails_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "GPU", (DECODE,))

    def check(implementation: Any, case: Case, values: str) -> None:
        if implementation.__name__.endswith("triton"):
            raise NotImplementedError("not this one")
        assert values == "random"

    monkeypatch.setattr(on_device, "check", check)
    assert on_device.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "checks.json").read_text())
    assert found["triton"] == {
        "passed": 0,
        "failed": {},
        "unsupported": {DECODE.name: "not this one"},
    }
    assert found["mosaic_gpu"]["passed"] == 1
    assert list(found["mosaic_gpu"]["failed"]) == [f"{DECODE.name} coded"]
