"""Placeholders of images in texts and token ids, as transformers' processors write them."""

import pytest

from jpaged.errors import RequestError
from jpaged.images.placeholders import expanded_ids, expanded_text, marks_of
from tests.images.test_prepare import vision_of

X, B, E, N = 17, 18, 19, 5  # the ids of image, begin and end in these configs; and of two newlines


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_vl", "a<b><i><i><i><e>c<b><i><e>"),
        ("gemma4_clipped", "a<b><b><i><i><i><e><e>c<b><b><i><e><e>"),
    ],
)
def test_texts(name: str, expected: str) -> None:
    """A template of Qwen's writes begin and end; Gemma's processor does."""
    marks = marks_of(vision_of(name), "<i>", "<b>", "<e>", "\n\n")
    assert expanded_text("a<b><i><e>c<b><i><e>", [3, 1], marks) == expected


def test_texts_of_gemma3() -> None:
    marks = marks_of(vision_of("gemma3"), "<i>", "<b>", "<e>", "\n\n")
    assert expanded_text("a<b>c<b>", [2, 1], marks) == "a\n\n<b><i><i><e>\n\nc\n\n<b><i><e>\n\n"
    with pytest.raises(RequestError, match="has 2 of the placeholder <b>, and 3 images"):
        expanded_text("a<b>c<b>", [1, 1, 1], marks)
    assert expanded_text("a", [], marks) == "a"


@pytest.mark.parametrize(
    ("name", "ids", "rows", "expected", "starts"),
    [
        ("qwen3_vl", [1, B, X, E, 2, B, X, E], [3, 2], [1, B, X, X, X, E, 2, B, X, X, E], [2, 8]),
        ("qwen3_vl", [X, X], [2, 3], [X] * 5, [0, 2]),
        ("qwen3_vl", [1, 2], [], [1, 2], []),
        ("gemma4_unified", [1, X, 2, X], [1, 2], [1, B, X, E, 2, B, X, X, E], [2, 6]),
        ("gemma4_standardized", [X], [1], [B, X, E], [1]),
        ("gemma3", [1, B, 2], [2], [1, N, B, X, X, E, N, 2], [3]),
    ],
)
def test_ids(
    name: str, ids: list[int], rows: list[int], expected: list[int], starts: list[int]
) -> None:
    vision = vision_of(name)
    made = expanded_ids(ids, rows, vision, [N])
    assert made.token_ids == expected and made.starts == starts
    again = expanded_ids(made.token_ids, rows, vision, [N])
    assert again == made, "ids that are expanded stay as they are"


@pytest.mark.parametrize(
    ("name", "ids", "rows"),
    [
        ("qwen3_vl", [1, 2], [3]),
        ("qwen3_vl", [1, X, 2, X], [3]),
        ("qwen3_vl", [1, X, X, 2], [3]),
        ("qwen3_vl", [X, X, X, X], [3]),
        ("qwen3_vl", [1, X], []),
        ("gemma3", [1, X, X], [3]),
        ("gemma4_unified", [1, X, X], [3]),
        ("gemma4_unified", [1, X, X, X], [3]),
    ],
)
def test_ids_that_do_not_fit(name: str, ids: list[int], rows: list[int]) -> None:
    with pytest.raises(RequestError, match="there must be one for each image"):
        expanded_ids(ids, rows, vision_of(name))
