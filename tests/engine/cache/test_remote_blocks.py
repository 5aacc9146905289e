"""Blocks of a block server: what is written is read, whoever dies or lies, within its bytes."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged.checks import store_address
from jpaged.engine.cache import block_server, remote_blocks, wire
from jpaged.engine.cache.block_files import BlockFiles, PackedBlocks, packed
from jpaged.engine.cache.block_server import BlockMemory, BlockServer
from jpaged.engine.cache.remote_blocks import RemoteBlocks
from jpaged.engine.cache.wire import FRAME, MAGIC, Op
from jpaged.errors import ConfigError
from tests.engine.cache.test_block_files import MIB, SIZE, data_of, name_of

SECRET = b"s3cret"


@pytest.fixture
def serve() -> Iterator[Callable[..., BlockServer]]:
    servers = list[BlockServer]()

    def start(
        blocks: PackedBlocks | None = None, secret: bytes = b"", port: int = 0
    ) -> BlockServer:
        blocks = BlockMemory(MIB) if blocks is None else blocks
        servers.append(BlockServer(blocks, "127.0.0.1", port, secret))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_S", 0.2)
    monkeypatch.setattr(remote_blocks, "CONNECT_S", 0.2)
    monkeypatch.setattr(remote_blocks, "DOWN_S", 0.0)


def client_of(server: BlockServer, secret: bytes = b"") -> RemoteBlocks:
    return RemoteBlocks(server.host, server.port, secret)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_what_is_written_is_read(serve: Any, tmp_path: Path, kind: str) -> None:
    server = serve(BlockMemory(MIB) if kind == "memory" else BlockFiles(tmp_path, MIB), SECRET)
    blocks, data = client_of(server, SECRET), data_of(1)
    assert blocks.read(name_of(1), SIZE) == ("absent", None) and not blocks.has(name_of(1))
    assert blocks.write(name_of(1), [data[:300], data[300:]]) == "written"
    came, raw = client_of(server, SECRET).read(name_of(1), SIZE)
    assert came == "read" and raw is not None and bytes(raw) == data
    assert blocks.write(name_of(1), [data]) == "held"
    assert blocks.has_all([name_of(i) for i in (2, 1, 3)]) == [False, True, False]
    assert 0 < blocks.used_bytes() < 2 * SIZE and blocks.num_bytes == MIB
    assert blocks.touch_all([name_of(1), name_of(2)], time.time()) == [True, False]
    for other in (name_of(2), name_of(1, group=1), name_of(1, identity="bb")):
        assert blocks.read(other, SIZE)[0] == "absent"
    assert blocks.write(name_of(1, identity="bb"), [data]) == "written"
    assert blocks.forget("aa") and blocks.forget("aa")
    assert not blocks.has(name_of(1)) and blocks.has(name_of(1, identity="bb"))
    assert blocks.write(name_of(5), [bytes(2 * MIB)]) == "refused"


def test_the_files_are_those_of_a_folder(serve: Any, tmp_path: Path) -> None:
    """Who has the folder finds what the server has written there, and the other way round."""
    blocks, files = client_of(serve(BlockFiles(tmp_path, MIB))), BlockFiles(tmp_path, MIB)
    assert blocks.write(name_of(1), [data_of(1)]) == "written"
    assert files.write(name_of(2), [data_of(2)]) == "written"
    assert files.read(name_of(1), SIZE)[0] == blocks.read(name_of(2), SIZE)[0] == "read"


def test_least_recently_used_goes_first() -> None:
    memory = BlockMemory(4 * SIZE)
    for number in range(4):
        assert memory.write_packed(name_of(number).key, [data_of(number)], 10.0) == "written"
    assert memory.touch_key(name_of(0).key, 11.0) and memory.touch_key(name_of(1).key, 9.0)
    assert memory.packed_bytes(name_of(0).key) == SIZE and not memory.touch_key(name_of(9).key, 1.0)
    memory.write_packed(name_of(4).key, [data_of(4)])
    assert [memory.has_key(name_of(i).key) for i in range(5)] == [True, False, True, True, True]
    assert memory.used_bytes() == 4 * SIZE and memory.evicted_blocks == 1
    for second in range(20, 5000):
        memory.touch_key(name_of(2).key, second)
    assert len(memory._order) < 2000
    for number in (5, 6):
        memory.write_packed(name_of(number).key, [data_of(number)])
    assert [memory.has_key(name_of(i).key) for i in (0, 2, 3)] == [False, True, False]
    for number in range(7):
        memory.drop_key(name_of(number).key)
    assert memory.used_bytes() == len(memory) == 0


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_what_an_engine_leaves_is_kept_by_its_last_use(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It writes what was used last first, more than there is room for; by whatever clock."""
    size = wire_size(1)
    server = serve(BlockMemory(4 * size) if kind == "memory" else BlockFiles(tmp_path, 4 * size))
    engine, now = client_of(server), time.time()
    monkeypatch.setattr(remote_blocks, "time", ShiftedTime(7200.0))
    for number in range(8):
        used_at = now + 7200.0 - number
        assert engine.write(name_of(number), [data_of(number)], used_at) == "written"
    there = engine.has_all([name_of(i) for i in range(8)])
    assert there is not None and there[:3] == [True] * 3 and sum(there) <= 4
    # An hour later by a clock that is two hours ahead, its blocks are not newer than they are.
    monkeypatch.setattr(remote_blocks, "time", ShiftedTime(0.0))
    assert engine.write(name_of(9), [data_of(9)]) == "written"
    assert engine.touch_all([name_of(2), name_of(0), name_of(1)], now + 1.0) == [True] * 3
    for number in (10, 11):
        assert engine.write(name_of(number), [data_of(number)], now + 2.0) == "written"
    there = engine.has_all([name_of(i) for i in (2, 0, 1)])
    assert there == ([True, False, False] if sum(there or ()) == 1 else [True, True, False])


