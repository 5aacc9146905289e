"""Scheduler: which sequences run in the next step. Works on Sequences and block counts; never touches a tensor."""

import dataclasses
from collections import OrderedDict
from typing import Literal, NamedTuple

from jpaged.engine.batch import StepResult
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.sequence import Sequence, Status
from jpaged.errors import CapacityError

MAX_PREFILL_STREAK = 4  # prefill steps in a row while rows wait to decode: bounds the gap between two of their tokens


class PlanEntry(NamedTuple):
    """One row of a step: compute the KV of tokens [start, start + num_tokens) of a sequence.

    samples: the step draws the token after them. first: the row's slot was just taken (its device state is another's).
    epoch: the sequence's epoch when planned; a later one means that it was preempted meanwhile.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    first: bool
    epoch: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One dispatch: chunks of prompts (prefill) or one token for each row (decode)."""

    phase: Literal["prefill", "decode"]
    entries: tuple[PlanEntry, ...]

    @property
    def num_tokens(self) -> int:
        return sum(e.num_tokens for e in self.entries)


class Scheduler:
    """Two queues, waiting and running, over one BlockManager.

    max_num_seqs: device slots, so rows that run at once. max_num_batched_tokens: prefill tokens a step.
    """

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # an ordered set, next to be admitted first
        self.running: dict[Sequence, None] = {}  # an ordered set, oldest admission first
        self.finished: list[Sequence] = []  # since the engine last took them
        self.num_preemptions = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._streak = 0

    def add(self, seq: Sequence) -> None:
        self.waiting[seq] = None

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan | None:
        """The next step, with its blocks allocated, or None when nothing can be dispatched before the next commit."""
        decodable = any(seq.can_decode for seq in self.running)
        plan = None
        if not decodable or self._streak < MAX_PREFILL_STREAK:
            plan = self._plan_prefill()
        if plan is None and decodable:
            plan = self._plan_decode()
        if plan is None and self._streak >= MAX_PREFILL_STREAK:
            plan = self._plan_prefill()
        self._streak = self._streak + 1 if plan is not None and plan.phase == "prefill" else 0
        return plan

    def commit(self, plan: Plan, result: StepResult) -> None:
        """Take in what a dispatch computed: append tokens, hash full blocks, end the sequences that stop.

        Tokens of a sequence that ended while the dispatch was in flight are surplus: neither emitted nor hashed.
        """
        for row, entry in enumerate(plan.entries):
            seq = entry.seq
            seq.in_flight -= 1
            if seq.status is Status.FINISHED:
                continue
            if entry.epoch == seq.epoch:
                seq.pending -= entry.samples
                if plan.phase == "decode":
                    self.blocks.close(seq, entry.end)
            if plan.phase == "prefill" and seq.params.prompt_logprobs is not None:
                _append_prompt_logprobs(seq, entry, result.prompt_rows(plan, row))
            if entry.samples:
                self._append(seq, row, result)
            elif seq.score_only and entry.end == seq.prompt_len:
                self.finish(seq, "length")

    def _append(self, seq: Sequence, row: int, result: StepResult) -> None:
        """Append one sampled token and decide whether the sequence ends with it."""
        token, params = result.tokens[row], seq.params
        seq.token_ids.append(token)
        seq.logprobs.append(result.logprobs[row])
        if params.logprobs is not None:
            seq.top_logprobs.append(result.top(row, params.logprobs))
        may_stop = seq.num_generated > params.min_tokens
        if may_stop and token in seq.eos_ids:
            self.finish(seq, "stop")
        elif may_stop and token in seq.stop_ids:
            self.finish(seq, "stop", stop=token)
        elif seq.text is not None and (matched := seq.text.push(token, may_stop=may_stop)) is not None:
            self.finish(seq, "stop", stop=matched)
        elif len(seq) >= seq.end:
            self.finish(seq, "length")
        seq.num_committed = len(seq)

    def finish(
        self, seq: Sequence, reason: str, *, stop: int | str | None = None, error: Exception | None = None
    ) -> None:
        """End a sequence from any state; its blocks and slot are free for the next dispatch."""
        if seq.status is Status.WAITING:
            del self.waiting[seq]
        elif seq.status is Status.RUNNING:
            self._release(seq)
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop, error
        seq.status = Status.FINISHED  # last: an interrupt before it undoes the end, one after it does not
        self.finished.append(seq)

    def take_finished(self) -> list[Sequence]:
        finished, self.finished = self.finished, []
        return finished

    def preempt(self, seq: Sequence) -> None:
        """Give up a running sequence's blocks; its tokens are prefilled again when it is next admitted."""
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_dispatched = seq.fill = seq.pending = 0
        seq.epoch += 1
        self.num_preemptions += 1
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)

    def check_integrity(self) -> None:
        """Assert the block manager's invariants and that slots and queues agree."""
        self.blocks.check_integrity(self.running)
        slots = [seq.slot for seq in self.running]
        assert sorted(slots + self._slots) == list(range(self.max_num_seqs)), "slots leaked or doubled"
        for seq in self.running:
            assert seq.status is Status.RUNNING and seq.num_dispatched <= len(seq.block_table) * self.blocks.block_size
            if not seq.is_prefilling and not seq.score_only:
                assert seq.num_dispatched == len(seq) + seq.pending - 1, f"{seq!r}: {seq.num_dispatched} dispatched"
        for seq in self.waiting:
            assert seq.status is Status.WAITING and not seq.block_table and seq.slot == -1

    def _plan_prefill(self) -> Plan | None:
        budget = self.max_num_batched_tokens
        entries: list[PlanEntry] = []
        for seq in self.running:  # at most one is in the middle of its prompt, unless a budget cut two plans
            if budget and seq.is_prefilling:
                entries.append(self._chunk(seq, budget, first=False))
                budget -= entries[-1].num_tokens
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            seq = next(iter(self.waiting))
            if seq.in_flight:  # preempted while a step still holds it: its tokens are not all known yet
                break
            if self.blocks.blocks_for(len(seq)) > self.blocks.num_blocks:
                self.finish(seq, "error", error=self._outgrown(seq))
                continue
            # Prompt logprobs need every prompt token computed, so such a request takes no hits.
            matched = [] if seq.params.prompt_logprobs is not None else self.blocks.match(seq)
            # A block in hand for every row that runs: an admission that forces a preemption at once is wasted work.
            if self.blocks.cost(seq, matched) + len(self.running) > self.blocks.num_free and self.running:
                break
            self._admit(seq, matched)
            entries.append(self._chunk(seq, budget, first=True))
            budget -= entries[-1].num_tokens
        return Plan(phase="prefill", entries=tuple(entries)) if entries else None

    def _admit(self, seq: Sequence, matched: list[int]) -> None:
        del self.waiting[seq]
        self.blocks.admit(seq, matched)
        seq.num_dispatched = len(matched) * self.blocks.block_size
        if seq.epoch == 0:
            seq.num_cached = seq.num_dispatched
        seq.fill = len(seq)
        seq.slot = self._slots.pop()
        seq.status = Status.RUNNING
        self.running[seq] = None

    def _chunk(self, seq: Sequence, budget: int, *, first: bool) -> PlanEntry:
        start = seq.num_dispatched
        num_tokens = min(budget, seq.fill - start)
        assert num_tokens > 0 and start + num_tokens <= len(seq), f"{seq!r}: nothing to compute from {start}"
        samples = start + num_tokens == seq.fill and not seq.score_only
        # Hashed now, not at commit: a later dispatch, or a later entry of this plan, may read what this one writes.
        self.blocks.close(seq, start + num_tokens)
        return self._dispatched(seq, start, num_tokens, samples=samples, first=first)

    def _dispatched(
        self, seq: Sequence, start: int, num_tokens: int, *, samples: bool, first: bool = False
    ) -> PlanEntry:
        seq.num_dispatched = start + num_tokens
        seq.pending += samples
        seq.in_flight += 1
        return PlanEntry(seq, start, num_tokens, samples, first, seq.epoch)

    def _plan_decode(self) -> Plan | None:
        rows: list[Sequence] = []
        for seq in list(self.running):
            if seq.status is Status.RUNNING and seq.can_decode and self._make_room(seq):
                rows.append(seq)
        entries = tuple(self._dispatched(seq, seq.num_dispatched, 1, samples=True) for seq in rows)
        return Plan(phase="decode", entries=entries) if entries else None

    def _make_room(self, seq: Sequence) -> bool:
        """Give a row the block that its next token needs, preempting the youngest rows; False: it must wait or end."""
        while seq.num_dispatched == len(seq.block_table) * self.blocks.block_size:
            if self.blocks.num_free:
                self.blocks.extend(seq, seq.num_dispatched + 1)
                break
            victim = next(reversed(self.running))
            if victim is not seq:
                self.preempt(victim)
            elif len(self.running) > 1:
                self.preempt(seq)
                return False
            else:
                if not seq.in_flight:  # a step in flight may yet end it
                    self.finish(seq, "error", error=self._outgrown(seq))
                return False
        return True

    def _outgrown(self, seq: Sequence) -> CapacityError:
        size = self.blocks.num_blocks * self.blocks.block_size
        return CapacityError(
            f"{len(seq)} tokens and the next one do not fit the KV pool of {self.blocks.num_blocks} blocks of "
            f"{self.blocks.block_size} ({size} tokens): raise num_blocks, or lower max_tokens or max_model_len"
        )

    def _release(self, seq: Sequence) -> None:
        del self.running[seq]
        self.blocks.free(seq)
        self._slots.append(seq.slot)
        seq.slot = -1


def _append_prompt_logprobs(seq: Sequence, entry: PlanEntry, rows: list[list[tuple[int, float, int]]]) -> None:
    """The hidden state at position p scores the prompt token at p + 1; a recomputed chunk adds nothing."""
    for position, scored in zip(range(entry.start + 1, min(entry.end + 1, seq.prompt_len)), rows, strict=False):
        if position == len(seq.prompt_logprobs):
            seq.prompt_logprobs.append(
                scored[: seq.params.prompt_logprobs + 1] if seq.params.prompt_logprobs else scored[:1]
            )
