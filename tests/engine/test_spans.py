"""Spans on the host: which parts of them a chunk has, how far it goes, and what a block is of."""

import copy

import numpy as np
import pytest

from jpaged.engine.sequence import Sequence
from jpaged.engine.spans import Span, Spans, positions_on_axes, rows_of
from jpaged.sampling_params import SamplingParams


def span(start: int, count: int, grid: tuple[int, int, int] | None = None, name: str = "") -> Span:
    rows = np.arange(count, dtype=np.float32)[:, None] + np.zeros((1, 3), np.float32)
    return Span(start=start, embeddings=rows, grid=grid, digest=f"{name or start}".encode() * 8)


SPANS = (span(2, 4), span(6, 6, (1, 2, 3)), span(15, 4, (1, 2, 2)))


@pytest.mark.parametrize("start", range(20))
@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_pieces_are_the_tokens_of_spans(start: int, count: int) -> None:
    owner = np.full(40, -1)
    row = np.full(40, -1)
    for i, s in enumerate(SPANS):
        owner[s.start : s.end], row[s.start : s.end] = i, range(len(s))
    found_owner, found_row = np.full(count, -1), np.full(count, -1)
    pieces = list(Spans(SPANS, 22).pieces(start, start + count))
    for place, s, first, n in pieces:
        assert n > 0 and (found_owner[place : place + n] == -1).all()
        found_owner[place : place + n] = SPANS.index(s)
        found_row[place : place + n] = range(first, first + n)
    np.testing.assert_array_equal(found_owner, owner[start : start + count])
    np.testing.assert_array_equal(found_row, row[start : start + count])
    if pieces:
        rows = rows_of(pieces, 0, np.float32)
        np.testing.assert_array_equal(rows[:, 0, 0], found_row[found_row >= 0])


@pytest.mark.parametrize("most", range(1, 16))
def test_chunks_go_as_far_as_rows_do(most: int) -> None:
    spans = Spans(SPANS, 22)
    ends, at = [], 0
    while at < 22:
        end = spans.reach(at, 22, most)
        assert at < end <= 22
        assert sum(piece.size for piece in spans.pieces(at, end)) <= most
        if end < 22:  # not one token further
            assert sum(piece.size for piece in spans.pieces(at, end + 1)) > most
        ends.append(end)
        at = end
    assert (ends == [22]) == (most >= 14)


@pytest.mark.parametrize(
    ("start", "end", "most", "wanted"),
    [
        (0, 22, 14, 22),
        (0, 22, 13, 15),  # the third one does not fit
        (0, 22, 9, 6),  # four rows of text, and an image of six that five cannot hold
        (0, 10, 14, 6),  # the chunk would end in an image
        (6, 11, 14, 6),  # nothing: it begins with an image that is longer
        (6, 12, 6, 12),
        (8, 12, 6, 12),  # the rest of one whose beginning was found
        (8, 11, 6, 8),
        (3, 5, 1, 4),  # text may be cut anywhere
    ],
)
def test_images_whose_tokens_see_each_other_are_whole(
    start: int, end: int, most: int, wanted: int
) -> None:
    assert Spans(SPANS, 22, are_whole=True).reach(start, end, most) == wanted


def test_positions_of_images_and_of_what_follows() -> None:
    positions = positions_on_axes(SPANS, 22)
    assert positions[:, :6].tolist() == [[*range(6)]] * 3
    assert positions[:, 6:12].tolist() == [[6] * 6, [6] * 3 + [7] * 3, [6, 7, 8] * 2]
    assert positions[:, 12:15].tolist() == [[9, 10, 11]] * 3
    assert positions[:, 15:19].tolist() == [[12] * 4, [12, 12, 13, 13], [12, 13, 12, 13]]
    assert positions[:, 19:].tolist() == [[14, 15, 16]] * 3
    spans = Spans(SPANS, 22, has_axes=True)
    assert spans.offset == 17 - 22
    view = np.zeros((3, 6), np.int32)
    spans.write_positions(view, 18)
    assert view.tolist() == [[12, 14, 15, 16, 17, 18], [13, *range(14, 19)], [13, *range(14, 19)]]
    video = positions_on_axes((span(1, 8, (2, 2, 2)),), 10)
    assert video.tolist() == [
        [0, 1, 1, 1, 1, 2, 2, 2, 2, 3],
        [0, 1, 1, 2, 2, 1, 1, 2, 2, 3],
        [0, 1, 2, 1, 2, 1, 2, 1, 2, 3],
    ]
    assert Spans(SPANS[:1], 22, has_axes=True).positions is None  # no grid
    ends = np.zeros(12, np.int32)
    spans.write_ends(ends, 8)
    assert ends.tolist() == [12] * 4 + [0] * 3 + [19] * 4 + [0]


def sequence(*spans: Span, ids: list[int] | None = None, salt: str | None = None) -> Sequence:
    ids = [7] * 22 if ids is None else ids
    own = Spans(spans, 22) if spans else None
    asked = SamplingParams()
    return Sequence("id", ids, asked, max_model_len=64, spans=own, salt=salt)


def test_blocks_are_of_their_spans() -> None:
    """Equal bytes where ids, spans and places in them are equal, and nowhere else."""
    base = sequence(*SPANS)
    others = [
        sequence(),
        sequence(*SPANS[:2]),
        sequence(span(2, 4, name="other"), *SPANS[1:]),
        sequence(SPANS[0], span(7, 6, (1, 2, 3), name="6"), SPANS[2]),
        sequence(*SPANS, ids=[7] * 21 + [8]),
        sequence(*SPANS, salt="tenant"),
    ]
    blocks = [[seq.block_bytes(i, 4) for i in range(6)] for seq in (base, *others)]
    differ = [[i for i in range(6) if block[i] != blocks[0][i]] for block in blocks[1:]]
    assert differ == [[0, 1, 2, 3, 4], [3, 4], [0, 1], [1, 2, 3], [5], [0]]
    assert len(set(blocks[0])) == 6  # also those of one span
    # A span that begins in a block's middle is not one that begins with it.
    assert sequence(span(0, 4, name="a")).block_bytes(0, 4) != (
        sequence(span(1, 4, name="a")).block_bytes(0, 4)
    )
    twin = copy.deepcopy(base)
    assert twin.spans is base.spans and twin.block_bytes(1, 4) == blocks[0][1]
