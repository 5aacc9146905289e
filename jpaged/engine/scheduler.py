"""Scheduler: which sequences run in the next step. Works on Sequences and block counts; never
touches a tensor.

A step is a prefill (chunks of prompts), a decode (one row a sequence), or with `mixed` both at
once. Rows that wait for the host are left out until their request has steered them.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any

from jpaged.engine import commit, integrity
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.decode import (
    certain_runs,
    decode_entries,
    draft_entries,
    run_entries,
)
from jpaged.engine.drafting import Drafter
from jpaged.engine.plan import Phase, Plan, PlanEntry, StepResult
from jpaged.engine.prefill import PrefillPlanner
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Request, Sequence, Status


class Scheduler:
    """Plans the steps of one replica over two queues, waiting and running, and takes in what they
    computed. `schedule` has several of them plan a step together.

    max_num_seqs: rows of the device's state, so sequences that run at once. max_num_batched_tokens:
    tokens of a prefill step. decode_steps: tokens of a row in one decode dispatch. mixed: rows that
    decode join the prefill steps. preemptions: see Stats. max_loras: adapters that the running
    sequences have at most.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_steps: int = 1,
        mixed: bool = False,
        preemptions: Counter[str] | None = None,
        max_loras: int = 0,
        drafter: Drafter | None = None,
    ):
        self.blocks = blocks
        limits = {"max_num_seqs": max_num_seqs, "max_loras": max_loras}
        self.queues = Queues(blocks, **limits, preemptions=preemptions, drafter=drafter)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode_steps = decode_steps
        self.mixed = mixed
        self._planned: list[Sequence] = []  # in the last plan, where a window may leave blocks

    @property
    def wants_prefill(self) -> bool:
        """Whether there are prompts that a prefill may compute."""
        queues = self.queues
        if queues.free_rows and queues.waiting.next() is not None:
            return True
        # Where rows are stuck one that is preempted makes room, though nobody may run before.
        return self._is_filling or (bool(queues.waiting) and self._is_stuck)

    @property
    def wants_decode(self) -> bool:
        """Whether any row can go on from its last token."""
        return any(seq.can_decode for seq in self.queues.running)

    @property
    def can_join(self) -> bool:
        """Whether rows that decode may join a prefill: with `mixed`, where they leave it room."""
        return self.mixed and len(self.queues.running) < self.max_num_batched_tokens

    @property
    def _is_filling(self) -> bool:
        """Whether a row has a prompt of which chunks are left."""
        return any(seq.is_prefilling for seq in self.queues.running)

    @property
    def _is_stuck(self) -> bool:
        """Whether rows run of which none can go on: they wait for others of their requests, and
        those for blocks.
        """
        running = self.queues.running
        return bool(running) and not any(seq.in_flight or seq.can_decode for seq in running)

    def trim(self) -> None:
        """Give back the blocks that the windows of the last plan's sequences have left."""
        for seq in self._planned:
            if seq.status is Status.RUNNING:
                self.blocks.trim(seq)

    def plan(self, phase: Phase, entries: list[PlanEntry]) -> Plan:
        """Make the plan of these entries, with what must be moved before it."""
        if not entries:
            return Plan(phase=phase, entries=())
        self._planned = [entry.seq for entry in entries] if self.blocks.windowed else []
        return Plan(
            phase=phase,
            entries=tuple(entries),
            copies=self.blocks.take_copies(),
            block_stores=self.blocks.take_stores(),
            block_loads=self.blocks.take_loads(),
            loads=self.queues.adapters.take_loads(),
        )

    def plan_chunks(self, rows: int = 0) -> list[PlanEntry]:
        """Plan chunks of prompts, beside so many rows that decode in the same step."""
        budget = self.max_num_batched_tokens - rows
        entries = PrefillPlanner(self.queues, budget).plan()
        while not entries and self._is_stuck and (self.queues.waiting or self._is_filling):
            self.queues.preempt_idle()
            entries = PrefillPlanner(self.queues, budget).plan()
        return entries

    def commit(self, plan: Plan, result: StepResult) -> list[Request]:
        """Take in what a dispatch computed; returns the requests that are to steer their rows."""
        return commit.commit(self.queues, plan, result)

    def report(self) -> dict[str, Any]:
        """Return the blocks that there are and those in use, and how many sequences run and
        wait.
        """
        blocks = self.blocks
        groups = [
            {"window": g.window, "num_blocks": g.num_blocks, "in_use": g.num_used}
            for g in blocks.groups
        ]
        return {
            "sequences_running": len(self.queues.running),
            "sequences_waiting": len(self.queues.waiting),
            "blocks_in_use": blocks.num_used,
            "num_blocks": blocks.num_blocks,
            "kv_groups": groups,
        }

    def check_integrity(self, plan: Plan | None = None) -> None:
        """Assert what must hold between steps, and of a plan before it is dispatched."""
        integrity.check(self.queues, plan)

    def decoding_rows(self) -> list[Sequence]:
        """Return the rows that decode next; each holds the block that its token is written to."""
        rows: dict[Sequence, None] = {}
        for seq in list(self.queues.waiting.by_urgency(self.queues.running)):
            if seq.status is not Status.RUNNING or not seq.can_decode:
                continue
            if self.blocks.make_writable(seq, seq.num_dispatched) or self._make_room(seq, rows):
                rows[seq] = None
        return list(rows)

    @property
    def most_draws(self) -> int:
        """How many tokens of rows a step can draw."""
        return min(self.max_num_batched_tokens, self.queues.max_num_seqs)

    def _make_room(self, seq: Sequence, planned: Mapping[Sequence, None]) -> bool:
        """Give a row the block that its next token is written to, preempting rows as the policy
        says, but none of those planned: a copy of a block may be pending for them. False: it must
        wait.
        """
        running = self.queues.running
        while not self.blocks.make_writable(seq, seq.num_dispatched):
            if len(running) > 1:
                self.queues.preempt_victim({s: None for s in running if s not in planned})
                if seq.status is not Status.RUNNING:
                    return False
            else:
                if not seq.in_flight:  # a step in flight may yet end it
                    self.queues.fail(seq)
                return False
        return True


