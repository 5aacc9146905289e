"""Check, then time, what there is for the GPU at hand. Each of the seven calls is of use alone.

    python scripts/gpu_check.py marks FOLDER      # 5 minutes: an engine with the defaults, copy
                                                  # bandwidth and matmul rate, every kernel against
                                                  # a float64 reference, the first rates
    python scripts/gpu_check.py kernels FOLDER    # 8 minutes: kernels timed, and what else there is
    python scripts/gpu_check.py engine FOLDER     # 9 minutes: nano-vllm's workload end to end
    python scripts/gpu_check.py programs FOLDER   # 4 minutes: graphs that are recorded again, two
                                                  # kernels under compute-sanitizer
    python scripts/gpu_check.py quantised FOLDER  # 9 minutes: the same in 8 and 4 bits
    python scripts/gpu_check.py adapters FOLDER   # 2 minutes: ways to add adapters to a product
    python scripts/gpu_check.py states FOLDER     # 8 minutes: layers that keep a state or latents,
                                                  # and Triton's checks that `marks` cut off
    python scripts/gpu_check.py report FOLDER     # the table of what FOLDER has

Each ends in the table of all that FOLDER has so far, also where it is cut off by SIGTERM; records
are printed and written one by one. A kernel that hangs or crashes loses its own case: each
implementation and phase is a process with a time of its own (see gpu_jobs.py). After a case that
hung or crashed the card is tried, and the call ends where it does not compute any more. A call with
the same FOLDER goes on where the last one ended. --dry: tiny shapes on any backend, kernels
interpreted.

A decode call must read its context's keys and values once, a prefill must do 4 * D operations for
each query head and visible token: over the copy bandwidth and matmul rate that `marks` measured,
these make the shares. What may lie in L2 has no share. Exit status 1 where a kernel is wrong.
"""

import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _common as common
from _attention_cases import BENCH, BENCH_DRY, Case
from gpu_jobs import Job, read, run_job, run_limited
from gpu_seconds import COLUMNS

SECONDS = {
    "marks": 300,
    "kernels": 470,
    "engine": 560,
    "quantised": 560,
    "adapters": 120,
    "programs": 240,
    "states": 450,
}
# Of what: the least share, and of which ceiling.
GOALS = {
    "decode 128x2048 G2 D128 P64": (0.90, "copy bandwidth"),
    "fresh 1x8192 G2 D128 P64": (0.75, "matmul rate"),
}
ENGINE_GOAL = 0.75  # of the time that weights and KV take at copy bandwidth
PEERS = ("peers_jax", "peers_torch")
PROGRAMS = ("first", "graphs", "sanitizer")
OF_ALLOCATOR = ("bytes_limit", "bytes_in_use", "pool_bytes", "largest_free_block_bytes")


def jobs(part: str, out: Path, dry: bool) -> list[Job]:
    """Return the jobs of a part, in the order in which they run."""
    flags = ["--out", str(out), *(["--dry"] if dry else [])]
    slow = 10 if dry else 1  # what is interpreted

    def timed(name: str, seconds: float, script: str = "gpu_timed.py") -> Job:
        return Job(
            file=f"{name}.jsonl",
            command=(sys.executable, str(Path(__file__).with_name(script)), name, *flags),
            seconds=seconds * slow,
        )

    def checked(name: str, phase: str, seconds: float) -> Job:
        return Job(
            file=f"checks_{name}_{phase}.jsonl",
            command=(sys.executable, "-m", "tests.kernels.on_device", name, phase, *flags),
            seconds=seconds * slow,
        )

    if part == "marks":
        return [
            timed("first", 60, "gpu_programs.py"),
            timed("marks", 25),
            checked("mosaic_gpu", "decode", 65),
            checked("mosaic_gpu", "prefill", 60),
            timed("rates", 40),
            checked("triton", "decode", 25),
            checked("triton", "prefill", 25),
        ]
    if part == "programs":
        return [timed("graphs", 100, "gpu_programs.py"), timed("sanitizer", 140, "gpu_programs.py")]
    if part == "states":  # latents are Triton's on every card
        checks = [checked("triton", phase, 100) for phase in ("decode", "prefill")]
        return [timed("states", 250), *checks]
    if part == "kernels":
        return [timed("kernels", 260), timed("peers_jax", 100), timed("peers_torch", 110)]
    return [timed(part, SECONDS[part])]


