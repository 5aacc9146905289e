"""BlockManager: the design's worked examples, sharing, reuse, and an integrity check that sees
planted damage.
"""

from array import array
from collections.abc import Callable

import pytest
import xxhash

from jpaged.engine import block_manager
from jpaged.engine.block_manager import BlockManager
from jpaged.engine.sequence import Sequence
from jpaged.request.sampling_params import SamplingParams


def sequence(tokens: list[int] | range) -> Sequence:
    return Sequence("s", list(tokens), SamplingParams(), max_model_len=4096)


def admit(blocks: BlockManager, tokens: list[int] | range, *, write: bool = True) -> Sequence:
    """A sequence that has been admitted and, unless told otherwise, prefilled."""
    seq = sequence(tokens)
    blocks.admit(seq, blocks.match(seq))
    if write:
        blocks.close(seq, len(seq))
    return seq


def append(blocks: BlockManager, seq: Sequence, token: int) -> None:
    """One decode step: the KV of the last token is written, then a new token is known."""
    blocks.extend(seq, len(seq))
    blocks.close(seq, len(seq))
    seq.token_ids.append(token)


def counts(blocks: BlockManager, seq: Sequence) -> list[int]:
    return [blocks.blocks[b].ref_count for b in seq.block_table]


def test_worked_example_of_block_256():
    blocks = BlockManager(16, 256)
    s1 = admit(blocks, range(600))
    a, b, c = s1.block_table
    assert [blocks.blocks[x].hash is None for x in (a, b, c)] == [False, False, True]
    s2 = sequence([*range(512), *range(1000, 1008)])
    assert blocks.match(s2) == [a, b] and blocks.cost(s2, [a, b]) == 1
    blocks.admit(s2, [a, b])
    d = s2.block_table[2]
    assert list(s2.block_table) == [a, b, d] and d not in (a, b, c) and s2.num_closed == 2
    assert counts(blocks, s1) == [2, 2, 1]
    blocks.check_integrity([s1, s2])
    blocks.free(s1)
    assert [blocks.blocks[x].ref_count for x in (a, b, c)] == [1, 1, 0] and blocks.num_free == 13
    blocks.check_integrity([s2])


def test_growth_at_block_4():
    blocks = BlockManager(8, 4)
    seq = admit(blocks, range(4))
    (first,) = seq.block_table
    assert blocks.blocks[first].hash is not None
    for length in range(5, 9):  # length 5 opens a block
        seq.token_ids.append(length)
        blocks.extend(seq, len(seq))
        assert len(seq.block_table) == 2 and blocks.blocks[seq.block_table[1]].hash is None
    blocks.close(seq, 7)
    assert blocks.blocks[seq.block_table[1]].hash is None
    blocks.close(seq, 8)  # 8 closes it under its parent's hash
    second = blocks.blocks[seq.block_table[1]]
    own = array("i", seq.token_ids[4:]).tobytes()
    assert second.hash == xxhash.xxh64_intdigest(seq.hashes[0].to_bytes(8, "little") + own)
    assert second.parent == blocks.blocks[first].uid
    seq.token_ids.append(9)
    blocks.extend(seq, len(seq))  # 9 opens the next
    assert len(seq.block_table) == 3 and seq.num_closed == 2
    blocks.check_integrity([seq])


def test_chain_hash():
    blocks = BlockManager(4, 2)
    seq = admit(blocks, [1, 2, 3, 4, 5])
    first = xxhash.xxh64(b"\x01\0\0\0\x02\0\0\0").intdigest()
    second = xxhash.xxh64(first.to_bytes(8, "little") + b"\x03\0\0\0\x04\0\0\0").intdigest()
    assert [blocks.blocks[b].hash for b in seq.block_table] == [first, second, None]
    assert seq.hashes == [first, second]


