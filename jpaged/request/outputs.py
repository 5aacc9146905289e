"""What generation returns, and how it is made of requests: outputs, and chunks of a stream."""

import collections.abc
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from jpaged.engine.generated import Top
from jpaged.engine.keys import Key
from jpaged.engine.sequence import Request, Sequence
from jpaged.request.detokenizer import decode
from jpaged.request.embeddings import EmbeddingSpan, as_mapping
from jpaged.search.beam import BeamSearch
from jpaged.types import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """One token's log-probability. rank: 1 is the most probable; decoded_token is None without a
    tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class WeightSpan(NamedTuple):
    """Tokens [start, end) of a completion, all drawn by one version of the weights."""

    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished:
    """What a request that was cut goes on by, beside what its output shows. key: threefry key data
    that its samples draw from. salt: its prompt's `cache_salt`.
    """

    key: Key
    salt: str | None


class NamedLogprobs(collections.abc.Sequence[dict[int, Logprob] | None]):
    """{token: Logprob} for each of many tokens, in the order in which they are ranked. A dict is
    made when it is read: nobody waits for those of a long prompt, or of many completions.

    rows: for each token, (token, logprob, rank) of the alternatives, or None. tokenizer: what
    decodes them, or None. Equal to, and pickled as, the list of its dicts.
    """

    def __init__(
        self,
        rows: collections.abc.Sequence[Top | None],
        tokenizer: Tokenizer | None,
        texts: dict[int, str] | None = None,
    ):
        # The fast tokenizer beneath, where there is one.
        self._rows, self._tokenizer = rows, getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._texts: dict[int, str] = {} if texts is None else texts  # of tokens decoded so far

    @staticmethod
    def rows_of(named: collections.abc.Sequence[dict[int, Logprob] | None]) -> list[Top | None]:
        """Return the rows of which these were made, also where they are plain dicts by now."""
        if isinstance(named, NamedLogprobs):
            return list(named._rows)
        return [
            None if row is None else [(token, p.logprob, p.rank or 0) for token, p in row.items()]
            for row in named
        ]

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

    def __reduce__(self) -> tuple[object, ...]:
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
    search, cumulative_logprob / len(token_ids) ** length_penalty. weight_versions: the versions of
    the weights that drew its tokens, in order; the spans cover all tokens. sampling_mask: int32
    [len(token_ids), top_k], of a request with sampling_mask: the ids that each token was drawn
    from, the likeliest first, -1 past the last. kept_logprobs: float32 [len(token_ids)], the
    logarithm of their share of all that top_k, top_p and min_p chose from: "processed" is
    "tempered" less it where nothing else changed the logits. routed_experts: int16
    [len(token_ids), L, A], of an engine with routed_experts: the experts that each token took in
    each of the L layers that have any; -1 of the last token, which no step has computed, and of a
    request that was cut while it held no blocks.
    """

    index: int
    text: str | None
    token_ids: list[int]
    token_logprobs: np.ndarray
    cumulative_logprob: float
    logprobs: collections.abc.Sequence[Any] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    allowed_logprobs: np.ndarray | None = None
    score: float | None = None
    weight_versions: list[WeightSpan] = dataclasses.field(default_factory=list)
    sampling_mask: np.ndarray | None = None
    kept_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None


