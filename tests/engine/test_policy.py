"""Policy: who runs next, who gives way, which phase is next, and that nobody waits for ever."""

import itertools
import random
from collections.abc import Callable, Iterable

import pytest

from jpaged.engine.origin import Origin
from jpaged.engine.policy import MOST_IN_A_ROW, Policy
from jpaged.engine.sequence import Request, Sequence
from jpaged.sampling_params import SamplingParams
from tests.engine.host import Host, check_ended


def request(name: str, origin: Origin | None, n: int = 1, *, priority: int = 0) -> list[Sequence]:
    """The samples of one request."""
    asked = SamplingParams(priority=priority)
    samples = [
        Sequence(name, [1, 2], asked, max_model_len=64, index=i, origin=origin) for i in range(n)
    ]
    Request(samples)
    return samples


def of(party: str, call: str = "", *, leaves_rows: bool = False) -> Origin:
    return Origin(party=party, call=call or party, leaves_rows=leaves_rows)


def waiting(policy: Policy, requests: Iterable[list[Sequence]]) -> None:
    for samples in requests:
        for seq in samples:
            policy.add(seq)


def order(policy: Policy) -> list[str]:
    """The requests in the order in which the policy runs them, each row free at once."""
    ran: list[str] = []
    while (seq := policy.next()) is not None:
        policy.enter(seq)
        policy.check({seq: None})
        policy.leave(seq)
        ran.append(seq.request_id)
    return ran


def test_without_origins_the_first_come_is_the_first():
    policy = Policy(8)
    waiting(policy, [request(name, None) for name in "abcde"])
    assert order(policy) == list("abcde") and len(policy) == 0


def test_parties_take_turns():
    policy = Policy(8)
    crowd = [request(f"a{i}", of("a", f"call {i}")) for i in range(5)]
    waiting(
        policy, [*crowd, request("b0", of("b")), request("c0", of("c")), request("b1", of("b"))]
    )
    assert order(policy) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_calls_of_a_party_take_turns_and_samples_stay_together():
    policy = Policy(16)
    many = [request(f"many {i}", of("a", "many"), n=2) for i in range(3)]
    waiting(policy, [*many, request("one", of("a", "one"))])
    assert order(policy) == [*["many 0"] * 2, "one", *["many 1"] * 2, *["many 2"] * 2]


def test_a_preempted_sequence_is_before_all_others():
    policy = Policy(8)
    (early,), (late,) = request("early", of("a")), request("late", of("b"))
    waiting(policy, [[early], [late], request("other", of("c"))])
    policy.enter(early)
    policy.leave(early)
    policy.add_first(early)
    assert policy.next() is early
    assert early in policy and next(iter(policy)) is early
    assert order(policy) == ["early", "late", "other"]


def test_one_that_leaves_does_not_cost_its_party_a_turn():
    policy = Policy(8)
    (gone,) = request("gone", of("a"))
    waiting(policy, [[gone], request("a1", of("a")), request("b0", of("b"))])
    assert policy.remove(gone) and not policy.remove(gone)
    assert order(policy) == ["a1", "b0"]


def test_a_call_leaves_rows_to_others():
    """A request of as many samples as there are rows, and more, does not hold them all."""
    host = Host(max_num_seqs=8, num_blocks=64)
    host.add_samples(range(4), 20, 20, origin=of("a"))
    for _ in range(6):
        host.step()
    queues = host.engine.replicas[0].queues
    assert len(queues.running) == 7 and queues.free_rows
    bystander = host.add(range(5, 9), 3, origin=of("a", "another call"))
    host.step()
    assert bystander in queues.running
    host.run()
    check_ended(host, bystander)


@pytest.mark.parametrize("leaves_rows", [True, False])
def test_a_party_leaves_rows_where_it_is_told_to(leaves_rows: bool):
    host = Host(max_num_seqs=8, num_blocks=64)
    for i in range(12):
        host.add(range(i, i + 4), 20, origin=of("a", str(i), leaves_rows=leaves_rows))
    for _ in range(6):
        host.step()
    assert len(host.engine.replicas[0].queues.running) == (7 if leaves_rows else 8)
    host.run()


def test_who_holds_most_gives_way():
    policy, running = Policy(8), dict[Sequence, None]()

    def run(name: str, origin: Origin | None) -> Sequence:
        (seq,) = request(name, origin)
        policy.enter(seq)
        running[seq] = None
        return seq

    oldest = run("a0", of("a"))
    assert policy.victim(running) is oldest
    run("b0", of("b", "x"))
    second = run("b1", of("b", "y"))
    run("c0", of("c"))
    policy.check(running)
    assert policy.victim(running) is second, "the youngest of the party that holds most"
    third = run("b2", of("b", "x"))
    assert policy.victim(running) is third, "of its call that holds most"
    for seq in list(running)[1:]:
        policy.leave(seq)
        del running[seq]
    assert policy.victim(running) is oldest


def served_beside_a_crowd() -> bool:
    """Whether a party of five requests ends them beside a party that always has more to do, and one
    whose call has hundreds of prompts, both more urgent than it.
    """
    host = Host(max_num_seqs=4, num_blocks=32)
    rng = random.Random(3)
    for i in range(100):
        host.add(range(i, i + 5), 6, origin=of("crowd", "call"), priority=-5)
    others = [
        host.add(range(50 + i, 53 + i), 4, origin=of("other", str(rng.random()))) for i in range(5)
    ]
    for step in range(60):
        host.add(range(step, step + 4), 6, origin=of("busy", str(step)), priority=-9)
        host.step()
        if all(seq.finish_reason for seq in others):
            host.run()
            return True
    return False


