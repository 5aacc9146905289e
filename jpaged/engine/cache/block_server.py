"""BlockServer: keeps blocks for engines on any machine, in its memory or in a folder, and answers
them over TCP (wire.py). It knows nothing of models: a block is bytes under the digest that an
engine looks for (see BlockName), and what it holds is checked by whoever writes it and reads it.

It holds nothing on anybody's behalf: a client that dies leaves no block that is not in the order of
use with all others.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Buffer, Sequence

from jpaged.engine.cache.block_files import BlockKey, PackedBlocks, Read, Written, is_packed
from jpaged.engine.cache.wire import (
    FIGURES,
    USED_AT,
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
ARRIVING_BYTES = 1 << 30  # of blocks that are being received, all together
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
        self._blocks: OrderedDict[BlockKey, memoryview] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def has_key(self, key: BlockKey) -> bool:
        return key in self._blocks

    def used_bytes(self) -> int:
        return self._used

    def read_packed(self, key: BlockKey) -> tuple[Read, Buffer | None]:
        with self._lock:
            raw = self._blocks.get(key)
            if raw is not None:
                self._blocks.move_to_end(key)
        return ("absent", None) if raw is None else ("read", raw)

    def write_packed(
        self, key: BlockKey, pieces: Sequence[Buffer], used_at: float | None = None
    ) -> Written:
        """Keep a block; it counts as used now, whatever used_at says, so that the order of use is
        that of the calls.
        """
        raw = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces)).toreadonly()
        if raw.nbytes > self.num_bytes:
            return "refused"
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return "held"
            while self._used + raw.nbytes > self.num_bytes:
                _, old = self._blocks.popitem(last=False)
                self._used -= old.nbytes
                self.evicted_blocks += 1
            self._blocks[key] = raw
            self._used += raw.nbytes
        return "written"

    def touch_key(self, key: BlockKey, used_at: float) -> bool:
        with self._lock:
            if key not in self._blocks:
                return False
            self._blocks.move_to_end(key)
        return True

    def drop_key(self, key: BlockKey) -> None:
        with self._lock:
            if (raw := self._blocks.pop(key, None)) is not None:
                self._used -= raw.nbytes

    def forget(self, identity: str) -> None:
        with self._lock:
            gone = [key for key in self._blocks if key[0] == identity]
        for key in gone:
            self.drop_key(key)


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
        self._arriving = 0  # bytes
        self._open: set[socket.socket] = set()
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
            if is_full:
                self.counts["refused_connections"] += 1
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Answer a connection until it ends or does what it must not."""
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            used, most = self.blocks.used_bytes(), self.blocks.num_bytes
            if not greet(sock, self._secret, self._instance, used, most):
                self.counts["refused_connections"] += 1
                return
            while True:
                sock.settimeout(None)
                if not sock.recv(1, socket.MSG_PEEK):
                    return
                until = deadline()
                self._answer(sock, receive_head(sock, until), until)
        except (OSError, MemoryError) as e:
            self.counts["failed_connections"] += 1
            log.debug("a connection of the block server ended: %s", e)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

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
            came, raw = self.blocks.read_packed(key)
            if raw is None:
                send(sock, Op.ABSENT if came == "absent" else Op.FAILED)
            else:
                self.counts["sent_blocks"] += 1
                send(sock, Op.OK, body=(raw,))
        elif head.op is Op.TOUCH:
            (used_at,), (key,) = _used_at(fields), _some(unpack_keys(fields[USED_AT.size :]), 1)
            send(sock, Op.OK if self.blocks.touch_key(key, used_at) else Op.ABSENT)
        elif head.op is Op.DROP:
            self.blocks.drop_key(_some(unpack_keys(fields), 1)[0])
            send(sock, Op.OK)
        elif head.op is Op.FORGET:
            self.blocks.forget(_some(unpack_keys(fields), 1)[0][0])
            send(sock, Op.OK)
        else:
            raise WireError("nothing that can be asked")

    def _written(self, sock: socket.socket, fields: bytearray, size: int, until: float) -> Op:
        """Receive a block and keep it, if it is whole, and there is memory for it."""
        (used_at,), (key,) = _used_at(fields), _some(unpack_keys(fields[USED_AT.size :]), 1)
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


def _used_at(fields: bytearray) -> tuple[float]:
    if len(fields) < USED_AT.size:
        raise WireError("no time")
    (used_at,) = USED_AT.unpack_from(fields)
    if not 0.0 <= used_at < 1e11:  # false for NaN too
        raise WireError("no time that a file can have")
    return (used_at,)


def _some(keys: list[BlockKey], count: int) -> list[BlockKey]:
    if len(keys) != count:
        raise WireError(f"not {count} names of blocks")
    return keys
