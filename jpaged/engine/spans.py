"""Spans: the embeddings that stand in place of some tokens of a prompt, on the host."""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

NO_TOKEN = b"\xff\xff\xff\xff"  # an int32 that is no token's id


@dataclasses.dataclass(eq=False, frozen=True, kw_only=True)
class Span:
    """Embeddings in place of the n tokens of a prompt from `start` on.

    embeddings: [n, E] floats; None of an image that the device encodes when a step first needs its
    rows. deepstack: [layers, n, E], what is added after the first layers, or None. grid: (frames,
    rows, columns) of the image that they are of, or None. digest: of all of that; spans of one
    digest are equal. named: what the caller has passed in place of a hash of the numbers, or None.
    image: what the device encodes; None where `embeddings` are there. time_interval: how far the
    frames of a grid are from each other on the first axis of positions.
    """

    start: int
    embeddings: np.ndarray | None
    deepstack: np.ndarray | None = None
    grid: tuple[int, int, int] | None = None
    digest: bytes
    named: bytes | None = None
    image: object | None = None
    time_interval: float = 1.0

    def __len__(self) -> int:
        if self.embeddings is not None:
            return len(self.embeddings)
        assert self.grid is not None, "an image has a grid"
        return math.prod(self.grid)

    def __deepcopy__(self, memo: Mapping[int, object]) -> "Span":
        return self  # never changed: a snapshot shares it

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self)

    @functools.cached_property
    def numbers_digest(self) -> bytes:
        """What its numbers are known by in every process with the same weights: `digest`, unless
        the caller has named it. A name is of pixels, say, and weights that nobody knows of make
        other numbers of them; an image is encoded by those of the model.
        """
        if self.named is None or self.embeddings is None:
            return self.digest
        form = f"{self.embeddings.dtype} {self.embeddings.shape} {self.grid}"
        form += "" if self.time_interval == 1.0 else f" {self.time_interval}"
        digest = hashlib.blake2b(form.encode(), digest_size=32)
        digest.update(np.ascontiguousarray(self.embeddings).tobytes())
        if self.deepstack is not None:
            digest.update(f"{self.deepstack.dtype} {self.deepstack.shape}".encode())
            digest.update(np.ascontiguousarray(self.deepstack).tobytes())
        return digest.digest()


class Piece(NamedTuple):
    """`size` rows of a span from row `first` on, which take the places of the tokens of a chunk
    from its token `place` on.
    """

    place: int
    span: Span
    first: int
    size: int


class Spans:
    """The spans of a prompt, in order; none overlaps another.

    num_tokens: of the prompt. has_axes: whether the model rotates by positions of three axes, so
    that a grid has positions of its own. are_whole: whether tokens of one image see each other, so
    that no step computes a part of one.

    positions: int32 [3, num_tokens] on the three axes, None where each token has its index on all
    of them. offset: what positions on every axis are ahead of the index, after the prompt.
    """

    def __init__(
        self,
        spans: tuple[Span, ...],
        num_tokens: int,
        *,
        has_axes: bool = False,
        are_whole: bool = False,
    ):
        self.spans, self.are_whole = spans, are_whole
        self._starts = [span.start for span in spans]
        self.positions: np.ndarray | None = None
        self.offset = 0
        if has_axes and any(span.grid is not None for span in spans):
            self.positions = positions_on_axes(spans, num_tokens)
            self.offset = int(self.positions.max()) + 1 - num_tokens

    def __deepcopy__(self, memo: Mapping[int, object]) -> "Spans":
        return self  # never changed: a snapshot shares it

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the parts of spans that lie among the tokens [start, end)."""
        first = max(bisect.bisect_right(self._starts, start) - 1, 0)
        for span in itertools.islice(self.spans, first, None):
            if span.start >= end:
                return
            begin, past = max(span.start, start), min(span.end, end)
            if begin < past:
                yield Piece(begin - start, span, begin - span.start, past - begin)

    def block_bytes(self, start: int, end: int, *, in_files: bool = False) -> bytes:
        """Return what the tokens [start, end) are of beside their ids: the spans among them, and
        which part of each; nothing where there is none. in_files: by their numbers.
        """
        parts = [
            NO_TOKEN
            + np.array([p.place, p.first], np.int32).tobytes()
            + (p.span.numbers_digest if in_files else p.span.digest)
            for p in self.pieces(start, end)
        ]
        return b"".join(parts)

    def reach(self, start: int, end: int, most: int) -> int:
        """Return how far a chunk from `start` goes, `end` at the furthest, with at most so many
        embeddings, and without a part of an image whose tokens see each other.
        """
        for piece in self.pieces(start, end):
            begin = start + piece.place
            if self.are_whole and piece.span.grid is not None:
                count = len(piece.span) - piece.first
                if count > most or begin + count > end:
                    return begin
            if piece.size > most:
                return begin + most
            most -= piece.size
        return end

    def write_positions(self, view: np.ndarray, start: int) -> None:
        """Write the positions of tokens from `start` on into an array [3, tokens]."""
        count, known = view.shape[1], 0
        if self.positions is not None and start < self.positions.shape[1]:
            part = self.positions[:, start : start + count]
            known = part.shape[1]
            view[:, :known] = part
        first = start + known + self.offset
        view[:, known:] = np.arange(first, first + count - known)

    def write_ends(self, view: np.ndarray, start: int) -> None:
        """Write the position after the image of each token from `start` on into an array [tokens],
        of those tokens alone that are of one.
        """
        for place, span, _, count in self.pieces(start, start + len(view)):
            if span.grid is not None:
                view[place : place + count] = span.end


def positions_on_axes(spans: tuple[Span, ...], num_tokens: int) -> np.ndarray:
    """Return the positions of a prompt's tokens on the axes of frames, rows and columns, int32 [3,
    num_tokens].

    A token of text is one further than the one before on all of them. A grid begins at the next
    position too, and counts its frames (each time_interval further), rows and columns from there;
    what follows it is as much further as the longer of its sides. Source: get_rope_index of
    Qwen2-VL (arXiv:2409.12191) and Qwen3-VL in transformers.
    """
    positions = np.zeros((3, num_tokens), np.int32)
    at = position = 0

    def text(end: int) -> None:
        nonlocal at, position
        positions[:, at:end] = range(position, position + end - at)
        at, position = end, position + end - at

    for span in spans:
        if span.grid is not None:
            text(span.start)
            places = np.indices(span.grid).reshape(3, -1)
            if span.time_interval != 1.0:  # in f32, as transformers multiplies
                places[0] = places[0].astype(np.float32) * np.float32(span.time_interval)
            positions[:, at : span.end] = places + position
            at, position = span.end, position + max(span.grid[1:])
    text(num_tokens)
    return positions


def rows_of(pieces: list[Piece], num_deepstack: int, dtype: DTypeLike) -> np.ndarray:
    """Return the rows of some pieces, one after the other, as the pool of embeddings holds them:
    [rows, 1 + num_deepstack, E], zeros where a span has no deepstack.
    """
    arrays = [p.span.embeddings for p in pieces if p.span.embeddings is not None]
    assert len(arrays) == len(pieces), "images are encoded first"
    total, width = sum(p.size for p in pieces), arrays[0].shape[1]
    rows = np.zeros((total, 1 + num_deepstack, width), dtype)
    at = 0
    for (_, span, first, count), embeddings in zip(pieces, arrays, strict=True):
        rows[at : at + count, 0] = embeddings[first : first + count]
        if span.deepstack is not None:
            rows[at : at + count, 1:] = span.deepstack[:, first : first + count].swapaxes(0, 1)
        at += count
    return rows
