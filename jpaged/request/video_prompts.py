"""video_prompt: a prompt of the engine of a text that has videos."""

from collections.abc import Sequence
from typing import Any

from jpaged.checkpoint.kept_tokenizer import whole
from jpaged.errors import RequestError, UnsupportedError
from jpaged.images.placeholders import Marks, expanded_text, starts_of
from jpaged.images.spans import Prepared
from jpaged.images.videos import PreparedVideo
from jpaged.models.vision.qwen import Qwen3VisionConfig, Qwen25VisionConfig
from jpaged.models.vision.tower import VisionConfig
from jpaged.request.embeddings import EmbeddingSpan
from jpaged.types import Tokenizer


def video_prompt(
    text: str,
    videos: Sequence[PreparedVideo],
    vision: VisionConfig,
    tokenizer: Tokenizer,
    *,
    images: Sequence[Prepared] = (),
) -> dict[str, list[int] | dict[int, EmbeddingSpan]]:
    """Return a prompt of the engine of a text with one placeholder a video, and one an image, as
    chat templates write them: {"prompt_token_ids", "embeddings"}. tokenizer: of transformers.
    RequestError where they are not as many, UnsupportedError for a model whose videos are not read.
    """
    if not isinstance(vision, Qwen3VisionConfig | Qwen25VisionConfig):
        raise UnsupportedError(f"videos of {type(vision).__name__} are not read")
    named: Any = whole(tokenizer)
    name_of = named.convert_ids_to_tokens
    image, begin, end = (name_of(id) for id in vision.tokens)
    if images:
        marks = Marks(placeholder=image, image=image, before="", after="")
        text = expanded_text(text, [x.rows(vision).size for x in images], marks)
    video = name_of(vision.video_token)
    around = text.split(video)
    if len(around) - 1 != len(videos):
        raise RequestError(
            f"the prompt has {len(around) - 1} of the placeholder {video}, and {len(videos)} "
            "videos were passed: there must be one for each video, in order"
        )
    for i, one in enumerate(videos):
        around[i] += _text_of(one, vision, video, (begin, end))
    ids = [int(id) for id in named.encode("".join(around), add_special_tokens=False)]
    embeddings: dict[int, EmbeddingSpan] = {}
    pieces = [piece for one in videos for piece in one.pieces]
    for token, of_token in ((vision.tokens.image, images), (vision.video_token, pieces)):
        starts = starts_of(ids, token, [x.rows(vision).size for x in of_token])
        if starts is None:
            raise RequestError("the tokenizer parts the placeholders of images and videos")
        embeddings |= {start: EmbeddingSpan(x) for start, x in zip(starts, of_token, strict=True)}
    return {"prompt_token_ids": ids, "embeddings": embeddings}


def _text_of(one: PreparedVideo, vision: VisionConfig, video: str, marks: tuple[str, str]) -> str:
    """Return what stands in the place of a video's placeholder."""
    counts = [piece.rows(vision).size for piece in one.pieces]
    if one.times is None:
        return "".join(video * count for count in counts)
    begin, end = marks
    return "".join(
        f"<{time:.1f} seconds>{begin}{video * count}{end}"
        for time, count in zip(one.times, counts, strict=True)
    )
