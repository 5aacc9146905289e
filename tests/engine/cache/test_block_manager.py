"""BlockManager: the design's worked examples, sharing, reuse, and an integrity check that sees
planted damage.
"""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from jpaged.engine.cache import prefix_cache
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.kinds import CacheKind, GroupSize
from jpaged.engine.cache.prefix_cache import Match
from jpaged.engine.integrity import check_blocks
from jpaged.engine.sequence import Sequence
from jpaged.sampling_params import SamplingParams


def manager(num_blocks: int, block_size: int, **options: Any) -> BlockManager:
    """Of one group of layers, which see all tokens."""
    return BlockManager([GroupSize(num_blocks)], block_size, **options)


def group(blocks: BlockManager) -> CacheKind:
    return blocks.groups[0]


def sequence(tokens: list[int] | range) -> Sequence:
    return Sequence("s", list(tokens), SamplingParams(), max_model_len=4096)


def admit(blocks: BlockManager, tokens: list[int] | range, *, write: bool = True) -> Sequence:
    """A sequence that has been admitted and, unless told otherwise, prefilled."""
    seq = sequence(tokens)
    blocks.admit(seq, blocks.cache.match(seq))
    if write:
        blocks.cache.close(seq, len(seq))
    return seq


def append(blocks: BlockManager, seq: Sequence, token: int) -> None:
    """One decode step: the KV of the last token is written, then a new token is known."""
    blocks.extend(seq, len(seq))
    blocks.cache.close(seq, len(seq))
    seq.token_ids.append(token)


def found(blocks: BlockManager, tokens: list[int] | range) -> list[int]:
    """The blocks of the longest cached prefix."""
    return blocks.cache.match(sequence(tokens)).tables[0]


def cost(blocks: BlockManager, seq: Sequence, match: Match) -> int:
    """Free blocks that admitting a sequence takes: they and the greatest reserve are all."""
    free = len(group(blocks).free)
    room = (blocks.has_room(seq, match, len(seq), reserve=free - n) for n in range(free + 1))
    return next(n for n, has_room in enumerate(room) if has_room)


def hashes(blocks: BlockManager, seq: Sequence) -> list[int | None]:
    """Of each block of a sequence, None while it is open."""
    contents = [group(blocks).blocks[b].content for b in seq.block_tables[0]]
    return [None if content is None else content.hash for content in contents]


def content(blocks: BlockManager, block_id: int) -> Content:
    held = group(blocks).blocks[block_id].content
    assert held is not None
    return held


def counts(blocks: BlockManager, seq: Sequence) -> list[int]:
    return [group(blocks).blocks[b].ref_count for b in seq.block_tables[0]]


def test_worked_example_of_block_256():
    blocks = manager(16, 256)
    s1 = admit(blocks, range(600))
    a, b, c = s1.block_tables[0]
    assert [h is None for h in hashes(blocks, s1)] == [False, False, True]
    s2 = sequence([*range(512), *range(1000, 1008)])
    match = blocks.cache.match(s2)
    assert match.tables == ([a, b],) and cost(blocks, s2, match) == 1
    blocks.admit(s2, match)
    d = s2.block_tables[0][2]
    assert list(s2.block_tables[0]) == [a, b, d] and d not in (a, b, c) and s2.num_closed == 2
    assert counts(blocks, s1) == [2, 2, 1]
    check_blocks(blocks, [s1, s2])
    blocks.free(s1)
    assert [group(blocks).blocks[x].ref_count for x in (a, b, c)] == [1, 1, 0] and len(
        group(blocks).free
    ) == 13
    check_blocks(blocks, [s2])


def test_growth_at_block_4():
    blocks = manager(8, 4)
    seq = admit(blocks, range(4))
    (first,) = seq.block_tables[0]
    assert content(blocks, first).parent is blocks.cache.contents.root
    for length in range(5, 9):  # length 5 opens a block
        seq.token_ids.append(length)
        blocks.extend(seq, len(seq))
        assert len(hashes(blocks, seq)) == 2 and hashes(blocks, seq)[1] is None
    blocks.cache.close(seq, 7)
    assert hashes(blocks, seq)[1] is None
    blocks.cache.close(seq, 8)  # 8 closes it under its parent's hash
    second = content(blocks, seq.block_tables[0][1])
    own = array("i", seq.token_ids[4:]).tobytes()
    assert second.hash == xxhash.xxh64_intdigest(seq.hashes[0].to_bytes(8, "little") + own)
    assert second.parent is content(blocks, first)
    seq.token_ids.append(9)
    blocks.extend(seq, len(seq))  # 9 opens the next
    assert len(seq.block_tables[0]) == 3 and seq.num_closed == 2
    check_blocks(blocks, [seq])


