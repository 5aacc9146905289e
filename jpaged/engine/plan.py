"""Plan: which sequences run in the next step and over which tokens; StepResult: what came of it."""

import dataclasses
from typing import Any, Literal

import numpy as np

from jpaged.engine.adapters import Loads
from jpaged.engine.cache.kinds import Copies
from jpaged.engine.cache.store import Move
from jpaged.engine.generated import Kept
from jpaged.engine.sequence import Sequence

Phase = Literal["prefill", "decode", "draft"]


@dataclasses.dataclass(slots=True)
class PlanEntry:
    """One row of a step: compute the KV of tokens [start, start + num_tokens) of a sequence.

    No tokens at all make a fork: it draws from what the row before it has computed. draws: tokens
    that the step draws: one after the last chunk of a prompt, and in decode one after each of its
    tokens. decodes: its tokens are drawn ones, the last of which may be known to the device alone.
    is_new: the row was just taken (its state on the device is another's). epoch: the sequence's
    when planned; a later one means that it was preempted meanwhile. run: the tokens of a decode, if
    all of them are known before they are drawn: then they are computed side by side. guesses: those
    after the first may be wrong.

    Nothing changes an entry. It is not frozen, since thousands are made for every step, and that
    would take three times as long.
    """

    seq: Sequence
    start: int
    num_tokens: int
    draws: int
    decodes: bool
    is_new: bool
    epoch: int
    run: tuple[int, ...] = ()
    guesses: bool = False

    @property
    def num_draws(self) -> int:
        """The rows of the draw that it takes; a decode of several steps takes one."""
        return len(self.run) or int(self.draws > 0)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def scored(self) -> range:
        """Its positions after which a token of the prompt is scored."""
        if self.decodes or self.seq.sampling_params.prompt_logprobs is None:
            return range(0)
        return self.seq.positions_read(self.start, self.end)


def dispatch(
    seq: Sequence,
    start: int,
    num_tokens: int,
    *,
    draws: int,
    decodes: bool = False,
    run: tuple[int, ...] = (),
    guesses: bool = False,
) -> PlanEntry:
    """Return an entry of a plan that goes out: the sequence counts it as dispatched."""
    is_new = seq.dispatch(start + num_tokens, draws)
    return PlanEntry(seq, start, num_tokens, draws, decodes, is_new, seq.epoch, run, guesses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One dispatch. prefill: chunks of prompts, and with `mixed` a token each of rows that decode,
    or nothing but rows that decode, some of which have runs;
    decode: as many tokens of each row as it has steps left; draft: what a draft model guesses that
    come after each row's last one. Nothing is committed of that, and no sequence counts it.

    Before it, in this order: blocks in `block_stores` are read from the pools for the store, those
    in `block_loads` are written from it into others, `loads` of adapters are written into their
    slots, and `copies` (source, target) are made within each group's pool.

    num_tokens: that it computes. num_draws: rows of the draw. verifies: whether any row guesses.
    """

    phase: Phase
    entries: tuple[PlanEntry, ...]
    copies: Copies = ()
    block_stores: tuple[Move, ...] = ()
    block_loads: tuple[Move, ...] = ()
    loads: Loads = ()
    num_tokens: int = dataclasses.field(init=False)
    num_draws: int = dataclasses.field(init=False)
    verifies: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        num_tokens, num_draws, verifies = 0, 0, False
        for entry in self.entries:
            num_tokens += entry.num_tokens
            num_draws += len(entry.run) or entry.draws > 0
            verifies = verifies or entry.guesses
        object.__setattr__(self, "num_tokens", num_tokens)
        object.__setattr__(self, "num_draws", num_draws)
        object.__setattr__(self, "verifies", verifies)


def joined(plans: list[Plan]) -> Plan:
    """Return what several replicas do in one step, as one plan."""
    return Plan(
        phase=plans[0].phase,
        entries=tuple(entry for plan in plans for entry in plan.entries),
        copies=tuple(copies for plan in plans for copies in plan.copies),
    )


SCORES = ("prompt_logprobs", "prompt_ranks", "prompt_top_ids", "prompt_top_logprobs")
SCORES += ("prompt_candidate_logprobs", "prompt_entropies")  # fields of StepResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step computed. Rows are those that draw, in the order of the plan; arrays that a
    bucket lacks are None.

    weight_version: of the weights that drew. tokens, logprobs: a list a row, of `steps` entries, of
    which the first num_drawn[row] count. prompt_logprobs and its neighbours: a row for each
    position that an entry of the plan scores, one entry after the other. states: an array of the
    device with the hidden state of each packed token, and its first row that is this replica's.
    """

    weight_version: int
    num_drawn: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    allowed_logprobs: np.ndarray | None = None
    kept_ids: np.ndarray | None = None
    kept_logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    prompt_ranks: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    prompt_top_logprobs: np.ndarray | None = None
    prompt_candidate_logprobs: np.ndarray | None = None
    prompt_entropies: np.ndarray | None = None
    states: tuple[Any, int] | None = None

    def top(self, row: int, count: int, step: int = 0) -> list[tuple[int, float, int]]:
        """Return (token, logprob, rank) of a row's sampled token, then of its `count` most likely
        ones.
        """
        assert self.ranks is not None and self.top_ids is not None and self.top_logprobs is not None
        sampled = (self.tokens[row][step], self.logprobs[row][step], int(self.ranks[step, row]))
        ids = self.top_ids[step, row, :count].tolist()
        logprobs = self.top_logprobs[step, row, :count].tolist()
        return [sampled, *zip(ids, logprobs, range(1, count + 1), strict=False)]

    def allowed(self, row: int, step: int = 0) -> float:
        """Return the logprob of all that a row's mask allowed."""
        assert self.allowed_logprobs is not None
        return float(self.allowed_logprobs[step, row])

    def kept(self, row: int, most: int, step: int = 0) -> Kept:
        """Return what a row's token was drawn from, of a request whose top_k is `most`."""
        assert self.kept_ids is not None and self.kept_logprobs is not None
        # A copy: the buffer of the step is used again.
        return self.kept_ids[step, row, :most].copy(), float(self.kept_logprobs[step, row])

    def prompt_rows(self, entry: PlanEntry, first: int) -> list[list[tuple[int, float, int]]]:
        """Return for each position that an entry scores (token, logprob, rank) of the next prompt
        token, then of the most likely ones. first: the row of the first of them.
        """
        assert self.prompt_logprobs is not None and self.prompt_ranks is not None
        assert self.prompt_top_ids is not None and self.prompt_top_logprobs is not None
        positions, seq = entry.scored, entry.seq
        count = seq.sampling_params.prompt_logprobs or 0
        rows = slice(first, first + len(positions))
        targets = seq.token_ids[positions.start + 1 : positions.start + 1 + len(positions)]
        # As lists at once: a number at a time out of an array takes ten times as long.
        scored = zip(
            zip(
                targets,
                self.prompt_logprobs[rows].tolist(),
                self.prompt_ranks[rows].tolist(),
                strict=True,
            ),
            self.prompt_top_ids[rows, :count].tolist(),
            self.prompt_top_logprobs[rows, :count].tolist(),
            strict=True,
        )
        ranks = range(1, count + 1)
        return [
            [actual, *zip(ids, logprobs, ranks, strict=False)] for actual, ids, logprobs in scored
        ]

    @property
    def prompt_columns(self) -> dict[str, np.ndarray]:
        """What it has of the scores of prompts, by name; rows as of `prompt_rows`."""
        values = {n: getattr(self, n) for n in SCORES}
        return {name: value for name, value in values.items() if value is not None}
