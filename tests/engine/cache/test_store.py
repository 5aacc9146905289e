"""The store beneath the pools, over the mock device: what goes there, what comes back, what is
forgotten. Host.check holds all that is kept to the KV of its content after every step.
"""

import itertools
import random
from typing import Any

import pytest

from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.kinds import GroupSize
from jpaged.engine.cache.store import HostStore, Slot
from jpaged.engine.integrity import check_store
from jpaged.engine.sequence import Sequence
from jpaged.sampling_params import SamplingParams
from tests.engine.host import Host
from tests.engine.mock import Window, expected, generated
from tests.engine.test_replicas import Team

PARAMS = SamplingParams(max_tokens=8)
MIB = 2**20  # of a block of the mock device


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def stored(depth: int, host_blocks: int = 64, **settings: Any) -> Host:
    """A pool of 8 blocks of 4 tokens, and a store."""
    sizes = {"num_blocks": 8, "swap_min_tokens": 0, "max_num_batched_tokens": 32}
    return Host(depth, **{**sizes, "swap_space_gib": host_blocks / 1024, **settings})


SEEDS = itertools.count(1000)


def fill(host: Host) -> None:
    """Have another request take every block of the pool."""
    host.generate(prompt(30, next(SEEDS)), max_tokens=2)


def loaded(host: Host) -> int:
    return host.engine.stats.loaded_blocks


def again(host: Host, tokens: list[int], **options: Any) -> Sequence:
    """The sequence of a prompt that was evicted meanwhile, held to what it gets alone."""
    fill(host)
    (seq,) = host.generate(tokens, **options)
    assert generated(seq) == expected(seq, host.windows)
    return seq


