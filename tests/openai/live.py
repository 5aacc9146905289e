"""A server on a free port of this machine, in a thread, and a client without packages."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jpaged import LLM, AsyncLLM
from jpaged.engine.integrity import check
from jpaged.fleet.face import FleetLLM
from jpaged.openai.server.app import Server
from jpaged.openai.server.record import Observer
from jpaged.openai.server.reload import Reload
from jpaged.openai.server.run import Listener
from jpaged.openai.server.settings import ServerSettings

PATIENCE_S = 60.0
SIZES: dict[str, Any] = {
    "token_buckets": (64,),
    "seq_buckets": (8,),
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
    "max_model_len": 512,
}
# A chat template that has tools, which the server calls in Qwen's form.
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {# <tool_call> #}"
)


class Live:
    """A server that runs, and what a client can ask of it, which waits so long for each answer."""

    def __init__(self, server: Server, listener: Listener):
        self.server, self.listener, self.port = server, listener, listener.port
        self.patience_s = PATIENCE_S

    @property
    def llm(self) -> AsyncLLM:
        """The engine's face; a server of these tests has one engine and no fleet."""
        assert isinstance(self.server.llm, AsyncLLM)
        return self.server.llm

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def request(
        self, path: str, body: Any = None, *, key: str | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (as JSON where it is) and headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience_s)
        with contextlib.closing(connection):
            sent = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
            if sent is not None:
                headers.setdefault("Content-Type", "application/json")
            if key is not None:
                headers["Authorization"] = f"Bearer {key}"
            connection.request("GET" if sent is None else "POST", path, sent, headers)
            response = connection.getresponse()
            raw = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            is_json = found.get("content-type") == "application/json"
            return response.status, json.loads(raw) if is_json else raw.decode(), found

    def post(self, path: str, body: Any) -> Any:
        """The answer to a good request."""
        status, answer, _ = self.request(path, body)
        assert status == 200, answer
        return answer

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, which ends as it should."""
        status, text, headers = self.request(path, body | {"stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def begin(self, path: str, body: Any, *, read: bool = True) -> socket.socket:
        """A connection with a request on it whose answer has begun."""
        connection = self.connect()
        connection.sendall(http_post(path, body))
        if read:
            assert connection.recv(1) == b"H"
        return connection

    def call(self, function: Any) -> Any:
        """What a function of the LLM comes to, between two steps."""
        llm = self.server.llm
        assert isinstance(llm, AsyncLLM)
        return llm._thread.call(function, llm._llm).result(PATIENCE_S)

    def assert_nothing_left(self) -> None:
        """Soon, no request is in the engine, no block in use, no place taken."""
        until = time.monotonic() + PATIENCE_S
        while (left := self._left()) != (0, 0, 0, 0) and time.monotonic() < until:
            time.sleep(0.01)
        assert left == (0, 0, 0, 0)

    def _left(self) -> tuple[int, int, int, int]:
        def left(llm: LLM) -> tuple[int, int]:
            engine: Any = llm.session.engine
            check(engine.replicas[0].queues)
            return len(engine.requests), llm.stats()["blocks_in_use"]

        generation = self.server._generation
        return *self.call(left), generation._choices, generation.room.used


def first_tops(answer: Any) -> dict[str, float]:
    """The log probability of each of the best tokens in the first place of a chat's answer."""
    first = answer["choices"][0]["logprobs"]["content"][0]
    return {top["token"]: top["logprob"] for top in first["top_logprobs"]}


def same_tops(answer: Any, other: Any) -> bool:
    """Whether two answers saw the same prompt, by the best tokens in their first place.

    Not to the bit: who comes second finds the first's blocks, and the program of a prompt's tail
    may round another way than that of a whole prompt, by the processor.
    """
    return first_tops(answer) == pytest.approx(first_tops(other), abs=1e-4)


def http_post(path: str, body: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


@contextlib.contextmanager
def serving(
    llm: LLM | FleetLLM,
    *,
    observers: Sequence[Observer] = (),
    tls: tuple[str, str | None] | None = None,
    watched: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """A server on a model or a fleet, which is closed with it. watched: arguments of Reload."""
    face = llm if isinstance(llm, FleetLLM) else AsyncLLM(llm)
    server = Server(face, ServerSettings(**{"models": ("tiny",), **settings}), observers)
    reload = None if watched is None else Reload(server, certificates=tls, **watched)
    listener = Listener(server, "127.0.0.1", 0, quiet=True, tls=tls, reload=reload)
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()))
    thread.start()
    until = time.monotonic() + PATIENCE_S
    while not listener.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.005)
    assert listener.started
    try:
        yield Live(server, listener)
    finally:
        listener.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
