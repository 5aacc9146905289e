"""Drafts: tokens that a row may well go on with, looked up in its own text (arXiv:2304.04487) or
drawn by a smaller model (arXiv:2211.17192), and when to try them.

A row's tokens do not depend on drafts: what follows each of them is drawn as ever, and they count
up to the first that was drawn otherwise. So a draft can only cost or save time, and both are
measured: how often guesses come true, whether they are tried or not, and what steps with and
without take.
"""

import itertools
import math
import weakref
from collections import deque
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig, Speculative
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.sequence import Sequence

if TYPE_CHECKING:
    from jpaged.engine.queues import Queues

LENGTHS = (4, 3, 2)  # of the ending that is looked up, longest first
FADES = 0.9  # weight of the past against one more guess
LEAST = 0.4  # share of right guesses below which a row drafts nothing
REST = 4  # tokens of such a row after which it is looked up whether guesses would come true now
WORTH = 0.25  # chance below which a token is left off the end of a draft
SAMPLES, TRIES = 8, 3  # latest times of a step that count; those that are needed first
ON_DEVICE = -1  # in the place of a token that a model is to guess
AGAIN, THROUGH = 1024, 6  # of so many refusals some are let through: times change
PAUSE = 64  # tokens of a row after which a model drafts for it again


class _Row:
    """What is known of one sequence. right, tried: of its guesses, faded. guess: the position and
    the token of one that nobody has checked yet. last: the length at which it drafted last.
    """

    def __init__(self, rate: float = 0.5) -> None:
        self.endings: dict[tuple[int, ...], int] = {}
        self.num_indexed = self.last = 0
        self.right, self.tried = 2 * rate, 2.0
        self.guess: tuple[int, int] | None = None

    @property
    def rate(self) -> float:
        """The share of guesses that come true."""
        return self.right / self.tried

    def learn(self, right: int, tried: int) -> None:
        fades = FADES**tried
        self.right, self.tried = fades * self.right + right, fades * self.tried + tried

    def look_up(self, tokens: list[int], most: int) -> list[int]:
        """What followed an earlier occurrence of the last tokens; the guess that this makes."""
        if self.guess is not None and len(tokens) > self.guess[0]:
            self.learn(int(tokens[self.guess[0]] == self.guess[1]), 1)
        if self.num_indexed > len(tokens):  # after a failed step
            self.endings, self.num_indexed = {}, 0
        for end in range(max(self.num_indexed, LENGTHS[-1]), len(tokens)):
            for length in LENGTHS:
                if end >= length:
                    self.endings[tuple(tokens[end - length : end])] = end
        self.num_indexed = len(tokens)
        places = (self.endings.get(tuple(tokens[-length:])) for length in LENGTHS)
        at = next((at for at in places if at is not None), None)
        found = [] if at is None else tokens[at : at + most]
        self.guess = (len(tokens), found[0]) if found else None
        return found


