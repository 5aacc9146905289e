"""commit: take what a dispatch computed into its sequences; those that stop leave."""

import math
from typing import NamedTuple

from jpaged.engine.cache.kinds import Replay
from jpaged.engine.plan import Plan, PlanEntry, StepResult
from jpaged.engine.queues import Queues
from jpaged.engine.sequence import Candidates, Request, Sequence, Status
from jpaged.errors import NotFiniteError


class Committed(NamedTuple):
    """What follows of a step that was committed. to_steer: the requests that must choose among what
    their rows were offered (Request.steer). replays: of rows whose guesses were right, those of a
    row in order, which come before any other step.
    """

    to_steer: list[Request]
    replays: list[list[Replay]]


def commit(queues: Queues, plan: Plan, result: StepResult) -> Committed:
    """Append tokens, hash full blocks, end the sequences that stop.

    Tokens of a sequence that ended while the dispatch was in flight are surplus: neither emitted
    nor hashed.
    """
    if result.prompt_logprobs is not None or result.states is not None:
        _take_scores(plan, result)
    to_steer: dict[Request, None] = {}
    replays: list[list[Replay]] = []
    drawn = computed = 0
    for entry in plan.entries:
        seq, at, place = entry.seq, drawn, computed
        drawn += len(entry.run) or entry.draws > 0
        computed += entry.num_tokens
        is_surplus = seq.status is Status.FINISHED
        if is_surplus:
            pass
        elif not entry.draws:
            if seq.score_only and entry.end == seq.prompt_len:
                queues.finish(seq, "length")
        elif seq.waits_for_host:
            if entry.decodes:
                _close_written(queues, entry, entry.end)
            assert seq.sampling_params.logprobs is not None
            top = result.top(at, seq.sampling_params.logprobs)
            seq.offer(Candidates(top, result.weight_version))
            to_steer[seq.request] = None
            # Preempted meanwhile: it waits for its request, not for blocks.
            queues.waiting.remove(seq)
        elif entry.guesses:
            tables = seq.block_tables  # its own until the next plan, also if it ends here
            count = _append_verified(queues, entry, at, result)
            if not queues.blocks.can_rewind:
                replays.append(queues.blocks.replays(tables, place, entry.start, count))
        else:
            _append_drawn(queues, entry, at, result)
        seq.arrive(entry.epoch, entry.draws)
    return Committed(list(to_steer), replays)


def _close_written(queues: Queues, entry: PlanEntry, num_tokens: int) -> None:
    """Hash what a decode has filled, if the row still holds the blocks that it was planned with. In
    a run of guesses a replay writes the state after every block. In a run that is certain, the step
    itself has written the state after the last block.
    """
    if entry.epoch == entry.seq.epoch and num_tokens % queues.blocks.block_size == 0:
        step_end = entry.end if entry.run and not entry.guesses else num_tokens
        queues.blocks.cache.close(entry.seq, num_tokens, step_end)


def _append_drawn(queues: Queues, entry: PlanEntry, row: int, result: StepResult) -> None:
    """Append the tokens that a row drew, up to the one that ends the sequence: what follows it is
    surplus.
    """
    seq, run, size = entry.seq, entry.run, queues.blocks.block_size
    count = len(run) or result.num_drawn[row]
    for i in range(count):
        if entry.decodes and (entry.start + i + 1) % size == 0:
            _close_written(queues, entry, entry.start + i + 1)
        at, step = (row + i, 0) if run else (row, i)
        _append(queues, seq, at, step, result)
        if seq.status is Status.FINISHED:
            return
    assert count == entry.draws, f"{seq!r}: stopped on the device alone"


def _append_verified(queues: Queues, entry: PlanEntry, row: int, result: StepResult) -> int:
    """Append what was drawn after each token of a run, up to the first draw that differs from the
    guess after it: later draws followed a token that is not in the text. KV of what was refused is
    written over; it is never hashed. Return how many tokens were appended: of as many of the run
    the KV counts.
    """
    seq, right, appended = entry.seq, 0, 0
    count = len(entry.run) if seq.structured is None else seq.num_masked
    for i, guess in enumerate((*entry.run[1:], None)[:count]):
        _close_written(queues, entry, entry.start + i + 1)
        _append(queues, seq, row + i, 0, result)
        appended += 1
        if seq.status is Status.FINISHED or seq.token_ids[-1] != guess:
            break
        right += 1
    if queues.drafter is not None:
        queues.drafter.learn(seq, len(entry.run) - 1, right)
    if seq.status is Status.RUNNING and entry.epoch == seq.epoch:
        seq.go_on_from(len(seq) - 1)
    return appended


def _append(queues: Queues, seq: Sequence, row: int, step: int, result: StepResult) -> None:
    """Append one sampled token and decide whether the sequence ends with it. A token whose
    probability is NaN was drawn from nothing: it is left out, and the sequence fails.
    """
    token, params = result.tokens[row][step], seq.sampling_params
    if math.isnan(logprob := result.logprobs[row][step]):
        error = NotFiniteError(
            f"the probabilities after {len(seq)} tokens are NaN: look for values in the weights "
            "that are not finite (docs/debugging.md)"
        )
        queues.finish(seq, "error", error=error)
        return
    top = None if params.logprobs is None else result.top(row, params.logprobs, step)
    allowed = None if seq.structured is None else result.allowed(row, step)
    kept = result.kept(row, params.top_k, step) if params.sampling_mask else None
    seq.append(token, logprob, result.weight_version, top, allowed, kept)
    may_stop = may_end = len(seq.token_ids) - seq.prompt_len > params.min_tokens
    eos_ids = seq.eos_ids
    if seq.structured is not None:  # a mask lets no id end a text that is not to end there
        may_end, eos_ids = True, seq.structured.grammars.eos_ids
        if token not in eos_ids:
            seq.structured.push(token)
    if may_end and token in eos_ids:
        queues.finish(seq, "stop")
    elif may_end and token in seq.stop_ids:
        queues.finish(seq, "stop", stop=token)
    elif seq.text is not None and (hit := seq.text.push(token, may_stop=may_stop)) is not None:
        queues.finish(seq, "stop", stop=hit)
    elif len(seq.token_ids) >= seq.end:
        queues.finish(seq, "length")


def _take_scores(plan: Plan, result: StepResult) -> None:
    """Give each sequence the scores, or the hidden states, of the positions that it has read. A
    chunk that was computed again adds nothing.
    """
    row = token = 0
    columns = result.prompt_columns
    for entry in plan.entries:
        seq, scored = entry.seq, entry.scored
        if seq.status is Status.FINISHED:
            pass
        elif scored and seq.scored is not None:
            seq.scored.take(scored, columns, row)
        elif scored:
            count = (seq.sampling_params.prompt_logprobs or 0) + 1
            tops = zip(scored, result.prompt_rows(entry, row), strict=True)
            known = len(seq.prompt_logprobs)  # the state at position p scores the token at p + 1
            seq.prompt_logprobs.extend(top[:count] for p, top in tops if p + 1 >= known)
        elif seq.scored is not None and result.states is not None:
            read, (array, first) = seq.positions_read(entry.start, entry.end), result.states
            if read:
                at = first + token + read.start - entry.start
                seq.scored.take_states(read, array, at)
        row += len(scored)
        token += entry.num_tokens
