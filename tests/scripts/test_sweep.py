"""scripts/sweep.py: rows and their names, resuming, errors as rows, ratios and plots, on a tiny
model.
"""

import contextlib
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _common as common
import jax
import numpy as np
import pytest
import sweep
import sweep_report as report
from matplotlib import pyplot

import jpaged.config
from jpaged import LLM

# Of the JSON that `vllm bench serve` writes.
VLLM_KEYS = {
    "date",
    "backend",
    "model_id",
    "num_prompts",
    "duration",
    "completed",
    "failed",
    "request_throughput",
}
VLLM_KEYS |= {
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "total_token_throughput",
}
VLLM_KEYS |= {
    f"{kind}_{x}_ms"
    for kind in ("mean", "median", "std", "p99")
    for x in ("ttft", "tpot", "itl", "e2el")
}
OWN_KEYS = {
    "point",
    "prefill_tok_s",
    "decode_tok_s",
    "padding_waste",
    "compile_s",
    "num_compiles",
    "peak_memory_bytes",
}
OWN_KEYS |= {
    "decode_read_gb_s",
    "read_bandwidth_gb_s",
    "read_bandwidth_fraction",
    "attention_used",
    "device",
    "jax",
}
OWN_KEYS |= {"duration_spread"}


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Two shapes to compile an engine; no measuring of the memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpaged.config, "TOKEN_BUCKETS", (64,))
        patch.setattr(jpaged.config, "SEQ_BUCKETS", (8,))
        patch.setattr(common, "read_bandwidth", lambda: 10.0)
        yield


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quickly():
        yield


def flags(random_folder: Path, out: Path, *more: str) -> list[str]:
    model = [
        "--random",
        str(random_folder / "config.json"),
        "--dtype",
        "float32",
        "--block-size",
        "4",
    ]
    return [*model, "--output", "4", "--repeat", "1", "--out", str(out), *more]


SWEPT = ("--batch", "1", "3", "--input", "5", "9", "--num-blocks", "40")


