"""BlockManager: which sequence holds which KV blocks. Every operation is O(1) a block.

Layers that share head_dim, dtype and window are a group with a pool of blocks of its own, and a
sequence has a block table in each. Entry i of every table holds tokens [i * P, (i + 1) * P):

    tokens                  | 0..3 | 4..7 | 8..11| 12.. |     P = 4, 14 tokens known
    table, full attention   |   7  |   3  |   9  |   2  |
    table, window of 6      | GONE | GONE |   4  |   1  |     the next query sees tokens 8..13
    table, state            | GONE | GONE | GONE |   5  |     the state after the last token
                             closed closed closed  open

A block's life: open (being written, not findable) -> closed (full, hashed, immutable, shareable) ->
free but still hashed (its content may be revived) -> reallocated (its hash entry goes first, and
what it held goes to the store, if there is one: see store.py). A fork shares open blocks too:
whoever writes one that has other owners copies it first. Blocks that the window of their group has
left are given back while their sequence runs.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator

from jpaged.engine.cache.content import Content
from jpaged.engine.cache.costs import Costs
from jpaged.engine.cache.kinds import GONE, Copies, GroupSize, Replay, kind_of
from jpaged.engine.cache.prefix_cache import Contents, Match, PrefixCache
from jpaged.engine.cache.store import BlockStore, Move, Traffic
from jpaged.engine.sequence import Sequence


class BlockManager:
    """Allocates, shares and frees the blocks of a pool in each group of layers: the loop over the
    groups, each of which is a kind of cache (see kinds.py).

    sizes: of the groups. block_size: P, tokens a block. cache: what finds the blocks again.
    windowed: places of the groups with a window. can_rewind: whether a row may go on from an
    earlier token than its last. most_tokens: as far as a sequence that is alone can grow. contents,
    store: shared with other replicas; min_loaded, costs: see PrefixCache.
    """

    def __init__(
        self,
        sizes: Iterable[GroupSize],
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        contents: Contents | None = None,
        store: BlockStore | None = None,
        min_loaded: int = 0,
        costs: Costs | None = None,
    ):
        self.block_size = block_size
        self.traffic = None if store is None else Traffic(store)
        sizes = tuple(sizes)
        self.groups = tuple(
            kind_of(size, block_size, index, self.traffic) for index, size in enumerate(sizes)
        )
        self.cache = PrefixCache(
            self.groups,
            block_size,
            contents or Contents(),
            is_on=enable_prefix_caching,
            store=store,
            min_loaded=min_loaded,
            costs=costs,
        )
        self.windowed = tuple(i for i, g in enumerate(self.groups) if g.window is not None)
        self.num_blocks = sum([group.num_blocks for group in self.groups])
        # The group whose blocks say which experts tokens took, or None; in how many layers, and how
        # many in each.
        self.of_experts = next((i for i, size in enumerate(sizes) if size.experts), None)
        self.experts = None if self.of_experts is None else sizes[self.of_experts].experts
        self.can_rewind = all(group.can_rewind for group in self.groups)
        self.most_tokens = min([group.most_tokens for group in self.groups])

    @property
    def num_used(self) -> int:
        return sum([group.num_blocks - len(group.free) for group in self.groups])

    def latest_first(self) -> Iterator[tuple[Content, int, int]]:
        """Yield what the pools hold that can be found, with its group and block, the groups in
        turn: what is in use, and then what was freed last.
        """
        held = [group.latest_first() for group in self.groups]
        for blocks in itertools.zip_longest(*held):
            for at, block in enumerate(blocks):
                if block is not None and block.content is not None:
                    yield block.content, at, block.id

    def in_use(self) -> list[list[int]]:
        """Return the ids of the blocks that somebody owns, by group."""
        return [[b.id for b in group.blocks if b.ref_count] for group in self.groups]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_free(self, count: int) -> bool:
        return all(len(group.free) >= count for group in self.groups)

    def has_room(self, seq: Sequence, match: Match, end: int, *, reserve: int) -> bool:
        """Return whether every group has the free blocks that admitting a sequence takes, and
        `reserve`: those it needs to compute up to token `end`, those it revives and those that are
        loaded.
        """
        return all(
            group.num_needed(start, len(seq), end) + reserve <= len(group.free)
            for group, start in zip(self.groups, match.tables, strict=True)
        )

    def admit(self, seq: Sequence, match: Match) -> None:
        """Give a waiting sequence its matched blocks and, where nothing leaves a window, fresh ones
        for all of its tokens. `extend` gives the others.
        """
        assert not seq.block_tables, f"{seq!r} already holds blocks"
        starts = zip(self.groups, match.tables, match.slots, strict=True)
        tables = [
            group.admit(start, match.contents, slots, len(seq)) for group, start, slots in starts
        ]
        seq.block_tables = tuple(tables)
        size = match.num_blocks * self.block_size
        seq.first_held = [0] * len(self.groups)
        for at in self.windowed:
            seq.first_held[at] = self.groups[at].first_seen(size)
        seq.contents = list(match.contents)
        seq.generation = self.cache.contents.generation

    def reach(self, seq: Sequence, *, one_by_one: bool = False) -> int:
        """Return up to how many tokens a sequence's blocks and all free ones go. one_by_one: the
        tokens are computed in a step each, not side by side.
        """
        pairs = zip(self.groups, seq.block_tables, strict=True)
        return min([group.reach(table, one_by_one=one_by_one) for group, table in pairs])

    def extend(self, seq: Sequence, num_tokens: int, *, one_by_one: bool = False) -> None:
        """Append fresh blocks until every table covers this many tokens, which `reach` allows."""
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            group.extend(table, num_tokens, one_by_one=one_by_one)

    def stop_before(self, start: int, end: int, parting: int, *, is_last: bool) -> int:
        """Return where a chunk from `start` ends, at `end` at the latest, so that what it leaves is
        found later. parting: tokens that another sequence is known to have too. is_last: the
        sequence ends at `end`.
        """
        if self.cache.is_on:
            stops = [g.stop_before(start, end, parting, is_last=is_last) for g in self.groups]
            end = min(stops)
        return end

    def close_ahead(self, seq: Sequence, num_tokens: int) -> None:
        """Hash the blocks that lie whole within the first `num_tokens` tokens, which the plan in
        the making writes: a later entry of it, or a later dispatch, may read what it writes.
        """
        before = seq.num_closed
        self.cache.close(seq, num_tokens)
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            group.unwritten.update(table[before : seq.num_closed])

    def unwritable(self, seqs: Iterable[Sequence]) -> set[Sequence]:
        """Return those of these sequences that have no block of their own, in some group, for their
        next token: `make_writable` gives it.
        """
        size, lacking = self.block_size, set[Sequence]()
        for at, group in enumerate(self.groups):
            blocks = group.blocks
            for seq in seqs:
                table, i = seq.block_tables[at], seq.num_dispatched // size
                if i >= len(table) or blocks[table[i]].ref_count > 1:
                    lacking.add(seq)
        return lacking

    def make_writable(self, seq: Sequence, position: int) -> bool:
        """Let a sequence write the block of a position: a fresh one, or its copy of a shared one.
        False, and nothing changed, where a group has no free block for it.

        Closed blocks are never copied: they are never written.
        """
        i = position // self.block_size
        lacking = []
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if i >= len(table) or group.blocks[table[i]].ref_count > 1:
                lacking.append((group, table))
        if not lacking:
            return True
        if not all(group.free for group, _ in lacking):
            return False
        for group, table in lacking:
            assert i == len(table) or i >= seq.num_closed, f"{seq!r}: a closed block needs no copy"
            group.make_writable(table, i)
        return True

    def replays(
        self, tables: tuple["array[int]", ...], place: int, start: int, count: int
    ) -> list[Replay]:
        """Return the replays that write the states after so many tokens of a row from position
        `start` on, one for each block that they are of, in order. place: see Replay.
        """
        made, end = list[Replay](), start + count
        while start < end:
            i = start // self.block_size
            past = min((i + 1) * self.block_size, end)
            blocks = [
                (table[(start - 1) // self.block_size], table[i])
                if not group.can_rewind
                else (GONE, GONE)
                for group, table in zip(self.groups, tables, strict=True)
            ]
            read, written = zip(*blocks, strict=True)
            made.append(Replay(place, start, past - start, read, written))
            place, start = place + past - start, past
        return made

    def take_copies(self) -> Copies:
        """Return (source, target) pairs since the last call, in the order in which they must be
        copied.
        """
        copies = tuple([tuple(group.copies) for group in self.groups])
        for group in self.groups:
            group.copies.clear()
        return copies

    def take_stores(self) -> tuple[Move, ...]:
        """Return what must be read for the store before the next step."""
        return () if self.traffic is None else self.traffic.take_stores()

    def take_loads(self) -> tuple[Move, ...]:
        """Return what must be written from the store before the next step, which goes out with
        it.
        """
        for group in self.groups:
            group.unwritten.clear()
        return () if self.traffic is None else self.traffic.take_loads()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of a sequence's blocks, the open one too, with one that holds the same tokens
        and no blocks.
        """
        assert not child.block_tables, f"{child!r} already holds blocks"
        pairs = zip(self.groups, parent.block_tables, strict=True)
        child.block_tables = tuple(group.fork(table) for group, table in pairs)
        child.first_held, child.contents = list(parent.first_held), list(parent.contents)
        child.hashes, child.generation = list(parent.hashes), parent.generation

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks that no query at or after num_dispatched sees.

        For a later dispatch to reuse: the one that was just planned may still read them.
        """
        # An equal prompt hits all but its last token at most.
        first_drawn = (seq.prompt_len - 1) // self.block_size
        for at in self.windowed:
            group, table, held = self.groups[at], seq.block_tables[at], seq.first_held[at]
            seq.first_held[at] = group.trim(table, held, seq.num_dispatched, first_drawn)

    def free(self, seq: Sequence) -> None:
        """Give up a sequence's blocks, if it has any."""
        for group, table in zip(self.groups, seq.block_tables, strict=False):
            group.release_all(table, seq.contents)
        seq.drop_blocks()
