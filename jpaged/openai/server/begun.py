"""Answers that begin with tokens of the request (answer_token_ids): the model goes on after them as
if it had drawn them, and with the same seed draws what it would have drawn there.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpaged.errors import CapacityError, RequestError
from jpaged.request.inputs import Prompt
from jpaged.request.outputs import CompletionChunk, Logprob, RequestOutput, completion
from jpaged.sampling_params import SamplingParams


def begun(
    prompt: Prompt, ids: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int
) -> Prompt:
    """Return a prompt of which each of the params.n samples begins with these tokens. Nothing is
    known of their log-probabilities: `without` takes them out of the answer. Raises RequestError.
    """
    if bad := [t for t in ids if not 0 <= t < vocab_size]:
        raise RequestError(f"answer_token_ids: {bad[0]} is outside the vocabulary of {vocab_size}")
    if (count := len(prompt.ids) + len(ids)) >= max_model_len:
        raise CapacityError(
            f"prompt and answer_token_ids of {len(prompt.ids)} and {len(ids)} tokens leave no room "
            f"in max_model_len={max_model_len}: {count} tokens"
        )
    if params.max_tokens is not None and len(ids) >= params.max_tokens:
        raise RequestError(
            f"max_tokens={params.max_tokens}: answer_token_ids has {len(ids)} tokens already, "
            "which count"
        )
    zeros = [0.0] * len(ids)
    tops = None if params.logprobs is None else [{t: Logprob(0.0)} for t in ids]
    has_mass = params.structured is not None and params.logprobs_mode == "tempered"
    samples = [
        completion(
            index,
            list(ids),
            zeros,
            "abort",
            tops=tops,
            allowed_logprobs=np.zeros(len(ids), np.float32) if has_mass else None,
            versions=[0] * len(ids),
        )
        for index in range(params.n)
    ]
    output = RequestOutput(
        request_id="", prompt=prompt.text, prompt_token_ids=list(prompt.ids), outputs=samples
    )
    return dataclasses.replace(prompt, begun=output)


def without(chunk: CompletionChunk, count: int) -> CompletionChunk:
    """Return the first chunk of a completion without the tokens that the request gave; its text
    begins with theirs.
    """
    tops = chunk.logprobs_delta
    return dataclasses.replace(
        chunk,
        token_ids_delta=chunk.token_ids_delta[count:],
        token_logprobs_delta=chunk.token_logprobs_delta[count:],
        logprobs_delta=None if tops is None else tops[count:],
    )


def drawn_alone(output: RequestOutput, count: int) -> RequestOutput:
    """Return an output whose completions have the tokens that were drawn alone; their texts begin
    with those that the request gave.
    """
    outputs = [
        dataclasses.replace(
            done,
            token_ids=done.token_ids[count:],
            token_logprobs=done.token_logprobs[count:],
            logprobs=None if done.logprobs is None else done.logprobs[count:],
        )
        for done in output.outputs
    ]
    return dataclasses.replace(output, outputs=outputs)
