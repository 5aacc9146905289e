"""Frames between an engine and a block server (block_server.py), over TCP.

    head      MAGIC, an operation or what came of it, bytes of the fields, bytes of the body
    fields    of an operation: the names of blocks; of an answer: what each came to
    body      one block, as in a file of it (block_files.packed)

A connection begins with a greeting, in which both sides show that they know one secret, or that
neither has one: the server sends a number that it has drawn, the client one of its own with a code
over both, the server a code in turn. Frames have no code of their own and nothing is encrypted: a
network that others can change takes a tunnel. Whatever is not as it should be raises WireError, an
OSError, after which a connection is of no use.
"""

import enum
import hmac
import ipaddress
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Buffer, Sequence
from typing import NamedTuple

from jpaged.engine.cache.block_files import DIGEST_BYTES, BlockKey

VERSION = 2
MAGIC = b"jpB" + bytes([VERSION])
FRAME = struct.Struct("<4sBIQ")
GREETING = struct.Struct("<4s16s32sQQ")  # magic, instance, number, bytes in use, bytes at most
PROOF = struct.Struct("<4s32s32s")  # magic, the client's number, code
CODE = struct.Struct("<4sB32s")  # magic, OK or REFUSED, code
BLOCK = struct.Struct(f"<{DIGEST_BYTES}sH")  # digest, group
AGE = struct.Struct("<d")  # seconds since a block was used: clocks of machines differ
FIGURES = struct.Struct("<QQQ")  # bytes in use, bytes at most, blocks deleted to make room
MOST_FIELDS = 1 << 20  # bytes
MOST_BODY = 1 << 32
NAMES_AT_ONCE = 16384  # in one look
FRAME_S = 10.0  # a frame takes at most, from its first byte on
IDLE_S = 60.0  # a client uses no connection again that was idle for longer; the server waits twice
SECRET_VARIABLE = "JPAGED_STORE_SECRET"
IDENTITY = re.compile(r"[0-9a-f]{2,64}")


class WireError(ConnectionError):
    """A frame that cannot be, or a side that does not know the secret."""


class Op(enum.IntEnum):
    """What a client asks for, and what came of it."""

    HAS = 1
    READ = 2
    WRITE = 3
    TOUCH = 4
    FORGET = 5
    DROP = 6
    OK = 16
    ABSENT = 17
    HELD = 18
    REFUSED = 19
    FAILED = 20


class Head(NamedTuple):
    """The head of a frame: what it is, and the bytes of its fields and of its body."""

    op: Op
    fields: int
    body: int


def secret_of_environment() -> bytes:
    """Return the secret that both sides must know, b"" where none is set."""
    return os.environ.get(SECRET_VARIABLE, "").strip().encode()


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Frames


def deadline() -> float:
    """Return until when a frame that begins now may take, as time.monotonic says it."""
    return time.monotonic() + FRAME_S


def send(sock: socket.socket, op: Op, fields: bytes = b"", body: Sequence[Buffer] = ()) -> None:
    """Send a frame. body: in pieces."""
    pieces = [memoryview(piece).cast("B") for piece in body]
    size = sum(piece.nbytes for piece in pieces)
    until = deadline()
    for piece in (FRAME.pack(MAGIC, op, len(fields), size) + fields, *pieces):
        sock.settimeout(max(until - time.monotonic(), 1e-3))
        sock.sendall(piece)


def receive_head(sock: socket.socket, until: float) -> Head:
    """Receive the head of a frame. until: a time of time.monotonic."""
    magic, op, fields, body = FRAME.unpack(receive(sock, FRAME.size, until))
    if magic != MAGIC or op not in Op or fields > MOST_FIELDS or body > MOST_BODY:
        raise WireError("no frame of this version")
    return Head(Op(op), fields, body)


def receive(sock: socket.socket, size: int, until: float) -> bytearray:
    """Receive so many bytes."""
    raw = bytearray(size)
    view = memoryview(raw)
    while view.nbytes:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("a frame takes too long")
        sock.settimeout(left)
        if not (count := sock.recv_into(view)):
            raise WireError("the other side has closed")
        view = view[count:]
    return raw


def skip(sock: socket.socket, size: int, until: float) -> None:
    """Receive so many bytes of no use."""
    while size:
        size -= len(receive(sock, min(size, 1 << 20), until))


# Names


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """Return the fields of blocks of one identity."""
    identity = keys[0][0].encode()
    assert len({key[0] for key in keys}) == 1
    return b"".join(
        (
            bytes([len(identity)]),
            identity,
            *(BLOCK.pack(digest, group) for _, digest, group in keys),
        )
    )


def unpack_keys(fields: Buffer) -> list[BlockKey]:
    """Return the blocks of such fields; WireError where they are of none."""
    view = memoryview(fields)
    if not view.nbytes or view.nbytes < 1 + view[0]:
        raise WireError("no identity")
    identity = bytes(view[1 : 1 + view[0]]).decode("ascii", "replace")
    blocks = view[1 + view[0] :]
    if not IDENTITY.fullmatch(identity) or blocks.nbytes % BLOCK.size:
        raise WireError("no names of blocks")
    return [(identity, digest, group) for digest, group in BLOCK.iter_unpack(blocks)]


# The greeting


def greet(sock: socket.socket, secret: bytes, instance: bytes, used: int, most: int) -> bool:
    """Greet a client; return whether it knows the secret. instance: names this server since it was
    started.
    """
    until = deadline()
    greeting = GREETING.pack(MAGIC, instance, secrets.token_bytes(32), used, most)
    sock.settimeout(FRAME_S)
    sock.sendall(greeting)
    raw = bytes(receive(sock, PROOF.size, until))
    magic, number, code = PROOF.unpack(raw)
    is_known = magic == MAGIC and hmac.compare_digest(
        code, _code(secret, b"client", greeting + number)
    )
    answer = _code(secret, b"server", greeting + raw) if is_known else bytes(32)
    sock.settimeout(max(until - time.monotonic(), 1e-3))
    sock.sendall(CODE.pack(MAGIC, Op.OK if is_known else Op.REFUSED, answer))
    return is_known


def answer_greeting(sock: socket.socket, secret: bytes, until: float) -> tuple[bytes, int, int]:
    """Answer a server's greeting; return its instance, the bytes that its blocks take and those
    that they may take. WireError unless both sides know the same secret.
    """
    greeting = bytes(receive(sock, GREETING.size, until))
    magic, instance, _, used, most = GREETING.unpack(greeting)
    if magic != MAGIC:
        raise WireError("no block server of this version")
    number = secrets.token_bytes(32)
    raw = PROOF.pack(MAGIC, number, _code(secret, b"client", greeting + number))
    sock.settimeout(max(until - time.monotonic(), 1e-3))
    sock.sendall(raw)
    magic, op, code = CODE.unpack(receive(sock, CODE.size, until))
    if magic != MAGIC or op != Op.OK:
        raise WireError(f"it refuses the secret of {SECRET_VARIABLE}")
    if not hmac.compare_digest(code, _code(secret, b"server", greeting + raw)):
        raise WireError(f"it does not know the secret of {SECRET_VARIABLE}")
    return instance, used, most


def _code(secret: bytes, side: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, side + text, "sha256")