@pytest.mark.parametrize(
    ("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)]
)
def test_at_least_one_token_is_computed(length: int, hits: int):
    blocks = BlockManager(16, 4)
    admit(blocks, range(12))
    assert len(blocks.match(sequence(range(length)))) == hits


def test_a_first_miss_ends_the_search():
    blocks = BlockManager(16, 2)
    seq = admit(blocks, [1, 2, 3, 4, 5, 6])
    assert blocks.match(sequence([1, 2, 9, 9, 5, 6, 7])) == [seq.block_table[0]]
    assert blocks.match(sequence([3, 4, 5, 6, 7])) == []


def test_unwritten_blocks_are_not_found():
    blocks = BlockManager(16, 4)
    seq = admit(blocks, range(12), write=False)
    assert blocks.match(sequence(range(12))) == []
    blocks.close(seq, 7)
    assert blocks.match(sequence(range(12))) == [seq.block_table[0]]
    blocks.close(seq, 5)  # a recomputed chunk takes nothing back
    assert seq.num_closed == 1


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chain hashes to the same 64 bits."""
    monkeypatch.setattr(block_manager.xxhash, "xxh64_intdigest", lambda data: 7)


@pytest.mark.usefixtures("colliding")
def test_a_collision_of_other_tokens_is_no_hit():
    blocks = BlockManager(16, 2)
    admit(blocks, [1, 2, 3])
    assert blocks.match(sequence([1, 2, 3])) == [0] and blocks.match(sequence([8, 9, 3])) == []


@pytest.mark.usefixtures("colliding")
def test_a_collision_of_equal_tokens_under_another_parent_is_no_hit():
    blocks = BlockManager(16, 2)
    one = admit(blocks, [1, 2, 5, 6, 9])  # the second block took the one hash there is
    assert blocks._by_hash == {7: one.block_table[1]}
    other = sequence([5, 6, 9])
    assert blocks.match(other) == []  # equal tokens and hash, but there they follow [1, 2]
    other = admit(blocks, [5, 6, 9])
    assert blocks.match(sequence([5, 6, 9])) == [other.block_table[0]]
    blocks.check_integrity([one, other])
    blocks.free(one)  # the entry is another's by now: it must stay when the loser is reallocated
    fill = admit(blocks, range(100, 128), write=False)
    assert blocks.num_free == 0
    assert blocks.match(sequence([5, 6, 9])) == [other.block_table[0]]
    blocks.check_integrity([other, fill])


def test_least_recently_freed_is_reused_first():
    blocks = BlockManager(6, 2)
    early, late = admit(blocks, [1, 2, 3, 4, 5, 6]), admit(blocks, [7, 8, 9, 10, 11, 12])
    order = [
        *reversed(early.block_table),
        *reversed(late.block_table),
    ]  # a prefix outlives its tail
    blocks.free(early)
    blocks.free(late)
    for i, block in enumerate(order):
        assert list(admit(blocks, [50 + i], write=False).block_table) == [block]
        left = (
            len(blocks.match(sequence([1, 2, 3, 4, 5, 6, 0]))),
            len(blocks.match(sequence([7, 8, 9, 10, 11, 12, 0]))),
        )
        assert left == (max(2 - i, 0), min(3, 5 - i))


def test_a_warm_hit_is_taken_out_of_the_middle_of_the_free_list():
    blocks = BlockManager(8, 2)
    seqs = [admit(blocks, [i, i, i]) for i in range(4)]
    for seq in seqs:
        blocks.free(seq)
    again = sequence([2, 2, 5])
    (block,) = blocks.match(again)
    assert blocks.blocks[block].ref_count == 0 and blocks.cost(again, [block]) == 2
    blocks.admit(again, [block])
    assert blocks.blocks[block].ref_count == 1 and block not in blocks._free
    blocks.check_integrity([again])


def test_reallocation_takes_the_hash_entry_first():
    blocks = BlockManager(2, 2)
    blocks.free(admit(blocks, [1, 2, 3, 4]))
    seq = admit(blocks, [7, 8, 9, 10], write=False)
    assert not blocks._by_hash and blocks.match(sequence([1, 2, 3])) == []
    assert all(
        blocks.blocks[b].hash is None and not blocks.blocks[b].token_ids for b in seq.block_table
    )


def test_duplicates_name_one_content():
    """The last block of a prompt of whole blocks is computed again; either copy may be what others
    hit and extend.
    """
    blocks = BlockManager(8, 2)
    one, two = admit(blocks, [1, 2, 3, 4]), admit(blocks, [1, 2, 3, 4])
    assert one.block_table[0] == two.block_table[0] and one.block_table[1] != two.block_table[1]
    blocks.check_integrity([one, two])
    third = admit(blocks, [1, 2, 3, 4, 7, 7, 7])  # hits the later copy
    assert counts(blocks, third) == [3, 2, 1, 1] and third.block_table[1] == two.block_table[1]
    blocks.free(third)
    for seq in (one, two):
        for token in (5, 6, 7):
            append(blocks, seq, token)
        assert (
            len(blocks.match(sequence([1, 2, 3, 4, 5, 6, 7]))) == 3
        )  # whichever copy was extended
        blocks.check_integrity([one, two])
    blocks.free(one)
    assert len(blocks.match(sequence([1, 2, 3, 4, 5, 6, 7]))) == 3
    blocks.free(two)
    third = admit(blocks, [1, 2, 3, 4, 5, 6, 7])
    assert counts(blocks, third) == [1, 1, 1, 1]
    blocks.check_integrity([third])


def test_an_orphan_does_not_hide_its_content():
    """A block whose parent's entry is gone cannot be found; the same content under a new parent
    must take its entry.
    """
    blocks = BlockManager(8, 2)
    one, twin = admit(blocks, [1, 2, 3, 4, 5]), sequence([1, 2])
    blocks.admit(twin, [])  # as a request for prompt logprobs is: it takes no hits
    blocks.close(twin, 2)
    blocks.free(twin)
    fill = admit(blocks, range(90, 100), write=False)
    assert blocks.num_free == 0 and blocks.match(sequence([1, 2, 3, 4, 5])) == []
    blocks.free(fill)
    again = admit(blocks, [1, 2, 3, 4, 5])
    assert blocks.match(sequence([1, 2, 3, 4, 5])) == list(again.block_table[:2])
    blocks.check_integrity([one, again])


def test_reset_forgets_everything():
    blocks = BlockManager(8, 2)
    free, used = admit(blocks, [1, 2, 3]), admit(blocks, [4, 5, 6])
    blocks.free(free)
    blocks.reset()
    assert blocks.match(sequence([1, 2, 3])) == blocks.match(sequence([4, 5, 6])) == []
    assert blocks.num_used == 2
    blocks.check_integrity([used])


def test_reset_hashes_nothing_that_was_written_before():
    blocks = BlockManager(12, 2)
    seq = admit(blocks, [1])  # its open block is half written
    blocks.reset()
    for token in (2, 3, 4, 5):
        append(blocks, seq, token)
    assert (
        seq.num_closed == 2
        and not blocks._by_hash
        and blocks.match(sequence([1, 2, 3, 4, 5])) == []
    )
    blocks.check_integrity([seq])
    fresh = admit(blocks, [1, 2, 3, 4, 5])
    assert blocks.match(sequence([1, 2, 3, 4, 5])) == list(fresh.block_table[:2])
    blocks.free(seq)
    blocks.check_integrity([fresh])
    again = admit(blocks, range(20, 33))
    assert (
        again.num_closed == 6 and len(blocks.match(sequence(range(20, 33)))) == 6
    )  # the old blocks serve anew
    blocks.check_integrity([fresh, again])


def test_without_prefix_caching_nothing_is_hashed():
    blocks = BlockManager(8, 2, enable_prefix_caching=False)
    seq = admit(blocks, [1, 2, 3, 4, 5])
    assert blocks.match(sequence([1, 2, 3])) == [] and not blocks._by_hash and seq.num_closed == 0
    blocks.check_integrity([seq])


def test_freeing_twice_is_caught():
    blocks = BlockManager(8, 2)
    seq = admit(blocks, [1, 2, 3])
    stale = array("i", seq.block_table)
    blocks.free(seq)
    blocks.free(seq)  # it holds nothing any more
    seq.block_table = stale
    with pytest.raises(AssertionError, match="is free already"):
        blocks.free(seq)


def damage(
    change: Callable[[BlockManager, Sequence, Sequence], object],
) -> tuple[BlockManager, list[Sequence]]:
    """Two sequences [0, 1 | 2, 3 | 4] and [0, 1 | 2, 3 | 9] sharing two blocks, a freed block, and
    then one change.
    """
    blocks = BlockManager(8, 2)
    blocks.free(admit(blocks, [50, 51]))
    one, two = admit(blocks, [0, 1, 2, 3, 4]), admit(blocks, [0, 1, 2, 3, 9])
    one.num_dispatched = two.num_dispatched = 5
    blocks.check_integrity([one, two])
    change(blocks, one, two)
    return blocks, [one, two]


def _set(
    name: str, value: object, place: int = 1
) -> Callable[[BlockManager, Sequence, Sequence], None]:
    return lambda blocks, one, two: setattr(blocks.blocks[one.block_table[place]], name, value)


DAMAGE: dict[str, tuple[Callable[[BlockManager, Sequence, Sequence], object], str]] = {
    "ref count too low": (_set("ref_count", 1), r"1 != 2 owners"),
    "ref count too high": (_set("ref_count", 3), r"3 != 2 owners"),
    "used block in the free list": (
        lambda b, one, _: b._free.update({one.block_table[0]: None}),
        "both free and used",
    ),
    "free block not in the list": (lambda b, *_: b._free.popitem(), "or neither"),
    "block twice in a table": (
        lambda b, one, _: one.block_table.__setitem__(1, one.block_table[0]),
        "a block twice",
    ),
    "block of another": (
        lambda b, one, two: two.block_table.__setitem__(2, one.block_table[2]),
        "holds two things",
    ),
    "block in two places": (
        lambda b, one, two: two.block_table.append(one.block_table[2]),
        "holds two things",
    ),
    "owner too many": (_set("ref_count", 2, place=2), "2 != 1 owners"),
    "unowned used block": (
        lambda b, one, two: b.blocks[7].__setattr__("ref_count", 1),
        "1 != 0 owners",
    ),
    "entry of an open block": (
        lambda b, one, _: b._by_hash.update({5: one.block_table[2]}),
        "stale hash entry 0x5",
    ),
    "entry under a wrong hash": (
        lambda b, one, _: b._by_hash.update({5: one.block_table[0]}),
        "stale hash entry 0x5",
    ),
    "other tokens": (_set("token_ids", b"\x09\0\0\0\x09\0\0\0"), "over other tokens"),
    "wrong hash": (_set("hash", 5), "has hash 0x5"),
    "wrong parent": (_set("parent", 77), "another parent"),
    "never closed": (_set("hash", None), "should be closed"),
    "closed too early": (_set("hash", 5, place=2), "before it is full"),
    "wrong hash of a free block": (
        lambda b, *_: b.blocks[0].__setattr__("hash", 5),
        "has hash 0x5",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_integrity_sees(name: str):
    change, message = DAMAGE[name]
    blocks, owners = damage(change)
    with pytest.raises(AssertionError, match=message):
        blocks.check_integrity(owners)


@pytest.mark.parametrize("num_blocks", [8, 4096])
def test_every_operation_is_constant_a_block(num_blocks: int, monkeypatch: pytest.MonkeyPatch):
    """Nothing looks at more of the pool than the blocks it is about."""
    blocks = BlockManager(num_blocks, 2)
    touched: set[int] = set()

    class Watched(list):
        def __getitem__(self, i):
            touched.add(i)
            return super().__getitem__(i)

        def __iter__(self):
            raise AssertionError("a walk over the pool")

    seq = admit(blocks, range(6))
    blocks.free(seq)
    monkeypatch.setattr(blocks, "blocks", Watched(blocks.blocks))
    seq = admit(blocks, range(6))
    append(blocks, seq, 6)
    blocks.free(seq)
    assert len(touched) <= 4
