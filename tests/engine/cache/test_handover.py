"""Prompts computed by one engine and gone on with by another, over a block server and the mock
device: nothing is computed twice but the last block, and whatever goes wrong is a miss. Host.check
holds all that is read to the KV of its content, computed anew, after every step.
"""

import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.engine.cache import disk as disk_module
from jpaged.engine.cache import handover, read_ahead, remote_blocks, wire
from jpaged.engine.cache.block_server import BlockMemory, BlockServer
from jpaged.engine.cache.costs import Costs
from jpaged.engine.cache.disk import Disk
from jpaged.engine.cache.remote_blocks import RemoteBlocks
from jpaged.engine.sequence import Sequence
from tests.engine.cache.test_disk import MIB, SIZES, WINDOWS, asked, counts, disk_of
from tests.engine.cache.test_store import fill, prompt
from tests.engine.host import Host, identity
from tests.engine.mock import MockBytes, Window

THROUGH: dict[str, Any] = {"prefix_store_policy": "write_through"}


@pytest.fixture
def server() -> Iterator[BlockServer]:
    server = BlockServer(BlockMemory(MIB), "127.0.0.1", 0)
    yield server
    server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_S", 0.2)
    monkeypatch.setattr(remote_blocks, "CONNECT_S", 0.2)
    monkeypatch.setattr(remote_blocks, "DOWN_S", 0.0)
    monkeypatch.setattr(disk_module, "PAUSE_S", 0.05)


def host_of(
    server: BlockServer, depth: int = 1, windows: tuple[Window, ...] = (None,), **settings: Any
) -> Host:
    """A new engine whose prefixes the server keeps."""
    sizes: dict[str, Any] = SIZES | {"windowed_blocks": 3 if "state" in windows else 8}
    sizes |= {"prefix_store": f"tcp://{server.host}:{server.port}"} | settings
    config = Host(1, windows, **sizes).config
    files = RemoteBlocks(server.host, server.port)
    return Host(depth, windows, disk=Disk(files, MockBytes(config, windows), Costs()), **sizes)


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_prompt_is_computed_once(
    server: BlockServer, depth: int, windows: tuple[Window, ...]
) -> None:
    first, second = host_of(server, depth, windows, **THROUGH), host_of(server, depth, windows)
    assert asked(first, prompt(21), max_tokens=1).num_cached == 0
    assert counts(first)["store_pending_bytes"] == counts(first)["store_handed_late"] == 0
    seq = asked(second, prompt(21), max_tokens=6)
    assert seq.num_cached == 20 and second.runner.computed("prefill") == 1
    assert asked(second, [*prompt(12), 1, 2, 3], max_tokens=2).num_cached in (12, 8, 4, 0)
    # What is hit in its pool is known to be there, and written anew where it has gone.
    assert asked(first, prompt(21), max_tokens=1).num_cached == 20
    server.blocks.forget(identity(0).hex())
    assert asked(first, prompt(21), max_tokens=1).num_cached == 20
    assert asked(host_of(server, depth, windows), prompt(21), max_tokens=6).num_cached == 20