class Costs:
    """Seconds that steps took lately, by kind and by the power of two of their tokens: of steps
    that verify, of plain ones that ran ahead, dispatched before the last was committed, and of the
    others, whose device has waited for the host: as the first after a draft does.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], deque[float]] = {}
        self._refused = THROUGH
        self._verified = 0  # steps since a plain one ran ahead
        self._runs_ahead = False  # now

    def observe(self, plan: Plan, seconds: float, ran_ahead: bool = False) -> None:
        """Take in a step, of those that decode alone, without tokens that are certain."""
        if not all(e.decodes and e.guesses >= bool(e.run) for e in plan.entries):
            return
        kind = "verifies" if plan.verifies else "ahead" if ran_ahead else "alone"
        steps = 1 if plan.verifies else max(entry.draws for entry in plan.entries)
        size = plan.num_tokens // steps
        kept = self._seconds.setdefault(_key(kind, size), deque(maxlen=SAMPLES))
        kept.append(seconds / steps)
        self._runs_ahead = kind == "ahead"
        self._verified = 0 if self._runs_ahead else self._verified + plan.verifies
        if self._verified >= AGAIN:  # times change: plain steps are measured anew
            self._seconds = {key: x for key, x in self._seconds.items() if key[0] == "verifies"}
            self._verified = 0

    def pays(self, rows: int, drafted: int, expected: float) -> bool:
        """Whether to verify so many tokens of so many rows, of which so many are right."""
        ahead, alone = (self._seconds.get(_key(kind, rows), ()) for kind in ("ahead", "alone"))
        plain = ahead if len(ahead) >= TRIES else alone  # of an engine that never runs ahead
        checked = self._seconds.get(_key("verifies", rows + drafted), ())
        if len(plain) < TRIES or len(checked) < TRIES:
            return len(plain) >= TRIES
        # The middle ones: some had a compile or another program in the way. Of two plain steps that
        # are waited for together the first takes what both do: all but the slowest count too.
        least = min(median(plain), fmean(sorted(plain)[:-1]))
        taken = median(checked)
        if self._runs_ahead and alone:  # the plain step after this one will not
            taken += max(median(alone) - least, 0.0)
        if (rows + expected) * least > rows * taken:
            return True
        self._refused = (self._refused + 1) % AGAIN
        return self._refused < THROUGH


def _key(kind: str, size: int) -> tuple[str, int]:
    return kind, (size - 1).bit_length()


class Drafter:
    """The drafts of one engine, or of those of Replicas together, whose steps are one dispatch.
    most: tokens of a step of each, so of its rows and drafts together.

    drafted, accepted: tokens that were tried, and those that were right.
    """

    has_model = False  # whether a step of the device makes them

    def __init__(self, asked: Speculative, most: int):
        self.asked, self.most = asked, most
        self.costs = Costs()
        self.drafted = self.accepted = self.verify_steps = 0
        self._rows: weakref.WeakKeyDictionary[Sequence, _Row] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: Any) -> "Drafter":
        return self  # a snapshot is of sequences, not of what was learnt

    def wants_tokens(self, *replicas: list[Sequence]) -> bool:
        """Whether rows that decode may have drafts once the tokens in flight are known. Meanwhile
        it learns how good those would have been.
        """
        return bool(self.chosen(*replicas))

    def runs(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """The last token of each row with a draft, and the draft."""
        return {seq: [seq.token_ids[-1], *draft] for seq, draft in self.drafts(*replicas).items()}

    def drafts(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """The drafts that are worth a step with all these rows, of which none has tokens in
        flight.
        """
        if any(seq.pending for rows in replicas for seq in rows):
            return {}
        return self.chosen(*replicas)

    def learn(self, seq: Sequence, drafted: int, right: int) -> None:
        """Take in how many tokens of a draft were right."""
        row = self._row(seq)
        row.learn(right, min(right + 1, drafted))
        row.guess = None
        self.drafted += drafted
        self.accepted += right

    def observe(self, plan: Plan, seconds: float, ran_ahead: bool) -> None:
        """Take in a step that was committed."""
        self.verify_steps += plan.verifies
        self.costs.observe(plan, seconds, ran_ahead)

    def report(self) -> dict[str, Any]:
        """Totals since the start."""
        return {
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "wasted_tokens": self.drafted - self.accepted,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "verify_steps": self.verify_steps,
        }

    def chosen(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """The drafts that are worth a step with all these rows, as far as is known of them.

        Those of a replica share its room.
        """
        num_rows = sum(map(len, replicas))
        room = sum(max(self.most - len(rows), 0) for rows in replicas)
        if not room or (self.asked.adaptive and all(map(self._rests, itertools.chain(*replicas)))):
            return {}
        # Where even guesses that all come true do not pay, nothing is looked up.
        best = min(room, num_rows * self.asked.num_tokens)
        if not self._pays(num_rows, best, best):
            return {}
        found: dict[Sequence, list[int]] = {}
        expected = 0.0
        for rows in replicas:
            left = self.most - len(rows)
            for seq in rows:
                tokens, rate = self._draft(seq, left)
                if tokens:
                    found[seq] = tokens
                    left -= len(tokens)
                    expected += math.fsum(rate**i for i in range(1, len(tokens) + 1))
        drafted = sum(map(len, found.values()))
        return found if drafted and self._pays(num_rows, drafted, expected) else {}

    def _pays(self, rows: int, drafted: int, expected: float) -> bool:
        return not self.asked.adaptive or self.costs.pays(rows, drafted, expected)

    def _draft(self, seq: Sequence, most: int) -> tuple[list[int], float]:
        """A row's draft, and the share of its tokens that are right."""
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return [], 0.0
        if self.asked.adaptive and self._rests(seq):
            return [], 0.0
        row = self._row(seq)
        found = row.look_up(seq.token_ids, most)
        if not self.asked.adaptive:
            return found, row.rate
        if row.rate < LEAST:
            return [], 0.0
        return found[: _worth(row.rate)], row.rate

    def _rests(self, seq: Sequence) -> bool:
        """Whether a row that gained nothing is not even looked up now."""
        row = self._row(seq)
        return row.rate < LEAST and len(seq) < row.num_indexed + REST

    def _row(self, seq: Sequence) -> _Row:
        if (row := self._rows.get(seq)) is None:
            row = self._rows[seq] = _Row()
        return row


