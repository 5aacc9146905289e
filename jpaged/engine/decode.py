"""The entries of a step in which rows go on from their last token."""

from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.plan import PlanEntry, dispatch
from jpaged.engine.sequence import Sequence

# Rows that decode for each token that a step of runs saves, at most: below that it is the slower.
LEAST_RUN = 4


def decode_entries(blocks: BlockManager, rows: list[Sequence], most: int) -> list[PlanEntry]:
    """As many tokens of each row as it has steps left, `most` of them; each has the block that the
    first is written to.
    """
    # A row that waits for the host, or for its mask, does so after every token.
    if any(seq.waits_for_host or seq.structured is not None for seq in rows):
        most = 1
    entries = []
    for seq in rows:
        steps = _steps_ahead(blocks, seq, most)
        entries.append(dispatch(seq, seq.num_dispatched, steps, draws=steps, decodes=True))
    return entries


def certain_runs(rows: list[Sequence], room: int) -> dict[Sequence, list[int]]:
    """The tokens of rows that go on by several which are certain, as far as there is room for them
    beside one of each row; none where too few are.
    """
    runs, left = dict[Sequence, list[int]](), room
    for seq in rows:
        if left > 0 and seq.structured is not None and len(run := seq.forced[: left + 1]) > 1:
            runs[seq] = run
            left -= len(run) - 1
    return runs if (room - left) * LEAST_RUN >= len(rows) else {}


def run_entries(
    blocks: BlockManager,
    rows: list[Sequence],
    runs: dict[Sequence, list[int]],
    *,
    guesses: bool,
) -> list[PlanEntry]:
    """Each row's next token, or its run with a draw after each. guesses: all but the first token of
    a run may be wrong.
    """
    entries = []
    for seq in rows:
        steps = _steps_ahead(blocks, seq, len(runs.get(seq, ())) or 1, one_by_one=False)
        run = tuple(runs[seq][:steps]) if steps > 1 else ()
        start, guessed = seq.num_dispatched, guesses and steps > 1
        entry = dispatch(seq, start, steps, draws=steps, decodes=True, run=run, guesses=guessed)
        entries.append(entry)
    return entries


def draft_entries(blocks: BlockManager, counts: dict[Sequence, int]) -> list[PlanEntry]:
    """What a draft model guesses after each row's last token, so many tokens; each has the blocks
    that it writes on the way. The sequences do not count them.
    """
    entries = []
    for seq, most in counts.items():
        count = _steps_ahead(blocks, seq, most)
        at = seq.num_dispatched
        entries.append(PlanEntry(seq, at, count, count, True, False, seq.epoch))
    return entries


def _steps_ahead(blocks: BlockManager, seq: Sequence, most: int, *, one_by_one: bool = True) -> int:
    """Return how many tokens a row can draw in one dispatch, blocks for them allocated: no other
    row is preempted for it. one_by_one: they are computed in a step each, not side by side.
    """
    start = seq.num_dispatched
    steps = min(most, seq.end - len(seq) - seq.pending)
    if steps > 1:
        steps = min(steps, blocks.reach(seq, one_by_one=one_by_one) - start)
        blocks.extend(seq, start + steps, one_by_one=one_by_one)
    return steps
