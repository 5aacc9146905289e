"""Kinds of cache: the blocks of a group of layers, who owns them and what they hold, and what a row
needs of them, for keys and values and for states.

Entry i of a sequence's table belongs to tokens [i * P, (i + 1) * P):

- Paged: entry i holds a record of each of these tokens, of which a query sees all, or the last
  `window` ones.
- State: entry i holds one record, the state after the last of these tokens that was computed. A
  step that begins at position s reads entry (s - 1) // P and writes that of its last token, so only
  the last entry of a table is ever needed: a window of 2 tokens. Prefix hits, forks with their
  copies, eviction and the store come with that. A state cannot be taken back by a token, and it is
  found later only where a chunk ended at the end of a block.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jpaged.engine.cache.content import Content
from jpaged.engine.cache.store import Slot, Traffic

GONE = -1  # in a block table: no block, since nothing will read it
LOAD = -2  # in the table of a match: the store has this block
UNBOUNDED = 1 << 62  # tokens
Copies = tuple[tuple[tuple[int, int], ...], ...]  # (source, target) blocks, a group each


class Replay(NamedTuple):
    """The tokens of a row after which a state is written, once it is known that they are right.

    place: of the first among the tokens of the step that guessed. start: its position. num_tokens:
    so many, all of one block. read, written: by group the block of the state before them, and that
    of the state after them; GONE where the group keeps none.
    """

    place: int
    start: int
    num_tokens: int
    read: tuple[int, ...]
    written: tuple[int, ...]


class GroupSize(NamedTuple):
    """The blocks of one group of layers. window: tokens that a query sees; None is all of them.

    block_bytes: of one block, in all its layers. per: what one record of a block belongs to, a
    token, or the block as a whole: a recurrent state, as it is after the block's last token.
    experts: where a record is the experts that a token took, in how many layers and how many in
    each.
    """

    num_blocks: int
    window: int | None = None
    block_bytes: int = 0
    per: Literal["token", "block"] = "token"
    experts: tuple[int, int] | None = None


class Block:
    """One KV block. content: None while open, or where nothing may find it."""

    __slots__ = ("content", "id", "ref_count")

    def __init__(self, id: int, ref_count: int = 0, content: Content | None = None):
        self.id = id
        self.ref_count = ref_count
        self.content = content

    def __deepcopy__(self, memo: dict[int, object]) -> "Block":  # a tenth of what the default takes
        return Block(self.id, self.ref_count, self.content)


class CacheKind:
    """The blocks of one group of layers and what every kind does alike with the tables of sequences
    in this group.

    index: its place among the groups. traffic: what takes the blocks that are given up; None
    without a store. can_rewind: whether a row may go on from an earlier token than its last, as
    refused guesses make it do. most_tokens: as far as a sequence that is alone can grow.
    """

    can_rewind = True

    def __init__(
        self, size: GroupSize, block_size: int, index: int = 0, traffic: Traffic | None = None
    ):
        self.window = size.window
        self.per = size.per
        self.block_bytes = size.block_bytes
        self.block_size = block_size
        self.index = index
        self.traffic = traffic
        self.num_blocks = size.num_blocks
        self.most_tokens = self._most_tokens()
        self.blocks = [Block(i) for i in range(size.num_blocks)]
        # Next to be reused first: blocks that nothing can find, then the least recently freed.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size.num_blocks))
        self.cached: dict[Content, int] = {}  # the block that a search finds
        self.copies: list[tuple[int, int]] = []  # to be made before the next step writes
        # Closed for the plan in the making: what they are to hold is written by its step, or loaded
        # just before it.
        self.unwritten: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self.free)

    def take(self) -> int:
        """Return a free block, now of one owner. What it held is offered to the store and
        forgotten here.
        """
        block_id = self.next_taken()
        del self.free[block_id]
        block = self.blocks[block_id]
        if self.traffic is not None:
            is_found = block.content is not None and self.cached.get(block.content) == block_id
            is_written = is_found and block_id not in self.unwritten
            self.traffic.evict(self.index, block_id, block.content if is_written else None)
        self.unwritten.discard(block_id)
        self.forget(block)
        block.ref_count = 1
        return block_id

    def next_taken(self) -> int:
        """Return the free block that `take` takes next."""
        return next(iter(self.free))

    def share(self, block_id: int) -> None:
        """Add an owner to a block in use, or give a cached one its first."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free[block_id]
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """Take an owner from a block; without any it is free."""
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is free already"
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free[block_id] = None
            if block.content is None or self.cached.get(block.content) != block_id:
                self.free.move_to_end(block_id, last=False)  # no search can find it: reuse it first

    def close(self, block_id: int, content: Content) -> None:
        """Let others find a block that is full."""
        # Point the index at the newest copy: an older one may be free already.
        self.blocks[block_id].content = content
        self.cached[content] = block_id

    def forget(self, block: Block) -> None:
        """Let no search find a block again."""
        if block.content is not None and self.cached.get(block.content) == block.id:
            del self.cached[block.content]
        block.content = None

    def latest_first(self) -> list[Block]:
        """Return the blocks that can be found: those in use, then the others, freed last first."""
        used = [block.id for block in self.blocks if block.ref_count]
        held = [self.blocks[block_id] for block_id in (*used, *reversed(self.free))]
        return [
            block
            for block in held
            if block.content is not None
            and self.cached.get(block.content) == block.id
            and block.id not in self.unwritten
        ]

    # Tables

    def matched(self, content: Content, *, in_files: bool = False) -> int | Slot | None:
        """Return the block that holds a content, else the slot of the store that does, else None.
        in_files: also one of a file that is still to be read.
        """
        block_id = self.cached.get(content)
        if block_id is None and self.traffic is not None:
            store = self.traffic.store
            return (store.locate if in_files else store.find)(content, self.index)
        return block_id

    def first_seen(self, position: int) -> int:
        """Return the first entry of a table that a query at this position sees."""
        if self.window is None:
            return 0
        return max(position - self.window + 1, 0) // self.block_size

    def num_needed(self, start: list[int], length: int, end: int) -> int:
        """Return the free blocks that an admission takes, which begins with this table of a match.
        length: tokens of the sequence. end: of its first chunk.
        """
        new = sum(1 for _ in self._entries(len(start), length if self.window is None else end))
        return new + sum(b == LOAD or (b != GONE and not self.blocks[b].ref_count) for b in start)

    def admit(
        self, start: list[int], contents: list[Content], slots: dict[int, Slot], length: int
    ) -> "array[int]":
        """Return the table of an admitted sequence: the blocks of its match, those that are loaded
        from the store, and where nothing leaves a window fresh ones for all its tokens.
        """
        for block_id in start:
            if block_id >= 0:
                self.share(block_id)
        if self.traffic is not None and self.traffic.store.keeps:
            for i, block_id in enumerate(start):
                if block_id >= 0 and block_id not in self.unwritten:
                    self.traffic.keep(self.index, block_id, contents[i])
        table = array("i", start)
        for i, slot in slots.items():
            assert start[i] == LOAD and self.traffic is not None
            table[i] = self.take()
            self.close(table[i], contents[i])
            self.unwritten.add(table[i])
            self.traffic.load(slot, table[i])
        if self.window is None:
            self.extend(table, length)
        return table

    def reach(self, table: "array[int]", *, one_by_one: bool = False) -> int:
        """Return up to how many tokens the blocks of a table and all free ones go. one_by_one: the
        tokens are computed in a step each, not side by side.
        """
        return (len(table) + len(self.free)) * self.block_size

    def extend(self, table: "array[int]", num_tokens: int, *, one_by_one: bool = False) -> None:
        """Append entries until a table covers this many tokens, which `reach` allows."""
        for i in self._entries(len(table), num_tokens, one_by_one=one_by_one):
            while len(table) < i:
                table.append(GONE)
            table.append(self.take())

    def make_writable(self, table: "array[int]", i: int) -> None:
        """Give an entry that lacks one a block for its owner alone: a fresh one, or a copy of the
        shared one.
        """
        target = self.take()
        if i == len(table):
            table.append(target)
            return
        source = self.blocks[table[i]]
        source.ref_count -= 1
        table[i] = target
        self.copies.append((source.id, target))

    def fork(self, table: "array[int]") -> "array[int]":
        """Return a second owner's table of the same blocks."""
        for block_id in table:
            if block_id != GONE:
                self.share(block_id)
        return table[:]

    def trim(self, table: "array[int]", first_held: int, position: int, first_drawn: int) -> int:
        """Give back the entries that no query at or after a position sees. Returns the first entry
        that is held then. first_drawn: the first entry past what a later prompt like this one's can
        hit.
        """
        first = self.first_seen(position)
        for i in range(first_held, first):
            if table[i] != GONE:
                self.release(table[i])
                table[i] = GONE
        return max(first_held, first)

    def release_all(self, table: "array[int]", contents: list[Content]) -> None:
        """Give up a table's blocks, last first: a prefix outlives its tail. contents: those of its
        closed blocks.
        """
        for block_id in reversed(table):
            if block_id != GONE:
                self.release(block_id)

    def is_whole(self, i: int, step_end: int) -> bool:
        """Return whether entry i holds all that its content stands for, after a step that was
        computed side by side up to `step_end` has passed the last of its tokens.
        """
        return True

    def stop_before(self, start: int, end: int, parting: int, *, is_last: bool) -> int:
        """Return where a chunk from `start` had better end, at `end` at the latest, for what it
        leaves to be found. parting: tokens that another sequence is known to have too. is_last:
        the sequence ends there.
        """
        return end

    def skips(self, position: int, end: int) -> bool:
        """Return whether a chunk up to `end` writes no entry for one of its positions."""
        return False

    def check(self, table: "array[int]", first_held: int, num_dispatched: int) -> None:
        """Assert that a running row's table holds what its next step reads, and nothing else."""
        raise NotImplementedError

    def _most_tokens(self) -> int:
        raise NotImplementedError

    def _entries(self, first: int, num_tokens: int, *, one_by_one: bool = False) -> Iterator[int]:
        """Yield the entries from `first` on that tokens up to this number write."""
        yield from range(first, -(-num_tokens // self.block_size))


class Paged(CacheKind):
    """Keys and values of each token, or whatever else is looked at again token by token."""

    def _most_tokens(self) -> int:
        # The tokens of a window, where they begin with the last of a block.
        if self.window is None or -(-(self.window - 1) // self.block_size) + 1 > self.num_blocks:
            return self.num_blocks * self.block_size
        return UNBOUNDED

    def check(self, table: "array[int]", first_held: int, num_dispatched: int) -> None:
        held = table[first_held:]
        assert GONE not in held and all(b == GONE for b in table[:first_held]), f"holes: {table}"
        assert first_held <= self.first_seen(num_dispatched), "lost a block that it sees"


class State(CacheKind):
    """A recurrent state, of which a block keeps one record.

    A row that draws leaves a state behind in every block, and what a later prompt is most likely to
    share are two: the last one of its prompt, and the last one that it leaves when it ends, for the
    next turn. Those between, in `passed`, are reused before any other that can be found.
    """

    can_rewind = False

    def __init__(
        self, size: GroupSize, block_size: int, index: int = 0, traffic: Traffic | None = None
    ):
        super().__init__(size._replace(window=2), block_size, index, traffic)
        self.passed: OrderedDict[int, None] = OrderedDict()  # free, in the order of their release

    def next_taken(self) -> int:
        block_id = super().next_taken()
        content = self.blocks[block_id].content
        is_found = content is not None and self.cached.get(content) == block_id
        return next(iter(self.passed)) if is_found and self.passed else block_id

    def take(self) -> int:
        block_id = super().take()
        self.passed.pop(block_id, None)
        return block_id

    def share(self, block_id: int) -> None:
        super().share(block_id)
        self.passed.pop(block_id, None)

    def trim(self, table: "array[int]", first_held: int, position: int, first_drawn: int) -> int:
        first = self.first_seen(position)
        drawn = [b for b in table[max(first_held, first_drawn) : first] if b != GONE]
        held = super().trim(table, first_held, position, first_drawn)
        self.passed.update((b, None) for b in drawn if not self.blocks[b].ref_count)
        return held

    def release_all(self, table: "array[int]", contents: list[Content]) -> None:
        super().release_all(table, contents)
        last = self.cached.get(contents[-1]) if contents else None
        if last in self.passed:  # where this sequence is gone on from
            del self.passed[last]
            self.free.move_to_end(last)

    def matched(self, content: Content, *, in_files: bool = False) -> int | Slot | None:
        # Rows of one step read their states before any of them writes: what this plan's step is to
        # leave is for later plans.
        block_id = self.cached.get(content)
        if block_id in self.unwritten and not self._is_loaded(block_id):
            return None
        return super().matched(content, in_files=in_files)

    def _is_loaded(self, block_id: int) -> bool:
        return self.traffic is not None and (self.index, block_id) in self.traffic.loads

    def _most_tokens(self) -> int:
        # A step reads one entry and writes the next.
        return UNBOUNDED if self.num_blocks >= 2 else self.num_blocks * self.block_size

    def reach(self, table: "array[int]", *, one_by_one: bool = False) -> int:
        if one_by_one or not self.free:
            return super().reach(table)
        return UNBOUNDED  # a chunk of any length writes one entry

    def is_whole(self, i: int, step_end: int) -> bool:
        return (i + 1) * self.block_size == step_end  # else it is that of an earlier token

    def stop_before(self, start: int, end: int, parting: int, *, is_last: bool) -> int:
        if start < parting < end:
            return parting  # where prefixes part: the next sequence of this prefix finds a state
        within = end - 1 if is_last else end  # an equal prompt has its last token computed
        last = within - within % self.block_size
        return last if last > start else end

    def skips(self, position: int, end: int) -> bool:
        return position // self.block_size != (end - 1) // self.block_size

    def check(self, table: "array[int]", first_held: int, num_dispatched: int) -> None:
        assert all(b == GONE for b in table[:first_held]), f"not given back: {table}"
        assert first_held <= self.first_seen(num_dispatched), "lost a state that it reads"
        if num_dispatched:
            read = (num_dispatched - 1) // self.block_size
            assert table[read] != GONE, f"no state to go on from: {table}"

    def _entries(self, first: int, num_tokens: int, *, one_by_one: bool = False) -> Iterator[int]:
        past = -(-num_tokens // self.block_size)
        yield from range(first if one_by_one else max(first, past - 1), past)


def kind_of(
    size: GroupSize, block_size: int, index: int = 0, traffic: Traffic | None = None
) -> CacheKind:
    """Return the cache of a group of layers."""
    kind = State if size.per == "block" else Paged
    return kind(size, block_size, index, traffic)
