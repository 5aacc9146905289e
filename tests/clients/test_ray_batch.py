"""serve_batch.py on a local Ray cluster of two engines, one of them killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.batch_engine import ROOT

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
psutil: Any = pytest.importorskip("psutil")

ENGINE = (
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "64",
    "--num-blocks",
    "128",
    "--max-model-len",
    "128",
)
ENGINE += ("--block-size", "16", "--dtype", "float32")
COUNT = 120


def start(*argv: Any, **pipes: Any) -> Any:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "scripts" / "serve_batch.py"), *map(str, argv), *ENGINE]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, **pipes)


def write_input(path: Path) -> Path:
    lines = [
        {"id": f"a{i}", "prompt": f"def f{i % 7}(", "max_tokens": 20, "ignore_eos": True}
        for i in range(COUNT)
    ]
    texts = [json.dumps(line) for line in lines]
    texts[10], texts[20], texts[30] = (
        "{broken",
        json.dumps({"prompt": "x" * 2000}),
        json.dumps({"prompt": "a", "n": 0}),
    )
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20,
        "truncate_prompt_tokens": 8,
    }
    texts[40] = json.dumps(chat)
    path.write_text("\n".join(texts) + "\n")
    return path


def replicas(process: Any) -> list[Any]:
    """The actors' processes that a run has started, oldest first."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "ray::Replica" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:  # gone meanwhile
            continue
    return sorted(found, key=lambda child: child.create_time())


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def test_nothing_is_lost_with_a_killed_engine_and_the_text_is_that_of_one_engine(
    tmp_path: Path,
) -> None:
    source, ray_out, one_out = (
        write_input(tmp_path / "in.jsonl"),
        tmp_path / "ray.jsonl",
        tmp_path / "one.jsonl",
    )
    run = start(
        source, "--output", ray_out, "--ray", "local", "--replicas", "2", stdout=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 240
        while len(lines_of(ray_out)) < 10 or len(replicas(run)) < 2:
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()[1].decode()
            time.sleep(0.05)
        replicas(run)[0].send_signal(signal.SIGKILL)
        assert len(lines_of(ray_out)) < COUNT
        stdout, stderr = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 2, stderr.decode()
    found = lines_of(ray_out)
    assert sorted(line["line"] if "line" in line else line["error"]["line"] for line in found) == [
        *range(1, COUNT + 1)
    ]
    failed = {line.get("line", 11): line["error"]["code"] for line in found if line.get("error")}
    assert failed == {11: "invalid_json", 21: "context_length_exceeded", 31: "invalid_value"}
    assert b"1 died" in stdout and b"run again on other replicas" in stdout
    one = start(source, "--output", one_out, stdout=subprocess.PIPE)
    _, stderr = one.communicate(timeout=240)
    assert one.returncode == 2, stderr.decode()
    texts = [
        {line["line"]: line.get("text") for line in lines_of(path) if "line" in line}
        for path in (ray_out, one_out)
    ]
    assert texts[0] == texts[1]


def test_stdout_holds_answers_alone_and_the_cluster_is_gone_afterwards(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "import"}) + "\n")
    run = start(source, "--output", "-", "--ray", "local", stdout=subprocess.PIPE)
    children: list[Any] = []
    while run.poll() is None:
        children = psutil.Process(run.pid).children(recursive=True) or children
        time.sleep(0.2)
    stdout, stderr = run.communicate(timeout=240)
    assert run.returncode == 0, stderr.decode()
    (line,) = stdout.splitlines()
    assert json.loads(line)["text"] and children
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_an_address_without_a_cluster_is_one_sentence(tmp_path: Path, address: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "import"}) + "\n")
    run = start(source, "--output", "-", "--ray", address, stdout=subprocess.PIPE)
    _, stderr = run.communicate(timeout=240)
    assert (
        run.returncode == 1
        and f"cannot reach Ray at '{address}'".encode() in stderr
        and b"Traceback" not in stderr
    )
