"""What clients of one server share and what is kept apart: places, turns, connections, prefixes."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from jpaged.engine.policy import Policy
from jpaged.engine.sequence import Sequence
from jpaged.request.inputs import with_salt
from tests.text_model import write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.parties import Parties
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import EXTRA_CONNECTIONS, is_own_host
from tests.openai.live import Live, http_post, serving

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "the same prompt of two clients, a secret", "max_tokens": 1, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("sharing") / "tiny")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """A server without keys."""
    limits = {"max_connections": 40, "head_timeout_s": 60.0, "body_timeout_s": 60.0}
    hosts = ("127.0.0.1", "gpu.lan")
    with serving(LLM(folder, **SETTINGS), **limits, max_waiting=1000, hosts=hosts) as live:
        yield live


def cached(live: Live, key: str | None, body: dict[str, Any]) -> int:
    status, answer, _ = live.request(COMPLETIONS, body, key=key)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


class TestPrefixes:
    def test_keys_do_not_find_each_others_prompts(self, folder: Path):
        with serving(LLM(folder, **SETTINGS), api_keys=("a-key", "b-key")) as live:
            assert cached(live, "a-key", PROMPT) == 0
            assert cached(live, "a-key", PROMPT) > 0, "its own it finds"
            assert cached(live, "b-key", PROMPT) == 0
            assert live.request("/v1/models", key="a-key", Host="any.example")[0] == 200
            salted = PROMPT | {"cache_salt": "s"}
            assert cached(live, "a-key", salted) == 0
            assert cached(live, "a-key", salted) > 0
            assert cached(live, "b-key", salted) == 0
            chat = {"messages": [{"role": "user", "content": "a long secret " * 3}]}
            for key, found in (("a-key", False), ("b-key", False), ("a-key", True)):
                _, answer, _ = live.request(
                    "/v1/chat/completions", chat | {"max_tokens": 1}, key=key
                )
                assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == found

    @pytest.mark.parametrize(
        ("keys", "settings"),
        [(("a-key",), {}), ((), {}), (("a-key", "b-key"), {"share_prefix_cache": True})],
    )
    def test_what_is_shared(self, folder: Path, keys: tuple[str, ...], settings: dict[str, Any]):
        """Among clients with one key or none, and where the operator says so."""
        with serving(LLM(folder, **SETTINGS), api_keys=keys, **settings) as live:
            first, last = (keys[0], keys[-1]) if keys else (None, None)
            assert cached(live, first, PROMPT) == 0
            assert cached(live, last, PROMPT) > 0

    def test_the_salt_is_not_the_key(self):
        settings = ServerSettings(models=("m",), api_keys=("a-key", "b-key"))
        parties, others = Parties(settings), Parties(settings)
        salts = {parties.of(key, "127.0.0.1").salt for key in settings.api_keys}
        assert len(salts) == 2 and None not in salts
        assert not any(key in str(salt) for key in settings.api_keys for salt in salts)
        assert others.of("a-key", "127.0.0.1").salt not in salts, "it is another in each process"

    def test_no_salt_of_a_request_is_another_partys(self):
        a, b = "a" * 32, "b" * 32
        mine = {
            with_salt(salt, {"prompt": "x", "cache_salt": inner} if inner else "x")["cache_salt"]
            for salt in (a, b)
            for inner in (None, a, b, f"{a}:s", f"{b}:s", ":", "s")
        }
        assert len(mine) == 14


class TestParties:
    def test_by_key_where_there_are_several_else_by_address(self):
        keyed = Parties(ServerSettings(models=("m",), api_keys=("a", "b")))
        assert keyed.of("a", "1.2.3.4") == keyed.of("a", "4.3.2.1") != keyed.of("b", "1.2.3.4")
        for keys in ((), ("a",), ("a", "a")):
            plain = Parties(ServerSettings(models=("m",), api_keys=keys))
            key = keys[0] if keys else None
            assert plain.of(key, "1.2.3.4") != plain.of(key, "4.3.2.1")
            assert plain.of(key, "1.2.3.4") == plain.of(key, "::ffff:1.2.3.4")
            assert plain.of(key, "2001:db8::1") == plain.of(key, "2001:db8::2")
            assert plain.of(key, "2001:db8::1") != plain.of(key, "2001:db8:0:1::1")
            assert not plain.of(key, "1.2.3.4").is_known and plain.of(key, None).salt is None

    def test_a_key_takes_turns_with_another(self, folder: Path):
        """One with many long requests: another's are not behind all of them."""
        settings = {"api_keys": ("crowd-key", "other-key"), "max_waiting": 100}
        with serving(LLM(folder, **SETTINGS), **settings) as live:
            long = PROMPT | {"max_tokens": 20, "ignore_eos": True}
            ended: list[str] = []

            def ask(key: str) -> None:
                status, answer, _ = live.request(COMPLETIONS, long, key=key)
                assert status == 200, answer
                ended.append(key)

            crowd = [threading.Thread(target=ask, args=("crowd-key",)) for _ in range(60)]
            for thread in crowd:
                thread.start()
            generation = live.server._generation
            until = time.monotonic() + 30
            while generation._choices < 50 and not ended and time.monotonic() < until:
                time.sleep(0.002)
            before = len(ended)
            ask("other-key")
            assert len(ended) - before <= 30, "its turn came after nearly all of the others"
            for thread in crowd:
                thread.join()
            live.assert_nothing_left()
            assert not generation._choices_of

    def test_a_key_leaves_places_to_another(self, folder: Path):
        settings: dict[str, Any] = {"api_keys": ("a-key", "b-key"), "max_waiting": 4}
        llm = LLM(folder, **SETTINGS | {"max_num_seqs": 4, "seq_buckets": (4,)})
        with serving(llm, **settings) as live:
            body = PROMPT | {"max_tokens": 50, "ignore_eos": True, "stream": True}
            generation = live.server._generation
            raw = http_post(COMPLETIONS, body | {"n": 7})
            keyed = raw.replace(b"\r\n", b"\r\nAuthorization: Bearer a-key\r\n", 1)
            with live.connect() as connection:
                connection.sendall(keyed)
                assert connection.recv(1) == b"H"
                status, answer, headers = live.request(COMPLETIONS, PROMPT, key="a-key")
                assert (status, headers["retry-after"].isdigit()) == (429, True)
                assert "of this key" in answer["error"]["message"]
                assert live.request(COMPLETIONS, PROMPT, key="b-key")[0] == 200
                assert generation._choices >= 7, "the first one still runs"
            live.assert_nothing_left()

    def test_a_priority_reaches_the_engine(self, live: Live, monkeypatch: pytest.MonkeyPatch):
        seen, add = list[int](), Policy.add

        def watched(policy: Policy, seq: Sequence) -> None:
            seen.append(seq.priority)
            add(policy, seq)

        monkeypatch.setattr(Policy, "add", watched)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        answer = {"input": "a", "max_output_tokens": 1}
        routes = ((COMPLETIONS, PROMPT), ("/v1/chat/completions", chat), ("/v1/responses", answer))
        for path, body in routes:
            seen.clear()
            for priority in (0, 7, -3, None):
                assert live.request(path, body | {"priority": priority})[0] == 200
            assert seen == [0, 7, -3, 0], path
            status, answer, _ = live.request(path, body | {"priority": "high"})
            assert status == 400 and answer["error"]["param"] == "priority"


