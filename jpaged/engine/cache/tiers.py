"""TieredStore: host memory over files. What a pool gives up goes to both; what comes from a file
goes through host memory, so that a match never names what may still turn out to be missing.
"""

import dataclasses
import time
from collections.abc import Iterable

from jpaged.config import EngineConfig
from jpaged.engine.cache.block_files import BlockKey
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.disk import Disk, Fetch
from jpaged.engine.cache.store import BlockStore, HostStore, Slot
from jpaged.engine.types import BlockData


@dataclasses.dataclass
class Reading:
    """A block that was read, or is being read. users: requests that it is for."""

    slot: Slot
    fetch: Fetch
    users: int = 1


class TieredStore:
    """A BlockStore whose blocks outlive the process.

    host: what is kept in memory, which may be of 0 bytes. disk: the files. Beside those, blocks
    that were read for a request are held until it runs, and blocks that wait to be written until
    they are. writes_through: every block is written once it is full.
    """

    keeps = True

    def __init__(self, host: HostStore, disk: Disk, *, writes_through: bool = False):
        self.host, self.disk, self.writes_through = host, disk, writes_through
        # What is to be written once its data arrives, and what requests that do not run yet need.
        self._offered: dict[tuple[Content, int], Slot] = {}
        self._read: dict[tuple[Content, int], Reading] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "TieredStore":
        twin = self.host.__deepcopy__(memo)
        return TieredStore(twin, self.disk, writes_through=self.writes_through)

    @property
    def num_bytes(self) -> int:
        return self.host.num_bytes

    @property
    def used_bytes(self) -> int:
        return self.host.used_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of blocks that were read, or are being read, for requests that do not run yet."""
        sizes = self.disk.codec.stored_bytes
        return sum([sizes(group) for _, group in self._read])

    def offer(self, content: Content, group: int) -> Slot | None:
        key, slot = (content, group), self.host.offer(content, group)
        if content.digest is None or key in self._offered or self.disk.knows(content, group):
            return slot
        if slot is None:
            if self.host.find(content, group) is not None:
                return None  # it was offered to the files before
            slot = Slot(content, group)
        self._offered[key] = slot
        return slot

    def keep(self, content: Content, group: int) -> Slot | None:
        key = content, group
        if content.digest is None or key in self._offered:
            return None
        if self.disk.knows(content, group):
            self.disk.touch((content,), (group,))
            return None
        if self.writes_through and self.disk.is_paused:
            self.disk.counts["dropped_blocks"] += 1
            return None
        slot = self._offered[key] = Slot(content, group)
        return slot

    def has_room(self, group: int) -> bool:
        sizes = self.disk.codec.stored_bytes
        offered = sum([sizes(at) for _, at in self._offered])
        return self.disk.is_paused or self.disk.has_room(sizes(group), offered)

    def unwritten(self) -> set[BlockKey]:
        """Return what is to be written, or is being written, to files."""
        names = [self.disk.name_of(content, group) for content, group in self._offered]
        return {name.key for name in names if name is not None} | self.disk.unwritten()

    def put(self, slot: Slot, data: BlockData) -> None:
        self.host.put(slot, data)
        key = slot.content, slot.group
        if self._offered.get(key) is slot:
            del self._offered[key]
            self.disk.write(slot.content, slot.group, data)

    def put_flushed(self, slot: Slot, data: BlockData, used_at: float, until: float) -> bool:
        """Put the data of a block of `keep`, once there is room for it among what waits to be
        written. used_at: seconds since 1970. until: see Disk.write; False where it has passed.
        """
        del self._offered[slot.content, slot.group]
        return self.disk.write(slot.content, slot.group, data, until=until, used_at=used_at)

    def find(self, content: Content, group: int) -> Slot | None:
        if (slot := self.host.find(content, group)) is not None:
            return slot
        reading = self._read.get((content, group))
        if reading is not None and reading.slot.data is not None:
            return reading.slot
        data = self.disk.pending(content, group)
        return None if data is None else Slot(content, group, data)

    def locate(self, content: Content, group: int) -> Slot | None:
        if (slot := self.find(content, group)) is not None:
            return slot
        if (reading := self._read.get((content, group))) is not None:
            return reading.slot
        return Slot(content, group) if self.disk.has(content, group) else None

    def get(self, slot: Slot) -> BlockData:
        assert slot.data is not None, "loaded before it arrived"
        return slot.data

    def touch(self, contents: Iterable[Content]) -> None:
        contents = tuple(contents)
        self.host.touch(contents)
        self.disk.touch(contents, range(self.num_groups))

    @property
    def num_groups(self) -> int:
        return self.host.num_groups

    def contents(self) -> Iterable[Content]:
        return self.host.contents()

    def clear(self) -> None:
        """Forget everything but the files, whose blocks are found again under their identity."""
        self.host.clear()
        self._offered.clear()
        self._read.clear()

    def forget_files(self) -> None:
        """Forget everything, the files too."""
        self.clear()
        self.disk.forget()

    def check(self, root: Content) -> None:
        self.host.check(root)
        for content, group in (*self._read, *self._offered):
            assert content.root is root, "a block of other weights is to be stored, or was read"
            assert group < self.num_groups, "of no group"

    # Reading ahead

    def fetch(self, slots: Iterable[tuple[int, Slot]]) -> Fetch:
        """Start to read the blocks of slots that `locate` returned; `find` returns those that have
        arrived until `release`. slots: with their entries, the first ones first.
        """
        wanted, shared = list[tuple[int, Slot]](), list[tuple[int, Slot]]()
        others = dict[Fetch, None]()
        for entry, slot in slots:
            reading = self._read.get((slot.content, slot.group))
            if reading is not None:
                reading.users += 1
                shared.append((entry, reading.slot))
                others[reading.fetch] = None
            elif slot.data is None:
                wanted.append((entry, slot))
        fetch = self.disk.fetch(wanted, shared, tuple(others))
        for _, slot in wanted:
            self._read[slot.content, slot.group] = Reading(slot, fetch)
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Let go of what was read for a request."""
        for _, slot in (*fetch.slots, *fetch.shared):
            key = slot.content, slot.group
            reading = self._read.get(key)
            if reading is not None and reading.slot is slot:
                reading.users -= 1
                if not reading.users:
                    del self._read[key]
        if not any(reading.fetch is fetch for reading in self._read.values()):
            fetch.cancel()

    def flush_host(self, used_at: float, until: float) -> int:
        """Write what host memory alone has, as far as it is known, what was used last first.
        used_at: seconds since 1970 before which all of it was. until: by time.monotonic(), when to
        write no more. Return how many blocks were left out then.
        """
        left = 0
        for slot in reversed(list(self.host)):
            if slot.data is None or slot.content.digest is None:
                continue
            used_at -= 1e-6
            if self.disk.knows(slot.content, slot.group):
                continue
            args = slot.content, slot.group, slot.data
            is_late = time.monotonic() > until
            left += is_late or not self.disk.write(*args, until=until, used_at=used_at)
        return left


def make_stores(
    config: EngineConfig, count: int, block_bytes: list[int], disk: Disk | None = None
) -> list[BlockStore | None]:
    """Return so many stores, which share the memory that the config has for them; None in place of
    each where it has none and there are no files. block_bytes: of a block of each group.
    """
    if not config.swap_space_gib and disk is None:
        return [None] * count
    num_bytes = int(config.swap_space_gib * 2**30 / count)
    hosts = [HostStore(num_bytes, block_bytes) for _ in range(count)]
    if disk is None:
        return [*hosts]
    through = config.prefix_store_policy == "write_through"
    return [*(TieredStore(host, disk, writes_through=through) for host in hosts)]