class ShiftedTime:
    """The module, with a clock that is wrong by so many seconds."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, seconds: float):
        self.seconds = seconds

    def time(self) -> float:
        return time.time() + self.seconds


def wire_size(number: int) -> int:
    return sum(memoryview(piece).nbytes for piece in packed(name_of(number), [data_of(number)]))


def test_connections_that_say_nothing_end(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that greet no more than some at a time, so that nobody is kept out by who does not know
    the secret; those that are idle after a while, since their machines may be gone.
    """
    monkeypatch.setattr(block_server, "GREETINGS", 3)
    monkeypatch.setattr(block_server, "CONNECTIONS", 6)
    monkeypatch.setattr(block_server, "IDLE_S", 0.5)
    may_end, greet = threading.Event(), block_server.greet

    def greet_and_end_late(*arguments: Any) -> bool:
        is_known = False
        try:
            is_known = greet(*arguments)
        finally:
            if not is_known:
                may_end.wait(60.0)
        return is_known

    monkeypatch.setattr(block_server, "greet", greet_and_end_late)
    server = serve(secret=SECRET)
    with contextlib.ExitStack() as silent:
        silent.callback(may_end.set)
        for _ in range(20):
            silent.enter_context(socket.create_connection((server.host, server.port)))
        blocks = client_of(server, SECRET)
        assert blocks.write(name_of(1), [data_of(1)]) == "written"
        (_, idle), *_ = blocks._free
        idle.settimeout(30.0)
        assert idle.recv(1) == b"" and blocks.read(name_of(1), SIZE)[0] == "read"
    assert server.counts["failed_connections"] <= 20


