"""scripts/gpu_check.sh in its dry mode: every part runs, writes its JSON, and ends in the table;
and the other implementations that it times do the same work as ours.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import _common as common
import gpu_check
import gpu_jobs
import gpu_programs
import gpu_seconds
import gpu_states
import gpu_timed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention_cases import BENCH, BENCH_DRY, GPU, IN_TILES, SCALED, Case
from _state_calls import TINY, calls
from jax._src.cudnn import fused_attention_stablehlo

from kernels_pallas.paged_attention import mosaic_gpu, reference
from tests.kernels import aot_cuda, on_device
from tests.kernels.suite import Inputs, call, check
from tests.tiny import CONFIG

ROOT = Path(__file__).resolve().parents[2]
DECODE, FRESH, CACHED = BENCH_DRY
deprecated = pytest.mark.filterwarnings(
    "ignore:.*(paged_attention is|Triton backend is) deprecated"
)


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
    function, arrays = gpu_timed.JAX_PEERS[peer](case, k, v, True)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention counts on it
        result = function(q, *arrays)
    error, own = (
        np.abs(np.asarray(o, np.float64) - exact).max()
        for o in (result, call(reference, case, inputs))
    )
    assert 0 < own < 0.02 and error <= 2 * own


PLAIN = [case for case in BENCH if case.kv_dtype is None and not case.sinks]
TIMED = [
    DECODE,
    FRESH,
    *(c for c in BENCH if "x2048" in c.name and c.query_lens[0] in (1, 2048) and c in PLAIN),
]


@deprecated
@pytest.mark.parametrize("case", TIMED, ids=str)
@pytest.mark.parametrize("peer", gpu_timed.JAX_PEERS)
def test_peers_lower_for_cuda(peer: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments made for them; cuDNN's version is asked of a library that is not there."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    S = -(-case.contexts[0] // case.P) * case.P
    shapes = [
        (sum(case.query_lens), case.H, case.D),
        *[(len(case.contexts), S, case.K, case.D)] * 2,
    ]

    def run(q: Any, k: Any, v: Any) -> Any:
        function, arrays = gpu_timed.JAX_PEERS[peer](case, k, v, False)
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
    scaled = dataclasses.replace(case, kv_dtype="int8")
    assert gpu_check.moved_bytes(scaled) == 3 * 2 * 2 * (8 + 4) + 2 * 2 * 2 * 4 * 8


def test_a_wrong_kernel_fails_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(DECODE, name="long")
    monkeypatch.setattr(on_device, "GPU", (DECODE,))
    monkeypatch.setattr(on_device, "DEVICE", (case,))
    monkeypatch.setattr(on_device, "DEVICE_IN_8_BITS", ())
    monkeypatch.setattr(on_device, "DEVICE_LATENTS", ())

    def check(implementation: Any, case: Case, values: str, **own: Any) -> None:
        if own == {"splits": 2}:
            raise NotImplementedError("not this one")
        assert values == "random" or own, "off"

    monkeypatch.setattr(on_device, "check", check)
    assert on_device.main(["triton", "decode", "--out", str(tmp_path)]) == 0
    found = gpu_jobs.read(tmp_path / "checks_triton_decode.jsonl")
    assert [*found] == [
        "triton long",
        "triton long splits=1",
        "triton long splits=2",
        f"triton {DECODE.name}",
        *(f"triton {case.name}" for case in (*SCALED, *IN_TILES) if "decode" in case.name),
    ]
    assert "coded: " in found["triton long"]["wrong"] and found["triton long splits=1"]["right"]
    assert found["triton long splits=2"]["not_taken"] == "not this one"
    assert gpu_check.is_wrong(tmp_path)
    assert "WRONG triton long: coded" in gpu_check.report(tmp_path)


def test_latents_are_checked_where_they_are_served() -> None:
    """And contexts are split where a kernel does that."""
    assert any("splits=" in case for case in on_device.checks("mosaic_gpu", "decode", dry=False))
    assert not any("splits=" in case for case in on_device.checks("tpu", "decode", dry=False))
    for name, expected in (("triton", 2 + 3 * 3), ("mosaic_gpu", 0), ("tpu", 2 + 3)):
        cases = {
            c for phase in ("decode", "prefill") for c in on_device.checks(name, phase, dry=False)
        }
        assert sum("latents" in case for case in cases) == expected


JOB = """
import os, sys, time
sys.path.insert(0, {scripts!r})
from pathlib import Path
from gpu_jobs import run_cases
def refuse(): raise NotImplementedError("never")
def fail(): raise ValueError("no")
cases = {{
    "good": lambda: {{"n": 1}}, "bad": fail, "refused": refuse, "dies": lambda: os._exit(7),
    "hangs": lambda: time.sleep(60), "last": lambda: {{"n": 2}},
}}
run_cases(Path({file!r}), cases, limit=1)
"""


def job(tmp_path: Path, seconds: float) -> gpu_jobs.Job:
    file = tmp_path / "job.jsonl"
    code = JOB.format(scripts=str(ROOT / "scripts"), file=str(file))
    return gpu_jobs.Job(file=file.name, command=(sys.executable, "-c", code), seconds=seconds)


def test_a_case_that_hangs_or_crashes_loses_itself_alone(tmp_path: Path) -> None:
    gpu_jobs.run_job(job(tmp_path, 60), tmp_path, time.monotonic() + 60)
    found = gpu_jobs.read(tmp_path / "job.jsonl")
    assert found["good"]["n"] == 1 and found["last"]["n"] == 2
    assert found["bad"]["error"] == "ValueError: no" and found["refused"]["not_taken"] == "never"
    assert found["dies"]["error"] == "hung or crashed (7)"
    assert found["hangs"]["error"] == "hung or crashed (1)"
    size = (tmp_path / "job.jsonl").stat().st_size
    gpu_jobs.run_job(job(tmp_path, 60), tmp_path, time.monotonic() + 60)  # all is there
    assert (tmp_path / "job.jsonl").stat().st_size == size


def test_a_job_that_is_out_of_time_keeps_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "job.jsonl").write_text('{"case": "dies"}\n')
    code = job(tmp_path, 0).command[2].replace("limit=1", "limit=50")
    slow = gpu_jobs.Job(file="job.jsonl", command=(sys.executable, "-c", code), seconds=2)
    began = time.monotonic()
    gpu_jobs.run_job(slow, tmp_path, began + 60)
    assert time.monotonic() - began < 20
    found = gpu_jobs.read(tmp_path / "job.jsonl")
    assert found["good"]["n"] == 1 and found["hangs"]["error"] == "out of time"
    assert "last" not in found


def test_a_job_that_does_not_start_is_told(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import nothing_of_that_name")
    broken = gpu_jobs.Job(file="checks_x.jsonl", command=command, seconds=30)
    gpu_jobs.run_job(broken, tmp_path, time.monotonic() + 60)
    assert "WRONG outside of its cases: exit status 1" in gpu_check.report(tmp_path)


def test_a_job_that_hangs_before_its_first_case_is_told(tmp_path: Path) -> None:
    """As one does whose driver hangs at the start, and the card is tried. It is forgotten once the
    job runs through.
    """
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    hanging = gpu_jobs.Job(file="first.jsonl", command=sleeper, seconds=1)
    assert gpu_jobs.run_job(hanging, tmp_path, time.monotonic() + 60)
    assert "ERROR out of time" in gpu_check.report(tmp_path) and gpu_check.is_wrong(tmp_path)
    sick = gpu_jobs.run_job(hanging, tmp_path, time.monotonic() + 60, lambda left: "it hangs")
    assert not sick and gpu_jobs.read(tmp_path / "first.jsonl")["device"]["error"] == "it hangs"
    (tmp_path / "first.jsonl").write_text("")
    assert gpu_jobs.run_job(hanging, tmp_path, time.monotonic() + 60, lambda left: None)
    well = dataclasses.replace(hanging, command=(sys.executable, "-c", ""), seconds=60)
    assert gpu_jobs.run_job(well, tmp_path, time.monotonic() + 60)
    assert "out of time" not in gpu_check.report(tmp_path) and not gpu_check.is_wrong(tmp_path)


# Of the jobs whose dry runs take minutes, one case or two.
SOME: dict[str, tuple[str, ...]] = {
    "kernels": (f"{DECODE.name} | triton",),
    "quantised": ("fp8, 16 rows, x in bf16", "experts, 16 rows, int8, tiles"),
    "peers_jax": (f"{DECODE.name} | cudnn", f"{CACHED.name} | cudnn"),
    "peers_torch": (f"{DECODE.name} | sdpa_flash",),
}


@deprecated
@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("name", SOME)
def test_dry_run_of_some(name: str, tmp_path: Path) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert gpu_timed.main([name, "--out", str(tmp_path), "--dry", "--only", *SOME[name]]) == 0
    found = gpu_jobs.read(tmp_path / f"{name}.jsonl")
    assert found.keys() == set(SOME[name]) and not any("error" in r for r in found.values())
    if not name.startswith("peers"):
        assert all(r.get("seconds", r.get("us", 0)) > 0 for r in found.values())


MAINS: dict[str, Any] = {
    "gpu_timed.py": gpu_timed.main,
    "gpu_programs.py": gpu_programs.main,
    "tests.kernels.on_device": on_device.main,
}


@pytest.mark.parametrize("dry", [False, True], ids=["wet", "dry"])
@pytest.mark.parametrize("part", gpu_check.SECONDS)
def test_every_job_parses_and_has_cases(
    part: str, dry: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The very command of each, up to its first case; and the jobs of a part fit its call."""
    jobs = gpu_check.jobs(part, tmp_path, dry=dry)
    assert gpu_check.SECONDS[part] <= 570 and len({job.file for job in jobs}) == len(jobs)
    slow = 10 if dry else 1
    assert sum(job.seconds for job in jobs) <= gpu_check.SECONDS[part] * slow
    for job in jobs:
        python, *flags = job.command
        assert python == sys.executable
        name, *flags = flags[1:] if flags[0] == "-m" else flags
        assert MAINS[Path(name).name]([*flags, "--list"]) == 0
        cases = capsys.readouterr().out.splitlines()
        assert cases and len(set(cases)) == len(cases)
        assert MAINS[Path(name).name]([*flags, "--list", "--only", cases[-1]]) == 0
        assert capsys.readouterr().out.splitlines() == cases[-1:]
        with pytest.raises(SystemExit, match="--only none: no such case"):
            MAINS[Path(name).name]([*flags, "--only", "none"])
    assert not list(tmp_path.iterdir()), "nothing ran"
    if part == "marks":
        names = [job.file.removesuffix(".jsonl") for job in jobs]
        assert names[0] == "first" and jobs[0].seconds <= 60 * slow, "within the first minute"
        assert names.index("rates") < names.index("checks_triton_decode")
        assert gpu_check.SECONDS[part] <= 300


