"""Blocks of KV: what each holds, how many own it; a BlockGroup has those of a group of layers."""

from collections import OrderedDict
from typing import Literal, NamedTuple

from jpaged.engine.cache.contents import Content
from jpaged.engine.cache.store import Traffic

GONE = -1  # in a block table: no block, since nothing will read it
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
    """

    num_blocks: int
    window: int | None = None
    block_bytes: int = 0
    per: Literal["token", "block"] = "token"


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
    """The blocks of one group of layers: who owns them, what they hold, which are free.

    index: its place among the groups. traffic: what takes the blocks that are given up; None
    without a store.
    """

    def __init__(
        self, size: GroupSize, block_size: int, index: int = 0, traffic: Traffic | None = None
    ):
        self.window = size.window
        self.per = size.per
        self.block_bytes = size.block_bytes
        self.block_size = block_size
        self.index = index
        self.traffic = traffic
        self.blocks = [Block(i) for i in range(size.num_blocks)]
        # Next to be reused first: blocks that nothing can find, then the least recently freed.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size.num_blocks))
        self.cached: dict[Content, int] = {}  # the block that a search finds
        self.copies: list[tuple[int, int]] = []  # to be made before the next step writes
        # Closed for the plan in the making: what they are to hold is written by its step, or loaded
        # just before it.
        self.unwritten: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self.free)

    def take(self) -> int:
        """Return a free block, now of one owner. What it held is offered to the store and
        forgotten here.
        """
        block_id, _ = self.free.popitem(last=False)
        block = self.blocks[block_id]
        if self.traffic is not None:
            is_found = block.content is not None and self.cached.get(block.content) == block_id
            is_written = is_found and block_id not in self.unwritten
            self.traffic.evict(self.index, block_id, block.content if is_written else None)
        self.unwritten.discard(block_id)
        self.forget(block)
        block.ref_count = 1
        return block_id

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
