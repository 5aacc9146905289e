"""Content: what a block holds, as a search compares it."""


class Content:
    """One block's worth of tokens after those of its parent.

    Blocks of several groups, copies of one block, and what a store keeps of it name one Content. A
    chain is compared by what it holds, not by a 64-bit hash alone, also where the blocks before are
    gone. The first block's parent is the root of its Contents, which stands for all that KV depends
    on beside the tokens; the root has neither hash nor parent.

    digest: names it in files that other processes read too (see BlockFiles); None where it is to
    be in none. stored_ids: what token_ids is, in a form that means the same in every process.
    """

    __slots__ = ("__weakref__", "digest", "hash", "parent", "stored_ids", "token_ids")

    def __init__(
        self,
        hash: int | None,
        token_ids: bytes,
        parent: "Content | None",
        *,
        digest: bytes | None = None,
        stored_ids: bytes = b"",
    ):
        self.hash = hash
        self.token_ids = token_ids  # see Sequence.block_bytes
        self.parent = parent
        self.digest = digest
        self.stored_ids = stored_ids

    def __deepcopy__(self, memo: dict[int, object]) -> "Content":
        return self  # never written again: a snapshot shares it

    @property
    def root(self) -> "Content":
        """The first of its chain."""
        content = self
        while content.parent is not None:
            content = content.parent
        return content
