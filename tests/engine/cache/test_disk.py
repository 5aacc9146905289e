"""Prefixes in files, over the mock device: what is found there by another engine, what is not, and
what becomes of requests where files are damaged, slow or gone. Host.check holds all that is read to
the KV of its content, computed anew, after every step.
"""

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.cache import disk as disk_module
from jpaged.engine.cache import read_ahead
from jpaged.engine.cache.block_files import BlockFiles
from jpaged.engine.cache.costs import BestRate, Costs, Rate
from jpaged.engine.cache.disk import Disk
from jpaged.engine.scoring import Scoring
from jpaged.engine.sequence import Request, Sequence, Status
from jpaged.engine.spans import Span, Spans
from tests.engine.cache.test_store import fill, prompt
from tests.engine.host import Host, identity
from tests.engine.mock import MockBytes, Window, expected, generated

MIB = 1 << 20
SIZES: dict[str, Any] = {"num_blocks": 8, "swap_min_tokens": 0, "max_num_batched_tokens": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"
    threads = [t for t in threading.enumerate() if t.name == "jpaged-store"]
    for thread in threads:  # of hosts that are garbage by now
        thread.join(0.01)


def host_of(
    folder: Path,
    depth: int = 1,
    windows: tuple[Window, ...] = (None,),
    num_bytes: int = MIB,
    **settings: Any,
) -> Host:
    """A new engine with nothing in its pool, as after a restart, over a folder of files."""
    sizes: dict[str, Any] = SIZES | {"windowed_blocks": 3 if "state" in windows else 8} | settings
    config = Host(1, windows, **sizes).config
    files = Disk(BlockFiles(folder, num_bytes), MockBytes(config, windows), Costs())
    return Host(depth, windows, disk=files, **sizes)


def disk_of(host: Host) -> Disk:
    assert host.engine.disk is not None
    return host.engine.disk


def counts(host: Host) -> dict[str, Any]:
    return host.engine.report()


def close(host: Host) -> None:
    """As at the end of a process."""
    assert host.engine.flush_files(10.0) == 0
    disk_of(host).close()


def asked(host: Host, tokens: list[int], **options: Any) -> Sequence:
    """The sequence of a prompt, held to what it gets alone."""
    (seq,) = host.generate(tokens, **options)
    assert generated(seq) == expected(seq, host.windows)
    return seq


def settled(host: Host) -> None:
    """Wait until all that waits to be written was."""
    assert disk_of(host).flush(10.0)


WINDOWS: list[tuple[Window, ...]] = [
    (None,),
    (None, 5),
    (9,),
    (None, "state"),
    ("state",),
    (3, None, 9),
]


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_new_engine_finds_what_another_has_computed(
    folder: Path, depth: int, windows: tuple[Window, ...]
) -> None:
    first = host_of(folder, depth, windows)
    assert asked(first, prompt(21), max_tokens=4).num_cached == 0
    close(first)
    second = host_of(folder, depth, windows)
    seq = asked(second, prompt(21), max_tokens=4)
    assert seq.num_cached == 20 and counts(second)["store_read_blocks"] > 0
    assert second.runner.computed("prefill") == 1
    # A longer prompt that begins like it, and the next turn of an answer.
    third = host_of(folder, depth, windows)
    assert asked(third, [*prompt(21), 5, 6, 7], max_tokens=2).num_cached == 20
    assert asked(third, [*prompt(12), 5, 6, 7], max_tokens=2).num_cached in (12, 8, 4, 0)
    close(third)


def test_what_leaves_the_pool_is_written_behind(folder: Path, depth: int) -> None:
    """Without any flush, and without host memory."""
    first = host_of(folder, depth)
    asked(first, prompt(21), max_tokens=4)
    asked(first, prompt(30, 1), max_tokens=2)  # takes its blocks
    settled(first)
    assert counts(first)["store_write_blocks"] >= 5 and counts(first)["host_blocks"] == 0
    assert asked(first, prompt(21), max_tokens=4).num_cached == 20  # itself, too
    assert asked(host_of(folder, depth), prompt(21), max_tokens=4).num_cached == 20


def test_what_is_used_twice_is_written_while_it_stays(folder: Path, depth: int) -> None:
    """A process that is killed has written what others would miss most."""
    first = host_of(folder, depth, num_blocks=32)
    asked(first, prompt(21), max_tokens=1)
    settled(first)
    assert counts(first)["store_write_blocks"] == 0
    asked(first, prompt(21), max_tokens=1)
    settled(first)
    assert counts(first)["store_write_blocks"] == 5
    asked(first, prompt(21), max_tokens=1)
    settled(first)
    assert counts(first)["store_write_blocks"] == 5
    assert asked(host_of(folder, depth), prompt(21), max_tokens=4).num_cached == 20


def test_with_host_memory_blocks_are_in_both(folder: Path, depth: int) -> None:
    first = host_of(folder, depth, swap_space_gib=8 / 1024)
    for seed in range(4):
        asked(first, prompt(29, seed), max_tokens=1)
    settled(first)
    written = counts(first)["store_write_blocks"]
    assert written >= 14 and first.store is not None and first.store.used_bytes == 8 * MIB
    read = counts(first)["store_read_blocks"]
    for seed in (3, 2, 1, 0):
        assert asked(first, prompt(29, seed), max_tokens=1).num_cached == 28
    assert read < counts(first)["store_read_blocks"] < 4 * 7
    close(first)
    second = host_of(folder, depth)
    for seed in range(4):
        assert asked(second, prompt(29, seed), max_tokens=1).num_cached == 28


def adapter(version: int, digest: bytes | None) -> AdapterVersion:
    known = None if digest is None else lambda data: digest
    return AdapterVersion(name="a", version=version, rank=1, data=None, digest_of=known)


def test_nothing_of_another_salt_or_adapter_or_weights_is_found(folder: Path, depth: int) -> None:
    """All of these prompts have equal tokens. What an adapter is known by is its weights, not the
    number that it has in a process; mock adapters of one number have the same weights.
    """
    kinds: list[dict[str, Any]] = [
        {},
        {"salt": "a"},
        {"salt": "b"},
        {"adapter": adapter(1, b"x" * 32)},
        {"adapter": adapter(2, b"y" * 32)},
        {"adapter": adapter(1, b"x" * 32), "salt": "a"},
    ]
    first = host_of(folder, depth, max_loras=2, num_blocks=128)
    for options in kinds:
        assert asked(first, prompt(21), max_tokens=1, **options).num_cached == 0
    close(first)
    for options in kinds:
        second = host_of(folder, depth, max_loras=2)
        assert asked(second, prompt(21), max_tokens=1, **options).num_cached == 20
    second = host_of(folder, depth, max_loras=2)
    for options in (
        {"salt": "c"},
        {"adapter": adapter(4, b"z" * 32)},
        {"adapter": adapter(1, b"x" * 32), "salt": "b"},
        {"adapter": adapter(3, None)},
    ):
        assert asked(second, prompt(21), max_tokens=1, **options).num_cached == 0
        fill(second)
    close(second)
    third = host_of(folder, depth, max_loras=2)
    assert asked(third, prompt(21), max_tokens=1, adapter=adapter(3, None)).num_cached == 0


def test_salts_cannot_stand_for_each_other() -> None:
    """No text of a caller's salt has the bytes of another's salt with an adapter or routes."""
    made = functools.partial(Sequence, "0", prompt(8), max_model_len=99)
    params = Host(1).sequence(prompt(4)).sampling_params
    x = adapter(1, b"x" * 32)
    seqs = [
        made(params),
        made(params, salt="x" * 32),
        made(params, adapter=x),
        made(params, salt="x", adapter=x),
        made(params, salt="xx", adapter=adapter(1, b"x" * 31)),
    ]
    stored = [seq.stored_bytes(0, 4) for seq in seqs]
    assert None not in stored and len(set(stored)) == len(seqs)
    hidden = made(params)
    Request([hidden]).hide(3)
    assert hidden.stored_bytes(0, 4) is None
    assert made(params, scoring=Scoring()).stored_bytes(0, 4) == stored[0]


def test_images_are_known_by_their_numbers() -> None:
    """Not by the name that a caller has for them in one process."""
    params = Host(1).sequence(prompt(4)).sampling_params

    def stored(number: float, named: bytes | None) -> list[bytes | None]:
        numbers = np.full((3, 2), number, np.float32)
        span = Span(start=5, embeddings=numbers, digest=named or bytes([int(number)]), named=named)
        spans = Spans((span,), 12)
        seq = Sequence("0", prompt(12), params, max_model_len=99, spans=spans)
        return [seq.stored_bytes(i, 4) for i in range(3)]

    one, other, same = stored(1.0, b"x"), stored(2.0, b"x"), stored(1.0, b"x")
    assert one == same and one[0] == other[0] and one[1] != other[1] and one[2] == other[2]
    assert stored(1.0, None)[1] != stored(2.0, None)[1]


def test_new_weights_find_nothing_old_and_old_ones_theirs(folder: Path, depth: int) -> None:
    host = host_of(folder, depth)
    asked(host, prompt(21), max_tokens=1)
    host.engine.flush_files(10.0)
    host.reset()  # as new weights do
    assert asked(host, prompt(21), max_tokens=1).num_cached == 0
    close(host)
    other = host_of(folder, depth)
    other.engine.identify(identity(9))
    other.engine.reset_prefix_cache()
    assert asked(other, prompt(21), max_tokens=1).num_cached == 0
    for known in (0, 1):
        again = host_of(folder, depth)
        again.engine.identify(identity(known))
        again.engine.reset_prefix_cache()
        assert asked(again, prompt(21), max_tokens=1).num_cached == 20


def test_what_new_weights_overtake_is_not_written_as_theirs(folder: Path, depth: int) -> None:
    """Blocks on their way from the pool, and blocks that are being read."""
    host = host_of(folder, depth)
    asked(host, prompt(29), max_tokens=1)
    host.add(prompt(29, 1), 8)
    host.step()  # takes the blocks of the first
    host.reset()
    host.run()
    settled(host)
    assert asked(host, prompt(29), max_tokens=1).num_cached == 0
    close(host)
    slow = host_of(folder, depth)
    with held_reads(slow) as go:
        seq = slow.add(prompt(29), 2)
        slow.step()
        slow.reset()
        go.set()
    slow.run()
    assert generated(seq) == expected(seq)


def test_reset_prefix_cache_deletes_files(folder: Path, depth: int) -> None:
    host = host_of(folder, depth)
    asked(host, prompt(21), max_tokens=1)
    host.engine.flush_files(10.0)
    host.engine.reset_prefix_cache(files=True)
    assert asked(host, prompt(21), max_tokens=1).num_cached == 0
    assert asked(host_of(folder, depth), prompt(21), max_tokens=1).num_cached == 0


class held_reads:
    """Inside the block no file is read until the event is set, which leaving it does."""

    def __init__(self, host: Host):
        self.files, self.go = disk_of(host).files, threading.Event()
        self.read = self.files.read

    def __enter__(self) -> threading.Event:
        def read(*args: Any) -> Any:
            assert self.go.wait(60)
            return self.read(*args)

        self.files.read = read  # pyright: ignore[reportAttributeAccessIssue]
        return self.go

    def __exit__(self, *error: object) -> None:
        self.go.set()
        self.files.read = self.read  # pyright: ignore[reportAttributeAccessIssue]


def block_paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "folder"])
@pytest.mark.parametrize("windows", [(None,), (None, "state")])
def test_damaged_files_are_misses(
    folder: Path, depth: int, windows: tuple[Window, ...], damage: str
) -> None:
    """Every file in turn."""
    first = host_of(folder, depth, windows)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    for path in block_paths(folder):
        raw = path.read_bytes()
        if damage == "cut":
            path.write_bytes(raw[:-1])
        elif damage == "flip":
            path.write_bytes(raw[:-4] + bytes([raw[-4] ^ 64]) + raw[-3:])
        else:
            path.unlink()
        if damage == "folder":
            path.mkdir()
        host = host_of(folder, depth, windows)
        asked(host, prompt(21), max_tokens=2)
        kind = {"cut": "bad_blocks", "flip": "bad_blocks", "folder": "read_errors"}
        if damage in kind and counts(host)["store_read_blocks"]:
            total = counts(host)["store_bad_blocks"] + counts(host)["store_read_errors"]
            assert counts(host)[f"store_{kind[damage]}"] == total <= 1
        disk_of(host).close()
        if damage == "folder":
            path.rmdir()
        path.parent.mkdir(parents=True, exist_ok=True)  # an empty folder goes
        path.write_bytes(raw)
    assert asked(host_of(folder, depth, windows), prompt(21), max_tokens=1).num_cached == 20


