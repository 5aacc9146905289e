"""Images by URL: from listed hosts and public addresses alone, with bounds on bytes and time."""

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.images.fetch import PORTS, fetch, is_public
from jpaged.images.limits import ImageLimits
from jpaged.images.sources import load_image
from tests.images.test_sources import PIXELS, PNG

SLOW = 0.5


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", "http://" + path.removeprefix("/to/"))
            self.end_headers()
            return
        if path == "/loop":
            self.send_response(301)
            self.send_header("Location", "/loop")
            self.end_headers()
            return
        if path == "/nowhere":
            self.send_response(302)
            self.send_header("Location", "http://[")
            self.end_headers()
            return
        if path in ("/404", "/302"):
            self.send_response(int(path[1:]))
            self.end_headers()
            return
        self.send_response(200)
        if path == "/gzip":
            self.send_header("Content-Encoding", "gzip")
        if path == "/short":
            self.send_header("Content-Length", str(len(PNG) + 1))
        if path == "/said":
            self.send_header("Content-Length", str(10**12))
        if path == "/drip":
            self.send_header("Content-Length", str(10**5))
        self.end_headers()
        if path == "/host":
            self.wfile.write(self.headers["Host"].encode())
            return
        with contextlib.suppress(OSError):
            if path == "/endless":
                while True:
                    self.wfile.write(bytes(2**16))
            if path == "/drip":
                for _ in range(200):
                    self.wfile.write(b"a")
                    self.wfile.flush()
                    time.sleep(0.05)
            self.wfile.write(PNG)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def allowed(port: int, **options: Any) -> ImageLimits:
    hosts = (f"localhost:{port}", f"127.0.0.1:{port}")
    return ImageLimits(hosts=hosts, private_addresses=True, **options)


def test_an_image_is_fetched(port: int) -> None:
    url = f"http://localhost:{port}/a.png?x=1"
    assert np.array_equal(load_image(url, allowed(port)), PIXELS)
    there = f"http://127.0.0.1:{port}/to/127.0.0.1:{port}/a.png"
    assert fetch(there, allowed(port)) == PNG


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("/404", {}, "status 404"),
        ("/302", {}, "without Location"),
        ("/nowhere", {}, "redirected to what is no URL"),
        ("/loop", {}, "more than max_redirects=3"),
        ("/gzip", {}, "compressed"),
        ("/said", {}, "max_bytes="),
        ("/short", {}, f"ended after {len(PNG):,} of {len(PNG) + 1:,} bytes"),
        ("/endless", {"max_bytes": 10**6}, "max_bytes=1,000,000"),
        ("/drip", {"timeout_s": SLOW}, f"timeout_s={SLOW:g}"),
        ("/to/169.254.169.254/latest", {}, "not one of hosts"),
        ("/to/localhost:1/a", {}, "not one of hosts"),
    ],
)
def test_what_ends_a_fetch(port: int, path: str, options: dict[str, Any], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match=message):
        fetch(f"http://localhost:{port}{path}", allowed(port, **options))
    assert time.monotonic() - began < 30


def test_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(RequestError, match=f"timeout_s={SLOW:g}"):
            fetch(f"http://127.0.0.1:{port}/", allowed(port, timeout_s=SLOW))


def test_https_needs_a_certificate(port: int) -> None:
    """The server speaks no TLS."""
    with pytest.raises(RequestError, match="gave no image"):
        fetch(f"https://localhost:{port}/", allowed(port))


class Wrapping:
    """Stands for a TLS context that encrypts nothing. As the real one does, it takes the descriptor
    from the socket that it wraps.
    """

    def wrap_socket(self, sock: socket.socket, **_: Any) -> Any:
        limit, wrapped = sock.gettimeout(), Wrapped(fileno=sock.detach())
        wrapped.settimeout(limit)
        return wrapped


class Wrapped(socket.socket):
    def do_handshake(self) -> None:
        pass

    def shutdown(self, how: int, /) -> None:
        raise AssertionError("TLS forgets its state while another thread reads")