def test_what_the_first_job_may_take_fits_a_minute() -> None:
    assert gpu_programs.COLD_S + gpu_programs.WARM_S < 60
    assert gpu_programs.GRAPHS_S < gpu_programs.LIMITS["graphs"] < 100
    assert 2 * gpu_programs.LIMITS["sanitizer"] <= 140


def test_a_program_that_is_cut_off_has_told_what_it_knew(tmp_path: Path) -> None:
    """And what it started has gone with it."""
    sleeper = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid)"
    code = f"""{sleeper}; import time
print('{{"weights_s": 1.5}}', flush=True); print("words"); time.sleep(60)"""
    began = time.monotonic()
    ended = gpu_programs.run_program([sys.executable, "-u", "-c", code], 2, {"HOME": None})
    assert time.monotonic() - began < 30 and ended.code is None
    assert ended.record == {"weights_s": 1.5, "error": "cut off after weights_s"}
    child = int(ended.output.split()[0])
    status = Path(f"/proc/{child}/status")

    def is_there() -> bool:
        try:
            return "zombie" not in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 10  # a process that was killed may have to run once more
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_there()
    failed = gpu_programs.run_program([sys.executable, "-c", "raise ValueError('no')"], 30)
    assert failed.record == {"error": "exit status 1: ValueError: no"}


