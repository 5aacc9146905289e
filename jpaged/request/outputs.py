"""What generation returns, and its form as arrays for a trainer."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jpaged.errors import RequestError
from jpaged.request.detokenizer import decode


class Logprob(NamedTuple):
    """One token's log-probability. rank: 1 is the most probable; decoded_token is None without a
    tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class NamedLogprobs(Sequence[dict[int, Logprob] | None]):
    """{token: Logprob} for each of many tokens, in the order in which they are ranked. A dict is
    made when it is read: nobody waits for those of a long prompt, or of many completions.

    rows: for each token, (token, logprob, rank) of the alternatives, or None. tokenizer: what
    decodes them, or None. Equal to, and pickled as, the list of its dicts.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[tuple[int, float, int]] | None],
        tokenizer: Any,
        texts: dict[int, str] | None = None,
    ):
        self._rows, self._tokenizer = rows, tokenizer
        self._texts: dict[int, str] = {} if texts is None else texts  # of tokens decoded so far

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return NamedLogprobs(self._rows[index], self._tokenizer, self._texts)
        row = self._rows[index]
        if row is None:
            return None
        return {token: Logprob(p, rank, self._text(token)) for token, p, rank in row}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedLogprobs | list):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = decode(self._tokenizer, [token], False)
        return text


@dataclasses.dataclass(kw_only=True)
class CompletionOutput:
    """One completion. token_ids includes the stop token, text does not (None without a tokenizer).

    token_logprobs: float32 [len(token_ids)], of the sampled tokens, in the request's logprobs_mode.
    logprobs: for each token {token id: Logprob} of the sampled and the top ones, if asked for;
    NamedLogprobs, which makes them as they are read.
    stop_reason: the stop id or string, None for EOS. allowed_logprobs: float32 [len(token_ids)], of
    an answer of a given form with tempered logprobs: what the model gave to all that the form
    allowed, so that token_logprobs - allowed_logprobs is exact under the mask. score: of a beam
    search, cumulative_logprob / len(token_ids) ** length_penalty.
    """

    index: int
    text: str | None
    token_ids: list[int]
    token_logprobs: np.ndarray
    cumulative_logprob: float
    logprobs: Sequence[Any] | None = None
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: int | str | None = None
    allowed_logprobs: np.ndarray | None = None
    score: float | None = None


@dataclasses.dataclass(kw_only=True)
class RequestOutput:
    """One request and its completions. prompt_logprobs: None for the first token, then {token id:
    Logprob} each.

    num_cached_tokens: prompt tokens whose KV was found in the cache. error: why it failed, None if
    it did not. weight_version: counts the distinct params that its engine has served. adapter,
    adapter_version: the name (None where it came with the call) and the version of the adapter on
    top of them; versions count from 1 over all adapters of an engine, 0 is none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None
    weight_version: int = 0
    adapter: str | None = None
    adapter_version: int = 0


@dataclasses.dataclass(kw_only=True)  # frozen takes thrice as long, at each token
class CompletionChunk:
    """A piece of a streamed completion; finish_reason and stop_reason are set on its last piece.

    token_logprobs_delta, logprobs_delta: of token_ids_delta, as CompletionOutput has them.
    """

    request_index: int
    index: int
    text_delta: str | None
    token_ids_delta: list[int]
    finish_reason: str | None
    token_logprobs_delta: list[float] = dataclasses.field(default_factory=list)
    logprobs_delta: Sequence[Any] | None = None
    stop_reason: int | str | None = None


def to_arrays(
    outs: Sequence[RequestOutput],
    *,
    max_prompt_len: int | None = None,
    max_completion_len: int | None = None,
    pad_id: int = 0,
    overflow: Literal["error", "truncate", "drop"] = "error",
) -> dict[str, np.ndarray]:
    """Completions as padded arrays, one row each (B), for a jitted training step.

    prompt_ids int32 [B, P] left-padded and completion_ids int32 [B, C] right-padded with pad_id;
    prompt_mask, completion_mask bool, made from lengths, never by comparing with pad_id;
    prompt_lens, completion_lens int32 [B]; logprobs float32 [B, C], 0 where masked; group_ids int32
    [B], the index in `outs`; sample_index int32 [B]; finished bool [B], True where the completion
    ended by itself ("stop") and was not cut here. max_prompt_len, max_completion_len: P and C; None
    is the longest there is. overflow: what to do with a row that does not fit: raise RequestError,
    cut it (a prompt keeps its right end, a completion its left), or leave the row out. A failed
    request raises under "error" and is left out otherwise.
    """
    if overflow not in ("error", "truncate", "drop"):
        raise RequestError(f"overflow={overflow!r}: must be 'error', 'truncate' or 'drop'")
    rows = []
    for group, out in enumerate(outs):
        if out.error is None:
            rows += [(group, out.prompt_token_ids, c) for c in out.outputs]
        elif overflow == "error":
            raise RequestError(
                f"request {group} failed: {out.error}; overflow='drop' leaves it out"
            )
    width_p = _width("max_prompt_len", max_prompt_len, [len(prompt) for _, prompt, _ in rows])
    lengths = [len(c.token_ids) for *_, c in rows]
    width_c = _width("max_completion_len", max_completion_len, lengths)
    fits = [len(prompt) <= width_p and len(c.token_ids) <= width_c for _, prompt, c in rows]
    if overflow == "error" and not all(fits):
        group, prompt, c = rows[fits.index(False)]
        raise RequestError(
            f"request {group} has {len(prompt)} prompt and {len(c.token_ids)} completion tokens, "
            f"over max_prompt_len={width_p} or max_completion_len={width_c}: raise them or pass "
            "another overflow"
        )
    if overflow == "drop":
        rows = [row for row, fit in zip(rows, fits, strict=True) if fit]
    prompts = [prompt[max(len(prompt) - width_p, 0) :] for _, prompt, _ in rows]
    prompt_lens = np.array([len(prompt) for prompt in prompts], np.int32)
    completion_lens = np.array([min(len(c.token_ids), width_c) for _, _, c in rows], np.int32)
    prompt_mask = np.arange(width_p)[None, :] >= width_p - prompt_lens[:, None]
    completion_mask = np.arange(width_c)[None, :] < completion_lens[:, None]
    prompt_ids = np.full(prompt_mask.shape, pad_id, np.int32)
    completion_ids = np.full(completion_mask.shape, pad_id, np.int32)
    logprobs = np.zeros(completion_mask.shape, np.float32)
    for i, (*_, c) in enumerate(rows):
        prompt_ids[i, prompt_mask[i]] = prompts[i]
        completion_ids[i, completion_mask[i]] = c.token_ids[:width_c]
        logprobs[i, completion_mask[i]] = c.token_logprobs[:width_c]
    ended = [c.finish_reason == "stop" and len(c.token_ids) <= width_c for *_, c in rows]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "prompt_lens": prompt_lens,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "completion_lens": completion_lens,
        "logprobs": logprobs,
        "group_ids": np.array([group for group, _, _ in rows], np.int32),
        "sample_index": np.array([c.index for _, _, c in rows], np.int32),
        "finished": np.array(ended, bool),
    }


def _width(name: str, asked: int | None, lengths: list[int]) -> int:
    if asked is None:
        return max(lengths, default=0)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise RequestError(f"{name}={asked!r}: must be an integer of at least 0")
    return asked
