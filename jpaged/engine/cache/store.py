"""BlockStore: keeps blocks that the device's pools have given up, and finds them by content.

A block leaves a pool when another sequence takes it (CacheKind.take). What it held is offered to
the store, which names a slot for it; the block is read from the device before the next step writes
it, and its data is put into the slot once that step has come back, so that no step waits for it.
From then on PrefixCache.match finds it, and an admission loads it into a fresh block before the
step that reads it. Prefixes that were evicted and sequences that were preempted are alike here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from jpaged.engine.cache.content import Content
from jpaged.engine.types import BlockData


class Slot:
    """A place in a store for the block of one group and content. data: None until it arrives."""

    __slots__ = ("content", "data", "group")

    def __init__(self, content: Content, group: int, data: BlockData = None):
        self.content = content
        self.group = group
        self.data = data

    def __deepcopy__(self, memo: dict[int, object]) -> "Slot":
        return self  # written once: a snapshot shares it


class Move(NamedTuple):
    """A block between a slot of the store and a pool."""

    slot: Slot
    block_id: int


class BlockStore(Protocol):
    """Where blocks go that a pool gives up. Its decisions depend on the order of calls alone, so
    that the processes of one model make the same ones, but where it has files, which one process
    alone has. keeps: whether `keep` may want anything. writes_through: whether it wants every block
    that is full.
    """

    keeps: bool
    writes_through: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that blocks may take."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that they take."""
        ...

    def offer(self, content: Content, group: int) -> Slot | None:
        """Return the slot that a block's data is to be put into; None where the store has it or
        does not want it.
        """
        ...

    def keep(self, content: Content, group: int) -> Slot | None:
        """Return the slot that the data of a block which stays in its pool is to be put into; None
        where the store does not want it.
        """
        ...

    def has_room(self, group: int) -> bool:
        """Return whether a block of this group that is read for `keep` now will not be dropped."""
        ...

    def put(self, slot: Slot, data: BlockData) -> None:
        """Keep the data of a block that was offered, unless its slot was given up meanwhile."""
        ...

    def find(self, content: Content, group: int) -> Slot | None:
        """Return the slot of a block whose data has arrived, if there is one."""
        ...

    def locate(self, content: Content, group: int) -> Slot | None:
        """Return what `find` does, or else a fresh slot for the data of a block that the store has
        in a file.
        """
        ...

    def get(self, slot: Slot) -> BlockData:
        """Return the data of a block that `find` returned, also after it was given up."""
        ...

    def touch(self, contents: Iterable[Content]) -> None:
        """Count these as used now, a prefix (in order) as later than its tail."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...

    def contents(self) -> Iterable[Content]:
        """Return what is kept in host memory."""
        ...

    def check(self, root: Content) -> None:
        """Assert that bytes are counted and that all that is kept is of this root."""
        ...


class HostStore:
    """Blocks in host memory; what was used least recently goes first.

    num_bytes: that blocks may take. block_bytes: of a block of each group. Blocks that an admission
    is about to load may outlive their slots for one step, uncounted.
    """

    keeps = writes_through = False

    def __init__(self, num_bytes: int, block_bytes: Iterable[int]):
        self.num_bytes = num_bytes
        self.used_bytes = 0
        self._block_bytes = tuple(block_bytes)
        # By content, least recently used first, the slots of its groups.
        self._slots: OrderedDict[Content, dict[int, Slot]] = OrderedDict()

    @property
    def num_groups(self) -> int:
        return len(self._block_bytes)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        for slots in self._slots.values():
            yield from slots.values()

    def __deepcopy__(self, memo: dict[int, object]) -> "HostStore":
        twin = HostStore(self.num_bytes, self._block_bytes)
        twin.used_bytes = self.used_bytes
        twin._slots = OrderedDict((content, dict(slots)) for content, slots in self._slots.items())
        return twin

    def offer(self, content: Content, group: int) -> Slot | None:
        slots = self._slots.get(content, {})
        if slots:
            self._slots.move_to_end(content)
        size = self._block_bytes[group]
        if group in slots or size > self.num_bytes:
            return None
        while self.used_bytes + size > self.num_bytes:
            assert self._slots, "host bytes leaked"
            oldest = next(iter(self._slots))
            if oldest is content:  # alone, and there is no room for one more of its groups
                return None
            self._drop(oldest)
        self.used_bytes += size
        slot = Slot(content, group)
        self._slots.setdefault(content, slots)[group] = slot
        return slot

    def keep(self, content: Content, group: int) -> Slot | None:
        return None

    def has_room(self, group: int) -> bool:
        return True

    def put(self, slot: Slot, data: BlockData) -> None:
        if self._slots.get(slot.content, {}).get(slot.group) is slot:
            slot.data = data

    def find(self, content: Content, group: int) -> Slot | None:
        slot = self._slots.get(content, {}).get(group)
        return None if slot is None or slot.data is None else slot

    def locate(self, content: Content, group: int) -> Slot | None:
        return self.find(content, group)

    def get(self, slot: Slot) -> BlockData:
        assert slot.data is not None, "loaded before it arrived"
        return slot.data

    def touch(self, contents: Iterable[Content]) -> None:
        for content in reversed(list(contents)):
            if content in self._slots:
                self._slots.move_to_end(content)

    def contents(self) -> Iterable[Content]:
        return self._slots.keys()

    def clear(self) -> None:
        self._slots.clear()
        self.used_bytes = 0

    def check(self, root: Content) -> None:
        held = sum(self._block_bytes[slot.group] for slot in self)
        assert held == self.used_bytes <= self.num_bytes, f"host bytes leaked: {held}"
        for content, slots in self._slots.items():
            assert content.root is root, "a stored block is of other weights"
            assert slots, "a content without blocks"
            for group, slot in slots.items():
                assert (slot.content, slot.group) == (content, group), "in another's slot"

    def _drop(self, content: Content) -> None:
        slots = self._slots.pop(content)
        self.used_bytes -= sum(self._block_bytes[group] for group in slots)


class Traffic:
    """The blocks of one replica that are to go to its store, or to come from it, before its next
    step. through: those that are to go once a step has written them, by group and block, while they
    hold these contents and the store has room for them.
    """

    def __init__(self, store: BlockStore):
        self.store = store
        self.stores: list[Move] = []
        self.loads: dict[tuple[int, int], Move] = {}  # by group and block
        self.through: dict[tuple[int, int], Content] = {}

    def evict(self, group: int, block_id: int, content: Content | None) -> None:
        """Offer what a block holds that is taken for something else. content: None where that is
        of no use.
        """
        self.loads.pop((group, block_id), None)
        self.through.pop((group, block_id), None)
        slot = None if content is None else self.store.offer(content, group)
        if slot is not None:
            self.stores.append(Move(slot, block_id))

    def keep(self, group: int, block_id: int, content: Content) -> None:
        """Offer what a block holds that stays where it is."""
        if self.store.writes_through:
            self.write_through(group, block_id, content)
        elif (slot := self.store.keep(content, group)) is not None:
            self.stores.append(Move(slot, block_id))

    def write_through(self, group: int, block_id: int, content: Content) -> None:
        """Offer what a block will hold once the steps that were planned have run."""
        if content.digest is not None:
            self.through[group, block_id] = content

    def take_through(self) -> tuple[Move, ...]:
        """Return what is to be read of blocks that were written, as far as the store has room, and
        forget it: all that was planned was dispatched.
        """
        moves = list[Move]()
        for (group, block_id), content in list(self.through.items()):
            if not self.store.has_room(group):
                break
            del self.through[group, block_id]
            if (slot := self.store.keep(content, group)) is not None:
                moves.append(Move(slot, block_id))
        return tuple(moves)

    def load(self, slot: Slot, block_id: int) -> None:
        """Fill a fresh block from the store before the next step."""
        self.loads[slot.group, block_id] = Move(slot, block_id)

    def take_stores(self) -> tuple[Move, ...]:
        """Return what must be read from the pools before the next step, and forget it."""
        stores, self.stores = tuple(self.stores), []
        return stores

    def take_loads(self) -> tuple[Move, ...]:
        """Return what must be written into the pools after that, and forget it: the step goes out
        with it.
        """
        loads = tuple(self.loads.values())
        self.loads.clear()
        return loads