def test_an_evicted_prefix_is_found_on_the_host(depth: int):
    """Without a store all of it is computed again."""
    for host_blocks, cached in ((64, 20), (0, 0)):
        host = stored(depth, host_blocks)
        host.generate(prompt(21), max_tokens=4)
        seq = again(host, prompt(21), max_tokens=4)
        assert (seq.num_cached, loaded(host)) == (cached, cached // 4)
        assert host.engine.stats.swap_in_bytes == cached // 4 * MIB


def test_both_halves_of_a_match(depth: int):
    """The head of a prefix is still in the pool, where it is freed last; its tail is on the
    host.
    """
    host = stored(depth)
    host.generate(prompt(25), max_tokens=1)
    host.generate(prompt(16, 7), max_tokens=1)  # takes 4 of 8 blocks, the last-used head not
    match = host.blocks.cache.match(host.sequence(prompt(25)))
    assert 0 < match.num_loaded < match.num_blocks == 6
    (seq,) = host.generate(prompt(25), max_tokens=4)
    assert loaded(host) == match.num_loaded and generated(seq) == expected(seq)


def test_what_is_kept_is_not_read_twice(depth: int):
    """A block that came from the store and is evicted again is there already."""
    host = stored(depth)
    for _ in range(2):
        host.generate(prompt(29), max_tokens=1)
        host.generate(prompt(29, 1), max_tokens=1)
    moved, back = host.engine.stats.swap_out_bytes, loaded(host)
    for _ in range(2):
        host.generate(prompt(29), max_tokens=1)
        host.generate(prompt(29, 1), max_tokens=1)
    assert host.engine.stats.swap_out_bytes == moved and loaded(host) == back + 4 * 7


def test_least_recently_used_goes_first(depth: int):
    """A store of 8 blocks holds one of the two prompts: the one that was evicted last."""
    host = stored(depth, host_blocks=8)
    for seed in range(2):
        host.generate(prompt(29, seed), max_tokens=1)
    fill(host)
    assert host.store is not None and host.store.used_bytes <= 8 * MIB
    old, late = (host.blocks.cache.match(host.sequence(prompt(29, i))) for i in range(2))
    assert (old.num_blocks, late.num_blocks) == (1, 7)  # of the older one its first
    host.run()


def test_a_prefix_outlives_its_tail(depth: int):
    """Where the store has room for some of a prompt's blocks, those are its first."""
    host = stored(depth, host_blocks=4)
    host.generate(prompt(29), max_tokens=1)
    fill(host)
    match = host.blocks.cache.match(host.sequence(prompt(29)))
    assert match.num_blocks == match.num_loaded == 4


@pytest.mark.parametrize(("least", "cached"), [(20, 20), (21, 0)])
def test_few_tokens_are_computed_again(depth: int, least: int, cached: int):
    host = stored(depth, swap_min_tokens=least)
    host.generate(prompt(21), max_tokens=1)
    assert again(host, prompt(21)).num_cached == cached


def adapter(version: int) -> AdapterVersion:
    return AdapterVersion(name="a", version=version, rank=1, data=None)


def test_nothing_of_another_salt_or_adapter_or_weights_is_found(depth: int):
    """All of these prompts have equal tokens."""
    host = stored(depth, 256, max_loras=2)
    kinds: list[dict[str, Any]] = [
        {},
        {"salt": "a"},
        {"salt": "b"},
        {"adapter": adapter(1)},
        {"adapter": adapter(2)},
        {"adapter": adapter(1), "salt": "a"},
    ]
    for options in kinds:
        (seq,) = host.generate(prompt(21), max_tokens=1, **options)
        assert seq.num_cached == 0
        fill(host)
    assert [again(host, prompt(21), **options).num_cached for options in kinds] == [20] * 6
    assert loaded(host) == 6 * 5
    fill(host)
    host.reset()  # as new weights do
    assert host.store is not None and host.store.used_bytes == 0
    for options in kinds:
        assert again(host, prompt(21), **options).num_cached == 0


def test_what_a_reset_overtakes_is_not_kept(depth: int):
    """Blocks that are on their way to the store when the weights change do not arrive there."""
    host = stored(depth)
    host.generate(prompt(29), max_tokens=1)
    host.add(prompt(29, 1), 8)
    host.step()  # takes the blocks of the first
    host.reset()
    host.run()
    assert again(host, prompt(29), max_tokens=1).num_cached == 0


def test_a_preempted_sequence_comes_back_from_the_host(depth: int):
    """Its closed blocks were evicted like any others; its open block is computed again."""
    host = stored(depth, max_num_seqs=2)
    seq, other = host.add(prompt(9), 18), host.add(prompt(9, 1), 18)
    host.run()
    counts = host.engine.stats.preemptions
    assert counts["preempted"] > 0 and counts["swapped"] > 0
    assert all(generated(s) == expected(s) for s in (seq, other))
    again_at = [span for p, spans in host.runner.dispatched if p == "prefill" for span in spans][2:]
    assert again_at and all(start and start % 4 == 0 for start, _ in again_at)


def test_without_prefix_caching_a_request_finds_its_blocks_alone(depth: int):
    """Preempted, it comes back from the host; nobody else finds anything, before or after."""
    host = stored(depth, max_num_seqs=2, enable_prefix_caching=False)
    for _ in range(2):
        seqs = host.generate(prompt(9), prompt(9), max_tokens=18)
        assert all(seq.num_cached == 0 and generated(seq) == expected(seq) for seq in seqs)
    assert host.engine.stats.preemptions["swapped"] > 0
    assert again(host, prompt(21)).num_cached == again(host, prompt(21)).num_cached == 0


def test_a_scored_prompt_comes_back_once_it_is_scored(depth: int):
    """Prompt logprobs take no hits but those of the request itself, after it was preempted."""
    host = stored(depth, num_blocks=64)
    host.generate(prompt(18), max_tokens=1)
    seq = host.add(prompt(18), 8, prompt_logprobs=0)
    while seq.num_generated < 2:
        host.step()
    host.engine.replicas[0].queues.preempt(seq)
    host.run()
    spans = [span for p, spans in host.runner.dispatched if p == "prefill" for span in spans]
    assert spans[1][0] == 0 and spans[2][0] == 16 and seq.num_cached == 0
    assert len(seq.prompt_logprobs) == 18


WINDOWS: list[tuple[Window, ...]] = [(None, 5), (9,), (None, "state"), ("state",), (3, None, 9)]


@pytest.mark.parametrize("windows", WINDOWS)
def test_all_groups_of_a_block_go_along(depth: int, windows: tuple[Window, ...]):
    host = Host(
        depth,
        windows,
        windowed_blocks=3 if "state" in windows else 8,
        num_blocks=8,
        swap_space_gib=1.0,
        swap_min_tokens=0,
        max_num_batched_tokens=16,
    )
    host.generate(prompt(21), max_tokens=4)
    seq = again(host, prompt(21), max_tokens=4)
    assert seq.num_cached == 20 and loaded(host) > 0


def test_a_snapshot_has_what_the_host_keeps(depth: int):
    host = stored(depth)
    host.generate(prompt(21), max_tokens=1)
    fill(host)
    state = host.engine.snapshot()
    assert host.store is not None
    kept = host.store.used_bytes
    host.reset()
    for _ in range(2):
        host.engine.restore(state)
        host.era = 0
        assert host.store.used_bytes == kept > 0
        (seq,) = host.generate(prompt(21), max_tokens=4)
        assert seq.num_cached == 20 and generated(seq) == expected(seq)


@pytest.mark.parametrize("method", ["read_blocks", "fetch_blocks", "write_blocks"])
def test_a_move_that_fails_loses_nothing(depth: int, method: str):
    host = stored(depth)
    host.generate(prompt(21), max_tokens=1)
    if method == "write_blocks":
        fill(host)
    host.runner.fail = {(method, host.runner.calls[method])}
    seq = host.add(prompt(30, 99) if method != "write_blocks" else prompt(21), 2)
    with pytest.raises(RuntimeError, match=f"{method} fails"):
        host.run()
    host.run()
    assert generated(seq) == expected(seq)
    again(host, prompt(21))


@pytest.mark.parametrize(("shares", "cached"), [(True, 20), (False, 0)])
def test_replicas_share_a_store(shares: bool, cached: int):
    """Where blocks of one can be written to another: what one replica has evicted the other finds;
    else each has a store.
    """
    team = Team(2, num_blocks=8, swap_space_gib=1.0, swap_min_tokens=0, shares_blocks=shares)
    first, second = (replica.blocks for replica in team.engine.replicas)
    assert (first.traffic.store is second.traffic.store) == shares  # pyright: ignore
    report = team.engine.report()
    assert report["host_blocks"] == 1024
    seq = team.add(prompt(21), 2)
    replica = team.where(seq)
    team.run()
    for seed in range(4):  # of both replicas
        team.add(prompt(30, 50 + seed), 2)
    team.run()
    other = second if replica == 0 else first
    assert other.cache.match(seq).num_blocks * 4 == cached
    team.check()


def test_no_step_waits_for_what_leaves_the_pool(depth: int):
    """Each read is started before the step that writes over it, and taken after that step's
    results.
    """
    host = stored(depth)
    host.generate(prompt(29), max_tokens=1)
    calls, runner = list[str](), host.runner
    for name in ("read_blocks", "dispatch", "fetch", "fetch_blocks"):
        method = getattr(runner, name)

        def called(*args: Any, name: str = name, method: Any = method) -> Any:
            calls.append(name)
            return method(*args)

        setattr(runner, name, called)
    host.generate(prompt(29, 1), max_tokens=3)
    began, taken = calls.index("read_blocks"), calls.index("fetch_blocks")
    assert calls[began + 1] == "dispatch" and calls[taken - 1] == "fetch"
    assert calls[began:taken].count("dispatch") == depth and calls.count("read_blocks") == 1


def test_a_block_that_no_step_has_written_is_not_offered():
    """Its sequence is ended in the very plan that was to write it, and another takes the block."""
    store = HostStore(100, [10])
    blocks = BlockManager([GroupSize(2, block_bytes=10)], 4, store=store)
    for goes_out in (False, True):
        tokens = prompt(9, goes_out)[:8]
        one, other = (Sequence(str(i), tokens, PARAMS, max_model_len=99) for i in range(2))
        other.token_ids[0] += 1
        blocks.admit(one, blocks.cache.match(one))
        blocks.close_ahead(one, 8)
        if goes_out:
            assert blocks.take_loads() == ()
        blocks.free(one)
        blocks.admit(other, blocks.cache.match(other))
        assert len(blocks.take_stores()) == 2 * goes_out
        blocks.free(other)
        blocks.take_loads()
        check_store(blocks)


def test_check_store_sees_a_load_of_another_content(depth: int):
    host = stored(depth)
    host.generate(prompt(21), max_tokens=1)
    fill(host)
    seq = host.sequence(prompt(21))
    host.blocks.admit(seq, host.blocks.cache.match(seq))
    check_store(host.blocks)
    assert host.blocks.traffic is not None
    loads = host.blocks.traffic.loads
    (key, first), second = next(iter(loads.items())), list(loads.values())[1]
    loads[key] = second._replace(block_id=first.block_id)
    with pytest.raises(AssertionError, match="loaded with another's content"):
        check_store(host.blocks)


# The store by itself


def content(name: bytes, parent: Content) -> Content:
    return Content(hash(name), name, parent)


def kept(store: HostStore, *blocks: Content, group: int = 0) -> list[Slot]:
    """Offered and arrived."""
    slots = []
    for block in blocks:
        slot = store.offer(block, group)
        assert slot is not None and store.find(block, group) is None, "not before it arrives"
        store.put(slot, block.token_ids)
        assert store.find(block, group) is slot and store.get(slot) == block.token_ids
        slots.append(slot)
    return slots


def test_host_store():
    root = Content(None, b"", None)
    a, b, c, d = (content(name, root) for name in (b"a", b"b", b"c", b"d"))
    store = HostStore(3 * 10, [10, 4])
    kept(store, a, b, c)
    assert store.offer(a, 0) is None  # there; and used now
    kept(store, d)
    assert [store.find(x, 0) is not None for x in (a, b, c, d)] == [True, False, True, True]
    store.touch([c, a])  # a prefix, which outlives its tail
    kept(store, b, group=1)
    assert [store.find(x, 0) is not None for x in (a, b, c, d)] == [True, False, True, False]
    assert store.used_bytes == 24
    store.check(root)
    late = store.offer(d, 1)
    store.clear()
    assert late is not None and store.used_bytes == len(store) == 0
    store.put(late, b"d")
    assert late.data is None and store.find(d, 1) is None
    assert HostStore(9, [10]).offer(a, 0) is None
    two = HostStore(10, [6, 6])
    kept(two, a)
    assert two.offer(a, 1) is None, "no room beside its own other half"
    two.check(root)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s, a: setattr(s, "used_bytes", 5), "host bytes leaked"),
        (lambda s, a: setattr(a, "parent", Content(None, b"", None)), "other weights"),
        (lambda s, a: s._slots[a].update({1: Slot(Content(0, b"", a), 1)}), "another's slot"),
        (lambda s, a: setattr(s, "num_bytes", 5), "host bytes leaked"),
    ],
)
def test_check_sees(damage: Any, message: str):
    root = Content(None, b"", None)
    store, block = HostStore(100, [10, 0]), content(b"a", root)
    kept(store, block)
    store.check(root)
    damage(store, block)
    with pytest.raises(AssertionError, match=message):
        store.check(root)
