"""Placeholders: where the rows of embeddings of images stand in a prompt.

A chat template writes one placeholder an image. In its place come as many ids as the image has rows
of embeddings, with the model's marks around them: in a text before it is tokenized
(`expanded_text`, as transformers' processors do it), or in token ids (`expanded_ids`).
"""

import dataclasses
from collections.abc import Sequence

from jpaged.errors import RequestError
from jpaged.models.vision.qwen import QwenVisionConfig
from jpaged.models.vision.siglip import SiglipVisionConfig
from jpaged.models.vision.tower import VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marks[T]:
    """What stands for an image, as texts or as lists of ids. placeholder: what a template writes.
    image: once a row. before, after: around the rows of an image.
    """

    placeholder: T
    image: T
    before: T
    after: T


def marks_of[T: (str, list[int])](
    config: VisionConfig, image: T, begin: T, end: T, newlines: T
) -> Marks[T]:
    """Return a model's marks. image, begin, end: the names, or ids, of ImageTokens; newlines: two
    ends of lines, which Gemma 3 has around an image.
    """
    if isinstance(config, QwenVisionConfig):  # the template writes begin and end
        return Marks(placeholder=image, image=image, before=image[:0], after=image[:0])
    if isinstance(config, SiglipVisionConfig):
        return Marks(placeholder=begin, image=image, before=newlines + begin, after=end + newlines)
    return Marks(placeholder=image, image=image, before=begin, after=end)


def expanded_text(text: str, rows: Sequence[int], marks: Marks[str]) -> str:
    """Return a text with the marks of its images in place of their placeholders. rows: of each
    image. RequestError unless the text has one placeholder an image.
    """
    pieces = text.split(marks.placeholder)
    if len(pieces) - 1 != len(rows):
        raise RequestError(_unequal(len(pieces) - 1, marks.placeholder, len(rows)))
    out = [pieces[0]]
    for count, piece in zip(rows, pieces[1:], strict=True):
        out += [marks.before, marks.image * count, marks.after, piece]
    return "".join(out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expanded:
    """token_ids: of a prompt, with one id a row of embeddings. starts: the place of the first of
    each image.
    """

    token_ids: list[int]
    starts: list[int]


def expanded_ids(
    token_ids: Sequence[int],
    rows: Sequence[int],
    config: VisionConfig,
    newlines: Sequence[int] = (),
) -> Expanded:
    """Return token ids with the marks of images in place of their placeholders; ids that have them
    already stay as they are. rows: of each image. newlines: as of marks_of. RequestError where ids
    and images do not fit.
    """
    tokens, ids = config.tokens, list(token_ids)
    begin, end = ([] if x is None else [x] for x in (tokens.begin, tokens.end))
    marks = marks_of(config, [tokens.image], begin, end, list(newlines))
    starts = starts_of(ids, tokens.image, rows)
    if starts is not None and all(
        ids[i - len(m) : i] == m for i in starts if (m := marks.before[-1:])
    ):
        return Expanded(token_ids=ids, starts=starts)
    (placeholder,) = marks.placeholder
    if (count := ids.count(placeholder)) != len(rows):
        raise RequestError(_unequal(count, str(placeholder), len(rows)))
    out: list[int] = []
    starts, left = [], iter(rows)
    for token in ids:
        if token != placeholder:
            out.append(token)
            continue
        out += marks.before
        starts.append(len(out))
        out += marks.image * next(left) + marks.after
    return Expanded(token_ids=out, starts=starts)


def with_pieces[T: (str, list[int])](
    around: Sequence[T], pieces: Sequence[T], placeholder: str
) -> list[T]:
    """Return what stands around the placeholders of videos with these pieces in their places.
    RequestError where they are not as many.
    """
    if (count := len(around) - 1) != len(pieces):
        raise RequestError(
            f"the prompt has {count} of the placeholder {placeholder}, and {len(pieces)} videos "
            "were passed: there must be one for each video, in order"
        )
    made = [around[0]]
    for piece, part in zip(pieces, around[1:], strict=True):
        made += [piece, part]
    return made


def starts_of(ids: list[int], image: int, rows: Sequence[int]) -> list[int] | None:
    """Return where the rows of each image begin, if these ids are those of all rows; None if there
    are others.
    """
    starts, left, at = list[int](), list(rows), 0
    while at < len(ids):
        if ids[at] != image:
            at += 1
            continue
        if not left or ids[at : at + left[0]] != [image] * left[0]:
            return None
        starts.append(at)
        at += left.pop(0)
    return None if left else starts


def _unequal(count: int, placeholder: str, images: int) -> str:
    return (
        f"the prompt has {count} of the placeholder {placeholder}, and {images} images were "
        "passed: there must be one for each image, in order"
    )
