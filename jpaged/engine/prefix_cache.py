"""PrefixCache: finds the blocks that hold a prefix computed before. By chained hashes, then by what
was hashed.
"""

import weakref
from array import array
from typing import NamedTuple

import xxhash

from jpaged.engine.blocks import GONE, BlockGroup, Content
from jpaged.engine.sequence import Sequence


class Match(NamedTuple):
    """The longest cached prefix of a sequence: its contents, and each group's blocks of it.

    Tables hold GONE where the group's window will not reach back to.
    """

    contents: list[Content]
    tables: tuple[list[int], ...]

    @property
    def num_blocks(self) -> int:
        return len(self.contents)


class PrefixCache:
    """The closed blocks of all groups, by content. With is_on=False nothing is closed or found."""

    def __init__(self, groups: tuple[BlockGroup, ...], block_size: int, *, is_on: bool = True):
        self.groups = groups
        self.block_size = block_size
        self.is_on = is_on
        # By hash: contents that a block, or the content of a later one, still names.
        self._contents: weakref.WeakValueDictionary[int, Content] = weakref.WeakValueDictionary()
        self.generation = 0  # KV of an older one is never hashed

    def match(self, seq: Sequence) -> Match:
        """The longest cached prefix; at least the sequence's last token is left to compute.

        A first miss ends the search. A hit needs equal tokens after equal ones, in every group, as
        far back as the group's window reaches.
        """
        contents: list[Content] = []
        tables: tuple[list[int], ...] = tuple([] for _ in self.groups)
        for i in range((len(seq) - 1) // self.block_size if self.is_on else 0):
            content = self._find(seq, i, contents[-1] if contents else None)
            if content is None:
                break
            found = [group.cached.get(content, GONE) for group in self.groups]
            if any(b == GONE and g.window is None for b, g in zip(found, self.groups, strict=True)):
                break
            contents.append(content)
            for table, block_id in zip(tables, found, strict=True):
                table.append(block_id)
        return self._within_windows(contents, tables)

    def no_match(self) -> Match:
        return Match([], tuple([] for _ in self.groups))

    def _within_windows(self, contents: list[Content], tables: tuple[list[int], ...]) -> Match:
        """The longest start of a match whose last blocks are there as far back as windows reach."""
        length = len(contents)
        if any(GONE in table for table in tables):
            for i in reversed(range(length)):
                for group, table in zip(self.groups, tables, strict=True):
                    if table[i] == GONE and i >= group.first_seen(length * self.block_size):
                        length = i
        firsts = [group.first_seen(length * self.block_size) for group in self.groups]
        pairs = zip(firsts, tables, strict=True)
        return Match(
            contents[:length], tuple([GONE] * first + table[first:length] for first, table in pairs)
        )

    def close(self, seq: Sequence, num_written: int) -> None:
        """Hash the blocks that lie whole within the first `num_written` tokens, whose KV a dispatch
        has written.
        """
        if not self.is_on or self.is_stale(seq):
            return
        for i in range(seq.num_closed, num_written // self.block_size):
            parent = seq.contents[-1] if seq.contents else None
            content = self._find(seq, i, parent)
            if content is None:
                content = Content(self.chain_hash(seq, i), self.token_bytes(seq, i), parent)
                self._contents[content.hash] = content
            seq.contents.append(content)
            for group, table in zip(self.groups, seq.block_tables, strict=True):
                if table[i] != GONE:
                    group.close(table[i], content)

    def is_stale(self, seq: Sequence) -> bool:
        """Whether a sequence runs on KV from before a reset."""
        return bool(seq.block_tables) and seq.generation != self.generation

    def reset(self) -> None:
        """Forget every hash: no later request hits anything that was computed before."""
        self.generation += 1
        self._contents.clear()
        for group in self.groups:
            group.cached.clear()
            for block in group.blocks:
                block.content = None

    def forget_free(self) -> None:
        """Forget the contents of blocks that nobody owns."""
        for group in self.groups:
            for block_id in group.free:
                group.forget(group.blocks[block_id])

    def token_bytes(self, seq: Sequence, i: int, end: int | None = None) -> bytes:
        """The tokens of a sequence's block, up to position `end`; the first block's come after its
        salt.
        """
        start = i * self.block_size
        past = start + self.block_size if end is None else min(start + self.block_size, end)
        tokens = array("i", seq.token_ids[start:past]).tobytes()
        return tokens if i else seq.salt + tokens

    def _find(self, seq: Sequence, i: int, parent: Content | None) -> Content | None:
        """The content of a sequence's block, if it is known; parent: that of the block before."""
        content = self._contents.get(self.chain_hash(seq, i))
        if content is None or content.parent is not parent:
            return None
        return content if content.token_ids == self.token_bytes(seq, i) else None

    def chain_hash(self, seq: Sequence, i: int) -> int:
        """The hash of a sequence's first i + 1 blocks; kept in the sequence."""
        while len(seq.hashes) <= i:
            j = len(seq.hashes)
            before = seq.hashes[j - 1] if j else None
            seq.hashes.append(digest(before, self.token_bytes(seq, j)))
        return seq.hashes[i]


def digest(previous: int | None, token_ids: bytes) -> int:
    """xxh64 of the previous block's hash (8 bytes, little-endian; the first has none), then the
    tokens as int32.
    """
    before = b"" if previous is None else previous.to_bytes(8, "little")
    return xxhash.xxh64_intdigest(before + token_ids)
