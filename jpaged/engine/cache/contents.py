"""Content: what a block holds, as a search compares it; Contents: those that are known."""

import weakref

import xxhash

from jpaged.engine.sequence import Sequence


class Content:
    """One block's worth of tokens after those of its parent.

    Blocks of several groups, copies of one block, and what a store keeps of it name one Content. A
    chain is compared by what it holds, not by a 64-bit hash alone, also where the blocks before are
    gone. The first block's parent is the root of its Contents, which stands for all that KV depends
    on beside the tokens; the root has neither hash nor parent.
    """

    __slots__ = ("__weakref__", "hash", "parent", "token_ids")

    def __init__(self, hash: int | None, token_ids: bytes, parent: "Content | None"):
        self.hash = hash
        self.token_ids = token_ids  # see Sequence.block_bytes
        self.parent = parent

    def __deepcopy__(self, memo: dict[int, object]) -> "Content":
        return self  # never written again: a snapshot shares it

    @property
    def root(self) -> "Content":
        """The first of its chain."""
        content = self
        while content.parent is not None:
            content = content.parent
        return content


class Contents:
    """The contents that a block, a stored block or a later content still names, by hash.

    All replicas of an engine share one, and so one store. identity: what KV depends on beside the
    tokens, the version of the weights apart: its dtype and block size.
    """

    def __init__(self, identity: str = ""):
        self.identity = identity
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
            key = chain_hash(seq, i, size)
            content = self._known[key] = Content(key, seq.block_bytes(i, size), parent)
        return content

    def _new_root(self) -> Content:
        return Content(None, f"{self.identity} weights {self.generation}".encode(), None)


def chain_hash(seq: Sequence, i: int, size: int) -> int:
    """Return the hash of a sequence's first i + 1 blocks, which the sequence keeps. size: tokens a
    block.
    """
    while len(seq.hashes) <= i:
        j = len(seq.hashes)
        before = seq.hashes[j - 1] if j else None
        seq.hashes.append(digest(before, seq.block_bytes(j, size)))
    return seq.hashes[i]


def digest(previous: int | None, token_ids: bytes) -> int:
    """Return xxh64 of the previous block's hash (8 bytes, little-endian; the first block has none),
    then of the block's bytes.
    """
    before = b"" if previous is None else previous.to_bytes(8, "little")
    return xxhash.xxh64_intdigest(before + token_ids)
