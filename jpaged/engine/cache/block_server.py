"""BlockServer: keeps blocks for engines on any machine, in its memory or in a folder, and answers
them over TCP (wire.py). It knows nothing of models: a block is bytes under the digest that an
engine looks for (see BlockName), and what it holds is checked by whoever writes it and reads it.

It holds nothing on anybody's behalf: a client that dies leaves no block that is not in the order of
use with all others.
"""

import contextlib
import heapq
import itertools
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Buffer, Iterator, Sequence

from jpaged.engine.cache.block_files import BlockKey, PackedBlocks, Read, Written, is_packed
from jpaged.engine.cache.wire import (
    AGE,
    FIGURES,
    IDLE_S,
    Head,
    Op,
    WireError,
    deadline,
    greet,
    is_loopback,
    receive,
    receive_head,
    send,
    skip,
    unpack_keys,
)

log = logging.getLogger("jpaged")

CONNECTIONS = 1024  # at a time; more are closed at once
GREETINGS = 128  # of them whose clients have not shown yet what they know; the oldest goes
ARRIVING_BYTES = 1 << 30  # of blocks that are being received, all together
LEAVING_BYTES = 1 << 30  # of blocks that are being sent, all together; others wait
WRITTEN_AS: dict[Written, Op] = {
    "written": Op.OK,
    "held": Op.HELD,
    "refused": Op.REFUSED,
    "failed": Op.FAILED,
}


