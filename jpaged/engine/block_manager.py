"""BlockManager: which KV block holds which tokens, and who owns it; O(1) a block in all it does.

Layers that share head_dim, dtype and window are a group with a pool of blocks of its own, and a
sequence has a block table in each. Entry i of every table holds tokens [i * P, (i + 1) * P):

    tokens                  | 0..3 | 4..7 | 8..11| 12.. |     P = 4, 14 tokens known
    table, full attention   |   7  |   3  |   9  |   2  |
    table, window of 6      | GONE | GONE |   4  |   1  |     the next query sees tokens 8..13
                             closed closed closed  open

A block's life: open (being written, not findable) -> closed (full, hashed, immutable, shareable) ->
free but still hashed (its content may be revived) -> reallocated (its hash entry goes first). A
fork shares open blocks too: whoever writes one that has other owners copies it first. Blocks that
the window of their group has left are given back while their sequence runs.
"""

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from jpaged.engine.sequence import Sequence

GONE = -1  # in a block table: the window has left it
Copies = tuple[tuple[tuple[int, int], ...], ...]  # (source, target) blocks, a group each


class GroupSize(NamedTuple):
    """The blocks of one group of layers. window: tokens that a query sees; None is all of them.

    block_bytes: of one block, in all its layers.
    """

    num_blocks: int
    window: int | None = None
    block_bytes: int = 0


class Content:
    """A block's worth of tokens after those of its parent: what a search compares.

    Blocks of several groups, and blocks that were computed twice, name one Content. So a chain is
    compared by what it holds, not by a 64-bit hash alone, also where the blocks before are gone.
    """

    __slots__ = ("__weakref__", "hash", "parent", "token_ids")

    def __init__(self, hash: int, token_ids: bytes, parent: "Content | None"):
        self.hash = hash
        self.token_ids = token_ids  # int32 little-endian, the first block's after its salt
        self.parent = parent

    def __deepcopy__(self, memo: dict[int, object]) -> "Content":
        return self  # never written again: a snapshot shares it


class Block:
    """One KV block. content: None while open, or where nothing may find it."""

    __slots__ = ("content", "id", "ref_count")

    def __init__(self, id: int, ref_count: int = 0, content: Content | None = None):
        self.id = id
        self.ref_count = ref_count
        self.content = content

    def __deepcopy__(self, memo: dict[int, object]) -> "Block":  # a tenth of what the default takes
        return Block(self.id, self.ref_count, self.content)


