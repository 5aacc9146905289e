"""Drafts: guesses at a row's next tokens, looked up in its own text (arXiv:2304.04487) or drawn by
a smaller model (arXiv:2211.17192), and the decision whether to try them.

A row's tokens do not depend on drafts: a token is drawn after each guess as ever, and the draws
count up to the first that differs from the guess. So a draft can only cost or save time. Both are
measured: how often guesses come true, tried or not, and how long steps take with and without them.

Three gates decide. A row drafts while enough of its guesses come true (MIN_RATE). A step drafts
where its expected tokens a second are MIN_SPEEDUP times those of a plain step, by the times of such
steps (Costs). Looking up may take LOOKUP_SHARE of the time.
"""

import math
import time
import weakref
from collections import deque
from statistics import fmean, median

from jpaged.config import EngineConfig, Speculative
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.sequence import Sequence
from jpaged.engine.types import Report

# Looking up in a row's own text
ENDINGS = (4, 3)  # lengths of the ending that is compared, longest first, where a pair recurs often
MAX_PLACES = 16  # latest occurrences of the last pair that are compared
ROW_COOLDOWN = 4  # tokens of a row that gains nothing before its next guess is checked
LOOKUP_SHARE = 0.01  # share of the steps' time that may be spent on look-ups without a result
DOUBT_FACTOR = 4  # such a look-up counts so many times where no row is known to gain

# What a row's guesses are worth
PRIOR_RATE = 0.5  # acceptance of a row that has made no guess yet
MIN_RATE = 0.4  # acceptance below which a row drafts nothing
DECAY = 0.9  # weight of the past for each new guess
MIN_CHANCE = 0.25  # a guess that is right with a smaller chance than this is left off
MODEL_COOLDOWN = 64  # tokens of a row that gains nothing before a model drafts for it again
ON_DEVICE = -1  # stands for a token that a model is to guess

# What a step with drafts costs
SAMPLES, MIN_SAMPLES = 8, 3  # latest times of a kind of step that count; fewest to judge by
TIMED_EVERY = 3  # one in so many plain steps is timed: they come in pairs, so an odd number
MIN_SPEEDUP = 1.15  # predicted gain in tokens a second below which drafts are refused
MAX_SLOWDOWN = 0.05  # share of the fastest row's tokens that the slowest row may lose to drafts
RETRY_AFTER = 128  # refusals before some are let through, since it may have been a slow moment
RETRIES_IN_A_ROW = 6  # so many are let through then
LONGEST_PAUSE = 1024  # the pause between retries doubles up to so many refusals
RESET_AFTER = 1024  # steps with drafts in a row after which all times are measured anew


