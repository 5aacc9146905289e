"""Policy: which waiting sequence runs next, and which running one gives way."""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from jpaged.engine.sequence import Sequence

# One row in so many is not for a call, or a party, that holds all the others.
ROWS_A_RESERVED_ONE = 8
FEWEST_ROWS = 4  # with fewer there is no reserve


Lane = OrderedDict[Sequence, None]  # what waits of one call, first come first


class Policy:
    """The sequences that wait, in turns, and counts of the rows that run.

    Preempted sequences come first. After them the parties take turns; in a party its calls take
    turns, in order of their arrival; in a call the first come is the first. A turn is one request
    with all of its samples. Sequences without an origin are one party with one call, so that an
    engine without origins serves in order of arrival.

    A call holds at most max_rows rows, and so does a party whose origin leaves rows: the few
    others serve those who come beside it. max_num_seqs: rows of the device.
    """

    def __init__(self, max_num_seqs: int):
        reserved = max(max_num_seqs // ROWS_A_RESERVED_ONE, 1)
        self.max_rows = max_num_seqs - (reserved if max_num_seqs >= FEWEST_ROWS else 0)
        self._preempted: Lane = OrderedDict()
        self._parties: OrderedDict[str | None, OrderedDict[str | None, Lane]] = OrderedDict()
        self._count = 0  # of all that wait
        self._rows: Counter[str | None] = Counter()  # that a party holds
        self._rows_of_call: Counter[tuple[str | None, str | None]] = Counter()

    # The sequences that wait

    def __len__(self) -> int:
        return self._count

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._preempted or seq in self._lane(seq)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the preempted ones, then those of each party and call; not the order of turns."""
        yield from self._preempted
        for calls in self._parties.values():
            for lane in calls.values():
                yield from lane

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait behind the others of its call."""
        party, call = _names(seq)
        calls = self._parties.setdefault(party, OrderedDict())
        calls.setdefault(call, OrderedDict())[seq] = None
        self._count += 1

    def add_first(self, seq: Sequence) -> None:
        """Let a preempted sequence wait before all others."""
        self._preempted[seq] = None
        self._preempted.move_to_end(seq, last=False)
        self._count += 1

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence; return whether it waited."""
        if seq in self._preempted:
            del self._preempted[seq]
        elif seq in (lane := self._lane(seq)):
            del lane[seq]
            if not lane:
                self._close_lane(seq)
        else:
            return False
        self._count -= 1
        return True

    def next(self) -> Sequence | None:
        """Return the sequence whose turn it is; None where no sequence that waits may run now."""
        for seq in self._preempted:
            return seq
        for calls in self._parties.values():
            for lane in calls.values():
                seq = next(iter(lane))
                if self._may_run(seq):
                    return seq
        return None

    # The sequences that run

    def enter(self, seq: Sequence) -> None:
        """Count a row that begins to run. If its sequence waited, its turn ends with its request.

        A fork takes a row without having waited.
        """
        party, call = _names(seq)
        self._rows[party] += 1
        self._rows_of_call[party, call] += 1
        had_turn = seq not in self._preempted
        if not self.remove(seq) or not had_turn:
            return
        lane = self._lane(seq)
        if lane and next(iter(lane)).request_id == seq.request_id:
            return  # the turn goes on with the other samples
        if lane:
            self._parties[party].move_to_end(call)
        if party in self._parties:
            self._parties.move_to_end(party)

    def leave(self, seq: Sequence) -> None:
        """Count a row less."""
        party, call = _names(seq)
        self._rows[party] -= 1
        self._rows_of_call[party, call] -= 1
        if not self._rows[party]:
            del self._rows[party]
        if not self._rows_of_call[party, call]:
            del self._rows_of_call[party, call]

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        """Return the row that gives way when blocks are short: the youngest of the call that holds
        most rows, in the party that holds most.

        The oldest row gives way only where it is alone, so that something always comes to its end.
        running: the rows, oldest first.
        """
        youngest_first = reversed(running)
        if len(self._rows_of_call) < 2:
            return next(youngest_first)
        return max(youngest_first, key=self._rows_beside)  # the first of equals

    def check(self, running: dict[Sequence, None]) -> None:
        """Assert that lanes are not empty, that nothing waits twice, and that rows are counted."""
        waiting = list(self)
        assert len(set(waiting)) == len(waiting) == self._count, "the policy lost count"
        for party, calls in self._parties.items():
            assert calls, f"party {party!r} has nothing that waits"
            for call, lane in calls.items():
                assert lane, f"call {call!r} has nothing that waits"
                assert all(_names(seq) == (party, call) for seq in lane), "in another's lane"
        assert not any(seq in running for seq in waiting), "a sequence waits and runs"
        assert self._rows == Counter(_names(seq)[0] for seq in running), "rows of parties leaked"
        assert self._rows_of_call == Counter(map(_names, running)), "rows of calls leaked"

    def _lane(self, seq: Sequence) -> Lane:
        party, call = _names(seq)
        return self._parties.get(party, OrderedDict()).get(call, OrderedDict())

    def _close_lane(self, seq: Sequence) -> None:
        party, call = _names(seq)
        del self._parties[party][call]
        if not self._parties[party]:
            del self._parties[party]

    def _may_run(self, seq: Sequence) -> bool:
        """Whether its call, and its party, leave the reserved rows to others."""
        if (origin := seq.origin) is None:
            return True
        if origin.leaves_rows and self._rows[origin.party] >= self.max_rows:
            return False
        return self._rows_of_call[origin.party, origin.call] < self.max_rows

    def _rows_beside(self, seq: Sequence) -> tuple[int, int]:
        """Rows that the party of a sequence holds, and those of its call."""
        party, call = _names(seq)
        return self._rows[party], self._rows_of_call[party, call]


def _names(seq: Sequence) -> tuple[str | None, str | None]:
    return (None, None) if seq.origin is None else (seq.origin.party, seq.origin.call)