def schedule(replicas: List[Scheduler]) -> list[Plan]:
    """Plan the next step: a plan for each replica, all of one phase, with their blocks allocated.
    A replica that has nothing to do in it gets a plan without entries. Returns [] when nothing can
    be dispatched before the next commit.
    """
    for replica in replicas:
        replica.trim()
    policy = replicas[0].queues.waiting  # any of them: they step together
    first = policy.phase(
        sum([replica.wants_prefill for replica in replicas]),
        sum([replica.wants_decode for replica in replicas]),
        joins=all(replica.can_join for replica in replicas),
    )
    for turn in (first, "decode" if first == "prefill" else "prefill"):
        phase, entries = _prefill(replicas) if turn == "prefill" else _decode(replicas)
        if any(entries):
            policy.took(turn)
            planned = zip(replicas, entries, strict=True)
            return [replica.plan(phase, own) for replica, own in planned]
    return []


def schedule_drafts(replicas: List[Scheduler], drafter: Drafter) -> list[Plan]:
    """Plan what a draft model guesses before the next step, while nothing is in flight. Returns []
    where nothing is worth it.
    """
    if not should_wait_for_tokens(replicas):
        return []
    for replica in replicas:
        replica.trim()
    rows = [replica.decoding_rows() for replica in replicas]
    drafts, plans = drafter.chosen(*rows), list[Plan]()
    for replica, decoding in zip(replicas, rows, strict=True):
        counts = {seq: len(drafts[seq]) for seq in decoding if seq in drafts}
        plans.append(replica.plan("draft", draft_entries(replica.blocks, counts)))
    return plans if any(plan.entries for plan in plans) else []


def should_wait_for_tokens(replicas: List[Scheduler]) -> bool:
    """Return whether steps in flight should be committed before the next plan: whether drafts would
    pay now, where all rows do nothing but decode. The drafter learns meanwhile how good they are.
    """
    drafter = replicas[0].queues.drafter
    if drafter is None or drafter.lookup_paused or any(r.wants_prefill for r in replicas):
        return False
    rows = [[seq for seq in replica.queues.running if seq.can_decode] for replica in replicas]
    return bool(drafter.chosen(*rows))


def _prefill(replicas: List[Scheduler]) -> tuple[Phase, list[list[PlanEntry]]]:
    """Plan chunks of prompts on each replica, and beside them a token of each row that may join."""
    rows = [r.decoding_rows() if r.can_join and r.wants_decode else [] for r in replicas]
    chunks = [r.plan_chunks(len(own)) for r, own in zip(replicas, rows, strict=True)]
    if not any(chunks):
        return "prefill", []
    planned = zip(replicas, rows, chunks, strict=True)
    return "prefill", [[*decode_entries(r.blocks, own, 1), *more] for r, own, more in planned]


def _decode(replicas: List[Scheduler]) -> tuple[Phase, list[list[PlanEntry]]]:
    """Plan the next tokens of each row that decodes. Where enough tokens are certain, or are worth
    guessing, rows have runs of them, which a prefill computes.
    """
    rows = [replica.decoding_rows() for replica in replicas]
    if not any(rows):
        return "decode", []
    planned, drafter = list(zip(replicas, rows, strict=True)), replicas[0].queues.drafter
    runs: dict[Sequence, list[int]] = {}
    for replica, own in planned:
        runs |= certain_runs(own, replica.most_draws - len(own))
    guesses = not runs
    if guesses and drafter is not None:
        runs = drafter.runs(*rows)
    if runs:
        return "prefill", [run_entries(r.blocks, own, runs, guesses=guesses) for r, own in planned]
    steps = replicas[0].decode_steps
    if steps > 1 and any(seq.structured is not None for own in rows for seq in own):
        steps = 1  # one step is drawn under masks, on every replica
    return "decode", [decode_entries(r.blocks, own, steps) for r, own in planned]
