"""Drafts: guesses at a row's next tokens, looked up in its own text (arXiv:2304.04487) or drawn by
a smaller model (arXiv:2211.17192), and the decision whether to try them.

A row's tokens do not depend on drafts: a token is drawn after each guess as ever, and the draws
count up to the first that differs from the guess. So a draft can only cost or save time. Both are
measured: how often guesses come true, tried or not, and how long steps take with and without them.

Two gates decide. A row drafts while enough of its guesses come true (MIN_RATE). A step drafts where
every row that may draft is expected to go on by as many tokens as plain steps of that time would
give it, and all rows together by MIN_SPEEDUP times as many (Costs).
"""

import math
import weakref
from collections import deque
from collections.abc import Sequence as List
from statistics import fmean, median

from jpaged.config import EngineConfig, Speculative
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.sequence import Sequence
from jpaged.engine.types import Report

# Looking up in a row's own text
ENDINGS = (4, 3)  # lengths of the ending that is compared, longest first, where a pair recurs often
MAX_PLACES = 16  # latest occurrences of the last pair that are compared
ROW_COOLDOWN = 4  # tokens of a row that gains nothing before it is looked up again

# What a row's guesses are worth
PRIOR_RATE = 0.5  # acceptance of a row that has made no guess yet, at most: that of the others
MIN_RATE = 0.4  # acceptance below which a row drafts nothing
DECAY = 0.9  # weight of the past for each new guess
MODEL_COOLDOWN = 64  # tokens of a row that gains nothing before a model drafts for it again
ON_DEVICE = -1  # stands for a token that a model is to guess

# What a step with drafts costs
SAMPLES, MIN_SAMPLES = 8, 3  # latest times of a kind of step that count; fewest to judge by
MIN_SPEEDUP = 1.3  # predicted gain in tokens a second below which drafts are refused
MAX_SLOWDOWN = 0.02  # share of its tokens that a row may lose to the drafts of others
MEASURED_FOR = 1024  # decode steps after which all times are measured anew


