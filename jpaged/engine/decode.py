"""The entries of a step in which rows go on from their last token."""

from jpaged.engine.block_manager import BlockManager
from jpaged.engine.plan import PlanEntry, dispatch
from jpaged.engine.sequence import Sequence


def decode_entries(blocks: BlockManager, rows: list[Sequence], most: int) -> list[PlanEntry]:
    """As many tokens of each row as it has steps left, `most` of them; each has the block that the
    first is written to.
    """
    # A row that waits for the host does so after every token.
    most = 1 if any(seq.waits_for_host for seq in rows) else most
    entries = []
    for seq in rows:
        steps = _steps_ahead(blocks, seq, most)
        entries.append(dispatch(seq, seq.num_dispatched, steps, draws=steps, decodes=True))
    return entries


def verify_entries(
    blocks: BlockManager, rows: list[Sequence], drafts: dict[Sequence, list[int]]
) -> list[PlanEntry]:
    """Each row's last token with its draft behind it, a draw after each. Rows with drafts come
    first; no row has tokens in flight.
    """
    entries = []
    for seq in sorted(rows, key=lambda seq: seq not in drafts):
        draft = drafts.get(seq, [])
        steps = _steps_ahead(blocks, seq, 1 + len(draft))
        start, guesses = seq.num_dispatched, tuple(draft[: steps - 1])
        entries.append(dispatch(seq, start, steps, draws=steps, decodes=True, draft=guesses))
    return entries


def _steps_ahead(blocks: BlockManager, seq: Sequence, most: int) -> int:
    """Tokens that a row can draw in one dispatch, blocks for them allocated: no other row is
    preempted for it.
    """
    start = seq.num_dispatched
    steps = min(most, seq.end - len(seq) - seq.pending)
    if steps > 1:
        steps = min(steps, blocks.reach(seq) - start)
        blocks.extend(seq, start + steps)
    return steps
