"""Scoring: what is asked of a sequence that is read and draws nothing; Scored: what came of it."""

import copy
import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np

# Widths of the lists of likeliest tokens and of candidates that steps are compiled for.
WIDTHS = (32, 128, 256, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is asked of the positions of a sequence from `first` on.

    After each position but the last one of the sequence the next token is scored: R rows. top_k:
    how many of the likeliest tokens are returned with their logprobs. candidates: int32 [R, K],
    tokens whose logprobs are returned. entropy: whether that of each distribution is. hidden: the
    hidden states of all R positions are returned, the last one's too, and no logits are computed.
    routed: int16 [tokens, layers, experts], the experts that tokens take, -1 where routers choose.
    at_once: one step computes the whole sequence, whose tokens see those after them.
    """

    first: int = 0
    top_k: int = 0
    candidates: np.ndarray | None = None
    entropy: bool = False
    hidden: bool = False
    routed: np.ndarray | None = None
    at_once: bool = False

    @property
    def salt(self) -> bytes:
        """What keeps the cached prefixes of such sequences apart from others."""
        if self.routed is None:
            return b""
        return hashlib.blake2b(self.routed.tobytes()).digest()

    @property
    def num_routed(self) -> int:
        """Numbers of `routed` a token, 0 where there is none."""
        return 0 if self.routed is None else int(np.prod(self.routed.shape[1:]))

    @property
    def num_candidates(self) -> int:
        """K of `candidates`, 0 where there are none."""
        return 0 if self.candidates is None else self.candidates.shape[1]

    def past(self, num_tokens: int) -> int:
        """Return the position after the last that is read, in a sequence of so many tokens."""
        return num_tokens if self.hidden else num_tokens - 1


class States(NamedTuple):
    """Hidden states of a chunk: `rows` rows of a device's array from row `first` on. Only what
    made the array knows its type.
    """

    array: Any
    first: int
    rows: int


class Scored:
    """The results of a Scoring, filled in chunk by chunk; R rows, of which the first `count` are
    there.

    columns: by the name of the output of the step: prompt_logprobs float32 [R], prompt_ranks int32
    [R], prompt_top_ids and prompt_top_logprobs [R, top_k], prompt_candidate_logprobs float32 [R,
    K], prompt_entropies float32 [R]; those that were asked for. states: of `hidden`, in order.
    """

    def __init__(self, scoring: Scoring, num_tokens: int):
        self.first, self.count = scoring.first, 0
        rows = max(scoring.past(num_tokens) - scoring.first, 0)
        self.columns: dict[str, np.ndarray] = {}
        self.states: list[States] = []
        if scoring.hidden:
            return
        self._add("prompt_logprobs", (rows,), np.float32)
        self._add("prompt_ranks", (rows,), np.int32)
        if scoring.top_k:
            self._add("prompt_top_ids", (rows, scoring.top_k), np.int32)
            self._add("prompt_top_logprobs", (rows, scoring.top_k), np.float32)
        if scoring.candidates is not None:
            self._add("prompt_candidate_logprobs", scoring.candidates.shape, np.float32)
        if scoring.entropy:
            self._add("prompt_entropies", (rows,), np.float32)

    def _add(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self.columns[name] = np.zeros(shape, dtype)

    def take(self, positions: range, outputs: dict[str, np.ndarray], row: int) -> None:
        """Take up what a step computed at these positions: rows from `row` on of its outputs. What
        is there already, and was computed again, stays.
        """
        known, rows = self._new(positions)
        for name, column in self.columns.items():
            widths = [slice(width) for width in column.shape[1:]]
            column[rows] = outputs[name][(slice(row + known, row + len(positions)), *widths)]
        self.count = rows.stop

    def take_states(self, positions: range, array: object, row: int) -> None:
        """Take up the hidden states of these positions: rows from `row` on of an array."""
        known, rows = self._new(positions)
        if count := rows.stop - rows.start:
            self.states.append(States(array, row + known, count))
        self.count = rows.stop

    def _new(self, positions: range) -> tuple[int, slice]:
        """Return how many of the positions are there already, and the rows of the others."""
        known = min(self.count - (positions.start - self.first), len(positions))
        return known, slice(self.count, max(positions.stop - self.first, self.count))

    def copy(self) -> "Scored":
        """Return results that later chunks of these leave alone."""
        twin = copy.copy(self)
        twin.columns = {name: column.copy() for name, column in self.columns.items()}
        twin.states = list(self.states)
        return twin
