"""RemoteBlocks: blocks that a block server keeps (block_server.py), as BlockFiles keeps them in a
folder. A server that is gone, slow or wrong is a miss for a while, and is then asked again.
"""

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Buffer, Sequence
from typing import NamedTuple

from jpaged.engine.cache.block_files import (
    BlockName,
    Read,
    Written,
    packed,
    packed_size,
    unpacked,
)
from jpaged.engine.cache.wire import (
    AGE,
    FIGURES,
    IDLE_S,
    NAMES_AT_ONCE,
    Op,
    WireError,
    answer_greeting,
    deadline,
    pack_keys,
    receive,
    receive_head,
    send,
)

log = logging.getLogger("jpaged")

CONNECT_S = 2.0
DOWN_S = 5.0  # nothing is asked of a server for so long after it failed
WRITTEN: dict[Op, Written] = {
    Op.OK: "written",
    Op.HELD: "held",
    Op.REFUSED: "refused",
    Op.FAILED: "failed",
}


class Answer(NamedTuple):
    """What a server answered."""

    op: Op
    fields: bytearray
    body: bytearray


class RemoteBlocks:
    """The blocks of the server at a host and port. secret: that it must know, and that it asks for.
    Any thread may call, and may have to wait for the network.

    Methods raise nothing of what the network and the server may do: each returns what came of it.
    What a block holds is checked here, as that of a file is. instance: names the server since it
    was started.
    """

    asks_ahead = True  # see StoredBlocks

    def __init__(self, host: str, port: int, secret: bytes = b""):
        self.host, self.port, self._secret = host, port, secret
        self.num_bytes = self.evicted_blocks = self._used = 0  # as the server last said
        self.instance = b""
        self._lock = threading.Lock()
        self._free: list[tuple[float, socket.socket]] = []  # with when they were last used
        self._down_until = 0.0
        self._at_end = weakref.finalize(self, _close_all, self._free)
        self._is_down = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def has(self, name: BlockName) -> bool:
        """Return whether the server has a block."""
        return bool((self.has_all([name]) or [False])[0])

    def has_all(self, names: Sequence[BlockName]) -> list[bool] | None:
        """Return for each block whether the server has it; None where it does not say. names: of
        one identity.
        """
        there = list[bool]()
        for first in range(0, len(names), NAMES_AT_ONCE):
            part = names[first : first + NAMES_AT_ONCE]
            answer = self._ask(Op.HAS, pack_keys([name.key for name in part]))
            if answer is None or len(answer.fields) != FIGURES.size + len(part):
                return None
            self._used, self.num_bytes, self.evicted_blocks = FIGURES.unpack_from(answer.fields)
            there += [bool(x) for x in answer.fields[FIGURES.size :]]
        return there

    def used_bytes(self) -> int:
        """Return the bytes that all blocks take, as the server last said."""
        return self._used

    def read(self, name: BlockName, num_bytes: int) -> tuple[Read, Buffer | None]:
        """Return the data of a block. num_bytes: that it has. Anything else is "bad", and the
        server is to delete it.
        """
        size = packed_size(name, num_bytes)
        answer = self._ask(Op.READ, pack_keys([name.key]), sizes=(0, size))
        if answer is None or answer.op not in (Op.OK, Op.ABSENT):
            return "unreadable", None
        if answer.op is Op.ABSENT:
            return "absent", None
        data = unpacked(answer.body, name, num_bytes)
        if data is None:
            self._ask(Op.DROP, pack_keys([name.key]))
            return "bad", None
        return "read", data

    def write(
        self, name: BlockName, data: Sequence[Buffer], used_at: float | None = None
    ) -> Written:
        """Send the data of a block, in one or several pieces. used_at: seconds since 1970, None is
        now.
        """
        fields = _age(used_at) + pack_keys([name.key])
        answer = self._ask(Op.WRITE, fields, packed(name, data))
        return "failed" if answer is None else WRITTEN.get(answer.op, "failed")

    def touch_all(self, names: Sequence[BlockName], used_at: float) -> list[bool]:
        """Count blocks as used at this time, seconds since 1970, each a microsecond before the one
        that it follows. Return for each whether it is there. names: of one identity.
        """
        there = list[bool]()
        for first in range(0, len(names), NAMES_AT_ONCE):
            part = names[first : first + NAMES_AT_ONCE]
            fields = _age(used_at - first * 1e-6) + pack_keys([name.key for name in part])
            answer = self._ask(Op.TOUCH, fields)
            if answer is None or len(answer.fields) != len(part):
                return [*there, *[False] * (len(names) - len(there))]
            there += [bool(x) for x in answer.fields]
        return there

    def forget(self, identity: str) -> bool:
        """Have the server delete all blocks of an identity. Return whether it has."""
        answer = self._ask(Op.FORGET, pack_keys([(identity, bytes(32), 0)]))
        return answer is not None and answer.op is Op.OK

    def close(self) -> None:
        """Close the connections that are idle."""
        with self._lock:
            _close_all(self._free)

    def _ask(
        self,
        op: Op,
        fields: bytes,
        body: Sequence[Buffer] = (),
        *,
        sizes: tuple[int, ...] = (0,),
    ) -> Answer | None:
        """Return what the server answers; None where it does not, or where it was down of late.
        sizes: that the body of an answer may have.
        """
        if time.monotonic() < self._down_until:
            return None
        sock = self._take()
        try:
            if sock is not None:
                with contextlib.suppress(
                    ConnectionError
                ):  # it may have been closed since: a new one tells
                    return self._exchange(sock, op, fields, body, sizes)
            sock = self._connect()
            return self._exchange(sock, op, fields, body, sizes)
        except (OSError, MemoryError) as e:
            self._failed(e)
            return None

    def _exchange(
        self,
        sock: socket.socket,
        op: Op,
        fields: bytes,
        body: Sequence[Buffer],
        sizes: tuple[int, ...],
    ) -> Answer:
        try:
            send(sock, op, fields, body)
            until = deadline()
            head = receive_head(sock, until)
            if head.body not in sizes:  # more is not even received
                if head.op is Op.OK and op is Op.READ:
                    sock.close()
                    return Answer(Op.OK, bytearray(), bytearray())  # a block of another form: bad
                raise WireError("an answer of another size")
            answer = Answer(
                head.op, receive(sock, head.fields, until), receive(sock, head.body, until)
            )
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._free.append((time.monotonic(), sock))
        if self._is_down:
            self._is_down = False
            log.info("prefix_store: the block server at %s answers again", self.address)
        return answer

    def _take(self) -> socket.socket | None:
        """Return a connection that nobody uses, if there is one."""
        old, taken = list[socket.socket](), None
        with self._lock:
            while self._free and taken is None:
                used_at, sock = self._free.pop()
                if time.monotonic() - used_at < IDLE_S:
                    taken = sock
                else:
                    old.append(sock)
        for sock in old:
            sock.close()
        return taken

    def _connect(self) -> socket.socket:
        sock = socket.create_connection((self.host, self.port), timeout=CONNECT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.instance, self._used, self.num_bytes = answer_greeting(
                sock, self._secret, time.monotonic() + CONNECT_S
            )
        except BaseException:
            sock.close()
            raise
        return sock

    def _failed(self, error: Exception) -> None:
        self._down_until = time.monotonic() + DOWN_S
        if not self._is_down:
            self._is_down = True
            log.warning("prefix_store: the block server at %s: %s", self.address, error)
        self.close()


def _age(used_at: float | None) -> bytes:
    """Return how long ago this was, as in a frame. used_at: seconds since 1970, None is now."""
    return AGE.pack(0.0 if used_at is None else max(time.time() - used_at, 0.0))


def _close_all(connections: list[tuple[float, socket.socket]]) -> None:
    for _, sock in connections:
        sock.close()
    connections.clear()
