"""Policy: which waiting sequence runs next, which running one gives way, and which phase the next
step takes; Router: which replica takes a request.
"""

import math
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from jpaged.engine.cache.prefix_cache import PrefixCache, chain_hash
from jpaged.engine.plan import Phase
from jpaged.engine.sequence import Request, Sequence

# One row in so many is not for a call, or a party, that holds all the others.
ROWS_A_RESERVED_ONE = 8
FEWEST_ROWS = 4  # with fewer there is no reserve
# Steps of one phase in a row while there is work for the other: bounds the gap between two tokens
# of a row, and how long a prompt waits. Among several replicas a prefill that waits for company
# costs a few rows some steps; one that does not wait costs every other replica a step.
MOST_IN_A_ROW: dict[Phase, int] = {"prefill": 4, "decode": 3}

# A replica may have so much more to do than the mean and still be given what it has the prefix of.
SLACK = 1.25

_PRIORITY = operator.attrgetter("priority")

Lane = OrderedDict[Sequence, None]  # what waits of one call at one priority, first come first
Level = OrderedDict[str | None, Lane]  # the calls of one party at one priority, in turns


class Policy:
    """Answers the three questions of scheduling; changing the order of service is changing this.

    `next`: the parties take turns (see Origin). In a party the lowest `priority` goes first; at one
    priority its calls take turns, in order of their arrival; in a call the first come is the first.
    A turn is one request with all of its samples. Sequences without an origin are one party with
    one call, so an engine without origins and priorities serves in order of arrival. Preempted
    sequences come before all others, but for more urgent ones of their party. No party can pass
    another by its priorities.

    A call holds at most max_rows rows, and so does a party whose origin leaves rows: the few
    others serve those who come beside it. max_num_seqs: rows of the device.

    `victim`: of the party that holds most rows, the least urgent row; among equals the youngest of
    the call that holds most.

    `phase`: a prefill while there is a prompt to compute, but neither phase waits for more than
    MOST_IN_A_ROW steps of the other.
    """

    def __init__(self, max_num_seqs: int):
        reserved = max(max_num_seqs // ROWS_A_RESERVED_ONE, 1)
        self.max_rows = max_num_seqs - (reserved if max_num_seqs >= FEWEST_ROWS else 0)
        self._preempted: Lane = OrderedDict()  # the latest first
        self._parties: OrderedDict[str | None, dict[int, Level]] = OrderedDict()
        self._count = 0  # of all that wait
        self._rows: Counter[str | None] = Counter()  # that a party holds
        self._rows_of_call: Counter[tuple[str | None, str | None]] = Counter()
        self._priorities: Counter[int] = Counter()  # of what waits and of what runs
        self._last: Phase = "prefill"  # the last phase that went while there was work for both
        self._in_a_row = 0
        self._is_contested = False  # whether there is work for both now

    # The three questions

    def next(self) -> Sequence | None:
        """Return the sequence whose turn it is; None where no sequence that waits may run now."""
        if self._preempted:
            first = self._most_urgent(self._preempted)
            sooner = self._first_of(first.origin.party, below=first.priority)
            return first if sooner is None else sooner
        for party in self._parties:
            if (seq := self._first_of(party)) is not None:
                return seq
        return None

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        """Return the row that gives way when blocks are short. running: the rows, oldest first.

        The oldest of the most urgent rows gives way only where it is alone, so that something
        always comes to its end.
        """
        youngest_first = reversed(running)
        if len(self._rows_of_call) < 2 and len(self._priorities) < 2:
            return next(youngest_first)
        return max(youngest_first, key=self._weight)  # the first of equals

    def phase(self, prefill: int, decode: int, *, joins: bool) -> Phase:
        """Return the phase to plan first; the other one is planned where nothing comes of it.

        prefill, decode: how many of the replicas that step together have work for each. joins:
        whether rows that decode can join a prefill on all of them, so that neither phase waits.
        """
        self._is_contested = bool(prefill and decode and not joins)
        if self._is_contested and self._in_a_row >= MOST_IN_A_ROW[self._last]:
            return "decode" if self._last == "prefill" else "prefill"
        prefill_first = prefill > 0 if joins or not decode else prefill >= decode
        return "prefill" if prefill_first else "decode"

    def took(self, phase: Phase) -> None:
        """Count a step of this phase, the one that was planned after `phase` was asked."""
        if not self._is_contested:
            self._in_a_row = 0
        else:
            self._in_a_row = self._in_a_row + 1 if phase == self._last else 1
            self._last = phase

    def by_urgency(self, running: dict[Sequence, None]) -> Iterable[Sequence]:
        """Return the rows in the order in which they get blocks and tokens of a step."""
        if len(self._priorities) < 2:
            return running
        return sorted(running, key=_PRIORITY)  # among equals the oldest first

    # The sequences that wait

    def __len__(self) -> int:
        return self._count

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._preempted or seq in self._lane(seq)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the preempted ones, then those of each party and call; not the order of turns."""
        yield from self._preempted
        for levels in self._parties.values():
            for calls in levels.values():
                for lane in calls.values():
                    yield from lane

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait behind the others of its call and priority."""
        party, call = seq.origin.party, seq.origin.call
        levels = self._parties.setdefault(party, {})
        calls = levels.setdefault(seq.priority, OrderedDict())
        calls.setdefault(call, OrderedDict())[seq] = None
        self._count += 1
        self._priorities[seq.priority] += 1

    def add_first(self, seq: Sequence) -> None:
        """Let a preempted sequence wait before all others."""
        self._preempted[seq] = None
        self._preempted.move_to_end(seq, last=False)
        self._count += 1
        self._priorities[seq.priority] += 1

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence; return whether it waited."""
        if seq in self._preempted:
            del self._preempted[seq]
        elif seq in (lane := self._lane(seq)):
            del lane[seq]
            if not lane:
                levels = self._parties[seq.origin.party]
                del levels[seq.priority][seq.origin.call]
                if not levels[seq.priority]:
                    del levels[seq.priority]
                if not levels:
                    del self._parties[seq.origin.party]
        else:
            return False
        self._count -= 1
        self._forget_priority(seq)
        return True

    # The sequences that run

    def enter(self, seq: Sequence) -> None:
        """Count a row that begins to run. If its sequence waited, its turn ends with its request.

        A fork takes a row without having waited.
        """
        party, call = seq.origin.party, seq.origin.call
        self._rows[party] += 1
        self._rows_of_call[party, call] += 1
        self._priorities[seq.priority] += 1
        had_turn = seq not in self._preempted
        if not self.remove(seq) or not had_turn:
            return
        lane = self._lane(seq)
        if lane and next(iter(lane)).request_id == seq.request_id:
            return  # the turn goes on with the other samples
        if lane:
            self._parties[party][seq.priority].move_to_end(call)
        if party in self._parties:
            self._parties.move_to_end(party)

    def leave(self, seq: Sequence) -> None:
        """Count a row less."""
        party, call = seq.origin.party, seq.origin.call
        self._rows[party] -= 1
        self._rows_of_call[party, call] -= 1
        if not self._rows[party]:
            del self._rows[party]
        if not self._rows_of_call[party, call]:
            del self._rows_of_call[party, call]
        self._forget_priority(seq)

    def check(self, running: dict[Sequence, None]) -> None:
        """Assert that lanes are not empty, that nothing waits twice, and that rows are counted."""
        waiting = list(self)
        assert len(set(waiting)) == len(waiting) == self._count, "the policy lost count"
        for party, levels in self._parties.items():
            assert levels, f"party {party!r} has nothing that waits"
            for priority, calls in levels.items():
                assert calls, f"party {party!r} has nothing that waits at {priority}"
                for call, lane in calls.items():
                    assert lane, f"call {call!r} has nothing that waits"
                    for seq in lane:
                        place = seq.origin.party, seq.origin.call, seq.priority
                        assert place == (party, call, priority), "in another's lane"
        assert not any(seq in running for seq in waiting), "a sequence waits and runs"
        assert self._rows == Counter(seq.origin.party for seq in running), "rows of parties leaked"
        assert self._rows_of_call == Counter((s.origin.party, s.origin.call) for s in running), (
            "rows of calls leaked"
        )
        priorities = Counter(seq.priority for seq in (*waiting, *running))
        assert self._priorities == priorities, "priorities leaked"

    def _first_of(self, party: str | None, below: float = math.inf) -> Sequence | None:
        """Return whose turn it is in a party, among those that may run. below: a priority."""
        levels = self._parties.get(party, {})
        for priority in sorted(levels):
            if priority >= below:
                break
            for lane in levels[priority].values():
                seq = next(iter(lane))
                if self._may_run(seq):
                    return seq
        return None

    def _most_urgent(self, seqs: Lane) -> Sequence:
        """Return the first of those with the lowest priority."""
        return next(iter(seqs)) if len(self._priorities) < 2 else min(seqs, key=_PRIORITY)

    def _forget_priority(self, seq: Sequence) -> None:
        self._priorities[seq.priority] -= 1
        if not self._priorities[seq.priority]:
            del self._priorities[seq.priority]

    def _lane(self, seq: Sequence) -> Lane:
        party, call = seq.origin.party, seq.origin.call
        level = self._parties.get(party, {}).get(seq.priority, {})
        return level.get(call, OrderedDict())

    def _may_run(self, seq: Sequence) -> bool:
        """Return whether its call, and its party, leave the reserved rows to others."""
        if (origin := seq.origin).call is None:
            return True
        if origin.leaves_rows and self._rows[origin.party] >= self.max_rows:
            return False
        return self._rows_of_call[origin.party, origin.call] < self.max_rows

    def _weight(self, seq: Sequence) -> tuple[int, int, int]:
        """Return how much there is for a row to give way: see `victim`."""
        party, call = seq.origin.party, seq.origin.call
        return self._rows[party], seq.priority, self._rows_of_call[party, call]


class Router:
    """Sends requests with equal prefixes to one replica, unless others have far less to do.

    What a replica has to do is the tokens of its unfinished requests at full length. cache: tells
    prefixes by their hashes. remembered: how many blocks of prompts it knows the place of.
    """

    def __init__(self, replicas: int, cache: PrefixCache, *, remembered: int):
        self.loads = [0] * replicas
        self.cache = cache
        self.remembered = remembered
        self._placed: dict[str, tuple[int, int]] = {}  # by request, its replica and its tokens
        # Who has a block's prefix, by the hash of their chain; used longest ago first.
        self._holders: OrderedDict[int, int] = OrderedDict()

    def place(self, request: Request) -> int:
        """Choose the replica that takes a request, and count it there until `leave`."""
        replica = 0 if len(self.loads) == 1 else self._choose(request)
        self._enter(request, replica)
        return replica

    def replica_of(self, request: Request) -> int:
        """Return the replica that a request was placed at."""
        return self._placed[request.request_id][0]

    def leave(self, request: Request) -> None:
        """Count a request no longer."""
        replica, tokens = self._placed.pop(request.request_id)
        self.loads[replica] -= tokens

    def keep(self, requests: Iterable[Request]) -> None:
        """Count these requests, at the replicas where they were placed, and no others."""
        self.restore(requests, {key: replica for key, (replica, _) in self._placed.items()})

    def restore(self, requests: Iterable[Request], placed: Mapping[str, int]) -> None:
        """Count these requests, at the replicas that `placed` has by their ids, and no others."""
        self.loads = [0] * len(self.loads)
        self._placed.clear()
        for request in requests:
            # An interrupt may have fallen between a request's entry and its placing.
            self._enter(request, placed.get(request.request_id, 0))

    def _enter(self, request: Request, replica: int) -> None:
        tokens = request.max_sequences * request.sequences[0].end
        self._placed[request.request_id] = (replica, tokens)
        self.loads[replica] += tokens

    def _choose(self, request: Request) -> int:
        """Return the replica that was last given the longest prefix of the prompt, where what is
        saved by that is worth the wait; else the one with the least to do.
        """
        seq, size = request.sequences[0], self.cache.block_size
        blocks = (seq.prompt_len - 1) // size if self.cache.is_on else 0
        hashes = [chain_hash(seq, i, size) for i in range(blocks)]
        known = [i for i, key in enumerate(hashes) if key in self._holders]
        chosen = self.loads.index(min(self.loads))
        if known:
            holder, saved = self._holders[hashes[known[-1]]], size * (known[-1] + 1)
            if self.loads[holder] <= SLACK * sum(self.loads) / len(self.loads) + saved:
                chosen = holder
        for key in hashes:
            self._holders[key] = chosen
            self._holders.move_to_end(key)
        while len(self._holders) > self.remembered:
            self._holders.popitem(last=False)
        return chosen
