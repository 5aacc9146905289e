"""Clients that mean ill, or leave: bounded time and memory, no block lost, others served."""

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import LLM
from tests.text_model import write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from tests.openai.live import Live, http_post, serving

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
ENGINE_SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
LIMITS: dict[str, Any] = {
    "max_body_bytes": 20_000,
    "max_connections": 150,
    "max_waiting": 4000,
    "head_timeout_s": 0.5,
    "body_timeout_s": 0.5,
    "stall_timeout_s": 0.5,
}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO: dict[str, Any] = {"prompt": "hello there", "seed": 3, "max_tokens": 6, "ignore_eos": True}
LONG = HELLO | {"max_tokens": 50, "stream": True}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("attacks") / "tiny")
    with serving(LLM(folder, **ENGINE_SETTINGS), **LIMITS) as live:
        yield live


@pytest.fixture(autouse=True)
def _others_are_served(live: Live) -> Iterator[None]:
    """With the same tokens as before; and nothing is left of whoever came between."""
    before = live.post(COMPLETIONS, HELLO)["choices"]
    yield
    deadline = time.monotonic() + 20
    while True:
        try:
            after = live.post(COMPLETIONS, HELLO)["choices"]
            break
        except OSError:  # as many connections as there may be: until they are thrown out
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert after == before
    live.assert_nothing_left()


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the other side ends it, or tears it down."""
    found = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while piece := connection.recv(65536):
            found += piece
    return found


def status_of(raw: bytes) -> int:
    return int(raw.split(None, 2)[1])


def test_a_body_that_is_too_large(live: Live):
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for length in ("20001", "9" * 4000):  # told, and not sent
        with live.connect() as connection:
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
            assert status_of(rest_of(connection)) in (400, 413)
    with live.connect() as connection:  # not told, and sent without end
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"1000\r\n" + b"[" * 4096 + b"\r\n"
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(64):
                connection.sendall(chunk)
        raw = rest_of(connection)
        assert status_of(raw) == 413 and b"body_too_large" in raw
    body = HELLO | {"prompt": "a" * 21_000}
    assert live.request(COMPLETIONS, body)[0] == 413
    assert live.request(COMPLETIONS, HELLO | {"prompt": "a" * 15_000})[0] == 400


@pytest.mark.parametrize("kind", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [70, 3000])
def test_json_that_is_too_deep(live: Live, kind: str, depth: int):
    end = {"[": "]", '{"a":': "}"}[kind]
    deep = kind * depth + "1" + end * depth
    for path, raw in (
        (COMPLETIONS, f'{{"prompt": {deep}}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": {deep}}}]}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{deep}]}}'),
        ("/tokenize", deep),
        (COMPLETIONS, kind * depth),
    ):
        status, answer, _ = live.request(path, raw.encode())
        assert status == 400 and answer["error"]["code"] == "invalid_json", answer


def test_numbers_that_are_too_large(live: Live):
    for name in ("n", "seed", "top_k", "logprobs", "min_tokens", "best_of", "prompt_logprobs"):
        for value in (2**64, -(2**64), 10**300):
            status, answer, _ = live.request(COMPLETIONS, HELLO | {name: value})
            assert (status, answer["error"]["param"]) == (400, name)
    for name in ("n", "logprobs", "min_tokens", "prompt_logprobs"):
        assert live.request(COMPLETIONS, HELLO | {name: 10**18})[0] == 400
    assert live.request(COMPLETIONS, HELLO | {"n": 129})[0] == 400
    assert live.request(COMPLETIONS, HELLO | {"prompt": ["a"] * 129})[0] == 400
    digits = b'{"prompt": "a", "n": ' + b"9" * 15_000 + b"}"
    assert live.request(COMPLETIONS, digits)[0] == 400


def test_lists_that_every_token_would_pay_for(live: Live):
    for field in (
        {"stop": [chr(33 + i % 90) * (1 + i // 90) for i in range(65)]},
        {"stop": ["a" * 5000]},
        {"stop_token_ids": [5] * 2000},
        {"cache_salt": "a" * 300},
    ):
        status, answer, _ = live.request(COMPLETIONS, HELLO | field)
        assert (status, answer["error"]["param"]) == (400, *field), answer
    assert live.request(COMPLETIONS, HELLO | {"stop": ["~~~"] * 64})[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_biases_are_counted_before_they_are_read(live: Live, path: str):
    """Keys that are no token ids are not even looked at where there are too many."""
    body = LEAST[path] | {"logit_bias": {f"x{i}": 1 for i in range(500)}}
    status, answer, _ = live.request(path, body)
    error = answer["error"]
    assert (status, error["param"]) == (400, "logit_bias") and "500 entries" in error["message"]


def test_heads_that_are_too_large_or_broken(live: Live):
    for head in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 30_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 5\r\nHost: localhost\r\n\r\nabc",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"GET /" + b"a" * 100_000,
    ):
        with live.connect() as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(head)
            raw = rest_of(connection)
            assert raw == b"" or status_of(raw) in (400, 431)


def test_heads_and_bodies_that_do_not_come(live: Live):
    """A connection that says nothing, half a head, half of a second head; half a body."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(live.connect()) for _ in range(3)]
        silent[1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        silent[2].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        halves = [stack.enter_context(live.connect()) for _ in range(2)]
        for half in halves:
            half.sendall(http_post(COMPLETIONS, HELLO)[:-20])
        answers = [rest_of(connection) for connection in silent + halves]
    assert answers[:2] == [b"", b""] and answers[2].count(b"HTTP/1.1") == 1
    assert [status_of(raw) for raw in answers[3:]] == [408, 408]
    assert time.monotonic() - begun < 15


def test_many_bodies_at_once(live: Live):
    """All bodies together have a bound; what is over it is told to come again."""
    with contextlib.ExitStack() as stack:
        half = http_post(COMPLETIONS, HELLO | {"prompt": "a" * 19_000})[:-10]
        for _ in range(40):
            stack.enter_context(live.connect()).sendall(half)
        room = live.server._generation.room
        until = time.monotonic() + 10
        while room.used < room.most - 20_000 and time.monotonic() < until:
            time.sleep(0.005)
        assert room.most - 20_000 < room.used <= room.most


def test_more_connections_than_there_may_be(live: Live):
    """They are closed; those that say nothing are thrown out, and the next client is served."""
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(live.connect())
        listener: Any = live.listener
        until = time.monotonic() + 10
        while len(listener.server_state.connections) > LIMITS["max_connections"] + 1:
            assert time.monotonic() < until, "what is closed is let go at its own time"
            time.sleep(0.01)
        status = 0
        while status != 200 and time.monotonic() < until:
            with contextlib.suppress(OSError):
                status = live.request("/health")[0]
        assert status == 200


def test_a_thousand_connections(tmp_path: Path):
    """Each is answered."""
    folder = write_folder(tmp_path / "tiny")
    limits = LIMITS | {"max_connections": 2000, "body_timeout_s": 60.0, "head_timeout_s": 60.0}
    with serving(LLM(folder, **ENGINE_SETTINGS), **limits) as live, contextlib.ExitStack() as stack:
        request = http_post(COMPLETIONS, HELLO | {"max_tokens": 2, "stream": True})
        connections = [stack.enter_context(live.connect()) for _ in range(1000)]
        for connection in connections:
            connection.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        for connection in connections:
            raw = rest_of(connection)
            assert status_of(raw) == 200 and b"data: [DONE]" in raw
        live.assert_nothing_left()


def test_clients_that_leave(live: Live):
    """Before their prompt is read, while they wait, at the first piece, later; all at once."""
    rng = random.Random(5)
    going_on = live.begin(COMPLETIONS, LONG)
    connections = []
    for i in range(60):
        body = rng.choice([LONG, LONG | {"stream": False}, LONG | {"n": 4}, HELLO])
        body = body | {"prompt": f"prompt number {i % 7}"}
        connection = live.begin(COMPLETIONS, body, read=False)
        if rng.random() < 0.3:
            connection.recv(rng.choice([1, 300]))
        if rng.random() < 0.6:
            connection.close()
        else:
            connections.append(connection)
        if rng.random() < 0.2:
            time.sleep(0.01)
    for connection in connections:
        if rng.random() < 0.5:  # resets it
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    with going_on:
        raw = b""
        while b"[DONE]" not in raw:
            raw += going_on.recv(65536)
    events = [json.loads(x[6:]) for x in raw.decode().splitlines() if x.startswith("data: {")]
    text = "".join(c.get("text", "") for event in events for c in event["choices"])
    assert text == live.post(COMPLETIONS, LONG | {"stream": False})["choices"][0]["text"]
    live.assert_nothing_left()


def test_a_client_that_reads_nothing(live: Live):
    """Its blocks are free when its tokens are drawn; it is dropped when it has stalled."""
    body = LONG | {"n": 30, "logprobs": 5}
    listener: Any = live.listener
    # What the system keeps for a connection comes from here, and is small.
    listener.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", live.port))
    with connection:
        connection.sendall(http_post(COMPLETIONS, body))
        until = time.monotonic() + 30
        while live.server._generation._choices == 0 and time.monotonic() < until:
            time.sleep(0.005)
        before = live.post(COMPLETIONS, HELLO)
        while listener.server_state.tasks and time.monotonic() < until:
            time.sleep(0.01)
        assert not listener.server_state.tasks
        live.assert_nothing_left()
        assert b"[DONE]" not in rest_of(connection)
    assert before["choices"]


SURROGATES = [
    (COMPLETIONS, {"prompt": "a\ud800b"}),
    (COMPLETIONS, HELLO | {"stop": ["\udc00"]}),
    (COMPLETIONS, HELLO | {"model": "\ud800"}),
    (COMPLETIONS, HELLO | {"\ud800": 1}),
    (COMPLETIONS, HELLO | {"structured_outputs": {"regex": "\ud800+"}}),
    (COMPLETIONS, HELLO | {"structured_outputs": {"json": {"properties": {"\ud800": {}}}}}),
    (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"\ud800": 1}}),
    (RESPONSES, {"input": "a", "metadata": {"a": "\ud800"}}),
    ("/tokenize", {"prompt": "\ud800"}),
]


