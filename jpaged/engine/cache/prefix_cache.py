"""PrefixCache: finds the blocks that hold a prefix computed before, on the device or in the store.
By chained hashes, then by what was hashed.
"""

import hashlib
import weakref
from typing import NamedTuple

import xxhash

from jpaged.engine.cache.content import Content
from jpaged.engine.cache.costs import Costs
from jpaged.engine.cache.kinds import GONE, LOAD, CacheKind
from jpaged.engine.cache.store import BlockStore, Slot
from jpaged.engine.sequence import Sequence


class Match(NamedTuple):
    """The longest cached prefix of a sequence: its contents, and each group's table of it.

    A table holds GONE where no later token reads the group's entry, and LOAD where the store has
    the block, in the slot that `slots` names by its entry. num_known: leading blocks that some
    sequence has computed before, whether all that a hit needs is still kept or not.
    """

    contents: list[Content]
    tables: tuple[list[int], ...]
    slots: tuple[dict[int, Slot], ...]
    num_known: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.contents)

    @property
    def num_loaded(self) -> int:
        """Blocks that come from the store."""
        return sum(map(len, self.slots))


class PrefixCache:
    """The closed blocks of all groups, by content. With is_on=False nothing is closed or found.

    store: has what the groups have given up; None where nothing does. min_loaded: tokens that a
    load from it must save; fewer are computed again. costs: what a load must not exceed; None, or a
    min_loaded of 0, loads whatever is there.
    """

    def __init__(
        self,
        groups: tuple[CacheKind, ...],
        block_size: int,
        contents: "Contents",
        *,
        is_on: bool = True,
        store: BlockStore | None = None,
        min_loaded: int = 0,
        costs: Costs | None = None,
    ):
        self.groups = groups
        self.has_windows = any(group.window is not None for group in groups)
        self.block_size = block_size
        self.contents = contents
        self.is_on = is_on
        self.store = store
        self.min_loaded = min_loaded
        self.costs = costs

    def match(
        self,
        seq: Sequence,
        most: int | None = None,
        *,
        in_files: bool = False,
        queued_bytes: int = 0,
    ) -> Match:
        """Return the longest cached prefix. most: tokens of it at most; at least the sequence's
        last token is left to compute. in_files: also what the store has in files alone, in slots
        whose data is still to be read; queued_bytes: what is read before them.

        A first miss ends the search. A hit needs equal tokens after equal ones, and of each group
        what the next token reads.
        """
        size, last = self.block_size, len(seq) - 1
        limit = last if most is None else min(most, last)
        contents, parent = list[Content](), self.contents.root
        tables: tuple[list[int], ...] = tuple([[] for _ in self.groups])
        slots: tuple[dict[int, Slot], ...] = tuple([{} for _ in self.groups])
        num_known = 0
        for i in range(limit // size if self.is_on else 0):
            content = self.contents.find(seq, i, size, parent)
            if content is None:
                if not in_files:
                    break
                content = self.contents.take(seq, i, size, parent)
            matched = [group.matched(content, in_files=in_files) for group in self.groups]
            pairs = zip(matched, self.groups, strict=True)
            if [group for x, group in pairs if x is None and group.window is None]:
                break
            num_known, parent = i + 1, content
            contents.append(content)
            for table, slots_of_group, x in zip(tables, slots, matched, strict=True):
                if isinstance(x, Slot):
                    slots_of_group[i] = x
                table.append(GONE if x is None else LOAD if isinstance(x, Slot) else x)
        whole = self._cut(contents, tables, slots, num_known)
        if self.store is None or not whole.num_loaded:
            return whole
        here = self._cut(contents, self._on_device(tables), tuple({} for _ in slots), num_known)
        saved = (whole.num_blocks - here.num_blocks) * size
        if saved < self.min_loaded:
            return here
        if self.costs is not None and self.min_loaded:
            loaded = [slot for slots_of_group in whole.slots for slot in slots_of_group.values()]
            sizes = [self.groups[slot.group].block_bytes for slot in loaded]
            read = [x for x, slot in zip(sizes, loaded, strict=True) if slot.data is None]
            if not self.costs.is_worth(
                saved, disk_bytes=sum(read), host_bytes=sum(sizes), queued_bytes=queued_bytes
            ):
                return here
        self.store.touch(whole.contents)
        return whole

    def contents_of(self, seq: Sequence, most: int | None = None) -> list[Content]:
        """Return the contents of a prompt's blocks that a match may name, computed or not. most:
        see `match`.
        """
        last = len(seq) - 1
        limit = last if most is None else min(most, last)
        contents, parent = list[Content](), self.contents.root
        for i in range(limit // self.block_size if self.is_on else 0):
            parent = self.contents.take(seq, i, self.block_size, parent)
            contents.append(parent)
        return contents

    def no_match(self) -> Match:
        return Match([], tuple([] for _ in self.groups), tuple({} for _ in self.groups))

    def _on_device(self, tables: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """Return tables without what the store has: where a group misses an entry that all later
        tokens read, they end.
        """
        ends = [
            table.index(LOAD)
            for group, table in zip(self.groups, tables, strict=True)
            if group.window is None and LOAD in table
        ]
        end = min(ends, default=len(tables[0]))
        return tuple([GONE if b == LOAD else b for b in table[:end]] for table in tables)

    def _cut(
        self,
        contents: list[Content],
        tables: tuple[list[int], ...],
        slots: tuple[dict[int, Slot], ...],
        num_known: int,
    ) -> Match:
        """Return the longest start of these tables after which each group has what the next token
        reads, as a match.
        """
        length = len(tables[0])
        if not self.has_windows:
            return Match(contents[:length], tables, slots, num_known)
        if [table for table in tables if GONE in table]:
            for i in reversed(range(length)):
                for group, table in zip(self.groups, tables, strict=True):
                    if table[i] == GONE and i >= group.first_seen(length * self.block_size):
                        length = i
        firsts = [group.first_seen(length * self.block_size) for group in self.groups]
        cut = zip(firsts, tables, strict=True)
        kept = zip(firsts, slots, strict=True)
        return Match(
            contents[:length],
            tuple([[GONE] * first + table[first:length] for first, table in cut]),
            tuple(
                [
                    {i: x for i, x in slots_of_group.items() if first <= i < length}
                    for first, slots_of_group in kept
                ]
            ),
            num_known,
        )

    def close(self, seq: Sequence, num_written: int, step_end: int | None = None) -> None:
        """Hash the blocks that lie whole within the first `num_written` tokens, whose KV a dispatch
        has written. step_end: the tokens up to which it computed side by side; None if that is
        `num_written`.
        """
        step_end = num_written if step_end is None else step_end
        if not self.is_on or self.is_stale(seq):
            return
        for i in range(seq.num_closed, num_written // self.block_size):
            parent = seq.contents[-1] if seq.contents else self.contents.root
            content = self.contents.take(seq, i, self.block_size, parent)
            seq.contents.append(content)
            for group, table in zip(self.groups, seq.block_tables, strict=True):
                if table[i] != GONE and group.is_whole(i, step_end):
                    group.close(table[i], content)
                    if group.traffic is not None and group.traffic.store.writes_through:
                        group.traffic.write_through(group.index, table[i], content)

    def is_stale(self, seq: Sequence) -> bool:
        """Return whether a sequence runs on KV from before a reset."""
        return bool(seq.block_tables) and seq.generation != self.contents.generation

    def reset(self) -> None:
        """Forget every hash and the store: no later request hits anything that was computed
        before.
        """
        self.contents.reset()
        if self.store is not None:
            self.store.clear()
        for group in self.groups:
            if group.traffic is not None:
                group.traffic.through.clear()
            group.cached.clear()
            for block in group.blocks:
                block.content = None

    def keys(self) -> set[int]:
        """Return the chained hashes of the blocks that can be found in the pool or in host memory:
        of the first group whose blocks all later tokens read, else of the first.
        """
        whole = [group for group in self.groups if group.window is None]
        group = (whole or list(self.groups))[0]
        contents = [*group.cached, *(() if self.store is None else self.store.contents())]
        return {content.hash for content in contents if content.hash is not None}

    def forget_free(self) -> None:
        """Forget the contents of blocks that nobody owns."""
        for group in self.groups:
            for block_id in group.free:
                group.forget(group.blocks[block_id])


class Contents:
    """The contents that a block, a stored block or a later content still names, by hash.

    All replicas of an engine share one, and so one store. identity: what KV depends on beside the
    tokens, the version of the weights apart: its dtype and block size. stored: what stands in files
    for all of that and the weights, 32 bytes; None where contents are to be in no file.
    """

    def __init__(self, identity: str = "", stored: bytes | None = None):
        self.identity, self.stored = identity, stored
        self.generation = 0  # of the weights that later KV is computed with
        self._known: weakref.WeakValueDictionary[int, Content] = weakref.WeakValueDictionary()
        self.root = self._new_root()

    def reset(self) -> None:
        """Begin with new weights: no content from before is equal to any from now on."""
        self.generation += 1
        self._known.clear()
        self.root = self._new_root()

    def find(self, seq: Sequence, i: int, size: int, parent: Content) -> Content | None:
        """Return the content of a sequence's block after its parent, if it is known. size: tokens
        a block.
        """
        content = self._known.get(chain_hash(seq, i, size))
        if content is None or content.parent is not parent:
            return None
        return content if content.token_ids == seq.block_bytes(i, size) else None

    def take(self, seq: Sequence, i: int, size: int, parent: Content) -> Content:
        """Return the content of a sequence's block after its parent, which is known from now on."""
        content = self.find(seq, i, size, parent)
        if content is None:
            key, ids = chain_hash(seq, i, size), seq.block_bytes(i, size)
            if parent.digest is None:
                content = Content(key, ids, parent)
            else:
                stored = seq.stored_bytes(i, size)
                name = None if stored is None else stored_digest(parent.digest, stored)
                content = Content(key, ids, parent, digest=name, stored_ids=stored or b"")
            self._known[key] = content
        return content

    def _new_root(self) -> Content:
        ids = f"{self.identity} weights {self.generation}".encode()
        return Content(None, ids, None, digest=self.stored)


def chain_hash(seq: Sequence, i: int, size: int) -> int:
    """Return the hash of a sequence's first i + 1 blocks, which the sequence keeps. size: tokens a
    block.
    """
    while len(seq.hashes) <= i:
        j = len(seq.hashes)
        before = seq.hashes[j - 1] if j else None
        seq.hashes.append(digest(before, seq.block_bytes(j, size)))
    return seq.hashes[i]


def stored_digest(parent: bytes, stored_ids: bytes) -> bytes:
    """Return what names a content in files: blake2b of its parent's name and of what it is of. No
    two contents have one, so it stands for the whole chain.
    """
    return hashlib.blake2b(parent + stored_ids, digest_size=32).digest()


def digest(previous: int | None, token_ids: bytes) -> int:
    """Return xxh64 of the previous block's hash (8 bytes, little-endian; the first block has none),
    then of the block's bytes.
    """
    before = b"" if previous is None else previous.to_bytes(8, "little")
    return xxhash.xxh64_intdigest(before + token_ids)
