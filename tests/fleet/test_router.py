"""The router of a fleet on mock replicas: what it believes of them, whatever is lost on the way,
and where it sends requests.
"""

import collections
import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.errors import ConfigError, ReplicaError
from jpaged.fleet.holdings import MOST_CHANGES, Holdings, Report
from jpaged.fleet.router import POLICIES, Ask, Router, RouterSettings

SIZE = 16
CALLS = itertools.count()


def keys_of(*path: int) -> list[int]:
    """The keys of a prompt of these blocks: chained, as an engine's are."""
    return [hash(path[: i + 1]) for i in range(len(path))]


def ask(*path: int, session: str | None = None, more: int = 5) -> Ask:
    """A prompt of whole blocks and some tokens more."""
    ends = [SIZE * (i + 1) for i in range(len(path))]
    tokens = SIZE * len(path) + more
    return Ask(
        call=str(next(CALLS)), tokens=tokens, keys=keys_of(*path), ends=ends, session=session
    )


class MockReplica:
    """What a replica holds, least recently used first, and what it says of it."""

    def __init__(self, most: int = 12, most_keys: int = 64):
        self.most, self.held = most, collections.OrderedDict[int, None]()
        self.holdings = Holdings(most_keys)

    def run(self, asked: Ask) -> None:
        for key in reversed(asked.keys):
            self.held[key] = None
            self.held.move_to_end(key)
        while len(self.held) > self.most:
            self.held.popitem(last=False)

    def report(self, router: str = "r", *, whole: bool = False) -> Report | None:
        self.holdings.update(self.held)
        return self.holdings.report(router, whole=whole)


class Fleets(RuleBasedStateMachine):
    """Requests come and go, reports are lost, late, twice and in any order, replicas die in the
    middle and begin anew under their old names.
    """

    @initialize(policy=st.sampled_from(POLICIES), seed=st.integers(0, 99))
    def begin(self, policy: str, seed: int) -> None:
        self.limits = RouterSettings(
            policy=policy,  # pyright: ignore[reportArgumentType]
            max_imbalance=200,
            max_sessions=3,
            max_keys=24,
        )
        self.router, self.replicas = Router(self.limits, seed), dict[str, MockReplica]()
        self.running, self.mail = dict[str, tuple[Ask, str]](), list[tuple[str, Report]]()
        self.answered, self.sent = set[str](), 0

    @rule(name=st.sampled_from("abcd"))
    def come(self, name: str) -> None:
        if name not in self.replicas:
            self.replicas[name] = MockReplica()
            self.router.add(name)

    @rule(path=st.lists(st.integers(0, 2), max_size=5), session=st.sampled_from([None, *"pqrst"]))
    def send(self, path: list[int], session: str | None) -> None:
        self._send(ask(*path, session=session))

    def _send(self, asked: Ask) -> None:
        if not self.replicas:
            with pytest.raises(ReplicaError):
                self.router.choose(asked)
            return
        ranked = self.router.ranked(asked)
        name = self.router.choose(asked)
        assert name in self.replicas and set(ranked) <= set(self.replicas)
        self.sent += 1
        self.running[asked.call] = asked, name

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def draw(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.running)))
        asked, name = self.running[call]
        self.replicas[name].run(asked)
        self.router.begun(call)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_told=st.booleans())
    def end(self, data: st.DataObject, is_told: bool) -> None:
        call = data.draw(st.sampled_from(sorted(self.running)))
        _, name = self.running.pop(call)
        self.answered.add(call)
        report = self.replicas[name].report(whole=name in self.router.unsure)
        self.router.ended(call)
        if is_told and report is not None:
            self.mail.append((name, report))

    @precondition(lambda self: self.mail)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        place = data.draw(st.integers(0, len(self.mail) - 1))
        name, report = self.mail[place] if again else self.mail.pop(place)
        self.router.report(name, report)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), is_noticed=st.booleans())
    def die(self, data: st.DataObject, is_noticed: bool) -> None:
        """Noticed, it is gone; else it begins anew under its name, and holds nothing."""
        name = data.draw(st.sampled_from(sorted(self.replicas)))
        lost = {call for call, (_, at) in self.running.items() if at == name}
        if is_noticed:
            assert set(self.router.remove(name)) == lost
            del self.replicas[name]
            assert not any(self.router.held(ask(*p), name) for p in ((0,), (1,), (2,)))
            self.mail = [(at, report) for at, report in self.mail if at != name]
        else:
            self.replicas[name] = MockReplica()
            for call in lost:
                self.router.ended(call)
        for call in lost:
            self._send(self.running.pop(call)[0])

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "router"):
            self.router.check()

    def teardown(self) -> None:
        """After one more change and its report nothing is believed that is not so, and all that is
        so, whatever was lost before.
        """
        if not hasattr(self, "router"):
            return
        for call in list(self.running):
            self.router.ended(call)
        for name, replica in self.replicas.items():
            replica.run(ask(9))
            replica.run(ask(8))
            report = replica.report(whole=name in self.router.unsure)
            if report is not None and not self.router.report(name, report):
                report = replica.report(whole=True)
                assert report is not None and self.router.report(name, report)
        assert not self.router.unsure
        for name, replica in self.replicas.items():
            assert self.router.load(name) == 0
            for path in itertools.product(range(3), repeat=2):
                asked = ask(*path)
                pairs = zip(asked.keys, asked.ends, strict=True)
                known = [end for key, end in pairs if key in replica.held]
                assert self.router.held(asked, name) == max(known, default=0)
        self.router.check()


Fleets.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
test_fleets = Fleets.TestCase


