"""What an operator needs of a server: ids of requests, the access log, traces, pages of other
origins, streams that are kept alive, TLS, and files that are read again while it runs.
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.errors import ConfigError
from tests.checkpoint.test_lora import tensors
from tests.checkpoint.test_lora import write as write_adapter
from tests.text_model import write_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server import logs
from jpaged.openai.server.record import RequestRecord
from jpaged.openai.server.reload import Reload, read_adapters, read_keys, signature
from jpaged.openai.server.settings import ServerSettings
from tests.openai.live import PATIENCE_S, Live, http_post, serving
from tests.openai.test_server import SETTINGS

ROOT = Path(__file__).parents[2]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"prompt": "hello there", "seed": 3, "max_tokens": 5}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 4}
SITE = "https://chat.example.org"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("operations") / "tiny")


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    return []


@pytest.fixture(scope="module")
def live(folder: Path, records: list[RequestRecord]) -> Iterator[Live]:
    settings: dict[str, Any] = {"origins": (SITE,), "ping_s": 0.1, "headers_after_s": 0.3}
    with serving(LLM(folder, **SETTINGS), observers=[records.append], **settings) as live:
        yield live


def wait_for(true: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """What a function returns, once it returns something."""
    until = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return value


class TestRequestIds:
    def test_every_answer_has_one(self, live: Live) -> None:
        answers = [
            live.request(COMPLETIONS, HELLO),
            live.request(CHAT, TALK | {"stream": True}),
            live.request(COMPLETIONS, HELLO | {"n": -1}),
            live.request("/nowhere"),
            live.request("/health"),
        ]
        assert [status for status, _, _ in answers] == [200, 200, 400, 404, 200]
        ids = [headers["x-request-id"] for _, _, headers in answers]
        assert len(set(ids)) == 5 and all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)

    def test_a_clients_own_is_kept_if_it_is_one(self, live: Live) -> None:
        for sent, is_kept in (("trace-1:a.b_C", True), ("x" * 129, False), ("a b", False)):
            _, _, headers = live.request("/health", **{"X-Request-Id": sent})
            assert (headers["x-request-id"] == sent) == is_kept

    def test_broken_http_has_one_too(self, live: Live) -> None:
        with live.connect() as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert re.search(rb"x-request-id: [0-9a-f]{32}\r\n", connection.recv(4096))


class TestRecords:
    def test_of_an_answer_and_of_a_stream(self, live: Live, records: list[RequestRecord]) -> None:
        del records[:]
        answer = live.post(COMPLETIONS, HELLO | {"n": 2})
        live.events(CHAT, TALK)
        whole, stream = wait_for(lambda: records[1:] and records)
        usage = answer["usage"]
        assert (whole.operation, whole.model, whole.streams) == ("text_completion", "tiny", False)
        assert (whole.prompt_tokens, whole.completion_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert whole.answer_id == answer["id"] and whole.first_token_s is None
        assert whole.finish_reasons == [c["finish_reason"] for c in answer["choices"]]
        assert (whole.method, whole.path, whole.status, whole.error) == (
            "POST",
            COMPLETIONS,
            200,
            None,
        )
        assert whole.client == "127.0.0.1" and whole.params is not None and whole.params.n == 2
        assert (stream.operation, stream.streams) == ("chat", True)
        assert stream.first_token_s is not None and 0 < stream.first_token_s <= stream.seconds

    @pytest.mark.parametrize(
        ("path", "body", "name", "operation"),
        [
            ("/v1/responses", {"input": "hey", "max_output_tokens": 4}, "id", "chat"),
            (
                "/v1/messages",
                {"model": "tiny", "max_tokens": 4, "messages": TALK["messages"]},
                "id",
                "chat",
            ),
            (
                "/inference/v1/generate",
                {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}},
                "request_id",
                "text_completion",
            ),
        ],
    )
    def test_the_id_is_that_of_the_answer(
        self,
        live: Live,
        records: list[RequestRecord],
        path: str,
        body: dict[str, Any],
        name: str,
        operation: str,
    ) -> None:
        del records[:]
        answer = live.post(path, body)
        (record,) = wait_for(lambda: records)
        assert (record.answer_id, record.operation) == (answer[name], operation)

    def test_of_embeddings(self, live: Live, records: list[RequestRecord]) -> None:
        del records[:]
        answer = live.post("/v1/embeddings", {"input": ["hello", "you"]})
        (record,) = wait_for(lambda: records)
        assert (record.operation, record.model, record.status) == ("embeddings", "tiny", 200)
        assert record.prompt_tokens == answer["usage"]["prompt_tokens"] > 0
        assert record.finish_reasons == []

    def test_of_errors_and_of_clients_that_leave(
        self, live: Live, records: list[RequestRecord]
    ) -> None:
        del records[:]
        live.request(COMPLETIONS, HELLO | {"model": "other"})
        live.request("/v1/nothing%0Ahere")
        long = HELLO | {"max_tokens": 60, "ignore_eos": True}
        with blocked(live), live.connect() as connection:
            connection.sendall(http_post(COMPLETIONS, long))
            wait_for(lambda: live.server._generation._choices)
        refused, lost, gone = wait_for(lambda: records[2:] and records)
        assert (refused.status, refused.error, refused.operation) == (404, "model_not_found", None)
        assert (lost.path, lost.status) == ("/v1/nothing%0Ahere", 404), "as it was sent"
        assert (gone.status, gone.error, gone.operation) == (None, None, "text_completion")
        live.assert_nothing_left()


def lines_of(format: logs.LogFormat, record: RequestRecord) -> str:
    """What the access log writes of a record."""
    out = io.StringIO()
    with logs.written(format, "warning", access=True, stream=out):
        logs.log_access(record)
        logging.getLogger("jpaged").info("too low")
        logging.getLogger("jpaged").warning("of the engine: %s", "a\nb")
    for name in (*logs.LOGGERS, logs.ACCESS):
        logger = logging.getLogger(name)
        assert logger.propagate and not logger.handlers, "all is as it was"
    return out.getvalue()


RECORD = RequestRecord(
    request_id="abc",
    method="POST",
    path=CHAT,
    client=None,
    headers=[],
    seconds=1.23456789,
    status=200,
    operation="chat",
    model="tiny",
    streams=True,
    first_token_s=0.25,
    prompt_tokens=7,
    cached_tokens=4,
    completion_tokens=5,
    finish_reasons=["stop", "length"],
)


class TestAccessLog:
    def test_as_json(self) -> None:
        access, warning = map(json.loads, lines_of("json", RECORD).splitlines())
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", access.pop("time"))
        assert access == {
            "level": "info",
            "logger": "jpaged.access",
            "request_id": "abc",
            "client": None,
            "method": "POST",
            "path": CHAT,
            "status": 200,
            "seconds": 1.234568,
            "model": "tiny",
            "stream": True,
            "prompt_tokens": 7,
            "cached_tokens": 4,
            "completion_tokens": 5,
            "finish_reasons": ["stop", "length"],
            "first_token_s": 0.25,
        }
        assert (warning["level"], warning["message"]) == ("warning", "of the engine: a\nb")

    def test_as_text(self) -> None:
        access, warning, rest = lines_of("text", RECORD).splitlines()
        _, level, text = access.split(maxsplit=2)
        assert level == "INFO" and text.startswith(
            f"request_id=abc client=- method=POST path={CHAT} status=200 seconds=1.234568 "
        )
        assert text.endswith("finish_reasons=stop,length first_token_s=0.25")
        assert warning.endswith("WARNING of the engine: a") and rest == "b"

    def test_an_exception_is_in_its_line(self) -> None:
        record = logging.LogRecord("jpaged", logging.ERROR, "f", 1, "a %s", ("b",), None)
        try:
            raise ValueError("deep")
        except ValueError as e:
            record.exc_info = (type(e), e, e.__traceback__)
        shown = json.loads(logs.JsonLines().format(record))
        assert shown["message"] == "a b" and "ValueError: deep" in shown["error"]


@contextlib.contextmanager
def blocked(live: Live) -> Iterator[None]:
    """The engine takes no step inside the block."""
    go, is_blocked = threading.Event(), threading.Event()

    def wait(llm: Any) -> None:
        is_blocked.set()
        go.wait(PATIENCE_S)

    waiting = live.llm._thread.call(wait, live.llm._llm)
    assert is_blocked.wait(PATIENCE_S)
    try:
        yield
    finally:
        go.set()
        waiting.result(PATIENCE_S)


class TestStreamsAreKeptAlive:
    def test_the_head_and_comments_come_before_the_first_token(self, live: Live) -> None:
        body = HELLO | {"stream": True}
        with live.connect() as connection:
            with blocked(live):
                connection.sendall(http_post(COMPLETIONS, body))
                read = b""
                while read.count(b": ping\n\n") < 2:
                    read += connection.recv(4096)
                head, _, events = read.partition(b"\r\n\r\n")
                assert b" 200 " in head and b"text/event-stream" in head and b"data:" not in read
                assert events.startswith(b"8\r\n: ping\n\n\r\n8\r\n")
            while not read.endswith(b"0\r\n\r\n"):
                read += connection.recv(65536)
        assert read.count(b"data: {") >= 2 and b"data: [DONE]" in read
        want = live.post(COMPLETIONS, HELLO)["choices"][0]["text"]
        chunks = re.findall(rb"data: (\{.*\})\n", read)
        text = "".join(json.loads(c)["choices"][0]["text"] for c in chunks)
        assert text == want

    def test_an_error_before_the_first_token_has_its_status(self, live: Live) -> None:
        body = {"prompt": [3] * 5000, "stream": True}
        status, answer, _ = live.request(COMPLETIONS, body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"

    def test_an_error_after_the_head_is_the_last_event(self, folder: Path) -> None:
        limits: dict[str, Any] = {"headers_after_s": 0.05, "request_timeout_s": 1.0}
        with serving(LLM(folder, **SETTINGS), **limits) as live, blocked(live):
            status, text, _ = live.request(COMPLETIONS, HELLO | {"stream": True})
        assert (
            status == 200 and json.loads(text.removeprefix("data: "))["error"]["code"] == "timeout"
        )

    @pytest.mark.parametrize("seconds", [0, -1.0, float("inf")])
    def test_intervals(self, seconds: float) -> None:
        for name in ("ping_s", "headers_after_s"):
            with pytest.raises(ConfigError, match=f"{name}={seconds!r}"):
                settings: dict[str, Any] = {name: seconds}
                ServerSettings(models=("a",), **settings)
        assert ServerSettings(models=("a",), ping_s=None).ping_s is None


class TestOrigins:
    def preflight(self, live: Live, origin: str) -> tuple[bytes, bytes]:
        head = f"OPTIONS {CHAT} HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n"
        head += "Access-Control-Request-Method: POST\r\nConnection: close\r\n"
        head += "Access-Control-Request-Headers: content-type,x-stainless-os\r\n\r\n"
        with live.connect() as connection:
            connection.sendall(head.encode())
            read = b""
            while piece := connection.recv(4096):
                read += piece
        first, _, rest = read.partition(b"\r\n")
        return first, rest.lower()

    def test_a_page_of_the_list_may_ask(self, live: Live) -> None:
        first, headers = self.preflight(live, SITE)
        assert b" 200 " in first
        assert f"access-control-allow-origin: {SITE}\r\n".encode() in headers
        assert b"x-stainless-os" in headers
        status, _, found = live.request(CHAT, TALK | {"stream": True}, Origin=SITE)
        assert status == 200 and found["access-control-allow-origin"] == SITE
        assert "X-Request-Id" in found["access-control-expose-headers"]

    def test_others_may_not(self, live: Live) -> None:
        first, headers = self.preflight(live, "https://evil.example.org")
        assert b" 400 " in first and b"access-control-allow-origin" not in headers
        _, _, found = live.request("/v1/models", Origin="https://evil.example.org")
        assert "access-control-allow-origin" not in found

    @pytest.mark.parametrize("origin", ["example.org", "https://a/b", "https://", "null"])
    def test_what_is_no_origin(self, origin: str) -> None:
        with pytest.raises(ConfigError, match="is no origin"):
            ServerSettings(models=("a",), origins=(origin,))
        assert ServerSettings(models=("a",), origins=("*",)).origins == ("*",)


class TestTraces:
    PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    @pytest.fixture
    def spans(self) -> Iterator[tuple[Any, Callable[[], list[Any]]]]:
        sdk = pytest.importorskip("opentelemetry.sdk.trace.export", reason="jpaged[otel]")
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from jpaged.openai.server.tracing import Tracing

        exporter = InMemorySpanExporter()
        with contextlib.closing(Tracing(sdk.SimpleSpanProcessor(exporter))) as tracing:
            yield tracing, lambda: list(exporter.get_finished_spans())

    def test_a_request_is_a_span(self, live: Live, spans: Any) -> None:
        tracing, finished = spans
        live.server.observers = (*live.server.observers, tracing)
        sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ["zz"], "n": 2}
        try:
            live.request(CHAT, TALK | sent | {"stream": True, "seed": 4}, traceparent=self.PARENT)
            live.request("/health")
            span = wait_for(finished)[0]
        finally:
            live.server.observers = live.server.observers[:-1]
        assert span.name == "chat tiny" and span.kind.name == "SERVER"
        assert f"{span.context.trace_id:032x}" == self.PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == self.PARENT.split("-")[2]
        found = dict(span.attributes)
        assert found["gen_ai.usage.input_tokens"] > 0
        assert 0 < found["gen_ai.usage.output_tokens"] <= 8
        assert (
            0
            < found.pop("gen_ai.response.time_to_first_chunk")
            <= ((span.end_time - span.start_time) / 1e9)
        )
        assert found.pop("gen_ai.response.id").startswith("chatcmpl-")
        want = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "jpaged",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.stream": True,
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.top_k": 7,
            "gen_ai.request.seed": 4,
            "gen_ai.request.stop_sequences": ("zz",),
            "gen_ai.request.choice.count": 2,
            "gen_ai.output.type": "text",
            "http.request.method": "POST",
            "http.response.status_code": 200,
            "url.path": CHAT,
        }
        assert found.items() >= want.items() and len(finished()) == 1
        assert len(found["gen_ai.response.finish_reasons"]) == 2
        assert "hey" not in str(found), "no text of the prompt"
        assert span.status.status_code.name == "UNSET"
        assert span.resource.attributes["service.name"] == "jpaged"

    def test_errors(self, spans: Any) -> None:
        import dataclasses

        tracing, finished = spans
        tracing(dataclasses.replace(RECORD, error="timeout"))
        tracing(dataclasses.replace(RECORD, status=None))
        tracing(dataclasses.replace(RECORD, operation=None))
        spans_of = finished()
        assert [span.attributes["error.type"] for span in spans_of] == ["timeout", "client_left"]
        assert {span.status.status_code.name for span in spans_of} == {"ERROR"}

    def test_names_are_those_of_the_conventions(self) -> None:
        pytest.importorskip("opentelemetry.semconv", reason="jpaged[otel]")
        from opentelemetry.semconv._incubating.attributes import (
            client_attributes,
            error_attributes,
            gen_ai_attributes,
            http_attributes,
            url_attributes,
        )

        from jpaged.openai.server.tracing import attributes

        modules = (gen_ai_attributes, http_attributes, url_attributes)
        modules = (*modules, client_attributes, error_attributes)
        known = {v for module in modules for v in vars(module).values() if isinstance(v, str)}
        params = SamplingParams(n=2, seed=1, top_k=3, stop=["a"], frequency_penalty=0.1)
        import dataclasses

        record = dataclasses.replace(RECORD, params=params, error="x", client="c", answer_id="i")
        named = set(attributes(record))
        assert len(named) > 20 and named - known == {"jpaged.request.id"}


def rewrite(file: Path, text: str) -> None:
    """Give a file another text in one step: who watches it never reads a part of that."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


