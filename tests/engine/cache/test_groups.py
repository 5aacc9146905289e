"""Groups of layers: what a window gives back, what a prefix hit needs, what a model holds."""

import random

import pytest

from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.kinds import GONE, GroupSize
from jpaged.engine.commit import commit
from jpaged.engine.integrity import check_blocks
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.scheduler import Scheduler, schedule
from jpaged.engine.sequence import Request, Sequence, Status
from jpaged.sampling_params import SamplingParams
from tests.engine.host import Host
from tests.engine.mock import ROOTS, expected, generated


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def sequence(tokens: list[int], max_tokens: int = 8) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    seq = Sequence("s", tokens, params, max_model_len=200_000)
    Request([seq])
    return seq


def held(seq: Sequence) -> list[int]:
    """Blocks of each group."""
    pairs = zip(seq.block_tables, seq.first_held, strict=True)
    return [len(table) - first for table, first in pairs]


def prefilled(blocks: BlockManager, tokens: list[int]) -> Sequence:
    """Admitted and computed in one chunk, as the next plan finds it."""
    seq = sequence(tokens)
    blocks.admit(seq, blocks.cache.match(seq))
    blocks.extend(seq, len(seq))
    blocks.cache.close(seq, len(seq))
    seq.num_dispatched = len(seq)
    blocks.trim(seq)
    return seq


