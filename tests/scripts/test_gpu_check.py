"""scripts/gpu_check.sh in its dry mode: every part runs, writes its JSON, and ends in the table."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_dry_run(tmp_path: Path) -> None:
    environment = os.environ | {"DRY": "1", "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    command = ["bash", "scripts/gpu_check.sh", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    assert set(kernels["checks"]) == {"mosaic_gpu", "triton", "xla"}
    for name, checked in kernels["checks"].items():
        assert checked["passed"] > 0 and not checked["failed"], name
    assert all(isinstance(s, float) for times in kernels["times"].values() for s in times.values())
    engine = json.loads((tmp_path / "engine.json").read_text())
    assert all(record["output_tok_s"] > 0 for record in engine.values()) and set(engine) == {"auto", "xla"}
    report = (tmp_path / "report.txt").read_text()
    assert "of limit" in report and report.count("decode 2x40") == 3 and "engine auto" in report
    assert done.stdout.endswith(report)
