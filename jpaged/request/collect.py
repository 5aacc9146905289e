"""What became of Requests, for their caller: outputs, the chunks of a stream, or scores."""

from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from jpaged.engine.sequence import Request, Sequence
from jpaged.errors import RequestError
from jpaged.request.detokenizer import decode
from jpaged.request.outputs import CompletionChunk, CompletionOutput, NamedLogprobs, RequestOutput
from jpaged.request.prompts import Adapted
from jpaged.search.beam import BeamSearch, Hypothesis


def collect(request: Request, tokenizer: Any) -> RequestOutput:
    """Return the output of a request that has ended. tokenizer: or None."""
    first = request.sequences[0]
    if isinstance(request, BeamSearch):
        found = enumerate(request.results())
        completions = [_hypothesis(i, hypothesis, tokenizer) for i, hypothesis in found]
    else:
        completions = [_sample(seq, tokenizer) for seq in request.sequences]
    scored = first.sampling_params.prompt_logprobs is not None
    adapter = first.adapter
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=first.token_ids[: first.prompt_len],
        prompt_logprobs=NamedLogprobs(first.prompt_logprobs, tokenizer) if scored else None,
        outputs=completions,
        num_cached_tokens=first.num_cached,
        error=request.error,
        weight_version=request.weight_version,
        adapter=None if adapter is None else adapter.name,
        adapter_version=0 if adapter is None else adapter.version,
    )


def failed(
    request_id: str, error: RequestError, prompt: Any, token_ids: list[int]
) -> RequestOutput:
    """The output of a request that never ran."""
    prompt = prompt.prompt if isinstance(prompt, Adapted) else prompt
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=token_ids,
        outputs=[completion(0, [], [], "error", text=None)],
        error=error,
    )


def scores(requests: list[Request]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of each scored prompt: its logprobs, float32 [T-1], and whether each is the highest, bool."""
    rows = [
        [top[0] for top in request.sequences[0].prompt_logprobs[1:] if top is not None]
        for request in requests
    ]
    logprobs = [np.array([logprob for _, logprob, _ in row], np.float32) for row in rows]
    return logprobs, [np.array([rank == 1 for *_, rank in row], bool) for row in rows]


class LiveCompletions:
    """The completions of some requests as they grow, until each has ended. tokenizer: or None."""

    def __init__(self, requests: list[Request], tokenizer: Any):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of tokens among logprobs
        self._live = [(i, seq) for i, request in enumerate(requests) for seq in request.sequences]
        self._sent = {seq: seq.prompt_len for _, seq in self._live}

    def __bool__(self) -> bool:
        """Whether any completion has not ended."""
        return bool(self._live)

    def take_all(self) -> tuple[list[CompletionChunk], Exception | None]:
        """What is new since the last time, up to the error of a completion that failed."""
        chunks: list[CompletionChunk] = []
        try:
            chunks.extend(self.take())
        except RequestError as e:
            return chunks, e
        return chunks, None

    def take(self) -> Iterator[CompletionChunk]:
        """What is new since the last time; raises the error of a completion that failed."""
        for i, seq in list(self._live):
            if seq.finish_reason is not None:
                self._live.remove((i, seq))
                if seq.text is not None:
                    seq.text.finish()
            if seq.error is not None:
                raise seq.error
            if len(seq) > self._sent[seq] or seq.finish_reason is not None:
                sent, tops = self._sent[seq], None
                if seq.sampling_params.logprobs is not None:
                    new = seq.generated.top_logprobs[sent - seq.prompt_len :]
                    tops = NamedLogprobs(new, self._tokenizer, self._texts)
                yield CompletionChunk(
                    request_index=i,
                    index=seq.index,
                    token_ids_delta=seq.token_ids[sent:],
                    text_delta=None if seq.text is None else seq.text.take_delta(),
                    finish_reason=seq.finish_reason,
                    token_logprobs_delta=seq.generated.logprobs[sent - seq.prompt_len :],
                    logprobs_delta=tops,
                    stop_reason=seq.stop_reason,
                )
                self._sent[seq] = len(seq)


def completion(
    index: int,
    token_ids: List[int],
    logprobs: List[float],
    finish_reason: Any,
    *,
    text: str | None,
    stop_reason: int | str | None = None,
    tops: Any = None,
    allowed_logprobs: np.ndarray | None = None,
    score: float | None = None,
) -> CompletionOutput:
    """Return a CompletionOutput of these tokens. tops: the alternatives to each."""
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=list(token_ids),
        token_logprobs=np.array(logprobs, np.float32),
        cumulative_logprob=float(np.sum(logprobs)),
        logprobs=tops,
        allowed_logprobs=allowed_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        score=score,
    )


def _sample(seq: Sequence, tokenizer: Any) -> CompletionOutput:
    # The caller's output is a value: it must not change where a snapshot goes back.
    drawn, asked = seq.generated.copy(), seq.sampling_params
    if seq.text is not None:
        text = seq.text.finish()
    else:  # "stop" is by an id then: a stop string would have had a TextStream
        text = _text(tokenizer, drawn.token_ids, seq.finish_reason, asked.skip_special_tokens)
    tops = None if asked.logprobs is None else NamedLogprobs(drawn.top_logprobs, tokenizer)
    allowed = None
    if seq.structured is not None and asked.logprobs_mode == "tempered":
        allowed = np.array(drawn.allowed_logprobs, np.float32)
    return completion(
        seq.index,
        drawn.token_ids,
        drawn.logprobs,
        seq.finish_reason,
        text=text,
        stop_reason=seq.stop_reason,
        tops=tops,
        allowed_logprobs=allowed,
    )


def _hypothesis(index: int, found: Hypothesis, tokenizer: Any) -> CompletionOutput:
    text = _text(tokenizer, found.generated.token_ids, found.finish_reason)
    drawn = found.generated
    return completion(
        index, drawn.token_ids, drawn.logprobs, found.finish_reason, text=text, score=found.score
    )


def _text(
    tokenizer: Any, tokens: list[int], finish_reason: str | None, skip_special_tokens: bool = True
) -> str | None:
    """The text without the token that stopped it; None without a tokenizer."""
    if tokenizer is None:
        return None
    tokens = tokens[:-1] if finish_reason == "stop" else tokens
    return decode(tokenizer, tokens, skip_special_tokens)