def test_worked_example():
    """The tables at the top of block_manager.py: blocks of 4, a window of 6, 14 tokens."""
    blocks = BlockManager([GroupSize(8), GroupSize(8, window=6)], 4)
    seq = sequence(prompt(14))
    blocks.admit(seq, blocks.cache.match(seq))
    assert [len(table) for table in seq.block_tables] == [4, 0]  # what may leave comes by and by
    blocks.extend(seq, 13)
    blocks.cache.close(seq, 13)
    seq.num_dispatched = 13
    check_blocks(blocks, [seq])
    blocks.trim(seq)
    full, windowed = seq.block_tables
    assert GONE not in full and list(windowed[:2]) == [GONE, GONE] and held(seq) == [4, 2]
    assert [group.num_used for group in blocks.groups] == [4, 2] and seq.num_closed == 3
    check_blocks(blocks, [seq])
    blocks.free(seq)
    assert blocks.num_used == 0
    check_blocks(blocks, [])


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_first_seen(window: int, block_size: int):
    """A query sees itself and the window - 1 tokens before it."""
    (group,) = BlockManager([GroupSize(8, window)], block_size).groups
    for position in range(30):
        seen = [p for p in range(position + 1) if position - p < window]
        assert group.first_seen(position) == seen[0] // block_size


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("window", [2, 5, 6, 9, 13])
def test_a_row_holds_its_window(depth: int, window: int, block_size: int):
    most = -(-(window - 1) // block_size) + 1
    host = Host(depth, (None, window), num_blocks=128, block_size=block_size)
    seq, counts = host.add(prompt(30), 40), set()
    while seq.is_prefilling or not seq.num_generated:
        host.step()
    host.step()
    while seq.status is Status.RUNNING:
        whole, windowed = held(seq)
        assert whole == host.blocks.blocks_for(seq.num_dispatched) and windowed <= most
        counts.add(windowed)
        host.step()
    assert max(counts) == most and generated(seq) == expected(seq, host.windows)


@pytest.mark.parametrize(
    ("gone", "hits"),
    [
        ([], 6),
        ([0, 1, 2, 3], 6),  # what the window has left is not needed
        ([4], 4),  # of 5 and of 6 blocks the last two are seen
        ([5], 5),
        ([3, 5], 3),
        ([1, 3, 5], 1),
        ([0, 2, 4], 0),
        (range(6), 0),
    ],
)
def test_a_hit_needs_the_blocks_that_the_window_sees(gone: list[int], hits: int):
    """A query at 4 n sees 5 tokens before it: the last two of n blocks, or the one there is."""
    blocks = BlockManager([GroupSize(16), GroupSize(16, window=6)], 4)
    seq = sequence(prompt(25))
    blocks.admit(seq, blocks.cache.no_match())
    blocks.extend(seq, 25)
    blocks.cache.close(seq, 25)
    group, table = blocks.groups[1], list(seq.block_tables[1])
    blocks.free(seq)
    for i in gone:
        group.forget(group.blocks[table[i]])
    match = blocks.cache.match(seq)
    whole, windowed = match.tables
    first = max(hits - 2, 0)
    assert (len(whole), windowed) == (hits, [GONE] * first + table[first:hits])
    blocks.admit(seq, match)
    seq.num_dispatched = 4 * hits
    check_blocks(blocks, [seq])


def test_a_full_group_needs_every_block():
    blocks = BlockManager([GroupSize(16, window=6), GroupSize(16)], 4)
    seq = prefilled(blocks, prompt(25))
    group, table = blocks.groups[1], list(seq.block_tables[1])
    blocks.free(seq)
    group.forget(group.blocks[table[3]])
    assert blocks.cache.match(seq).num_blocks == 3


def test_given_back_blocks_are_still_found(depth: int):
    """Until somebody takes them: a second request of the same prompt hits all of it."""
    host = Host(depth, (None, 5), max_num_batched_tokens=8)
    first, again = (host.generate(prompt(24))[0] for _ in range(2))
    assert (first.num_cached, again.num_cached) == (0, 20)


@pytest.mark.parametrize(("windowed_blocks", "cached"), [(5, 0), (16, 24)])
def test_a_hit_is_refused_where_the_window_is_gone(depth: int, windowed_blocks: int, cached: int):
    """Another request takes all 5 blocks that the window's group has, or 5 of its 16."""
    host = Host(depth, (None, 5), windowed_blocks, max_num_batched_tokens=64)
    for seed in range(2):
        host.generate(prompt(24 - 4 * seed, seed), max_tokens=1)
    again = host.generate([*prompt(24), 1], max_tokens=6)[0]
    assert generated(again) == expected(again, host.windows) and again.num_cached == cached


@pytest.mark.parametrize("windows", [(None, 6), (6,)])
def test_a_long_prompt_in_a_small_pool(depth: int, windows: tuple[int | None, ...]):
    """3 blocks of 4 hold any window of 6: a prompt of 100 tokens goes through them by chunks."""
    host = Host(depth, windows, 3, num_blocks=64, max_num_batched_tokens=64)
    seq = host.generate(prompt(100), max_tokens=20)[0]
    assert seq.error is None and generated(seq) == expected(seq, windows)
    chunks = [e - s for phase, spans in host.runner.dispatched for s, e in spans if phase[0] == "p"]
    assert sum(chunks) == 100 and chunks[0] == 12 and max(chunks[1:]) <= 8
    small = Host(depth, windows, 2, num_blocks=64)
    assert small.generate(prompt(100))[0].error is not None  # 6 tokens may span 3 blocks
    assert small.generate(prompt(5), max_tokens=4)[0].error is None


def test_long_prompts_and_running_rows_share_a_small_pool(depth: int):
    host = Host(depth, (None, 6), 7, num_blocks=128, max_num_batched_tokens=64)
    seqs = [host.add(prompt(length, length), 20) for length in (70, 20, 90, 5)]
    host.run()
    assert [generated(seq) for seq in seqs] == [expected(seq, host.windows) for seq in seqs]


def test_forks_copy_the_open_block_of_every_group(depth: int):
    host = Host(depth, (None, 5), num_blocks=64)
    host.add_samples(prompt(10), 4)
    host.step()
    host.step()
    host.run()
    assert host.engine.stats.copied_blocks == 2 * 3


def drawn(plan: Plan) -> StepResult:
    counts = [entry.draws for entry in plan.entries if entry.draws]
    return StepResult(
        weight_version=1,
        num_drawn=counts,
        tokens=[[7]] * len(counts),
        logprobs=[[0.0]] * len(counts),
    )


def decoding(
    sizes: list[GroupSize], num_tokens: int, block_size: int = 16
) -> tuple[Scheduler, Sequence]:
    """A sequence that decodes with so many tokens, prefilled by chunks of 2,048."""
    blocks = BlockManager(sizes, block_size)
    scheduler = Scheduler(blocks, max_num_seqs=1, max_num_batched_tokens=2048)
    seq = sequence([i % 1000 for i in range(num_tokens - 1)])
    scheduler.queues.waiting.add(seq)
    while len(seq) < num_tokens + 2:
        (plan,) = schedule((scheduler,))
        commit(scheduler.queues, plan, drawn(plan))
    return scheduler, seq


def test_one_full_layer_and_five_with_windows():
    """A sixth of the layers see everything: at 128k tokens the cache takes 17% of what all full
    would.
    """
    layer, length = 2**12, 131_072
    sizes = [GroupSize(8200, None, layer), GroupSize(256, 1024, 5 * layer)]
    _, seq = decoding(sizes, length)
    now = sum(n * size.block_bytes for n, size in zip(held(seq), sizes, strict=True))
    before = -(-(length + 1) // 16) * 6 * layer
    print(f"\n{held(seq)} blocks, {now / 2**20:.1f} MiB where {before / 2**20:.1f} MiB were held")
    assert held(seq) == [8193, 65] and now / before < 1.05 / 6


def test_a_window_of_4096_at_8k():
    """Mistral: all layers are one group. 513 blocks before, 257 now."""
    _, before = decoding([GroupSize(600)], 8192)
    scheduler, now = decoding([GroupSize(600, 4096)], 8192)
    print(f"\nblocks of 16 held at 8,192 tokens: {held(before)[0]} before, {held(now)[0]} now")
    assert (held(before), held(now)) == ([513], [257])
    scheduler.check_integrity()


def test_a_beam_that_waits_makes_room_for_one_that_computes(depth: int):
    """Found by test_machine: the beam that computed its prompt again was preempted for want of a
    block and admitted once more, for ever, while another kept its blocks and waited for it.
    """
    host = Host(
        depth,
        (None, 9),
        windowed_blocks=6,
        block_size=3,
        num_blocks=9,
        max_num_batched_tokens=1,
        mixed=True,
        enable_prefix_caching=False,
        max_model_len=40,
        max_logprobs=12,
    )
    search = host.add_beams(ROOTS[0][:8], 3, 7, early_stopping=True)
    host.run()
    assert search.is_finished and host.engine.stats.preemptions["recomputed"] > 0