@pytest.fixture(scope="module")
def swept(random_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of four points of one engine."""
    with quickly():
        folder = tmp_path_factory.mktemp("swept")
        assert sweep.main(flags(random_folder, folder, *SWEPT)) == 0
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    (to / "results.jsonl").write_bytes((folder / "results.jsonl").read_bytes())
    return to


def test_rows_of_a_sweep(swept: Path) -> None:
    rows = lines(swept)
    assert [(r["num_prompts"], r["random_input_len"]) for r in rows] == [
        (1, 5),
        (3, 5),
        (1, 9),
        (3, 9),
    ]
    for row in rows:
        assert row.keys() >= VLLM_KEYS | OWN_KEYS | report.SETTINGS.keys()
        batch = row["num_prompts"]
        assert (row["completed"], row["failed"], row["block_size"], row["dtype"]) == (
            batch,
            0,
            4,
            "float32",
        )
        assert (
            row["total_input_tokens"] == batch * row["random_input_len"]
            and row["total_output_tokens"] == 4 * batch
        )
        assert row["output_throughput"] == pytest.approx(4 * batch / row["duration"], rel=1e-4)
        assert (
            0
            < row["median_ttft_ms"]
            <= row["p99_ttft_ms"]
            < row["p99_e2el_ms"]
            <= 1e3 * row["duration"]
        )
        assert row["read_bandwidth_fraction"] == pytest.approx(
            row["decode_read_gb_s"] / 10.0, rel=1e-4
        )
        computed = batch * (row["random_input_len"] + 3)  # of a step of 64 and three of 8 rows
        assert row["padding_waste"] == pytest.approx(1 - computed / (64 + 3 * 8), rel=1e-4)
        assert row["peak_memory_bytes"] > 10 * 2**20 and row["peak_memory_of"].startswith(
            "process, "
        )
    assert [row["num_compiles"] for row in rows] == [3, 0, 0, 0] and rows[0][
        "compile_s"
    ] > 0 == rows[1]["compile_s"]
    assert len({row["point"] for row in rows}) == 4
    with (swept / "summary.csv").open(newline="") as file:
        summary = list(csv.DictReader(file))
    assert [float(row["median_tpot_ms"]) for row in summary] == pytest.approx(
        [r["median_tpot_ms"] for r in rows], 1e-4
    )
    for name in ("throughput", "ttft", "users", "compile"):
        assert (swept / f"{name}.png").stat().st_size > 5000


def test_a_broken_sweep_goes_on(
    swept: Path,
    random_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = copied(swept, tmp_path / "out")
    whole = (out / "results.jsonl").read_bytes()
    (out / "results.jsonl").write_bytes(whole[:-40])  # broken off in the last row
    run_once, ran = sweep.run_once, []
    monkeypatch.setattr(
        sweep,
        "run_once",
        lambda llm, prompts, point: ran.append(point) or run_once(llm, prompts, point),
    )
    again = flags(random_folder, out, *SWEPT, "--no-plots")
    assert sweep.main(again) == 0
    assert [(p["num_prompts"], p["random_input_len"]) for p in ran] == [
        (3, 9)
    ] * 2  # to compile, and measured
    rows = lines(out)
    assert (out / "results.jsonl").read_bytes().startswith(
        whole[: whole[:-1].rfind(b"\n") + 1]
    ) and len(rows) == 4
    assert rows[3]["point"] == lines(swept)[3]["point"]
    ran.clear()
    monkeypatch.setattr(jpaged, "LLM", None)  # none is made when nothing is left to do
    assert sweep.main(again) == 0 and not ran and len(lines(out)) == 4
    printed = capsys.readouterr().out
    assert "4 points, 4 of them done before" in printed
    table = report.table(rows)
    assert printed.count(table) == 2 and max(map(len, table.splitlines())) <= 120
    head = (
        ["spread"]
        + ["tok/s"] * 3
        + ["p50", "ms", "p99", "ms"] * 2
        + ["waste", "%", "steps", "in", "s", "MiB", "GB/s", "peak", "%"]
    )
    assert table.splitlines()[1].split() == head


@pytest.mark.own_steps
def test_out_of_memory_is_a_row(
    random_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not needed without plots
    stream, errors = (
        LLM.stream,
        {5: MemoryError("no room"), 9: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB")},
    )

    def full(self: LLM, prompts: Any, *args: Any) -> Any:
        if len(prompts) == 2 and errors:
            raise errors[len(prompts[0])]
        return stream(self, prompts, *args)

    monkeypatch.setattr(LLM, "stream", full)
    again = flags(random_folder, tmp_path, *SWEPT, "--batch", "3", "2", "1", "--no-plots")
    assert sweep.main(again) == 2
    rows = lines(tmp_path)
    failed = ["MemoryError: no room", "JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GB"]
    assert [row.get("error") for row in rows] == [None, failed[0], None, None, failed[1], None]
    assert all(
        (row["out_of_memory"], row["completed"], row["failed"]) == (True, 0, 2)
        for row in rows[1::3]
    )
    assert [row.get("num_compiles") for row in rows] == [
        3,
        None,
        3,
        0,
        None,
        3,
    ]  # an engine that ran out is let go of
    assert f"batch 2, input 9, output 4: {failed[1]}\n" in capsys.readouterr().out
    errors.clear()
    assert sweep.main(again) == 2 and len(lines(tmp_path)) == 6
    assert (
        sweep.main([*again, "--retry-failed"]) == 0 and len(lines(tmp_path)) == 8
    )  # the later row counts
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 1 + 6


def test_what_does_not_fit_is_a_row(random_folder: Path, tmp_path: Path) -> None:
    """In a pool of 12 tokens a prompt does not fit, or what follows it; nor does more than the
    model's 64 tokens.
    """
    more = ["--batch", "1", "--input", "5", "10", "20", "61", "--num-blocks", "3", "--no-plots"]
    assert sweep.main(flags(random_folder, tmp_path, *more)) == 2
    fits, outgrows, prompt, model = lines(tmp_path)
    assert "error" not in fits
    assert outgrows["out_of_memory"] and prompt["out_of_memory"] and not model["out_of_memory"]
    assert (
        outgrows["error"].startswith("CapacityError: ") and "KV pool of 3 blocks" in prompt["error"]
    )
    assert model["error"] == "ConfigError: 65 tokens: the model has max_position_embeddings=64"


def test_settings_that_are_refused_are_rows(random_folder: Path, tmp_path: Path) -> None:
    more = ["--batch", "3", "--input", "9", "--attention", "none", "auto", "--no-plots"]
    assert sweep.main(flags(random_folder, tmp_path, *SWEPT, *more)) == 2
    refused, served = lines(tmp_path)
    assert refused["error"].startswith("ConfigError: attention='none'") and "error" not in served
    assert (served["attention"], served["attention_used"]) == ("auto", "xla")


def test_an_interrupt_keeps_what_is_done(
    swept: Path,
    random_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_once = sweep.run_once

    def interrupted(llm: Any, prompts: Any, point: Any) -> Any:
        if point["num_prompts"] == 3:
            raise KeyboardInterrupt
        return run_once(llm, prompts, point)

    monkeypatch.setattr(sweep, "run_once", interrupted)
    assert sweep.main(flags(random_folder, tmp_path, *SWEPT, "--no-plots")) == 130
    assert [row["point"] for row in lines(tmp_path)] == [lines(swept)[0]["point"]]
    assert (tmp_path / "summary.csv").exists()
    assert capsys.readouterr().err == "sweep: interrupted; the same command goes on from here\n"


def test_a_point_that_kills_the_process_twice_is_a_row(tmp_path: Path) -> None:
    killed_in = []
    for _ in range(2):
        results = report.Results(tmp_path)
        assert results.is_wanted("p", retry_failed=False)
        killed_in.append(results.attempt({"point": "p"}))  # and never left, as if killed
        killed_in[-1].__enter__()
    results = report.Results(tmp_path)
    killed = {"error": "the process was killed in this point", "out_of_memory": None, "starts": 2}
    assert results.rows == {"p": {"point": "p"} | killed}
    assert not results.is_wanted("p", retry_failed=False)
    assert results.is_wanted("p", retry_failed=True)
    with pytest.raises(KeyboardInterrupt), results.attempt({"point": "q"}):
        raise KeyboardInterrupt
    assert results.rows.keys() == {"p"} == report.Results(tmp_path).rows.keys()
    with results.attempt({"point": "p"}):
        pass
    results.append({"point": "p", "figure": 1})
    assert report.Results(tmp_path).rows == {"p": {"point": "p", "figure": 1}}


# ---- settings ----


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_settings_from_a_file(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {
        "yaml": (
            "random: tiny\nbatch: [1, 2]\nblock-size: 16\nno_plots: true\nretry_failed: "
            "false\nnum_blocks: null\n"
        ),
        "json": '{"random": "tiny", "batch": [1, 2], "block_size": 16, "no_plots": true}',
    }
    path = tmp_path / f"sweep.{kind}"
    path.write_text(text[kind])
    args = sweep.parse_args(["--config", str(path), "--batch", "7"])
    assert (args.random, args.batch, args.block_size, args.no_plots) == ("tiny", [7], [16], True)
    args = sweep.parse_args(["folder", "--config", str(path)])
    assert (args.checkpoint, args.random, args.batch, args.output) == ("folder", None, [1, 2], [64])
    path.write_text('{"bacth": [1]}')
    for text, reason in (
        ('{"bacth": [1]}', "'bacth' is not a flag"),
        ('{"batch": ["x"]}', "'x'"),
        ("[1]", "a mapping"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit):
            sweep.parse_args(["--random", "tiny", "--config", str(path)])
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [[], ["x", "--random", "tiny"], ["x", "--batch", "0"], ["x", "--config", "none.yaml"]]
)
def test_wrong_flags(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.parse_args(wrong)


def test_plots_that_cannot_be_drawn_are_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        sweep.parse_args(["--random", "tiny"])
    assert "--no-plots" in capsys.readouterr().err
    assert sweep.parse_args(["--random", "tiny", "--no-plots"]).no_plots


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.jsonl").write_text('{"point": "a"}\n{"torn"\n{"point": "b"}\n')
    failed = tmp_path / "failed"
    failed.mkdir()
    (failed / "results.jsonl").write_text('{"point": "a", "error": "no room"}\n')
    tries = {
        "none": [str(tmp_path / "none"), "--out", str(tmp_path / "new")],
        "line 2": ["--random", "tiny", "--out", str(tmp_path)],
        "no such file": ["--compare", str(tmp_path / "none"), str(tmp_path)],
        "no point is measured": ["--compare", str(failed), str(failed)],
    }
    for reason, argv in tries.items():
        assert sweep.main(argv) == 1
        err = capsys.readouterr().err
        assert err.startswith("sweep: ") and err.count("\n") == 1 and reason in err


def test_points() -> None:
    args = sweep.parse_args(
        ["--random", "tiny", "--batch", "1", "8", "1", "--dtype", "float32", "bfloat16"]
    )
    points = sweep.make_points(args)
    assert [(p["dtype"], p["num_prompts"]) for p in points] == [
        ("float32", 1),
        ("float32", 8),
        ("bfloat16", 1),
        ("bfloat16", 8),
    ]
    assert all(point.keys() == report.SETTINGS.keys() for point in points)
    assert len({sweep.point_id(p) for p in points}) == 4
    assert sweep.point_id(points[0]) == sweep.point_id(dict(reversed(points[0].items())))


# ---- figures ----


def test_latencies_of_chunks_of_several_tokens() -> None:
    arrivals = [[(0.1, 1), (0.5, 4), (0.9, 4)], [(0.2, 1)], [(0.3, 2), (0.4, 1)]]
    found = sweep.latencies(arrivals)
    assert found["ttft"] == pytest.approx([100, 200, 300]) and found["e2el"] == pytest.approx(
        [900, 200, 400]
    )
    assert found["tpot"] == pytest.approx([800 / 8, 100.0])  # a request of one token has none
    assert found["itl"] == pytest.approx([400, 400, 100])


def test_figures_of_a_run() -> None:
    point = {"num_prompts": 2, "random_input_len": 10, "random_output_len": 3}
    run = {
        "seconds": 2.0,
        "arrivals": [[(0.5, 1), (1.5, 2)], [(0.7, 1), (1.9, 2)]],
        "preemptions": 0,
    }
    run |= {"prefill_tokens": 20, "prefill_time_s": 0.5, "decode_tokens": 4, "decode_time_s": 1.0}
    run |= {"padded_tokens": 48, "device_decode_steps": 4}
    found = sweep.figures(run, point, weight_bytes=10**9, token_bytes=10**7)
    wanted = {
        "output_throughput": 3.0,
        "total_token_throughput": 13.0,
        "request_throughput": 1.0,
        "padding_waste": 0.5,
    }
    wanted |= {
        "prefill_tok_s": 40.0,
        "decode_tok_s": 4.0,
        "mean_ttft_ms": 600.0,
        "median_tpot_ms": 550.0,
    }
    wanted |= {"decode_read_gb_s": 4 + 2 * (11 + 12) / 100, "p99_ttft_ms": 698.0}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_steps_of_a_dispatch_are_counted_by_the_buckets() -> None:
    buckets = [
        SimpleNamespace(phase="decode", steps=8, hits=3),
        SimpleNamespace(phase="decode", steps=1, hits=2),
    ]
    buckets.append(SimpleNamespace(phase="prefill", steps=1, hits=9))
    llm = SimpleNamespace(
        stats=lambda: {"decode_steps": 5, "attention": "xla"}, buckets=lambda: buckets
    )
    assert sweep.counters(llm) == {"decode_steps": 5, "device_decode_steps": 26}


def row(
    batch: int, length: int, rate: float | None, ttft: float, tpot: float | None, **changes: Any
) -> dict[str, Any]:
    """A row as a sweep writes it; rate None makes it an error."""
    made: dict[str, Any] = {
        "num_prompts": batch,
        "random_input_len": length,
        "random_output_len": 4,
        "model_id": "m",
    }
    made |= {
        "dtype": "float32",
        "attention": "auto",
        "block_size": 16,
        "decode_steps": 1,
        "temperature": 1.0,
    }
    made |= {"max_num_seqs": None}
    made |= {"max_num_batched_tokens": None, "num_blocks": None, "device": "cpu", "num_devices": 1}
    made |= changes | {"point": json.dumps([batch, length, *map(str, changes.values())])}
    if rate is None:
        return made | {"error": "MemoryError: no", "out_of_memory": True}
    made |= {"output_throughput": rate, "median_ttft_ms": ttft, "median_tpot_ms": tpot}
    return made | {"padding_waste": 0.25, "compile_s": batch * 1.5, "num_compiles": 1}


def write(folder: Path, *rows: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(
        tmp_path / "a",
        row(1, 8, 100, 10, 5),
        row(4, 8, 300, 20, 6),
        row(8, 8, 400, 9, 9),
        row(16, 8, None, 0, 0),
    )
    b = write(
        tmp_path / "b",
        row(4, 8, 600, 10, 3),
        row(1, 8, 400, 40, None),
        row(8, 9, 1, 1, 1),
        row(16, 8, 5, 5, 5),
    )
    assert sweep.main(["--compare", a, b]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [f"A: {a}", f"B: {b}", ""]
    cells = [line.split() for line in printed[5:8]]
    assert cells[0] == [
        "1",
        "8",
        "4",
        "100",
        "400",
        "4.000",
        "10.0",
        "40.0",
        "4.000",
        "5.00",
        "-",
        "-",
    ]
    assert cells[1] == [
        "4",
        "8",
        "4",
        "300",
        "600",
        "2.000",
        "20.0",
        "10.0",
        "0.500",
        "6.00",
        "3.00",
        "0.500",
    ]
    assert cells[2] == ["mean", "2.828", "1.414", "0.500"]
    assert printed[-1] == "mean: geometric. 1 measured points are in A alone, 2 in B alone"


def test_compare_matches_what_differs_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", row(1, 8, 100, 10, 5), row(4, 8, 300, 20, 6))
    b = write(
        tmp_path / "b", *(row(n, 8, 200, 10, 5, block_size=64, dtype="bfloat16") for n in (1, 4))
    )
    assert sweep.main(["--compare", a, b]) == 0
    printed = capsys.readouterr().out
    assert (
        f"A: {a}  float32, block 16\nB: {b}  bfloat16, block 64\n" in printed
        and " 2.000 " in printed
    )
    before = row(1, 8, 100, 10, 5)  # there was a setting
    del before["num_blocks"]
    assert sweep.main(["--compare", a, write(tmp_path / "before", before)]) == 0
    assert " 1.000 " in capsys.readouterr().out
    apart = write(tmp_path / "c", row(2, 8, 1, 1, 1), row(3, 9, 1, 1, 1))
    assert sweep.main(["--compare", a, apart]) == 1
    assert "no measured point in common" in capsys.readouterr().err


# ---- plots ----


def test_plots() -> None:
    before = pyplot.get_fignums()
    rows = [row(n, length, 100.0 * n, length, 2.0) for length in (256, 64) for n in (8, 1, 4)]
    found = report.plots([*rows, row(16, 64, None, 0, 0)])
    axes = {name: figure.axes[0] for name, figure in found.items()}
    labels = {name: (ax.get_xlabel(), ax.get_ylabel()) for name, ax in axes.items()}
    assert labels == {
        "throughput": ("batch (requests submitted at once)", "throughput (output tokens / s)"),
        "ttft": ("input (prompt tokens a request)", "TTFT: time to first token, median (ms)"),
        "users": (
            "per user: 1 / median TPOT (output tokens / s)",
            "per device (output tokens / s)",
        ),
        "compile": (
            "padding waste (% of the token rows computed)",
            "compile time of steps first met at this point (s)",
        ),
    }
    legends = {
        name: [text.get_text() for text in figure.legends[0].get_texts()]
        for name, figure in found.items()
    }
    assert (
        legends["throughput"] == legends["users"] == legends["compile"] == ["input 64", "input 256"]
    )
    assert legends["ttft"] == ["batch 1", "batch 4", "batch 8"]
    [x, y] = axes["throughput"].lines[0].get_data()
    assert np.array_equal(x, [1, 4, 8]) and np.array_equal(y, [100, 400, 800])
    assert [tick.get_text() for tick in axes["throughput"].get_xticklabels()] == ["1", "4", "8"]
    assert sorted(text.get_text() for text in axes["users"].texts) == ["1", "1", "4", "4", "8", "8"]
    title = axes["users"].get_title(loc="left")
    settings = "output 4, m, float32, attention auto, block 16, steps 1, temperature 1.0, on cpu"
    assert title == f"{settings}\nnumbers at the dots: batch"
    assert pyplot.get_fignums() == before  # whose state would outlive the plots


def test_plots_of_little(tmp_path: Path) -> None:
    assert report.plots([row(1, 8, None, 0, 0)]) == {}
    assert set(report.plots([row(1, 8, 5.0, 5, None)])) == {
        "throughput",
        "ttft",
        "compile",
    }  # of one token each
    [path, *_] = report.draw([row(1, 8, 5.0, 5, 1.0)], tmp_path)
    assert path == tmp_path / "throughput.png" and path.read_bytes().startswith(b"\x89PNG")
    assert not report.plots([row(1, 8, 5.0, 5, 1.0)])["ttft"].legends  # one series needs none