class TestReload:
    def test_keys(self, folder: Path, tmp_path: Path, caplog: Any) -> None:
        """New keys are taken without a restart; a file without one changes nothing."""
        file = tmp_path / "keys"
        file.write_text("# of the team\nfirst-key\n\n")
        watched = {"key_file": str(file), "keys": ["flag-key"], "every_s": 0.05}
        settings: dict[str, Any] = {"api_keys": ("flag-key", "first-key")}
        with serving(LLM(folder, **SETTINGS), watched=watched, **settings) as live:

            def status(key: str) -> int:
                return live.request("/v1/models", key=key)[0]

            assert (status("first-key"), status("flag-key"), status("new-key")) == (200, 200, 401)
            with live.connect() as connection:
                body = HELLO | {"stream": True, "max_tokens": 60, "ignore_eos": True}
                head, _, rest = http_post(COMPLETIONS, body).partition(b"\r\n")
                key = b"\r\nAuthorization: Bearer first-key\r\n"
                connection.sendall(head + key + rest)
                rewrite(file, "new-key\n")
                wait_for(lambda: status("new-key") == 200)
                assert (status("first-key"), status("flag-key")) == (401, 200)
                read = b""
                while not read.endswith(b"0\r\n\r\n"):
                    read += connection.recv(65536)
                assert b"[DONE]" in read, "a request of the old key goes on"
            rewrite(file, "# none\n")
            wait_for(lambda: "has no key" in caplog.text)
            rewrite(file, "a bad key\n")
            wait_for(lambda: "printable ASCII" in caplog.text)
            assert status("new-key") == 200 and live.request("/v1/models")[0] == 401
            file.unlink()
            wait_for(lambda: "No such file" in caplog.text)
            assert status("new-key") == 200

    def test_adapters(self, folder: Path, tmp_path: Path, caplog: Any) -> None:
        found = tensors(modules=("q_proj", "o_proj", "down"))
        write_adapter(tmp_path / "one", found, lora_alpha=8)
        write_adapter(tmp_path / "two", {k: np.roll(v, 1) for k, v in found.items()}, lora_alpha=8)
        file = tmp_path / "adapters"
        file.write_text("a = one\n")
        llm = LLM(folder, max_loras=2, max_lora_rank=4, **SETTINGS)
        llm.add_adapter("a", str(tmp_path / "one"))
        watched = {
            "adapter_file": str(file),
            "adapters": read_adapters(str(file)),
            "every_s": 0.05,
        }
        with serving(llm, watched=watched) as live:

            def names() -> list[str]:
                return [m["id"] for m in live.request("/v1/models")[1]["data"]]

            def text(model: str) -> str:
                greedy = HELLO | {"model": model, "temperature": 0, "max_tokens": 12}
                return live.post(COMPLETIONS, greedy)["choices"][0]["text"]

            assert names() == ["tiny", "a"]
            first = text("a")
            rewrite(file, "a = two\nb = one\n")
            wait_for(lambda: names() == ["tiny", "a", "b"] and text("b") == first)
            wait_for(lambda: text("a") != first)
            rewrite(file, "b = nowhere\n")
            wait_for(lambda: "is no NAME=FOLDER that exists" in caplog.text)
            assert names() == ["tiny", "a", "b"]
            rewrite(file, "b = one\n")
            wait_for(lambda: names() == ["tiny", "b"])

    def test_a_file_that_changes_while_adapters_load(self, tmp_path: Path) -> None:
        """What is written meanwhile is seen at the next look."""
        file, added = tmp_path / "adapters", list[str]()
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
        file.write_text("")

        class Loading:
            async def add_adapter(self, name: str, folder: str) -> None:
                added.append(name)
                if name == "a":
                    rewrite(file, "a = one\nb = two\n")

        server: Any = SimpleNamespace(llm=Loading())
        reload = Reload(server, adapter_file=str(file), adapters={})
        rewrite(file, "a = one\n")

        async def look(times: int) -> None:
            for _ in range(times):
                await reload._look("adapters", is_asked=False)

        asyncio.run(look(3))
        assert added == ["a", "b"]

    def test_files(self, tmp_path: Path) -> None:
        file = tmp_path / "f"
        for read in (read_keys, read_adapters):
            with pytest.raises(ConfigError, match="No such file"):
                read(str(file))
        file.write_text("x\n# y\n x \nz\n")
        assert read_keys(str(file)) == ("x", "z")
        (tmp_path / "d").mkdir()
        file.write_text(f"a=d\nb={tmp_path}/d\n")
        assert read_adapters(str(file)) == {"a": str(tmp_path / "d"), "b": f"{tmp_path}/d"}
        file.write_text("a=d\na=d\n")
        with pytest.raises(ConfigError, match="twice"):
            read_adapters(str(file))
        before = signature(str(tmp_path / "d"), str(tmp_path / "none"))
        (tmp_path / "d" / "x").write_text("1")
        assert before == () != signature(str(tmp_path / "d"))


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of localhost that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    files = ["-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", *curve, *files, *subject]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return str(certificate), str(key)