def _worth(rate: float) -> int:
    """How many tokens of a draft it is worth to try."""
    return max(int(math.log(WORTH) / math.log(min(max(rate, 0.01), 0.99))), 1)


class ModelDrafter(Drafter):
    """Of a draft model: how many tokens of each row it is to guess, and what it guessed. Nothing is
    known of a guess that was not made, so a row that gains nothing tries again after a pause.
    """

    has_model = True

    def __init__(self, asked: Speculative, most: int):
        super().__init__(asked, most)
        self.draft_steps = 0
        self._made: dict[Sequence, tuple[int, list[int]]] = {}  # for rows of that length

    def drafts(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """What was taken for rows that are as they were then."""
        made, self._made = self._made, {}
        every = [seq for rows in replicas for seq in rows]
        now = {seq: made[seq] for seq in every if seq in made and not seq.pending}
        return {seq: tokens for seq, (length, tokens) in now.items() if length == len(seq)}

    def take(self, plan: Plan, result: StepResult) -> None:
        """Take in what a plan of drafts drew."""
        self.draft_steps += 1
        counts = zip(plan.entries, result.num_drawn, result.tokens, strict=True)
        self._made = {e.seq: (len(e.seq), tokens[:count]) for e, count, tokens in counts if count}

    def report(self) -> dict[str, Any]:
        return super().report() | {"draft_steps": self.draft_steps}

    def _draft(self, seq: Sequence, most: int) -> tuple[list[int], float]:
        """As many tokens as it is to guess, which nobody knows yet."""
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return [], 0.0
        row = self._row(seq)
        if self.asked.adaptive:
            if self._rests(seq):
                return [], 0.0
            most = min(most, _worth(row.rate))
        return [ON_DEVICE] * most, row.rate

    def _rests(self, seq: Sequence) -> bool:
        row = self._row(seq)
        return row.rate < LEAST and len(seq) + seq.pending < row.last + PAUSE

    def learn(self, seq: Sequence, drafted: int, right: int) -> None:
        super().learn(seq, drafted, right)
        self._row(seq).last = len(seq)

    def _row(self, seq: Sequence) -> _Row:
        if seq not in self._rows:  # as the others so far
            rate = (self.accepted + 1) / (self.drafted + 2)
            self._rows[seq] = _Row(min(max(rate, LEAST), 0.9))
        return self._rows[seq]


def can_draft(seq: Sequence) -> bool:
    """Whether each token of a row can be drawn beside the next: penalties count the ones before."""
    return not seq.sampling_params.has_penalties and not seq.waits_for_host


def drafter_of(config: EngineConfig) -> Drafter | None:
    """What guesses ahead in an engine; None where nothing does."""
    if config.speculative is None:
        return None
    assert config.seq_buckets is not None
    most = min(config.seq_buckets[-1], config.max_num_batched_tokens)
    asked = Speculative.of(config.speculative)
    return (ModelDrafter if asked.has_model else Drafter)(asked, most)


def wants_tokens(*replicas: "Queues") -> bool:
    """Whether the next plan would rather know the tokens in flight: rows may guess then, where all
    do nothing but decode.
    """
    drafter = replicas[0].drafter
    if drafter is None or not all(map(_only_decodes, replicas)):
        return False
    return drafter.wants_tokens(*map(decoding, replicas))


def decoding(queues: "Queues") -> list[Sequence]:
    """The rows that go on from their last token."""
    return [seq for seq in queues.running if seq.can_decode]


def _only_decodes(queues: "Queues") -> bool:
    is_filling = queues.waiting and queues.free_rows
    return not is_filling and not any(seq.is_prefilling for seq in queues.running)
