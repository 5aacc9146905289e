"""What `score` is asked, and what it returns: arrays, row by row of the tokens that are scored."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import numpy as np

from jpaged.checks import check_real, check_whole
from jpaged.engine.scoring import WIDTHS, Scoring
from jpaged.engine.sequence import Request
from jpaged.errors import ConfigError, RequestError
from jpaged.types import IntArrays, Structured

MOST = WIDTHS[-1]  # likeliest tokens, and candidates, of a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model says of the last R tokens of a sequence, each given the tokens before it.

    Row r is of the token at `start` + r. logprobs: float32 [R], of the tokens themselves. greedy:
    bool [R], whether the token is the most likely one. top_ids: int32 [R, top_k], the likeliest
    tokens, the likeliest first and the lower id first of equal ones, and top_logprobs float32 [R,
    top_k]. at_logprobs: float32 [R, K], of the candidates `at`. entropy: float32 [R], of each whole
    distribution, in nats. What was not asked for is None. All are of log_softmax(logits /
    temperature).
    """

    start: int
    logprobs: np.ndarray
    greedy: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    at_logprobs: np.ndarray | None = None
    entropy: np.ndarray | None = None


# What `score` returns: the logprobs alone, with the greedy flags, or all that is known.
ScoreResult = list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]] | list[Scores]


class Experts(NamedTuple):
    """The experts of a model: in how many layers there are any, how many of them a token takes in
    each, and of how many.
    """

    layers: int
    taken: int
    num: int


class ScoreCalls(TypedDict, total=False):
    """How `score` will be called, for a warm-up: with top_k, with so many candidates `at` a row,
    with entropy, with a start. What is left out will not be passed.
    """

    top_k: int
    at: int
    entropy: bool
    start: bool