def test_a_bad_block_in_the_middle_is_counted_and_written_anew(folder: Path, depth: int) -> None:
    first = host_of(folder, depth)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    bad = block_paths(folder)[2]
    bad.write_bytes(bad.read_bytes()[:-8] + b"x" * 8)
    host = host_of(folder, depth)
    assert asked(host, prompt(21), max_tokens=1).num_cached < 20
    assert counts(host)["store_bad_blocks"] == 1 and not bad.exists()
    close(host)
    assert asked(host_of(folder, depth), prompt(21), max_tokens=1).num_cached == 20


def test_files_that_go_while_they_are_wanted(folder: Path, depth: int) -> None:
    """Deleted between the look and the read, as another process does to make room."""
    first = host_of(folder, depth)
    asked(first, prompt(29), max_tokens=1)
    close(first)
    host = host_of(folder, depth)
    with held_reads(host):
        seq = host.add(prompt(29), 4)
        for path in block_paths(folder)[::2]:
            path.unlink()
    host.run()
    assert generated(seq) == expected(seq) and seq.num_cached < 28
    assert counts(host)["store_absent_blocks"] >= 1


def test_others_run_while_files_are_read(folder: Path, depth: int) -> None:
    first = host_of(folder, depth)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    host = host_of(folder, depth)
    with held_reads(host):
        seq, other = host.add(prompt(21), 2), host.add(prompt(9, 5), 3)
        for _ in range(12):
            host.step()
        assert other.status is Status.FINISHED and seq.status is Status.WAITING
        assert host.engine.has_unfinished()
    host.run()
    assert seq.num_cached == 20 and generated(seq) == expected(seq)