class BlockMemory:
    """PackedBlocks in this process's memory; what was used least recently goes first."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self.evicted_blocks = self._used = 0
        self._lock = threading.Lock()
        self._blocks: dict[BlockKey, tuple[memoryview, float]] = {}  # with when they were used
        # The same by time, and some that are out of date; of equal times the first one first.
        self._order: list[tuple[float, int, BlockKey]] = []
        self._turn = itertools.count()

    def __len__(self) -> int:
        return len(self._blocks)

    def has_key(self, key: BlockKey) -> bool:
        return key in self._blocks

    def used_bytes(self) -> int:
        return self._used

    def read_packed(self, key: BlockKey) -> tuple[Read, Buffer | None]:
        kept = self._blocks.get(key)
        return ("absent", None) if kept is None else ("read", kept[0])

    def packed_bytes(self, key: BlockKey) -> int:
        kept = self._blocks.get(key)
        return 0 if kept is None else kept[0].nbytes

    def write_packed(
        self, key: BlockKey, pieces: Sequence[Buffer], used_at: float | None = None
    ) -> Written:
        raw = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces)).toreadonly()
        if raw.nbytes > self.num_bytes:
            return "refused"
        with self._lock:
            if key in self._blocks:
                return "held"
            while self._used + raw.nbytes > self.num_bytes:
                used, _, old = heapq.heappop(self._order)
                if old in self._blocks and self._blocks[old][1] == used:
                    self._used -= self._blocks.pop(old)[0].nbytes
                    self.evicted_blocks += 1
            self._set_used(key, raw, time.time() if used_at is None else used_at)
            self._used += raw.nbytes
        return "written"

    def touch_key(self, key: BlockKey, used_at: float) -> bool:
        with self._lock:
            if key not in self._blocks:
                return False
            raw, before = self._blocks[key]
            if used_at > before:
                self._set_used(key, raw, used_at)
        return True

    def drop_key(self, key: BlockKey) -> None:
        with self._lock:
            if (kept := self._blocks.pop(key, None)) is not None:
                self._used -= kept[0].nbytes

    def forget(self, identity: str) -> bool:
        with self._lock:
            gone = [key for key in self._blocks if key[0] == identity]
        for key in gone:
            self.drop_key(key)
        return True

    def _set_used(self, key: BlockKey, raw: memoryview, used_at: float) -> None:
        self._blocks[key] = raw, used_at
        heapq.heappush(self._order, (used_at, next(self._turn), key))
        if len(self._order) > 2 * len(self._blocks) + 1024:
            turn = self._turn
            self._order = [(used, next(turn), k) for k, (_, used) in self._blocks.items()]
            heapq.heapify(self._order)


class BlockServer:
    """Serves blocks at a host and port (0: any that is free) in threads of this process.

    secret: that clients must know. Without one it listens on this machine alone, ValueError for
    another host: whoever can write blocks can change answers. OSError where it cannot listen.
    counts: how many blocks it has received, sent, refused as damaged, and connections that failed.
    """

    def __init__(self, blocks: PackedBlocks, host: str, port: int, secret: bytes = b""):
        if not secret and not is_loopback(host):
            raise ValueError(f"{host}: a secret is needed beyond this machine")
        self.blocks, self._secret = blocks, secret
        self.counts: Counter[str] = Counter()
        self._instance = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._arriving = self._leaving = 0  # bytes
        self._left = threading.Condition(self._lock)
        self._open: set[socket.socket] = set()
        self._greeting: dict[socket.socket, None] = {}  # those of them, the oldest first
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="jpaged-blocks", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and end all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else `accept` would go on waiting
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for sock in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # no file descriptors are left, say
                continue
            with self._lock:
                is_full = len(self._open) >= CONNECTIONS
                if not is_full:
                    self._open.add(sock)
                    self._greeting[sock] = None
                if len(self._greeting) > GREETINGS:  # who knows the secret says so at once
                    oldest = next(iter(self._greeting))
                    del self._greeting[oldest]
                    self._open.discard(oldest)  # now: its thread may come to run only later
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            if not is_full:
                try:
                    threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
                    continue
                except RuntimeError as e:  # the system gives this process no more threads
                    log.warning("the block server closes a connection: %s", e)
            self.counts["refused_connections"] += 1
            self._ended(sock)

    def _ended(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
            self._greeting.pop(sock, None)
        sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """Answer a connection until it ends, says nothing for long, or does what it must not."""
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            used, most = self.blocks.used_bytes(), self.blocks.num_bytes
            if not greet(sock, self._secret, self._instance, used, most):
                self.counts["refused_connections"] += 1
                return
            with self._lock:
                self._greeting.pop(sock, None)
            while True:
                sock.settimeout(2 * IDLE_S)
                try:
                    if not sock.recv(1, socket.MSG_PEEK):
                        return
                except TimeoutError:
                    return  # its machine may be gone
                until = deadline()
                self._answer(sock, receive_head(sock, until), until)
        except (OSError, MemoryError) as e:
            self.counts["failed_connections"] += 1
            log.debug("a connection of the block server ended: %s", e)
        finally:
            self._ended(sock)

    def _answer(self, sock: socket.socket, head: Head, until: float) -> None:
        fields = receive(sock, head.fields, until)
        if head.op is Op.WRITE:
            send(sock, self._written(sock, fields, head.body, until))
            return
        if head.body:
            raise WireError("a body that nothing takes")
        if head.op is Op.HAS:
            there = bytes([self.blocks.has_key(key) for key in unpack_keys(fields)])
            blocks = self.blocks
            figures = blocks.used_bytes(), blocks.num_bytes, blocks.evicted_blocks
            send(sock, Op.OK, FIGURES.pack(*figures) + there)
        elif head.op is Op.READ:
            (key,) = _some(unpack_keys(fields), 1)
            with self._leaves(self.blocks.packed_bytes(key), until) as may_leave:
                came, raw = self.blocks.read_packed(key) if may_leave else ("unreadable", None)
                if raw is None:
                    send(sock, Op.ABSENT if came == "absent" else Op.FAILED)
                else:
                    self.counts["sent_blocks"] += 1
                    send(sock, Op.OK, body=(raw,))
        elif head.op is Op.TOUCH:
            used_at, keys = _used_at(fields), unpack_keys(fields[AGE.size :])
            touch = self.blocks.touch_key
            there = bytes([touch(key, used_at - i * 1e-6) for i, key in enumerate(keys)])
            send(sock, Op.OK, there)
        elif head.op is Op.DROP:
            self.blocks.drop_key(_some(unpack_keys(fields), 1)[0])
            send(sock, Op.OK)
        elif head.op is Op.FORGET:
            is_gone = self.blocks.forget(_some(unpack_keys(fields), 1)[0][0])
            send(sock, Op.OK if is_gone else Op.FAILED)
        else:
            raise WireError("nothing that can be asked")

    @contextlib.contextmanager
    def _leaves(self, size: int, until: float) -> Iterator[bool]:
        """Count the bytes of a block as being sent inside the block, once there is room for them.
        False: there was none until then, by time.monotonic().
        """
        with self._left:
            may_leave = self._left.wait_for(
                lambda: not self._leaving or self._leaving + size <= LEAVING_BYTES,
                until - time.monotonic(),
            )
            self._leaving += size * may_leave
        try:
            yield may_leave
        finally:
            with self._left:
                self._leaving -= size * may_leave
                self._left.notify_all()

    def _written(self, sock: socket.socket, fields: bytearray, size: int, until: float) -> Op:
        """Receive a block and keep it, if it is whole, and there is memory for it."""
        used_at, (key,) = _used_at(fields), _some(unpack_keys(fields[AGE.size :]), 1)
        is_held = self.blocks.has_key(key)
        with self._lock:
            has_room = size <= self.blocks.num_bytes and (
                not self._arriving or self._arriving + size <= ARRIVING_BYTES
            )
            if has_room and not is_held:
                self._arriving += size
        if is_held or not has_room:
            skip(sock, size, until)
            return Op.HELD if is_held else Op.REFUSED
        try:
            raw = receive(sock, size, until)
            if not is_packed(raw, key):
                self.counts["bad_blocks"] += 1
                return Op.REFUSED
            self.counts["received_blocks"] += 1
            return WRITTEN_AS[self.blocks.write_packed(key, (raw,), used_at)]
        finally:
            with self._lock:
                self._arriving -= size


def _used_at(fields: bytearray) -> float:
    """Return when a block was used, by this machine's clock, in seconds since 1970."""
    if len(fields) < AGE.size:
        raise WireError("no time")
    (age,) = AGE.unpack_from(fields)
    if not 0.0 <= age < 1e11:  # false for NaN too
        raise WireError("no time that a block can have been used at")
    return max(time.time() - age, 0.0)


def _some(keys: list[BlockKey], count: int) -> list[BlockKey]:
    if len(keys) != count:
        raise WireError(f"not {count} names of blocks")
    return keys