@pytest.mark.parametrize(("path", "body"), SURROGATES, ids=str)
def test_halves_of_a_character(live: Live, path: str, body: dict[str, Any]):
    """JSON can write them, no text can hold them: not in a log, a header or an answer either."""
    status, answer, _ = live.request(path, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_encoding")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"prompt": "a\xff"}', "not UTF-8: invalid start byte at byte 13"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature=inf"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
    ids=str,
)
def test_bytes_that_are_no_json(live: Live, raw: bytes, said: str):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(
            head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
        )
        answer = rest_of(connection)
    assert status_of(answer) == 400
    assert said in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


HIDDEN = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("fields", "body", "status"),
    [
        (b"Content-Length: -5", b"{}", 400),
        (b"Content-Length: 2\r\nContent-Length: 40", b"{}", 400),
        (b"Content-Length: 4\r\nTransfer-Encoding: chunked", HIDDEN, 400),
        (b"Transfer-Encoding: chunked", b"ZZ\r\n{}\r\n0\r\n\r\n", 400),
        (b"Transfer-Encoding: chunked", b"F" * 17 + b"\r\n{}", 0),
        (b"Content-Length: 2\r\nContent-Encoding: gzip", b"{}", 415),
        (b"Content-Length: 2\r\nX-Request-Id: a\0b", b"{}", 400),
    ],
    ids=["negative", "two lengths", "smuggled", "no chunk", "endless chunk", "gzip", "nul"],
)
def test_bodies_told_wrongly(live: Live, fields: bytes, body: bytes, status: int):
    """At most one answer each: what follows in the same bytes is not taken for another request."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(head + fields + b"\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        answer = rest_of(connection)
    assert (status_of(answer) if answer else 0) == status and answer.count(b"HTTP/1.1 ") <= 1


def test_what_a_client_says_of_itself_goes_into_no_header(live: Live):
    status, answer, headers = live.request(COMPLETIONS, HELLO | {"model": "x\r\nSet-Cookie: a=b"})
    assert status == 404 and "set-cookie" not in headers and "\n" not in answer["error"]["message"]


def test_templates_are_the_servers(live: Live):
    """What is in a message is text; what would run in the template is refused."""
    loop = "{% for i in range(10**9) %}x{% endfor %}"
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": loop}], "max_tokens": 2}
    assert live.request(CHAT, chat)[0] == 200
    for extra in ({"chat_template": loop}, {"chat_template_kwargs": {"chat_template": loop}}):
        assert live.request(CHAT, chat | extra)[0] == 400


FIELDS = ("prompt", "n", "max_tokens", "temperature", "stop", "logprobs", "echo", "stream", "seed")
FIELDS += ("messages", "tools", "tool_choice", "logit_bias", "stream_options", "model", "user")
FIELDS += ("input", "text", "reasoning", "instructions", "store", "include", "metadata")
FIELDS += ("chat_template_kwargs", "truncate_prompt_tokens", "cache_salt", "top_logprobs")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("role", "content", "type", "function", "name", "1")), inner, max_size=3
        )
    ),
    max_leaves=6,
)


LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 2},
}


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5), st.sampled_from([*LEAST]))
@settings(max_examples=60)
def test_no_body_is_the_servers_fault(live: Live, body: dict[str, Any], path: str):
    """Whatever a field holds, it is understood or refused, in OpenAI's form."""
    status, answer, headers = live.request(path, LEAST[path] | body)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert answer["error"]["message"]
    elif headers["content-type"].startswith("text/event-stream"):
        assert path == RESPONSES or answer.endswith("data: [DONE]\n\n")
        assert path != RESPONSES or "event: response.incomplete" in answer
