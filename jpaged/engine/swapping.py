"""Swapping: KV of preempted sequences that the host keeps, and the moves there and back."""

from jpaged.engine.block_manager import BlockManager
from jpaged.engine.buckets import padded_blocks
from jpaged.engine.plan import Moves
from jpaged.engine.prefix_cache import Match
from jpaged.engine.sequence import Sequence, Swapped


class Swapping:
    """Moves KV between pools and host before the next step.

    host_bytes: that the host may keep. min_tokens: shorter sequences are computed again instead.
    """

    def __init__(self, blocks: BlockManager, *, host_bytes: int = 0, min_tokens: int = 0):
        self.blocks = blocks
        self.host_bytes = self.free_bytes = host_bytes
        self.min_tokens = min_tokens
        self._outs: list[tuple[Swapped, list[list[int]]]] = []  # since they were last taken
        self._ins: list[tuple[Swapped, list[list[int]]]] = []

    @property
    def used_bytes(self) -> int:
        return self.host_bytes - self.free_bytes

    def keep(self, seq: Sequence) -> None:
        """Move a running sequence's KV to the host, where that has room and it is worth it."""
        if seq.num_dispatched < max(self.min_tokens, 1) or self.blocks.cache.is_stale(seq):
            return
        written = self.blocks.written(seq, seq.num_dispatched)
        pairs = zip(written, self.blocks.groups, strict=True)
        size = sum(padded_blocks(len(ids)) * group.block_bytes for ids, group in pairs if ids)
        if 0 < size <= self.free_bytes:
            self.free_bytes -= size
            seq.swapped = Swapped(seq.num_dispatched, size)
            self._outs.append((seq.swapped, written))

    def bring_back(self, seq: Sequence, match: Match) -> None:
        """Move what the host keeps of a sequence, and the cache has not, into its blocks."""
        if seq.swapped is not None and seq.swapped.num_tokens > seq.num_dispatched:
            seq.go_on_from(seq.swapped.num_tokens)
            self.blocks.extend(seq, seq.num_dispatched)
            self._ins.append((seq.swapped, self.blocks.written(seq, seq.num_dispatched, match)))
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Forget what the host keeps of a sequence."""
        if seq.swapped is not None:
            self.free_bytes += seq.swapped.num_bytes
            seq.swapped = None

    def take_outs(self) -> Moves:
        """What must leave the pools before the next step."""
        outs, self._outs = tuple(self._outs), []
        return outs

    def take_ins(self) -> Moves:
        """What must come back after that."""
        ins, self._ins = tuple(self._ins), []
        return ins
