"""Blocks of KV: what each holds, how many own it; a BlockGroup has those of a group of layers."""

from collections import OrderedDict
from typing import NamedTuple

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

    def __init__(self, size: GroupSize, block_size: int):
        self.window = size.window
        self.block_bytes = size.block_bytes
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(size.num_blocks)]
        # Next to be reused first: blocks that nothing can find, then the least recently freed.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size.num_blocks))
        self.cached: dict[Content, int] = {}  # the block that a search finds
        self.copies: list[tuple[int, int]] = []  # to be made before the next step writes

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self.free)

    def first_seen(self, position: int) -> int:
        """The first block that a query at this position sees."""
        if self.window is None:
            return 0
        return max(position - self.window + 1, 0) // self.block_size

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence that is alone can grow to so many tokens."""
        most = -(-num_tokens // self.block_size)
        if self.window is not None:  # its tokens, where they begin with the last of a block
            most = min(most, -(-(self.window - 1) // self.block_size) + 1)
        return most <= self.num_blocks

    def take(self) -> int:
        """A free block, now of one owner; what it held is forgotten."""
        block_id, _ = self.free.popitem(last=False)
        block = self.blocks[block_id]
        self.forget(block)
        block.ref_count = 1
        return block_id

    def share(self, block_id: int) -> None:
        """One owner more of a block in use, or the first of a cached one."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free[block_id]
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """One owner less; without any it is free."""
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is free already"
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free[block_id] = None
            if block.content is None or self.cached.get(block.content) != block_id:
                self.free.move_to_end(block_id, last=False)  # of no use to anybody

    def close(self, block_id: int, content: Content) -> None:
        """A block is full: others may find it."""
        # The latest is what a search finds: an older one may be free already.
        self.blocks[block_id].content = content
        self.cached[content] = block_id

    def forget(self, block: Block) -> None:
        """Let no search find a block again."""
        if block.content is not None and self.cached.get(block.content) == block.id:
            del self.cached[block.content]
        block.content = None