LOG = """
I0000 00:00:01.1 1 command_buffer_thunk.cc:189] Update command buffer on device #0 by recoding
I0000 00:00:01.1 1 command_buffer_thunk.cc:215] Updated command buffer in 250 μs; num_commands=44
I0000 00:00:01.2 1 command_buffer_thunk.cc:222] Execute command buffer on device #0; num_execu
I0000 00:00:01.2 1 command_buffer_thunk.cc:222] Execute command buffer on device #0; num_execu
I0000 00:00:01.2 1 command_buffer_thunk.cc:222] Execute command buffer on device #0; num_execu
I0000 00:00:01.1 1 command_buffer_thunk.cc:215] Updated command buffer in 50 μs; num_commands=44
"""


def test_updates_of_graphs_are_counted() -> None:
    """In the words of XLA's command_buffer_thunk.cc."""
    found = gpu_programs.counted(LOG)
    assert found == {"launches": 3, "updates": 2, "late_updates": 1, "update_us": 300}
    assert gpu_programs.counted("")["launches"] == 0


def test_clocks_and_power_of_nvidia_smi() -> None:
    lines = "1980, 2619, 680.25, 61\n1755, 2619, 699.9, 64\n[N/A], 2619, 1"
    found = gpu_seconds.summary(lines)
    assert found == {
        "clocks.sm": 1755,
        "clocks.mem": 2619,
        "power.draw": 699.9,
        "temperature.gpu": 64,
    }
    assert gpu_seconds.summary("1980, 2619, [N/A], 61") == {
        "clocks.sm": 1980,
        "clocks.mem": 2619,
        "temperature.gpu": 61,
    }


