"""The programs of gpu_check that need jax to start anew.

    python scripts/gpu_programs.py JOB --out FOLDER [--dry | --list]

JOB: first (an engine with the defaults: what the allocator says before and after, the plan, cold
and warm start, sleep, wake beside other arrays), graphs (how often the graph of a decode step is
recorded again), sanitizer (two kernels under compute-sanitizer, where that is installed).

This program never touches the device. Its programs print a line of JSON at each stage, so that one
that is cut off has told what it knew.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _common as common
from _attention_cases import SANITIZED
from gpu_jobs import LAST_WAIT, Cases, Found, add_job_flags, run_chosen

ROOT = Path(__file__).resolve().parents[1]
# Shares of the 60 seconds that `first` has.
COLD_S, WARM_S = 36, 22
GRAPHS_S = 80
SANITIZER_S = 55
STEPS = 50  # decode steps whose graphs are counted
LIMITS = {"first": 60, "graphs": GRAPHS_S + 5, "sanitizer": SANITIZER_S + 5}
UPDATED = re.compile(r"Updated command buffer in (\d+)")
EXECUTED = "Execute command buffer on device"


@dataclasses.dataclass(frozen=True)
class Ended:
    """A program that has ended or was cut off. code: None where it was cut off."""

    code: int | None
    output: str
    errors: str

    @property
    def record(self) -> Found:
        """Return what its lines of JSON say together, and why it ended if that was not well."""
        lines = [line for line in self.output.splitlines() if line.startswith("{")]
        record: Found = {}
        for line in lines:
            record |= json.loads(line)
        if self.code is None:
            record["error"] = f"cut off after {[*record][-1] if record else 'nothing'}"
        elif self.code:
            last = (self.errors.strip().splitlines() or [""])[-1]
            record["error"] = f"exit status {self.code}: {last[:200]}"
        return record


def run_program(
    command: list[str], seconds: float, environment: Mapping[str, str | None] | None = None
) -> Ended:
    """Run a program for so many seconds. environment: variables to set; those that are None are
    removed. It is in this program's group, and so goes where that is killed.
    """
    changed = dict(os.environ)
    for name, value in (environment or {}).items():
        changed.pop(name, None)
        changed |= {} if value is None else {name: value}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=changed, **pipes)
    try:
        output, errors = process.communicate(timeout=seconds)
        return Ended(process.returncode, output, errors)
    except subprocess.TimeoutExpired:
        for pid in reversed(tree_of(process.pid)):  # a tool's program too
            os.kill(pid, signal.SIGKILL)
    try:
        return Ended(None, *process.communicate(timeout=LAST_WAIT))
    except subprocess.TimeoutExpired as e:  # it hangs in the driver
        return Ended(None, _text(e.stdout), _text(e.stderr))


def tree_of(pid: int) -> list[int]:
    """Return a process and all that it has started, parents first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        children = []
    return [pid, *itertools.chain.from_iterable(tree_of(int(child)) for child in children)]


def _text(x: str | bytes | None) -> str:
    return x.decode() if isinstance(x, bytes) else x or ""


def program(name: str, dry: bool, *more: str) -> list[str]:
    flags = [name, *more, "--began", str(time.time()), *(["--dry"] if dry else [])]
    return [sys.executable, str(ROOT / "scripts" / "gpu_engine.py"), *flags]


def first(out: Path, dry: bool) -> Cases:
    """Return what starts an engine with nothing set that a user would not set: the variables that
    gpu_check sets for its own jobs are removed.
    """
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": None}
    cache = ("--cache", str(out / "compiled"))

    def cold() -> Found:
        shutil.rmtree(out / "compiled", ignore_errors=True)
        slow = 10 if dry else 1
        return run_program(program("start", dry, *cache), COLD_S * slow, environment).record

    def warm() -> Found:
        slow = 10 if dry else 1
        command = program("start", dry, *cache, "--sleep")
        return run_program(command, WARM_S * slow, environment).record

    return {"cold start": cold, "warm start, sleep, wake": warm}


def graphs(out: Path, dry: bool) -> Cases:
    """Return what counts the graphs of decode steps: XLA's log says, at verbosity 3, when it
    records a graph again and when it launches one.
    """

    def count() -> Found:
        environment = {
            "TF_CPP_VMODULE": "command_buffer_thunk=3",
            "TF_CPP_MIN_LOG_LEVEL": "0",
        }
        ended = run_program(
            program("steps", dry, "--steps", str(STEPS)), GRAPHS_S * (10 if dry else 1), environment
        )
        record = ended.record
        if "error" not in record and not dry and EXECUTED not in ended.errors:
            record["error"] = "XLA has logged no graph: it ran none, or logs other words"
        return record | counted(ended.errors)

    return {f"{STEPS} decode steps": count}


def counted(log: str) -> Found:
    """Return how often graphs were launched and recorded again, by XLA's log; `late_updates` are
    those of the second half of the launches, where there should be none.
    """
    lines = log.splitlines()
    launches = [i for i, line in enumerate(lines) if EXECUTED in line]
    updates = [(i, int(m[1])) for i, line in enumerate(lines) if (m := UPDATED.search(line))]
    middle = launches[len(launches) // 2] if launches else 0
    return {
        "launches": len(launches),
        "updates": len(updates),
        "late_updates": sum(i > middle for i, _ in updates),
        "update_us": sum(us for _, us in updates),
    }


def sanitizer(out: Path, dry: bool) -> Cases:
    """Return what runs each kernel's case in a program of its own under compute-sanitizer; with
    --dry it runs without the tool.
    """
    tool = shutil.which("compute-sanitizer")

    def check(kind: str, case: str) -> Found:
        if tool is None and not dry:
            raise NotImplementedError("compute-sanitizer is not installed")
        phase = case.partition("_")[0]
        folder = out / f"sanitizer_{kind}_{phase}"
        shutil.rmtree(folder, ignore_errors=True)  # what a file has is not done again
        command = [sys.executable, "-m", "tests.kernels.on_device", "mosaic_gpu", phase]
        command += [
            "--out",
            str(folder),
            "--only",
            f"mosaic_gpu {case}",
            *(["--dry"] if dry else []),
        ]
        under = [] if dry or tool is None else [tool, "--tool", kind, "--error-exitcode", "9"]
        ended = run_program([*under, *command], SANITIZER_S * (10 if dry else 1))
        said = [line for line in ended.output.splitlines() if "ERROR SUMMARY" in line]
        record = {"summary": said[-1].strip("= ")} if said else {}
        if ended.code != 0:
            return record | {"error": ended.record["error"]}
        return record | {"right": True}

    kinds = ("memcheck", "synccheck")
    pairs = zip(kinds, SANITIZED, strict=True)
    return {f"{kind} {case}": functools.partial(check, kind, case) for kind, case in pairs}


JOBS = {"first": first, "graphs": graphs, "sanitizer": sanitizer}


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("gpu_programs", __doc__)
    add_job_flags(parser, JOBS)
    args = parser.parse_args(argv)
    cases = JOBS[args.job](args.out, args.dry)
    run_chosen(args, args.job, cases, LIMITS[args.job])
    return 0


if __name__ == "__main__":
    sys.exit(main())