def test_chain_hash():
    blocks = manager(4, 2)
    seq = admit(blocks, [1, 2, 3, 4, 5])
    first = xxhash.xxh64(b"\x01\0\0\0\x02\0\0\0").intdigest()
    second = xxhash.xxh64(first.to_bytes(8, "little") + b"\x03\0\0\0\x04\0\0\0").intdigest()
    assert hashes(blocks, seq) == [first, second, None]
    assert seq.hashes == [first, second]


@pytest.mark.parametrize(
    ("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)]
)
def test_at_least_one_token_is_computed(length: int, hits: int):
    blocks = manager(16, 4)
    admit(blocks, range(12))
    assert len(found(blocks, range(length))) == hits


def test_a_first_miss_ends_the_search():
    blocks = manager(16, 2)
    seq = admit(blocks, [1, 2, 3, 4, 5, 6])
    assert found(blocks, [1, 2, 9, 9, 5, 6, 7]) == [seq.block_tables[0][0]]
    assert found(blocks, [3, 4, 5, 6, 7]) == []


def test_unwritten_blocks_are_not_found():
    blocks = manager(16, 4)
    seq = admit(blocks, range(12), write=False)
    assert found(blocks, range(12)) == []
    blocks.cache.close(seq, 7)
    assert found(blocks, range(12)) == [seq.block_tables[0][0]]
    blocks.cache.close(seq, 5)  # a recomputed chunk takes nothing back
    assert seq.num_closed == 1


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chain hashes to the same 64 bits."""
    monkeypatch.setattr(prefix_cache.xxhash, "xxh64_intdigest", lambda data: 7)


@pytest.mark.usefixtures("colliding")
def test_a_collision_of_other_tokens_is_no_hit():
    blocks = manager(16, 2)
    admit(blocks, [1, 2, 3])
    assert found(blocks, [1, 2, 3]) == [0] and found(blocks, [8, 9, 3]) == []


@pytest.mark.usefixtures("colliding")
def test_a_collision_of_equal_tokens_under_another_parent_is_no_hit():
    blocks = manager(16, 2)
    one = admit(blocks, [1, 2, 5, 6, 9])  # the second block took the one hash there is
    assert dict(blocks.cache.contents._known) == {7: content(blocks, one.block_tables[0][1])}
    other = sequence([5, 6, 9])
    assert (
        found(blocks, other.token_ids) == []
    )  # equal tokens and hash, but there they follow [1, 2]
    other = admit(blocks, [5, 6, 9])
    assert found(blocks, [5, 6, 9]) == [other.block_tables[0][0]]
    check_blocks(blocks, [one, other])
    blocks.free(one)  # the entry is another's by now: it must stay when the loser is reallocated
    fill = admit(blocks, range(100, 128), write=False)
    assert len(group(blocks).free) == 0
    assert found(blocks, [5, 6, 9]) == [other.block_tables[0][0]]
    check_blocks(blocks, [other, fill])


def test_least_recently_freed_is_reused_first():
    blocks = manager(6, 2)
    early, late = admit(blocks, [1, 2, 3, 4, 5, 6]), admit(blocks, [7, 8, 9, 10, 11, 12])
    order = [
        *reversed(early.block_tables[0]),
        *reversed(late.block_tables[0]),
    ]  # a prefix outlives its tail
    blocks.free(early)
    blocks.free(late)
    for i, block in enumerate(order):
        assert list(admit(blocks, [50 + i], write=False).block_tables[0]) == [block]
        left = (
            len(found(blocks, [1, 2, 3, 4, 5, 6, 0])),
            len(found(blocks, [7, 8, 9, 10, 11, 12, 0])),
        )
        assert left == (max(2 - i, 0), min(3, 5 - i))


def test_a_warm_hit_is_taken_out_of_the_middle_of_the_free_list():
    blocks = manager(8, 2)
    seqs = [admit(blocks, [i, i, i]) for i in range(4)]
    for seq in seqs:
        blocks.free(seq)
    again = sequence([2, 2, 5])
    match = blocks.cache.match(again)
    ((block,),) = match.tables
    assert group(blocks).blocks[block].ref_count == 0 and cost(blocks, again, match) == 2
    blocks.admit(again, match)
    assert group(blocks).blocks[block].ref_count == 1 and block not in group(blocks).free
    check_blocks(blocks, [again])


def test_reallocation_takes_the_hash_entry_first():
    blocks = manager(2, 2)
    blocks.free(admit(blocks, [1, 2, 3, 4]))
    seq = admit(blocks, [7, 8, 9, 10], write=False)
    assert not group(blocks).cached and found(blocks, [1, 2, 3]) == []
    assert hashes(blocks, seq) == [None, None] and not blocks.cache.contents._known


def test_duplicates_name_one_content():
    """The last block of a prompt of whole blocks is computed again; either copy may be what others
    hit and extend.
    """
    blocks = manager(8, 2)
    one, two = admit(blocks, [1, 2, 3, 4]), admit(blocks, [1, 2, 3, 4])
    assert (
        one.block_tables[0][0] == two.block_tables[0][0]
        and one.block_tables[0][1] != two.block_tables[0][1]
    )
    check_blocks(blocks, [one, two])
    third = admit(blocks, [1, 2, 3, 4, 7, 7, 7])  # hits the later copy
    assert (
        counts(blocks, third) == [3, 2, 1, 1] and third.block_tables[0][1] == two.block_tables[0][1]
    )
    blocks.free(third)
    for seq in (one, two):
        for token in (5, 6, 7):
            append(blocks, seq, token)
        assert len(found(blocks, [1, 2, 3, 4, 5, 6, 7])) == 3  # whichever copy was extended
        check_blocks(blocks, [one, two])
    blocks.free(one)
    assert len(found(blocks, [1, 2, 3, 4, 5, 6, 7])) == 3
    blocks.free(two)
    third = admit(blocks, [1, 2, 3, 4, 5, 6, 7])
    assert counts(blocks, third) == [1, 1, 1, 1]
    check_blocks(blocks, [third])


def test_an_orphan_does_not_hide_its_content():
    """A block whose parent's entry is gone cannot be found; the same content under a new parent
    must take its entry.
    """
    blocks = manager(8, 2)
    one, twin = admit(blocks, [1, 2, 3, 4, 5]), sequence([1, 2])
    blocks.admit(
        twin, blocks.cache.no_match()
    )  # as a request for prompt logprobs is: it takes no hits
    blocks.cache.close(twin, 2)
    blocks.free(twin)
    fill = admit(blocks, range(90, 100), write=False)
    assert len(group(blocks).free) == 0 and found(blocks, [1, 2, 3, 4, 5]) == []
    blocks.free(fill)
    again = admit(blocks, [1, 2, 3, 4, 5])
    assert found(blocks, [1, 2, 3, 4, 5]) == list(again.block_tables[0][:2])
    check_blocks(blocks, [one, again])


def test_reset_forgets_everything():
    blocks = manager(8, 2)
    free, used = admit(blocks, [1, 2, 3]), admit(blocks, [4, 5, 6])
    blocks.free(free)
    blocks.cache.reset()
    assert found(blocks, [1, 2, 3]) == found(blocks, [4, 5, 6]) == []
    assert blocks.num_used == 2
    check_blocks(blocks, [used])


def test_reset_hashes_nothing_that_was_written_before():
    blocks = manager(12, 2)
    seq = admit(blocks, [1])  # its open block is half written
    blocks.cache.reset()
    for token in (2, 3, 4, 5):
        append(blocks, seq, token)
    assert seq.num_closed == 0 and not group(blocks).cached
    assert found(blocks, [1, 2, 3, 4, 5]) == []
    check_blocks(blocks, [seq])
    fresh = admit(blocks, [1, 2, 3, 4, 5])
    assert found(blocks, [1, 2, 3, 4, 5]) == list(fresh.block_tables[0][:2])
    blocks.free(seq)
    check_blocks(blocks, [fresh])
    again = admit(blocks, range(20, 33))
    assert (
        again.num_closed == 6 and len(found(blocks, range(20, 33))) == 6
    )  # the old blocks serve anew
    check_blocks(blocks, [fresh, again])


def test_without_prefix_caching_nothing_is_hashed():
    blocks = manager(8, 2, enable_prefix_caching=False)
    seq = admit(blocks, [1, 2, 3, 4, 5])
    assert found(blocks, [1, 2, 3]) == [] and not group(blocks).cached and seq.num_closed == 0
    check_blocks(blocks, [seq])


def test_freeing_twice_is_caught():
    blocks = manager(8, 2)
    seq = admit(blocks, [1, 2, 3])
    stale = array("i", seq.block_tables[0])
    blocks.free(seq)
    blocks.free(seq)  # it holds nothing any more
    seq.block_tables = (stale,)
    with pytest.raises(AssertionError, match="is free already"):
        blocks.free(seq)


def damage(
    change: Callable[[BlockManager, Sequence, Sequence], object],
) -> tuple[BlockManager, list[Sequence]]:
    """Two sequences [0, 1 | 2, 3 | 4] and [0, 1 | 2, 3 | 9] sharing two blocks, a freed block, and
    then one change.
    """
    blocks = manager(8, 2)
    blocks.free(admit(blocks, [50, 51]))
    one, two = admit(blocks, [0, 1, 2, 3, 4]), admit(blocks, [0, 1, 2, 3, 9])
    one.num_dispatched = two.num_dispatched = 5
    check_blocks(blocks, [one, two])
    change(blocks, one, two)
    return blocks, [one, two]


Damage = Callable[[BlockManager, Sequence, Sequence], object]


def _set(name: str, value: object, place: int = 1) -> Damage:
    """An attribute of a block of the first sequence."""

    def change(blocks: BlockManager, one: Sequence, two: Sequence) -> None:
        setattr(group(blocks).blocks[one.block_tables[0][place]], name, value)

    return change


def _set_content(name: str, value: object) -> Damage:
    """Of what the second block holds, which both sequences share."""
    return lambda blocks, one, _: setattr(content(blocks, one.block_tables[0][1]), name, value)


def _twin(blocks: BlockManager, one: Sequence, two: Sequence) -> None:
    """Equal to the content of the second block, and another."""
    held = content(blocks, one.block_tables[0][1])
    block = group(blocks).blocks[one.block_tables[0][1]]
    block.content = Content(held.hash, held.token_ids, held.parent)


OTHER = Content(5, b"", None)
DAMAGE: dict[str, tuple[Damage, str]] = {
    "ref count too low": (_set("ref_count", 1), r"1 != 2 owners"),
    "ref count too high": (_set("ref_count", 3), r"3 != 2 owners"),
    "used block in the free list": (
        lambda b, one, _: group(b).free.update({one.block_tables[0][0]: None}),
        "both free and used",
    ),
    "free block not in the list": (lambda b, *_: group(b).free.popitem(), "or neither"),
    "block twice in a table": (
        lambda b, one, _: one.block_tables[0].__setitem__(1, one.block_tables[0][0]),
        "a block twice",
    ),
    "block of another": (
        lambda b, one, two: two.block_tables[0].__setitem__(2, one.block_tables[0][2]),
        "holds two things",
    ),
    "block in two places": (
        lambda b, one, two: two.block_tables[0].append(one.block_tables[0][2]),
        "holds two things",
    ),
    "block given back too early": (
        lambda b, one, two: (one.block_tables[0].__setitem__(0, -1), one.first_held.insert(0, 1)),
        "lost a block",
    ),
    "hole in a table": (
        lambda b, one, two: one.block_tables[0].__setitem__(1, -1),
        r"holes: .*\[1, -1, 3\]",
    ),
    "owner too many": (_set("ref_count", 2, place=2), "2 != 1 owners"),
    "unowned used block": (
        lambda b, one, two: group(b).blocks[7].__setattr__("ref_count", 1),
        "1 != 0 owners",
    ),
    "entry of an open block": (
        lambda b, one, _: group(b).cached.update({OTHER: one.block_tables[0][2]}),
        "stale entry of block",
    ),
    "entry of another content": (
        lambda b, one, _: group(b).cached.update({OTHER: one.block_tables[0][0]}),
        "stale entry of block",
    ),
    "other tokens": (_set_content("token_ids", b"\x09\0\0\0\x09\0\0\0"), "over other tokens"),
    "wrong hash": (_set_content("hash", 5), "has hash 5"),
    "wrong parent": (_set_content("parent", OTHER), "another parent"),
    "another's content": (_twin, "as another's"),
    "never closed": (_set("content", None), "should be closed"),
    "closed too early": (_set("content", OTHER, place=2), "before its time"),
    "wrong hash of a free block": (
        lambda b, *_: setattr(content(b, 0), "hash", 5),
        "has hash 5",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_integrity_sees(name: str):
    change, message = DAMAGE[name]
    blocks, owners = damage(change)
    with pytest.raises(AssertionError, match=message):
        check_blocks(blocks, owners)


@pytest.mark.parametrize("num_blocks", [8, 4096])
def test_every_operation_is_constant_a_block(num_blocks: int, monkeypatch: pytest.MonkeyPatch):
    """Nothing looks at more of the pool than the blocks it is about."""
    blocks = manager(num_blocks, 2)
    touched: set[int] = set()

    class Watched(list):
        def __getitem__(self, i):
            touched.add(i)
            return super().__getitem__(i)

        def __iter__(self):
            raise AssertionError("a walk over the pool")

    seq = admit(blocks, range(6))
    blocks.free(seq)
    monkeypatch.setattr(group(blocks), "blocks", Watched(group(blocks).blocks))
    seq = admit(blocks, range(6))
    append(blocks, seq, 6)
    blocks.free(seq)
    assert len(touched) <= 4
