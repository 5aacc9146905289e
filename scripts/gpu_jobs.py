"""The jobs of gpu_check. Each is a process of its own that writes down what it finds, case by case.

A file of a job has a line {"begun": case} before each case and a line {"case": ..., ...} after it.
What the file has is not done again, so that a job which hung or crashed goes on after that case.
"""

import argparse
import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]
Cases = Mapping[str, Callable[[], Found]]
OUTSIDE = "outside of its cases"  # where a job ends that has begun none, or ended all it began
LAST_WAIT = 20  # seconds for a killed process to go: one that hangs in a driver never does


def add_job_flags(parser: argparse.ArgumentParser, jobs: Mapping[str, Any]) -> None:
    """Add the flags of a program with several jobs."""
    parser.add_argument("job", choices=jobs)
    add_case_flags(parser)


def add_case_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every program of a job has."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on any backend")
    parser.add_argument("--only", nargs="+", help="run only the cases of these names")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and end")


def run_chosen(args: argparse.Namespace, name: str, cases: Cases, limit: float) -> None:
    """Run the cases that the flags choose into FOLDER/NAME.jsonl, each for `limit` seconds at most,
    and for ten times that where --dry interprets them; or list them.
    """
    if args.only is not None:
        if unknown := set(args.only) - set(cases):
            raise SystemExit(f"--only {' '.join(sorted(unknown))}: no such case of {name}")
        cases = {key: run for key, run in cases.items() if key in args.only}
    if args.list:
        print(*cases, sep="\n")
        return
    run_cases(args.out / f"{name}.jsonl", cases, limit=limit * (10 if args.dry else 1))


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return what a job found, by case. Where a case has several lines, the last one counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["case"]: record for record in records if "case" in record}


def unfinished(file: Path) -> str | None:
    """Return the case that was running when the job ended; None if there is none."""
    lines = file.read_text().splitlines() if file.exists() else []
    last = json.loads(lines[-1]) if lines else {}
    return last.get("begun")


def write(file: Path, record: Mapping[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")


def run_cases(
    file: Path,
    cases: Mapping[str, Callable[[], dict[str, Any]]],
    *,
    limit: float,
    shown: Callable[[dict[str, Any]], str] = json.dumps,
) -> None:
    """Run the cases that the file lacks, in order, and print each as `shown`. One that takes longer
    than `limit` seconds ends the process.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    done = read(file)
    for name, run in cases.items():
        if name in done:
            continue
        write(file, {"begun": name})
        faulthandler.dump_traceback_later(limit, exit=True)
        began = time.perf_counter()
        try:
            record = run()
        except NotImplementedError as e:
            record = {"not_taken": str(e)}
        except Exception as e:  # the others are worth having
            record = {"error": reason(e)}
        faulthandler.cancel_dump_traceback_later()
        record = {"case": name, **record, "took_s": round(time.perf_counter() - began, 2)}
        write(file, record)
        print(shown(record), flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A program that writes `file` by run_cases, with the seconds that it may take."""

    file: str
    command: Sequence[str]
    seconds: float


def run_job(
    job: Job,
    out: Path,
    deadline: float,
    what_is_wrong: Callable[[float], str | None] | None = None,
) -> bool:
    """Run a job until it has done all its cases or its time is up, or `deadline` (of
    time.monotonic) is there. A case in which it died is noted, and it goes on after that.

    what_is_wrong: called with the seconds left after a case has died or the job had to be killed;
    returns what is wrong with the device, None where nothing is. Return whether the device may be
    used further.
    """
    file = out / job.file
    end = min(time.monotonic() + job.seconds, deadline)
    while (left := end - time.monotonic()) > 0:
        process = subprocess.Popen([*job.command], start_new_session=True)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also where this process is told to end
            has_gone = end_process(process)
        dead = unfinished(file)
        if dead is not None:
            why = "out of time" if code is None else f"hung or crashed ({code})"
            write(file, {"case": dead, "error": why})
            print(f"{dead}: {why}", flush=True)
        elif code != 0:
            why = "out of time" if code is None else f"exit status {code}"
            write(file, {"case": OUTSIDE, "error": why})
            print(f"{job.file}: {why} {OUTSIDE}", flush=True)
        elif OUTSIDE in read(file):
            write(file, {"case": OUTSIDE})  # it has run through now
        if not has_gone:
            write(file, {"case": "end", "error": "it outlived SIGKILL: the card is suspect"})
            return False
        if (dead is not None or code is None) and what_is_wrong is not None:
            left = max(deadline - time.monotonic(), 1)
            if (fault := what_is_wrong(left)) is not None:
                write(file, {"case": "device", "error": fault})
                print(f"the device is not well: {fault}", flush=True)
                return False
        if dead is None:
            break
    return True


def run_limited(command: Sequence[str], seconds: float) -> int | str:
    """Run a command that says nothing of use; return its exit status, or why there is none."""
    try:
        process = subprocess.Popen([*command], start_new_session=True)
    except OSError as e:
        return reason(e)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        has_gone = end_process(process)
        return f"not done after {seconds:.0f} s" + ("" if has_gone else ", nor killed")


def end_process(process: subprocess.Popen[Any], seconds: float = LAST_WAIT) -> bool:
    """Kill a process and its group if it still runs, and wait for it; return whether it has
    gone.
    """
    if process.poll() is not None:
        return True
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
