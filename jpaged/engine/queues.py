"""Queues: sequences that wait and sequences that run, and how one becomes the other."""

from collections import Counter

import numpy as np

from jpaged.engine.adapters import AdapterSlots
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.prefix_cache import Match
from jpaged.engine.drafting import Drafter
from jpaged.engine.policy import Policy
from jpaged.engine.sequence import Sequence, Status
from jpaged.errors import CapacityError


class Queues:
    """What waits and what runs; a running sequence holds a row of the device and blocks.

    max_num_seqs: rows of the device's state, so sequences that run at once. preemptions,
    states: see Stats. max_loras: adapters that the running ones have at most.
    drafter: None where nothing is guessed.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        preemptions: Counter[str] | None = None,
        states: Counter[str] | None = None,
        max_loras: int = 0,
        drafter: Drafter | None = None,
    ):
        self.blocks = blocks
        self.adapters = AdapterSlots(max_loras)
        self.drafter = drafter
        self.max_num_seqs = max_num_seqs
        self.preemptions: Counter[str] = Counter() if preemptions is None else preemptions
        self.states: Counter[str] = Counter() if states is None else states
        self.waiting = Policy(max_num_seqs)
        self.running: dict[Sequence, None] = {}  # an ordered set, the oldest admission first
        self.finished: list[Sequence] = []  # since they were last taken
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))

    # Into a row of the device

    def admit(self, seq: Sequence, match: Match) -> None:
        """Run a waiting sequence on the blocks that the cache or the store has."""
        if seq.epoch:  # it was preempted
            self.preemptions["swapped" if match.num_loaded else "recomputed"] += 1
        self.blocks.admit(seq, match)
        if not self.blocks.can_rewind:  # it goes on from a state, if one is kept
            self.states["hits"] += match.num_blocks > 0
            self.states["misses"] += match.num_known > match.num_blocks
        cached = match.num_blocks * self.blocks.block_size
        self._run(seq, num_computed=cached, fill=len(seq))

    def join(self, seq: Sequence, leader: Sequence) -> None:
        """Run a waiting sequence as a fork of one that has the same tokens and has computed them
        all.
        """
        if seq.epoch:  # it was preempted
            self.preemptions["recomputed"] += 1
        self.blocks.fork(leader, seq)
        self._run(seq, num_computed=len(seq), fill=len(seq))

    def fork(self, parent: Sequence) -> Sequence:
        """Return a second sequence of the same tokens, which runs on shared blocks if a row of the
        device is free, and else waits.
        """
        child = parent.copy()
        if parent.status is Status.RUNNING and self.free_rows:
            self.blocks.fork(parent, child)
            self._run(child, num_computed=parent.num_dispatched, fill=parent.fill)
        return child

    def _run(self, seq: Sequence, *, num_computed: int, fill: int) -> None:
        self.waiting.enter(seq)
        slot = None if seq.adapter is None else self.adapters.take(seq.adapter)
        row = self.free_rows.pop()
        seq.run(device_row=row, adapter_slot=slot, num_computed=num_computed, fill=fill)
        self.running[seq] = None

    # Out of it

    def preempt(self, seq: Sequence) -> None:
        """Give up a running sequence's blocks. Those that are closed can be found again, by itself
        too: in the pool until they are taken, and after that in the store.
        """
        self.preemptions["preempted"] += 1
        self._release(seq)
        seq.preempt()
        if seq.candidates is None:  # a row that has them waits for its request, not for blocks
            self.waiting.add_first(seq)

    def preempt_victim(self, among: dict[Sequence, None]) -> None:
        """Preempt the row of these that gives way to the others. among: rows, oldest first."""
        self.preempt(self.waiting.victim(among))

    def preempt_idle(self) -> None:
        """Preempt the youngest row that waits for its request, else the one that gives way.

        Where nothing can be planned, rows that wait do so for others of their request, which lack
        the blocks that they hold: one that computes its prompt and is preempted in their place
        would be admitted, and be stuck, for ever.
        """
        idle = (seq for seq in reversed(self.running) if seq.candidates is not None)
        self.preempt(next(idle, self.waiting.victim(self.running)))

    def resume(self, seq: Sequence) -> None:
        """Go on with a sequence whose candidates its request has taken up."""
        seq.resume()
        if seq.status is Status.WAITING:
            self.waiting.add(seq)

    def retire(self, seq: Sequence) -> None:
        """Take a sequence out of its queue, and whatever it holds from it; nobody is told."""
        self.waiting.remove(seq)
        if seq.status is Status.RUNNING:
            self._release(seq)
        seq.retire()

    def finish(
        self,
        seq: Sequence,
        reason: str,
        *,
        stop: int | str | None = None,
        error: Exception | None = None,
    ) -> None:
        """End a sequence from any state; its blocks and row are free for the next dispatch. What
        they say of it is read before that: see Engine.
        """
        if (group := self.blocks.of_experts) is not None and seq.scoring is None:
            assert self.blocks.experts is not None
            seq.take_experts(np.zeros((0, *self.blocks.experts), np.int16))
            seq.leave_blocks(seq.block_tables[group] if seq.block_tables else ())
        seq.conclude(reason, stop, error)
        self.retire(seq)
        self.finished.append(seq)

    def fail(self, seq: Sequence) -> None:
        """End a sequence that the pool cannot hold, and those that cannot go on without it."""
        groups, size = self.blocks.groups, self.blocks.block_size
        most = next((g for g in groups if g.most_tokens < len(seq)), groups[0]).num_blocks
        error = CapacityError(
            f"{len(seq)} tokens and the next one do not fit the KV pool of {most} blocks of {size} "
            f"({most * size} tokens): raise num_blocks, or lower max_tokens or max_model_len"
        )
        for member in seq.request.doomed_with(seq):
            self.finish(member, "error", error=error)

    def _release(self, seq: Sequence) -> None:
        del self.running[seq]
        self.waiting.leave(seq)
        self.blocks.free(seq)
        self.free_rows.append(seq.device_row)
        if seq.adapter is not None:
            self.adapters.leave(seq.adapter)
