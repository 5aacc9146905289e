"""Scheduler: which sequences run in the next step. Works on Sequences and block counts; never
touches a tensor.

A step is a prefill (chunks of prompts), a decode (one row a sequence), or with `mixed` both at
once. Rows that wait for the host are left out until their request has steered them.
"""

from collections import Counter

from jpaged.engine import commit, integrity
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.decode import certain_runs, decode_entries, draft_entries, run_entries
from jpaged.engine.drafting import Drafter, wants_tokens
from jpaged.engine.plan import Phase, Plan, PlanEntry, StepResult
from jpaged.engine.prefill import PrefillPlanner
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Request, Sequence, Status
from jpaged.engine.swapping import Swapping

# Prefill steps in a row while rows wait to decode: bounds the gap between two of their tokens.
MAX_PREFILL_STREAK = 4


class Scheduler:
    """Plans steps over two queues, waiting and running, and takes in what they computed.

    max_num_seqs: rows of the device's state, so sequences that run at once. max_num_batched_tokens:
    tokens of a prefill step. decode_steps: tokens of a row in one decode dispatch. mixed: rows that
    decode join the prefill steps. host_bytes: KV of preempted sequences that the host may keep;
    below swap_min_tokens it is computed again instead. preemptions: counts them as "swapped" and
    "recomputed". max_loras: adapters that the running sequences have at most.
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
        max_loras: int = 0,
        drafter: Drafter | None = None,
    ):
        self.blocks = blocks
        self.swapping = Swapping(blocks, host_bytes=host_bytes, min_tokens=swap_min_tokens)
        limits = {"max_num_seqs": max_num_seqs, "max_loras": max_loras}
        self.queues = Queues(
            blocks, self.swapping, **limits, preemptions=preemptions, drafter=drafter
        )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode_steps = decode_steps
        self.mixed = mixed
        self._streak = 0
        self._planned: list[Sequence] = []  # in the last plan, where a window may leave blocks

    def schedule(self) -> Plan | None:
        """The next step, with its blocks allocated, or None when nothing can be dispatched before
        the next commit.
        """
        self._trim()
        phase, entries = self._choose()
        while not entries and self._is_stuck():
            self.queues.preempt_idle()
            phase, entries = "prefill", self._plan_prefill(self.max_num_batched_tokens)
        if entries:
            prefills = any(not entry.decodes for entry in entries)
            self._streak = self._streak + 1 if prefills else 0
        return self._made(phase, entries)

    def schedule_drafts(self) -> Plan | None:
        """What a draft model is to guess before the next step, of which nothing is in flight; None
        where there is none, or nothing that is worth it.
        """
        drafter = self.queues.drafter
        if drafter is None or not drafter.has_model or not wants_tokens(self.queues):
            return None
        self._trim()
        counts = {seq: len(d) for seq, d in drafter.chosen(self._decoding_rows()).items()}
        return self._made("draft", draft_entries(self.blocks, counts))

    def schedule_for(self, phase: Phase, decode_steps: int) -> Plan | None:
        """The next step of this phase, which others have chosen; None where it has nothing in it.

        They see to it that no phase waits too long. With `mixed` rows decode in either.
        decode_steps: at most, since one that draws under masks somewhere has one everywhere.
        """
        self._trim()
        budget, entries = self.max_num_batched_tokens, list[PlanEntry]()
        if phase == "decode":
            entries = decode_entries(self.blocks, self._decoding_rows(), decode_steps)
        elif self.mixed and self.can_decode and len(self.queues.running) < budget:
            rows = self._decoding_rows()
            chunks = self._plan_prefill(budget - len(rows))
            entries = [*decode_entries(self.blocks, rows, 1), *chunks]
        else:
            entries = self._plan_prefill(budget)
            while not entries and self._is_stuck() and not self.can_decode:
                self.queues.preempt_idle()
                entries = self._plan_prefill(budget)
        return self._made(phase, entries)

    def schedule_runs(self, runs: dict[Sequence, list[int]]) -> Plan | None:
        """A token of each row that decodes, or its run of guesses, which others have chosen."""
        self._trim()
        entries = run_entries(self.blocks, self._decoding_rows(), runs, guesses=True)
        return self._made("prefill", entries)

    @property
    def can_prefill(self) -> bool:
        """Whether there are prompts that a prefill may take up."""
        queues = self.queues
        has_room = queues.free_rows or (self._is_stuck() and not self.can_decode)
        if has_room and queues.waiting.next() is not None:
            return True
        return any(seq.is_prefilling for seq in queues.running)

    @property
    def can_decode(self) -> bool:
        return any(seq.can_decode for seq in self.queues.running)

    def _is_stuck(self) -> bool:
        """Where nothing can be planned: only rows are left that wait for others, which wait for
        blocks.
        """
        running = self.queues.running
        return bool(running) and not any(seq.in_flight for seq in running)

    def _trim(self) -> None:
        for seq in self._planned:
            if seq.status is Status.RUNNING:
                self.blocks.trim(seq)

    def _made(self, phase: Phase, entries: list[PlanEntry]) -> Plan | None:
        """The plan of entries, and what must be moved before it; None where there are none."""
        if not entries:
            return None
        self._planned = [entry.seq for entry in entries] if self.blocks.windowed else []
        return Plan(
            phase=phase,
            entries=tuple(entries),
            copies=self.blocks.take_copies(),
            swap_outs=self.swapping.take_outs(),
            swap_ins=self.swapping.take_ins(),
            loads=self.queues.adapters.take_loads(),
        )

    def commit(self, plan: Plan, result: StepResult) -> list[Request]:
        """Take in what a dispatch computed; returns the requests that are to steer their rows."""
        return commit.commit(self.queues, plan, result)

    def check_integrity(self, plan: Plan | None = None) -> None:
        """Assert what must hold between steps, and of a plan before it is dispatched."""
        integrity.check(self.queues, plan)

    def _choose(self) -> tuple[Phase, list[PlanEntry]]:
        """Prefill before decode, but no more than a few times while rows wait to decode."""
        decodable, budget = self.can_decode, self.max_num_batched_tokens
        if self.mixed and decodable and len(self.queues.running) < budget:
            return self._plan_mixed()
        entries: list[PlanEntry] = []
        if not decodable or self._streak < MAX_PREFILL_STREAK:
            entries = self._plan_prefill(budget)
        if not entries and decodable:
            rows = self._decoding_rows()
            if rows:
                return self._plan_decode(rows)
        if not entries and self._streak >= MAX_PREFILL_STREAK:
            entries = self._plan_prefill(budget)
        return "prefill", entries

    def _plan_mixed(self) -> tuple[Phase, list[PlanEntry]]:
        """A token of each row that decodes, and chunks of prompts in what they leave."""
        rows = self._decoding_rows()
        chunks = self._plan_prefill(self.max_num_batched_tokens - len(rows))
        if not chunks:
            return self._plan_decode(rows)
        return "prefill", [*decode_entries(self.blocks, rows, 1), *chunks]

    def _plan_prefill(self, budget: int) -> list[PlanEntry]:
        return PrefillPlanner(self.queues, budget).plan()

    def _decoding_rows(self) -> list[Sequence]:
        """Rows that decode next, each with the block that its token is written to."""
        rows: list[Sequence] = []
        for seq in list(self.queues.running):
            if seq.status is not Status.RUNNING or not seq.can_decode:
                continue
            if self.blocks.make_writable(seq, seq.num_dispatched) or self._make_room(seq):
                rows.append(seq)
        return rows

    def _plan_decode(self, rows: list[Sequence]) -> tuple[Phase, list[PlanEntry]]:
        """A step of each row, or where many tokens of them are certain, those side by side, or
        those that it is worth to guess.
        """
        most = min(self.max_num_batched_tokens, self.queues.max_num_seqs)
        runs, drafter = certain_runs(rows, most - len(rows)), self.queues.drafter
        guesses = not runs
        if drafter is not None and guesses:
            runs = drafter.runs(rows)
        if not runs:
            return "decode", decode_entries(self.blocks, rows, self.decode_steps)
        return "prefill", run_entries(self.blocks, rows, runs, guesses=guesses)

    def _make_room(self, seq: Sequence) -> bool:
        """Give a row the block that its next token is written to, preempting rows as the policy
        says; False: it must wait.
        """
        running = self.queues.running
        while not self.blocks.make_writable(seq, seq.num_dispatched):
            if len(running) > 1:
                self.queues.preempt_victim()
                if seq.status is not Status.RUNNING:
                    return False
            else:
                if not seq.in_flight:  # a step in flight may yet end it
                    self.queues.fail(seq)
                return False
        return True