class BlockGroup:
    """The blocks of one group of layers: who owns them, what they hold, which are free."""

    def __init__(self, size: GroupSize):
        self.window = size.window
        self.block_bytes = size.block_bytes
        self.blocks = [Block(i) for i in range(size.num_blocks)]
        # Next to be reused first: blocks that nothing can find, then the least recently freed.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size.num_blocks))
        self.cached: dict[Content, int] = {}  # the block that a search finds
        self.copies: list[tuple[int, int]] = []  # to be made before the next step writes

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def take(self) -> int:
        """A free block, now of one owner; what it held is forgotten."""
        block_id, _ = self.free.popitem(last=False)
        block = self.blocks[block_id]
        self.forget(block)
        block.ref_count = 1
        return block_id

    def share(self, block_id: int) -> int:
        """One owner more of a block in use, or the first of a cached one."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free[block_id]
        block.ref_count += 1
        return block_id

    def release(self, block_id: int) -> None:
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is free already"
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free[block_id] = None
            if block.content is None or self.cached.get(block.content) != block_id:
                self.free.move_to_end(block_id, last=False)  # of no use to anybody

    def close(self, block_id: int, content: Content) -> None:
        # The latest is what a search finds: an older one may be free already.
        self.blocks[block_id].content = content
        self.cached[content] = block_id

    def forget(self, block: Block) -> None:
        """Let no search find a block again."""
        if block.content is not None and self.cached.get(block.content) == block.id:
            del self.cached[block.content]
        block.content = None


class Match(NamedTuple):
    """The longest cached prefix of a sequence: its contents, and each group's blocks of it.

    Tables hold GONE where the group's window will not reach back to.
    """

    contents: list[Content]
    tables: tuple[list[int], ...]

    @property
    def num_blocks(self) -> int:
        return len(self.contents)


class BlockManager:
    """Allocates, shares, hashes and frees the blocks of a pool in each group of layers.

    sizes: of the groups. block_size: P, tokens a block.
    """

    def __init__(
        self, sizes: Iterable[GroupSize], block_size: int, *, enable_prefix_caching: bool = True
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = tuple(BlockGroup(size) for size in sizes)
        self._windowed = tuple(i for i, g in enumerate(self.groups) if g.window is not None)
        # Contents that a block, or the content of a later one, still names.
        self._contents: weakref.WeakValueDictionary[int, Content] = weakref.WeakValueDictionary()
        self._generation = 0  # of the cache: KV of an older one is never hashed

    @property
    def num_blocks(self) -> int:
        """Of all groups."""
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_used(self) -> int:
        return sum(group.num_blocks - len(group.free) for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence that is alone can grow to so many tokens."""

        def most(window: int | None) -> int:
            whole = self.blocks_for(num_tokens)
            return whole if window is None else min(whole, self.blocks_for(window - 1) + 1)

        return all(most(group.window) <= group.num_blocks for group in self.groups)

    # Prefixes

    def match(self, seq: Sequence) -> Match:
        """The longest cached prefix; at least the sequence's last token is left to compute.

        A first miss ends the search. A hit needs equal tokens after equal ones, in every group, as
        far back as the group's window reaches.
        """
        contents: list[Content] = []
        tables: tuple[list[int], ...] = tuple([] for _ in self.groups)
        for i in range((len(seq) - 1) // self.block_size if self.enable_prefix_caching else 0):
            content = self._find(seq, i, contents[-1] if contents else None)
            if content is None:
                break
            found = [group.cached.get(content, GONE) for group in self.groups]
            if any(b == GONE and g.window is None for b, g in zip(found, self.groups, strict=True)):
                break
            contents.append(content)
            for table, block_id in zip(tables, found, strict=True):
                table.append(block_id)
        return self._within_windows(contents, tables) if self._windowed else Match(contents, tables)

    def no_match(self) -> Match:
        return Match([], tuple([] for _ in self.groups))

    def _within_windows(self, contents: list[Content], tables: tuple[list[int], ...]) -> Match:
        """The longest start of a match whose last blocks are there as far back as windows reach."""
        # Of each prefix of n blocks, how many of its last ones are there.
        runs = [[0] for _ in self._windowed]
        for run, at in zip(runs, self._windowed, strict=True):
            for block_id in tables[at]:
                run.append(0 if block_id == GONE else run[-1] + 1)
        length = len(contents)
        firsts = self._first_seen(length * self.block_size)
        while any(
            run[length] < length - firsts[at] for run, at in zip(runs, self._windowed, strict=True)
        ):
            length -= 1
            firsts = self._first_seen(length * self.block_size)
        cut = [
            [GONE] * first + table[first:length]
            for first, table in zip(firsts, tables, strict=True)
        ]
        return Match(contents[:length], tuple(cut))

    def _first_seen(self, position: int) -> list[int]:
        """In each group, the first block that a query at this position sees."""
        windows = [group.window for group in self.groups]
        return [0 if w is None else max(position - w + 1, 0) // self.block_size for w in windows]

    # Allocation

    def has_room(self, seq: Sequence, match: Match, end: int, *, reserve: int) -> bool:
        """Whether every group has the free blocks that admitting a sequence takes, and `reserve`.

        Those it must be given to compute up to token `end`, and those it revives.
        """
        starts = self._first_tables(seq, match)
        for group, start in zip(self.groups, starts, strict=True):
            revived = sum(b != GONE and group.blocks[b].ref_count == 0 for b in start)
            length = len(seq) if group.window is None else end
            if self.blocks_for(length) - len(start) + revived + reserve > len(group.free):
                return False
        return True

    def has_free(self, count: int) -> bool:
        return all(len(group.free) >= count for group in self.groups)

    def admit(self, seq: Sequence, match: Match) -> None:
        """Give a waiting sequence its matched blocks and, where nothing leaves a window, fresh ones
        for all of its tokens. `extend` gives the others.
        """
        assert not seq.block_tables, f"{seq!r} already holds blocks"
        starts = self._first_tables(seq, match)
        for group, start in zip(self.groups, starts, strict=True):
            for block_id in start:
                if block_id != GONE:
                    group.share(block_id)
        seq.block_tables = tuple(array("i", start) for start in starts)
        seq.first_held = [next((i for i, b in enumerate(s) if b != GONE), len(s)) for s in starts]
        seq.contents = list(match.contents)
        seq.generation = self._generation
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if group.window is None:
                self._extend(group, table, len(seq))

    def _first_tables(self, seq: Sequence, match: Match) -> tuple[list[int], ...]:
        """Tables to begin with. Where KV comes back from the host, a window takes all of it."""
        if seq.swapped is None or seq.swapped.num_tokens <= match.num_blocks * self.block_size:
            return match.tables
        firsts = self._first_seen(seq.swapped.num_tokens)
        return tuple(
            table if group.window is None else [GONE] * first
            for group, table, first in zip(self.groups, match.tables, firsts, strict=True)
        )

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Append fresh blocks until every table covers so many tokens, which `reach` allows."""
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            self._extend(group, table, num_tokens)

    def _extend(self, group: BlockGroup, table: "array[int]", num_tokens: int) -> None:
        while len(table) * self.block_size < num_tokens:
            table.append(group.take())

    def reach(self, seq: Sequence) -> int:
        """Tokens that a sequence's blocks and all free ones could hold."""
        pairs = zip(self.groups, seq.block_tables, strict=True)
        return min(len(table) + len(group.free) for group, table in pairs) * self.block_size

    def make_writable(self, seq: Sequence, position: int) -> bool:
        """Let a sequence write the block of a position: a fresh one, or its own copy of a shared
        one. False, and nothing changed, where a group has no free block for it.

        Closed blocks are never copied: they are never written.
        """
        i = position // self.block_size
        lacking = []
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if i >= len(table) or group.blocks[table[i]].ref_count > 1:
                lacking.append((group, table))
        if not all(group.free for group, _ in lacking):
            return False
        for group, table in lacking:
            target = group.take()
            if i == len(table):
                table.append(target)
                continue
            source = group.blocks[table[i]]
            assert i >= seq.num_closed, f"block {source.id} of {seq!r} is closed: it needs no copy"
            source.ref_count -= 1
            table[i] = target
            group.copies.append((source.id, target))
        return True

    def written(
        self, seq: Sequence, num_tokens: int, match: Match | None = None
    ) -> list[list[int]]:
        """The blocks of a sequence's first tokens that later ones see; -1 for those of a match."""
        past = self.blocks_for(num_tokens)
        found = []
        for group, table, first in zip(
            self.groups, seq.block_tables, self._first_seen(num_tokens), strict=True
        ):
            # Where a window looks back, nothing of the match was taken.
            cached = match.num_blocks if match is not None and group.window is None else 0
            found.append([-1] * (cached - first) + table[max(first, cached) : past].tolist())
        return found

    def take_copies(self) -> Copies:
        """(source, target) pairs since the last call, in the order in which they must be copied."""
        copies = tuple(tuple(group.copies) for group in self.groups)
        for group in self.groups:
            group.copies.clear()
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of a sequence's blocks, the open one too, with one that holds the same tokens
        and no blocks.
        """
        assert not child.block_tables, f"{child!r} already holds blocks"
        for group, table in zip(self.groups, parent.block_tables, strict=True):
            for block_id in table:
                if block_id != GONE:
                    group.share(block_id)
        child.block_tables = tuple(table[:] for table in parent.block_tables)
        child.first_held, child.contents = list(parent.first_held), list(parent.contents)
        child.hashes, child.generation = list(parent.hashes), parent.generation

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks that no query at or after num_dispatched sees.

        For a later dispatch to reuse: the one that was just planned may still read them.
        """
        if not self._windowed:
            return
        firsts = self._first_seen(seq.num_dispatched)
        for at in self._windowed:
            group, table = self.groups[at], seq.block_tables[at]
            for i in range(seq.first_held[at], min(firsts[at], len(table))):
                group.release(table[i])
                table[i] = GONE
            seq.first_held[at] = max(seq.first_held[at], min(firsts[at], len(table)))

    def free(self, seq: Sequence) -> None:
        """Give up a sequence's blocks, last first, so that a prefix outlives its tail."""
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            for block_id in reversed(table):
                if block_id != GONE:
                    group.release(block_id)
        seq.drop_blocks()

    # Contents

    def close(self, seq: Sequence, num_written: int) -> None:
        """Hash the blocks that lie whole within the first `num_written` tokens, whose KV a dispatch
        has written.
        """
        if not self.enable_prefix_caching or self.is_stale(seq):
            return
        for i in range(seq.num_closed, num_written // self.block_size):
            parent = seq.contents[-1] if seq.contents else None
            content = self._find(seq, i, parent)
            if content is None:
                content = Content(self._chain_hash(seq, i), self._token_bytes(seq, i), parent)
                self._contents[content.hash] = content
            seq.contents.append(content)
            for group, table in zip(self.groups, seq.block_tables, strict=True):
                if table[i] != GONE:
                    group.close(table[i], content)

    def is_stale(self, seq: Sequence) -> bool:
        """Whether a sequence runs on KV from before a reset."""
        return bool(seq.block_tables) and seq.generation != self._generation

    def reset(self) -> None:
        """Forget every hash: no later request hits anything that was computed before."""
        self._generation += 1
        self._contents.clear()
        for group in self.groups:
            group.cached.clear()
            for block in group.blocks:
                block.content = None

    def in_use(self) -> tuple[list[int], ...]:
        """Ids of the blocks that somebody owns, by group."""
        return tuple([b.id for b in group.blocks if b.ref_count] for group in self.groups)

    def forget_free(self) -> None:
        """Forget the contents of blocks that nobody owns."""
        for group in self.groups:
            for block_id in group.free:
                group.forget(group.blocks[block_id])

    def _find(self, seq: Sequence, i: int, parent: Content | None) -> Content | None:
        """The content of a sequence's block, if it is known; parent: that of the block before."""
        content = self._contents.get(self._chain_hash(seq, i))
        if content is None or content.parent is not parent:
            return None
        return content if content.token_ids == self._token_bytes(seq, i) else None

    def _token_bytes(self, seq: Sequence, i: int, end: int | None = None) -> bytes:
        """The tokens of a sequence's block, up to position `end`; the first block's come after its
        salt.
        """
        start = i * self.block_size
        past = start + self.block_size if end is None else min(start + self.block_size, end)
        tokens = array("i", seq.token_ids[start:past]).tobytes()
        return tokens if i else seq.salt + tokens

    def _chain_hash(self, seq: Sequence, i: int) -> int:
        """The hash of a sequence's first i + 1 blocks; kept in the sequence."""
        while len(seq.hashes) <= i:
            j = len(seq.hashes)
            before = seq.hashes[j - 1] if j else None
            seq.hashes.append(digest(before, self._token_bytes(seq, j)))
        return seq.hashes[i]

    # Invariants

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Assert that reference counts equal the tables, free and used make all, and every cached
        block is what it is found for.

        Owners of one block have it at the same place of their tables, over the same tokens.
        """
        owners = list(owners)
        for at, group in enumerate(self.groups):
            self._check_tables(at, owners)
            for block in group.blocks:
                assert (block.ref_count == 0) == (block.id in group.free), (
                    f"block {block.id} is both free and used, or neither"
                )
                if (content := block.content) is not None:
                    before = None if content.parent is None else content.parent.hash
                    true = digest(before, content.token_ids)
                    assert content.hash == true, f"block {block.id} has hash {content.hash:#x}"
            for content, block_id in group.cached.items():
                assert group.blocks[block_id].content is content, f"stale entry of block {block_id}"

    def _check_tables(self, at: int, owners: list[Sequence]) -> None:
        group = self.groups[at]
        counts = [0] * group.num_blocks
        places: dict[int, tuple[int, bytes]] = {}
        for seq in owners:
            table, first = seq.block_tables[at], seq.first_held[at]
            held = list(table[first:])
            assert GONE not in held and all(b == GONE for b in table[:first]), f"{seq!r}: {table}"
            assert len(set(held)) == len(held), f"{seq!r} holds a block twice"
            assert self._first_seen(seq.num_dispatched)[at] >= first, (
                f"{seq!r} lost a block it sees"
            )
            for i, block_id in enumerate(held, first):
                counts[block_id] += 1
                written = self._token_bytes(seq, i, seq.num_dispatched)
                place = places.setdefault(block_id, (i, written))
                assert place == (i, written), f"block {block_id} holds two things"
                content = group.blocks[block_id].content
                if self.is_stale(seq) or i >= seq.num_closed:
                    assert content is None, f"block {block_id} of {seq!r} is closed before its time"
                    continue
                parent = seq.contents[i - 1] if i else None
                assert content is not None, f"block {block_id} of {seq!r} should be closed"
                assert content is seq.contents[i], f"block {block_id} is closed as another's"
                assert content.parent is parent, f"block {block_id} has another parent"
                tokens = self._token_bytes(seq, i)
                assert content.token_ids == tokens, f"block {block_id} is closed over other tokens"
        for block in group.blocks:
            owned = counts[block.id]
            assert block.ref_count == owned, (
                f"block {block.id}: {block.ref_count} != {owned} owners"
            )


def digest(previous: int | None, token_ids: bytes) -> int:
    """xxh64 of the previous block's hash (8 bytes, little-endian; the first has none), then the
    tokens as int32.
    """
    before = b"" if previous is None else previous.to_bytes(8, "little")
    return xxhash.xxh64_intdigest(before + token_ids)
