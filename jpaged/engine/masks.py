"""Masks: what each row of a step may draw, made on the host while the model runs.

A step with rows of a given form is dispatched in two parts: the model, and once all that came
before it is committed, the draw under the masks that follow from it.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from jpaged.engine.constraint import Constraint
from jpaged.engine.plan import Plan, PlanEntry
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Sequence, Status
from jpaged.errors import RequestError

ALL = np.int32(-1)  # the bits of 32 tokens that may be drawn


def masks_of(work: list[tuple[Plan, Queues]], rows: int) -> np.ndarray:
    """Return int32 [plans * rows, words], a bit a token for each row that draws, `rows` of them for
    each plan. A sequence that cannot go on ends here, and its row has no mask.

    All that was dispatched before the plans is committed.
    """
    drawing: list[tuple[int, PlanEntry, Queues]] = []  # with the last row of each
    for at, (plan, queues) in enumerate(work):
        row = at * rows - 1
        for entry in plan.entries:
            row += (draws := entry.num_draws)
            if draws and entry.seq.structured is not None:
                drawing.append((row, entry, queues))
    grammars = drawing[0][1].seq.structured.grammars
    masks_SW = np.full((len(work) * rows, grammars.words), ALL, np.int32)
    live = [row for row in drawing if row[1].seq.status is not Status.FINISHED]
    guessing = [row for row in live if row[1].guesses]
    live = [row for row in live if not row[1].guesses]
    for row, entry, queues in guessing:
        first = row + 1 - entry.num_draws
        if (error := _mask_guesses(entry, masks_SW[first : row + 1])) is not None:
            queues.finish(entry.seq, "error", error=error)
    for row, entry, _ in live:
        if entry.run:
            for before, token in enumerate(reversed(entry.run[1:]), 1):
                masks_SW[row - before] = 0
                masks_SW.view(np.uint32)[row - before, token >> 5] = 1 << (token & 31)
            entry.seq.structured.advance(entry.run[1:])
    _fill([(entry.seq.structured, row) for row, entry, _ in live], masks_SW)
    allowed_S = np.bitwise_count(masks_SW).sum(axis=1, dtype=np.uint32).tolist()
    for row, entry, queues in live:
        seq, allowed, extra = entry.seq, allowed_S[row], max(len(entry.run) - 1, 0)
        if not allowed or seq.structured.error is not None:
            mask_W = masks_SW[row]
            _renew(seq, entry.run[1:], mask_W)
            allowed = int(np.bitwise_count(mask_W).sum())
            if (error := _error(seq, allowed)) is not None:
                mask_W[:] = ALL
                queues.finish(seq, "error", error=error)
                continue
        asked, drawn = seq.sampling_params, seq.num_generated + extra
        if asked.ignore_eos or drawn < asked.min_tokens:
            allowed = _keep_open(seq, masks_SW[row], allowed, drawn)
        seq.ahead = len(seq) + extra, _certain(seq) if allowed == 1 else []
        if extra:
            seq.structured.go_back(extra)
    return masks_SW


def _fill(pairs: list[tuple[Constraint, int]], masks_SW: np.ndarray) -> None:
    """Set rows to what may come next there; those of one maker of masks in one call."""
    makers: dict[int, list[tuple[Constraint, int]]] = {}
    for pair in pairs:
        makers.setdefault(id(pair[0].grammars), []).append(pair)
    for alike in makers.values():
        alike[0][0].grammars.fill(alike, masks_SW)


def _mask_guesses(entry: PlanEntry, masks_SW: np.ndarray) -> RequestError | None:
    """Set what may come after each token of a run that guesses, up to the first guess that the form
    rejects. Return an error if no token is allowed at the first one.
    """
    seq, masked, went, error = entry.seq, 0, 0, None
    ends = seq.structured.grammars.eos_ids | seq.stop_ids
    for mask_W, guess in zip(masks_SW, (*entry.run[1:], None), strict=True):
        seq.structured.grammars.fill([(seq.structured, 0)], mask_W[None])
        _renew(seq, entry.run[1 : 1 + went], mask_W)
        allowed = np.bitwise_count(mask_W).sum()
        if (error := _error(seq, allowed)) is not None:
            mask_W[:] = ALL
            break
        _keep_open(seq, mask_W, allowed, seq.num_generated + went)
        masked += 1
        if guess is None or guess in ends or not _is_allowed(mask_W, guess):
            break
        seq.structured.push(guess)
        went += 1
    seq.num_masked = masked
    if error is not None and went:  # the next step will tell whether it comes to that
        seq.structured.rewind(seq.token_ids[seq.prompt_len :])
        return None
    seq.structured.go_back(went)
    return error


def _is_allowed(mask_W: np.ndarray, token: int) -> bool:
    return bool(mask_W.item(token >> 5) >> (token & 31) & 1)


def _certain(seq: Sequence) -> list[int]:
    """Return the tokens that must come from here on, up to the first one that may end the text."""
    # The counts of penalties have each token once it is drawn; a beam may be another's by then.
    if seq.sampling_params.has_penalties or seq.waits_for_host:
        return []
    tokens = seq.structured.forced()
    ends = seq.structured.grammars.eos_ids | seq.stop_ids
    tokens = list(itertools.takewhile(lambda token: token not in ends, tokens))
    return tokens if len(tokens) > 1 else []


def prompt_masks(plan: Plan, tokens: int) -> np.ndarray | None:
    """Return int32 [tokens, words], which has for each packed token of a plan what may come after
    it, a bit a token; None if nothing is scored under a form.
    """
    masks_TW, first = None, 0
    for entry in plan.entries:
        seq = entry.seq
        if seq.scores_form:
            grammars = seq.structured.grammars
            if masks_TW is None:
                masks_TW = np.full((tokens, grammars.words), ALL, np.int32)
            # The token at position p is scored after the one at p - 1.
            begin, end = max(seq.structured.begins, entry.start + 1), min(entry.end + 1, len(seq))
            if begin < end:
                before = seq.token_ids[seq.structured.begins : begin]
                rows_TW = masks_TW[first + begin - 1 - entry.start :][: end - begin]
                seq.structured.fill_run(before, seq.token_ids[begin:end], rows_TW)
        first += entry.num_tokens
    return masks_TW


def _renew(seq: Sequence, ahead: Iterable[int], mask_W: np.ndarray) -> None:
    """Make the mask again where a row failed by what others had done to a lexer that it shares with
    them: what it may draw depends on it alone. ahead: tokens after those of the sequence.
    """
    form = seq.structured
    if form.error is not None and form.renew([*seq.token_ids[seq.prompt_len :], *ahead]):
        form.grammars.fill([(form, 0)], mask_W[None])


def _error(seq: Sequence, allowed: int) -> RequestError | None:
    said = seq.structured.error
    if said is None and allowed:
        return None
    said = said or "no token of the vocabulary goes on from here"
    return RequestError(f"{seq.structured.name}: after {seq.num_generated} tokens: {said}")


def _keep_open(seq: Sequence, mask_W: np.ndarray, allowed: int, num_generated: int) -> int:
    """Forbid the tokens that would end a text too early, unless that leaves none: a complete text
    that can only end does so, whatever min_tokens and ignore_eos say. allowed: the tokens of the
    mask; returns how many are left.
    """
    asked = seq.sampling_params
    closed = num_generated < asked.min_tokens
    if not closed and not asked.ignore_eos:
        return allowed
    ends = seq.structured.grammars.eos_ids | (seq.stop_ids if closed else frozenset())
    ends = [token for token in ends if _is_allowed(mask_W, token)]
    if len(ends) < allowed:
        for token in ends:
            mask_W.view(np.uint32)[token >> 5] &= ~np.uint32(1 << (token & 31))
        allowed -= len(ends)
    return allowed
