"""Connections, bodies and errors: what passes between a server and clients that may mean it ill."""

import asyncio
import hmac
import http
import ipaddress
import json
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jpaged.openai.protocol import BodyError
from jpaged.openai.responses import Failure
from jpaged.openai.server.settings import ServerSettings

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
DISCARD_S = 1.0
WORD = re.compile(r"[\w.-]{1,60}", re.ASCII)
MOST_NAMES = 8  # of fields, in a header
COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::", "")
EXTRA_CONNECTIONS = 16
HIDDEN = "the server failed at this request; its log says why"


class ApiError(Exception):
    """An answer that is an error: its HTTP status, and OpenAI's fields of it."""

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
        """Return what a client is told of any error; not what is wrong within."""
        if isinstance(error, cls):
            return error
        if isinstance(error, TimeoutError):
            said = "the request took longer than this server lets it"
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
    """The client has left, or takes nothing: nobody is to be answered."""


def encode(value: Any) -> bytes:
    """JSON in UTF-8; escaped where a text cannot be written as it is."""
    try:
        return COMPACT.encode(value).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def listed(names: Sequence[str]) -> str:
    """Names of fields as a header may have them: those that are words, and how many others."""
    words = [name for name in names if WORD.fullmatch(name)][:MOST_NAMES]
    others = len(names) - len(words)
    return ", ".join([*words, *([f"and {others} more"] if others else [])])


