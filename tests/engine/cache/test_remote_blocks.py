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
from jpaged.engine.cache import remote_blocks, wire
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
    assert blocks.touch(name_of(1), time.time()) and not blocks.touch(name_of(2), 1.0)
    for other in (name_of(2), name_of(1, group=1), name_of(1, identity="bb")):
        assert blocks.read(other, SIZE)[0] == "absent"
    assert blocks.write(name_of(1, identity="bb"), [data]) == "written"
    blocks.forget("aa")
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
        assert memory.write_packed(name_of(number).key, [data_of(number)]) == "written"
    assert memory.read_packed(name_of(0).key)[0] == "read" and memory.touch_key(name_of(1).key, 0.0)
    memory.write_packed(name_of(4).key, [data_of(4)])
    assert [memory.has_key(name_of(i).key) for i in range(5)] == [True, True, False, True, True]
    assert memory.used_bytes() == 4 * SIZE and memory.evicted_blocks == 1
    for number in range(5):
        memory.drop_key(name_of(number).key)
    assert memory.used_bytes() == len(memory) == 0


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
        fields = wire.USED_AT.pack(1.0) + wire.pack_keys([name_of(1).key])
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
    fields = wire.USED_AT.pack(1.0) + wire.pack_keys([name_of(1).key])
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
        assert not blocks.touch(name_of(1), 1.0) or lie == "too long"
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
