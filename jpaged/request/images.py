"""PromptImages: from the images of a prompt to patches and the places of their embeddings; and the
images of a conversation's messages.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.kept_tokenizer import whole
from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, ConfigError, RequestError
from jpaged.images.limits import DEFAULT_LIMITS, ImageLimits
from jpaged.images.placeholders import Expanded, Marks, expanded_ids, expanded_text, marks_of
from jpaged.images.prepare import ImagePreparer
from jpaged.images.sources import ImageLoader, ImageSource
from jpaged.images.spans import Prepared
from jpaged.models.vision.tower import VisionConfig
from jpaged.request.embeddings import EmbeddingSpan
from jpaged.types import Message, Messages, Tokenizer

IMAGE_KEYS = ("image", "url", "path", "base64")  # of a part {"type": "image"}, as transformers'
VIDEO_KINDS = ("video", "video_url")
VIDEO_KEYS = ("video", "video_url", "url", "path", "base64", "frames")
NEWLINES = "\n\n"  # around images of Gemma 3


class PromptImages:
    """Reads the images of the prompts of one model. Any thread may call.

    folder: says how images are prepared; ConfigError where there is none. most: tokens that an
    image has at most, which larger ones are made smaller for where the config says so. limits: what
    an image may be, which may be replaced.
    """

    def __init__(
        self, folder: Path | None, vision: VisionConfig, config: EngineConfig, *, most: int
    ):
        if folder is None:
            raise ConfigError(
                "images=True: params of no known folder, which says how images are prepared; pass "
                "those of load_params(FOLDER, images=True), or config=FOLDER with a tree"
            )
        self.vision, self.most = vision, most
        self._max_model_len = config.max_model_len or 0
        self._preparer = ImagePreparer(folder, vision, max_rows=config.max_image_tokens)
        self._loader = ImageLoader(config.image_limits or DEFAULT_LIMITS)
        # Those of other requests that are alive: samples of one prompt share them.
        self._alive: weakref.WeakValueDictionary[bytes, Prepared] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # of `_alive`

    @property
    def limits(self) -> ImageLimits:
        """What an image may be, and where it may come from."""
        return self._loader.limits

    @limits.setter
    def limits(self, limits: ImageLimits) -> None:
        self._loader.limits = limits

    def read(self, sources: object) -> list[Prepared]:
        """Return images as the tower takes them; RequestError for one that cannot be taken,
        CapacityError where they are too many or too large.
        """
        if isinstance(sources, str | bytes | Mapping) or not isinstance(sources, Sequence):
            kind = type(sources).__name__
            raise RequestError(f"images of type {kind}: pass a list, also of one image")
        if len(sources) > (most := self.limits.max_images):
            raise RequestError(f"{len(sources)} images in a prompt: the limit is max_images={most}")
        images, total = list[Prepared](), 0
        for image in self._loader.apply_all(self._prepared, sources):
            rows = self.rows(image)
            if rows > self.most:
                raise CapacityError(
                    f"images[{len(images)}] takes {rows} tokens: the limit is {self.most}; send "
                    "fewer pixels, or pass max_image_tokens= of EngineConfig, for which larger "
                    "images are made smaller"
                )
            total += rows
            if total > self._max_model_len:
                raise CapacityError(
                    f"images of {total} tokens and more leave no room in max_model_len="
                    f"{self._max_model_len}: send fewer or smaller ones"
                )
            images.append(image)
        return images

    def rows(self, image: Prepared) -> int:
        """Return how many tokens an image takes."""
        return image.rows(self.vision).size

    def in_text(self, text: str, images: Sequence[Prepared], tokenizer: Tokenizer) -> str:
        """Return a text in which each placeholder stands as often as its image takes tokens."""
        marks = self._marks(tokenizer)
        return expanded_text(text, [self.rows(image) for image in images], marks)

    def in_ids(
        self, ids: Sequence[int], images: Sequence[Prepared], tokenizer: Tokenizer | None
    ) -> Expanded:
        """Return token ids with those of images in place of their placeholders; ids that have them
        already stay as they are.
        """
        rows = [self.rows(image) for image in images]
        newlines = list[int]()
        if tokenizer is not None and marks_of(self.vision, "", "", "", NEWLINES).before:
            newlines = plain_ids(tokenizer, NEWLINES)
        return expanded_ids(ids, rows, self.vision, newlines)

    def spans(self, starts: Sequence[int], images: Sequence[Prepared]) -> dict[int, EmbeddingSpan]:
        """Return the embeddings of a prompt whose images stand at these places."""
        pairs = zip(starts, images, strict=True)
        return {start: EmbeddingSpan(image) for start, image in pairs}

    def close(self) -> None:
        """End the threads that read images."""
        self._loader.close()

    def _prepared(self, pixels: np.ndarray) -> Prepared:
        digest = self._preparer.digest(pixels)
        with self._lock:
            known = self._alive.get(digest)
        if known is not None:
            return known
        image = self._preparer.prepare(pixels, digest)
        with self._lock:
            return self._alive.setdefault(digest, image)

    def _marks(self, tokenizer: Tokenizer) -> Marks[str]:
        name_of: Any = getattr(whole(tokenizer), "convert_ids_to_tokens", None)
        if name_of is None:
            raise RequestError(
                "a text with images takes a tokenizer of transformers, which names the tokens of "
                "images; pass prompt_token_ids"
            )
        tokens = self.vision.tokens
        image, begin, end = ("" if id is None else name_of(id) for id in tokens)
        return marks_of(self.vision, image, begin, end, NEWLINES)


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text without special tokens around them."""
    return [int(id) for id in whole(tokenizer).encode(text, add_special_tokens=False)]


