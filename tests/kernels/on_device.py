"""Every kernel compiled for the device at hand against the float64 reference, as a program.

    python -m tests.kernels.on_device --out FOLDER [--dry]

writes FOLDER/checks.json: for each implementation how many cases are right, which are wrong or not
taken and why, or why it cannot run. Exit status 1 if any is wrong. --dry: fewer and smaller cases,
XLA's implementation too, on any backend. scripts/gpu_check.sh runs it.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from kernels_pallas.paged_attention.cases import DECODE, GPU, PREFILL
from tests.kernels.suite import check

# XLA's own is held to the reference on any machine, so that a dry run has something to check.
IMPLEMENTATIONS = ("mosaic_gpu", "triton")
DRY = (*GPU, *DECODE, *PREFILL)[::9]


def hold(name: str, *, dry: bool) -> dict[str, Any]:
    """Every case that an implementation takes."""
    done: dict[str, Any] = {"passed": 0, "failed": {}, "unsupported": {}}
    try:
        implementation = importlib.import_module(f"kernels_pallas.paged_attention.{name}")
    except ImportError as e:
        return {"skipped": str(e)}
    for case in DRY if dry else GPU:
        for values in ("random", "coded"):
            try:
                check(implementation, case, values)
                done["passed"] += 1
            except NotImplementedError as e:
                done["unsupported"][case.name] = str(e)
            except Exception as e:  # a kernel that breaks must not hide what the others do
                said = (str(e).splitlines() or [""])[0][:200]
                done["failed"][f"{case.name} {values}"] = f"{type(e).__name__}: {said}"
    return done


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--dry", action="store_true", help="fewer cases, on any backend")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name in (*IMPLEMENTATIONS, "xla") if args.dry else IMPLEMENTATIONS:
        found[name] = hold(name, dry=args.dry)
        # Written as it grows: a run that is cut off keeps what it had.
        (args.out / "checks.json").write_text(json.dumps(found, indent=1))
    return int(any(done.get("failed") for done in found.values()))


if __name__ == "__main__":
    sys.exit(main())