class _Row:
    """What is known of one sequence.

    right, tried: counts of its guesses, older ones weigh less. gain: how many guesses of the latest
    steps with drafts were expected to come true. guess: (position, earlier position whose tokens
    may follow there too), not checked yet. last: the length at which it drafted last.
    """

    def __init__(self, rate: float = PRIOR_RATE) -> None:
        self.ends: dict[tuple[int, ...], int] = {}  # where a pair of tokens ended last
        self.before = [0, 0]  # of each place, where the pair that ends there ended before; or 0
        self.last = 0
        self.right, self.tried, self.gain = 2 * rate, 2.0, 0.0
        self.guess: tuple[int, int] | None = None

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
        if not (at := self.ends.get(tuple(tokens[-2:]))):
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
    """What steps took lately, by the powers of two of their rows and tokens.

    A plain step that ran ahead (it was dispatched before the last one was committed) is stored in
    seconds. A verify step, and the first plain step after one, whose device had to wait for the
    host, is stored as a multiple of a plain step measured at about the same time, so that a slow
    machine cancels out.
    """

    def __init__(self) -> None:
        self._plain: dict[tuple[bool, int], deque[float]] = {}
        self._compared: dict[_Kind, deque[float]] = {}
        self._typical: dict[_Kind, float] = {}  # lower quartile of those compared
        self._refused, self._pause = RETRIES_IN_A_ROW, RETRY_AFTER
        self._observed = 0
        self._verified = 0  # steps since a plain one ran ahead
        self._drained: float | None = None  # seconds of the last plain one, if it ran ahead
        self._runs_ahead = False  # now

    def observe(self, plan: Plan, seconds: float, ran_ahead: bool = False) -> None:
        """Record a step, if all of its rows decode and none has tokens that are certain."""
        self._observed += 1
        drained = self._drained
        if not plan.verifies:
            self._drained = seconds if ran_ahead else None
        if self._runs_ahead and ran_ahead and not plan.verifies and self._observed % TIMED_EVERY:
            return
        if not all(e.decodes and e.guesses >= bool(e.run) for e in plan.entries):
            return
        rows, tokens = len(plan.entries), plan.num_tokens
        if not plan.verifies:
            tokens //= max(entry.draws for entry in plan.entries)
            seconds *= tokens / plan.num_tokens
        self._runs_ahead = ran_ahead and not plan.verifies
        compares = plan.verifies or (drained is not None and not ran_ahead)
        if compares and (plain := self._seconds(rows)):
            # Plain steps come in pairs, and the first of a pair includes the wait for both: the
            # mean without the slowest corrects the median for it.
            least = min(median(plain), fmean(sorted(plain)[:-1]))
            # The first plain step after a verify step includes the time of the one before it.
            both = seconds if plan.verifies else seconds + (drained or 0.0) - least
            kind = _kind(plan.verifies, rows, tokens)
            kept = self._compared.setdefault(kind, deque(maxlen=SAMPLES))
            kept.append(both / least)
            self._typical[kind] = sorted(kept)[len(kept) // 4]  # some had a compile in the way
        if not plan.verifies:
            key = ran_ahead, _size(rows)
            self._plain.setdefault(key, deque(maxlen=SAMPLES)).append(seconds)
        self._verified = 0 if self._runs_ahead else self._verified + plan.verifies
        if self._verified >= RESET_AFTER:  # times change
            self._plain, self._compared, self._typical, self._verified = {}, {}, {}, 0

    def pays(self, drafted: int, expected: float, gains: list[float]) -> bool:
        """Return whether a step that verifies `drafted` guesses is worth its time.

        expected: how many of them are expected to be right. gains: the same for each row. Rows
        without a gain wait for the others, MAX_SLOWDOWN bounds for how long.
        """
        rows = len(gains)
        kind = _kind(True, rows, rows + drafted)
        if not self._seconds(rows):
            return False
        if len(self._compared.get(kind, ())) < MIN_SAMPLES:
            return True
        taken = self._typical[kind]
        drained = _kind(False, rows, rows)
        if self._runs_ahead and len(self._compared.get(drained, ())) >= MIN_SAMPLES:
            taken += max(self._typical[drained] - 1.0, 0.0)  # the next plain one will wait
        is_fair = taken - 1 - min(gains) <= MAX_SLOWDOWN * (1 + max(gains))
        # The first ones find caches cold: what only seems not to gain enough is tried some more.
        gain = MIN_SPEEDUP if len(self._compared[kind]) == SAMPLES else 1.0
        if is_fair and rows + expected > gain * rows * taken:
            self._refused, self._pause = RETRIES_IN_A_ROW, RETRY_AFTER
            return True
        self._refused += 1
        if self._refused == self._pause:
            self._refused, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
        return self._refused < RETRIES_IN_A_ROW

    def _seconds(self, rows: int) -> deque[float] | None:
        """Return the times of plain steps that ran ahead, or of others if no step does."""
        kinds = (self._plain.get((ahead, _size(rows))) for ahead in (True, False))
        return next((kept for kept in kinds if kept and len(kept) >= MIN_SAMPLES), None)


_Kind = tuple[bool, int, int]


def _kind(verifies: bool, rows: int, tokens: int) -> _Kind:
    return verifies, _size(rows), _size(tokens)


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
        self._spent = 0.0  # seconds of looking up in vain that steps are yet to make small
        self._rows: weakref.WeakKeyDictionary[Sequence, _Row] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> "Drafter":
        return self  # a snapshot is of sequences, not of what was learnt

    @property
    def lookup_paused(self) -> bool:
        """Whether the time budget for look-ups is spent."""
        return self.asked.adaptive and self._spent > 0

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

    def observe(self, plan: Plan, seconds: float, ran_ahead: bool) -> None:
        """Record a step that was committed."""
        self._spent = max(self._spent - LOOKUP_SHARE * seconds, 0.0)
        self.verify_steps += plan.verifies
        self.costs.observe(plan, seconds, ran_ahead)

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
        """Return the drafts that are worth a step with all these rows, by what is known now.

        The rows of a replica share its room. A look-up without a result is paid for by steps in
        which nothing is looked up (LOOKUP_SHARE).
        """
        began = time.perf_counter()
        everyone = [seq for rows in replicas for seq in rows]
        room = sum(max(self.most - len(rows), 0) for rows in replicas)
        if self.lookup_paused or not min(room, len(everyone)):
            return {}
        # Where even guesses that all come true do not pay, nothing is looked up.
        best = min(room, len(everyone) * self.asked.num_tokens)
        pays = self._pays(best, best, [best / len(everyone)] * len(everyone))
        guesses: dict[Sequence, list[int]] = {}
        for rows in replicas if pays else ():
            left = self.most - len(rows)
            for i, seq in enumerate(rows):
                share = -(-left // (len(rows) - i))
                if tokens := self._draft(seq, self._row(seq), share):
                    guesses[seq] = tokens
                    left -= len(tokens)
        if guesses:
            expected, gains = 0.0, []
            for seq in everyone:
                row = self._row(seq)
                gain = row.expected(len(guesses.get(seq, ())))
                row.gain = max(gain, DECAY * row.gain)
                gains.append(row.gain)
                expected += gain
            pays = self._pays(sum(map(len, guesses.values())), expected, gains)
        spent = time.perf_counter() - began
        if pays and not guesses and all(self._row(seq).rate <= PRIOR_RATE for seq in everyone):
            spent *= DOUBT_FACTOR
        self._spent = 0.0 if guesses and pays else self._spent + spent
        return guesses if pays else {}

    def _pays(self, drafted: int, expected: float, gains: list[float]) -> bool:
        return not self.asked.adaptive or self.costs.pays(drafted, expected, gains)

    def _draft(self, seq: Sequence, row: _Row, most: int) -> list[int]:
        """Return at most `most` guesses for a row; [] where they are not worth it."""
        if (
            self.asked.adaptive
            and row.rate < MIN_RATE
            and len(seq) < len(row.before) + ROW_COOLDOWN
        ):
            return []  # a row that gained nothing is not even looked up now
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return []
        guesses = row.look_up(seq.token_ids, most)
        if not self.asked.adaptive:
            return guesses
        return guesses[: _worth(row.rate)] if guesses and row.rate >= MIN_RATE else []

    def _row(self, seq: Sequence) -> _Row:
        if (row := self._rows.get(seq)) is None:
            row = self._rows[seq] = _Row()
        return row


def _worth(rate: float) -> int:
    """Return how many guesses in a row it is worth to try at this acceptance."""
    return max(int(math.log(MIN_CHANCE) / math.log(min(max(rate, 0.01), 0.99))), 1)


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

    def take(self, plans: list[Plan], results: list[StepResult]) -> None:
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
        if self.asked.adaptive:
            if row.rate < MIN_RATE and len(seq) + seq.pending < row.last + MODEL_COOLDOWN:
                return []
            most = min(most, _worth(row.rate))
        return [ON_DEVICE] * most

    def learn(self, seq: Sequence, drafted: int, right: int) -> None:
        super().learn(seq, drafted, right)
        self._row(seq).last = len(seq)

    def _row(self, seq: Sequence) -> _Row:
        if seq not in self._rows:  # as the others so far
            rate = (self.accepted + 1) / (self.drafted + 2)
            self._rows[seq] = _Row(max(rate, MIN_RATE))
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
