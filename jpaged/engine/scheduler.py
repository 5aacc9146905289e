"""Scheduler: which sequences run in the next step. Works on Sequences and block counts; never
touches a tensor.

A step is a prefill (chunks of prompts), a decode (one row a sequence), or with `mixed` both at
once. Rows that wait for the host are left out until their request has steered them.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from jpaged.engine import integrity
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.prefix_cache import Match
from jpaged.engine.drafting import Drafter
from jpaged.engine.plan import Phase, Plan, PlanEntry, dispatch
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Sequence, Status
from jpaged.engine.types import Report

# Rows that decode for each token that a step of runs saves, at most: below that it is the slower.
LEAST_RUN = 4

# How many tokens of each row the next decode may draw, by the rows of each replica.
StepsOf = Callable[[list[list[Sequence]]], int]
Chunk = list[PlanEntry]  # a chunk of a prompt, then the forks that draw after it


class Scheduler:
    """Plans the steps of one replica over two queues, waiting and running. `schedule` has several
    of them plan a step together.

    max_num_seqs: rows of the device's state, so sequences that run at once. max_num_batched_tokens:
    tokens of a prefill step. max_embeddings: of them that can have embeddings in their place.
    decode_steps: tokens of a row in one decode dispatch. mixed: rows that
    decode join the prefill steps. preemptions, states: see Stats. max_loras: adapters that the
    running sequences have at most.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_embeddings: int = 0,
        decode_steps: int = 1,
        mixed: bool = False,
        preemptions: Counter[str] | None = None,
        states: Counter[str] | None = None,
        max_loras: int = 0,
        drafter: Drafter | None = None,
    ):
        self.blocks = blocks
        limits = {"max_num_seqs": max_num_seqs, "max_loras": max_loras}
        self.queues = Queues(
            blocks, **limits, preemptions=preemptions, states=states, drafter=drafter
        )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_embeddings = max_embeddings
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
        return bool([seq for seq in self.queues.running if seq.num_dispatched < seq.fill])

    @property
    def _is_stuck(self) -> bool:
        """Whether rows run of which none can go on: they wait for others of their requests, and
        those for blocks.
        """
        running = self.queues.running
        return bool(running) and not [s for s in running if s.in_flight or s.can_decode]

    def trim(self) -> None:
        """Give back the blocks that the windows of the last plan's sequences have left."""
        self._planned = [seq for seq in self._planned if seq.status is Status.RUNNING]
        for seq in self._planned:
            self.blocks.trim(seq)

    def plan(self, phase: Phase, entries: list[PlanEntry]) -> Plan:
        """Make the plan of these entries, with what must be moved before it."""
        if not entries:
            return Plan(phase=phase, entries=())
        self._planned = [entry.seq for entry in entries] if self.blocks.windowed else []
        adapters = self.queues.adapters
        return Plan(
            phase=phase,
            entries=tuple(entries),
            copies=self.blocks.take_copies(),
            block_stores=self.blocks.take_stores(),
            block_loads=self.blocks.take_loads(),
            loads=adapters.take_loads() if adapters.loads else (),
        )

    def plan_chunks(self, rows: int = 0) -> list[PlanEntry]:
        """Plan chunks of prompts, beside so many rows that decode in the same step."""
        budget = self.max_num_batched_tokens - rows
        entries = PrefillPlanner(self.queues, budget, self.max_embeddings).plan()
        while not entries and self._is_stuck and (self.queues.waiting or self._is_filling):
            self.queues.preempt_idle()
            entries = PrefillPlanner(self.queues, budget, self.max_embeddings).plan()
        return entries

    def report(self) -> Report:
        """Return the blocks that there are, those in use and those that a prompt can be found in,
        in use or not, and how many sequences run and wait.
        """
        blocks = self.blocks
        groups = [
            {
                "window": group.window,
                "per": group.per,
                "block_bytes": group.block_bytes,
                "num_blocks": group.num_blocks,
                "in_use": group.num_used,
                "cached": len(group.cached),
            }
            for group in blocks.groups
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
        by_urgency = self.queues.waiting.by_urgency(self.queues.running)
        ready = [seq for seq in by_urgency if seq.can_decode]
        lacking = self.blocks.unwritable(ready)
        if not lacking:
            return ready
        rows: dict[Sequence, None] = {}
        for seq in ready:  # one that makes room for another runs no more
            if seq.status is Status.RUNNING and (seq not in lacking or self._make_room(seq, rows)):
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
        self.blocks.trim(seq)  # one that was forked is in no plan yet
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


def schedule(replicas: tuple[Scheduler, ...], steps_of: StepsOf | None = None) -> list[Plan]:
    """Plan the next step: a plan for each replica, all of one phase, with their blocks allocated.
    A replica that has nothing to do in it gets a plan without entries. Returns [] when nothing can
    be dispatched before the next commit. steps_of: None is decode_steps of the schedulers.
    """
    for replica in replicas:
        if replica.blocks.windowed:
            replica.trim()
    policy = replicas[0].queues.waiting  # any of them: they step together
    first = policy.phase(
        sum([replica.wants_prefill for replica in replicas]),
        sum([replica.wants_decode for replica in replicas]),
        joins=not [replica for replica in replicas if not replica.can_join],
    )
    for turn in (first, "decode" if first == "prefill" else "prefill"):
        phase, entries = _prefill(replicas) if turn == "prefill" else _decode(replicas, steps_of)
        if any(entries):
            policy.took(turn)
            planned = zip(replicas, entries, strict=True)
            return [replica.plan(phase, mine) for replica, mine in planned]
    return []


def schedule_drafts(replicas: tuple[Scheduler, ...], drafter: Drafter) -> list[Plan]:
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


def should_wait_for_tokens(replicas: tuple[Scheduler, ...]) -> bool:
    """Return whether steps in flight should be committed before the next plan: whether drafts would
    pay now, where all rows do nothing but decode. The drafter learns meanwhile how good they are.
    """
    drafter = replicas[0].queues.drafter
    if drafter is None or drafter.lookup_paused or any(r.wants_prefill for r in replicas):
        return False
    rows = [[seq for seq in replica.queues.running if seq.can_decode] for replica in replicas]
    return bool(drafter.chosen(*rows))


def _prefill(replicas: tuple[Scheduler, ...]) -> tuple[Phase, list[list[PlanEntry]]]:
    """Plan chunks of prompts on each replica, and beside them a token of each row that may join."""
    rows = [r.decoding_rows() if r.can_join and r.wants_decode else [] for r in replicas]
    chunks = [r.plan_chunks(len(seqs)) for r, seqs in zip(replicas, rows, strict=True)]
    if not any(chunks):
        return "prefill", []
    planned = zip(replicas, rows, chunks, strict=True)
    return "prefill", [[*decode_entries(r.blocks, seqs, 1), *more] for r, seqs, more in planned]


def _decode(
    replicas: tuple[Scheduler, ...], steps_of: StepsOf | None
) -> tuple[Phase, list[list[PlanEntry]]]:
    """Plan the next tokens of each row that decodes. Where enough tokens are certain, or are worth
    guessing, rows have runs of them, which a prefill computes.
    """
    rows = [replica.decoding_rows() for replica in replicas]
    if not any(rows):
        return "decode", []
    planned, drafter = list(zip(replicas, rows, strict=True)), replicas[0].queues.drafter
    runs: dict[Sequence, list[int]] = {}
    is_masked = False
    for replica, seqs in planned:
        structured = [seq for seq in seqs if seq.structured is not None]
        if structured:
            is_masked, room = True, replica.most_draws - len(seqs)
            runs |= certain_runs(structured, room, len(seqs))
    guesses = not runs
    if guesses and drafter is not None:
        runs = drafter.runs(*rows)
    if runs:
        return "prefill", [
            run_entries(r.blocks, seqs, runs, guesses=guesses) for r, seqs in planned
        ]
    if is_masked:
        steps = 1  # is drawn under masks, on every replica
    else:
        steps = replicas[0].decode_steps if steps_of is None else steps_of(rows)
    return "decode", [decode_entries(r.blocks, seqs, steps) for r, seqs in planned]


class PrefillPlanner:
    """Plans one prefill. budget: tokens that it may compute at most. embeddings: of them that may
    have embeddings in their place.
    """

    def __init__(self, queues: Queues, budget: int, embeddings: int = 0):
        self.queues = queues
        self.blocks = queues.blocks
        self.budget = budget
        self.embeddings = embeddings
        self.chunks: list[Chunk] = []
        self._last_chunks: dict[bytes, Chunk] = {}  # that end a prompt, by what the prompt holds

    def plan(self) -> list[PlanEntry]:
        """Return chunks of prompts that have begun, then of those that the policy admits."""
        # At most one has begun, unless a budget cut two plans.
        for seq in self.queues.waiting.by_urgency(self.queues.running):
            if self.budget and seq.num_dispatched < seq.fill:
                self._add_chunk(seq)
        while self.queues.free_rows and (seq := self.queues.waiting.next()) is not None:
            if not self._admit(seq):
                break
        return [entry for chunk in self.chunks for entry in chunk]

    def _admit(self, seq: Sequence) -> bool:
        """Admit a waiting sequence, or fail it if it can never run. False: it must wait."""
        if seq.in_flight:  # preempted while a step holds it: its tokens are not all known yet
            return False
        if len(seq) > self.blocks.most_tokens:
            self.queues.fail(seq)
            return True
        if seq.adapter is not None and not self.queues.adapters.has_room(seq.adapter):
            return False
        # What is scored must be computed, so such a request hits no further than where that begins,
        # or than its prompt had been scored when it was preempted.
        match = self.blocks.cache.match(seq, most=seq.next_read)
        # A block in hand for every row that runs: an admission that forces a preemption at once is
        # wasted work.
        reserve = len(self.queues.running)
        if (leader := self._leader(seq, match)) is not None:
            if not self.blocks.has_free(reserve):
                return False
            self.queues.join(seq, leader[0].seq)
            leader.append(dispatch(seq, len(seq), 0, draws=1))
            return True
        if not self.budget:
            return False
        if seq.scoring is not None and seq.scoring.at_once and len(seq) > self.budget:
            return False
        start = match.num_blocks * self.blocks.block_size
        end = min(len(seq), start + self.budget)
        if seq.spans is not None and seq.spans.reach(start, end, self.embeddings) == start:
            return False
        if reserve and not self.blocks.has_room(seq, match, end, reserve=reserve):
            return False
        self.queues.admit(seq, match)
        self._add_chunk(seq, match.num_known * self.blocks.block_size)
        return True

    def _leader(self, seq: Sequence, match: Match) -> Chunk | None:
        """Return the chunk of this plan that ends the very same tokens, if this sequence is to run
        as a fork of that one.

        A fork computes nothing. It shares the open block too, which is copied when written: samples
        of one request are always forks; other requests are where the cached blocks leave more than
        the one token to compute, and the leader began under the weights of now.
        """
        if not self._last_chunks or seq.sampling_params.prompt_logprobs is not None:
            return None
        if seq.scoring is not None:  # it draws nothing
            return None
        leader = self._last_chunks.get(seq.block_bytes(0, len(seq)))
        if leader is None or leader[0].seq.request is seq.request:
            return leader
        cache = self.blocks.cache
        rest = len(seq) - match.num_blocks * self.blocks.block_size
        may_share = cache.is_on and not cache.is_stale(leader[0].seq)
        return leader if may_share and rest > 1 else None

    def _add_chunk(self, seq: Sequence, parting: int = 0) -> None:
        """Plan the next chunk of a prompt; none while a group with a window lacks blocks for it.
        parting: tokens that another sequence is known to have too.
        """
        start = seq.num_dispatched
        end = min(start + self.budget, seq.fill)
        if self.blocks.windowed:
            end = min(end, self.blocks.reach(seq))
        assert start < seq.fill <= len(seq), f"{seq!r}: nothing to compute from {start}"
        if seq.spans is not None:
            end = seq.spans.reach(start, end, self.embeddings)
        if end <= start:
            return
        if not self.blocks.can_rewind:
            end = self.blocks.stop_before(start, end, parting, is_last=end == len(seq))
        if seq.spans is not None:
            self.embeddings -= sum(piece.size for piece in seq.spans.pieces(start, end))
        if self.blocks.windowed:  # else it has them all since its admission
            self.blocks.extend(seq, end)
        self.blocks.close_ahead(seq, end)
        is_last = end == seq.fill and seq.scoring is None
        chunk = [dispatch(seq, start, end - start, draws=int(is_last))]
        self.chunks.append(chunk)
        self.budget -= end - start
        if is_last:
            self._last_chunks[seq.block_bytes(0, len(seq))] = chunk


def decode_entries(blocks: BlockManager, rows: list[Sequence], most: int) -> list[PlanEntry]:
    """Return an entry for each row, of at most `most` tokens and no more than it has left. Each row
    has the block that its first token is written to.
    """
    # A row that waits for the host, or for its mask, does so after every token.
    if most > 1 and any(seq.waits_for_host or seq.structured is not None for seq in rows):
        most = 1
    entries = []
    for seq in rows:
        start, steps = seq.num_dispatched, 1 if most == 1 else _steps_ahead(blocks, seq, most)
        is_new = seq.dispatch(start + steps, steps)
        entries.append(PlanEntry(seq, start, steps, steps, True, is_new, seq.epoch))
    return entries


def certain_runs(structured: list[Sequence], room: int, num_rows: int) -> dict[Sequence, list[int]]:
    """Return the certain tokens of rows that have several, as far as `room` holds those beyond one
    a row; {} where they are too few to be worth the other kind of step for num_rows rows.
    """
    runs, left = dict[Sequence, list[int]](), room
    for seq in structured:
        if left > 0 and len(run := seq.forced[: left + 1]) > 1:
            runs[seq] = run
            left -= len(run) - 1
    return runs if (room - left) * LEAST_RUN >= num_rows else {}


def run_entries(
    blocks: BlockManager,
    rows: list[Sequence],
    runs: dict[Sequence, list[int]],
    *,
    guesses: bool,
) -> list[PlanEntry]:
    """Return an entry for each row: its next token, or its run with a draw after each token of it.
    guesses: all but the first token of a run may be wrong.
    """
    entries = []
    for seq in rows:
        # Of guesses, a state is written after every block; of what is certain, after the last.
        most = len(runs.get(seq, ())) or 1
        steps = _steps_ahead(blocks, seq, most, one_by_one=guesses)
        run = tuple(runs[seq][:steps]) if steps > 1 else ()
        start, guessed = seq.num_dispatched, guesses and steps > 1
        entry = dispatch(seq, start, steps, draws=steps, decodes=True, run=run, guesses=guessed)
        entries.append(entry)
    return entries


def draft_entries(blocks: BlockManager, counts: dict[Sequence, int]) -> list[PlanEntry]:
    """Return an entry for each row after whose last token a draft model guesses. counts: how many
    tokens. Rows get the blocks that are written on the way; the sequences do not count the tokens.
    """
    entries = []
    for seq, most in counts.items():
        count = _steps_ahead(blocks, seq, most)
        at = seq.num_dispatched
        entries.append(PlanEntry(seq, at, count, count, True, False, seq.epoch))
    return entries


def _steps_ahead(blocks: BlockManager, seq: Sequence, most: int, *, one_by_one: bool = True) -> int:
    """Return how many tokens a row can draw in one dispatch, blocks for them allocated: no other
    row is preempted for it. one_by_one: they are computed in a step each, not side by side.
    """
    start = seq.num_dispatched
    steps = min(most, seq.end - len(seq) - seq.pending)
    if steps > 1:
        steps = min(steps, blocks.reach(seq, one_by_one=one_by_one) - start)
        blocks.extend(seq, start + steps, one_by_one=one_by_one)
    return steps
