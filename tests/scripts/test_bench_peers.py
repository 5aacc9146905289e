"""scripts/bench_peers.py over an engine that is none: which figures it takes, what it makes of
them, and what it says of peers that are not there.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _common as common
import _peers_gguf
import bench_peers
import numpy as np
import pytest
from _peers_driver import New, answer
from safetensors.numpy import load_file

import jpaged

STAND_IN = Path(__file__).with_name("stand_in_peer.py")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine is the stand-in, the model is tiny, and the machine is not measured."""
    for name, engine in bench_peers.ENGINES.items():
        monkeypatch.setitem(bench_peers.ENGINES, name, dataclasses.replace(engine, driver=STAND_IN))
    monkeypatch.setitem(common.MODELS, "60m", common.MODELS["tiny"])
    monkeypatch.setattr(common, "stay_on_cpu", lambda: None)
    monkeypatch.setattr(common, "read_bandwidth", lambda: 40.0)
    monkeypatch.setattr(bench_peers, "handoff_ns", lambda: 150.0)


def test_a_run_and_its_going_on(
    stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines take turns, a stopped run goes on, and what is missing is named."""
    file = tmp_path / "figures.jsonl"
    flags = ["--openvino-python", sys.executable, "--vllm-python", str(tmp_path / "nothing")]
    flags += ["--models", "60m", "--weights", "bf16", "--cells", "decode4", "prefill512", "w2"]
    flags += ["--folder", str(tmp_path), "--json", str(file), "--threads", "1"]
    assert bench_peers.main([*flags, "--rounds", "2", "--seconds", "0"]) == 0
    assert "Not whole: stopped after 0 s" in capsys.readouterr().out and not file.exists()
    assert bench_peers.main([*flags, "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "| 60m | bf16 | decode4 | one die | 40.0 (40.0 to 40.0, 2) | " in out and "w2" not in out
    assert "llama.cpp is left out: name a Python that has it by --llama-python" in out
    assert "pip install llama-cpp-python gguf numpy" in out
    assert "vLLM, 60m in bf16: [Errno 2] No such file or directory" in out
    assert "OpenVINO GenAI 1.0: bf16 is bf16 of 60m. Peak GiB: 60m bf16 0." in out
    assert bench_peers.main([*flags, "--rounds", "2"]) == 0
    with pytest.raises(SystemExit):
        bench_peers.main([*flags, "--activations", "int8"])
    error = f"--activations int8: {file} has figures of auto"
    assert error in " ".join(capsys.readouterr().err.split())
    records = [json.loads(line) for line in file.read_text().splitlines()]
    took = [(record["cell"], record["engine"]) for record in records]
    for cell in ("decode4", "prefill512"):
        assert [e for c, e in took if c == cell] == ["jpaged", "openvino", "openvino", "jpaged"]
    assert all(record["ids"] for record in records)
    assert all(r["value"] > 0 and r["read_gb_s"] == 40 for r in records)
    assert [r["ids"][0] for r in records if r["cell"] == "decode4"] == [4 * 64] * 4  # warmed by


def test_an_engine_that_ends(
    stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that cannot start is left out with its last words, jpaged ends the run."""
    flags = ["--peers", "llama", "--llama-python", sys.executable, "--rounds", "1"]
    flags += ["--models", "60m", "--cells", "decode1", "--folder", str(tmp_path)]
    args = bench_peers.make_parser().parse_args([*flags, "--weights", "int4"])
    with pytest.raises(bench_peers.PeerFailed, match="exit status 1: RuntimeError: no int4 here"):
        command = bench_peers.command_of("llama", args, "60m", "int4", ["decode1"])
        bench_peers.Process(command, bench_peers.environment_of("llama", 1))
    assert bench_peers.main([*flags, "--weights", "int4"]) == 1
    assert "bench_peers: jpaged: exit status 1: RuntimeError" in capsys.readouterr().err


def record(engine: str, value: float, state: str = "one die", **fields: Any) -> dict[str, Any]:
    plain = {"model": "60m", "weights": "int8", "cell": "decode4", "read_gb_s": 50.0}
    rest = {"version": "2", "form": "q8_0", "peak_gib": 1.5, "handoff_ns": 160.0}
    return plain | rest | {"engine": engine, "value": value, "state": state} | fields


def test_the_table() -> None:
    """Medians, the ratio over the fastest peer, and the share of a read, state by state."""
    records = [record("jpaged", value) for value in (100.0, 300.0, 220.0)]
    records += [record("openvino", value) for value in (200.0, 180.0, 202.0)]
    records += [record("llama", 50.0), record("jpaged", 90.0, "two dies", handoff_ns=450.0)]
    records += [record("jpaged", 7.0, cell="prefill512", weights="bf16")]
    lines = bench_peers.table(records)
    assert lines[0].startswith("| model | weights | cell | cores on | read GB/s | jpaged |")
    assert lines[2] == ("| 60m | bf16 | prefill512 | one die | 50.0 | 7.00 | - | - | - | - | - |")
    share = 220 / 4 * bench_peers.step_bytes(bench_peers.CELLS["decode4"], "60m", "int8") / 50e9
    assert lines[3] == (
        "| 60m | int8 | decode4 | one die | 50.0 (50.0 to 50.0, 7) | 220 (100 to 300, 3) "
        f"| 200 (180 to 202, 3) | 50.0 | - | 1.10 | {share:.0%} |"
    )
    assert "| two dies | 50.0 | 90.0 | - | - | - | - |" in lines[4] and len(lines) == 5
    notes = bench_peers.notes(records)
    assert notes[0] == (
        "- jpaged 2: bf16 is q8_0; int8 is q8_0. Peak GiB: 60m int8 1.50, 60m bf16 1.50."
    )
    assert any("two dies: a cache line takes 450 ns" in line for line in notes)


def test_cells() -> None:
    """What is counted, and how much room sequences need."""
    prompts, lengths = bench_peers.CELLS["decode1"].requests("0.6b")
    assert [len(prompts[0]), *lengths] == [512, 48]
    assert bench_peers.CELLS["decode1"].requests("60m")[1] == [4 * 48]
    assert bench_peers.cache_sizes(["decode1", "decode32"], "0.6b") == (576, 32 * 128)
    prompts, lengths = bench_peers.CELLS["w2"].requests("0.6b")
    assert len(prompts) == 16 and all(32 <= n <= 100 for n in lengths)
    assert all(100 <= len(prompt) <= 400 for prompt in prompts)
    warm = bench_peers.warm_request("llama", "prefill4096", "60m")
    assert warm["warm"] and len(warm["prompts"][0]) == 1024
    assert len(bench_peers.warm_request("jpaged", "prefill4096", "60m")["prompts"][0]) == 4096


def test_rates() -> None:
    told = {"tokens": 100, "first_tokens": 4, "first_s": 0.5, "seconds": 2.5}
    request = {"prompts": [[1] * 30, [1] * 20]}
    rates = [
        bench_peers.rate(bench_peers.CELLS[cell], request, told)
        for cell in ("decode4", "prefill512", "w1")
    ]
    assert rates == [48, 100, 40]
    bf16, int8, int4 = (
        bench_peers.step_bytes(bench_peers.CELLS["decode1"], "60m", weights)
        for weights in bench_peers.WEIGHTS
    )
    kept = 4 * 8 * 4 * 64 * (512 + 96)
    assert (bf16 - kept) == 2 * (int8 - kept) and int4 < int8
    assert [bench_peers.state_of(ns) for ns in (None, 160, 450)] == [
        *("not known", "one die", "two dies")
    ]


class Engine:
    version = form = ""

    def warm(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        raise AssertionError("nobody asked")

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        return [[7]]

    def stream(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> Iterator[New]:
        yield [(0, [1])]
        yield [(0, [2, 3]), (1, [4])]
        yield [(1, [5])]


def test_answers() -> None:
    """Decode begins when every prompt has a token; an answer that is short is an error."""
    request = {"prompts": [[1], [2]], "lengths": [3, 2], "temperature": 0.0, "whole": False}
    told = answer(Engine(), request)
    assert (told["first_tokens"], told["tokens"], told["ids"]) == (4, 5, [1, 2, 3])
    assert 0 < told["first_s"] <= told["seconds"]
    with pytest.raises(AssertionError, match="nobody asked"):
        answer(Engine(), request | {"warm": True})
    with pytest.raises(RuntimeError, match=r"\[1\] tokens came where \[3, 2\] were asked for"):
        answer(Engine(), request | {"whole": True})


def test_a_checkpoint(tmp_path: Path, stand_ins: None) -> None:
    """jpaged reads it, and the writer of GGUF files reads the same values and has their names."""
    folder = bench_peers.checkpoint("60m", tmp_path)
    params = jpaged.load_params(folder)
    assert params.config == common.MODELS["tiny"]
    tensors = load_file(folder / "model.safetensors")
    read = dict(_peers_gguf.tensors(folder / "model.safetensors"))
    assert read.keys() == tensors.keys()
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        np.testing.assert_array_equal(read[name], tensors[name].astype(np.float32))
    names = {_peers_gguf.stored_name(name) for name in tensors}
    assert {"token_embd.weight", "output_norm.weight", "blk.3.ffn_down.weight"} <= names
    assert len(names) == len(tensors)


def test_handoff() -> None:
    """A few turns between two processes."""
    code = "import _handoff as h; h.TURNS = h.BATCHES = 3; h.MOST_S = 1; h.main()"
    told = subprocess.run(
        [sys.executable, "-S", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=bench_peers.HERE,
    )
    measured = json.loads(told.stdout)["handoff_ns"]
    assert measured is None or measured > 0


def test_bad_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, error in (
        (["--threads", "100000"], "--threads 100000: this process may run on"),
        (["--prepare"], "--prepare needs --folder"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            bench_peers.main(flags)
        assert error in capsys.readouterr().err
