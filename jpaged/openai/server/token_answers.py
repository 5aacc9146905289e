"""Answers of POST /inference/v1/generate, in vLLM's form: token ids, their logprobs by id, and what
a trainer needs beside them.
"""

import base64
import io
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from jpaged.openai import responses
from jpaged.openai.responses import finite
from jpaged.openai.server.answers import WholeAnswer, json_pieces
from jpaged.openai.server.asked import Asked
from jpaged.openai.server.events import DONE, as_output, total_usage
from jpaged.openai.server.token_bodies import ServedTokens
from jpaged.openai.server.wire import encode
from jpaged.request.outputs import (
    CompletionChunk,
    CompletionOutput,
    NamedLogprobs,
    RequestOutput,
    WeightSpan,
)


class WholeTokens(WholeAnswer):
    """The body of an answer that is not a stream."""

    def _body(self, llm: Any) -> Iterator[bytes]:
        (output,) = self._outputs
        head: dict[str, Any] = {
            "request_id": request_id(self._asked),
            "model": self._asked.model,
            "created": int(time.time()),
            "usage": total_usage([output]),
        }
        if output.prompt_logprobs is not None:
            head["prompt_logprobs"] = responses.each_prompt_logprobs(output)
        yield b'{"choices":['
        for done in output.outputs:  # one at a time: a long one is written in many turns
            choice = {
                "index": done.index,
                **drawn(done, self._asked.form.top, done.weight_versions),
            }
            choice |= kept(done.sampling_mask, done.kept_logprobs)
            choice |= {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
            yield b"," if done is not output.outputs[0] else b""
            yield from json_pieces(choice | routes(output, done))
        yield b"]"
        for name, value in head.items():
            yield b"," + encode(name) + b":"
            yield from json_pieces(value)
        yield b"}"


class TokenEvents:
    """Turns the chunks of one answer into events."""

    def __init__(self, asked: Asked):
        self._top, self._sizes = asked.form.top, asked.prompt_sizes
        assert isinstance(asked.body, ServedTokens)
        self._with_usage = asked.body.wants_usage
        self._head = {"request_id": request_id(asked)}
        self._drawn: dict[int, int] = {}  # tokens by choice, if events report usage

    def pieces(self, prompt: int, chunk: CompletionChunk) -> bytes:
        """Return the event of a chunk. prompt: its index, which is 0."""
        versions = chunk.weight_versions_delta
        choice = {"index": chunk.index, **drawn(as_output(chunk), self._top, versions)}
        choice |= kept(chunk.sampling_mask_delta, chunk.kept_logprobs_delta)
        choice["finish_reason"] = chunk.finish_reason
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        usage = None
        if self._sizes is not None:
            count = self._drawn.get(chunk.index, 0) + len(chunk.token_ids_delta)
            self._drawn[chunk.index] = count
            size = self._sizes[prompt]
            usage = {"prompt_tokens": size, "completion_tokens": count}
            usage["total_tokens"] = size + count
        return self._event([choice], usage)

    def end(self, outputs: list[RequestOutput]) -> bytes:
        """Return the events after the last chunk: the experts, which are read when a completion has
        ended, and the usage.
        """
        events = b""
        for output in outputs:
            for done in output.outputs:
                if taken := routes(output, done):
                    choice = {"index": done.index, "token_ids": [], **taken}
                    events += self._event([choice], None)
        if self._with_usage:
            events += self._event([], total_usage(outputs))
        return events + DONE

    def _event(self, choices: list[dict[str, Any]], usage: Any) -> bytes:
        return b"data: " + encode({**self._head, "choices": choices, "usage": usage}) + b"\n\n"


def request_id(asked: Asked) -> str:
    """Return the id that the answer has: the request's, else one that is made."""
    assert isinstance(asked.body, ServedTokens)
    return asked.name if asked.body.request_id is None else asked.body.request_id


def drawn(done: CompletionOutput, top: int | None, versions: list[WeightSpan]) -> dict[str, Any]:
    """Return the tokens of a completion, their logprobs, and which weights drew them. top: how many
    alternatives a token has beside its own logprob; None leaves logprobs out.
    """
    return {
        "token_ids": [int(t) for t in done.token_ids],
        "logprobs": None if top is None else {"content": _logprobs(done, top)},
        "weight_versions": [span._asdict() for span in versions],
    }


def kept(mask: np.ndarray | None, mass: np.ndarray | None) -> dict[str, Any]:
    """Return the ids that each token was drawn from, and the logarithm of their share."""
    if mask is None or mass is None:
        return {}
    return {"sampling_mask": responses.kept_ids(mask), "kept_logprobs": mass.tolist()}


def routes(output: RequestOutput, done: CompletionOutput) -> dict[str, str]:
    """Return the experts of the prompt's and the completion's tokens, but for the last one, which
    no step has computed: [tokens - 1, L, A], as the base64 of an .npy file. {} where they are not
    known.
    """
    if output.prompt_routed_experts is None or done.routed_experts is None:
        return {}
    taken = np.concatenate([output.prompt_routed_experts, done.routed_experts])[:-1]
    if taken.size and taken.min() >= 0:  # else some are not known: -1
        taken = taken.astype(np.uint8 if taken.max() < 256 else np.uint16)
    file = io.BytesIO()
    np.save(file, taken)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode()}


def _logprobs(done: CompletionOutput, top: int) -> list[dict[str, Any]]:
    """Return an object a token with its alternatives, the likeliest first. All are named by ids, so
    that nothing is decoded.
    """
    rows = NamedLogprobs.rows_of(done.logprobs or [])
    content = []
    for token, logprob, row in zip(done.token_ids, done.token_logprobs, rows, strict=True):
        ranked = sorted(row or [], key=lambda entry: -entry[1])[:top]
        one = _named(token, float(logprob))
        content.append(one | {"top_logprobs": [_named(t, p) for t, p, _ in ranked]})
    return content


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": finite(logprob), "bytes": None}
