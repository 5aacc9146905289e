"""What must hold between steps, asserted: of blocks, rows and queues, and of a plan. For tests, and
whoever hunts a fault.
"""

from collections import Counter
from collections.abc import Iterable

from jpaged.engine.block_manager import BlockManager
from jpaged.engine.blocks import GONE, BlockGroup, Content
from jpaged.engine.plan import Plan
from jpaged.engine.prefix_cache import digest
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Sequence, Status


def check(queues: Queues, plan: Plan | None = None) -> None:
    """Assert that blocks are owned as the tables say, that rows and queues agree, and that a plan
    writes its own blocks.
    """
    check_blocks(queues.blocks, queues.running)
    rows = [seq.device_row for seq in queues.running]
    assert sorted(rows + queues.free_rows) == list(range(queues.max_num_seqs)), "rows leaked"
    check_adapters(queues)
    for seq in (*queues.running, *queues.waiting):
        assert seq.token_ids[seq.prompt_len :] == seq.generated.token_ids, f"{seq!r}: two texts"
    queues.waiting.check(queues.running)
    for seq in queues.running:
        reach = min(map(len, seq.block_tables)) * queues.blocks.block_size
        assert seq.status is Status.RUNNING and seq.num_dispatched <= reach
        assert seq.swapped is None, f"{seq!r} runs and is on the host too"
        if not seq.is_prefilling and not seq.score_only:
            drawn = seq.candidates is not None
            at = len(seq) + seq.pending - 1 + drawn
            assert seq.num_dispatched == at, f"{seq!r}: {seq.num_dispatched}"
    for seq in queues.waiting:
        assert seq.status is Status.WAITING and not seq.block_tables
        assert seq.device_row == -1 and seq.candidates is None
    swapping = queues.swapping
    held = sum(seq.swapped.num_bytes for seq in queues.waiting if seq.swapped is not None)
    assert held <= swapping.used_bytes <= swapping.host_bytes, "host bytes leaked"
    if plan is not None:
        _check_writes(queues, plan)


def check_adapters(queues: Queues) -> None:
    """Assert that each running row's adapter lies in the row's slot, and that users are counted."""
    slots = queues.adapters
    users = Counter(seq.adapter for seq in queues.running if seq.adapter is not None)
    assert dict(users) == slots.users, "adapters leaked"
    assert len(set(slots.places.values())) == len(slots.places) <= slots.count
    for seq in queues.running:
        slot = None if seq.adapter is None else slots.places[seq.adapter]
        assert seq.adapter_slot == slot, f"{seq!r} is in another's slot"


def check_blocks(blocks: BlockManager, owners: Iterable[Sequence]) -> None:
    """Assert that reference counts equal the tables, free and used make all, and every cached block
    is what it is found for.

    Owners of one block have it at the same place of their tables, over the same tokens.
    """
    owners = list(owners)
    for at, group in enumerate(blocks.groups):
        counts = _count_owners(blocks, at, owners)
        for block in group.blocks:
            count = counts[block.id]
            assert block.ref_count == count, (
                f"block {block.id}: {block.ref_count} != {count} owners"
            )
            assert (block.ref_count == 0) == (block.id in group.free), (
                f"block {block.id} is both free and used, or neither"
            )
        _check_contents(group)


def _count_owners(blocks: BlockManager, at: int, owners: list[Sequence]) -> list[int]:
    """The owners of each block of a group, whose tables hold what they should."""
    group = blocks.groups[at]
    counts = [0] * group.num_blocks
    places: dict[int, tuple[int, bytes]] = {}
    for seq in owners:
        table, first = seq.block_tables[at], seq.first_held[at]
        held = list(table[first:])
        assert GONE not in held and all(b == GONE for b in table[:first]), f"{seq!r}: {table}"
        assert first <= group.first_seen(seq.num_dispatched), f"{seq!r} lost a block that it sees"
        assert len(set(held)) == len(held), f"{seq!r} holds a block twice"
        for i, block_id in enumerate(held, first):
            counts[block_id] += 1
            written = blocks.cache.token_bytes(seq, i, seq.num_dispatched)
            place = places.setdefault(block_id, (i, written))
            assert place == (i, written), f"block {block_id} holds two things"
            _check_closed(blocks, seq, i, group.blocks[block_id].content)
    return counts


def _check_closed(blocks: BlockManager, seq: Sequence, i: int, content: Content | None) -> None:
    """Block i of a sequence is closed over its own tokens, if it is to be closed."""
    name = f"block {i} of {seq!r}"
    if blocks.cache.is_stale(seq) or i >= seq.num_closed:
        assert content is None, f"{name} is closed before its time"
        return
    assert content is not None, f"{name} should be closed"
    assert content.token_ids == blocks.cache.token_bytes(seq, i), (
        f"{name} is closed over other tokens"
    )
    parent = seq.contents[i - 1] if i else None
    assert content.parent is parent, f"{name} has another parent"
    assert content is seq.contents[i], f"{name} is closed as another's"


def _check_contents(group: BlockGroup) -> None:
    for block in group.blocks:
        if (content := block.content) is not None:
            before = None if content.parent is None else content.parent.hash
            true = digest(before, content.token_ids)
            assert content.hash == true, f"block {block.id} has hash {content.hash:#x}"
    for content, block_id in group.cached.items():
        assert group.blocks[block_id].content is content, f"stale entry of block {block_id}"


def _check_writes(queues: Queues, plan: Plan) -> None:
    size = queues.blocks.block_size
    admitted = {entry.seq: row for row, entry in enumerate(plan.entries) if entry.is_new}
    for row, entry in enumerate(plan.entries):
        # Only rows admitted further down in the plan may read along: they attend after this one has
        # written.
        others = [s for s in queues.running if s is not entry.seq and admitted.get(s, -1) < row]
        for at in range(len(queues.blocks.groups)):
            held = {block_id for seq in others for block_id in seq.block_tables[at]}
            for position in range(entry.start, entry.end):
                block_id = entry.seq.block_tables[at][position // size]
                assert block_id != GONE, f"{entry.seq!r} writes where its window was"
                assert block_id not in held, f"{entry.seq!r} writes another's block {block_id}"
