"""Scheduler: which sequences run in the next step. Works on Sequences and block counts; never
touches a tensor.

A step is a prefill (chunks of prompts), a decode (one row a sequence), or with `mixed` both at
once. Rows that wait for the host are left out until their request has steered them.
"""

from collections import Counter, OrderedDict
from typing import Any

from jpaged.engine.block_manager import GONE, BlockManager, Match
from jpaged.engine.buckets import padded_blocks
from jpaged.engine.plan import Moves, Phase, Plan, PlanEntry, StepResult
from jpaged.engine.sequence import Request, Sequence, Status, Swapped
from jpaged.errors import CapacityError

# Prefill steps in a row while rows wait to decode: bounds the gap between two of their tokens.
MAX_PREFILL_STREAK = 4

Chunk = list[PlanEntry]  # a chunk of a prompt, then the forks that draw after it


class Scheduler:
    """Two queues, waiting and running, over one BlockManager.

    max_num_seqs: rows of the device's state, so sequences that run at once. max_num_batched_tokens:
    tokens of a prefill step. decode_steps: tokens of a row in one decode dispatch. mixed: rows that
    decode join the prefill steps. host_bytes: KV of preempted sequences that the host may keep;
    below swap_min_tokens it is computed again instead. preemptions: counts them as "swapped" and
    "recomputed".
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_steps: int = 1,
        mixed: bool = False,
        host_bytes: int = 0,
        swap_min_tokens: int = 0,
        preemptions: Counter[str] | None = None,
    ):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode_steps = decode_steps
        self.mixed = mixed
        self.host_bytes = self.free_host_bytes = host_bytes
        self.swap_min_tokens = swap_min_tokens
        # An ordered set, next to be admitted first; and one with the oldest admission first.
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: dict[Sequence, None] = {}
        self.finished: list[Sequence] = []  # since the engine last took them
        self.preemptions: Counter[str] = Counter() if preemptions is None else preemptions
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._streak = 0
        self._planned: list[Sequence] = []  # in the last plan
        self._swap_outs: list[tuple[Swapped, list[list[int]]]] = []  # since the last plan
        self._swap_ins: list[tuple[Swapped, list[list[int]]]] = []

    def add(self, seq: Sequence) -> None:
        self.waiting[seq] = None

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # A step

    def schedule(self) -> Plan | None:
        """The next step, with its blocks allocated, or None when nothing can be dispatched before
        the next commit.
        """
        for seq in self._planned:
            if seq.status is Status.RUNNING:
                self.blocks.trim(seq)
        phase, entries = self._choose()
        while not entries and self.running and not any(seq.in_flight for seq in self.running):
            # Only rows are left that wait for others, which wait for blocks.
            self.preempt(next(reversed(self.running)))
            phase, entries = "prefill", self._plan_prefill(self.max_num_batched_tokens)
        if not entries:
            return None
        self._streak = self._streak + 1 if phase == "prefill" else 0
        self._planned = [entry.seq for entry in entries]
        ins, self._swap_ins = tuple(self._swap_ins), []
        return Plan(
            phase=phase,
            entries=tuple(entries),
            copies=self.blocks.take_copies(),
            swap_outs=self.take_swap_outs(),
            swap_ins=ins,
        )

    def _choose(self) -> tuple[Phase, list[PlanEntry]]:
        """Prefill before decode, but no more than a few times while rows wait to decode."""
        decodable = any(seq.can_decode for seq in self.running)
        budget = self.max_num_batched_tokens
        if self.mixed and decodable and len(self.running) < budget:
            return self._plan_mixed()
        entries: list[PlanEntry] = []
        if not decodable or self._streak < MAX_PREFILL_STREAK:
            entries = self._plan_prefill(budget)
        if not entries and decodable and (entries := self._plan_decode()):
            return "decode", entries
        if not entries and self._streak >= MAX_PREFILL_STREAK:
            entries = self._plan_prefill(budget)
        return "prefill", entries

    def _plan_mixed(self) -> tuple[Phase, list[PlanEntry]]:
        """A token of each row that decodes, and chunks of prompts in what they leave."""
        rows = self._decoding_rows()
        chunks = self._plan_prefill(self.max_num_batched_tokens - len(rows))
        if not chunks:
            return "decode", self._decode_entries(rows, self.decode_steps)
        return "prefill", [*self._decode_entries(rows, 1), *chunks]

    def _plan_decode(self) -> list[PlanEntry]:
        return self._decode_entries(self._decoding_rows(), self.decode_steps)

    def _decoding_rows(self) -> list[Sequence]:
        """Rows that decode next, each with the block that its token is written to."""
        rows: list[Sequence] = []
        for seq in list(self.running):
            if seq.status is Status.RUNNING and seq.can_decode and self._make_room(seq):
                rows.append(seq)
        return rows

    def _decode_entries(self, rows: list[Sequence], most: int) -> list[PlanEntry]:
        most = 1 if any(seq.waits_for_host for seq in rows) else most
        entries = []
        for seq in rows:
            steps = self._steps_ahead(seq, most)
            entry = self._dispatched(seq, seq.num_dispatched, steps, draws=steps, decodes=True)
            entries.append(entry)
        return entries

    def _steps_ahead(self, seq: Sequence, most: int) -> int:
        """Tokens that a row can draw in one dispatch, blocks for them allocated: no other row is
        preempted for it.
        """
        start = seq.num_dispatched
        steps = min(most, seq.end - len(seq) - seq.pending)
        if steps > 1:
            steps = min(steps, self.blocks.reach(seq) - start)
            self.blocks.extend(seq, start + steps)
        return steps

    def _make_room(self, seq: Sequence) -> bool:
        """Give a row the block that its next token is written to, preempting the youngest rows;
        False: it must wait.
        """
        while not self.blocks.make_writable(seq, seq.num_dispatched):
            victim = next(reversed(self.running))
            if victim is not seq:
                self.preempt(victim)
            elif len(self.running) > 1:
                self.preempt(seq)
                return False
            else:
                if not seq.in_flight:  # a step in flight may yet end it
                    self._fail(seq)
                return False
        return True

    def _plan_prefill(self, budget: int) -> list[PlanEntry]:
        """Chunks of prompts of at most so many tokens: those begun first, then new admissions."""
        chunks: list[Chunk] = []
        same: dict[Any, Chunk] = {}  # those that end a prompt, by its content
        for seq in self.running:  # at most one is within its prompt, unless a budget cut two plans
            if budget and seq.is_prefilling and (chunk := self._chunk(seq, budget, same)):
                chunks.append(chunk)
                budget -= chunk[0].num_tokens
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = next(iter(self.waiting))
            if seq.in_flight:  # preempted while a step holds it: its tokens are not all known yet
                break
            if not self.blocks.fits(len(seq)):
                self._fail(seq)
                continue
            match = self._match(seq)
            leader = self._leader(seq, match.num_blocks, same)
            if leader is None and not budget:
                break
            # A block in hand for every row that runs: an admission that forces a preemption at once
            # is wasted work.
            reserve = len(self.running)
            if leader is not None:
                if not self.blocks.has_free(reserve):
                    break
                leader.append(self._join(seq, leader[0].seq))
                continue
            end = min(len(seq), self._computed(seq, match) + budget)
            if self.running and not self.blocks.has_room(seq, match, end, reserve=reserve):
                break
            self._admit(seq, match)
            chunks.append(self._chunk(seq, budget, same))
            budget -= chunks[-1][0].num_tokens
        return [entry for chunk in chunks for entry in chunk]

    def _match(self, seq: Sequence) -> Match:
        # Prompt logprobs need every prompt token computed, so such a request takes no hits.
        if seq.params.prompt_logprobs is not None:
            return self.blocks.no_match()
        return self.blocks.match(seq)

    def _computed(self, seq: Sequence, match: Match) -> int:
        """Tokens whose KV is in the cache or on the host."""
        swapped = 0 if seq.swapped is None else seq.swapped.num_tokens
        return max(match.num_blocks * self.blocks.block_size, swapped)

    def _leader(self, seq: Sequence, num_matched: int, same: dict[Any, Chunk]) -> Chunk | None:
        """The chunk of this plan that ends the very same tokens, if a fork of its sequence is what
        to run.

        A fork computes nothing. It shares the open block too, which is copied when written: samples
        of one request are always forks; other requests are where the cached blocks leave more than
        the one token to compute.
        """
        leader = same.get(_content(seq)) if same and seq.params.prompt_logprobs is None else None
        if leader is None or leader[0].seq.request is seq.request:
            return leader
        rest = len(seq) - num_matched * self.blocks.block_size
        return leader if self.blocks.enable_prefix_caching and rest > 1 else None

    def _join(self, seq: Sequence, leader: Sequence) -> PlanEntry:
        """Admit a fork of a sequence whose last chunk is in this plan."""
        self.blocks.fork(leader, seq)
        self.drop_swapped(seq)
        seq.num_dispatched = seq.fill = len(seq)
        self._run(seq)
        return self._dispatched(seq, len(seq), 0, draws=1)

    def _admit(self, seq: Sequence, match: Match) -> None:
        computed = self._computed(seq, match)
        self.blocks.admit(seq, match)
        seq.num_dispatched = match.num_blocks * self.blocks.block_size
        self._run(seq)
        seq.fill = len(seq)
        if seq.swapped is not None and computed > seq.num_dispatched:
            self.blocks.extend(seq, computed)
            self._swap_ins.append((seq.swapped, self.blocks.written(seq, computed, match)))
            seq.num_dispatched = computed
        self.drop_swapped(seq)

    def _run(self, seq: Sequence) -> None:
        self.waiting.pop(seq, None)
        if seq.epoch == 0:
            seq.num_cached = min(seq.num_dispatched, seq.prompt_len)
        seq.device_row, seq.is_new = self._free_rows.pop(), True
        seq.status = Status.RUNNING
        self.running[seq] = None

    def _chunk(self, seq: Sequence, budget: int, same: dict[Any, Chunk]) -> Chunk:
        """The next chunk of a prompt, entered in `same` if it is the last; [] while a group of
        layers with a window lacks blocks for it.
        """
        start = seq.num_dispatched
        end = min(start + budget, seq.fill, self.blocks.reach(seq))
        assert start < seq.fill <= len(seq), f"{seq!r}: nothing to compute from {start}"
        if end <= start:
            return []
        self.blocks.extend(seq, end)
        draws = end == seq.fill and not seq.score_only
        # Hashed now, not at commit: a later dispatch, or a later entry of this plan, may read what
        # this one writes.
        self.blocks.close(seq, end)
        chunk = [self._dispatched(seq, start, end - start, draws=int(draws))]
        if draws:
            same[_content(seq)] = chunk
        return chunk

    def _dispatched(
        self, seq: Sequence, start: int, num_tokens: int, *, draws: int, decodes: bool = False
    ) -> PlanEntry:
        is_new, seq.is_new = seq.is_new, False
        seq.num_dispatched = start + num_tokens
        seq.pending += draws
        seq.in_flight += 1
        return PlanEntry(seq, start, num_tokens, draws, decodes, is_new, seq.epoch)

    # What came of it

    def commit(self, plan: Plan, result: StepResult) -> list[Request]:
        """Take in what a dispatch computed: append tokens, hash full blocks, end the sequences that
        stop. Returns the requests whose rows wait for the host, to be steered.

        Tokens of a sequence that ended while the dispatch was in flight are surplus: neither
        emitted nor hashed.
        """
        waiting: dict[Request, None] = {}
        drawn = 0
        for row, entry in enumerate(plan.entries):
            seq = entry.seq
            at, drawn = drawn, drawn + (entry.draws > 0)
            seq.in_flight -= 1
            if seq.status is Status.FINISHED:
                continue
            if entry.epoch == seq.epoch:
                seq.pending -= entry.draws
            if not entry.decodes and seq.params.prompt_logprobs is not None:
                _append_prompt_logprobs(seq, entry, result.prompt_rows(plan, row))
            if not entry.draws:
                if seq.score_only and entry.end == seq.prompt_len:
                    self.finish(seq, "length")
            elif seq.waits_for_host:
                if entry.decodes:
                    self._written(entry, entry.end)
                assert seq.params.logprobs is not None
                seq.candidates = result.top(at, seq.params.logprobs)
                waiting[seq.request] = None
                # Preempted meanwhile: it waits for its request, not for blocks.
                self.waiting.pop(seq, None)
            else:
                self._append_drawn(entry, at, result)
        return list(waiting)

    def _written(self, entry: PlanEntry, num_tokens: int) -> None:
        """Hash what a decode has filled, if the row still holds the blocks that it was planned
        with.
        """
        if entry.epoch == entry.seq.epoch and num_tokens % self.blocks.block_size == 0:
            self.blocks.close(entry.seq, num_tokens)

    def _append_drawn(self, entry: PlanEntry, row: int, result: StepResult) -> None:
        """Append the tokens that a row drew, up to the one that ends the sequence: what follows it
        is surplus.
        """
        seq = entry.seq
        for step in range(result.num_drawn[row]):
            if entry.decodes:
                self._written(entry, entry.start + step + 1)
            self._append(seq, row, step, result)
            if seq.status is Status.FINISHED:
                return
        assert result.num_drawn[row] == entry.draws, f"{seq!r}: stopped on the device alone"

    def _append(self, seq: Sequence, row: int, step: int, result: StepResult) -> None:
        """Append one sampled token and decide whether the sequence ends with it."""
        token, params = result.tokens[row][step], seq.params
        seq.token_ids.append(token)
        seq.logprobs.append(result.logprobs[row][step])
        if params.logprobs is not None:
            seq.top_logprobs.append(result.top(row, params.logprobs, step))
        may_stop = seq.num_generated > params.min_tokens
        if may_stop and token in seq.eos_ids:
            self.finish(seq, "stop")
        elif may_stop and token in seq.stop_ids:
            self.finish(seq, "stop", stop=token)
        elif seq.text is not None and (hit := seq.text.push(token, may_stop=may_stop)) is not None:
            self.finish(seq, "stop", stop=hit)
        elif len(seq) >= seq.end:
            self.finish(seq, "length")
        seq.num_committed = len(seq)

    # What a request does with rows that wait for the host

    def fork(self, parent: Sequence) -> Sequence:
        """A second sequence of the same tokens: running on shared blocks where a row of the device
        is free, else waiting.
        """
        child = parent.copy()
        if parent.status is Status.RUNNING and self._free_rows:
            self.blocks.fork(parent, child)
            child.num_dispatched, child.fill = parent.num_dispatched, parent.fill
            self._run(child)
        return child

    def resume(self, seq: Sequence) -> None:
        """Go on with a sequence whose candidates have been taken up."""
        seq.candidates = None
        if seq.status is Status.WAITING:
            self.waiting[seq] = None

    def retire(self, seq: Sequence) -> None:
        """Take a sequence out of its queue, and whatever it holds from it; nobody is told."""
        self.waiting.pop(seq, None)
        self.drop_swapped(seq)
        if seq.status is Status.RUNNING:
            self._release(seq)
        seq.status = Status.FINISHED

    # Leaving

    def finish(
        self,
        seq: Sequence,
        reason: str,
        *,
        stop: int | str | None = None,
        error: Exception | None = None,
    ) -> None:
        """End a sequence from any state; its blocks and row are free for the next dispatch."""
        # An interrupt before the status changes undoes the end, one after it does not.
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop, error
        self.retire(seq)
        self.finished.append(seq)

    def take_finished(self) -> list[Sequence]:
        finished, self.finished = self.finished, []
        return finished

    def preempt(self, seq: Sequence) -> None:
        """Give up a running sequence's blocks; when next admitted its KV comes back from the host
        or is recomputed.
        """
        if seq.num_dispatched >= max(self.swap_min_tokens, 1) and not self.blocks.is_stale(seq):
            written = self.blocks.written(seq, seq.num_dispatched)
            pairs = zip(written, self.blocks.groups, strict=True)
            size = sum(padded_blocks(len(ids)) * group.block_bytes for ids, group in pairs if ids)
            if 0 < size <= self.free_host_bytes:
                self.free_host_bytes -= size
                seq.swapped = Swapped(seq.num_dispatched, size)
                self._swap_outs.append((seq.swapped, written))
        self.preemptions["recomputed" if seq.swapped is None else "swapped"] += 1
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_dispatched = seq.fill = seq.pending = 0
        seq.epoch += 1
        if seq.candidates is None:  # a row that has them waits for its request, not for blocks
            self.waiting[seq] = None
            self.waiting.move_to_end(seq, last=False)

    def take_swap_outs(self) -> Moves:
        """What must leave the pools before the next step."""
        outs, self._swap_outs = tuple(self._swap_outs), []
        return outs

    def drop_swapped(self, seq: Sequence) -> None:
        """Forget what the host keeps of a sequence."""
        if seq.swapped is not None:
            self.free_host_bytes += seq.swapped.num_bytes
            seq.swapped = None

    def _fail(self, seq: Sequence) -> None:
        most = max(group.num_blocks for group in self.blocks.groups)
        size = self.blocks.block_size
        error = CapacityError(
            f"{len(seq)} tokens and the next one do not fit the KV pool of {most} blocks of {size} "
            f"({most * size} tokens): raise num_blocks, or lower max_tokens or max_model_len"
        )
        for member in seq.request.doomed_with(seq):
            self.finish(member, "error", error=error)

    def _release(self, seq: Sequence) -> None:
        del self.running[seq]
        self.blocks.free(seq)
        self._free_rows.append(seq.device_row)
        seq.device_row = -1

    def check_integrity(self, plan: Plan | None = None) -> None:
        """Assert the block manager's invariants, that rows and queues agree, and that a plan writes
        its own blocks.
        """
        self.blocks.check_integrity(self.running)
        rows = [seq.device_row for seq in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs)), "rows leaked"
        for seq in self.running:
            reach = min(map(len, seq.block_tables)) * self.blocks.block_size
            assert seq.status is Status.RUNNING and seq.num_dispatched <= reach
            assert seq.swapped is None, f"{seq!r} runs and is on the host too"
            if not seq.is_prefilling and not seq.score_only:
                drawn = seq.candidates is not None
                at = len(seq) + seq.pending - 1 + drawn
                assert seq.num_dispatched == at, f"{seq!r}: {seq.num_dispatched}"
        held = 0
        for seq in self.waiting:
            assert seq.status is Status.WAITING and not seq.block_tables
            assert seq.device_row == -1 and seq.candidates is None
            held += seq.swapped.num_bytes if seq.swapped is not None else 0
        assert held <= self.host_bytes - self.free_host_bytes <= self.host_bytes, (
            "host bytes leaked"
        )
        if plan is not None:
            self._check_writes(plan)

    def _check_writes(self, plan: Plan) -> None:
        admitted = {entry.seq: row for row, entry in enumerate(plan.entries) if entry.is_new}
        for row, entry in enumerate(plan.entries):
            # Only rows admitted further down in the plan may read along: they attend after this one
            # has written.
            others = [s for s in self.running if s is not entry.seq and admitted.get(s, -1) < row]
            for at in range(len(self.blocks.groups)):
                held = {block_id for seq in others for block_id in seq.block_tables[at]}
                for position in range(entry.start, entry.end):
                    block_id = entry.seq.block_tables[at][position // self.blocks.block_size]
                    assert block_id != GONE, f"{entry.seq!r} writes where its window was"
                    assert block_id not in held, f"{entry.seq!r} writes another's block {block_id}"


def _content(seq: Sequence) -> tuple[bytes, tuple[int, ...]]:
    return seq.salt, tuple(seq.token_ids)


def _append_prompt_logprobs(
    seq: Sequence, entry: PlanEntry, rows: list[list[tuple[int, float, int]]]
) -> None:
    """The hidden state at position p scores the prompt token at p + 1; a recomputed chunk adds
    nothing.
    """
    positions = range(entry.start + 1, min(entry.end + 1, seq.prompt_len))
    for position, scored in zip(positions, rows, strict=False):
        if position == len(seq.prompt_logprobs):
            seq.prompt_logprobs.append(scored[: (seq.params.prompt_logprobs or 0) + 1])
