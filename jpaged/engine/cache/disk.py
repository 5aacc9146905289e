"""Disk: blocks in files, or with a block server, written behind the steps and read ahead of them by
threads.
"""

import functools
import logging
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Buffer, Callable, Iterable, Sequence
from typing import Protocol

from jpaged.engine.cache.block_files import BlockKey, BlockName, Read, Written
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.costs import Costs
from jpaged.engine.cache.store import Slot
from jpaged.engine.types import BlockData, Report

log = logging.getLogger("jpaged")

READERS = 4  # threads
PENDING_BYTES = 256 << 20  # of blocks that wait to be written; more are not kept
PAUSE_S = 5.0  # without writes after one that failed, and without reads while one takes so long
REMEMBERED = 1 << 20  # files that are known to be there without a look
TOUCH_S = 60.0  # a file that is used again sooner is not marked as used
LOOK_S = 0.25  # a request waits at most so long to learn what a block server has


class BlockCodec(Protocol):
    """Turns blocks on the host into bytes and back. The Device has it."""

    def stored_bytes(self, group: int) -> int:
        """Return the bytes that a block of a group takes in a file."""
        ...

    def block_to_bytes(self, group: int, data: BlockData) -> Sequence[Buffer]:
        """Return the bytes of a block, in one or several pieces; any thread may call."""
        ...

    def block_from_bytes(self, group: int, raw: Buffer) -> BlockData:
        """Return the block of such bytes; any thread may call."""
        ...


class StoredBlocks(Protocol):
    """Where blocks are: the files of a folder (BlockFiles), or with a server (RemoteBlocks). Any
    thread may call; each method returns what came of it, and raises nothing of what may go wrong.

    asks_ahead: whether `has_all` may take long, so that it is called in a thread, for all blocks of
    a prompt at a time. instance: another one where all that was there may be gone. evicted_blocks:
    that were deleted to make room.
    """

    asks_ahead: bool
    instance: bytes
    num_bytes: int
    evicted_blocks: int

    def has(self, name: BlockName) -> bool:
        """Return whether a block is there."""
        ...

    def has_all(self, names: Sequence[BlockName]) -> list[bool] | None:
        """Return for each block whether it is there; None where that cannot be said."""
        ...

    def used_bytes(self) -> int:
        """Return the bytes that all blocks take; no thread waits for it."""
        ...

    def read(self, name: BlockName, num_bytes: int) -> tuple[Read, Buffer | None]:
        """Return the data of a block, once it was checked. num_bytes: that it has."""
        ...

    def write(
        self, name: BlockName, data: Sequence[Buffer], used_at: float | None = None
    ) -> Written:
        """Keep the data of a block. used_at: seconds since 1970, None is now."""
        ...

    def touch_all(self, names: Sequence[BlockName], used_at: float) -> list[bool]:
        """Count blocks of one identity as used at this time, each a little before the one that it
        follows. Return for each whether it is there.
        """
        ...

    def forget(self, identity: str) -> bool:
        """Delete all blocks of an identity. Return whether there are none now."""
        ...


class Look:
    """A question which of some blocks a server has. done: it was answered, or cannot be."""

    def __init__(self, names: Sequence[BlockName]):
        self.names, self.began = tuple(names), time.monotonic()
        self.done = threading.Event()