def test_a_disk_that_hangs_costs_patience_once(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose blocks do not come is computed, and later ones do not wait at all."""
    monkeypatch.setattr(read_ahead, "MOST_PATIENCE_S", 0.2)
    monkeypatch.setattr(disk_module, "PAUSE_S", 0.2)
    first = host_of(folder, depth)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    host = host_of(folder, depth)
    host._steps_left = 10**6
    with held_reads(host):
        assert asked(host, prompt(21), max_tokens=2).num_cached == 0
        assert counts(host)["store_late"] == 1
        time.sleep(0.2)
        assert disk_of(host).is_stuck
        asked(host, [*prompt(21), 3, 4, 5, 6, 7, 8], max_tokens=2)
        assert counts(host)["store_fetches"] == 1
    assert not host.engine.read_ahead


def test_writes_that_fail_are_counted(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is no error of a request; there is a pause before the next try."""
    host, write, full = host_of(folder, depth), os.write, [True]

    def limited(fd: int, piece: Any) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(fd, piece)

    monkeypatch.setattr(os, "write", limited)
    asked(host, prompt(21), max_tokens=1)
    asked(host, prompt(30, 1), max_tokens=1)
    settled(host)
    report = counts(host)
    assert report["store_write_errors"] >= 1 and report["store_write_blocks"] == 0
    dropped = report["store_dropped_blocks"]
    asked(host, prompt(21), max_tokens=1)
    assert counts(host)["store_dropped_blocks"] > dropped
    full[0] = False
    disk_of(host)._paused_until = 0.0
    close(host)
    assert asked(host_of(folder, depth), prompt(21), max_tokens=1).num_cached == 20


def test_what_waits_to_be_written_is_bounded(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is dropped, and steps go on; a flush waits."""
    monkeypatch.setattr(disk_module, "PENDING_BYTES", 200)  # three blocks
    host, go = host_of(folder, depth), threading.Event()
    write = disk_of(host).files.write

    def held(*args: Any) -> Any:
        assert go.wait(60)
        return write(*args)

    disk_of(host).files.write = held  # pyright: ignore[reportAttributeAccessIssue]
    asked(host, prompt(29), max_tokens=1)
    asked(host, prompt(30, 1), max_tokens=1)
    report = counts(host)
    assert report["store_dropped_blocks"] == 4 and report["store_pending_bytes"] == 192
    # What waits is found where it waits.
    assert asked(host, prompt(29), max_tokens=1).num_cached >= 0
    go.set()
    close(host)
    assert counts(host)["store_pending_bytes"] == 0


class held_writes:
    """Inside the block no file is written until the event is set, which leaving it does."""

    def __init__(self, host: Host):
        self.files, self.go = disk_of(host).files, threading.Event()
        self.write = self.files.write

    def __enter__(self) -> threading.Event:
        def write(*args: Any) -> Any:
            assert self.go.wait(60)
            return self.write(*args)

        self.files.write = write  # pyright: ignore[reportAttributeAccessIssue]
        return self.go

    def __exit__(self, *error: object) -> None:
        self.go.set()
        self.files.write = self.write  # pyright: ignore[reportAttributeAccessIssue]


def test_what_waits_to_be_written_is_forgotten_with_the_files(folder: Path, depth: int) -> None:
    """And what is computed after that is written, though what was before waits under its name."""
    host = host_of(folder, depth)
    with held_writes(host):
        asked(host, prompt(29), max_tokens=1)
        asked(host, prompt(30, 1), max_tokens=1)  # takes its blocks
        assert counts(host)["store_pending_bytes"] > 0
        host.engine.reset_prefix_cache(files=True)
        assert counts(host)["store_pending_bytes"] == 0
        assert asked(host, prompt(29), max_tokens=1).num_cached == 0
        asked(host, prompt(30, 1), max_tokens=1)
        waiting = counts(host)["store_pending_bytes"]
        assert waiting > 0
    close(host)
    assert counts(host)["store_pending_bytes"] == 0
    assert counts(host)["store_write_bytes"] >= waiting
    assert asked(host_of(folder, depth), prompt(29), max_tokens=1).num_cached == 28


@pytest.mark.parametrize("swap_space_gib", [0.0, 8 / 1024])
def test_a_flush_ends_though_the_disk_hangs(
    folder: Path, depth: int, swap_space_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush gives up at its limit, as a program does that flushes when it ends."""
    monkeypatch.setattr(disk_module, "PENDING_BYTES", 200)  # three blocks
    host = host_of(folder, depth, swap_space_gib=swap_space_gib)
    with held_writes(host):
        for seed in range(3):
            asked(host, prompt(29, seed), max_tokens=1)
        began = time.monotonic()
        assert host.engine.flush_files(0.2) > 1
        assert time.monotonic() - began < 30
    close(host)


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_what_host_memory_has_is_not_written_as_used_later_or_long_ago(
    folder: Path, depth: int, windows: tuple[Window, ...]
) -> None:
    """Nor is its order lost: what was used last before, a prefix later than its tail."""
    host = host_of(folder, depth, windows, swap_space_gib=8 / 1024)
    disk_of(host)._paused_until = time.monotonic() + 1000  # nothing is written before
    began = time.time()
    for seed in range(4):
        asked(host, prompt(29, seed), max_tokens=1)
    disk_of(host)._paused_until = 0.0
    close(host)
    held: dict[str, list[float]] = {}
    for path in block_paths(folder):
        held.setdefault(path.name.rpartition("-")[0], []).append(path.stat().st_mtime)
    times = [at for times in held.values() for at in times]
    assert began - 1 < min(times) and max(times) < time.time() + 0.01
    store = host.store
    assert store is not None
    order = [slot.content.digest.hex() for slot in store if slot.content.digest is not None]
    written = [max(held[name]) for name in dict.fromkeys(order)]
    assert len(written) > 4 and written == sorted(written)


@pytest.mark.parametrize("end", ["abort", "snapshot", "restore", "recover", "renew"])
def test_a_request_that_waits_for_files(folder: Path, depth: int, end: str) -> None:
    """What may happen to an engine happens to one whose request is not queued yet."""
    first = host_of(folder, depth)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    host = host_of(folder, depth)
    empty = host.engine.snapshot()
    with held_reads(host) as go:
        seq = host.add(prompt(21), 4)
        host.step()
        assert seq.status is Status.WAITING and seq not in host.engine.replicas[0].queues.waiting
        if end == "abort":
            assert host.engine.abort(seq.request_id) is seq.request
            assert not host.engine.has_unfinished() and seq.finish_reason == "abort"
        elif end == "snapshot":
            state = host.engine.snapshot()
            go.set()
            for _ in range(2):
                host.engine.restore(state)
                (kept,) = host.engine.requests.values()
                host.run()
                assert generated(kept.sequences[0]) == expected(seq)
        elif end == "restore":
            host.engine.restore(empty)
            assert not host.engine.has_unfinished()
        elif end == "recover":
            host.engine.recover()
            host.run()
            assert generated(seq) == expected(seq)
        else:
            host.renew(recompute=True)
            go.set()
            host.run()
            assert generated(seq) == expected(seq)
        assert not host.engine.read_ahead
    assert asked(host, prompt(9, 8)).num_cached == 0
    assert host.engine.read_ahead is not None
    host.engine.step()
    assert host.engine.read_ahead.store.read_bytes == 0, "what was read is held for nobody"


def test_equal_prompts_read_a_file_once(folder: Path, depth: int) -> None:
    first = host_of(folder, depth)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    host = host_of(folder, depth)
    with held_reads(host):
        seqs = [host.add([*prompt(21), i], 2) for i in range(3)]
        host.step()
        assert host.engine.abort(seqs[0].request_id)
    host.run()
    assert counts(host)["store_read_blocks"] == 5
    assert [seq.num_cached for seq in seqs[1:]] == [20, 20]
    assert all(generated(seq) == expected(seq) for seq in seqs[1:])


def test_memory_for_reads_is_bounded(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has its own, whatever it is; others wait for theirs."""
    first = host_of(folder, depth, num_blocks=128)
    for seed in range(6):
        asked(first, prompt(29, seed), max_tokens=1)
    close(first)
    monkeypatch.setattr(read_ahead, "READ_BYTES", 2 * 7 * 64)
    host = host_of(folder, depth, num_blocks=16)
    seqs = [host.add(prompt(29, seed), 3) for seed in range(6)]
    ahead = host.engine.read_ahead
    assert ahead is not None
    while host.engine.has_unfinished():
        host.step()
        assert ahead.store.read_bytes <= 2 * 7 * 64
    assert [seq.num_cached for seq in seqs] == [28] * 6
    assert all(generated(seq) == expected(seq) for seq in seqs)


def test_what_is_cheaper_to_compute_is_computed(folder: Path, depth: int) -> None:
    first = host_of(folder, depth)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    for disk_rate, prefill_rate, cached in ((1000.0, 1e9, 0), (1e9, 10.0, 20)):
        host = host_of(folder, depth, swap_min_tokens=1)
        costs = disk_of(host).costs
        costs.disk.add(1000 * disk_rate, 1000.0)
        costs.prefill.add(1000 * prefill_rate, 1000.0)
        assert asked(host, prompt(21), max_tokens=1).num_cached == cached
        report = counts(host)
        assert report["store_declined"] == (cached == 0)
        assert report["store_read_bytes_per_s"] > 0 and report["prefill_tokens_per_s"] > 0
    host = host_of(folder, depth, swap_min_tokens=0)
    disk_of(host).costs.disk.add(1.0, 1000.0)
    disk_of(host).costs.prefill.add(1e9, 1.0)
    assert asked(host, prompt(21), max_tokens=1).num_cached == 20, "0 loads whatever is there"


def test_costs() -> None:
    rate, best, costs = Rate(), BestRate(), Costs()
    assert rate.per_second is None and rate.seconds(5) is None
    rate.add(100, 2.0)
    assert rate.per_second == 50.0 and rate.seconds(100) == 2.0
    for _ in range(200):
        rate.add(10, 1.0)
    assert rate.per_second == pytest.approx(10, rel=0.01)
    best.add(100, 1.0)
    best.add(1, 1.0)  # held up
    assert best.per_second == pytest.approx(95)
    assert costs.is_worth(100, disk_bytes=10, host_bytes=10)  # nothing is known
    costs.prefill.add(100, 1.0)
    assert costs.is_worth(100, disk_bytes=10, host_bytes=10)
    costs.disk.add(10, 1.0)
    assert costs.is_worth(100, disk_bytes=10, host_bytes=10)
    assert not costs.is_worth(100, disk_bytes=10, host_bytes=10, queued_bytes=1)
    costs.host.add(10, 0.5)
    tries = [costs.is_worth(100, disk_bytes=10, host_bytes=10) for _ in range(64)]
    assert sum(tries) == 2, "some are made, so that what has become cheap is noticed"
    assert costs.is_worth(151, disk_bytes=10, host_bytes=10)
    assert set(costs.report()) == {
        "prefill_tokens_per_s",
        "store_read_bytes_per_s",
        "store_load_bytes_per_s",
        "store_declined",
    }


def test_what_an_engine_uses_once_counts_as_used(folder: Path, depth: int) -> None:
    """Each of many runs that take less than a minute needs the same prefix: it stays."""
    first = host_of(folder, depth, num_blocks=32)
    asked(first, prompt(21), max_tokens=1)
    close(first)
    for path in block_paths(folder):
        os.utime(path, (1000.0, 1000.0))
    began, reader = time.time(), host_of(folder, depth)
    assert asked(reader, prompt(21), max_tokens=1).num_cached == 20
    done = threading.Event()
    disk_of(reader)._writes.put(done.set)
    assert done.wait(10.0)
    assert min(path.stat().st_mtime for path in block_paths(folder)) > began - 1


def test_a_bound_keeps_the_head_of_a_prefix(folder: Path, depth: int) -> None:
    """Where files of some blocks go, those are a prefix's last."""
    host = host_of(folder, depth, num_blocks=32)
    asked(host, prompt(29), max_tokens=1)
    close(host)
    whole = sum(path.stat().st_size for path in block_paths(folder))
    second = host_of(folder, depth, num_bytes=whole // 2)
    seq = asked(second, prompt(29), max_tokens=1)
    assert 0 < seq.num_cached < 28


@pytest.mark.parametrize("seed", range(4))
def test_a_random_mix_of_engines_on_one_folder(folder: Path, depth: int, seed: int) -> None:
    """Requests, aborts, resets, snapshots, new engines and damaged files, in a folder that is too
    small: every answer is what it is alone, and every block that is found is what it is named.
    """
    rng = random.Random(seed)
    windows = rng.choice(WINDOWS)
    make = functools.partial(host_of, folder, depth, windows, num_bytes=6000, num_blocks=12)
    hosts, roots = [make() for _ in range(2)], [prompt(24, i) for i in range(3)]
    live: list[list[Sequence]] = [[], []]
    for _ in range(120):
        at, act = rng.randrange(2), rng.random()
        host = hosts[at]
        host._steps_left = 5000
        if act < 0.45:
            tokens = rng.choice(roots)[: rng.randrange(5, 25)] + rng.choices(range(90), k=2)
            live[at].append(host.add(tokens, rng.randrange(1, 6)))
        elif act < 0.75:
            for _ in range(rng.randrange(1, 6)):
                host.step()
        elif act < 0.8 and live[at]:
            host.engine.abort(rng.choice(live[at]).request_id)
        elif act < 0.85:
            host.engine.reset_prefix_cache(files=rng.random() < 0.3)
        elif act < 0.9 and (paths := block_paths(folder)):
            path = rng.choice(paths)
            size = rng.randrange(200)
            with contextlib.suppress(FileNotFoundError):  # another thread has made room
                path.write_bytes(path.read_bytes()[:size])
        elif act < 0.95:
            host.run()
            close(host)
            hosts[at], live[at] = make(), []
        else:
            host.engine.flush_files(10.0)
    for host in hosts:
        host.run()
        close(host)
    assert sum(path.stat().st_size for path in block_paths(folder)) <= 6000