def what_is_wrong(seconds: float) -> str | None:
    """Return what is wrong with the card after a case has hung or crashed; None where its driver
    answers and it computes, within so many seconds.
    """
    if shutil.which("nvidia-smi") is not None:
        status = run_limited(["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv"], 10)
        if status != 0:
            return f"nvidia-smi: {status}"
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).with_name("gpu_timed.py"))
        command = [sys.executable, script, "health", "--out", folder]
        status = run_limited(command, min(seconds, 40))
        record = read(Path(folder) / "health.jsonl").get("compute", {})
    return None if record.get("right") else f"it does not compute: {record.get('error', status)}"


# ---- table ----


def moved_bytes(case: Case) -> int:
    """Return what a call must move: the context's keys and values, queries and results."""
    of_a_vector = 2 * case.D if case.kv_dtype is None else case.D + 4  # with its scale
    kept = 2 * case.K * of_a_vector * sum(case.contexts)
    return kept + 4 * case.D * case.H * sum(case.query_lens)


def flops(case: Case) -> int:
    pairs = zip(case.contexts, case.query_lens, strict=True)
    return 4 * sum(n * q - q * (q - 1) // 2 for n, q in pairs) * case.H * case.D


def report(out: Path) -> str:
    """Return the tables and lines of all that a folder has."""
    jobs = {file.stem: read(file) for file in sorted(out.glob("*.jsonl"))}
    marks = jobs.get("marks", {})
    limits = {
        "copy": marks.get("copy", {}).get("gb_s", math.nan),
        "matmul": marks.get("matmul", {}).get("tflop_s", math.nan),
    }
    copy = marks.get("copy", {})
    lines = [f"device {copy.get('device')}, jax {copy.get('jax')}"]
    for name, unit in (("copy", "GB/s"), ("matmul", "TFLOP/s")):
        seen = {k: v for k, v in marks.get(name, {}).items() if k in COLUMNS}
        told = "".join(f", {column} {common.number(value)}" for column, value in seen.items())
        lines.append(f"{name:<8}{limits[name]:10.1f} {unit}{told}")
    for job in PROGRAMS:
        lines += program_lines(job, jobs.get(job, {}))
    for name, records in jobs.items():
        if name.startswith("checks_"):
            lines += check_lines(name.removeprefix("checks_"), records)
    rows = kernel_rows(jobs, limits)
    heads = ["case", "by", "call us", "kernel us", "GB/s", "TFLOP/s", "share", "of best"]
    lines += common.aligned(heads, rows, left=2) if rows else []
    for job in ("engine", "quantised", "adapters", "states"):
        lines += engine_lines(job, jobs.get(job, {}), limits["copy"])
    return "\n".join(lines)


def program_lines(job: str, records: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each case with its figures; an allocator's are those that bound a pool."""
    lines = []
    for name, record in records.items():
        told = []
        for key, value in record.items():
            if isinstance(value, dict):
                kept = {k: f"{value[k] / 1e9:.2f} GB" for k in OF_ALLOCATOR if k in value}
                told += (
                    [f"{key}: " + ", ".join(f"{k} {v}" for k, v in kept.items())] if kept else []
                )
            elif key not in ("case", "error"):
                told.append(f"{key} {common.number(value) if isinstance(value, float) else value}")
        told += [f"ERROR {record['error']}"] if "error" in record else []
        lines.append(
            "\n    ".join(
                [f"{job} {name}", *told, *[record[k] for k in ("not_taken",) if k in record]]
            )
        )
    return lines


def check_lines(name: str, records: dict[str, dict[str, Any]]) -> list[str]:
    right = sum("right" in record for record in records.values())
    bad = {case: r for case, r in records.items() if "wrong" in r or "error" in r}
    untaken = sum("not_taken" in record for record in records.values())
    lines = [f"{name:<20}{right} right, {len(bad)} wrong, {untaken} not taken"]
    return lines + [
        f"  WRONG {case}: {r.get('wrong') or r.get('error')}" for case, r in bad.items()
    ]


def kernel_rows(jobs: dict[str, Any], limits: dict[str, float]) -> list[list[str]]:
    rows = []
    records = {
        key: r for job in ("rates", "kernels", *PEERS) for key, r in jobs.get(job, {}).items()
    }
    for case in (*BENCH, *BENCH_DRY):
        mine = {k.split(" | ")[1]: r for k, r in records.items() if k.split(" | ")[0] == case.name}
        timed = [*jobs.get("rates", {}), *jobs.get("kernels", {})]
        ours = {k.split(" | ")[1] for k in timed if k.split(" | ")[0] == case.name}
        others = [r["seconds"] for by, r in mine.items() if by not in ours and "seconds" in r]
        for by, record in mine.items():
            best = f"{min(others) / record['seconds']:.0%}" if others and by in ours else ""
            best = best if "seconds" in record else ""
            rows.append([case.name, by, *case_cells(case, record, limits), best])
            if by == "mosaic_gpu" and case.name in GOALS and "seconds" in record:
                goal, ceiling = GOALS[case.name]
                rows[-1][-1] += f"  goal {goal:.0%} of {ceiling}"
    return rows


def case_cells(case: Case, record: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """Return the cells from "call us" to "share". The share is that of the kernel's own time where
    that is known.
    """
    if "seconds" not in record:
        return ["-", "-", "-", "-", record.get("not_taken") or record.get("error", "")]
    seconds, inside = record["seconds"], record.get("kernel_seconds")
    used = inside or seconds
    gb_s, tflop_s = moved_bytes(case) / used / 1e9, flops(case) / used / 1e12
    share = gb_s / limits["copy"] if case.queries is None else tflop_s / limits["matmul"]
    told = "-" if case.queries is None and record.get("fits_l2") else f"{share:.1%}"
    inside_us = "-" if inside is None else f"{inside * 1e6:.1f}"
    return [f"{seconds * 1e6:.1f}", inside_us, f"{gb_s:.0f}", f"{tflop_s:.1f}", told]


def engine_lines(job: str, records: dict[str, dict[str, Any]], copy_gb_s: float) -> list[str]:
    lines = []
    for name, record in records.items():
        told = [f"{job} {name}: took {record.get('took_s', math.nan):.1f} s"]
        told += [f"{k} {common.number(v)}" for k, v in record.items() if isinstance(v, float | int)]
        if "read_bytes" in record and job == "engine":  # of bf16
            share = record["read_bytes"] / (copy_gb_s * 1e9) / record["best_s"]
            told.append(
                f"{share:.1%} of copy bandwidth over weights and KV, goal {ENGINE_GOAL:.0%}"
            )
        told += [record[k] for k in ("wrong", "error") if k in record]
        lines.append("\n    ".join(told))
    return lines


def is_wrong(out: Path) -> bool:
    """Return whether a check has failed, a job could not start, or the card is not well."""
    kinds = ("checks_*", "sanitizer", "first", "states")
    files = [file for kind in kinds for file in out.glob(f"{kind}.jsonl")]
    records = [r for file in files for r in read(file).values()]
    records += [r for file in out.glob("*.jsonl") for r in [read(file).get("device")] if r]
    return any("wrong" in record or "error" in record for record in records)


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("gpu_check", __doc__)
    add = parser.add_argument
    add("part", choices=[*SECONDS, "report"])
    add("folder", type=Path, help="of the JSON files")
    add("--dry", action="store_true", help="tiny shapes, on any backend")
    args = parser.parse_args(argv)
    out = args.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    root = str(Path(__file__).resolve().parents[1])
    os.chdir(root)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}

    def stop(*_: Any) -> None:
        raise SystemExit(143)  # through the `finally` below

    signal.signal(signal.SIGTERM, stop)
    try:
        if args.part != "report":
            deadline = time.monotonic() + SECONDS[args.part] * (10 if args.dry else 1)
            for job in jobs(args.part, out, args.dry):
                print(f"== {job.file}", flush=True)
                if not run_job(job, out, deadline, what_is_wrong):
                    break
    finally:
        table = report(out)
        (out / "report.txt").write_text(table + "\n")
        print(table, flush=True)
    return int(is_wrong(out))


if __name__ == "__main__":
    sys.exit(main())