@pytest.fixture
def https(port: int, monkeypatch: pytest.MonkeyPatch) -> ImageLimits:
    """Have the server be the one of https://localhost."""
    monkeypatch.setattr("ssl.create_default_context", Wrapping)
    monkeypatch.setitem(PORTS, "https", port)
    return ImageLimits(hosts=("localhost",), private_addresses=True, timeout_s=SLOW)


def test_the_time_of_https_has_bounds_too(https: ImageLimits) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match=f"timeout_s={SLOW:g}"):
        fetch("https://localhost/drip", https)
    assert time.monotonic() - began < 5


def test_the_usual_port_is_not_named(https: ImageLimits, port: int) -> None:
    """Some servers compare the header, and a signed URL has it among what is signed."""
    assert fetch("https://localhost/host", https) == b"localhost"
    assert fetch(f"http://localhost:{port}/host", allowed(port)) == b"localhost:%d" % port


def test_an_address_of_a_kind_that_the_machine_has_not(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel without IPv6: the next address is taken; of none, it is that request's error."""
    made = socket.socket

    def without(family: int = -1, *args: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return made(family, *args, **options)

    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    monkeypatch.setattr("jpaged.images.fetch.socket.socket", without)
    assert fetch(f"http://localhost:{port}/a.png", allowed(port)) == PNG
    del both[1]
    with pytest.raises(RequestError, match="cannot connect"):
        fetch(f"http://localhost:{port}/a.png", allowed(port))


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/a.png",
        "http://localhost.evil.com:{port}/",
        "http://evil.com:{port}/",
        "http://localhost:{port}@evil.com/",
        "http://user:word@localhost:{port}/",
        "http://localhost:{port}\\@evil.com/",
        "http://localhost:{port}/a b",
        "http://localhost:{port}/\r\nHost: evil.com",
        "http://localhost:99999/",
        "http://[::1/",
        "http:///a",
        "gopher://localhost:{port}/",
        "http://löcalhost:{port}/",
    ],
)
def test_urls_that_are_refused(port: int, url: str) -> None:
    with pytest.raises(RequestError, match="image URL"):
        fetch(url.replace("{port}", str(port)), allowed(port))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1"),
        *("fec0::1", "64:ff9b:1::a00:1", "::7f00:1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1"),
        *("2001:0:4136:e378:8000:63bf:f5ff:fffe",),  # Teredo of 10.0.0.1
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


def test_a_listed_host_with_a_private_address(port: int) -> None:
    limits = ImageLimits(hosts=(f"localhost:{port}", f"127.0.0.1:{port}"))
    for host in ("localhost", "127.0.0.1"):
        with pytest.raises(RequestError, match="an address that is not public"):
            fetch(f"http://{host}:{port}/a.png", limits)


def test_a_name_is_resolved_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose second answer is another address is connected to by its first one; one of whose
    addresses is private is refused, whatever the others are.
    """
    asked: list[str] = []
    family = socket.AF_INET

    def resolve(host: str, at: int, **_: Any) -> list[Any]:
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "10.0.0.1"
        return [(family, socket.SOCK_STREAM, 6, "", (address, at))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    limits = ImageLimits(hosts=(f"*.example.com:{port}",), private_addresses=True)
    assert fetch(f"http://img.example.com:{port}/a.png", limits) == PNG
    assert asked == ["img.example.com"]

    def both(host: str, at: int, **_: Any) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", (x, at)) for x in ("1.1.1.1", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with pytest.raises(RequestError, match="not public"):
        fetch(f"http://img.example.com:{port}/", ImageLimits(hosts=(f"*.example.com:{port}",)))


def test_a_resolver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        time.sleep(2)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(RequestError, match=r"timeout_s=0\.2"):
        fetch("http://example.com/", ImageLimits(hosts=("example.com",), timeout_s=0.2))