def test_a_card_that_is_not_well_ends_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a case that died; and so does a process that outlives SIGKILL."""
    command = job(tmp_path, 60).command
    asked: list[float] = []

    def fault(left: float) -> str:
        asked.append(left)
        return "nvidia-smi: not done after 10 s"

    dying = gpu_jobs.Job(file="job.jsonl", command=command, seconds=60)
    assert not gpu_jobs.run_job(dying, tmp_path, time.monotonic() + 60, fault)
    found = gpu_jobs.read(tmp_path / "job.jsonl")
    assert found["dies"]["error"] == "hung or crashed (7)" and len(asked) == 1
    assert found["device"]["error"].startswith("nvidia-smi") and "hangs" not in found
    assert gpu_check.is_wrong(tmp_path)

    class Stuck:
        pid = 0

        def poll(self) -> None:
            return None

        def wait(self, seconds: float) -> None:
            raise subprocess.TimeoutExpired("job", seconds)

    stuck: Any = Stuck()
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    assert not gpu_jobs.end_process(stuck)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_, **__: stuck)
        assert not gpu_jobs.run_job(dying, tmp_path, time.monotonic() + 1)
        assert gpu_jobs.run_limited(["x"], 1) == "not done after 1 s, nor killed"
    assert "suspect" in gpu_jobs.read(tmp_path / "job.jsonl")["end"]["error"]
    assert "no-such-tool" in str(gpu_jobs.run_limited(["no-such-tool"], 1))


def test_the_table_is_printed_when_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SIGTERM, in the middle of a job that leaves a record."""

    def run(job: gpu_jobs.Job, out: Path, deadline: float, wrong: Any) -> None:
        gpu_jobs.write(out / "marks.jsonl", {"case": "copy", "gb_s": 1234.0, "device": "card"})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(gpu_check, "run_job", run)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            gpu_check.main(["marks", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "copy        1234.0 GB/s" in capsys.readouterr().out
    assert "device card" in (tmp_path / "report.txt").read_text()


def write_all(file: Path, records: dict[str, dict[str, Any]]) -> None:
    for case, record in records.items():
        gpu_jobs.write(file, {"case": case} | record)


def test_report_of_what_is_there(tmp_path: Path) -> None:
    """Shares of the kernel's own time, of the best peer; none of what L2 may hold; the goals."""
    write_all(
        tmp_path / "marks.jsonl",
        {"copy": {"device": "card", "jax": "1", "gb_s": 1e3}, "matmul": {"tflop_s": 1.0}},
    )
    seconds = gpu_check.moved_bytes(DECODE) / 500e9
    ours, own = f"{DECODE.name} | mosaic_gpu", {"seconds": 2 * seconds, "kernel_seconds": seconds}
    small = f"{DECODE.name} | splits=1"
    write_all(
        tmp_path / "kernels.jsonl",
        {
            ours: own | {"fits_l2": False},
            small: own | {"fits_l2": True},
            f"{FRESH.name} | triton": {"error": "ValueError: no"},
        },
    )
    write_all(tmp_path / "peers_jax.jsonl", {f"{DECODE.name} | cudnn": {"seconds": seconds}})
    write_all(
        tmp_path / "engine.jsonl",
        {"run 1": {"output_tok_s": 100.0, "best_s": 2.0, "read_bytes": 1e12, "took_s": 3}},
    )
    lines = gpu_check.report(tmp_path).splitlines()
    cells = {line.split()[5]: line.split()[6:] for line in lines if line.startswith(DECODE.name)}
    assert cells["mosaic_gpu"][2] == "500" and cells["mosaic_gpu"][4:] == ["50.0%", "50%"]
    assert cells["splits=1"][4] == "-" and cells["cudnn"][4] == "50.0%"
    (failed,) = (line for line in lines if line.startswith(FRESH.name))
    assert failed.endswith("ValueError: no")
    assert any("50.0% of copy bandwidth over weights and KV, goal 75%" in line for line in lines)


class Plane(NamedTuple):
    name: str
    lines: list[Any]


def test_kernel_time_is_of_its_events_on_the_device() -> None:
    def events(*named: tuple[str, float]) -> list[Any]:
        return [SimpleNamespace(name=name, duration_ns=ns) for name, ns in named]

    stream = SimpleNamespace(name="Stream #13", lines=None)
    stream.events = events(
        ("kernel_mosaic_gpu_kernel", 3e3), ("fusion_1", 9e3), ("mosaic_gpu", 1e3)
    )
    other = SimpleNamespace(name="XLA Ops", events=events(("mosaic_gpu", 5e3)))
    planes = [Plane("/device:GPU:0", [stream, other]), Plane("/host:CPU", [stream])]
    assert gpu_seconds.device_seconds(planes, ("mosaic_gpu",)) == pytest.approx(4e-6)
    assert gpu_seconds.device_seconds(planes[1:], ("mosaic_gpu",)) is None


@pytest.mark.parametrize("case", BENCH, ids=str)
def test_what_is_timed_reads_more_than_l2_holds(case: Case) -> None:
    layers = gpu_timed.num_layers(case, dry=False)
    kv_bytes = gpu_timed.context_bytes(case)
    assert layers * kv_bytes <= max(gpu_timed.MOST_BYTES, kv_bytes)
    assert layers * kv_bytes >= 4 * gpu_timed.L2 or case.queries is not None


def test_there_are_layers_enough_even_of_a_small_context() -> None:
    small = dataclasses.replace(BENCH[0], contexts=(512,))
    assert gpu_timed.num_layers(small, dry=False) == 64


WANTED = [
    *((case, {}) for case in BENCH[:3]),
    *((case, {}) for case in BENCH if case.kv_dtype is not None or case.sinks),
    *((BENCH[0], own) for own in gpu_timed.WAYS),
]


@pytest.mark.parametrize(("case", "own"), WANTED, ids=str)
def test_our_steps_lower_for_cuda(case: Case, own: dict[str, Any]) -> None:
    """As they are timed: every call of a step over another layer."""
    step, shapes = gpu_timed.our_step("mosaic_gpu", case, 9, own, dry=False, interpret=False)
    text = aot_cuda.lower(step, *shapes)
    assert "mosaic_gpu" in text and text.count("call @") >= gpu_timed.CALLS


@pytest.mark.parametrize("fastest", ["heads", "rows"])
def test_either_order_is_right(fastest: str) -> None:
    case = dataclasses.replace(GPU[0], contexts=(70, 5), name="order")
    check(mosaic_gpu, case, "coded", fastest=fastest, splits=2)


@deprecated
@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("name", gpu_timed.JOBS)
def test_dry_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job, as in a program of its own: no strict promotion."""
    monkeypatch.setitem(common.MODELS, "tiny", CONFIG)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert gpu_timed.main([name, "--out", str(tmp_path), "--dry"]) == 0
    found = gpu_jobs.read(tmp_path / f"{name}.jsonl")
    if name == "rates":
        assert all(found[f"{case} | mosaic_gpu"]["seconds"] > 0 for case in BENCH_DRY[:2])
    if name == "engine":
        assert found["Qwen's sampling"]["steps"] and found["decode_steps 8"]["output_tok_s"] > 0
        assert found["warm"]["warmup_s"] > 0 and found["run 2"]["output_tok_s"] > 0
        assert found["run 2"]["compiles"] == 0 and found["run 2"]["read_bytes"] > 0
    if name == "kernels":
        assert len(found) == 2 * len(BENCH_DRY) and all("seconds" in r for r in found.values())
    if name == "adapters":
        sizes = [found[f"4 rows, {way}"]["size"] for way in ("all", "copy", "ragged")]
        assert sizes[0] > 0 and sizes == pytest.approx([sizes[0]] * 3, rel=0.02)
    if name == "quantised":
        sizes = [found[f"fp8, 16 rows, {way}"]["size"] for way in ("bf16", "x in bf16", "x in fp8")]
        assert sizes[0] > 0 and sizes == pytest.approx([sizes[0]] * 3, rel=0.05)
        assert len(set(sizes)) == 3
        for form in ("int4", "fp8", "int8", "bf16"):
            ways = ("tiles", "triton", *(("mosaic_gpu",) if form == "int4" else ()))
            xla, *ours = (found[f"experts, 16 rows, {form}, {way}"]["size"] for way in ways)
            assert ours == pytest.approx([xla] * len(ours), rel=0.01) and xla > 0
    if name == "peers_torch":
        taken = all("seconds" in r for r in found.values())
        assert taken or all(r["not_taken"] == "torch is not installed" for r in found.values())
    if name == "peers_jax":
        assert "seconds" in found[f"{FRESH.name} | cudnn"]
        assert "cached prefix" in found[f"{CACHED.name} | cudnn"]["not_taken"]
    assert not any(r.get("error") for r in found.values() if "cudnn_paged" not in r["case"])


@pytest.mark.parametrize("job", ["first", "graphs"])
def test_programs_run_dry(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu_programs.main([job, "--out", str(tmp_path), "--dry"]) == 0
    found = gpu_jobs.read(tmp_path / f"{job}.jsonl")
    assert not [r["error"] for r in found.values() if "error" in r]
    if job == "graphs":
        assert found["50 decode steps"]["steps"] == 50
        return
    cold, warm = found["cold start"], found["warm start, sleep, wake"]
    assert cold["share"] == 0.95 and cold["blocks"] == warm["blocks_awake"] > 0
    assert cold["compiles"] == warm["compiles"] > 0 and warm["same_tokens"]
    assert f"first cold start\n    device {cold['device']}" in gpu_check.report(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu_check.SECONDS)
def test_the_whole_dry_run(part: str, tmp_path: Path) -> None:
    environment = os.environ | {"DRY": "1", "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    command = ["bash", "scripts/gpu_check.sh", part, str(tmp_path)]
    how: dict[str, Any] = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=600, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.txt").read_text()
    assert done.stdout.endswith(report) and report == gpu_check.report(tmp_path) + "\n"
    files = {job.file for job in gpu_check.jobs(part, tmp_path, dry=True)}
    assert files <= {file.name for file in tmp_path.glob("*.jsonl")}
    if part == "marks":
        assert report.count(" 0 wrong") == 4 and "GB/s" in report


@pytest.mark.parametrize("name", gpu_states.states(dry=True))
def test_states_are_timed_and_compared(name: str) -> None:
    """The difference is told where there are a kernel, which is interpreted, and XLA's form."""
    record = gpu_states.states(dry=True)[name]()
    assert record["xla_us"] > 0 and record["xla_gb_s"] > 0 and "wrong" not in record
    has_mosaic = name in ("heads written", "logits read")
    rules = [f"{rule} {x}" for rule in ("delta", "KDA", "Mamba-2") for x in ("step", "chunks")]
    has_kernel = has_mosaic or name in (*rules, "latents step", "latents prompts")
    assert ("difference" in record) == ("triton_us" in record) == has_kernel
    assert ("mosaic_gpu_us" in record) == has_mosaic


def test_a_wrong_kernel_of_states_is_told(tmp_path: Path) -> None:
    sound = calls(TINY)["delta step, xla"]

    def halved(pool: Any, *rest: Any) -> Any:
        pool, o = sound.run(pool, *rest)
        return pool, o / 2

    ways = {"xla": sound, "triton": dataclasses.replace(sound, run=halved)}
    record = gpu_states.found(ways, dry=True)
    assert record["difference"] == 0.5 and "triton and xla differ by 5.0e-01" in record["wrong"]
    write_all(tmp_path / "states.jsonl", {"delta step": record})
    assert gpu_check.is_wrong(tmp_path)
    assert "triton and xla differ" in gpu_check.report(tmp_path)
