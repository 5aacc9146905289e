"""Router: chooses a replica for each request, by what replicas hold of its prompt and by how busy
they are.

A replica's cost for a request is what it has to do before the first token: the tokens of prompts
that wait there, `row_tokens` for each request that it draws for, and the tokens of this prompt that
it does not hold. The policy "prefix" compares these replicas:

- two random ones, the less busy of which is the floor: with nothing known that is the power of two
  choices (Mitzenmacher, 2001);
- some of those that hold the longest prefix;
- the one that had the session's last request, as if it held the tokens of that one.

The least cost wins. Whoever is busier than the floor by more than `max_imbalance` tokens is not
compared, so that a hot prefix spreads. This is asked of each candidate alone: that one replica is
busy turns nobody else's prefixes off.

What replicas hold is what they told (see holdings.py), and what they are expected to hold since a
request was sent there, until the first report after its end. All of it is advice: whatever is
wrong costs tokens that are computed again, and no answer.
"""

import collections
import dataclasses
import itertools
import random
import threading
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any, Literal, get_args

from jpaged.checks import at_least
from jpaged.errors import ConfigError, ReplicaError
from jpaged.fleet.holdings import MOST_KEYS, Report

Policy = Literal["prefix", "sticky", "two", "round_robin", "random"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
RECENT = 64  # of a key's holders, the last ones of which some are drawn
MOST_HOLDERS = 4  # holders of prefixes that a choice compares
MOST_EARLY = 8  # reports that wait for those before them


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """policy: "prefix" as above; "sticky" is the session's replica, else the floor; "two" is the
    floor; "round_robin" one after the other; "random". max_imbalance: tokens by which the load of
    the chosen replica may be above that of the floor. row_tokens: what a request that draws counts.
    max_sessions: that are remembered. max_keys: that are remembered of a replica, of those that it
    told of and of those that are expected.
    """

    policy: Policy = "prefix"
    max_imbalance: int = 1 << 15
    row_tokens: int = 128
    max_sessions: int = 1 << 16
    max_keys: int = MOST_KEYS

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r}: must be one of {', '.join(POLICIES)}")
        at_least(0, self, "max_imbalance", "row_tokens")
        at_least(1, self, "max_sessions", "max_keys")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A request as a router sees it. call: a name that no other request has while this one runs.
    tokens: of its prompt. keys: of its leading parts, the shortest first; part i has ends[i]
    tokens. session: requests of one session go to one replica if that costs little.
    """

    call: str
    tokens: int
    keys: Sequence[int] = ()
    ends: Sequence[int] = ()
    session: str | None = None


@dataclasses.dataclass(eq=False)
class _Call:
    ask: Ask
    replica: str
    left: int  # tokens of the prompt that are still to be computed, as far as is known
    held: int  # tokens that the replica was thought to hold


class _Table:
    """What is known of one replica."""

    def __init__(self) -> None:
        self.life: int | None = None
        self.version = 0
        self.told = set[int]()
        # How many running requests will leave a key there, least recently sent first; 0: they have
        # ended, and the next report says what is left of them.
        self.expected: collections.OrderedDict[int, int] = collections.OrderedDict()
        self.idle = dict[int, None]()  # those of 0
        self.early = dict[int, Report]()  # by the version that they build on
        self.is_unsure = False  # a report was missed: one of all that it holds is wanted
        self.calls = dict[str, None]()
        self.load = 0


class Router:
    """Any thread may call. A replica's name stands for one life of it; who begins anew has another
    name, or another `life` in its reports.
    """

    def __init__(self, settings: RouterSettings | None = None, seed: int | None = None):
        self.settings = settings or RouterSettings()
        self._rng, self._lock = random.Random(seed), threading.RLock()
        self._tables: dict[str, _Table] = {}
        self._names: list[str] = []  # for random draws
        self._places: dict[str, int] = {}
        self._holders: dict[int, dict[str, None]] = {}  # of each key, the latest last
        self._sessions: collections.OrderedDict[str, tuple[str, int]] = collections.OrderedDict()
        self._calls: dict[str, _Call] = {}
        self._turn = 0
        self._counts = collections.Counter[str]()

    # Replicas

    def add(self, replica: str) -> None:
        """Send requests to a replica from now on; nothing where that is so."""
        with self._lock:
            if replica not in self._tables:
                self._tables[replica] = _Table()
                self._places[replica] = len(self._names)
                self._names.append(replica)

    def remove(self, replica: str) -> list[str]:
        """Forget a replica and all that it holds, at once; return the calls that it had, which are
        to be sent again. Nothing where it is unknown.
        """
        with self._lock:
            table = self._tables.pop(replica, None)
            if table is None:
                return []
            place, last = self._places.pop(replica), self._names.pop()
            if last != replica:
                self._names[place], self._places[last] = last, place
            self._forget(replica, table)
            for call in table.calls:
                del self._calls[call]
            self._counts["removed"] += 1
            return list(table.calls)

    def keep(self, replicas: Collection[str]) -> None:
        """Have these replicas and no others."""
        with self._lock:
            for name in set(self._tables) - set(replicas):
                self.remove(name)
            for name in replicas:
                self.add(name)

    @property
    def replicas(self) -> list[str]:
        with self._lock:
            return list(self._names)

    def report(self, replica: str, report: Report) -> bool:
        """Take what a replica says of itself. Return False where an earlier report is missing.

        That may be on its way, so what builds on it waits for it; after MOST_EARLY of these
        `unsure` names the replica. What is not newer than what is known changes nothing, and so
        does what a replica says that was removed.
        """
        with self._lock:
            table = self._tables.get(replica)
            if table is None:
                return True
            if table.life != report.life:  # it has begun anew: nothing of before is there
                self._forget(replica, table)
                table.life, table.version, table.is_unsure = report.life, -1, True
                table.early.clear()
            if report.version <= table.version:
                return not table.is_unsure and not table.early
            if report.since is None:
                self._tell(replica, table, report.added, table.told - report.added)
                table.version, table.is_unsure = report.version, False
            else:
                table.early[report.since] = report
            while (next_one := table.early.pop(table.version, None)) is not None:
                self._tell(replica, table, next_one.added, next_one.dropped)
                table.version = next_one.version
            table.early = {v: r for v, r in table.early.items() if v > table.version}
            if len(table.early) > MOST_EARLY:
                table.is_unsure = True
                table.early.clear()
            if report.since is None or not table.early:
                self._drop_ended(replica, table)
            return not table.is_unsure and not table.early

    @property
    def unsure(self) -> frozenset[str]:
        """Replicas of which a report of all that they hold is wanted."""
        with self._lock:
            return frozenset(name for name, table in self._tables.items() if table.is_unsure)

    # Requests

    def choose(self, ask: Ask, among: Collection[str] | None = None) -> str:
        """Return the replica that is to get a request, and count it there until `ended`, or until
        the replica is removed. among: those that may get it; None: all. ReplicaError where there is
        none.
        """
        with self._lock:
            ranked = self.ranked(ask, among)
            if not ranked:
                raise ReplicaError("no replica of this fleet runs")
            self.sent(ask, ranked[0])
            return ranked[0]

    def ranked(self, ask: Ask, among: Collection[str] | None = None) -> list[str]:
        """Return some replicas, the best first, without counting the request; [] where there is
        none. among: as in `choose`.
        """
        with self._lock:
            policy = self.settings.policy
            pair = self._pair(among)
            if not pair:
                return []
            if policy == "round_robin":
                return self._next(among)
            if policy == "random":
                return pair
            pair.sort(key=self._load)
            if policy == "two":
                return pair
            session = self._session(ask, among)
            most = self._load(pair[0]) + self.settings.max_imbalance
            if policy == "sticky":
                stays = session is not None and self._load(session[0]) <= most
                return [session[0], *pair] if stays and session is not None else pair
            held = self._held_tokens(ask, {*pair, *([session[0]] if session else [])}, among)
            if session is not None:
                name, tokens = session
                held[name] = max(held.get(name, 0), min(tokens, ask.tokens))
            costs = {
                name: self._load(name) + ask.tokens - held[name]
                for name in sorted(held, key=lambda n: -held[n])
                if self._load(name) <= most
            }
            for name in pair:
                costs.setdefault(name, self._load(name) + ask.tokens)
            return sorted(costs, key=costs.__getitem__)

    def sent(self, ask: Ask, replica: str) -> None:
        """Count a request at a replica, in place of any other that it was counted at; nothing where
        that is unknown.
        """
        with self._lock:
            if (before := self._calls.get(ask.call)) is not None:
                if before.replica == replica:
                    return
                self.ended(ask.call)
            table = self._tables.get(replica)
            if table is None:
                return
            held = self._held_tokens(ask, {replica}, (replica,)).get(replica, 0)
            call = _Call(ask, replica, ask.tokens - held, held)
            self._calls[ask.call] = call
            table.calls[ask.call] = None
            table.load += call.left + self.settings.row_tokens
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += ask.tokens
            self._counts["held_tokens"] += held
            self._expect(replica, table, ask.keys)
            if ask.session is not None:
                self._sessions[ask.session] = (replica, ask.tokens)
                self._sessions.move_to_end(ask.session)
                if len(self._sessions) > self.settings.max_sessions:
                    self._sessions.popitem(last=False)

    def begun(self, call: str) -> None:
        """Note that a request draws: its prompt is computed."""
        with self._lock:
            if (known := self._calls.get(call)) is not None:
                self._tables[known.replica].load -= known.left
                known.left = 0

    def ended(self, call: str) -> None:
        """Note that a request is no more at the replica that it was sent to, whatever became of
        it.
        """
        with self._lock:
            known = self._calls.pop(call, None)
            if known is None:
                return
            table = self._tables[known.replica]
            del table.calls[call]
            table.load -= known.left + self.settings.row_tokens
            for key in known.ask.keys:
                if table.expected.get(key, 0) > 0:
                    table.expected[key] -= 1
                    if not table.expected[key]:
                        table.idle[key] = None

    def load(self, replica: str) -> int:
        """Return the load of a replica, in tokens."""
        with self._lock:
            return self._tables[replica].load

    def held(self, ask: Ask, replica: str) -> int:
        """Return how many tokens of a prompt a replica is thought to hold."""
        with self._lock:
            return self._held_tokens(ask, {replica}, (replica,)).get(replica, 0)

    def stats(self) -> dict[str, Any]:
        """Return totals: "router_requests", "router_prompt_tokens", "router_held_tokens" (those of
        them that the chosen replica was thought to hold), "router_removed" (replicas), and what is
        known now: "router_replicas", "router_keys", "router_unsure" (replicas that have missed a
        report), "router_load_max" and "router_load_mean".
        """
        with self._lock:
            loads = [table.load for table in self._tables.values()]
            names = ("requests", "prompt_tokens", "held_tokens", "removed")
            return {f"router_{name}": self._counts[name] for name in names} | {
                "router_replicas": len(loads),
                "router_keys": len(self._holders),
                "router_unsure": len(self.unsure),
                "router_load_max": max(loads, default=0),
                "router_load_mean": sum(loads) / max(len(loads), 1),
            }

    def check(self) -> None:
        """Assert that counts agree with what they count, and that tables are bounded."""
        with self._lock:
            calls = {call for table in self._tables.values() for call in table.calls}
            assert calls == set(self._calls), "a call is counted nowhere, or at a dead replica"
            held = dict[int, set[str]]()
            for name, table in self._tables.items():
                left = sum(self._calls[call].left for call in table.calls)
                rows = self.settings.row_tokens * len(table.calls)
                assert table.load == left + rows, f"load of {name}"
                assert len(table.told) <= self.settings.max_keys
                assert len(table.expected) <= self.settings.max_keys
                assert set(table.idle) == {key for key, n in table.expected.items() if not n}
                for key in table.told | set(table.expected):
                    held.setdefault(key, set()).add(name)
            assert held == {key: set(names) for key, names in self._holders.items()}
            assert len(self._sessions) <= self.settings.max_sessions
            assert sorted(self._names) == sorted(self._tables)
            assert all(self._names[place] == name for name, place in self._places.items())

    # Choosing

    def _load(self, name: str) -> int:
        return self._tables[name].load

    def _pair(self, among: Collection[str] | None) -> list[str]:
        """Return two random replicas; fewer where there are no more."""
        names = self._names
        if among is not None and len(among) != len(names):
            names = [name for name in among if name in self._tables]
        picked = self._rng.sample(names, min(2, len(names)))
        if among is not None and not all(name in among for name in picked):
            names = [name for name in among if name in self._tables]
            picked = self._rng.sample(names, min(2, len(names)))
        return picked

    def _next(self, among: Collection[str] | None) -> list[str]:
        for _ in self._names:
            self._turn = (self._turn + 1) % len(self._names)
            name = self._names[self._turn]
            if among is None or name in among:
                return [name]
        return []

    def _session(self, ask: Ask, among: Collection[str] | None) -> tuple[str, int] | None:
        """Return the replica of the session's last request and the tokens of that."""
        known = None if ask.session is None else self._sessions.get(ask.session)
        if known is None or known[0] not in self._tables:
            return None
        return known if among is None or known[0] in among else None

    def _held_tokens(
        self, ask: Ask, names: set[str], among: Collection[str] | None
    ) -> dict[str, int]:
        """Return the tokens that these replicas hold, and some others that hold the longest
        prefixes; those that hold nothing are left out.
        """
        held, others = dict[str, int](), 0
        waiting = set(names)
        for key, end in zip(reversed(ask.keys), reversed(ask.ends), strict=True):
            holders = self._holders.get(key)
            if holders is None:
                continue
            for name in [name for name in waiting if name in holders]:
                waiting.discard(name)
                held[name] = end
            if others < MOST_HOLDERS:
                recent = list(itertools.islice(reversed(holders), RECENT))
                fresh = [n for n in recent if n not in held and (among is None or n in among)]
                drawn = self._rng.sample(fresh, min(MOST_HOLDERS - others, len(fresh)))
                held |= dict.fromkeys(drawn, end)
                others += len(drawn)
            if not waiting and others >= MOST_HOLDERS:
                break
        return held

    # What replicas hold

    def _expect(self, replica: str, table: _Table, keys: Iterable[int]) -> None:
        for key in keys:
            table.expected[key] = table.expected.get(key, 0) + 1
            table.expected.move_to_end(key)
            table.idle.pop(key, None)
            holders = self._holders.setdefault(key, {})
            holders.pop(replica, None)
            holders[replica] = None
        while len(table.expected) > self.settings.max_keys:
            key, _ = table.expected.popitem(last=False)
            table.idle.pop(key, None)
            if key not in table.told:
                self._drop(replica, key)

    def _drop_ended(self, replica: str, table: _Table) -> None:
        """Expect nothing more of requests that have ended: a report has come since."""
        for key in table.idle:
            del table.expected[key]
            if key not in table.told:
                self._drop(replica, key)
        table.idle.clear()

    def _tell(self, replica: str, table: _Table, added: frozenset[int], dropped: Set[int]) -> None:
        """Take what has come to a replica and what has gone, in steps of that alone: a report comes
        with every answer, and what a replica holds may be much.
        """
        for key in dropped:
            if key in table.told and key not in added:
                table.told.discard(key)
                if key not in table.expected:
                    self._drop(replica, key)
        for key in added:
            if key not in table.told and len(table.told) < self.settings.max_keys:
                table.told.add(key)
                self._holders.setdefault(key, {}).setdefault(replica)

    def _drop(self, replica: str, key: int) -> None:
        holders = self._holders[key]
        del holders[replica]
        if not holders:
            del self._holders[key]

    def _forget(self, replica: str, table: _Table) -> None:
        for key in table.told | set(table.expected):
            self._drop(replica, key)
        table.told = set()
        table.expected.clear()
        table.idle.clear()
