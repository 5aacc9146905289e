"""BlockManager: which KV block holds which tokens, and who owns it. Every operation is O(1) a
block.

A block's life: open (being written, not findable) -> closed (full, hashed, immutable, shareable) ->
free but still hashed (its content may be revived) -> reallocated (its hash entry goes first). A
fork shares open blocks too: whoever writes one that has other owners copies it first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

import xxhash

from jpaged.engine.sequence import Sequence

# uid of a block in use whose KV is from before a reset: neither it nor what follows it is ever
# hashed
STALE = -1


class Block:
    """One KV block. uid and parent are never reused, so a chain is compared by content, not by a
    64-bit hash alone.
    """

    __slots__ = ("hash", "id", "parent", "ref_count", "token_ids", "uid")

    def __init__(self, id: int):
        self.id = id
        self.ref_count = 0
        self.hash: int | None = None  # None while open
        self.token_ids = b""  # int32 little-endian, set when closed
        self.uid = 0  # names this content after its whole chain; duplicates of one content share it
        self.parent = 0  # uid of the block before it, 0 at the start

    def __deepcopy__(self, memo: dict[int, object]) -> "Block":  # a tenth of what the default takes
        twin = Block(self.id)
        twin.ref_count, twin.hash, twin.token_ids = self.ref_count, self.hash, self.token_ids
        twin.uid, twin.parent = self.uid, self.parent
        return twin

    def open(self, uid: int) -> None:
        """Forget what it held."""
        self.hash, self.token_ids, self.parent, self.uid = None, b"", 0, uid


class BlockManager:
    """Allocates, shares, hashes and frees the blocks of a pool of `num_blocks` blocks of
    `block_size` tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # Next to be reused first: blocks that nothing can find, then cached ones, the least
        # recently freed first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._copies: list[
            tuple[int, int]
        ] = []  # (source, target) blocks, to be copied before the next step writes
        self._by_hash: dict[int, int] = {}  # chain hash -> block that holds it
        self._next_uid = 1

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix of a sequence; at least its last token is left
        to compute.

        A first miss ends the search. A hit needs an equal hash, equal tokens and an equal parent.
        """
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        parent = 0
        for i in range((len(seq) - 1) // self.block_size):
            block = self._lookup(self._chain_hash(seq, i), self._token_bytes(seq, i), parent)
            if block is None:
                break
            found.append(block.id)
            parent = block.uid
        return found

    def cost(self, seq: Sequence, matched: list[int]) -> int:
        """Free blocks that admitting a sequence takes: those it must be given and those it
        revives.
        """
        revived = sum(self.blocks[b].ref_count == 0 for b in matched)
        return self.blocks_for(len(seq)) - len(matched) + revived

    def admit(self, seq: Sequence, matched: list[int]) -> None:
        """Give a waiting sequence its matched blocks, then fresh ones for the rest of its
        tokens.
        """
        assert not seq.block_table and seq.num_closed == 0, f"{seq!r} already holds blocks"
        for block_id in matched:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
            seq.block_table.append(block_id)
        seq.num_closed = len(matched)
        self.extend(seq, len(seq))

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Append fresh blocks until the table covers `num_tokens`; the caller has checked
        num_free.
        """
        while len(seq.block_table) * self.block_size < num_tokens:
            seq.block_table.append(self._take())

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of a sequence's blocks, the open one too, with one that holds the same tokens
        and no blocks.
        """
        assert not child.block_table, f"{child!r} already holds blocks"
        for block_id in parent.block_table:
            self.blocks[block_id].ref_count += 1
        child.block_table = parent.block_table[:]
        child.num_closed = parent.num_closed
        child.hashes = list(parent.hashes)

    def is_writable(self, seq: Sequence, position: int) -> bool:
        """Whether the block of a position is there and no other sequence's too."""
        i = position // self.block_size
        return i < len(seq.block_table) and self.blocks[seq.block_table[i]].ref_count == 1

    def make_writable(self, seq: Sequence, position: int) -> None:
        """Give a sequence the block that it writes next: a fresh one, or its own copy of a shared
        one.

        Takes one free block; the caller has checked num_free. Closed blocks are never copied: they
        are never written.
        """
        i, target = position // self.block_size, self._take()
        if i == len(seq.block_table):
            seq.block_table.append(target)
            return
        source = self.blocks[seq.block_table[i]]
        assert source.ref_count > 1 and source.hash is None, (
            f"block {source.id} of {seq!r} needs no copy"
        )
        source.ref_count -= 1
        self.blocks[target].uid = source.uid  # a copy of what is from before a reset is so too
        seq.block_table[i] = target
        self._copies.append((source.id, target))

    def is_stale(self, seq: Sequence) -> bool:
        """Whether a sequence runs on KV from before a reset."""
        return bool(seq.block_table) and self.blocks[seq.block_table[0]].uid == STALE

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The (source, target) pairs since the last call, in the order in which they must be
        copied.
        """
        copies, self._copies = tuple(self._copies), []
        return copies

    def close(self, seq: Sequence, num_written: int) -> None:
        """Hash the blocks that lie whole within the first `num_written` tokens, whose KV a dispatch
        has written.
        """
        full = num_written // self.block_size
        if not self.enable_prefix_caching:
            return
        for i in range(seq.num_closed, full):
            block = self.blocks[seq.block_table[i]]
            parent = self.blocks[seq.block_table[i - 1]].uid if i else 0
            if STALE in (block.uid, parent):
                block.uid = STALE
                continue
            block.hash, block.token_ids, block.parent = (
                self._chain_hash(seq, i),
                self._token_bytes(seq, i),
                parent,
            )
            same = self._lookup(block.hash, block.token_ids, parent)
            if same is None:
                block.uid, self._next_uid = self._next_uid, self._next_uid + 1
            else:  # the same tokens were computed twice: both blocks name one content
                block.uid = same.uid
            # The latest is what a search finds: an older one may be free already, or its parent no
            # longer found.
            self._by_hash[block.hash] = block.id
        seq.num_closed = max(seq.num_closed, full)

    def free(self, seq: Sequence) -> None:
        """Give up a sequence's blocks, last first, so that a prefix outlives its tail in the free
        list.
        """
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} of {seq!r} is free already"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if (
                    block.hash is None or self._by_hash.get(block.hash) != block_id
                ):  # of no use to anybody
                    self._free.move_to_end(block_id, last=False)
        seq.block_table = array("i")
        seq.num_closed = 0

    def reset(self) -> None:
        """Forget every hash: no later request hits anything that was computed before."""
        self._by_hash.clear()
        for block in self.blocks:
            block.open(STALE if block.ref_count else 0)

    def in_use(self) -> list[int]:
        """Ids of the blocks that somebody owns."""
        return [block.id for block in self.blocks if block.ref_count]

    def forget_free(self) -> None:
        """Forget the hashes of blocks that nobody owns."""
        for block_id in self._free:
            self._forget(self.blocks[block_id])

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Assert that reference counts equal the tables, free and used make all, and every hash
        entry is true.

        Owners of one block have it at the same place of their tables, over the same tokens.
        """
        counts = [0] * len(self.blocks)
        contents: dict[int, tuple[int, bytes]] = {}
        for seq in owners:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq!r} holds a block twice"
            parent = 0
            for i, block_id in enumerate(seq.block_table):
                counts[block_id] += 1
                block = self.blocks[block_id]
                written = self._token_bytes(seq, i, seq.num_dispatched)
                assert contents.setdefault(block_id, (i, written)) == (i, written), (
                    f"block {block_id} holds two things"
                )
                is_closed = block.hash is not None or block.uid == STALE
                assert is_closed or i >= seq.num_closed, (
                    f"block {block_id} of {seq!r} should be closed"
                )
                if block.hash is not None:
                    assert i < seq.num_closed, (
                        f"block {block_id} of {seq!r} is closed before it is full"
                    )
                    assert block.token_ids == self._token_bytes(seq, i), (
                        f"block {block_id} is closed over other tokens"
                    )
                    assert block.parent == parent, (
                        f"block {block_id} is closed under another parent"
                    )
                parent = block.uid
        hashes = {0: None} | {
            block.uid: block.hash for block in self.blocks if block.hash is not None
        }
        for block in self.blocks:
            if block.hash is not None and block.parent in hashes:
                true = _digest(hashes[block.parent], block.token_ids)
                assert block.hash == true, (
                    f"block {block.id} has hash {block.hash:#x}, not {true:#x}"
                )
            assert block.ref_count == counts[block.id], (
                f"block {block.id}: {block.ref_count} != {counts[block.id]} owners"
            )
            assert (block.ref_count == 0) == (block.id in self._free), (
                f"block {block.id} is both free and used, or neither"
            )
        for key, block_id in self._by_hash.items():
            assert self.blocks[block_id].hash == key, (
                f"stale hash entry {key:#x} -> block {block_id}"
            )

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        self._forget(block)
        block.ref_count = 1
        return block_id

    def _forget(self, block: Block) -> None:
        """Let no search find a block again."""
        if block.hash is not None and self._by_hash.get(block.hash) == block.id:
            del self._by_hash[block.hash]
        block.open(0)

    def _lookup(self, key: int, token_ids: bytes, parent: int) -> Block | None:
        block_id = self._by_hash.get(key)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        return block if block.token_ids == token_ids and block.parent == parent else None

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
            seq.hashes.append(_digest(seq.hashes[j - 1] if j else None, self._token_bytes(seq, j)))
        return seq.hashes[i]


def _digest(previous: int | None, token_ids: bytes) -> int:
    """xxh64 of the previous block's hash (8 bytes, little-endian; the first has none), then the
    tokens as int32.
    """
    return xxhash.xxh64_intdigest(
        (b"" if previous is None else previous.to_bytes(8, "little")) + token_ids
    )