class _Row:
    """What is known of one sequence.

    right, tried: counts of its guesses, older ones weigh less. guess: (position, earlier position
    whose tokens may follow there too), not checked yet. repeats: whether the last look-up has found
    a place. last: the length at which it drafted last.
    """

    def __init__(self, rate: float = PRIOR_RATE) -> None:
        self.ends: dict[tuple[int, ...], int] = {}  # where a pair of tokens ended last
        self.before = [0, 0]  # of each place, where the pair that ends there ended before; or 0
        self.last = 0
        self.right, self.tried = 2 * rate, 2.0
        self.guess: tuple[int, int] | None = None
        self.repeats = True

    @property
    def rate(self) -> float:
        """Return the share of guesses that come true."""
        return self.right / self.tried

    def expected(self, tried: int) -> float:
        """Return how many of `tried` guesses in a row are expected to come true."""
        return math.fsum(self.rate**i for i in range(1, tried + 1))

    def learn(self, right: int, tried: int) -> None:
        fades = DECAY**tried
        self.right, self.tried = fades * self.right + right, fades * self.tried + tried

    def look_up(self, tokens: list[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed an earlier occurrence of the last ones.

        The guess is remembered and checked at the next call, so that the acceptance of a row is
        known even while nothing is tried.
        """
        if self.guess is not None and self.guess[0] < len(tokens):
            now, at = self.guess
            known = len(tokens) - now
            right = next((i for i in range(known) if tokens[now + i] != tokens[at + i]), known)
            self.learn(right, min(right + 1, known))
        if len(self.before) > len(tokens):  # after a failed step
            self.ends, self.before = {}, [0, 0]
        for end in range(len(self.before), len(tokens)):
            pair = (tokens[end - 2], tokens[end - 1])
            self.before.append(self.ends.get(pair, 0))
            self.ends[pair] = end
        self.guess = None
        at = self.ends.get(tuple(tokens[-2:]), 0)
        self.repeats = at > 0
        if not at:
            return []
        at = self._longest(tokens, at)
        self.guess = len(tokens), at
        return tokens[at : at + most]

    def _longest(self, tokens: list[int], at: int) -> int:
        """Return the place after which the text before agrees longest, of those where the last pair
        occurred. at: the latest of them.
        """
        places = [at]
        while self.before[places[-1]] and len(places) < MAX_PLACES:
            places.append(self.before[places[-1]])
        for length in ENDINGS if len(places) > 1 else ():
            for place in places:
                if tokens[max(place - length, 0) : place] == tokens[-length:]:
                    return place
        return at


class Costs:
    """What decode steps took lately, in seconds, by the powers of two of their rows and tokens."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        # Plain steps after one with guesses: the device had to wait for the host.
        self._late: dict[int, deque[float]] = {}
        self._verifying: dict[tuple[int, int], deque[float]] = {}
        self._has_verified = False  # in the last step
        self._observed = 0

    def observe(self, plan: Plan, seconds: float) -> None:
        """Record a step, if all of its rows decode and none has tokens that are certain."""
        if not all(e.decodes and e.guesses >= bool(e.run) for e in plan.entries):
            return
        if self._observed == MEASURED_FOR:  # times change
            self._forget()
        self._observed += 1
        rows = len(plan.entries)
        if plan.verifies:
            kind = _size(rows), _size(plan.num_tokens)
            self._verifying.setdefault(kind, deque(maxlen=SAMPLES)).append(seconds)
        else:
            steps = max(entry.draws for entry in plan.entries)
            kept = self._late if self._has_verified else self._plain
            kept.setdefault(_size(rows), deque(maxlen=SAMPLES)).append(seconds / steps)
        self._has_verified = plan.verifies

    def pays(self, drafted: int, gains: list[float], others: int = 0) -> bool:
        """Return whether a step that verifies `drafted` guesses is worth its time. gains: how many
        of them are expected to be right, of each row that may draft. others: rows that never may;
        one of them would else keep all others from it.
        """
        rows = len(gains) + others
        plain, late = (kept.get(_size(rows), ()) for kept in (self._plain, self._late))
        verifying = self._verifying.get((_size(rows), _size(rows + drafted)), ())
        if len(plain) < MIN_SAMPLES:
            return False
        if len(verifying) < MIN_SAMPLES:
            return True
        # Of plain steps that run ahead of the host, one may include the wait for two: the mean
        # counts, without the slowest, which may have had a compile in the way, and the fastest.
        least = fmean(sorted(plain)[1:-1])
        taken = median(verifying)
        if not self._has_verified and len(late) >= MIN_SAMPLES:
            taken += max(median(late) - least, 0.0)  # the next plain one will wait
        taken /= least
        is_fair = taken - 1 - min(gains) <= MAX_SLOWDOWN
        return is_fair and rows + math.fsum(gains) > MIN_SPEEDUP * rows * taken


def _size(count: int) -> int:
    return (count - 1).bit_length()


class Drafter:
    """The drafts of one engine, looked up in each row's own text.

    Replicas take each step in one dispatch, so drafts are decided for all of them together. most:
    tokens of a step of each replica, rows and drafts together. drafted, accepted: guesses that were
    tried, and those that were right.
    """

    has_model = False  # whether a step of the device makes them

    def __init__(self, asked: Speculative, most: int):
        self.asked, self.most = asked, most
        self.costs = Costs()
        self.drafted = self.accepted = self.verify_steps = 0
        self._rows: weakref.WeakKeyDictionary[Sequence, _Row] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> "Drafter":
        return self  # a snapshot is of sequences, not of what was learnt

    def runs(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the last token of each row that drafts, followed by its draft."""
        return {seq: [seq.token_ids[-1], *draft] for seq, draft in self.drafts(*replicas).items()}

    def drafts(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the drafts that are worth a step with all these rows; {} while any row has tokens
        in flight.
        """
        if any(seq.pending for rows in replicas for seq in rows):
            return {}
        return self.chosen(*replicas)

    def learn(self, seq: Sequence, drafted: int, right: int) -> None:
        """Record how many tokens of a draft were right."""
        row = self._row(seq)
        row.learn(right, min(right + 1, drafted))
        row.guess = None
        self.drafted += drafted
        self.accepted += right

    def observe(self, plan: Plan, seconds: float) -> None:
        """Record a step that was committed."""
        self.verify_steps += plan.verifies
        self.costs.observe(plan, seconds)

    def report(self) -> Report:
        """Return totals since the start."""
        return {
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "wasted_tokens": self.drafted - self.accepted,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "verify_steps": self.verify_steps,
        }

    def chosen(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the drafts that are worth a step with all these rows, by what is known now. The
        rows of a replica share its room.
        """
        everyone = [seq for rows in replicas for seq in rows]
        room = sum(max(self.most - len(rows), 0) for rows in replicas)
        if not min(room, len(everyone)):
            return {}
        # Where even guesses that all come true do not pay, nothing is looked up.
        able = [seq for seq in everyone if can_draft(seq)]
        others = len(everyone) - len(able)
        best = min(room, len(able) * self.asked.num_tokens)
        if not able or not self._pays(best, [best / len(able)] * len(able), others):
            return {}
        drafts: dict[Sequence, list[int]] = {}
        for rows in replicas:
            left = self.most - len(rows)
            for i, seq in enumerate(rows):
                share = -(-left // (len(rows) - i))
                if tokens := self._draft(seq, self._row(seq), share):
                    drafts[seq] = tokens
                    left -= len(tokens)
        gains = [self._row(seq).expected(len(drafts.get(seq, ()))) for seq in able]
        pays = bool(drafts) and self._pays(sum(map(len, drafts.values())), gains, others)
        return drafts if pays else {}

    def _pays(self, drafted: int, gains: list[float], others: int) -> bool:
        return not self.asked.adaptive or self.costs.pays(drafted, gains, others)

    def _draft(self, seq: Sequence, row: _Row, most: int) -> list[int]:
        """Return at most `most` guesses for a row; [] where they are not worth it."""
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return []
        if not self.asked.adaptive:
            return row.look_up(seq.token_ids, most)
        may_gain = row.rate >= MIN_RATE and row.repeats
        if not may_gain and len(seq) < len(row.before) + ROW_COOLDOWN:
            return []
        guesses = row.look_up(seq.token_ids, most)
        return guesses if row.rate >= MIN_RATE else []

    def _row(self, seq: Sequence) -> _Row:
        if (row := self._rows.get(seq)) is None:
            row = self._rows[seq] = _Row(min(self._rate, PRIOR_RATE))
        return row

    @property
    def _rate(self) -> float:
        """The acceptance of all rows so far."""
        return (self.accepted + 1) / (self.drafted + 2)


class ModelDrafter(Drafter):
    """Decides how many tokens a draft model guesses for each row, and keeps what it guessed.

    Nothing is known of a guess that was not made, so a row that gains nothing tries again after
    MODEL_COOLDOWN tokens.
    """

    has_model = True

    def __init__(self, asked: Speculative, most: int):
        super().__init__(asked, most)
        self.draft_steps = 0
        self._made: dict[Sequence, tuple[int, list[int]]] = {}  # for rows of that length

    def drafts(self, *replicas: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the guesses made for rows that have not changed since."""
        made, self._made = self._made, {}
        every = [seq for rows in replicas for seq in rows]
        now = {seq: made[seq] for seq in every if seq in made and not seq.pending}
        return {seq: tokens for seq, (length, tokens) in now.items() if length == len(seq)}

    def take(self, plans: List[Plan], results: List[StepResult]) -> None:
        """Keep what a step of drafts drew for each replica's plan."""
        self.draft_steps += 1
        self._made = {}
        for plan, result in zip(plans, results, strict=True):
            drawn = zip(plan.entries, result.num_drawn, result.tokens, strict=True)
            self._made |= {e.seq: (len(e.seq), tokens[:n]) for e, n, tokens in drawn if n}

    def report(self) -> Report:
        return super().report() | {"draft_steps": self.draft_steps}

    def _draft(self, seq: Sequence, row: _Row, most: int) -> list[int]:
        """Return a placeholder for each token that the model is to guess."""
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return []
        is_due = len(seq) + seq.pending >= row.last + MODEL_COOLDOWN
        if self.asked.adaptive and row.rate < MIN_RATE and not is_due:
            return []
        return [ON_DEVICE] * most

    def learn(self, seq: Sequence, drafted: int, right: int) -> None:
        super().learn(seq, drafted, right)
        self._row(seq).last = len(seq)

    def _row(self, seq: Sequence) -> _Row:
        if seq not in self._rows:  # as the others so far; else none would be tried again
            self._rows[seq] = _Row(max(self._rate, MIN_RATE))
        return self._rows[seq]


def can_draft(seq: Sequence) -> bool:
    """Return whether a row's draws can be made side by side: penalties count the tokens before."""
    return not seq.sampling_params.has_penalties and not seq.waits_for_host


def drafter_of(config: EngineConfig) -> Drafter | None:
    """Return what guesses ahead in an engine; None where nothing does."""
    if config.speculative is None:
        return None
    assert config.seq_buckets is not None
    most = min(config.seq_buckets[-1], config.max_num_batched_tokens)
    asked = Speculative.of(config.speculative)
    return (ModelDrafter if asked.has_model else Drafter)(asked, most)
