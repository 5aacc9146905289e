"""Kinds of cache: what each keeps of a sequence, and where its chunks stop."""

import random
from array import array
from typing import Any

import pytest

from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.kinds import GONE, GroupSize, Replay
from jpaged.engine.integrity import check_blocks
from jpaged.engine.sequence import Sequence
from jpaged.sampling_params import SamplingParams
from tests.engine.host import Host
from tests.engine.mock import expected, generated

STATE = GroupSize(8, per="block")


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("s", tokens, SamplingParams(), max_model_len=4096)


def admitted(blocks: BlockManager, tokens: list[int]) -> Sequence:
    seq = sequence(tokens)
    match = blocks.cache.match(seq)
    blocks.admit(seq, match)
    seq.go_on_from(match.num_blocks * blocks.block_size)
    return seq


def chunk(blocks: BlockManager, seq: Sequence, end: int) -> tuple[int | None, int]:
    """Compute up to `end`; the blocks of the state that is read and of the one that is written."""
    start, states = seq.num_dispatched, seq.block_tables[-1]
    blocks.extend(seq, end)
    assert blocks.make_writable(seq, end - 1)
    blocks.close_ahead(seq, end)
    seq.go_on_from(end)
    size = blocks.block_size
    moved = (states[(start - 1) // size] if start else None, states[(end - 1) // size])
    check_blocks(blocks, [seq])
    blocks.take_loads()  # the step goes out
    blocks.trim(seq)
    return moved


def test_a_state_is_one_record_at_the_end_of_a_block():
    """A prompt of 14 tokens in blocks of 4 keeps the states after token 12 and after the last."""
    blocks = BlockManager([GroupSize(32), STATE], 4)
    seq = admitted(blocks, prompt(14))
    read, first = chunk(blocks, seq, 12)
    assert read is None and list(seq.block_tables[1]) == [GONE, GONE, first]
    read, last = chunk(blocks, seq, 14)
    assert read == first and list(seq.block_tables[1]) == [GONE, GONE, GONE, last]
    assert [group.num_used for group in blocks.groups] == [4, 1]
    blocks.free(seq)
    again = admitted(blocks, prompt(14))
    assert again.num_closed == 3 and list(again.block_tables[1]) == [GONE, GONE, first]
    part = admitted(blocks, prompt(14)[:9])  # no state was kept after 8 tokens
    assert part.num_closed == 0
    check_blocks(blocks, [again, part])


def test_a_chunk_that_passes_a_blocks_end_leaves_no_state_there():
    """It began within the block, whose entry still holds what it began with."""
    blocks = BlockManager([STATE], 4)
    seq = admitted(blocks, prompt(9))
    chunk(blocks, seq, 3)
    _, written = chunk(blocks, seq, 8)
    group = blocks.groups[0]
    assert seq.num_closed == 2 and list(group.cached.values()) == [written]
    blocks.free(seq)
    assert admitted(blocks, prompt(9)).num_closed == 2


def test_a_state_of_this_plan_is_for_later_plans():
    """Rows of one step read before any of them writes."""
    blocks = BlockManager([STATE], 4)
    seq = admitted(blocks, prompt(9))
    blocks.extend(seq, 8)
    blocks.close_ahead(seq, 8)
    assert blocks.cache.match(sequence(prompt(9))).num_blocks == 0
    blocks.take_loads()
    assert blocks.cache.match(sequence(prompt(9))).num_blocks == 2


def test_forks_write_a_copy_of_an_open_state():
    blocks = BlockManager([STATE], 4)
    seq, child = admitted(blocks, prompt(6)), sequence(prompt(6))
    chunk(blocks, seq, 6)
    blocks.fork(seq, child)
    child.go_on_from(6)
    assert blocks.make_writable(child, 6) and blocks.make_writable(seq, 6)
    (own,), (other,) = blocks.take_copies()[0], [seq.block_tables[0][1]]
    assert own == (other, child.block_tables[0][1]) and own[0] != own[1]
    check_blocks(blocks, [seq, child])


@pytest.mark.parametrize(
    ("start", "end", "parting", "is_last", "stops"),
    [
        (0, 14, 0, True, 12),
        (12, 14, 0, True, 14),  # no end of a block is left
        (0, 3, 0, True, 3),
        (3, 9, 0, True, 8),
        (0, 12, 0, False, 12),
        (0, 12, 0, True, 8),  # an equal prompt finds no more, since it draws after its last token
        (8, 12, 0, True, 12),
        (0, 14, 8, True, 8),  # where another sequence parts from this one
        (8, 14, 8, True, 12),
    ],
)
def test_where_chunks_stop(start: int, end: int, parting: int, is_last: bool, stops: int):
    mixed = BlockManager([GroupSize(8), STATE], 4)
    assert mixed.stop_before(start, end, parting, is_last=is_last) == stops and not mixed.can_rewind
    paged = BlockManager([GroupSize(8), GroupSize(8, 6)], 4)
    assert paged.stop_before(start, end, parting, is_last=is_last) == end and paged.can_rewind
    off = BlockManager([STATE], 4, enable_prefix_caching=False)
    assert off.stop_before(start, end, parting, is_last=is_last) == end  # nothing will be found


def test_a_state_is_kept_where_prefixes_part(depth: int):
    """The second prompt leaves one at 8 tokens, which it shares with the first and the third."""
    host = Host(depth, (None, "state"), num_blocks=64, max_num_batched_tokens=64)
    prompts = [[*prompt(8), *prompt(9, seed)] for seed in (1, 2, 3)]
    seqs = [host.generate(tokens)[0] for tokens in prompts]
    assert [seq.num_cached for seq in seqs] == [0, 0, 8]
    assert [generated(seq) for seq in seqs] == [expected(seq, host.windows) for seq in seqs]


@pytest.mark.parametrize("windows", [(None, "state"), ("state",)])
def test_a_long_prompt_needs_two_states(depth: int, windows: Any):
    host = Host(depth, windows, 2, num_blocks=64, max_num_batched_tokens=16)
    (seq,) = host.generate(prompt(90), max_tokens=20)
    assert seq.error is None and generated(seq) == expected(seq, host.windows)


@pytest.mark.parametrize("length", [23, 24])
def test_a_row_with_three_states_keeps_those_that_are_shared(depth: int, length: int):
    """The last one that an equal prompt can go on from, and the last one for the next turn; states
    between the two are written over.
    """
    host = Host(depth, (None, "state"), 3, num_blocks=64, max_num_seqs=1)
    tokens = prompt(length)
    first, again = (host.generate(tokens, max_tokens=20)[0] for _ in range(2))
    assert (first.num_cached, again.num_cached) == (0, 20)
    host.generate(prompt(6, seed=2), max_tokens=1)  # takes two, of which neither is that one
    turn = [*first.token_ids, *prompt(9, seed=1)]
    (last,) = host.generate(turn, max_tokens=20)
    assert last.num_cached == 40  # of the 42 or 43 tokens whose state there was
    for seq in (first, again, last):
        assert generated(seq) == expected(seq, host.windows)


def test_replays_end_with_blocks():
    """Tokens 5 to 12, in blocks of 4, are the rest of the second one, the third, and the first of
    the fourth. Of keys and values nothing is written again.
    """
    blocks = BlockManager([GroupSize(8), STATE], 4)
    keys, states = array("i", [0, 1, 2, 3]), array("i", [GONE, 6, 7, 4])
    made = blocks.replays((keys, states), place=10, start=5, count=8)
    assert made == [
        Replay(10, 5, 3, (GONE, 6), (GONE, 6)),
        Replay(13, 8, 4, (GONE, 6), (GONE, 7)),
        Replay(17, 12, 1, (GONE, 7), (GONE, 4)),
    ]
    assert blocks.replays((keys, states), place=0, start=8, count=1) == [
        Replay(0, 8, 1, (GONE, 6), (GONE, 7))
    ]
