"""Images and videos by URL, from hosts that are listed and from public addresses alone.

A name is resolved once, all addresses that it has are looked at, and the connection goes to one of
these, so that a name cannot point elsewhere in between. A redirect is a URL like any other.
"""

import concurrent.futures
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from jpaged.errors import RequestError
from jpaged.images.limits import IMAGE, ImageLimits, Kind

PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
BLOCK = 2**16


def fetch(url: str, limits: ImageLimits, kind: Kind = IMAGE) -> bytes:
    """Return what a URL holds, within limits.timeout_s and the bytes that its kind may have.
    RequestError where its host is not listed, has an address that is not public, or does not
    answer.
    """
    try:
        return _fetched(url, limits, kind)
    except RequestError as e:
        raise type(e)(f"{kind.name} URL: {e}") from e


def _fetched(url: str, limits: ImageLimits, kind: Kind) -> bytes:
    ends = time.monotonic() + limits.timeout_s
    for _ in range(limits.max_redirects + 1):
        parts = _checked(url, limits)
        body, location = _get(parts, limits, kind, ends)
        if location is None:
            return body
        try:
            url = urljoin(url, location)
        except ValueError as e:
            raise RequestError(f"redirected to what is no URL ({e})") from e
    raise RequestError(f"redirected more than max_redirects={limits.max_redirects} times")


def _checked(url: str, limits: ImageLimits) -> SplitResult:
    """Return the parts of a URL that may be fetched."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as e:
        raise RequestError(f"{e}") from e
    if parts.scheme not in PORTS or not host:
        raise RequestError(f"scheme {parts.scheme!r}: must be http or https")
    if parts.username is not None or parts.password is not None:
        raise RequestError("must hold no user and no password")
    if not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise RequestError("must be ASCII without spaces (percent-encode the rest)")
    if not limits.hosts:
        raise RequestError("none are fetched unless hosts lists theirs; send it as a data: URL")
    if not any(_is_listed(host, port, parts.scheme, entry) for entry in limits.hosts):
        raise RequestError(f"the host {parts.netloc[:80]!r} is not one of hosts")
    return parts


def _is_listed(host: str, port: int | None, scheme: str, entry: str) -> bool:
    name, colon, number = entry.partition(":") if entry.count(":") <= 1 else (entry, "", "")
    wanted = int(number) if colon else PORTS[scheme]
    if (port or PORTS[scheme]) != wanted:
        return False
    if name.startswith("*."):
        return host.endswith(name[1:])
    return host == name


def _addresses(host: str, port: int, limits: ImageLimits, ends: float) -> list[tuple[Any, ...]]:
    """Return (family, address) of a host; RequestError if any of them is not public."""
    pool = concurrent.futures.ThreadPoolExecutor(1, "jpaged-resolve")
    asked = pool.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    pool.shutdown(wait=False)  # the resolver's own time has bounds; ours may be shorter
    try:
        answers = asked.result(timeout=max(0.0, ends - time.monotonic()))
    except concurrent.futures.TimeoutError as e:
        raise _late(limits) from e
    except (OSError, UnicodeError) as e:
        raise RequestError(f"the host {host!r} has no address ({e})") from e
    addresses = [(family, address) for family, _, _, _, address in answers]
    for _, address in addresses:
        if not limits.private_addresses and not is_public(str(address[0])):
            raise RequestError(
                f"the host {host!r} has an address that is not public (private_addresses=False)"
            )
    return addresses


def is_public(address: str) -> bool:
    """Return whether an IP address is a public one of a single host, and is none that stands for
    another within IPv6.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        is_nat64 = ip in ipaddress.ip_network("64:ff9b::/96")
        if is_nat64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return is_public(str(inner))
        if ip.is_site_local:  # as private as what has replaced it, though Python calls it global
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was looked at, by a name that may be another. scheme: whose
    usual port the Host header leaves out.
    """

    def __init__(self, host: str, port: int, scheme: str, connected: socket.socket):
        super().__init__(host, port)
        self.default_port = PORTS[scheme]
        self.sock = connected

    def connect(self) -> None:
        raise http.client.NotConnected("the connection ended")


def _get(
    parts: SplitResult, limits: ImageLimits, kind: Kind, ends: float
) -> tuple[bytes, str | None]:
    """Return the body of an answer, or where it redirects to."""
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    used = _connected(_addresses(host, port, limits, ends), limits, ends)
    # One that sends a byte now and then never runs into the time of a single read.
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        with contextlib.suppress(OSError):
            # Not TLS's own method, which would change what the other thread is reading with.
            socket.socket.shutdown(used, socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, ends - time.monotonic()), end)
    timer.daemon = True
    try:
        timer.start()
        if parts.scheme == "https":
            # What wraps a socket takes its descriptor away, so from here on it is what `end` ends.
            context = ssl.create_default_context()
            used = context.wrap_socket(used, server_hostname=host, do_handshake_on_connect=False)
            if is_late.is_set():  # perhaps before there was this one
                raise _late(limits)
            used.do_handshake()
        connection = _Pinned(host, port, parts.scheme, used)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(
            "GET", path, headers={"Accept": f"{kind.name}/*", "User-Agent": "jpaged"}
        )
        with connection.getresponse() as response:
            answer = _read(response, limits, kind)
        if is_late.is_set():  # what looked like the end was ours
            raise _late(limits)
        return answer
    except (OSError, http.client.HTTPException, ValueError) as e:
        # The socket's own limit may end the wait before the timer does, and what the timer has cut
        # off looks like a fault of the answer.
        if is_late.is_set() or isinstance(e, TimeoutError):
            raise _late(limits) from e
        if isinstance(e, RequestError):
            raise
        raise RequestError(f"{host!r} gave no {kind.name} ({type(e).__name__}: {e})") from e
    finally:
        timer.cancel()
        used.close()


def _connected(addresses: list[tuple[Any, ...]], limits: ImageLimits, ends: float) -> socket.socket:
    last: OSError | None = None
    for family, address in addresses:
        left = ends - time.monotonic()
        if left <= 0:
            raise _late(limits)
        made: socket.socket | None = None
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
            made.settimeout(left)
            made.connect(address)
            return made
        except OSError as e:  # a machine without IPv6 has no such socket
            last = e
            if made is not None:
                made.close()
    if isinstance(last, TimeoutError):
        raise _late(limits) from last
    raise RequestError(f"cannot connect ({last})") from last


def _read(
    answer: http.client.HTTPResponse, limits: ImageLimits, kind: Kind
) -> tuple[bytes, str | None]:
    if answer.status in REDIRECTS:
        location = answer.getheader("Location")
        if not location:
            raise RequestError(f"an answer of status {answer.status} without Location")
        return b"", location
    if answer.status != 200:
        raise RequestError(f"an answer of status {answer.status}")
    if answer.getheader("Content-Encoding", "identity").lower() not in ("identity", ""):
        raise RequestError("an answer that is compressed, which was not asked for")
    most = limits.most_bytes(kind)
    too_long = RequestError(f"more bytes than {kind.bytes_limit}={most:,}")
    length = answer.getheader("Content-Length", "0")
    if length.isdecimal() and int(length) > most:
        raise too_long
    body = bytearray()
    while block := answer.read(BLOCK):
        body += block
        if len(body) > most:
            raise too_long
    if length.isdecimal() and len(body) < int(length):
        raise RequestError(f"the answer ended after {len(body):,} of {int(length):,} bytes")
    return bytes(body), None


def _late(limits: ImageLimits) -> RequestError:
    return RequestError(f"no whole answer within timeout_s={limits.timeout_s:g}")
