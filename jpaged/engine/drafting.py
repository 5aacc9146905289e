"""Drafts: tokens that a row may well go on with, looked up in its own text (arXiv:2304.04487) or
drawn by a smaller model (arXiv:2211.17192), and when to try them.

A row's tokens do not depend on drafts: what follows each of them is drawn as ever, and they count
up to the first that was drawn otherwise. So a draft can only cost or save time, and both are
measured: how often guesses come true, whether they are tried or not, and what steps with and
without take.
"""

import math
import time
import weakref
from collections import deque
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig, Speculative
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.sequence import Sequence

if TYPE_CHECKING:
    from jpaged.engine.queues import Queues

LENGTHS = (4, 3)  # of the ending that is looked up, longest first, where more than a pair recurs
PLACES = 16  # latest ones of a pair among which the longest is looked for
FADES = 0.9  # weight of the past against one more guess
UNKNOWN = 0.5  # share of right guesses of a row that has made none
LEAST = 0.4  # share of right guesses below which a row drafts nothing
REST = 4  # tokens of such a row after which it is looked up whether guesses would come true now
SHARE = 0.01  # of the time of steps that may go on looking up in vain
DOUBTS = 4  # times less of it, where no row is known to gain
WORTH = 0.25  # chance below which a token is left off the end of a draft
SAMPLES, TRIES = 8, 3  # latest times of a step that count; those that are needed first
EVERY = 3  # of so many plain steps in a row one is timed: they come by twos, so an odd number
ON_DEVICE = -1  # in the place of a token that a model is to guess
AGAIN, THROUGH = 1024, 6  # of so many refusals some are let through: times change
SOON = 128  # refusals before the first time, then twice as many: it may have been a slow moment
GAIN = 1.15  # times the tokens a second of plain steps that a draft is to promise
WAITS = 0.05  # share of its steps that the fastest row may make the slowest wait
PAUSE = 64  # tokens of a row after which a model drafts for it again


class _Row:
    """What is known of one sequence. right, tried: of its guesses, faded. gain: tokens that it was
    to have beside its own of the latest steps with drafts. guess: a position, and the earlier one
    whose tokens may follow there too: unchecked. last: the length at which it drafted last.
    """

    def __init__(self, rate: float = UNKNOWN) -> None:
        self.ends: dict[tuple[int, ...], int] = {}  # where a pair of tokens ended last
        self.before = [0, 0]  # of each place, where the pair that ends there ended before; or 0
        self.last = 0
        self.right, self.tried, self.gain = 2 * rate, 2.0, 0.0
        self.guess: tuple[int, int] | None = None

    @property
    def rate(self) -> float:
        """The share of guesses that come true."""
        return self.right / self.tried

    def expected(self, tried: int) -> float:
        """How many of so many guesses come true, as it seems."""
        return math.fsum(self.rate**i for i in range(1, tried + 1))

    def learn(self, right: int, tried: int) -> None:
        fades = FADES**tried
        self.right, self.tried = fades * self.right + right, fades * self.tried + tried

    def look_up(self, tokens: list[int], most: int) -> list[int]:
        """What followed an earlier occurrence of the last tokens; the guess that this makes."""
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
        """Of the places where the last pair was, by the latest of them, where most was the same."""
        places = [at]
        while self.before[places[-1]] and len(places) < PLACES:
            places.append(self.before[places[-1]])
        for length in LENGTHS if len(places) > 1 else ():
            for place in places:
                if tokens[max(place - length, 0) : place] == tokens[-length:]:
                    return place
        return at