@dataclasses.dataclass(kw_only=True)
class RequestOutput:
    """One request and its completions. prompt_logprobs: None for the first token, then {token id:
    Logprob} each.

    num_cached_tokens: prompt tokens whose KV was found in the cache. error: why it failed, None if
    it did not. weight_version: counts the distinct params that its engine has served; with new
    ones under running requests it is that of its first token, and each completion has the others'.
    adapter, adapter_version: the name (None where it came with the call) and the version of the
    adapter on top of them; versions count from 1 over all adapters of an engine, 0 is none. index:
    the place of its prompt among those of its call. unfinished: of one that was cut ("abort"),
    which as a prompt goes on where it was; None where nothing is left to draw.
    prompt_routed_experts: int16 [len(prompt_token_ids), L, A], as CompletionOutput has them.
    embeddings: those in place of tokens of its prompt, by their positions; None: there were none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: collections.abc.Sequence[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None
    weight_version: int = 0
    adapter: str | None = None
    adapter_version: int = 0
    index: int = 0
    unfinished: Unfinished | None = None
    prompt_routed_experts: np.ndarray | None = None
    embeddings: Mapping[int, EmbeddingSpan] | None = None


@dataclasses.dataclass(kw_only=True)  # frozen takes thrice as long, at each token
class CompletionChunk:
    """A piece of a streamed completion; finish_reason and stop_reason are set on its last piece.

    token_logprobs_delta, logprobs_delta: of token_ids_delta, as CompletionOutput has them.
    weight_versions_delta: of them too, from 0 on at the first token of the whole completion.
    sampling_mask_delta, kept_logprobs_delta: of them, of a request with sampling_mask.
    """

    request_index: int
    index: int
    text_delta: str | None
    token_ids_delta: list[int]
    finish_reason: str | None
    token_logprobs_delta: list[float] = dataclasses.field(default_factory=list)
    logprobs_delta: collections.abc.Sequence[Any] | None = None
    stop_reason: int | str | None = None
    weight_versions_delta: list[WeightSpan] = dataclasses.field(default_factory=list)
    sampling_mask_delta: np.ndarray | None = None
    kept_logprobs_delta: np.ndarray | None = None


def collect(request: Request, tokenizer: Tokenizer | None) -> RequestOutput:
    """Return the output of a request that has ended."""
    first, unfinished, routes = request.sequences[0], None, None
    if isinstance(request, BeamSearch):
        completions = [
            completion(
                index,
                hypothesis.generated.token_ids,
                hypothesis.generated.logprobs,
                hypothesis.finish_reason,
                text=_text(tokenizer, hypothesis.generated.token_ids, hypothesis.finish_reason),
                score=hypothesis.score,
                versions=hypothesis.generated.weight_versions,
            )
            for index, hypothesis in enumerate(request.results())
        ]
    else:
        completions = [_sample(seq, request.ended, tokenizer) for seq in request.sequences]
        if known := [seq for seq in request.sequences if seq.chosen_experts is not None]:
            routes = _prompt_experts(known)
        was_cut = "abort" in [seq.finish_reason for seq in request.sequences]
        if was_cut and request.error is None:  # else there is nothing to go on by
            unfinished = Unfinished(key=first.key, salt=request.salt)
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
        unfinished=unfinished,
        prompt_routed_experts=routes,
        embeddings=None if first.spans is None else as_mapping(first.spans),
    )


def failed(
    request_id: str, error: Exception, prompt: object, token_ids: collections.abc.Sequence[int] = ()
) -> RequestOutput:
    """Return the output of a request that never ran. prompt: in any form; its text is kept."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(token_ids),
        outputs=[completion(0, [], [], "error")],
        error=error,
    )


class LiveCompletions:
    """The completions of some requests as they grow, until each has ended. tokenizer: or None."""

    def __init__(self, requests: list[Request], tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of tokens among logprobs
        self._live = [(i, seq) for i, request in enumerate(requests) for seq in request.sequences]
        self._sent = {seq: seq.prompt_len for _, seq in self._live}

    def __bool__(self) -> bool:
        """Return whether any completion has not ended."""
        return bool(self._live)

    def take_all(self) -> tuple[list[CompletionChunk], Exception | None]:
        """Return what is new since the last time, up to the error of a completion that failed."""
        chunks: list[CompletionChunk] = []
        ended: list[tuple[int, Sequence]] = []
        error: Exception | None = None
        for live in self._live:
            seq, sent = live[1], self._sent[live[1]]
            has_ended = seq.finish_reason is not None
            if has_ended:
                ended.append(live)
                if seq.text is not None:
                    seq.text.finish()
            if seq.error is not None:
                error = seq.error
                break
            if has_ended or len(seq.token_ids) > sent:
                chunks.append(self._chunk(live[0], seq, sent))
                self._sent[seq] = len(seq.token_ids)
        for live in ended:
            self._live.remove(live)
        return chunks, error

    def _chunk(self, index: int, seq: Sequence, sent: int) -> CompletionChunk:
        """Return what a completion of request `index` has beyond its first `sent` tokens."""
        drawn, params, generated = sent - seq.prompt_len, seq.sampling_params, seq.generated
        tops = mask = mass = None
        if params.logprobs is not None:
            tops = NamedLogprobs(generated.top_logprobs[drawn:], self._tokenizer, self._texts)
        if params.sampling_mask:
            mask, mass = _kept(seq, drawn)
        return CompletionChunk(
            request_index=index,
            index=seq.index,
            token_ids_delta=seq.token_ids[sent:],
            text_delta=None if seq.text is None else seq.text.take_delta(),
            finish_reason=seq.finish_reason,
            token_logprobs_delta=generated.logprobs[drawn:],
            logprobs_delta=tops,
            stop_reason=seq.stop_reason,
            weight_versions_delta=_spans(generated.weight_versions, drawn),
            sampling_mask_delta=mask,
            kept_logprobs_delta=mass,
        )


def completion(
    index: int,
    token_ids: collections.abc.Sequence[int],
    logprobs: collections.abc.Sequence[float],
    finish_reason: str | None,
    *,
    text: str | None = None,
    tops: collections.abc.Sequence[dict[int, Logprob] | None] | None = None,
    stop_reason: int | str | None = None,
    allowed_logprobs: np.ndarray | None = None,
    score: float | None = None,
    versions: collections.abc.Sequence[int] = (),
    sampling_mask: np.ndarray | None = None,
    kept_logprobs: np.ndarray | None = None,
    routed_experts: np.ndarray | None = None,
) -> CompletionOutput:
    """Return a CompletionOutput. logprobs: of the tokens themselves, which it sums; tops: the
    alternatives to each; versions: of the weights that drew each.
    """
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=list(token_ids),
        token_logprobs=np.array(logprobs, np.float32),
        cumulative_logprob=float(np.sum(logprobs)),
        logprobs=tops,
        finish_reason=cast("FinishReason | None", finish_reason),
        stop_reason=stop_reason,
        allowed_logprobs=allowed_logprobs,
        score=score,
        weight_versions=_spans(versions),
        sampling_mask=sampling_mask,
        kept_logprobs=kept_logprobs,
        routed_experts=routed_experts,
    )