class Fetch:
    """Blocks that are being read for a request. A slot has its data once its file was read and is
    what it is to be. slots: by entry of a table, first ones first. shared: those that other fetches
    read, which are `others`. cut: entries from here on are not read, since one before them is not
    there.
    """

    def __init__(
        self,
        slots: Sequence[tuple[int, Slot]],
        shared: Sequence[tuple[int, Slot]],
        others: "tuple[Fetch, ...]",
        num_bytes: int,
    ):
        self.slots, self.shared, self.others = tuple(slots), tuple(shared), others
        self.num_bytes = num_bytes
        self.cut = max((entry for entry, _ in self.slots), default=0) + 1
        self.left = len(self.slots)
        self.done = threading.Event()
        if not self.left:
            self.done.set()

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is being read any more."""
        return self.done.is_set() and all(other.done.is_set() for other in self.others)

    def wait(self, seconds: float) -> None:
        """Wait until it is done, at most so long."""
        until = time.monotonic() + seconds
        for fetch in (self, *self.others):
            fetch.done.wait(max(until - time.monotonic(), 0.0))

    def cancel(self) -> None:
        """Read nothing more of it."""
        self.cut = 0


class Disk:
    """The stored blocks of one engine, and the threads that move them. Below a file is what holds a
    block there, also where a server has it.

    identity: the root digest of what is written and found from now on, as hex. costs: what is
    measured here is counted there. Methods are called by the engine's thread; none waits for a
    file, but `flush`, `forget`, and `write` where it is asked to.
    """

    def __init__(self, files: StoredBlocks, codec: BlockCodec, costs: Costs):
        self.files, self.codec, self.costs = files, codec, costs
        self.identity = ""
        self.counts: Counter[str] = Counter()
        self.reading_bytes = self.pending_bytes = 0
        self._pending: dict[BlockKey, BlockData] = {}
        self._known: dict[BlockKey, float] = {}  # when they were marked as used
        self._instance = files.instance  # that these are of
        self._looks: deque[Look] = deque()  # that are not answered
        self._changed = threading.Condition()  # its lock guards what threads change
        self._era = 0  # counts `forget`: what was to be written before is not
        self._paused_until = 0.0
        self._read_at = 0.0  # when a read last ended, or the first of those under way began
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        queues = [self._writes] + [self._reads] * READERS + [self._asks] * files.asks_ahead
        for jobs in queues:
            threading.Thread(target=_run, args=(jobs,), name="jpaged-store", daemon=True).start()
        self._stop = weakref.finalize(self, _stop, queues)

    # What there is

    def name_of(self, content: Content, group: int) -> BlockName | None:
        """Return what a block of the current identity is found by; None where it is in no file."""
        if content.digest is None or content.parent is None or content.parent.digest is None:
            return None
        parent, ids = content.parent.digest, content.stored_ids
        return BlockName(self.identity, content.digest, parent, group, ids)

    def knows(self, content: Content, group: int) -> bool:
        """Return whether there is a file of a block, or one is being written, as far as that is
        known without a look.
        """
        name = self.name_of(content, group)
        if self._instance != self.files.instance:
            self._forget_known()
        return name is not None and (name.key in self._known or name.key in self._pending)

    def has(self, content: Content, group: int) -> bool:
        """Return whether there is a file of a block, or one is being written."""
        if self.knows(content, group):
            return True
        if self.files.asks_ahead:
            return False  # as far as `look` has asked
        name = self.name_of(content, group)
        if name is None or not self.files.has(name):
            return False
        self._know(name, 0.0)
        return True

    def look(self, blocks: Iterable[tuple[Content, int]]) -> Look | None:
        """Start to ask which of these blocks, contents and groups, there are: `has` knows it once
        the look is done. None where answers take too long now.
        """
        with self._changed:
            if self._looks and time.monotonic() - self._looks[0].began > LOOK_S:
                return None
            names = [name for pair in blocks if (name := self.name_of(*pair)) is not None]
            look = Look(names)
            self._looks.append(look)
        self._asks.put(functools.partial(self._look, look))
        return look

    def pending(self, content: Content, group: int) -> BlockData | None:
        """Return the data of a block that waits to be written."""
        name = self.name_of(content, group)
        return None if name is None else self._pending.get(name.key)

    def touch(self, contents: Iterable[Content], groups: Iterable[int]) -> None:
        """Mark the files of these blocks as used, a prefix (in order) as later than its tail."""
        now, groups, names = time.time(), tuple(groups), list[BlockName]()
        for content in contents:
            for group in groups:
                name = self.name_of(content, group)
                if name is None or now - self._known.get(name.key, now) < TOUCH_S:
                    continue
                self._known[name.key] = now
                names.append(name)
        if names:
            self._writes.put(functools.partial(self._touch, names, now))

    # To the files

    def write(
        self,
        content: Content,
        group: int,
        data: BlockData,
        *,
        until: float | None = None,
        used_at: float | None = None,
    ) -> bool:
        """Write a block some time soon, unless its file is there or too much waits to be written.
        until: by time.monotonic(), when to wait no longer for less to wait; None does not wait.
        used_at: see BlockFiles.write. Return False where `until` has passed.
        """
        name, size = self.name_of(content, group), self.codec.stored_bytes(group)
        if name is None or self.knows(content, group):
            return True
        with self._changed:
            while not self.is_paused and not self.has_room(size, 0):
                left = 0.0 if until is None else until - time.monotonic()
                if left <= 0:
                    self.counts["dropped_blocks"] += 1
                    return until is None
                self._changed.wait(left)
            if self.is_paused:
                self.counts["dropped_blocks"] += 1
                return True
            self._pending[name.key] = data
            self.pending_bytes += size
        self._writes.put(functools.partial(self._write, name, data, used_at, self._era))
        return True

    @property
    def is_paused(self) -> bool:
        """Whether all that is to be written is dropped, since a write has failed of late."""
        return time.monotonic() < self._paused_until

    def has_room(self, num_bytes: int, offered: int) -> bool:
        """Return whether a block of so many bytes would not be dropped. offered: bytes that are to
        be written before it.
        """
        before = self.pending_bytes + offered
        return not before or before + num_bytes <= PENDING_BYTES

    def unwritten(self) -> set[BlockKey]:
        """Return what waits to be written, or is being written."""
        with self._changed:
            return set(self._pending)

    def wait(self, seconds: float) -> None:
        """Wait until something that waits to be written was, at most so long."""
        with self._changed:
            if self._pending:
                self._changed.wait(seconds)

    def flush(self, seconds: float) -> bool:
        """Wait, at most so long, until all that waits to be written was; return whether it was."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._pending:
                if (left := until - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left)
        return True

    def forget(self) -> None:
        """Delete the files of the current identity; what waits to be written is not, and is not
        found any more.
        """
        with self._changed:
            self._era += 1
            self._pending.clear()
            self.pending_bytes = 0
            self._changed.notify_all()
        self._known.clear()
        if not self.files.forget(self.identity):
            self.counts["write_errors"] += 1
            log.warning("prefix_store: blocks that were to be deleted may be there still")

    # From the files

    @property
    def is_stuck(self) -> bool:
        """Whether reads are under way of which none has ended for long."""
        return self.reading_bytes > 0 and time.monotonic() - self._read_at > PAUSE_S

    def fetch(
        self,
        slots: Sequence[tuple[int, Slot]],
        shared: Sequence[tuple[int, Slot]] = (),
        others: tuple[Fetch, ...] = (),
    ) -> Fetch:
        """Start to read blocks, in this order. slots: with the entries that they are for. shared:
        those that `others` read.
        """
        size = sum(self.codec.stored_bytes(slot.group) for _, slot in slots)
        fetch = Fetch(slots, shared, others, size)
        with self._changed:
            if not self.reading_bytes:
                self._read_at = time.monotonic()
            self.reading_bytes += size
        for entry, slot in fetch.slots:
            name = self.name_of(slot.content, slot.group)
            self._reads.put(functools.partial(self._read, fetch, entry, slot, name))
        return fetch

    def close(self) -> None:
        """Start nothing more; what waits to be written still is, unless the process ends."""
        self._stop()

    def report(self) -> Report:
        """Return what was moved, what failed, and what the files of the folder take."""
        counts = self.counts.copy()
        names = ("read_blocks", "read_bytes", "write_blocks", "write_bytes", "bad_blocks")
        names += ("read_errors", "write_errors", "dropped_blocks", "absent_blocks")
        return {
            **{f"store_{name}": counts[name] for name in names},
            "store_evicted_blocks": self.files.evicted_blocks,
            "store_bytes": self.files.num_bytes,
            "store_bytes_in_use": self.files.used_bytes(),
            "store_pending_bytes": self.pending_bytes,
        }

    # In the threads

    def _look(self, look: Look) -> None:
        there = None
        try:
            there = self.files.has_all(look.names) if look.names else []
        finally:
            with self._changed:
                self._looks.remove(look)
                if self._instance != self.files.instance:
                    self._forget_known()
                if there is None:
                    self.counts["read_errors"] += 1
                for name, is_there in zip(look.names, there or (), strict=there is not None):
                    if is_there:
                        self._know(name, self._known.get(name.key, 0.0))
                    elif name.key not in self._pending:
                        self._known.pop(name.key, None)
            look.done.set()

    def _write(self, name: BlockName, data: BlockData, used_at: float | None, era: int) -> None:
        size, came = self.codec.stored_bytes(name.group), "failed"
        try:
            if era == self._era:
                pieces = self.codec.block_to_bytes(name.group, data)
                came = self.files.write(name, pieces, used_at)
                if era != self._era:  # it was forgotten meanwhile
                    self.files.forget(name.identity)
        finally:
            with self._changed:
                if era == self._era:  # else what waits under this name is another one
                    del self._pending[name.key]
                    self.pending_bytes -= size
                    self._wrote(name, size, came)
                self._changed.notify_all()

    def _wrote(self, name: BlockName, size: int, came: str) -> None:
        if came == "failed":
            self.counts["write_errors"] += 1
            self._paused_until = time.monotonic() + PAUSE_S
        elif came == "refused":
            self.counts["dropped_blocks"] += 1
        else:
            self._know(name, time.time())
        if came == "written":
            self.counts["write_blocks"] += 1
            self.counts["write_bytes"] += size

    def _read(self, fetch: Fetch, entry: int, slot: Slot, name: BlockName | None) -> None:
        size, came = self.codec.stored_bytes(slot.group), "unreadable"
        is_wanted = name is not None and entry < fetch.cut
        try:
            if name is not None and is_wanted:
                read, raw = self.files.read(name, size)
                if raw is not None:
                    slot.data = self.codec.block_from_bytes(slot.group, raw)
                came = read
        finally:
            with self._changed:
                if name is not None and is_wanted:
                    self._was_read(fetch, entry, name, size, came)
                self.reading_bytes -= size
                fetch.left -= 1
                if not fetch.left:
                    fetch.done.set()

    def _was_read(self, fetch: Fetch, entry: int, name: BlockName, size: int, came: str) -> None:
        now = time.monotonic()
        if came == "read":
            self.counts["read_blocks"] += 1
            self.counts["read_bytes"] += size
            self.costs.disk.add(size, now - self._read_at)
        else:
            kinds = {"bad": "bad_blocks", "unreadable": "read_errors", "absent": "absent_blocks"}
            self.counts[kinds[came]] += 1
            self._known.pop(name.key, None)
            fetch.cut = min(fetch.cut, entry)
        self._read_at = now

    def _forget_known(self) -> None:
        """Know of no file any more: another server than before answers, with blocks of its own."""
        self._instance = self.files.instance
        self._known.clear()

    def _touch(self, names: list[BlockName], used_at: float) -> None:
        for name, is_there in zip(names, self.files.touch_all(names, used_at), strict=True):
            if not is_there:
                self._known.pop(name.key, None)

    def _know(self, name: BlockName, used_at: float) -> None:
        """Remember that a block is there. used_at: when it was marked as used, 0.0: who knows."""
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[name.key] = used_at


def _run(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Do what comes, until None does."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # of this block alone
            log.exception("the prefix store: a block was not moved")
        del job  # it holds a block


def _stop(queues: "Iterable[queue.SimpleQueue[Callable[[], None] | None]]") -> None:
    for jobs in queues:
        jobs.put(None)
