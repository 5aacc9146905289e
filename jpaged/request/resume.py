"""resume: have a request go on where an earlier one of its prompt was cut.

A sequence that begins with tokens that were drawn before is like one that was preempted: what is
counted from the first token (max_tokens, min_tokens, penalties, stop strings, the position that a
draw's key is folded with) is counted by its tokens, and there is nothing else to set.
"""

import numpy as np

from jpaged.engine.generated import Generated, Top
from jpaged.engine.sequence import Request, Sequence
from jpaged.errors import RequestError
from jpaged.request.outputs import CompletionOutput, NamedLogprobs, RequestOutput


def resume(request: Request, begun: RequestOutput) -> None:
    """Give each sample of a request what it had in an earlier one's output. Those that had ended
    there stay as they are. RequestError where they do not go with what is asked now.
    """
    if (count := len(request.sequences)) != len(begun.outputs):
        raise RequestError(
            f"n={count}: the output that goes on has {len(begun.outputs)} completions"
        )
    ended: dict[int, CompletionOutput] = {}
    for seq, output in zip(request.sequences, begun.outputs, strict=True):
        _check_logprobs(seq, output, begun)
        scores: list[Top | None] = []
        if seq.sampling_params.prompt_logprobs is not None and output.token_ids:
            # Else the prompt was not scored to its end, and is scored anew.
            scores = NamedLogprobs.rows_of(begun.prompt_logprobs or ())
        seq.take_up(_drawn(seq, output), scores)
        if output.finish_reason != "abort":
            seq.conclude(output.finish_reason or "stop", output.stop_reason)
            seq.retire()
            ended[seq.index] = output
        elif len(seq) >= seq.end:
            raise RequestError(
                f"max_tokens={seq.sampling_params.max_tokens}: completion {seq.index} that goes on "
                f"has {seq.num_generated} tokens already, and a prompt of {seq.prompt_len}"
            )
        elif seq.text is not None and seq.text.is_final:
            raise RequestError(
                f"stop={seq.sampling_params.stop!r}: completion {seq.index} that goes on has it in "
                "its text already"
            )
        elif seq.structured is not None and seq.structured.error is not None:
            raise RequestError(
                f"structured: completion {seq.index} that goes on is not of this form: "
                f"{seq.structured.error}"
            )
    request.ended = ended
    if request.has_drawn:
        request.weight_version = begun.weight_version


def _check_logprobs(seq: Sequence, output: CompletionOutput, begun: RequestOutput) -> None:
    """RequestError where more, or less, is asked for than the earlier tokens have."""
    asked = seq.sampling_params
    pairs = [("logprobs", asked.logprobs, output.logprobs)]
    if seq.index == 0:
        pairs.append(("prompt_logprobs", asked.prompt_logprobs, begun.prompt_logprobs))
    for name, value, known in pairs:
        if (value is None) != (known is None):
            has = "has none" if known is None else "has them"
            raise RequestError(f"{name}={value}: the output that goes on {has}")
    has_mask = None if output.sampling_mask is None else output.sampling_mask.shape[1]
    needs_mask = asked.top_k if asked.sampling_mask else None
    if has_mask != needs_mask:
        has = "has no sampling mask" if has_mask is None else f"has one of top_k={has_mask}"
        wish = f"sampling_mask={asked.sampling_mask}, top_k={asked.top_k}"
        raise RequestError(f"{wish}: the output that goes on {has}")
    needs_mass = seq.structured is not None and asked.logprobs_mode == "tempered"
    if needs_mass != (output.allowed_logprobs is not None):
        raise RequestError(
            "structured and logprobs_mode must be those by which the output that goes on was drawn"
        )


def _drawn(seq: Sequence, output: CompletionOutput) -> Generated:
    """Return the table of a completion's tokens."""
    count = len(output.token_ids)
    allowed = output.allowed_logprobs
    if allowed is None and seq.structured is not None:  # not shown in this mode
        allowed = np.zeros(count, np.float32)
    kept = []
    if output.sampling_mask is not None and output.kept_logprobs is not None:
        kept = list(zip(output.sampling_mask, output.kept_logprobs.tolist(), strict=True))
    tops = () if output.logprobs is None else NamedLogprobs.rows_of(output.logprobs)
    return Generated(
        token_ids=list(output.token_ids),
        logprobs=output.token_logprobs.tolist(),
        weight_versions=[v for v, start, end in output.weight_versions for _ in range(start, end)],
        top_logprobs=[row for row in tops if row is not None],
        allowed_logprobs=[] if allowed is None else allowed.tolist(),
        kept=kept,
    )