def split_images(
    messages: Messages, *, needs_images: bool = True
) -> tuple[Messages, list[ImageSource]]:
    """Return messages whose parts with images are {"type": "image"}, as chat templates take them,
    and these images in order. RequestError for a part whose image cannot be told, and for one that
    has a video. needs_images: also for parts that have none where no part has one.

    A part may be {"type": "image", "image": source}, with "url", "path" or "base64" in place of
    "image" as in transformers, or OpenAI's {"type": "image_url", "image_url": {"url": source}}.
    """
    sources, changed, empty = list[ImageSource](), list[Message](), 0
    if not isinstance(messages, list | tuple):
        return messages, sources  # the template says what is wrong
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            changed.append(message)
            continue
        parts = list[Any]()
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in VIDEO_KINDS and any(part.get(key) is not None for key in VIDEO_KEYS):
                raise RequestError(
                    f"a part of type {kind!r} has a video: chats take none; video_prompt makes a "
                    "prompt of its frames, or pass frames as images"
                )
            if kind not in ("image", "image_url"):
                parts.append(part)
                continue
            source = _source_of(part)
            if source is None:
                empty += 1
            else:
                sources.append(source)
            parts.append({"type": "image"})
        changed.append({**message, "content": parts})
    if empty and (sources or needs_images):
        raise RequestError(
            f"{empty} parts of type 'image' have no image: "
            f"pass it under {', '.join(map(repr, IMAGE_KEYS))}"
        )
    return (changed, sources) if sources else (messages, sources)


def _source_of(part: Mapping[str, object]) -> ImageSource | None:
    """Return the image of a part; None where it has none."""
    if part["type"] == "image_url":
        value = part.get("image_url")
        source = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(source, str):
            raise RequestError(f"image_url={source!r}: must be {{'url': str}} or a str")
        return source
    named = [key for key in IMAGE_KEYS if part.get(key) is not None]
    if len(named) > 1:
        raise RequestError(f"a part of type 'image' has {', '.join(named)}: pass one of them")
    if not named:
        return None
    source = part[named[0]]
    return f"data:;base64,{source}" if named[0] == "base64" else source