def test_nobody_waits_for_ever():
    assert served_beside_a_crowd()


def latest_party_first(self: Policy) -> Sequence | None:
    return next(filter(None, (self._first_of(party) for party in reversed(self._parties))), None)


def most_urgent_of_all(self: Policy) -> Sequence | None:
    return min((seq for seq in self if self._may_run(seq)), key=lambda s: s.priority, default=None)


@pytest.mark.parametrize("broken", [latest_party_first, most_urgent_of_all])
def test_a_policy_that_starves_a_party_is_caught(
    broken: Callable[[Policy], Sequence | None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Policy, "next", broken)
    assert not served_beside_a_crowd()


def test_the_urgent_go_first_and_equals_take_turns():
    policy = Policy(8)
    calls = [("a", 0), ("b", 3), ("c", -2), ("d", 0), ("e", -2)]
    for name, priority in calls:
        waiting(policy, [request(name, of("one", name), priority=priority)])
    waiting(policy, [request("c2", of("one", "c"), priority=-2)])
    assert order(policy) == ["c", "e", "c2", "a", "d", "b"]


def test_without_origins_priorities_order_everything():
    policy = Policy(8)
    for name, priority in (("later", 1), ("first", 0), ("second", 0), ("urgent", -(2**60))):
        waiting(policy, [request(name, None, priority=priority)])
    assert order(policy) == ["urgent", "first", "second", "later"]


def test_no_party_passes_another_by_its_priorities():
    policy = Policy(8)
    waiting(policy, [request(f"a{i}", of("a", str(i)), priority=-100) for i in range(3)])
    waiting(policy, [request(f"b{i}", of("b", str(i)), priority=100) for i in range(3)])
    assert order(policy) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_of_the_preempted_the_most_urgent_is_first_and_waits_for_more_urgent_ones():
    policy = Policy(8)
    preempted = [request(f"p{p}", None, priority=p)[0] for p in (2, 1)]
    for seq in preempted:
        policy.enter(seq)
        policy.leave(seq)
        policy.add_first(seq)
    for name, priority in (("sooner", 0), ("equal", 1), ("later", 3)):
        waiting(policy, [request(name, None, priority=priority)])
    waiting(policy, [request("another party's", of("b"), priority=-9)])
    assert order(policy) == ["sooner", "p1", "equal", "p2", "another party's", "later"]


def test_the_least_urgent_gives_way():
    policy, running = Policy(8), dict[Sequence, None]()
    for name, priority in (("a", 1), ("b", 5), ("c", 5), ("d", 0), ("e", 1)):
        (seq,) = request(name, None, priority=priority)
        policy.enter(seq)
        running[seq] = None
    gone = []
    while running:
        seq = policy.victim(running)
        policy.check(running)
        policy.leave(seq)
        del running[seq]
        gone.append(seq.request_id)
    assert gone == ["c", "b", "e", "a", "d"], "among equals the youngest"


@pytest.mark.parametrize("mixed", [False, True])
def test_the_urgent_end_first_and_are_never_preempted(depth: int, mixed: bool):
    """Blocks are short, and the urgent one is the last to come."""
    host = Host(depth, max_num_seqs=4, num_blocks=12, mixed=mixed)
    others = [host.add(range(i, i + 5), 20, priority=1) for i in range(6)]
    for _ in range(6):
        host.step()
    urgent = host.add(range(30, 35), 20, priority=0)
    while urgent.finish_reason is None:
        host.step()
        assert urgent.epoch == 0, "it was preempted"
    assert sum(seq.epoch for seq in others) > 0, "the others gave way"
    assert all(seq.finish_reason is None for seq in others[4:]), "those that had not begun"
    host.run()
    for seq in (urgent, *others):
        check_ended(host, seq)


def test_phases_take_turns_and_neither_waits_for_ever():
    policy = Policy(8)

    def streaks(prefill: int, decode: int) -> list[tuple[str, int]]:
        phases = list[str]()
        for _ in range(20):
            phases.append(phase := policy.phase(prefill, decode, joins=False))
            policy.took(phase)
        groups = [(name, len(list(group))) for name, group in itertools.groupby(phases)]
        return groups[1:-1]  # whole ones

    most = MOST_IN_A_ROW
    assert set(streaks(1, 1)) == {("prefill", most["prefill"]), ("decode", 1)}
    assert set(streaks(1, 3)) == {("prefill", 1), ("decode", most["decode"])}
    assert policy.phase(0, 1, joins=False) == "decode"
    assert policy.phase(1, 0, joins=False) == "prefill"
    assert policy.phase(1, 3, joins=True) == "prefill", "rows that decode come along"


def test_counts_that_leak_are_seen():
    policy = Policy(8)
    (seq,) = request("a", of("a"))
    policy.enter(seq)
    with pytest.raises(AssertionError, match="leaked"):
        policy.check({})
    policy.leave(seq)
    policy.check({})
    policy.add(seq)
    with pytest.raises(AssertionError, match="waits and runs"):
        policy.check({seq: None})


def test_beams_that_wait_for_each_other_make_room(depth: int) -> None:
    """Two searches of one party hold all rows, and wait for beams that have none: a row gives way,
    though no sequence that waits may run before it does.
    """
    host = Host(depth, max_num_seqs=2, max_num_batched_tokens=1, num_blocks=64)
    for i, call in enumerate("xyz"):
        origin = Origin(party="a", call=call, leaves_rows=True)
        host.add_beams(range(1 + i, 8), 3, 5, origin=origin)
    host.run()