def fleet(count: int, **limits: object) -> Router:
    router = Router(RouterSettings(**limits), seed=0)  # pyright: ignore[reportArgumentType]
    for i in range(count):
        router.add(f"r{i}")
    return router


def finish(router: Router, asked: Ask) -> str:
    name = router.choose(asked)
    router.ended(asked.call)
    return name


def test_a_prefix_stays_where_it_is_and_spreads_when_that_is_busy() -> None:
    router = fleet(20, max_imbalance=300, row_tokens=100)
    home = finish(router, ask(1, 2, 3, 4))
    assert {finish(router, ask(1, 2, 3, i)) for i in range(5, 25)} == {home}
    places = collections.Counter(router.choose(ask(1, 2, 3, i)) for i in range(30, 70))
    assert len(places) > 5, "a hot prefix is not one replica's alone"
    loads = [router.load(name) for name in router.replicas]
    assert max(loads) - min(loads) <= 300 + 100 + SIZE * 4 + 5


def test_one_busy_replica_turns_nobody_elses_prefix_off() -> None:
    router = fleet(8, max_imbalance=100)
    home = finish(router, ask(1, 2, 3, 4))
    busy = next(name for name in router.replicas if name != home)
    for i in range(50):
        router.sent(ask(100 + i), busy)
    assert {finish(router, ask(1, 2, 3, 4)) for _ in range(10)} == {home}


def test_what_nobody_holds_is_spread_also_where_one_comes_at_a_time() -> None:
    router = fleet(6)
    assert len({finish(router, ask(i, i)) for i in range(60)}) == 6


def test_a_session_stays_and_leaves_a_dead_replica() -> None:
    router = fleet(10)
    home = finish(router, ask(1, session="s", more=500))
    assert {finish(router, ask(i, session="s", more=500)) for i in range(2, 12)} == {home}
    router.remove(home)
    other = finish(router, ask(1, session="s", more=500))
    assert other != home and finish(router, ask(50, session="s", more=500)) == other


def test_what_was_dropped_is_not_believed() -> None:
    router, replica = fleet(2), MockReplica(most=2)
    first, second = ask(1, 2), ask(3, 4)
    for asked in (first, second):
        router.sent(asked, "r0")
        replica.run(asked)
        assert router.held(asked, "r0") == 2 * SIZE
        router.ended(asked.call)
        report = replica.report()
        assert report is not None and router.report("r0", report)
    assert router.held(first, "r0") == 0 and router.held(second, "r0") == 2 * SIZE


def test_a_restart_under_the_same_name_and_a_gap_need_all() -> None:
    router, replica = fleet(1), MockReplica()
    replica.run(ask(1, 2))
    report = replica.report()
    assert report is not None and router.report("r0", report) and not router.unsure
    replica.run(ask(3))
    replica.report()  # lost
    replica.run(ask(4))
    late = replica.report()
    assert late is not None and late.since == 2
    router.report("r0", late)
    assert router.held(ask(4), "r0") == 0  # until what is missing comes, or all of it
    whole = replica.report(whole=True)
    assert whole is not None and whole.since is None and router.report("r0", whole)
    assert router.held(ask(4), "r0") == router.held(ask(3), "r0") == SIZE
    again = MockReplica()
    again.run(ask(9))
    fresh = again.report()
    assert fresh is not None and router.report("r0", fresh)
    assert router.held(ask(4), "r0") == 0 and router.held(ask(9), "r0") == SIZE


def test_reports_are_bounded() -> None:
    """A large set is sampled by its hashes, so that the longest prefixes are seen roughly; a router
    that is far behind is told all.
    """
    rng, holdings = random.Random(1), Holdings(most=100)
    keys = [rng.getrandbits(64) for _ in range(5000)]
    holdings.update(keys)
    report = holdings.report("r")
    assert report is not None and 0 < len(report.added) <= 100 and report.shift > 0
    assert report.added <= set(keys) and holdings.report("r") is None
    for i in range(MOST_CHANGES + 5):
        holdings.update(keys[:i])
    later = holdings.report("r")
    assert later is not None and later.since is None


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="policy='best'"):
        RouterSettings(policy="best")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="max_imbalance=-1"):
        RouterSettings(max_imbalance=-1)


def test_a_report_costs_what_has_changed() -> None:
    """One comes with every answer, however much a replica holds and however much is expected."""

    class Unwalked:
        def __iter__(self):
            raise AssertionError("a walk over all that is held")

        __or__ = __ror__ = __sub__ = __rsub__ = __and__ = __rand__ = copy = __iter__  # type: ignore[assignment]

    class Told(Unwalked, set[int]):
        pass

    class Expected(Unwalked, collections.OrderedDict[int, int]):
        items = keys = values = Unwalked.__iter__  # type: ignore[assignment]

    router = fleet(1)
    running, ends = ask(*range(100), session="s"), ask(*range(200, 203))
    replica = router.choose(running)
    router.report(replica, Report(life=1, version=1, since=None, added=frozenset(range(1000))))
    router.choose(ends)
    table = router._tables[replica]
    table.told, table.expected = Told(table.told), Expected(dict.items(table.expected))
    router.ended(ends.call)
    added, dropped = frozenset({2000, 5}), frozenset({7, 5, 3000})
    assert router.report(replica, Report(life=1, version=2, since=1, added=added, dropped=dropped))
    assert len(table.told) == 1000 and 2000 in table.told and 5 in table.told
    assert 7 not in table.told and not any(key in table.expected for key in ends.keys)
    table.told = set(set.__iter__(table.told))
    table.expected = collections.OrderedDict(dict.items(table.expected))
    router.check()