def test_tls(folder: Path, tmp_path: Path, caplog: Any) -> None:
    """Streams go over TLS, pings too; a renewed certificate is used for new connections, and one
    that does not fit its key is not.
    """
    first, second = (make_certificate(tmp_path, name) for name in ("first", "second"))
    used = (str(tmp_path / "used.pem"), str(tmp_path / "used.key"))
    for source, target in zip(first, used, strict=True):
        shutil.copy(source, target)
    settings: dict[str, Any] = {"ping_s": 0.05, "headers_after_s": 0.05}
    watched = {"every_s": 0.05}
    with serving(LLM(folder, **SETTINGS), tls=used, watched=watched, **settings) as live:

        def stream(trusted: str) -> bytes:
            context = ssl.create_default_context(cafile=trusted)
            connection = context.wrap_socket(live.connect(), server_hostname="localhost")
            with connection:
                with blocked(live):
                    connection.sendall(http_post(COMPLETIONS, HELLO | {"stream": True}))
                    read = b""
                    while b": ping" not in read:
                        read += connection.recv(4096)
                while not read.endswith(b"0\r\n\r\n"):
                    read += connection.recv(65536)
            return read

        assert b"data: [DONE]" in stream(first[0])
        with pytest.raises(ssl.SSLCertVerificationError):
            stream(second[0])
        shutil.copy(second[0], used[0])  # the key is the old one still
        wait_for(lambda: "certificates were not reloaded" in caplog.text)
        assert b"data: [DONE]" in stream(first[0])
        shutil.copy(second[1], used[1])
        wait_for(lambda: "certificates were reloaded" in caplog.text)
        assert b"data: [DONE]" in stream(second[0])
        with live.connect() as plain:
            plain.sendall(http_post(COMPLETIONS, HELLO))
            assert not plain.recv(4096).startswith(b"HTTP/1.1 200")


