"""One model over processes, by gloo on this machine: results of one device, and four faults."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, PeerError, SamplingParams
from jpaged.runtime.processes import Peers
from tests.features import PARAMS, SETTINGS, everything
from tests.golden import pictures
from tests.peers import DEVICES, guesses_of, images, renewed, structured, summary
from tests.tiny import config, engine, make_params, make_prompts, tokens_of

ROOT = Path(__file__).parents[1]


class Process:
    """One of the processes, its lines as they come."""

    def __init__(self, index: int, port: int, orders: dict[str, Any]):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "tests.peers", str(index), str(port)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(orders) + "\n")
        self.process.stdin.flush()
        self.lines: list[str] = []
        self.errors = ""
        self.readers = [threading.Thread(target=f) for f in (self._read, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def end(self, timeout: float = 400) -> int:
        """Its exit status, once it has ended."""
        code = self.process.wait(timeout)
        for reader in self.readers:
            reader.join(10)
        return code

    @property
    def found(self) -> dict[str, Any]:
        """Its last line."""
        assert self.lines, self.errors[-3000:]
        return json.loads(self.lines[-1])


def start(what: str, processes: int = 2, **orders: Any) -> list[Process]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    orders |= {"what": what, "processes": processes}
    return [Process(index, port, orders) for index in range(processes)]


def finish(started: list[Process]) -> None:
    for one in started:
        one.process.kill()
        one.end(10)
        for pipe in (one.process.stdin, one.process.stdout, one.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    llm = LLM(PARAMS, **vars(SETTINGS))
    found = summary(everything(llm))
    llm.close()
    return json.loads(json.dumps(found))


@pytest.mark.parametrize(
    ("processes", "replicas"),
    [
        pytest.param(2, 1, marks=pytest.mark.middle),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_everything_is_as_on_one_device(
    processes: int, replicas: int, wanted: dict[str, Any]
) -> None:
    """Every feature, the store and snapshots in the memory of each process among them; also with a
    replica in each process, whose tokens the others commit too.
    """
    started = start("everything", processes, replicas=replicas)
    try:
        assert [one.end() for one in started] == [0] * processes, started[0].errors[-3000:]
        for one in started:
            found = one.found["found"]
            assert found.keys() == wanted.keys()
            for name, outs in found.items():
                if name == "scores":
                    for a, b in zip(outs, wanted[name], strict=True):
                        np.testing.assert_allclose(a, b, atol=1e-5)
                    continue
                for a, b in zip(outs, wanted[name], strict=True):
                    assert [c[0] for c in a] == [c[0] for c in b], name
                    for x, y in zip(a, b, strict=True):
                        np.testing.assert_allclose(x[1], y[1], atol=1e-5)
    finally:
        finish(started)


@pytest.mark.middle
@pytest.mark.parametrize("store", ["folder", "tcp://127.0.0.1:7400"])
def test_a_prefix_store_is_refused_by_name(store: str, tmp_path: Path) -> None:
    """In each of them, before anything waits for the others."""
    started = start("prefix store", store=str(tmp_path) if store == "folder" else store)
    try:
        assert [one.end() for one in started] == [3, 3], started[0].errors[-3000:]
        for one in started:
            assert one.found["error"] == "ConfigError"
            assert "over 2 processes" in one.found["message"] and "prefix_store=" in str(one.found)
    finally:
        finish(started)


@pytest.mark.middle
def test_a_folder_is_read_in_shares(tmp_path: Path) -> None:
    params = make_params(0, config(num_heads=8, intermediate_size=45))
    jpaged.save_params(params, tmp_path / "model")
    prompts, greedy = make_prompts(3, 17, 30, 9), SamplingParams(temperature=0, max_tokens=8)
    outs = jpaged.generate(params, prompts, greedy, engine_config=SETTINGS)
    started = start("folder", folder=str(tmp_path / "model"))
    try:
        assert [one.end() for one in started] == [0, 0], started[0].errors[-3000:]
        assert all(one.found["found"] == tokens_of(outs) for one in started)
    finally:
        finish(started)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "replicas"), [("text", 1), ("text", 2), ("states", 2), ("eagle", 1)]
)
def test_they_guess_alike(of: str, replicas: int) -> None:
    """Prompt lookup, a model with states for itself, and a head, where no clock decides whether a
    guess is tried; else it is refused.
    """
    params, asked = guesses_of(of)[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [p * 3 for p in make_prompts(5, 7, 4)]
    expected = tokens_of(jpaged.generate(params, prompts, asked, engine_config=SETTINGS))
    jpaged.release()
    started = start("guessing", replicas=replicas, of=of)
    try:
        assert [one.end() for one in started] == [0, 0], started[0].errors[-3000:]
        for one in started:
            assert one.found["found"] == expected, of
            tried = one.found["tried"]
            assert tried == started[0].found["tried"] and tried["drafted_tokens"] > 0
            if of == "states":
                assert tried["accepted_tokens"] == tried["drafted_tokens"]
            assert "several processes: pass 'adaptive': False" in one.found["refused"]
    finally:
        finish(started)


@pytest.mark.slow
def test_new_weights_under_what_runs() -> None:
    """In every process between the same two steps: tokens and versions are those of one device; and
    what one cuts goes on.
    """
    started = start("renewed")
    try:
        assert [one.end() for one in started] == [0, 0], started[0].errors[-3000:]
        expected = renewed(SETTINGS)
        assert all(len(spans) == 2 and spans[1][1] > 0 for _, spans in expected)
        assert all(one.found["found"] == expected for one in started)
    finally:
        finish(started)


@pytest.mark.slow
def test_images_are_encoded_by_all(tmp_path: Path) -> None:
    """The tower runs over both, and what it gives goes into each one's pool; embeddings too. An
    image that only one has is found out before the tower waits for the other.
    """
    pictures.write("qwen3_vl", tmp_path)
    started = start("images", folder=str(tmp_path))
    try:
        assert [one.end() for one in started] == [0, 0], started[0].errors[-3000:]
        expected = images(SETTINGS, str(tmp_path))
        assert expected["encoded"] == [2, 2]
        for one in started:
            assert one.found["encoded"] == expected["encoded"]
            assert "run different steps" in one.found["error"]
            for (tokens, logprobs), wanted in zip(
                one.found["found"], expected["found"], strict=True
            ):
                assert tokens == wanted[0]
                np.testing.assert_allclose(logprobs, wanted[1], atol=1e-5)
    finally:
        finish(started)


@pytest.mark.middle
def test_answers_of_a_given_form() -> None:
    pytest.importorskip("llguidance")
    started = start("structured")
    try:
        assert [one.end() for one in started] == [0, 0], started[0].errors[-3000:]
        expected = structured(SETTINGS)
        assert all(one.found["found"] == expected for one in started)
    finally:
        finish(started)


@pytest.mark.middle
@pytest.mark.parametrize("what", ["diverge", "longer"])
def test_processes_that_disagree_find_out(what: str) -> None:
    """Other tokens in a step of the same shape, a step of another one: in the first dispatch."""
    started = start(what, timeout=60.0)
    try:
        assert [one.end() for one in started] == [3, 3]
        for one in started:
            assert one.found["error"] == "PeerError"
            assert "run different steps" in one.found["message"]
            print(f"{what}: {one.found['seconds']:.2f} s to the error")
    finally:
        finish(started)


@pytest.mark.middle
def test_a_peer_that_stalls_is_an_error_in_time() -> None:
    started = start("stall", timeout=15.0)
    try:
        first = started[0]
        assert first.end() == 3
        assert first.found["error"] == "PeerError"
        assert "did not come within peer_timeout_s=15" in first.found["message"]
        assert 14 < first.found["seconds"] < 30
        print(f"stall: {first.found['seconds']:.2f} s to the error, peer_timeout_s=15")
        # It only sleeps, until the first one's coordination service goes.
        assert started[1].process.poll() in (None, -signal.SIGABRT)
    finally:
        finish(started)


@pytest.mark.middle
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_is_killed_ends_the_other(victim: int) -> None:
    started = start("kill", timeout=60.0)
    try:
        deadline = time.monotonic() + 300
        while not any("ready" in line for line in started[0].lines):
            assert time.monotonic() < deadline and started[0].process.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)
        started[victim].process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        other = started[1 - victim]
        code = other.end(timeout=70)
        took = time.monotonic() - killed
        assert took < 70
        print(f"process {victim} killed: {took:.2f} s to the other's end, status {code}")
        # Of the first process: its coordination service went with it, which aborts the others. And
        # where the sockets did not tell, that service aborts for want of a heartbeat.
        assert code in (3, -signal.SIGABRT), other.errors[-2000:]
        if code == 3:
            assert other.found["error"] == "PeerError" and "is gone" in other.found["message"]
        elif victim == 1:
            assert took > 5 and "heartbeat" in other.errors, other.errors[-2000:]
    finally:
        finish(started)


def peers(seconds: float) -> Peers:
    return Peers(Mesh(np.array(jax.devices()[:2]), ("tp",)), seconds)


def test_a_call_that_does_not_come_back_is_an_error() -> None:
    ours, forever = peers(0.2), threading.Event()
    assert ours.call(lambda: 3, "counting") == 3
    with pytest.raises(KeyError, match="whatever"):
        ours.call(lambda: {}["whatever"], "reading")
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"waiting: .* within peer_timeout_s=0.2"):
        ours.call(forever.wait, "waiting")
    assert time.monotonic() - began < 5
    forever.set()


def test_what_is_compared() -> None:
    ours = peers(5)
    ours.check(ours.compare(b"one", b"two"))
    assert int(ours.compare(b"one")) == 0
    with pytest.raises(PeerError, match="the processes run different steps"):
        ours.check(jax.numpy.int32(1))


def test_alone_a_broadcast_is_the_value() -> None:
    assert jpaged.broadcast({"a": [1]}) == {"a": [1]}


def test_the_timeout_is_a_number_of_seconds() -> None:
    with pytest.raises(jpaged.ConfigError, match="peer_timeout_s=0: must be above 0"):
        engine(peer_timeout_s=0)
