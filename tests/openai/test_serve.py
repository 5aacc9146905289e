"""The command: it starts, says where it listens, finishes what runs when it is told to stop."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.__main__ import main
from jpaged.openai.server import run
from jpaged.openai.server.run import main as serve
from jpaged.openai.server.run import make_parser, name_of

ROOT = Path(__file__).parents[2]
SIZES = ["--max-num-seqs", "4", "--num-blocks", "32", "--max-num-batched-tokens", "64"]


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "jpaged", "serve", "--port", "0", *SIZES, "--drain-s", "60"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            said = process.stdout.readline()
            where = r"jpaged serves jpaged-demo at http://127\.0\.0\.1:(\d+)\n"
            found = re.fullmatch(where, said)
            assert found, said + process.stderr.read()
            yield process, int(found[1])
        finally:
            process.kill()


def begin(port: int, **body: Any) -> Any:
    """The answer to a stream, which has begun."""
    sent = json.dumps({"prompt": "def main():\n", "stream": True, "ignore_eos": True} | body)
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        sent.encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(asked, timeout=120)


def test_it_drains(server: tuple[subprocess.Popen[str], int]):
    """After SIGTERM a stream that runs ends as it should, a new client is refused, the status is
    0.
    """
    process, port = server
    with begin(port, max_tokens=300) as stream:
        assert stream.status == 200 and stream.readline().startswith(b"data: {")
        process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 20
        refused = False
        while not refused and time.monotonic() < until:
            try:
                with begin(port, max_tokens=1) as other:
                    other.read()
                time.sleep(0.02)
            except OSError:
                refused = True
        assert refused
        rest = stream.read().decode()
    assert rest.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in rest
    assert process.wait(60) == 0
    assert process.stderr is not None and process.stderr.read() == ""


def test_what_does_not_end_in_time_is_told():
    command = [sys.executable, "-m", "jpaged", "serve", "--port", "0", *SIZES, "--drain-s", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with begin(port, max_tokens=1000, n=4) as stream:
            assert stream.readline().startswith(b"data: {")
            process.send_signal(signal.SIGTERM)
            rest = stream.read().decode()
        assert '"code":"stopping"' in rest or rest.endswith("data: [DONE]\n\n")
        assert process.wait(60) == 0


def test_a_second_signal_stops_it(server: tuple[subprocess.Popen[str], int]):
    process, port = server
    with begin(port, max_tokens=900) as stream:
        assert stream.readline().startswith(b"data: {")
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert process.stderr is not None and process.stderr.read() == "", "no traceback"


def test_a_port_in_use_is_seen_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def load(*_: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(run, "make_server", load)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve(["--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error == f"jpaged serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert serve(["--host", "no-such-host.invalid", "--port", "0"]) == 1
    assert "cannot listen on no-such-host.invalid:0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serve(["--port", "70000"])
    assert "is not a port" in capsys.readouterr().err


def test_an_interrupt_while_it_loads(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def load(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "make_server", load)
    assert serve(["--port", "0"]) == 130 and capsys.readouterr().err == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_addresses_are_taken(host: str):
    sockets = run.take_address(host, 0)
    try:
        assert sockets and all(s.getsockname()[1] > 0 for s in sockets)
        with pytest.raises(OSError):  # nobody is answered before there is a model
            socket.create_connection(("127.0.0.1", sockets[0].getsockname()[1]), timeout=5)
    finally:
        for taken in sockets:
            taken.close()


def test_flags():
    args = make_parser().parse_args(["some/folder", "--max-waiting", "7", "--no-reasoning"])
    assert (args.max_waiting, args.enable_reasoning, args.model) == (7, False, "some/folder")
    assert (name_of(None), name_of("Owner/Name"), name_of(str(ROOT / "docs"))) == (
        "jpaged-demo",
        "Owner/Name",
        "docs",
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/no/such/folder"], "no such"),
        (["--max-choices", "0"], "max_choices=0"),
        (["--head-timeout-s", "0"], "head_timeout_s=0.0"),
        (["--api-key", "two words"], "api_keys"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--seed", str(2**64)], "seed=18446744"),
    ],
)
def test_what_cannot_start_is_one_sentence(argv: list[str], said: str, capsys: Any):
    assert serve(["--port", "0", *argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jpaged serve: ") and said in error and error.count("\n") == 1


def test_the_command_without_a_command(capsys: Any):
    assert main([]) == 2 and "usage: jpaged COMMAND" in capsys.readouterr().err


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    for name in [name for name in sys.modules if name.startswith("jpaged.openai.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["serve"]) == 1
    assert "pip install 'jpaged[server]'" in capsys.readouterr().err
    assert os.environ["JAX_PLATFORMS"] == "cpu"