def over(path: str, head: str, body: bytes = b"") -> bytes:
    """The answer that a server on a Unix socket gives to a request, after which it closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(path)
        head += f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        connection.sendall(head.encode() + body)
        read = b""
        while piece := connection.recv(65536):
            read += piece
    return read


def test_a_service_on_a_unix_socket(tmp_path: Path) -> None:
    """As systemd starts it: it tells when it is ready, reloads its keys on SIGHUP, logs requests as
    JSON, and leaves no socket behind.
    """
    path, keys = str(tmp_path / "server.sock"), tmp_path / "keys"
    keys.write_text("one\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(path)  # left by a process that was killed
    sizes = ["--max-num-seqs", "4", "--num-blocks", "32", "--max-num-batched-tokens", "64"]
    flags = ["--uds", path, "--api-key-file", str(keys), "--reload-s", "3600", "--access-log"]
    command = [sys.executable, "-m", "jpaged", "serve", *flags, "--log-format", "json", *sizes]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE_S)
        env = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
            try:
                assert systemd.recv(64) == b"READY=1"
                assert process.stdout is not None and process.stderr is not None
                assert process.stdout.readline() == f"jpaged serves jpaged-demo at unix:{path}\n"

                def ask(key: str) -> int:
                    head = f"POST {COMPLETIONS} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
                    body = json.dumps({"prompt": "def f", "max_tokens": 3}).encode()
                    return int(over(path, head, body).split()[1])

                assert (ask("one"), ask("two")) == (200, 401)
                keys.write_text("two\n")
                assert (ask("one"), ask("two")) == (200, 401), "nobody looks for an hour"
                process.send_signal(signal.SIGHUP)
                wait_for(lambda: ask("two") == 200)
                process.send_signal(signal.SIGTERM)
                assert systemd.recv(64) == b"STOPPING=1"
                assert process.wait(60) == 0 and not os.path.exists(path)
                lines = [json.loads(line) for line in process.stderr.read().splitlines()]
            finally:
                process.kill()
    asked = [line for line in lines if line["logger"] == "jpaged.access"]
    assert [line["status"] for line in asked[:4]] == [200, 401, 200, 401]
    assert asked[0]["completion_tokens"] == 3 and asked[0]["client"] is None
    assert asked[1]["error"] == "invalid_api_key" and "model" not in asked[1]
    assert any(line.get("message") == "keys were reloaded: 1 keys" for line in lines)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--uds", "{folder}/file"], "cannot listen on {folder}/file: it exists and is no socket"),
        (["--uds", "{folder}/taken"], "cannot listen on {folder}/taken: Address already in use"),
        (["--uds", "/no/such/folder/s"], "cannot listen on /no/such/folder/s: No such file"),
        (["--ssl-keyfile", "x"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "{folder}/file"], "--ssl-certfile {folder}/file, --ssl-keyfile None: "),
        (["--ssl-certfile", "/no/such"], "--ssl-certfile /no/such, --ssl-keyfile None: No such"),
        (["--api-key-file", "/no/such"], "--api-key-file /no/such: No such file"),
        (["--api-key-file", "{folder}/empty"], "--api-key-file {folder}/empty: has no key"),
        (["--adapter-file", "{folder}/file"], "--adapter-file {folder}/file: 'text' is no NAME="),
        (["--allowed-origin", "example.org"], "origins: 'example.org' is no origin"),
    ],
)
def test_what_cannot_start_is_one_sentence(
    flags: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from jpaged.openai.server import run

    (tmp_path / "file").write_text("text\n")
    (tmp_path / "empty").write_text("\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        taken.bind(str(tmp_path / "taken"))
        taken.listen()
        assert run.main(["--port", "0", *(f.format(folder=tmp_path) for f in flags)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jpaged serve: ") and error.count("\n") == 1
    assert said.format(folder=tmp_path) in error


def test_traces_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jpaged.openai.server import run

    monkeypatch.delitem(sys.modules, "jpaged.openai.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    flags = ["--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces"]
    assert run.main(flags) == 1
    assert "pip install 'jpaged[otel]'" in capsys.readouterr().err