def test_a_machine_without_threads_serves_again_once_it_has_some(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    blocks, left, start = client_of(server), [3], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(remote_blocks, "DOWN_S", 0.0)
    assert [blocks.write(name_of(1), [data_of(1)]) for _ in range(4)] == ["failed"] * 3 + [
        "written"
    ]
    assert server.counts["refused_connections"] == 3 and len(server._open) == 1


def test_blocks_that_nobody_takes_are_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that ask and never read hold so many bytes, and no longer than a frame may
    take; others wait for them.
    """
    size = 1 << 23  # more than the system keeps for a connection
    monkeypatch.setattr(block_server, "LEAVING_BYTES", 2 * size)
    monkeypatch.setattr(wire, "FRAME_S", 1.0)
    monkeypatch.setattr(remote_blocks, "DOWN_S", 0.0)
    server, most = serve(BlockMemory(size * 8)), list[int]()
    blocks = client_of(server)
    assert blocks.write(name_of(1), [bytes(size)]) == "written"
    asked = FRAME.pack(MAGIC, Op.READ, len(wire.pack_keys([name_of(1).key])), 0)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            sock = stack.enter_context(socket.create_connection((server.host, server.port)))
            wire.answer_greeting(sock, b"", time.monotonic() + 5)
            sock.sendall(asked + wire.pack_keys([name_of(1).key]))
        until = time.monotonic() + 10.0
        while (came := blocks.read(name_of(1), size)[0]) != "read" and time.monotonic() < until:
            most.append(server._leaving)
        assert came == "read" and max([*most, server._leaving]) <= 2 * size
    until = time.monotonic() + 5.0
    while server._leaving and time.monotonic() < until:
        time.sleep(0.01)
    assert server._leaving == 0


def test_who_does_not_know_the_secret_gets_nothing(serve: Any, impatient: None) -> None:
    server = serve(secret=SECRET)
    for secret in (b"", b"other"):
        blocks = client_of(server, secret)
        assert blocks.write(name_of(1), [data_of(1)]) == "failed"
        assert blocks.has_all([name_of(1)]) is None
        assert blocks.read(name_of(1), SIZE) == ("unreadable", None)
    # A client does not believe a server that does not know it either.
    assert client_of(serve(), SECRET).write(name_of(1), [data_of(1)]) == "failed"
    assert not len(server.blocks) and server.counts["refused_connections"] >= 2
    with pytest.raises(ValueError, match="a secret is needed"):
        BlockServer(BlockMemory(1), "0.0.0.0", 0)


def test_a_wrong_block_is_refused_and_noticed(serve: Any) -> None:
    server = serve()
    blocks, good = client_of(server), b"".join(packed(name_of(1), [data_of(1)]))
    for raw in (
        good[:-1],
        good[:50] + bytes([good[50] ^ 1]) + good[51:],
        b"".join(packed(name_of(2), [data_of(1)])),
        b"".join(packed(name_of(1, group=1), [data_of(1)])),
        b"",
    ):
        fields = wire.AGE.pack(1.0) + wire.pack_keys([name_of(1).key])
        answer = blocks._ask(Op.WRITE, fields, [raw])
        assert answer is not None and answer.op is Op.REFUSED
    assert server.counts["bad_blocks"] == 5 and not blocks.has(name_of(1))
    # What is wrong at the server, in whatever way, is a miss, and is deleted there.
    other_tokens = name_of(1)._replace(token_ids=b"tokens 7")
    for raw in (good[:-1], good[:-1] + b"!", b"", b"".join(packed(other_tokens, [data_of(1)]))):
        server.blocks.write_packed(name_of(1).key, [raw])
        assert blocks.read(name_of(1), SIZE) == ("bad", None)
        assert not blocks.has(name_of(1))


def test_a_server_that_ends_and_comes_back(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    blocks = client_of(server)
    assert blocks.write(name_of(1), [data_of(1)]) == "written"
    before = blocks.instance
    server.close()
    assert blocks.read(name_of(1), SIZE) == ("unreadable", None)
    again = serve(port=server.port)
    assert blocks.read(name_of(1), SIZE) == ("unreadable", None), "it is not asked for a while"
    monkeypatch.setattr(blocks, "_down_until", 0.0)
    assert blocks.read(name_of(1), SIZE) == ("absent", None)
    assert blocks.instance not in (before, b"") and again.counts["failed_connections"] == 0
    # A connection that was closed while idle is no failure.
    for _ in range(100):
        if again._open:
            break
        time.sleep(0.01)
    for sock in list(again._open):
        sock.shutdown(socket.SHUT_RDWR)
    assert blocks.write(name_of(1), [data_of(1)]) == "written"


def test_clients_that_die_or_lie_leave_nothing(serve: Any, impatient: None) -> None:
    """Half a frame, a frame that is none, a length that is none, bytes that trickle."""
    server = serve()
    good = b"".join(packed(name_of(1), [data_of(1)]))
    fields = wire.AGE.pack(1.0) + wire.pack_keys([name_of(1).key])
    whole = FRAME.pack(MAGIC, Op.WRITE, len(fields), len(good)) + fields + good
    for raw in (
        *(whole[:n] for n in (1, 10, FRAME.size, FRAME.size + 20, len(whole) - 1)),
        b"GET / HTTP/1.1\r\n\r\n",
        FRAME.pack(MAGIC, 99, 0, 0),
        FRAME.pack(MAGIC, Op.WRITE, 1 << 31, 0),
        FRAME.pack(MAGIC, Op.WRITE, 0, 1 << 60),
        FRAME.pack(MAGIC, Op.READ, 0, 0),
        FRAME.pack(MAGIC, Op.HAS, 3, 0) + b"\xff..",
        FRAME.pack(MAGIC, Op.READ, 3, 0) + b"\2aa",
        FRAME.pack(MAGIC, Op.READ, len(fields) - 8, 5) + fields[8:] + b"hello",
        FRAME.pack(MAGIC, Op.READ, 6, 0) + b"\5../..",
        FRAME.pack(MAGIC, Op.TOUCH, len(fields), 0) + struct.pack("<d", 1e300) + fields[8:],
        FRAME.pack(MAGIC, Op.OK, 0, 0),
    ):
        with socket.create_connection((server.host, server.port), timeout=5) as sock:
            wire.answer_greeting(sock, b"", time.monotonic() + 5)
            sock.sendall(raw)
            with contextlib.suppress(ConnectionResetError):  # bytes were left that nobody read
                assert sock.recv(100) == b"", "it is closed, at the end of its time at the latest"
    assert client_of(server).has_all([name_of(1)]) == [False]
    assert server._arriving == 0 and server.counts["failed_connections"] == 16


LIES: dict[str, Callable[[socket.socket], None]] = {
    "closes": lambda sock: None,
    "waits": lambda sock: time.sleep(0.5),
    "half a head": lambda sock: sock.sendall(FRAME.pack(MAGIC, Op.OK, 0, 5)[:9]),
    "no frame": lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "too long": lambda sock: sock.sendall(FRAME.pack(MAGIC, Op.OK, 1 << 19, 1 << 31)),
    "fields": lambda sock: sock.sendall(FRAME.pack(MAGIC, Op.OK, 1 << 30, 0)),
    "half a block": lambda sock: sock.sendall(FRAME.pack(MAGIC, Op.OK, 0, 1139) + bytes(500)),
    "another answer": lambda sock: sock.sendall(FRAME.pack(MAGIC, Op.FAILED, 0, 0)),
}


@pytest.mark.parametrize("lie", LIES)
def test_servers_that_die_or_lie_are_misses(impatient: None, lie: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as sock, contextlib.suppress(OSError):
                    wire.greet(sock, b"", bytes(16), 0, 1)
                    sock.recv(1 << 16)
                    LIES[lie](sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    blocks = RemoteBlocks(*listener.getsockname())
    try:
        assert blocks.read(name_of(1), SIZE)[0] in ("unreadable", "bad")
        assert blocks.write(name_of(1), [data_of(1)]) == "failed" or lie == "too long"
        assert blocks.has_all([name_of(1)]) is None
        assert blocks.touch_all([name_of(1), name_of(2)], 1.0) == [False, False]
        assert not blocks.forget("aa")
    finally:
        blocks.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(2.0)


def test_many_threads(serve: Any) -> None:
    """All that is read is what was written, within the bytes, whatever is written at once."""
    memory = BlockMemory(20 * SIZE)
    blocks, wrong = client_of(serve(memory)), list[int]()

    def work(seed: int) -> None:
        for i in range(60):
            number = (seed * 7 + i * 13) % 40
            blocks.write(name_of(number), [data_of(number)])
            came, raw = blocks.read(name_of(number), SIZE)
            if came not in ("read", "absent") or (raw and bytes(raw) != data_of(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and memory.used_bytes() <= 20 * SIZE and memory.evicted_blocks > 0


def test_addresses() -> None:
    assert store_address("some/folder") is None
    assert store_address("tcp://host.example:7400") == ("host.example", 7400)
    assert store_address("tcp://[::1]:7400/") == ("::1", 7400)
    for bad in (
        "tcp://host",
        "http://h:1",
        "tcp://:1",
        "tcp://h:99999",
        "tcp://h:1/x",
        "tcp://u@h:1",
    ):
        with pytest.raises(ConfigError, match="prefix_store="):
            store_address(bad)
    assert (
        wire.is_loopback("127.0.0.1") and wire.is_loopback("::1") and wire.is_loopback("localhost")
    )
    assert not wire.is_loopback("10.0.0.1") and not wire.is_loopback("0.0.0.0")
