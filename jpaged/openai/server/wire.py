"""Connections, bodies and errors: the traffic between a server and clients, which may be
hostile.
"""

import asyncio
import hmac
import http
import ipaddress
import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import h11
from pydantic_core import PydanticSerializationError, to_json
from uvicorn.protocols.http.h11_impl import H11Protocol

from jpaged.openai.protocol import BodyError
from jpaged.openai.responses import Failure
from jpaged.openai.server.record import RequestRecord
from jpaged.openai.server.settings import ServerSettings

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
DISCARD_S = 1.0
PING = b": ping\n\n"  # a comment, which readers of events skip
WORD = re.compile(r"[\w.-]{1,60}", re.ASCII)
MOST_NAMES = 8  # names of fields in a header, at most
OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::", "")
EXTRA_CONNECTIONS = 16
HIDDEN = "internal error while serving this request; the server's log says why"


class ApiError(Exception):
    """An answer that is an error: an HTTP status, and OpenAI's fields of an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.details = {"message": message, "type": kind, "param": param, "code": code}

    @classmethod
    def of(cls, error: BaseException) -> "ApiError":
        """Return the answer to any error. Internal errors are not described to the client."""
        if isinstance(error, cls):
            return error
        if isinstance(error, TimeoutError):
            said = "the request took longer than this server allows"
            return cls(504, said, kind="timeout_error", code="timeout")
        failure = Failure.of(error)
        message = failure.message if failure.status < 500 else HIDDEN
        fields = {"kind": failure.kind, "code": failure.code, "param": failure.param}
        return cls(failure.status, message, **fields)

    @property
    def body(self) -> bytes:
        return encode({"error": self.details})


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    fields = {"kind": "rate_limit_error", "code": "overloaded"}
    return ApiError(429, message, **fields, headers={"Retry-After": str(retry_after_s)})


class Gone(Exception):
    """The client has disconnected, or does not read what it is sent. There is nobody to answer."""


def encode(value: Any) -> bytes:
    """Return JSON in UTF-8. Text that UTF-8 cannot encode is escaped."""
    try:
        return to_json(value)
    except PydanticSerializationError:  # half of a surrogate pair
        return json.dumps(value, separators=(",", ":")).encode()


def listed(names: Sequence[str]) -> str:
    """Return names of fields for a header: those that are plain words, and the number of the
    others.
    """
    words = [name for name in names if WORD.fullmatch(name)][:MOST_NAMES]
    others = len(names) - len(words)
    return ", ".join([*words, *([f"and {others} more"] if others else [])])


class Exchange:
    """One HTTP request and its answer. status: of the answer, None until it begins. text: of the
    body, from `read` until it has been parsed. headers: added to any answer. record: what logs and
    traces say of it. is_quiet: whether nothing was written since somebody set it.
    """

    def __init__(self, scope: Any, receive: Receive, send: Send, settings: ServerSettings):
        self.scope, self.settings = scope, settings
        self._receive, self._send = receive, send
        self._flow, self._transport = scope["state"]["flow"], scope["state"]["transport"]
        self._is_chunked = scope["http_version"] == "1.1"  # as a stream's answer is
        self.status: int | None = None
        self._unread = scope["method"] == "POST"  # whether a part of the body has not been read
        self.text = ""
        self.record = RequestRecord.of(scope)
        self.headers = [(b"x-request-id", self.record.request_id.encode())]
        self.is_quiet = True
        self.error_code: str | None = None
        self.key: str | None = None  # the request's key, once it is checked
        # What an error is written as: the body of an answer, and the last event of a stream.
        self.error_body: Callable[[ApiError], bytes] = lambda error: error.body
        self.error_event: Callable[[ApiError], bytes] = lambda e: b"data: " + e.body + b"\n\n"

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.scope["headers"] if key == name), b"")

    @property
    def address(self) -> str | None:
        """The address of the client."""
        client = self.scope.get("client")
        return client[0] if client else None

    def check_room(self) -> None:
        """Raise ApiError if all connections that the server allows are busy with other requests."""
        if self.scope["state"].get("is_extra"):
            said = "all connections of this server are in use"
            raise ApiError(
                503, said, kind="server_error", code="overloaded", headers={"Retry-After": "1"}
            )

    def check_host(self) -> None:
        """Raise ApiError if there is no key and the Host header names another host.

        A malicious page can make its own name resolve to this machine's address; to a browser, this
        server is then part of that page. But the browser still sends the name in the Host header.
        """
        if not self.settings.api_keys and not is_own_host(
            self.header(b"host").decode("latin-1"), self.settings.hosts
        ):
            said = (
                "without a key this server does not accept this Host header; --allowed-host adds it"
            )
            raise ApiError(403, said, code="host_not_allowed", headers={"Connection": "close"})

    def check_key(self) -> None:
        """Raise ApiError unless the request carries one of the keys. It takes the same time for
        every wrong key.
        """
        keys = self.settings.api_keys
        kind, _, credential = self.header(b"authorization").partition(b" ")
        sent = credential.strip() if kind.lower() == b"bearer" else b""
        sent = sent or self.header(b"x-api-key").strip()  # where Anthropic's clients have it
        # Compare all of them, also after a match, so that the time reveals nothing.
        right = [key for key in keys if hmac.compare_digest(sent, key.encode())]
        self.key = right[0] if right else None
        if keys and not right:
            raise ApiError(
                401,
                "a request needs the header Authorization: Bearer KEY, with a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def read(self, held: "Held") -> None:
        """Read the body into `text`. Raises ApiError if it is too large, too slow or not JSON, and
        Gone.
        """
        kind = self.header(b"content-type").partition(b";")[0].strip().lower()
        if kind != JSON:  # a page of another site may send other types without asking
            raise ApiError(415, "a body must have Content-Type: application/json")
        if self.header(b"content-encoding").lower() not in (b"", b"identity"):
            raise ApiError(415, "a body must not have a Content-Encoding")
        length = self.header(b"content-length")
        if length and self.header(b"transfer-encoding"):  # a proxy may have used the other one
            said = "a request must not have both a Content-Length and a Transfer-Encoding"
            raise ApiError(400, said, headers={"Connection": "close"})
        most = self.settings.body_bytes
        large = ApiError(413, f"the body is longer than {most} bytes", code="body_too_large")
        if length.isdigit() and int(length[:20]) > most:
            raise large
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                while self._unread:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    # Counted as it arrives, since the header may be missing.
                    chunk = message.get("body", b"")
                    self._unread = bool(message.get("more_body"))
                    if len(body) + len(chunk) > most:
                        raise large
                    held.take(len(chunk))
                    body += chunk
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", code="timeout") from None
        try:
            self.text = body.decode()
        except UnicodeDecodeError as e:
            said = f"not UTF-8: {e.reason} at byte {e.start}"
            raise BodyError(said, code="invalid_encoding") from None

    async def while_connected[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the client disconnects, cancel it and raise Gone."""

        async def leave() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass

        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Gone
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        fixed = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, *self.headers, *fixed],
        }
        await self._out(start)

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    @property
    def is_ready(self) -> bool:
        """Whether `write_now` may be called: nothing waits for the client to read, and the answer
        is sent in chunks.
        """
        return self._is_chunked and not self._flow.write_paused

    async def write_piece(self, body: bytes) -> None:
        """Write a piece of a stream."""
        if self.is_ready:
            self.write_now(body)
        else:
            self.is_quiet = False
            await self.write(body)

    def write_now(self, body: bytes) -> None:
        """Write a piece of a stream that is ready for it. There are as many as tokens, so this
        bypasses ASGI and h11, whose view of the answer a chunk does not change.
        """
        self.is_quiet = False
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def ping(self) -> None:
        """Write a comment to a stream of events that has begun, unless its client reads slowly:
        then there is something on its way already.
        """
        if self.is_ready and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(PING), PING))

    async def answer(
        self, body: bytes, status: int = 200, kind: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [(b"content-type", kind), length, *headers])
        await self.write(body, more=False)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error. If a stream of events has begun, the error is its last event."""
        self.error_code = error.details["code"] or str(error.status)
        if self.status is None:
            headers = [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
            await self._discard()
            body = self.error_body(error)
            await self.answer(body, error.status, JSON, [*headers, (b"connection", b"close")])
        else:
            await self.write(self.error_event(error), more=False)

    async def _discard(self) -> None:
        """Read the rest of a body for a moment: a client that cannot finish sending does not read
        the answer.
        """
        left = 4 * self.settings.body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while self._unread and left > 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    self._unread = bool(message.get("more_body"))

    async def _out(self, message: Any) -> None:
        if not self._flow.write_paused:  # writing does not wait, so no timeout is needed
            return await self._send(message)
        try:
            async with asyncio.timeout(self.settings.stall_timeout_s):
                await self._send(message)
        except TimeoutError:
            # Closing would wait for the client to read the rest.
            self._transport.abort()
            await asyncio.sleep(0)
            raise Gone from None


def is_own_host(header: str, hosts: tuple[str, ...]) -> bool:
    """Return whether a Host header names this machine or one of the hosts. A missing header is
    accepted, since browsers always send one.
    """
    name = header.strip().lower()
    if not name or "*" in hosts:
        return True
    name = re.sub(r":\d*$", "", name).removeprefix("[").removesuffix("]").removesuffix(".")
    if name in OWN_HOSTS or name in (host.lower() for host in hosts):
        return True
    try:
        ipaddress.ip_address(name)  # an address, not a name that could resolve to another address
    except ValueError:
        return False
    return any(host in EVERY_ADDRESS for host in hosts)


class Room:
    """The bytes of all bodies that have arrived and are not parsed yet, or of other things. full:
    what is said where there is no room.
    """

    def __init__(self, most: int, full: str = "this server is reading too many bodies"):
        self.most, self.used, self.full = most, 0, full

    def hold(self) -> "Held":
        return Held(self)


class Held:
    """The share of a Room that one request holds until `close`."""

    def __init__(self, room: Room):
        self._room, self._count = room, 0

    def take(self, count: int) -> None:
        """Reserve this many more bytes. Raises ApiError if there is no room."""
        room = self._room
        if room.used + count > room.most:
            raise overloaded(room.full)
        room.used += count
        self._count += count

    def close(self) -> None:
        """Give all bytes back."""
        self._room.used -= self._count
        self._count = 0


class Connection(H11Protocol):
    """uvicorn's connection, with limits on the number of connections and on the time for a
    request's head.

    h11 bounds the size of a head. A connection that has not sent a whole head in time is closed,
    for its first request and for every later one. A connection is busy only once a whole request
    has arrived. At the limit, the connection that has not been busy for longest is closed to make
    room. If all are busy, a few more are accepted for /health; other requests on them are answered
    with 503.
    """

    settings: ServerSettings  # set on a subclass for each server

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self.idle_since = self.loop.time()
        is_extra = len(self.connections) > self.settings.max_connections and not self._make_room()
        # Requests find these values in their scope.
        more = {"transport": transport, "flow": self.flow, "is_extra": is_extra}
        self.app_state = {**self.app_state, **more}
        if len(self.connections) > self.settings.max_connections + EXTRA_CONNECTIONS:
            transport.abort()
        else:
            self._expect_head()

    @property
    def is_busy(self) -> bool:
        """Whether a whole request has arrived on it that is not answered yet."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _make_room(self) -> bool:
        """Close the connection that has not been busy for longest. Return whether there was one."""
        everyone: Any = self.connections
        others = (c for c in everyone if c is not self and not c.is_busy)
        idle = min(others, key=lambda c: c.idle_since, default=None)
        if idle is None:
            return False
        self.connections.discard(idle)  # no longer counted, although it is not torn down yet
        idle.transport.abort()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP. uvicorn calls this while it handles h11's exception."""
        broken = sys.exception()
        status = broken.error_status_hint if isinstance(broken, h11.RemoteProtocolError) else 400
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the rest of its body is lost, so it cannot be answered
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun already
            return
        said = f"not a valid HTTP request: {broken}" if broken is not None else msg
        body = ApiError(status, said, code="invalid_http").body
        headers = [
            ("content-type", JSON),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-content-type-options", "nosniff"),
            ("x-request-id", secrets.token_hex(16)),
        ]
        reason = http.HTTPStatus(status).phrase
        for event in (
            h11.Response(status_code=status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()
        self._expect_head()

    def _expect_head(self) -> None:
        """Start the timer for a head that is expected, and stop it when the head has arrived."""
        waits = self.cycle is None or self.cycle.response_complete
        if not waits and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif waits and self._head_timer is None:
            seconds = self.settings.head_timeout_s
            self._head_timer = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