def _spans(versions: collections.abc.Sequence[int], start: int = 0) -> list[WeightSpan]:
    """Return the spans of equal versions, of the tokens from `start` on."""
    if len(versions) == start + 1:  # a token of a stream
        return [WeightSpan(versions[start], start, start + 1)]
    if start:
        versions = versions[start:]
    if not versions:
        return []
    if versions.count(versions[0]) == len(versions):  # as nearly always
        return [WeightSpan(versions[0], start, start + len(versions))]
    spans = list[WeightSpan]()
    for version, drawn in itertools.groupby(versions):
        end = start + len(list(drawn))
        spans.append(WeightSpan(version, start, end))
        start = end
    return spans


def _sample(
    seq: Sequence, ended: Mapping[int, object], tokenizer: Tokenizer | None
) -> CompletionOutput:
    """Return a sample's output. ended: of samples that had ended before the request began."""
    if isinstance(before := ended.get(seq.index), CompletionOutput):
        return before
    # The caller's output is a value: it must not change where a snapshot goes back.
    drawn, asked = seq.generated.copy(), seq.sampling_params
    if seq.text is not None:
        text = seq.text.finish()
    else:  # "stop" is by an id then: a stop string would have had a TextStream
        text = _text(tokenizer, drawn.token_ids, seq.finish_reason, asked.skip_special_tokens)
    allowed = None
    if seq.structured is not None and asked.logprobs_mode == "tempered":
        allowed = np.array(drawn.allowed_logprobs, np.float32)
    mask, mass = _kept(seq) if asked.sampling_mask else (None, None)
    experts = None
    if seq.chosen_experts is not None:
        experts = _experts(seq, seq.chosen_experts)[seq.prompt_len :]
    return completion(
        seq.index,
        drawn.token_ids,
        drawn.logprobs,
        seq.finish_reason,
        text=text,
        tops=None if asked.logprobs is None else NamedLogprobs(drawn.top_logprobs, tokenizer),
        stop_reason=seq.stop_reason,
        allowed_logprobs=allowed,
        versions=drawn.weight_versions,
        sampling_mask=mask,
        kept_logprobs=mass,
        routed_experts=experts,
    )


def _prompt_experts(sequences: list[Sequence]) -> np.ndarray:
    """Return the experts of the prompt's tokens, of the sample that knows most: one that was cut
    while it held no blocks knows none.
    """
    chosen = [seq.chosen_experts for seq in sequences]
    most = max([x for x in chosen if x is not None], key=len)
    return _experts(sequences[0], most[: len(sequences[0])])[: sequences[0].prompt_len]


def _experts(seq: Sequence, chosen: np.ndarray) -> np.ndarray:
    """Return the experts of all tokens of a sequence, -1 for those that no step has computed."""
    unknown = [(0, len(seq) - len(chosen)), (0, 0), (0, 0)]
    return np.pad(chosen, unknown, constant_values=-1)


def _kept(seq: Sequence, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampling mask of the tokens drawn from `start` on, and its share."""
    kept = seq.generated.kept[start:]
    mask = np.array([ids for ids, _ in kept], np.int32).reshape(-1, seq.sampling_params.top_k)
    return mask, np.array([share for _, share in kept], np.float32)


def _text(
    tokenizer: Tokenizer | None,
    token_ids: list[int],
    finish_reason: str | None,
    skip_special_tokens: bool = True,
) -> str | None:
    """Return the text without the token that stopped it; None without a tokenizer."""
    if tokenizer is None:
        return None
    token_ids = token_ids[:-1] if finish_reason == "stop" else token_ids
    return decode(tokenizer, token_ids, skip_special_tokens)