class TestConnections:
    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"POST /v1/completions HT",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            b"Content-Type: application/json\r\n\r\n{",
        ],
        ids=["silent", "half a head", "half a body"],
    )
    def test_idle_ones_make_room(self, live: Live, sent: bytes):
        """As many as there may be, none of which is about to end by itself."""
        with contextlib.ExitStack() as stack:
            for _ in range(3 * 40):
                connection = stack.enter_context(live.connect())
                with contextlib.suppress(OSError):
                    connection.sendall(sent)
            for _ in range(5):
                assert live.request("/health")[0] == 200
                assert live.request(COMPLETIONS, PROMPT)[0] == 200
            listener: Any = live.listener
            assert len(listener.server_state.connections) <= 40 + EXTRA_CONNECTIONS

    def test_an_idle_client_keeps_its_connection_until_room_is_short(self, live: Live):
        with live.connect() as kept:
            request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for _ in range(2):
                kept.sendall(request)
                response = http.client.HTTPResponse(kept)
                response.begin()
                assert response.status == 200 and response.read() == b'{"status":"ok"}'
            with contextlib.ExitStack() as stack:
                for _ in range(2 * 40):
                    stack.enter_context(live.connect())
                with contextlib.suppress(ConnectionResetError):
                    kept.settimeout(10)
                    assert kept.recv(1) == b"", "the one that was idle for longest"

    def test_busy_ones_are_left_alone_and_health_is_answered(self, live: Live):
        """As many as there may be, none of which ends while the engine is held."""
        go_on = threading.Event()
        held = live.llm._thread.call(go_on.wait, 60)
        body = PROMPT | {"max_tokens": 3, "ignore_eos": True, "stream": True}
        with contextlib.ExitStack() as stack:
            stack.callback(go_on.set)
            streams = [
                stack.enter_context(live.begin(COMPLETIONS, body, read=False)) for _ in range(40)
            ]
            until = time.monotonic() + 30
            while live.server._generation._choices < 40 and time.monotonic() < until:
                time.sleep(0.01)
            status, answer, headers = live.request(COMPLETIONS, PROMPT)
            assert status == 503 and answer["error"]["code"] == "overloaded"
            assert headers["retry-after"] == "1"
            for _ in range(2 * EXTRA_CONNECTIONS):
                assert live.request("/health")[0] == 200
            go_on.set()
            for stream in streams:
                raw = b""
                while b"[DONE]" not in raw:
                    more = stream.recv(65536)
                    assert more, "it was cut off"
                    raw += more
        assert held.result(60)
        live.assert_nothing_left()


