"""Scheduler: which sequences run in the next step. Works on Sequences and block counts; never
touches a tensor.
"""

from collections import Counter, OrderedDict
from typing import Any

from jpaged.engine.block_manager import BlockManager
from jpaged.engine.buckets import padded_blocks
from jpaged.engine.plan import Phase, Plan, PlanEntry, StepResult
from jpaged.engine.sequence import Sequence, Status, Swapped
from jpaged.errors import CapacityError
from jpaged.search.beam import BeamSearch

# prefill steps in a row while rows wait to decode: bounds the gap between two of their tokens
MAX_PREFILL_STREAK = 4


class Scheduler:
    """Two queues, waiting and running, over one BlockManager.

    max_num_seqs: device slots, so rows that run at once. max_num_batched_tokens: prefill tokens a
    step. decode_steps: tokens of a row in one decode dispatch. host_blocks: how many blocks of
    preempted sequences the host may keep; swap_min_tokens: fewer tokens are computed again instead.
    preemptions: counts them as "swapped" and "recomputed".
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_steps: int = 1,
        host_blocks: int = 0,
        swap_min_tokens: int = 0,
        preemptions: Counter[str] | None = None,
    ):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode_steps = decode_steps
        self.host_blocks = self.free_host_blocks = host_blocks
        self.swap_min_tokens = swap_min_tokens
        self.waiting: OrderedDict[Sequence, None] = (
            OrderedDict()
        )  # an ordered set, next to be admitted first
        self.running: dict[Sequence, None] = {}  # an ordered set, oldest admission first
        self.finished: list[Sequence] = []  # since the engine last took them
        self.preemptions: Counter[str] = Counter() if preemptions is None else preemptions
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._streak = 0
        self._swap_outs: list[
            tuple[Swapped, list[int]]
        ] = []  # since the last plan, as are the next
        self._swap_ins: list[tuple[Swapped, list[int]]] = []

    def add(self, seq: Sequence) -> None:
        self.waiting[seq] = None

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan | None:
        """The next step, with its blocks allocated, or None when nothing can be dispatched before
        the next commit.
        """
        decodable = any(seq.can_decode for seq in self.running)
        entries: list[PlanEntry] = []
        phase: Phase = "prefill"
        if not decodable or self._streak < MAX_PREFILL_STREAK:
            entries = self._plan_prefill()
        if not entries and decodable:
            entries, phase = self._plan_decode(), "decode"
        if not entries and self._streak >= MAX_PREFILL_STREAK:
            entries, phase = self._plan_prefill(), "prefill"
        while not entries and self.running and not any(seq.in_flight for seq in self.running):
            # Only beams are left, which wait for others of their search, which wait for blocks.
            self.preempt(next(reversed(self.running)))
            entries, phase = self._plan_prefill(), "prefill"
        if not entries:
            return None
        self._streak = self._streak + 1 if phase == "prefill" else 0
        ins, self._swap_ins = tuple(self._swap_ins), []
        moves = {
            "copies": self.blocks.take_copies(),
            "swap_outs": self.take_swap_outs(),
            "swap_ins": ins,
        }
        return Plan(phase=phase, entries=tuple(entries), **moves)

    def commit(self, plan: Plan, result: StepResult) -> None:
        """Take in what a dispatch computed: append tokens, hash full blocks, end the sequences that
        stop.

        Tokens of a sequence that ended while the dispatch was in flight are surplus: neither
        emitted nor hashed.
        """
        searches: dict[BeamSearch, None] = {}
        drawn = 0
        for row, entry in enumerate(plan.entries):
            seq = entry.seq
            at, drawn = drawn, drawn + (entry.draws > 0)
            seq.in_flight -= 1
            if seq.status is Status.FINISHED:
                continue
            if entry.epoch == seq.epoch:
                seq.pending -= entry.draws
            if plan.phase == "prefill" and seq.params.prompt_logprobs is not None:
                _append_prompt_logprobs(seq, entry, result.prompt_rows(plan, row))
            if not entry.draws:
                if seq.score_only and entry.end == seq.prompt_len:
                    self.finish(seq, "length")
            elif seq.is_beam:
                search = seq.request
                assert isinstance(search, BeamSearch)
                if plan.phase == "decode":
                    self._written(entry, entry.end)
                seq.candidates = result.top(at, search.num_candidates)[1:]
                searches[search] = None
                self.waiting.pop(
                    seq, None
                )  # preempted meanwhile: it waits for its search, not for blocks
            else:
                self._append_drawn(plan, entry, at, result)
        for search in searches:
            if all(seq.candidates is not None for seq in search.sequences):
                self._advance(search)

    def _written(self, entry: PlanEntry, num_tokens: int) -> None:
        """Hash what a decode has filled, if the row still holds the blocks that it was planned
        with.
        """
        if entry.epoch == entry.seq.epoch and num_tokens % self.blocks.block_size == 0:
            self.blocks.close(entry.seq, num_tokens)

    def _append_drawn(self, plan: Plan, entry: PlanEntry, row: int, result: StepResult) -> None:
        """Append the tokens that a row drew, up to the one that ends the sequence: what follows it
        is surplus.
        """
        seq = entry.seq
        for step in range(result.num_drawn[row]):
            if plan.phase == "decode":
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
        elif (
            seq.text is not None
            and (matched := seq.text.push(token, may_stop=may_stop)) is not None
        ):
            self.finish(seq, "stop", stop=matched)
        elif len(seq) >= seq.end:
            self.finish(seq, "length")
        seq.num_committed = len(seq)

    def _advance(self, search: BeamSearch) -> None:
        """One token further: beams that are left behind go, those that go on in several ways are
        forked.
        """
        step = search.choose()
        parents = {parent for parent, *_ in step.continued}
        for seq in search.sequences:
            if seq not in parents and not step.is_last:
                self._leave(seq)
                seq.status = Status.FINISHED
        beams: list[Sequence] = []  # all forks before any of them gets its token
        for parent, *_ in step.continued:
            beams.append(self.fork(parent) if parent in beams else parent)
        for beam, (_, token, logprob) in zip(beams, step.continued, strict=True):
            beam.extend(token, logprob)
            beam.candidates = None
        search.settle(step, beams)  # from here on a failed step goes back to this
        for seq in search.sequences:
            if step.is_last:
                self.finish(seq, "length")
            elif seq.status is Status.WAITING:
                self.waiting[seq] = None

    def fork(self, parent: Sequence) -> Sequence:
        """A second sequence of the same tokens: running on shared blocks where there is a slot,
        else waiting.
        """
        child = parent.copy()
        if parent.status is Status.RUNNING and self._slots:
            self.blocks.fork(parent, child)
            child.num_dispatched, child.fill = parent.num_dispatched, parent.fill
            self._run(child)
        return child

    def finish(
        self,
        seq: Sequence,
        reason: str,
        *,
        stop: int | str | None = None,
        error: Exception | None = None,
    ) -> None:
        """End a sequence from any state; its blocks and slot are free for the next dispatch."""
        self._leave(seq)
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop, error
        seq.status = (
            Status.FINISHED
        )  # last: an interrupt before it undoes the end, one after it does not
        self.finished.append(seq)

    def take_finished(self) -> list[Sequence]:
        finished, self.finished = self.finished, []
        return finished

    def preempt(self, seq: Sequence) -> None:
        """Give up a running sequence's blocks; when next admitted its KV comes back from the host
        or is recomputed.
        """
        written = (
            []
            if self.blocks.is_stale(seq)
            else seq.block_table[: self.blocks.blocks_for(seq.num_dispatched)]
        )
        num_blocks = padded_blocks(len(written)) if written else 0
        if 0 < num_blocks <= self.free_host_blocks and seq.num_dispatched >= self.swap_min_tokens:
            self.free_host_blocks -= num_blocks
            seq.swapped = Swapped(seq.num_dispatched, num_blocks)
            self._swap_outs.append((seq.swapped, list(written)))
        self.preemptions["recomputed" if seq.swapped is None else "swapped"] += 1
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_dispatched = seq.fill = seq.pending = 0
        seq.epoch += 1
        if seq.candidates is None:  # a beam that has them waits for its search, not for blocks
            self.waiting[seq] = None
            self.waiting.move_to_end(seq, last=False)

    def take_swap_outs(self) -> tuple[tuple[Swapped, list[int]], ...]:
        """What must leave the pool before the next step."""
        outs, self._swap_outs = tuple(self._swap_outs), []
        return outs

    def drop_swapped(self, seq: Sequence) -> None:
        """Forget what the host keeps of a sequence."""
        if seq.swapped is not None:
            self.free_host_blocks += seq.swapped.num_blocks
            seq.swapped = None

    def check_integrity(self, plan: Plan | None = None) -> None:
        """Assert the block manager's invariants, that slots and queues agree, and that a plan
        writes its own blocks.
        """
        self.blocks.check_integrity(self.running)
        slots = [seq.slot for seq in self.running]
        assert sorted(slots + self._slots) == list(range(self.max_num_seqs)), (
            "slots leaked or doubled"
        )
        for seq in self.running:
            assert (
                seq.status is Status.RUNNING
                and seq.num_dispatched <= len(seq.block_table) * self.blocks.block_size
            )
            assert seq.swapped is None, f"{seq!r} runs and is on the host too"
            if not seq.is_prefilling and not seq.score_only:
                drawn = seq.candidates is not None
                assert seq.num_dispatched == len(seq) + seq.pending - 1 + drawn, (
                    f"{seq!r}: {seq.num_dispatched}"
                )
        held = 0
        for seq in self.waiting:
            assert (
                seq.status is Status.WAITING
                and not seq.block_table
                and seq.slot == -1
                and seq.candidates is None
            )
            held += seq.swapped.num_blocks if seq.swapped is not None else 0
        assert held <= self.host_blocks - self.free_host_blocks <= self.host_blocks, (
            "host blocks leaked"
        )
        entries = plan.entries if plan is not None else ()
        admitted = {entry.seq: row for row, entry in enumerate(entries) if entry.first}
        for row, entry in enumerate(entries):
            # Only rows admitted further down in the plan may read along: they attend after this one
            # has written.
            others = [
                seq for seq in self.running if seq is not entry.seq and admitted.get(seq, -1) < row
            ]
            held = {block_id for seq in others for block_id in seq.block_table}
            for position in range(entry.start, entry.end):
                block_id = entry.seq.block_table[position // self.blocks.block_size]
                assert block_id not in held, (
                    f"{entry.seq!r} writes block {block_id}, which is another's too"
                )

    def _plan_prefill(self) -> list[PlanEntry]:
        budget = self.max_num_batched_tokens
        chunks: list[list[PlanEntry]] = []  # a chunk of a prompt, then the forks that draw after it
        same: dict[Any, list[PlanEntry]] = {}  # those that end a prompt, by its content
        for seq in (
            self.running
        ):  # at most one is in the middle of its prompt, unless a budget cut two plans
            if budget and seq.is_prefilling:
                chunks.append(self._chunk(seq, budget, same))
                budget -= chunks[-1][0].num_tokens
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = next(iter(self.waiting))
            if (
                seq.in_flight
            ):  # preempted while a step still holds it: its tokens are not all known yet
                break
            if self.blocks.blocks_for(len(seq)) > self.blocks.num_blocks:
                self._fail(seq)
                continue
            # Prompt logprobs need every prompt token computed, so such a request takes no hits.
            matched = [] if seq.params.prompt_logprobs is not None else self.blocks.match(seq)
            leader = self._leader(seq, len(matched), same)
            if leader is None and not budget:
                break
            # A block in hand for every row that runs: an admission that forces a preemption at once
            # is wasted work.
            cost = self.blocks.cost(seq, matched) if leader is None else 0
            if cost + len(self.running) > self.blocks.num_free and self.running:
                break
            if leader is not None:
                leader.append(self._join(seq, leader[0].seq))
                continue
            self._admit(seq, matched)
            chunks.append(self._chunk(seq, budget, same))
            budget -= chunks[-1][0].num_tokens
        return [entry for chunk in chunks for entry in chunk]

    def _leader(
        self, seq: Sequence, num_matched: int, same: dict[Any, list[PlanEntry]]
    ) -> list[PlanEntry] | None:
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

    def _admit(self, seq: Sequence, matched: list[int]) -> None:
        self.blocks.admit(seq, matched)
        seq.num_dispatched = len(matched) * self.blocks.block_size
        self._run(seq)
        seq.fill = len(seq)
        if seq.swapped is not None and seq.swapped.num_tokens > seq.num_dispatched:
            blocks = seq.block_table[
                len(matched) : self.blocks.blocks_for(seq.swapped.num_tokens)
            ].tolist()
            self._swap_ins.append((seq.swapped, [-1] * len(matched) + blocks))
            seq.num_dispatched = seq.swapped.num_tokens
        self.drop_swapped(seq)

    def _run(self, seq: Sequence) -> None:
        self.waiting.pop(seq, None)
        if seq.epoch == 0:
            seq.num_cached = min(seq.num_dispatched, seq.prompt_len)
        seq.slot, seq.is_new = self._slots.pop(), True
        seq.status = Status.RUNNING
        self.running[seq] = None

    def _chunk(
        self, seq: Sequence, budget: int, same: dict[Any, list[PlanEntry]]
    ) -> list[PlanEntry]:
        """The next chunk of a prompt, entered in `same` if it is the last."""
        start = seq.num_dispatched
        num_tokens = min(budget, seq.fill - start)
        assert num_tokens > 0 and start + num_tokens <= len(seq), (
            f"{seq!r}: nothing to compute from {start}"
        )
        draws = start + num_tokens == seq.fill and not seq.score_only
        # Hashed now, not at commit: a later dispatch, or a later entry of this plan, may read what
        # this one writes.
        self.blocks.close(seq, start + num_tokens)
        chunk = [self._dispatched(seq, start, num_tokens, draws=int(draws))]
        if draws:
            same[_content(seq)] = chunk
        return chunk

    def _dispatched(self, seq: Sequence, start: int, num_tokens: int, *, draws: int) -> PlanEntry:
        first, seq.is_new = seq.is_new, False
        seq.num_dispatched = start + num_tokens
        seq.pending += draws
        seq.in_flight += 1
        return PlanEntry(seq, start, num_tokens, draws, first, seq.epoch)

    def _plan_decode(self) -> list[PlanEntry]:
        rows: list[Sequence] = []
        for seq in list(self.running):
            if seq.status is Status.RUNNING and seq.can_decode and self._make_room(seq):
                rows.append(seq)
        # Beams wait for one another after every token.
        most = 1 if any(seq.is_beam for seq in rows) else self.decode_steps
        entries = []
        for seq in rows:
            steps = self._steps_ahead(seq, most)
            entries.append(self._dispatched(seq, seq.num_dispatched, steps, draws=steps))
        return entries

    def _steps_ahead(self, seq: Sequence, most: int) -> int:
        """Tokens that a row can draw in one dispatch, blocks for them allocated: no other row is
        preempted for it.
        """
        start, held = seq.num_dispatched, len(seq.block_table)
        steps = min(most, seq.end - len(seq) - seq.pending)
        if steps > 1:
            room = (held + self.blocks.num_free) * self.blocks.block_size - start
            steps = min(steps, room)
            self.blocks.extend(seq, start + steps)
        return steps

    def _make_room(self, seq: Sequence) -> bool:
        """Give a row the block that its next token is written to, preempting the youngest rows;
        False: it must wait.
        """
        while not self.blocks.is_writable(seq, seq.num_dispatched):
            if self.blocks.num_free:
                self.blocks.make_writable(seq, seq.num_dispatched)
                break
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

    def _fail(self, seq: Sequence) -> None:
        error = self._outgrown(seq)
        for member in seq.request.doomed_with(seq):
            self.finish(member, "error", error=error)

    def _outgrown(self, seq: Sequence) -> CapacityError:
        size = self.blocks.num_blocks * self.blocks.block_size
        return CapacityError(
            f"{len(seq)} tokens and the next one do not fit the KV pool of "
            f"{self.blocks.num_blocks} blocks of "
            f"{self.blocks.block_size} ({size} tokens): raise num_blocks, or lower "
            "max_tokens or max_model_len"
        )

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of its queue and whatever it holds from it."""
        self.waiting.pop(seq, None)
        self.drop_swapped(seq)
        if seq.status is Status.RUNNING:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        del self.running[seq]
        self.blocks.free(seq)
        self._slots.append(seq.slot)
        seq.slot = -1


def _content(seq: Sequence) -> tuple[bytes, tuple[int, ...]]:
    return seq.salt, tuple(seq.token_ids)


def _append_prompt_logprobs(
    seq: Sequence, entry: PlanEntry, rows: list[list[tuple[int, float, int]]]
) -> None:
    """The hidden state at position p scores the prompt token at p + 1; a recomputed chunk adds
    nothing.
    """
    for position, scored in zip(
        range(entry.start + 1, min(entry.end + 1, seq.prompt_len)), rows, strict=False
    ):
        if position == len(seq.prompt_logprobs):
            seq.prompt_logprobs.append(
                scored[: seq.params.prompt_logprobs + 1]
                if seq.params.prompt_logprobs
                else scored[:1]
            )
