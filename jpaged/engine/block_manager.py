"""BlockManager: which sequence holds which KV blocks. Every operation is O(1) a block.

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

from array import array
from collections.abc import Iterable

from jpaged.engine.blocks import GONE, BlockGroup, Copies, GroupSize
from jpaged.engine.prefix_cache import Match, PrefixCache
from jpaged.engine.sequence import Sequence


class BlockManager:
    """Allocates, shares and frees the blocks of a pool in each group of layers.

    sizes: of the groups. block_size: P, tokens a block. cache: what finds the blocks again.
    windowed: places of the groups with a window.
    """

    def __init__(
        self, sizes: Iterable[GroupSize], block_size: int, *, enable_prefix_caching: bool = True
    ):
        self.block_size = block_size
        self.groups = tuple(BlockGroup(size, block_size) for size in sizes)
        self.cache = PrefixCache(self.groups, block_size, is_on=enable_prefix_caching)
        self.windowed = tuple(i for i, g in enumerate(self.groups) if g.window is not None)

    @property
    def num_blocks(self) -> int:
        """Of all groups."""
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_used(self) -> int:
        return sum(group.num_used for group in self.groups)

    def in_use(self) -> list[list[int]]:
        """Ids of the blocks that somebody owns, by group."""
        return [[b.id for b in group.blocks if b.ref_count] for group in self.groups]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence that is alone can grow to so many tokens."""
        return all(group.fits(num_tokens) for group in self.groups)

    def has_free(self, count: int) -> bool:
        return all(len(group.free) >= count for group in self.groups)

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

    def admit(self, seq: Sequence, match: Match) -> None:
        """Give a waiting sequence its matched blocks and, where nothing leaves a window, fresh ones
        for all of its tokens. `extend` gives the others.
        """
        assert not seq.block_tables, f"{seq!r} already holds blocks"
        starts = self._first_tables(seq, match)
        seq.block_tables = tuple(array("i", start) for start in starts)
        seq.first_held = [start.count(GONE) for start in starts]
        seq.contents = list(match.contents)
        seq.generation = self.cache.generation
        for group, start, table in zip(self.groups, starts, seq.block_tables, strict=True):
            for block_id in start:
                if block_id != GONE:
                    group.share(block_id)
            if group.window is None:
                self._extend(group, table, len(seq))

    def _first_tables(self, seq: Sequence, match: Match) -> list[list[int]]:
        """Tables to begin with: of a match, what is seen from its end or that of the host's KV."""
        swapped = 0 if seq.swapped is None else seq.swapped.num_tokens
        position = max(match.num_blocks * self.block_size, swapped)
        firsts = [group.first_seen(position) for group in self.groups]
        pairs = zip(firsts, match.tables, strict=True)
        return [[GONE] * first + table[first:] for first, table in pairs]

    def reach(self, seq: Sequence) -> int:
        """Tokens that a sequence's blocks and all free ones could hold."""
        pairs = zip(self.groups, seq.block_tables, strict=True)
        return min(len(table) + len(group.free) for group, table in pairs) * self.block_size

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Append fresh blocks until every table covers so many tokens, which `reach` allows."""
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            self._extend(group, table, num_tokens)

    def _extend(self, group: BlockGroup, table: "array[int]", num_tokens: int) -> None:
        while len(table) * self.block_size < num_tokens:
            table.append(group.take())

    def make_writable(self, seq: Sequence, position: int) -> bool:
        """Let a sequence write the block of a position: a fresh one, or its own copy of a shared
        one. False, and nothing changed, where a group has no free block for it.

        Closed blocks are never copied: they are never written.
        """
        i = position // self.block_size
        lacking = []
        for at, table in enumerate(seq.block_tables):
            group = self.groups[at]
            if i >= len(table) or group.blocks[table[i]].ref_count > 1:
                lacking.append((group, table))
        if not lacking:
            return True
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

    def take_copies(self) -> Copies:
        """(source, target) pairs since the last call, in the order in which they must be copied."""
        copies = tuple(tuple(group.copies) for group in self.groups)
        for group in self.groups:
            group.copies.clear()
        return copies

    def written(
        self, seq: Sequence, num_tokens: int, match: Match | None = None
    ) -> list[list[int]]:
        """The blocks of a sequence's first tokens that later ones see; -1 for those of a match."""
        past = self.blocks_for(num_tokens)
        cached = 0 if match is None else match.num_blocks
        found = []
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            first = group.first_seen(num_tokens)
            found.append([-1] * (cached - first) + table[max(first, cached) : past].tolist())
        return found

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
        for at in self.windowed:
            group, table = self.groups[at], seq.block_tables[at]
            first = group.first_seen(seq.num_dispatched)
            for i in range(seq.first_held[at], first):
                group.release(table[i])
                table[i] = GONE
            seq.first_held[at] = max(seq.first_held[at], first)

    def free(self, seq: Sequence) -> None:
        """Give up a sequence's blocks, if it has any, last first: a prefix outlives its tail."""
        for group, table in zip(self.groups, seq.block_tables, strict=False):
            for block_id in reversed(table):
                if block_id != GONE:
                    group.release(block_id)
        seq.drop_blocks()
