"""Turns: who runs next, who gives way, and that nobody waits for ever."""

import random
from collections.abc import Iterable

import pytest

from jpaged.engine.origin import Origin
from jpaged.engine.policy import Policy
from jpaged.engine.sequence import Request, Sequence
from jpaged.sampling_params import SamplingParams
from tests.engine.host import Host, check_ended


def request(name: str, origin: Origin | None, n: int = 1) -> list[Sequence]:
    """The samples of one request."""
    samples = [
        Sequence(name, [1, 2], SamplingParams(), max_model_len=64, index=i, origin=origin)
        for i in range(n)
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


def test_nobody_waits_for_ever():
    """Beside a party that always has more to do, and one whose call has hundreds of prompts."""
    host = Host(max_num_seqs=4, num_blocks=32)
    rng = random.Random(3)
    for i in range(100):
        host.add(range(i, i + 5), 6, origin=of("crowd", "call"))
    others = [
        host.add(range(50 + i, 53 + i), 4, origin=of("other", str(rng.random()))) for i in range(5)
    ]
    for step in range(60):
        host.add(range(step, step + 4), 6, origin=of("busy", str(step)))
        host.step()
        if all(seq.finish_reason for seq in others):
            break
    else:
        pytest.fail("a party of five requests waits behind others")
    host.run()


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