class Costs:
    """What steps took lately, by the powers of two of their rows and tokens. Plain ones that ran
    ahead, dispatched before the last was committed: seconds. Those that verify, and the first
    plain one after them, whose device waits for the host: in plain steps of that time, since what
    slows a machine slows both.
    """

    def __init__(self) -> None:
        self._plain: dict[tuple[bool, int], deque[float]] = {}
        self._compared: dict[_Kind, deque[float]] = {}
        self._typical: dict[_Kind, float] = {}  # of those compared
        self._refused, self._pause = THROUGH, SOON
        self._observed = 0
        self._verified = 0  # steps since a plain one ran ahead
        self._drained: float | None = None  # seconds of the last plain one, if it ran ahead
        self._runs_ahead = False  # now

    def observe(self, plan: Plan, seconds: float, ran_ahead: bool = False) -> None:
        """Take in a step, of those that decode alone, without tokens that are certain."""
        self._observed += 1
        drained = self._drained
        if not plan.verifies:
            self._drained = seconds if ran_ahead else None
        if self._runs_ahead and ran_ahead and not plan.verifies and self._observed % EVERY:
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
            # Of two plain steps that are waited for together the first takes what both do: all but
            # the slowest count beside the middle one.
            least = min(median(plain), fmean(sorted(plain)[:-1]))
            # The last one before the drafts, done by the time it was waited for, gave what the
            # first one after them took for two.
            both = seconds if plan.verifies else seconds + (drained or 0.0) - least
            kind = _kind(plan.verifies, rows, tokens)
            kept = self._compared.setdefault(kind, deque(maxlen=SAMPLES))
            kept.append(both / least)
            self._typical[kind] = sorted(kept)[len(kept) // 4]  # some had a compile in the way
        if not plan.verifies:
            key = ran_ahead, _size(rows)
            self._plain.setdefault(key, deque(maxlen=SAMPLES)).append(seconds)
        self._verified = 0 if self._runs_ahead else self._verified + plan.verifies
        if self._verified >= AGAIN:  # times change: all is measured anew
            self._plain, self._compared, self._typical, self._verified = {}, {}, {}, 0

    def pays(self, drafted: int, expected: float, gains: list[float]) -> bool:
        """Whether to verify so many tokens, of which so many are right. gains: of each row, those
        right in steps like this one: where only some have any, the others wait for them.
        """
        rows = len(gains)
        kind = _kind(True, rows, rows + drafted)
        if not self._seconds(rows):
            return False
        if len(self._compared.get(kind, ())) < TRIES:
            return True
        taken = self._typical[kind]
        drained = _kind(False, rows, rows)
        if self._runs_ahead and len(self._compared.get(drained, ())) >= TRIES:
            taken += max(self._typical[drained] - 1.0, 0.0)  # the next plain one will wait
        is_fair = taken - 1 - min(gains) <= WAITS * (1 + max(gains))
        # The first ones find caches cold: what only seems not to gain enough is tried some more.
        gain = GAIN if len(self._compared[kind]) == SAMPLES else 1.0
        if is_fair and rows + expected > gain * rows * taken:
            self._refused, self._pause = THROUGH, SOON
            return True
        self._refused += 1
        if self._refused == self._pause:
            self._refused, self._pause = 0, min(2 * self._pause, AGAIN)
        return self._refused < THROUGH

    def _seconds(self, rows: int) -> deque[float] | None:
        """Of plain steps that ran ahead; of others in an engine where none does."""
        each = (self._plain.get((ahead, _size(rows))) for ahead in (True, False))
        return next((kept for kept in each if kept and len(kept) >= TRIES), None)


_Kind = tuple[bool, int, int]


def _kind(verifies: bool, rows: int, tokens: int) -> _Kind:
    return verifies, _size(rows), _size(tokens)


def _size(count: int) -> int:
    return (count - 1).bit_length()


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
        self._spent = 0.0  # seconds of looking up in vain that steps are yet to make small
        self._rows: weakref.WeakKeyDictionary[Sequence, _Row] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: Any) -> "Drafter":
        return self  # a snapshot is of sequences, not of what was learnt

    @property
    def rests(self) -> bool:
        """Whether looking up has to be paid for first by steps in which nothing is."""
        return self.asked.adaptive and self._spent > 0

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
        self._spent = max(self._spent - SHARE * seconds, 0.0)
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

        Those of a replica share its room. Where they were not, nothing is looked up for some steps,
        and for more of them where no row is known to gain.
        """
        began = time.perf_counter()
        everyone = [seq for rows in replicas for seq in rows]
        room = sum(max(self.most - len(rows), 0) for rows in replicas)
        if self.rests or not min(room, len(everyone)):
            return {}
        # Where even guesses that all come true do not pay, nothing is looked up.
        best = min(room, len(everyone) * self.asked.num_tokens)
        pays = self._pays(best, best, [best / len(everyone)] * len(everyone))
        found: dict[Sequence, list[int]] = {}
        for rows in replicas if pays else ():
            left = self.most - len(rows)
            for i, seq in enumerate(rows):
                share = -(-left // (len(rows) - i))
                if tokens := self._draft(seq, self._row(seq), share):
                    found[seq] = tokens
                    left -= len(tokens)
        if found:
            expected, gains = 0.0, []
            for seq in everyone:
                row = self._row(seq)
                gain = row.expected(len(found.get(seq, ())))
                row.gain = max(gain, FADES * row.gain)
                gains.append(row.gain)
                expected += gain
            pays = self._pays(sum(map(len, found.values())), expected, gains)
        spent = time.perf_counter() - began
        if pays and not found and all(self._row(seq).rate <= UNKNOWN for seq in everyone):
            spent *= DOUBTS
        self._spent = 0.0 if found and pays else self._spent + spent
        return found if pays else {}

    def _pays(self, drafted: int, expected: float, gains: list[float]) -> bool:
        return not self.asked.adaptive or self.costs.pays(drafted, expected, gains)

    def _draft(self, seq: Sequence, row: _Row, most: int) -> list[int]:
        """A row's draft."""
        if self.asked.adaptive and row.rate < LEAST and len(seq) < len(row.before) + REST:
            return []  # a row that gained nothing is not even looked up now
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return []
        found = row.look_up(seq.token_ids, most)
        if not self.asked.adaptive:
            return found
        return found[: _worth(row.rate)] if found and row.rate >= LEAST else []

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

    def _draft(self, seq: Sequence, row: _Row, most: int) -> list[int]:
        """As many tokens as it is to guess, which nobody knows yet."""
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return []
        if self.asked.adaptive:
            if row.rate < LEAST and len(seq) + seq.pending < row.last + PAUSE:
                return []
            most = min(most, _worth(row.rate))
        return [ON_DEVICE] * most

    def learn(self, seq: Sequence, drafted: int, right: int) -> None:
        super().learn(seq, drafted, right)
        self._row(seq).last = len(seq)

    def _row(self, seq: Sequence) -> _Row:
        if seq not in self._rows:  # as the others so far
            rate = (self.accepted + 1) / (self.drafted + 2)
            self._rows[seq] = _Row(max(rate, LEAST))
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
    do nothing but decode. Meanwhile it learns how good those would have been.
    """
    drafter = replicas[0].drafter
    if drafter is None or drafter.rests or not all(map(_only_decodes, replicas)):
        return False
    return bool(drafter.chosen(*map(decoding, replicas)))


def decoding(queues: "Queues") -> list[Sequence]:
    """The rows that go on from their last token."""
    return [seq for seq in queues.running if seq.can_decode]


def _only_decodes(queues: "Queues") -> bool:
    is_filling = queues.free_rows and queues.waiting.next() is not None
    return not is_filling and not any(seq.is_prefilling for seq in queues.running)
