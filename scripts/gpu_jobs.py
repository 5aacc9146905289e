"""Jobs of gpu_check: each a process of its own that writes down what it finds, case by case.

A file of a job has a line {"begun": case} before each case and a line {"case": ..., ...} after it.
What the file has is not done again, so that a job which hung or crashed goes on after that case.
"""

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


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """What a job found, by case; the last word counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["case"]: record for record in records if "case" in record}


def unfinished(file: Path) -> str | None:
    """The case that had begun when the job ended, and did not end."""
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
    """A program that writes `file` by run_cases, and the seconds that it may take."""

    file: str
    command: Sequence[str]
    seconds: float


def run_job(job: Job, out: Path, deadline: float) -> None:
    """Run a job until it has done all its cases or its time is up, or `deadline` (of
    time.monotonic) is there. A case in which it died is noted, and it goes on after that.
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
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        dead = unfinished(file)
        if dead is not None:
            why = "out of time" if code is None else f"hung or crashed ({code})"
            write(file, {"case": dead, "error": why})
            print(f"{dead}: {why}", flush=True)
        elif code:
            write(file, {"case": "start", "error": f"exit status {code}"})
            print(f"{job.file}: exit status {code}", flush=True)
        if code == 0 or dead is None:
            return