class Exchange:
    """One request as it came, and the answer as it goes out. `status` is None until it begins.
    text: of the body, from `read` until whoever has understood it lets go of it. headers: of the
    answer, whatever it is.
    """

    def __init__(self, scope: Any, receive: Receive, send: Send, settings: ServerSettings):
        self.scope, self.settings = scope, settings
        self._receive, self._send = receive, send
        self.status: int | None = None
        self._unread = scope["method"] == "POST"  # whether there is more of the body
        self.text = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.error_code: str | None = None
        self.key: str | None = None  # that the request came with, once it is checked

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.scope["headers"] if key == name), b"")

    @property
    def address(self) -> str | None:
        """The address of the client."""
        client = self.scope.get("client")
        return client[0] if client else None

    def check_room(self) -> None:
        """ApiError where all connections that there may be are busy with others."""
        if self.scope["state"].get("is_extra"):
            said = "all connections of this server are in use"
            raise ApiError(
                503, said, kind="server_error", code="overloaded", headers={"Retry-After": "1"}
            )

    def check_host(self) -> None:
        """ApiError where there is no key and the request names another host.

        A page elsewhere may give its own name the address of this machine, and is then no page
        elsewhere to a browser; but the browser still says which name it asked for.
        """
        if not self.settings.api_keys and not is_own_host(
            self.header(b"host").decode("latin-1"), self.settings.hosts
        ):
            said = "this server has no key and does not answer to this Host; --allowed-host adds it"
            raise ApiError(403, said, code="host_not_allowed", headers={"Connection": "close"})

    def check_key(self) -> None:
        """ApiError unless the request carries one of the keys. Takes as long for any wrong one."""
        keys = self.settings.api_keys
        kind, _, credential = self.header(b"authorization").partition(b" ")
        sent = credential.strip() if kind.lower() == b"bearer" else b""
        # All of them, whichever it is.
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
        """Have the body in `text`. Raises ApiError where it is too large, too slow or no JSON, and
        Gone.
        """
        kind = self.header(b"content-type").partition(b";")[0].strip().lower()
        if kind != JSON:  # a page elsewhere may send other types without asking
            raise ApiError(415, "a body must have Content-Type: application/json")
        if self.header(b"content-encoding").lower() not in (b"", b"identity"):
            raise ApiError(415, "a body must come as it is, without a Content-Encoding")
        length = self.header(b"content-length")
        if length and self.header(b"transfer-encoding"):  # a proxy may have gone by the other one
            said = "a body has a Content-Length or a Transfer-Encoding, not both"
            raise ApiError(400, said, headers={"Connection": "close"})
        most = self.settings.max_body_bytes
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
                    # Counted as it comes: the header may be missing.
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
        """Return the result of some work. If the client leaves, cancel it and raise Gone."""

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

    async def write_piece(self, body: bytes) -> None:
        """The same of a piece of a stream, of which there are as many as tokens. A chunk changes
        nothing of what ASGI and h11 know of an answer, so it goes past them.
        """
        state = self.scope["state"]
        if state["flow"].write_paused or self.scope["http_version"] != "1.1":
            await self.write(body)
        elif not state["transport"].is_closing():
            state["transport"].write(b"%x\r\n%b\r\n" % (len(body), body))

    async def answer(
        self, body: bytes, status: int = 200, kind: bytes = JSON, headers: Headers = ()
    ) -> None:
        """A whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [(b"content-type", kind), length, *headers])
        await self.write(body, more=False)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error; at the end of what has begun, if that is a stream of events."""
        self.error_code = error.details["code"] or str(error.status)
        if self.status is None:
            headers = [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
            await self._discard()
            await self.answer(error.body, error.status, JSON, [*headers, (b"connection", b"close")])
        else:
            await self.write(b"data: " + error.body + b"\n\n", more=False)

    async def _discard(self) -> None:
        """Read what is left of a body for a moment: a client that cannot send it to its end does
        not see the answer.
        """
        left = 4 * self.settings.max_body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while self._unread and left > 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    self._unread = bool(message.get("more_body"))

    async def _out(self, message: Any) -> None:
        state = self.scope["state"]
        if not state["flow"].write_paused:  # it does not wait: no clock is needed
            return await self._send(message)
        try:
            async with asyncio.timeout(self.settings.stall_timeout_s):
                await self._send(message)
        except TimeoutError:
            # Closing would wait until the client has read the rest.
            state["transport"].abort()
            await asyncio.sleep(0)
            raise Gone from None


def is_own_host(header: str, hosts: tuple[str, ...]) -> bool:
    """Return whether a Host header names this machine, or one of the hosts. An absent one does:
    browsers always send it.
    """
    name = header.strip().lower()
    if not name or "*" in hosts:
        return True
    name = re.sub(r":\d*$", "", name).removeprefix("[").removesuffix("]").removesuffix(".")
    if name in OWN_HOSTS or name in (host.lower() for host in hosts):
        return True
    try:
        ipaddress.ip_address(name)  # no name that somebody could give another address
    except ValueError:
        return False
    return any(host in EVERY_ADDRESS for host in hosts)


class Room:
    """Bytes of bodies that have come and are not understood yet, of all connections together."""

    def __init__(self, most: int):
        self.most, self.used = most, 0

    def hold(self) -> "Held":
        return Held(self)


class Held:
    """What one body takes of a room until it is closed."""

    def __init__(self, room: Room):
        self._room, self._count = room, 0

    def take(self, count: int) -> None:
        """Reserve this many more bytes; ApiError where there is no room for them."""
        room = self._room
        if room.used + count > room.most:
            raise overloaded("this server is reading too many bodies")
        room.used += count
        self._count += count

    def close(self) -> None:
        """Give all back."""
        self._room.used -= self._count
        self._count = 0


class Connection(H11Protocol):
    """uvicorn's, with a limit to how many there are and to how long a head may take.

    h11 bounds the size of a head. What has sent no whole head in time is closed, at the first
    request of a connection and at every later one. Only connections whose request has come whole
    are busy: where there are as many as there may be, the one that has not been busy for longest
    makes room. Where all are busy, a few more are taken, for /health; other requests on them are
    answered 503.
    """

    settings: ServerSettings  # set on the class of a server's own

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self.idle_since = self.loop.time()
        is_extra = len(self.connections) > self.settings.max_connections and not self._make_room()
        # Requests find these in their scope.
        more = {"transport": transport, "flow": self.flow, "is_extra": is_extra}
        self.app_state = {**self.app_state, **more}
        if len(self.connections) > self.settings.max_connections + EXTRA_CONNECTIONS:
            transport.abort()
        else:
            self._expect_head()

    @property
    def is_busy(self) -> bool:
        """Whether there is a request on it that has come whole and is not answered yet."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _make_room(self) -> bool:
        """Close the connection that has not been busy for longest; return whether there is one."""
        everyone: Any = self.connections
        others = (c for c in everyone if c is not self and not c.is_busy)
        idle = min(others, key=lambda c: c.idle_since, default=None)
        if idle is None:
            return False
        self.connections.discard(idle)  # not counted any more, though it is yet to be torn down
        idle.transport.abort()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. uvicorn calls this while it handles what h11 has raised."""
        broken = sys.exception()
        status = broken.error_status_hint if isinstance(broken, h11.RemoteProtocolError) else 400
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the rest of its body is lost: it answers nobody
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun
            return
        said = f"not a valid HTTP request: {broken}" if broken is not None else msg
        body = ApiError(status, said, code="invalid_http").body
        headers = [
            ("content-type", JSON),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-content-type-options", "nosniff"),
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
        """Start the clock of a head that is to come, stop it when it is there."""
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