def scoring_of(calls: ScoreCalls) -> Scoring:
    """Return what such calls ask of a sequence. Raises ConfigError."""
    names = ScoreCalls.__annotations__
    if unknown := [name for name in calls if name not in names]:
        raise ConfigError(f"score={{{unknown[0]!r}: ...}}: it has {', '.join(names)}")
    for name in ("top_k", "at"):
        if (value := calls.get(name)) is not None:
            try:
                check_whole(f"score={{{name!r}}}", value, 1, MOST)
            except RequestError as e:
                raise ConfigError(str(e)) from None
    for name in ("entropy", "start"):
        if not isinstance(value := calls.get(name, False), bool):
            raise ConfigError(f"score={{{name!r}: {value!r}}}: must be True or False")
    at = calls.get("at")
    candidates = None if at is None else np.zeros((0, at), np.int32)
    return Scoring(
        first=int(calls.get("start", False)),
        top_k=calls.get("top_k") or 0,
        candidates=candidates,
        entropy=calls.get("entropy", False),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What a call of `score` asks beside its sequences: see jpaged.score."""

    temperature: float = 1.0
    return_greedy: bool = False
    structured: Structured | None = None
    prompt_lens: Sequence[int] | None = None
    start: Sequence[int] | np.ndarray | None = None
    top_k: int | None = None
    at: IntArrays | None = None
    entropy: bool = False
    routed: IntArrays | None = None

    def returned(self, scores: list[Scores]) -> ScoreResult:
        """Return scores in the form that a caller who asked for this gets."""
        if self.wants_scores:
            return scores
        logprobs = [one.logprobs for one in scores]
        return (logprobs, [one.greedy for one in scores]) if self.return_greedy else logprobs

    @property
    def wants_scores(self) -> bool:
        """Whether it is Scores that are returned, and not the logprobs alone."""
        return self.top_k is not None or self.at is not None or self.entropy

    def scorings(
        self, lengths: Sequence[int], vocab_size: int, experts: Experts | None = None
    ) -> list[Scoring]:
        """Return what is asked of each sequence of so many tokens. experts: of the model, where the
        cache keeps which of them tokens took. Raises RequestError.
        """
        check_real("temperature", self.temperature, 0.0)
        if self.temperature == 0:
            raise RequestError(
                "temperature=0: a greedy distribution has no log-probabilities; pass a positive one"
            )
        if not isinstance(self.entropy, bool):
            raise RequestError(f"entropy={self.entropy!r}: must be True or False")
        if self.wants_scores and self.return_greedy:
            raise RequestError("return_greedy=True: with top_k, at or entropy, see Scores.greedy")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1, min(MOST, vocab_size))
        top_k, starts = int(self.top_k or 0), self._starts(lengths)
        rows = [length - start for length, start in zip(lengths, starts, strict=True)]
        candidates = self._candidates(rows, vocab_size)
        routes: Sequence[np.ndarray | None] = [None] * len(lengths)
        if self.routed is not None:
            routes = self._routes(self.routed, lengths, experts)
        return [
            Scoring(
                first=start - 1,
                top_k=top_k,
                candidates=ids,
                entropy=self.entropy,
                routed=taken,
            )
            for start, ids, taken in zip(starts, candidates, routes, strict=True)
        ]

    @staticmethod
    def _routes(
        routed: IntArrays, lengths: Sequence[int], experts: Experts | None
    ) -> list[np.ndarray]:
        """Return the experts that the tokens of each sequence take."""
        if experts is None:
            raise RequestError("routed: this engine was made without routed_experts=True")
        routes, arrays = list[np.ndarray](), _one_each("routed", routed, len(lengths))
        for i, (taken, length) in enumerate(zip(arrays, lengths, strict=True)):
            shape = (length, experts.layers, experts.taken)
            if taken.shape != shape or taken.dtype.kind not in "iu":
                raise RequestError(
                    f"routed[{i}] of {taken.dtype}{list(taken.shape)}: must be integers "
                    f"{list(shape)}, of each token, layer with experts, and expert that it takes"
                )
            if taken.size and (taken.min() < -1 or taken.max() >= experts.num):
                wrong = taken[(taken < -1) | (taken >= experts.num)][0]
                raise RequestError(f"routed[{i}]: expert {wrong} is none of {experts.num}, or -1")
            routes.append(taken.astype(np.int16))
        return routes

    def _starts(self, lengths: Sequence[int]) -> list[int]:
        """Return the first token of each sequence that is scored, which has one before it."""
        if self.start is None:
            return [1] * len(lengths)
        starts = list(self.start) if isinstance(self.start, Sequence | np.ndarray) else None
        if starts is None or len(starts) != len(lengths):
            raise RequestError(
                f"start={self.start!r}: must be a list of {len(lengths)}, one a sequence"
            )
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            check_whole(f"start[{i}]", start, 0, length)
        return [max(int(start), 1) for start in starts]

    def _candidates(self, rows: list[int], vocab_size: int) -> list[np.ndarray] | list[None]:
        if self.at is None:
            return [None] * len(rows)
        candidates: list[np.ndarray] = []
        arrays = _one_each("at", self.at, len(rows))
        for i, (ids, count) in enumerate(zip(arrays, rows, strict=True)):
            if ids.ndim != 2 or ids.dtype.kind not in "iu" or len(ids) != count:
                raise RequestError(
                    f"at[{i}] of {ids.dtype}{list(ids.shape)}: must be integers [{count}, K], a "
                    "row for each token that is scored"
                )
            if not 1 <= ids.shape[1] <= MOST:
                raise RequestError(
                    f"at[{i}] has {ids.shape[1]} candidates a row: must be 1 to {MOST}"
                )
            if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
                wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
                raise RequestError(
                    f"at[{i}]: token id {wrong} is outside the vocabulary of {vocab_size}"
                )
            candidates.append(ids.astype(np.int32))
        return candidates


def _one_each(name: str, arrays: IntArrays, count: int) -> list[np.ndarray]:
    """Return the arrays of so many sequences; RequestError unless there is one for each of them."""
    try:
        length = len(arrays)
    except TypeError:  # a number, or an array of one
        kind = type(arrays).__name__
        message = f"{name} of type {kind}: must be a list of arrays, one for each sequence"
        raise RequestError(message) from None
    if length != count:
        raise RequestError(f"{name}: {length} arrays for {count} sequences: one each")
    made = list[np.ndarray]()
    for i, array in enumerate(arrays):
        try:
            made.append(np.asarray(array))
        except ValueError as e:  # lists of several lengths
            raise RequestError(f"{name}[{i}] is no array: {e}") from e
    return made


def scores_of(requests: Sequence[Request]) -> list[Scores]:
    """Return the scores of each request, which has ended, or had nothing to score."""
    return [_scores_of(request) for request in requests]


def _scores_of(request: Request) -> Scores:
    scored, asked = request.sequences[0].scored, request.sequences[0].scoring
    assert scored is not None and asked is not None
    columns = scored.columns
    assert scored.count == len(columns["prompt_logprobs"]), "a chunk was not scored"
    return Scores(
        start=asked.first + 1,
        logprobs=columns["prompt_logprobs"],
        greedy=columns["prompt_ranks"] == 1,
        top_ids=columns.get("prompt_top_ids"),
        top_logprobs=columns.get("prompt_top_logprobs"),
        at_logprobs=columns.get("prompt_candidate_logprobs"),
        entropy=columns.get("prompt_entropies"),
    )