def test_an_answer_counts_though_a_long_step_kept_the_engine_from_it(
    server: BlockServer, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of the server's answer; the step was a compile, say."""
    asked(host_of(server, depth, **THROUGH), prompt(21), max_tokens=1)
    host = host_of(server, depth)
    monkeypatch.setattr(read_ahead, "MOST_LOOK_S", 0.0)
    seq = host.add(prompt(21), max_tokens=2)
    assert host.engine.read_ahead is not None
    (waiting,) = host.engine.read_ahead._waiting.values()
    assert waiting.look is not None and waiting.look.done.wait(10.0)
    host.run()
    assert seq.num_cached == 20


def test_many_prompts_at_once(server: BlockServer, depth: int) -> None:
    """Whoever has ended was handed over whole, while others run, in a pool that cannot hold all."""
    first, ended = host_of(server, depth, **THROUGH), list[Sequence]()
    for seed in range(7):
        first.add(prompt(18, seed), max_tokens=1)
    second = host_of(server, depth)
    while first.engine.has_unfinished():
        for seq in first.step():
            tokens = seq.token_ids[: seq.prompt_len]
            assert asked(second, tokens, max_tokens=5).num_cached == 16
            ended.append(seq)
    assert len(ended) == 7 and counts(first)["store_handed_late"] == 0
    assert second.runner.computed("prefill") == 7 * 2


def test_answers_are_handed_over_too(server: BlockServer, depth: int) -> None:
    first, second = host_of(server, depth, **THROUGH), host_of(server, depth)
    seq = asked(first, prompt(10), max_tokens=9)
    assert asked(second, [*seq.token_ids, 3], max_tokens=2).num_cached == 16


def test_what_waits_is_bounded(
    server: BlockServer, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks wait in the pool, not in memory, and none is dropped."""
    first = host_of(server, depth, num_blocks=32, max_num_batched_tokens=128, **THROUGH)
    size, most = disk_of(first).codec.stored_bytes(0), list[int]()
    monkeypatch.setattr(disk_module, "PENDING_BYTES", 2 * size)
    write = RemoteBlocks.write

    def slow(self: RemoteBlocks, *args: Any) -> Any:
        most.append(disk_of(first).pending_bytes)
        time.sleep(0.01)
        return write(self, *args)

    monkeypatch.setattr(RemoteBlocks, "write", slow)
    assert asked(first, prompt(100), max_tokens=1).num_cached == 0
    assert max(most) <= 2 * size and counts(first)["store_dropped_blocks"] == 0
    assert asked(host_of(server, depth, num_blocks=32), prompt(100), max_tokens=2).num_cached == 96


def test_other_weights_find_nothing(server: BlockServer, depth: int) -> None:
    first, second = host_of(server, depth, **THROUGH), host_of(server, depth)
    asked(first, prompt(21), max_tokens=1)
    second.engine.identify(identity(3))
    second.reset()
    assert asked(second, prompt(21), max_tokens=3).num_cached == 0
    assert counts(second)["store_fetches"] == 0
    assert asked(second, prompt(21), salt="other", max_tokens=3).num_cached == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "another", "gone"])
@pytest.mark.parametrize("windows", [(None,), (None, "state")])
def test_damaged_blocks_are_misses(
    server: BlockServer,
    depth: int,
    windows: tuple[Window, ...],
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, memory = host_of(server, depth, windows, **THROUGH), server.blocks
    asked(first, prompt(21), max_tokens=1)
    assert isinstance(memory, BlockMemory)
    for key, raw in [(key, bytes(raw)) for key, (raw, _) in memory._blocks.items()]:
        memory.drop_key(key)
        other = next((x for x, _ in memory._blocks.values()), raw[:-1])
        bad = {"cut": raw[:-1], "flip": raw[:-1] + bytes([raw[-1] ^ 1]), "another": other}.get(
            damage
        )
        if bad is not None:
            memory.write_packed(key, [bad])
    if damage == "gone":  # after it said that it has them
        monkeypatch.setattr(memory, "has_key", lambda key: True)
    second = host_of(server, depth, windows)
    assert asked(second, prompt(21), max_tokens=4).num_cached == 0
    report = counts(second)
    assert report["store_absent_blocks" if damage == "gone" else "store_bad_blocks"] > 0
    assert report["store_read_blocks"] == report["store_late"] == 0
    monkeypatch.undo()
    asked(first, prompt(21), max_tokens=1)  # it sees that some were deleted, and writes them anew
    third = asked(host_of(server, depth, windows), prompt(21), max_tokens=4)
    assert third.num_cached > 0 or windows != (None,)


def test_a_server_that_is_gone(server: BlockServer, depth: int, impatient: None) -> None:
    first, second = host_of(server, depth, **THROUGH), host_of(server, depth)
    server.close()
    for host in (first, second):
        began = time.monotonic()
        assert asked(host, prompt(21), max_tokens=4).num_cached == 0
        assert asked(host, prompt(21), max_tokens=4).num_cached == 20, "in its own pool"
        assert time.monotonic() - began < 4.0
    report = counts(first)
    assert report["store_write_errors"] + report["store_dropped_blocks"] > 0
    assert report["store_pending_bytes"] == 0
    again = BlockServer(BlockMemory(MIB), server.host, server.port)
    try:
        time.sleep(0.1)
        asked(first, prompt(30, 1), max_tokens=1)
        assert asked(second, prompt(30, 1), max_tokens=3).num_cached == 28
    finally:
        again.close()


def test_another_server_in_its_place(server: BlockServer, depth: int, impatient: None) -> None:
    """What the first one had is not taken for granted."""
    first = host_of(server, depth, **THROUGH)
    asked(first, prompt(21), max_tokens=1)
    server.close()
    again = BlockServer(BlockMemory(MIB), server.host, server.port)
    try:
        asked(first, prompt(9, 5), max_tokens=1)
        time.sleep(0.1)
        asked(first, prompt(21), max_tokens=1)
        assert asked(host_of(again, depth), prompt(21), max_tokens=3).num_cached == 20
    finally:
        again.close()


def test_what_a_server_has_is_remembered_within_bounds(
    server: BlockServer, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by an engine that only reads."""
    monkeypatch.setattr(disk_module, "REMEMBERED", 8)
    first, second = host_of(server, depth, **THROUGH), host_of(server, depth)
    for seed in range(4):
        asked(first, prompt(21, seed), max_tokens=1)
        asked(second, prompt(21, seed), max_tokens=1)
        assert max(len(disk_of(host)._known) for host in (first, second)) <= 8
    assert counts(second)["store_read_blocks"] > 0


def test_what_is_to_be_deleted_and_is_not(
    server: BlockServer, depth: int, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    host = host_of(server, depth, **THROUGH)
    asked(host, prompt(21), max_tokens=1)
    server.close()
    host.engine.reset_prefix_cache(files=True)
    assert "to be deleted may be there still" in caplog.text
    assert counts(host)["store_write_errors"] == 1


def test_what_an_engine_uses_once_counts_as_used(server: BlockServer, depth: int) -> None:
    """Many engines that live for a minute need one prefix: it stays, its head longest."""
    asked(host_of(server, depth, **THROUGH), prompt(21), max_tokens=1)
    memory = server.blocks
    assert isinstance(memory, BlockMemory)
    began = time.time()
    reader = host_of(server, depth)
    assert asked(reader, prompt(21), max_tokens=1).num_cached == 20
    done = threading.Event()
    disk_of(reader)._writes.put(done.set)
    assert done.wait(10.0)
    used = [used_at for _, used_at in memory._blocks.values()]
    assert began < used[-1] and used == sorted(used, reverse=True) and len(used) == 5


@pytest.fixture
def deaf() -> Iterator[BlockServer]:
    """One that greets, and then answers nothing."""
    server = BlockServer(BlockMemory(MIB), "127.0.0.1", 0)
    stop = threading.Event()

    def wait(sock: socket.socket, head: Any, until: float) -> None:
        stop.wait(20.0)
        raise ConnectionError

    server._answer = wait
    yield server
    stop.set()
    server.close()


def test_a_server_that_hangs(
    deaf: BlockServer, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait for it for a moment, and not each of them anew."""
    monkeypatch.setattr(handover, "MOST_S", 0.3)
    first, second = host_of(deaf, depth, **THROUGH), host_of(deaf, depth)
    began = time.monotonic()
    for seed in range(4):
        assert asked(second, prompt(21, seed), max_tokens=2).num_cached == 0
    assert time.monotonic() - began < 1.5 and counts(second)["store_late"] == 1
    assert asked(first, prompt(21), max_tokens=1).num_cached == 0
    assert counts(first)["store_handed_late"] == 1
    assert 0.25 < time.monotonic() - began < 3.0


@pytest.mark.parametrize("end", ["abort", "snapshot", "restore", "recover", "renew", "reset"])
def test_a_request_that_is_held_back(
    deaf: BlockServer, depth: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MOST_S", 0.5)
    host = host_of(deaf, depth, **THROUGH)
    held_back = host.engine.handover
    assert held_back is not None
    before = host.engine.snapshot()
    seq = host.add(prompt(21), max_tokens=1)
    for _ in range(100):
        host.step()
        if seq.finish_reason is not None and held_back._held:
            break
    assert host.engine.has_unfinished() and held_back._held
    if end == "abort":
        assert host.engine.abort(seq.request.request_id) is seq.request
        assert not host.engine.has_unfinished()
    elif end == "snapshot":
        host.engine.restore(host.engine.snapshot())
        assert not host.engine.has_unfinished()
    elif end == "restore":
        host.engine.restore(before)
        assert not host.engine.has_unfinished()
    elif end == "recover":
        host.engine.recover()
        host.run()
    elif end == "renew":
        host.engine.renew(recompute=True)
        host.run()
    else:
        host.reset()
        host.run()
    fill(host)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_mix_of_pairs(depth: int, seed: int, impatient: None) -> None:
    """Two engines that write and two that read, on a server with too little memory that is replaced
    now and then: all answers are right.
    """
    rng, blocks = random.Random(seed), BlockMemory(20_000)
    server = BlockServer(blocks, "127.0.0.1", 0)
    windows = rng.choice(WINDOWS)
    hosts = [host_of(server, depth, windows, **(THROUGH if i < 2 else {})) for i in range(4)]
    found = 0
    for turn in range(40):
        if turn % 13 == 12:
            server.close()
            blocks = BlockMemory(20_000) if rng.random() < 0.5 else blocks
            server = BlockServer(blocks, "127.0.0.1", server.port)
        host = rng.choice(hosts)
        tokens = prompt(rng.randint(3, 26), rng.randrange(6))
        if rng.random() < 0.1:
            for key in list(blocks._blocks)[::3]:
                raw, used_at = blocks._blocks[key]
                blocks._blocks[key] = memoryview(bytes(raw.nbytes)), used_at
        seq = asked(host, tokens, max_tokens=rng.randint(1, 6))
        found += seq.num_cached > 0
        assert blocks.used_bytes() <= 20_000
    server.close()
    assert found > 5
    for host in hosts:
        assert not host.engine.requests and isinstance(host.engine.drain(), list)