def test_hosts(live: Live):
    """Without a key a page elsewhere that gives its name our address is refused; with one the key
    stands before it.
    """
    for host in ("localhost", "LOCALHOST:80", f"127.0.0.1:{live.port}", "[::1]:9", "gpu.lan."):
        assert live.request("/v1/models", Host=host)[0] == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "gpu.la"):
        for path, body in (("/v1/models", None), ("/metrics", None), (COMPLETIONS, PROMPT)):
            status, answer, _ = live.request(path, body, Host=host)
            assert (status, answer["error"]["code"]) == (403, "host_not_allowed"), host
    assert live.request("/health", Host="evil.example")[0] == 200


@pytest.mark.parametrize(
    ("header", "hosts", "is_own"),
    [
        ("", (), True),
        ("192.168.1.7:8000", ("127.0.0.1",), False),
        ("192.168.1.7:8000", ("0.0.0.0",), True),
        ("[fe80::1]:8000", ("::",), True),
        ("evil.example", ("0.0.0.0",), False),
        ("evil.example:80", ("*",), True),
        ("Box.Lan:80", ("box.lan",), True),
    ],
)
def test_host_names(header: str, hosts: tuple[str, ...], is_own: bool):
    assert is_own_host(header, hosts) == is_own


BROKEN = {
    "no HTTP": (b"hello\r\n\r\n", 400),
    "method": (b"G@T / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "length": (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "large": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 900_000 + b"\r\n\r\n", 431),
    "chunk": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\n\r\nzz\r\n",
        400,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_is_answered_as_openai_does(live: Live, name: str, caplog: Any):
    raw, wanted = BROKEN[name]
    with live.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(raw)
        response = http.client.HTTPResponse(connection)
        response.begin()
        error = json.loads(response.read())["error"]
        assert response.status == wanted and response.headers["connection"] == "close"
        assert response.headers["content-type"] == "application/json"
        assert set(error) == {"message", "type", "param", "code"} and error["code"]
        assert error["type"] == "invalid_request_error"
        connection.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        assert live.request("/health")[0] == 200
    assert not [r for r in caplog.records if r.exc_info], "no traceback"
