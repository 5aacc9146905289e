"""What must hold between steps, asserted: of blocks, rows and queues, and of a plan. For tests, and
whoever hunts a fault.
"""

from collections import Counter
from collections.abc import Iterable

from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.kinds import GONE, CacheKind, State
from jpaged.engine.cache.prefix_cache import digest
from jpaged.engine.plan import Plan
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
        if not seq.is_prefilling and not seq.score_only:
            drawn = seq.candidates is not None
            at = len(seq) + seq.pending - 1 + drawn
            assert seq.num_dispatched == at, f"{seq!r}: {seq.num_dispatched}"
    for seq in queues.waiting:
        assert seq.status is Status.WAITING and not seq.block_tables
        assert seq.device_row == -1 and seq.candidates is None
    check_store(queues.blocks)
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

    A shared block has the same table index and the same tokens in every owner.
    """
    owners = list(owners)
    for seq in owners:
        for group, table, first in zip(
            blocks.groups, seq.block_tables, seq.first_held, strict=True
        ):
            group.check(table, first, seq.num_dispatched)
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
        if isinstance(group, State):
            assert group.passed.keys() <= group.free.keys(), "a state in use may be reused"
        _check_contents(blocks, group)


def check_store(blocks: BlockManager) -> None:
    """Assert that the store keeps blocks of the current weights within its bytes, and that what is
    still to be loaded fills blocks that are closed over the same content.
    """
    if blocks.traffic is None:
        return
    blocks.traffic.store.check(blocks.cache.contents.root)
    for (at, block_id), move in blocks.traffic.loads.items():
        held = blocks.groups[at].blocks[block_id].content
        assert block_id in blocks.groups[at].unwritten, "a load that is taken for written"
        is_same = held is move.slot.content and move.slot.group == at
        assert is_same or held is None, f"block {block_id} is loaded with another's content"


def _count_owners(blocks: BlockManager, at: int, owners: list[Sequence]) -> list[int]:
    """Return the number of owners of each block of a group, by its id."""
    group = blocks.groups[at]
    counts = [0] * group.num_blocks
    places: dict[int, tuple[int, bytes]] = {}
    for seq in owners:
        table, first = seq.block_tables[at], seq.first_held[at]
        held = [(i, b) for i, b in enumerate(table) if i >= first and b != GONE]
        assert len({b for _, b in held}) == len(held), f"{seq!r} holds a block twice"
        for i, block_id in held:
            counts[block_id] += 1
            written = seq.block_bytes(i, blocks.block_size, seq.num_dispatched)
            place = places.setdefault(block_id, (i, written))
            assert place == (i, written), f"block {block_id} holds two things"
            content = group.blocks[block_id].content
            if content is not None or group.is_whole(i, 0):
                _check_closed(blocks, seq, i, content)
    return counts


def _check_closed(blocks: BlockManager, seq: Sequence, i: int, content: Content | None) -> None:
    """Assert that block i of a sequence is closed over its tokens, if it is to be closed."""
    name = f"block {i} of {seq!r}"
    if blocks.cache.is_stale(seq) or i >= seq.num_closed:
        assert content is None, f"{name} is closed before its time"
        return
    assert content is not None, f"{name} should be closed"
    assert content.token_ids == seq.block_bytes(i, blocks.block_size), (
        f"{name} is closed over other tokens"
    )
    parent = seq.contents[i - 1] if i else blocks.cache.contents.root
    assert content.parent is parent, f"{name} has another parent"
    assert content is seq.contents[i], f"{name} is closed as another's"


def _check_contents(blocks: BlockManager, group: CacheKind) -> None:
    for block in group.blocks:
        if (content := block.content) is not None:
            assert content.parent is not None, f"block {block.id} is closed as a root"
            true = digest(content.parent.hash, content.token_ids)
            assert content.hash == true, f"block {block.id} has hash {content.hash}"
            root = blocks.cache.contents.root
            assert content.root is root, f"block {block.id} is of other weights"
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
                if block_id == GONE and queues.blocks.groups[at].skips(position, entry.end):
                    continue
                assert block_id != GONE, f"{entry.seq!r} writes where its window was"
                assert block_id not in held, f"{entry.seq!r} writes another's block {block_id}"
