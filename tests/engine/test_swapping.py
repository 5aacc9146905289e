"""KV of preempted sequences on the host, over the mock device: what moves, what is kept, what is
forgotten.
"""

from typing import Any

import pytest

from tests.engine.host import Host
from tests.engine.test_sharing import MIB, preempted, prefills, prompt, roomy, watch


def swapping(depth: int, host_blocks: int = 16, **settings: Any) -> Host:
    space = {"swap_space_gib": host_blocks / 1024, "swap_min_tokens": 0}
    return roomy(depth, **{"enable_prefix_caching": False, **space, **settings})


def test_swapped_out_and_in(depth: int):
    """All KV that was written comes back: one token is computed where recomputing takes the whole
    sequence.
    """
    host, other = swapping(depth), swapping(depth, host_blocks=0)
    seqs = [h.add(prompt(10)) for h in (host, other)]
    for h in (host, other):
        for _ in range(4):
            h.step()
    (held,), length = preempted(host, seqs[0]), seqs[0].num_dispatched
    preempted(other, seqs[1])
    assert held == 4 and length == 0
    assert host.engine.report()["host_blocks_in_use"] == 4
    for h in (host, other):
        h.run()
    (swapped,), (again,) = prefills(host)[-1], prefills(other)[-1]
    assert swapped == (again[1] - 1, again[1]) and again[0] == 0
    stats = host.engine.stats
    assert (stats.swap_out_bytes, stats.swap_in_bytes, stats.preemptions) == (
        4 * MIB,
        4 * MIB,
        {"swapped": 1},
    )
    assert (other.engine.stats.swap_out_bytes, other.engine.stats.preemptions) == (
        0,
        {"recomputed": 1},
    )
    assert (
        seqs[0].token_ids == seqs[1].token_ids and host.engine.report()["host_blocks_in_use"] == 0
    )


def test_the_cache_comes_before_the_host(depth: int):
    """Blocks that the cache still holds are not written again; only the tail comes back from the
    host.
    """
    host = swapping(depth, enable_prefix_caching=True)
    plans = watch(host)
    seq = host.add(prompt(18))
    for _ in range(2):
        host.step()
    preempted(host, seq)
    host.run()
    ((_, (blocks,)),) = [ins for plan, _ in plans for ins in plan.swap_ins]
    assert blocks[:4] == [-1] * 4 and len(blocks) == 5 and blocks[4] >= 0


def test_a_full_host_falls_back_to_recomputing(depth: int):
    """3 blocks are kept as 4, which is how many a move is compiled for: the second finds 1 of 5
    left.
    """
    host = swapping(depth, host_blocks=5)
    seqs = [host.add(prompt(9, seed)) for seed in range(2)]
    for _ in range(2):
        host.step()
    preempted(host, *seqs)
    assert host.engine.stats.preemptions == {"swapped": 1, "recomputed": 1}
    assert host.engine.replicas[0].swapping.free_bytes == 1 * MIB and seqs[1].swapped is None
    host.run()


@pytest.mark.parametrize(("least", "kind"), [(10, "swapped"), (12, "recomputed")])
def test_short_sequences_are_recomputed(least: int, kind: str):
    host = swapping(1, swap_min_tokens=least)
    seq = host.add(prompt(10))
    for _ in range(2):
        host.step()
    assert seq.num_dispatched == 11
    preempted(host, seq)
    assert host.engine.stats.preemptions == {kind: 1}
    host.run()


@pytest.mark.parametrize("moved", [False, True])
def test_a_swapped_sequence_is_aborted(depth: int, moved: bool):
    """Whether its KV has left the pool yet or not; another keeps the row so that it stays
    swapped.
    """
    host = swapping(depth, max_num_seqs=1)
    seq = host.add(prompt(10))
    for _ in range(2):
        host.step()
    preempted(host, seq)
    first = host.add(prompt(5))
    waiting = host.engine.replicas[0].queues.waiting
    waiting.remove(first)
    waiting.add_first(first)
    for _ in range(2 * moved):
        host.step()
    assert (
        host.engine.replicas[0].swapping.free_bytes == 12 * MIB
        and (host.engine.stats.swap_out_bytes > 0) == moved
    )
    host.engine.abort(seq.request_id)
    assert host.engine.replicas[0].swapping.free_bytes == 16 * MIB
    host.run()


def test_a_reset_drops_what_is_on_the_host(depth: int):
    """KV from before the reset must not come back: the sequence is computed again."""
    host = swapping(depth)
    seq = host.add(prompt(10))
    for _ in range(3):
        host.step()
    preempted(host, seq)
    host.reset()
    assert seq.swapped is None and host.engine.replicas[0].swapping.free_bytes == 16 * MIB
    host.run()
    assert host.engine.stats.swap_in_bytes == 0 and prefills(host)[-1][0][0] == 0


def test_nothing_from_before_a_reset_is_found_by_a_copy(depth: int):
    """A fork's copy of a half-written block holds what was computed before the reset, as its source
    does.
    """
    host = roomy(depth)
    seqs = host.add_samples(prompt(3), 3)
    host.step()
    host.reset()
    for _ in range(4):
        host.step()
    assert not any(host.found(seq) for seq in seqs)
    host.run()


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_preempted_after_a_reset_is_computed_again(depth: int, n: int):
    """Its KV is from before: through the host it would come back into blocks that can be found."""
    host = swapping(depth, enable_prefix_caching=True)
    seqs = host.add_samples(prompt(10), n)
    for _ in range(2):
        host.step()
    host.reset()
    preempted(host, seqs[-1])
    assert host.engine.stats.preemptions == {"recomputed": 1}
    host.run()
    assert len(host.found(seqs[-1])) == 4  # all of it is new
