"""Prompts by one server, answers by another: what each is asked, and what becomes of a request if
one of them fails. End to end, with a block server between two of `jpaged serve`.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jpaged.cli import store
from jpaged.errors import ConfigError
from jpaged.integrations.prefill_decode import PrefillDecode, PrefillDecodeClient, prompt_body
from tests.tiny import ENGINE, make_params

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


class Stub:
    """A server that notes what it is asked. status: that it answers with."""

    def __init__(self, status: int = 200):
        self.asked, stub = list[tuple[str, dict[str, Any], str | None]](), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.asked.append((self.path, body, self.headers.get("Authorization")))
                self.send_response(status)
                self.end_headers()
                if body.get("stream"):
                    chunks = [{"n": i} for i in range(3)]
                    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
                    self.wfile.write("".join([*lines, "data: [DONE]\n\n"]).encode())
                else:
                    self.wfile.write(json.dumps({"of": len(stub.asked)}).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def stub() -> Iterator[Callable[..., Stub]]:
    stubs = list[Stub]()

    def make(status: int = 200) -> Stub:
        stubs.append(Stub(status))
        return stubs[-1]

    yield make
    for one in stubs:
        one.close()


BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "max_completion_tokens": 50,
    "n": 3,
    "temperature": 0.7,
    "seed": 5,
    "stop": ["x"],
}


def test_each_server_is_asked_its_step(stub: Any) -> None:
    first, second = stub(), stub()
    client = PrefillDecodeClient([first.address], [second.address + "/"], api_key="k")
    assert client.ask(CHAT, BODY) == {"of": 1}
    assert list(client.stream(CHAT, BODY)) == [{"n": 0}, {"n": 1}, {"n": 2}]
    (path, asked, key), (_, again, _) = first.asked
    assert path == CHAT and key == "Bearer k" and asked == again == prompt_body(BODY)
    assert asked["messages"] == BODY["messages"] and asked["tools"] == BODY["tools"]
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["n"]) == (1, 1, 1)
    assert "stop" not in asked and "stream" not in asked
    assert [body for _, body, _ in second.asked] == [{**BODY, "stream": x} for x in (False, True)]
    assert client.failed_prefills == 0


def test_without_the_first_step_there_is_an_answer(stub: Any) -> None:
    gone, broken, refuses, second = stub(), stub(500), stub(400), stub()
    gone.server.server_close()
    for first, failed in ((gone, 1), (broken, 1), (refuses, 0)):
        client = PrefillDecodeClient([first.address], [second.address], timeout_s=5.0)
        assert "of" in client.ask(CHAT, BODY)
        assert client.failed_prefills == failed
    with pytest.raises(urllib.error.HTTPError) as caught:
        PrefillDecodeClient([second.address], [refuses.address]).ask(CHAT, BODY)
    assert caught.value.code == 400
    caught.value.close()
    with pytest.raises(OSError):
        PrefillDecodeClient([second.address], [gone.address]).ask(CHAT, BODY)


class Raw:
    """A server that takes what is asked, answers these bytes, and closes, or never does."""

    def __init__(self, answer: bytes, *, hangs: bool = False):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.answer, self.hangs = answer, hangs
        self.taken = list[socket.socket]()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(self.listener.accept()[0])
                self._read(self.taken[-1])
                self.taken[-1].sendall(self.answer)
                if not self.hangs:
                    self.taken[-1].close()

    def _read(self, sock: socket.socket) -> None:
        """Take the whole of a request: closing before that would reset the connection, which the
        client may see in place of the answer.
        """
        with sock.makefile("rb") as request:
            length = 0
            while (line := request.readline().strip().lower()) != b"":
                name, _, value = line.partition(b":")
                length = int(value) if name == b"content-length" else length
            request.read(length)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        for sock in (self.listener, *self.taken):
            sock.close()


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    servers = list[Raw]()

    def make(answer: bytes, *, hangs: bool = False) -> Raw:
        servers.append(Raw(answer, hangs=hangs))
        return servers[-1]

    yield make
    for one in servers:
        one.close()


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'11\r\ndata: {"n": 0}\n\n\n\r\n'


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"", HEAD + b"5\r\nha", HEAD + b"no"])
def test_a_first_server_that_answers_nonsense_is_none(stub: Any, raw: Any, answer: bytes) -> None:
    client = PrefillDecodeClient([raw(answer).address], [stub().address])
    assert client.ask(CHAT, BODY) == {"of": 1} and client.failed_prefills == 1


def test_a_first_server_that_hangs_keeps_nobody_for_long(stub: Any, raw: Any) -> None:
    hung, other, second = raw(b"", hangs=True), stub(), stub()
    servers = [hung.address, other.address], [second.address]
    client = PrefillDecodeClient(*servers, prefill_timeout_s=0.2)
    for _ in range(3):
        assert "of" in client.ask(CHAT, BODY)
    # The others, which are asked first from then on, have what the hung one would have had.
    assert client.failed_prefills == 1 and len(other.asked) == 2 and len(hung.taken) == 1


@pytest.mark.parametrize("rest", [b"", b"5\r\nda", b"0\r\n\r\n", b"nonsense"])
def test_half_an_answer_is_an_error(stub: Any, raw: Any, rest: bytes) -> None:
    client = PrefillDecodeClient([stub().address], [raw(HEAD + EVENT + rest).address])
    chunks = list[Any]()
    with pytest.raises(ConnectionError, match="not whole"):
        for chunk in client.stream(CHAT, BODY):
            chunks += [chunk]
    assert chunks == [{"n": 0}]
    with pytest.raises(ConnectionError, match="not whole"):
        client.ask(CHAT, BODY)


def test_servers_take_turns(stub: Any) -> None:
    firsts, seconds = [stub(), stub()], [stub(), stub(), stub()]
    seconds[1].server.server_close()
    client = PrefillDecodeClient(*([one.address for one in some] for some in (firsts, seconds)))
    for _ in range(6):
        client.ask(CHAT, BODY)
    assert [len(one.asked) for one in firsts] == [3, 3]
    assert sorted(len(one.asked) for one in seconds) == [0, 2, 4]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a server of each kind"):
        PrefillDecodeClient([], ["http://h:1"])
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        PrefillDecodeClient(["h:1"], ["http://h:1"])
    with pytest.raises(ConfigError, match="must be /v1/completions"):
        PrefillDecodeClient(["http://h:1"], ["http://h:1"]).ask("/v1/models", {})
    import jpaged

    llm = jpaged.LLM(make_params(), **vars(ENGINE))
    with pytest.raises(ConfigError, match="take a prefix_store"):
        PrefillDecode(llm, llm)
    llm.close()
    for bad in (["--listen", "0.0.0.0:0"], ["--listen", "x"], ["--gib", "0"], ["--gib", "nan"]):
        with pytest.raises(SystemExit):
            store.main(bad)


class Running:
    """A process, once it has printed the address that it serves at."""

    def __init__(self, *args: str, address: str):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jpaged", *args],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.process.stdout is not None
        self.lines = list[str]()
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(address, line):
                self.address = found[0].rstrip("/")
                break
        else:
            raise AssertionError("".join(self.lines))
        # Else it would have to wait once the pipe is full.
        self._reader = threading.Thread(target=self.lines.extend, args=(self.process.stdout,))
        self._reader.start()

    def end(self) -> str:
        self.process.terminate()
        self.process.wait(60)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return "".join(self.lines)


def metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{address}/metrics") as response:
        lines = [line for line in response.read().decode().splitlines() if line[0] != "#"]
    return {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if "{" not in line}


@pytest.mark.slow
def test_end_to_end() -> None:
    """The answer of a pair is that of one server, and the second one computes 64 tokens at most."""
    blocks = Running("store", "--listen", "127.0.0.1:0", "--gib", "1", address=r"tcp://\S+")
    http = r"http://\S+"
    shared = ("serve", "--port", "0", "--num-blocks", "64", "--swap-min-tokens", "0")
    shared += ("--prefix-store", blocks.address)
    first = Running(*shared, "--prefix-store-policy", "write_through", address=http)
    second = Running(*shared, address=http)
    alone = Running("serve", "--port", "0", "--num-blocks", "64", address=http)
    try:
        prompt = "def add(numbers):\n    total = 0\n" + "    total += 1\n" * 100
        body = {"prompt": prompt, "max_tokens": 12, "seed": 3, "temperature": 1.0, "logprobs": 2}
        client = PrefillDecodeClient([first.address], [second.address])
        answer = client.ask("/v1/completions", body)
        only = PrefillDecodeClient([alone.address], [alone.address])
        assert answer["choices"] == only.ask("/v1/completions", body)["choices"]
        size = answer["usage"]["prompt_tokens"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert size > 300 and cached == (size - 1) // 64 * 64
        text = "".join(x["choices"][0]["text"] for x in client.stream("/v1/completions", body))
        assert text == answer["choices"][0]["text"] and client.failed_prefills == 0
        assert metrics(first.address)["jpaged_store_write_blocks_total"] == cached // 64
        assert metrics(second.address)["jpaged_store_read_blocks_total"] == cached // 64
        assert "bytes in use" in blocks.end()
        again = client.ask("/v1/completions", body | {"prompt": prompt[:700]})
        assert len(again["choices"][0]["text"]) > 0, "without a store"
    finally:
        for one in (first, second, alone, blocks):
            one.end()
