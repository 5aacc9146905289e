"""serve_batch over two processes that share the model: answers of one, and a run that goes on after
one of them was killed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.errors import PeerError, RequestError
from jpaged.integrations.batch import peers
from tests.batch_engine import ROOT

SIZES = "--max-num-seqs 8 --max-num-batched-tokens 64 --token-buckets 64 --seq-buckets 8"
# Where gloo does not notice a death, the others wait for so long.
WAIT = "--peer-timeout-s 90"
FLAGS = f"{SIZES} {WAIT} --dtype float32 --max-model-len 256 --num-blocks 64 --window 8".split()
LINES = [
    {"prompt": f"def f{i % 3}(", "temperature": i % 2, "max_tokens": 40, "logprobs": 1}
    for i in range(24)
] + [{"prompt": "x", "max_tokens": 0}]  # an error line: of the first process alone


class Runs:
    """Processes of serve_batch over one input."""

    def __init__(self, folder: Path):
        self.output, self.source = folder / "answers.jsonl", folder / "in.jsonl"
        self.source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        self.logs = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int, *flags: str, each: Sequence[Sequence[str]] = ()) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONPATH": str(ROOT),
        }
        self.processes = []
        for i in range(count):
            how = ["--coordinator", address, "--num-processes", str(count), "--process-id", str(i)]
            command = [sys.executable, "scripts/serve_batch.py", str(self.source), *FLAGS, *flags]
            command += ["--output", str(self.output), "--ordered", *(how if count > 1 else [])]
            command += each[i] if each else []
            with (self.logs / f"{i}.log").open("w") as log:
                made = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
            self.processes.append(made)

    def ends(self) -> list[int]:
        return [process.wait(400) for process in self.processes]

    def log(self, index: int) -> str:
        return (self.logs / f"{index}.log").read_text()

    def answers(self) -> list[dict[str, Any]]:
        """Those that are written to their ends."""
        text = self.output.read_text() if self.output.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def texts(self) -> list[tuple[int, str]]:
        return sorted((x["line"], x["text"]) for x in self.answers() if "text" in x)


@pytest.mark.middle
def test_two_processes_answer_as_one_and_go_on_after_a_death(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    try:
        runs.start(1)
        assert runs.ends() == [2], runs.log(0)
        alone = runs.texts()
        assert len(alone) == len(LINES) - 1
        runs.output.unlink()
        runs.start(2)
        deadline = time.monotonic() + 400
        while len(runs.answers()) < 4:
            assert time.monotonic() < deadline and runs.processes[0].poll() is None, runs.log(0)
            time.sleep(0.02)
        runs.processes[1].send_signal(signal.SIGKILL)
        assert runs.ends() == [1, -signal.SIGKILL], runs.log(0)
        said = runs.log(0)
        assert "serve_batch: the run stopped: " in said and "another process" in said
        assert 4 <= len(runs.answers()) < len(LINES)
        runs.start(2, "--resume")
        assert runs.ends() == [2, 0], (runs.log(0), runs.log(1))
        assert runs.texts() == alone
        assert "requests" not in runs.log(1), "the second one says nothing"
    finally:
        for process in runs.processes:
            process.kill()
            process.wait()


class FakePeers:
    def call(self, function: Any, doing: str) -> Any:
        return function()


class FakeEngine:
    """What both sides use of an LLM."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.session = SimpleNamespace(runner=SimpleNamespace(peers=FakePeers()))
        self.engine_config = SimpleNamespace(peer_timeout_s=300.0)

    def add_request(self, prompt: Any, params: Any = None, *, request_id: str) -> str:
        self.did.append(("add", prompt, request_id))
        if prompt == "bad":
            raise RequestError("no such prompt")
        return request_id

    def abort(self, request_id: str) -> None:
        self.did.append(("abort", request_id))

    def step(self) -> list[Any]:
        self.did.append("step")
        if len(self.did) > 9:
            raise PeerError("gone")
        return []

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.mark.middle
def test_processes_that_would_serve_different_models_end(tmp_path: Path) -> None:
    """Each reads its own disk and flags, and only the first one's stand in the manifest."""
    runs = Runs(tmp_path)
    try:
        runs.start(2, each=[[], ["--kv-cache-dtype", "int8"]])
        assert runs.ends() == [1, 1], runs.log(0) + runs.log(1)
    finally:
        for process in runs.processes:
            process.kill()
            process.wait()
    assert "another process serves another model or other settings" in runs.log(0)
    said = 'settings.kv_cache_dtype is null in the first process, and "int8" in this one'
    assert said in runs.log(1) and not runs.answers()


def test_the_others_do_what_the_first_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(peers.jpaged, "broadcast", lambda value=None: sent.append(value))
    first, other = FakeEngine(), FakeEngine()
    with peers.leading() as lead:
        llm = lead(first)
        llm.add_request("a", request_id="1")
        with pytest.raises(RequestError):
            llm.add_request("bad", request_id="2")
        llm.step()
        llm.abort("1")
        assert llm.stats() == {} and len(sent) == 1, "nothing to say yet"
        monkeypatch.setattr(llm, "_idle_s", -1.0)
        assert llm.stats() == {} and len(sent) == 2, "a sign of life"
        llm.step()
    assert [order[0] for order in sent[-1]] == ["end"]
    monkeypatch.setattr(peers.jpaged, "broadcast", lambda value=None: sent.pop(0))
    peers.follow(other)
    assert other.did == first.did and sent == []


def test_a_leader_without_peers_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(peers.jpaged, "broadcast", sent.append)
    for error, told in ((RuntimeError("other"), 1), (PeerError("gone"), 0)):
        sent.clear()
        with pytest.raises(ValueError, match="stopped"), peers.leading() as lead:
            lead(FakeEngine())
            raise ValueError("stopped") from error
        assert len(sent) == told
    monkeypatch.setattr(peers.jpaged, "broadcast", lambda value=None: [("step", (), {})])
    with pytest.raises(PeerError):
        peers.follow(FakeEngine())
