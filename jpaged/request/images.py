"""PromptImages: from the images and videos of a prompt to patches and the places of their
embeddings; and those of a conversation's messages.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.kept_tokenizer import whole
from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, CheckpointError, ConfigError, RequestError
from jpaged.images.limits import DEFAULT_LIMITS, ImageLimits
from jpaged.images.placeholders import (
    Marks,
    expanded_ids,
    expanded_text,
    marks_of,
    starts_of,
    with_pieces,
)
from jpaged.images.prepare import ImagePreparer
from jpaged.images.sources import ImageLoader, ImageSource
from jpaged.images.spans import Prepared, rows_grid
from jpaged.images.videos import (
    OPTIONS,
    PreparedVideo,
    Video,
    VideoPlan,
    VideoPreparer,
    open_video,
)
from jpaged.models.vision.tower import VisionConfig
from jpaged.request.embeddings import EmbeddingSpan
from jpaged.types import Message, Messages, Tokenizer

IMAGE_KEYS = ("image", "url", "path", "base64")  # of a part {"type": "image"}, as transformers'
VIDEO_KEYS = ("video", "url", "path", "base64")  # of a part {"type": "video"}
NEWLINES = "\n\n"  # around images of Gemma 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """The images and the videos of a prompt, in order, as a caller has passed them. False where
    there are none.
    """

    images: list[ImageSource] = dataclasses.field(default_factory=list)
    videos: list[Video] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)

    @classmethod
    def of(cls, images: object, videos: object) -> "Sources":
        """Make one of what a prompt has under "images" and "videos", where None is nothing. Raises
        RequestError.
        """
        lists = list[list[Any]]()
        for name, value in (("images", images), ("videos", videos)):
            is_one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence)
            if value is not None and is_one:
                kind = type(value).__name__
                raise RequestError(f"{name} of type {kind}: pass a list, also of one {name[:-1]}")
            lists.append([] if value is None else list(value))  # pyright: ignore[reportArgumentType]
        named = list[Video]()
        for index, value in enumerate(lists[1]):
            with _naming(index):
                named.append(Video.of(value))
        return cls(images=lists[0], videos=named)


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Have an error inside the block name the video that it is of."""
    try:
        yield
    except RequestError as e:
        raise type(e)(f"videos[{index}]: {e}") from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """The images and the videos of a prompt, as the tower takes them."""

    images: list[Prepared]
    videos: list[PreparedVideo]

    @property
    def pieces(self) -> list[Prepared]:
        """Those of all videos, in order."""
        return [piece for video in self.videos for piece in video.pieces]


class PromptImages:
    """Reads the images and the videos of the prompts of one model. Any thread may call.

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

    def read(self, sources: Sources) -> Read:
        """Return images and videos as the tower takes them; RequestError for one that cannot be
        taken, CapacityError where they are too many or too large.
        """
        if len(sources) > (most := self.limits.max_images):
            kinds = "images and videos" if sources.videos else "images"
            raise RequestError(
                f"{len(sources)} {kinds} in a prompt: the limit is max_images={most}"
            )
        images, total = list[Prepared](), 0
        for image in self._loader.apply_all(self._prepared, sources.images):
            rows = self.rows(image)
            if rows > self.most:
                raise CapacityError(
                    f"images[{len(images)}] takes {rows} tokens: the limit is {self.most}; send "
                    "fewer pixels, or pass max_image_tokens= of EngineConfig, for which larger "
                    "images are made smaller"
                )
            total += rows
            self._check_total(total)
            images.append(image)
        videos = list[PreparedVideo]()
        for index, video in enumerate(sources.videos):
            with _naming(index):
                videos.append(self._video(video, total))
            total += sum(map(self.rows, videos[-1].pieces))
        return Read(images=images, videos=videos)

    def _check_total(self, total: int) -> None:
        if total > (most := self._max_model_len):
            raise CapacityError(
                f"images of {total} tokens and more leave no room in max_model_len={most}: send "
                "fewer or smaller ones"
            )

    def _video(self, video: Video, before: int) -> PreparedVideo:
        """Return a video as the tower takes it; its tokens are counted before a frame is decoded.
        before: tokens of what is before it.
        """
        preparer = self._videos
        frames = open_video(video, self.limits)
        try:
            plan = preparer.plan(frames, video)
            self._check_plan(plan, before)
            return preparer.prepare(frames, plan, self._shared)
        finally:
            frames.close()

    def _check_plan(self, plan: VideoPlan, before: int) -> None:
        sizes = [rows_grid(grid, self.vision).size for grid in plan.grids]
        fewer = "take fewer frames (fps or num_frames), or send fewer pixels"
        if max(sizes) > self.most:
            raise CapacityError(
                f"{len(plan.numbers)} frames take {max(sizes)} tokens at once: the limit is "
                f"{self.most}; {fewer}, or pass max_image_tokens= of EngineConfig, for which "
                "larger frames are made smaller"
            )
        if (total := before + sum(sizes)) > (most := self._max_model_len):
            raise CapacityError(
                f"{len(plan.numbers)} frames take {total} tokens, with those of images and videos "
                f"before: they leave no room in max_model_len={most}; {fewer}"
            )

    @functools.cached_property
    def _videos(self) -> VideoPreparer:
        try:
            return VideoPreparer(self._preparer)
        except (ConfigError, CheckpointError) as e:  # requests without videos are unaffected
            raise RequestError(f"this model's videos: {e}") from e

    def rows(self, image: Prepared) -> int:
        """Return how many tokens an image takes."""
        return image.rows(self.vision).size

    def in_text(self, text: str, read: Read, tokenizer: Tokenizer) -> str:
        """Return a text in which each placeholder stands as often as its image takes tokens, and
        those of videos have times and marks around them.
        """
        counts = [self.rows(image) for image in read.images]
        text = expanded_text(text, counts, self._marks(tokenizer))
        if read.videos:
            name, *marks = (self._name(tokenizer, id) for id in self._video_tokens)
            texts = [self._in_place(video, name, marks, str) for video in read.videos]
            text = "".join(with_pieces(text.split(name), texts, name))
        return text

    def placed(
        self, ids: Sequence[int], read: Read, tokenizer: Tokenizer | None
    ) -> tuple[list[int], dict[int, EmbeddingSpan]]:
        """Return token ids with those of images and videos in place of their placeholders, and the
        embeddings by the places that they begin at; ids that have them already stay as they are.
        """
        ids, vision = list(ids), self.vision
        rows = [self.rows(image) for image in read.images]
        newlines = list[int]()
        if tokenizer is not None and marks_of(vision, "", "", "", NEWLINES).before:
            newlines = plain_ids(tokenizer, NEWLINES)
        ids = expanded_ids(ids, rows, vision, newlines).token_ids
        if read.videos:
            ids = self._with_videos(ids, read, tokenizer)
        spans = dict[int, EmbeddingSpan]()
        kinds = [(vision.tokens.image, read.images)]
        kinds += [(self._video_tokens[0], read.pieces)] if read.videos else []
        for token, images in kinds:
            starts = starts_of(ids, token, [self.rows(image) for image in images])
            if starts is None:
                raise RequestError("the tokenizer parts the placeholders of images and videos")
            spans |= {at: EmbeddingSpan(x) for at, x in zip(starts, images, strict=True)}
        return ids, spans

    def _with_videos(self, ids: list[int], read: Read, tokenizer: Tokenizer | None) -> list[int]:
        """Return token ids with those of videos in place of their placeholders."""
        token, *marks = self._video_tokens
        if any(video.times is not None for video in read.videos) and tokenizer is None:
            raise RequestError("a video needs a tokenizer, for the times of its frames")

        def write(text: str) -> list[int]:
            return plain_ids(tokenizer, text)  # pyright: ignore[reportArgumentType]

        lists = [[id] for id in marks]
        texts = [self._in_place(video, [token], lists, write) for video in read.videos]
        starts = starts_of(ids, token, [self.rows(piece) for piece in read.pieces])
        if starts is not None and self._are_told(ids, starts, texts):
            return ids
        around, last = list[list[int]](), 0
        for place in [i for i, id in enumerate(ids) if id == token]:
            around.append(ids[last:place])
            last = place + 1
        parts = with_pieces([*around, ids[last:]], texts, str(token))
        return [id for part in parts for id in part]

    def _are_told(self, ids: list[int], starts: list[int], texts: Sequence[list[int]]) -> bool:
        """Return whether ids have what stands for videos already, times and marks included."""
        token, left = self._video_tokens[0], iter(starts)
        for text in texts:
            first = text.index(token)
            begin = next(left) - first
            if begin < 0 or ids[begin : begin + len(text)] != text:
                return False
            runs = sum(b == token and a != token for a, b in itertools.pairwise([-1, *text]))
            for _ in range(runs - 1):
                next(left)
        return True

    def _in_place[T: (str, list[int])](
        self, video: PreparedVideo, token: T, marks: Sequence[T], write: Callable[[str], T]
    ) -> T:
        """Return what stands in the place of a video's placeholder, as text or as ids."""
        made = token[:0]
        for index, piece in enumerate(video.pieces):
            rows = token * self.rows(piece)
            if video.times is None:
                made += rows
            else:
                made += write(f"<{video.times[index]:.1f} seconds>") + marks[0] + rows + marks[1]
        return made

    @property
    def _video_tokens(self) -> tuple[int, int, int]:
        """The ids of rows of a video, and of the marks around a frame."""
        vision = self._videos.vision
        begin, end = vision.tokens.begin, vision.tokens.end
        assert begin is not None and end is not None
        return vision.video_token, begin, end

    def close(self) -> None:
        """End the threads that read images."""
        self._loader.close()

    def _prepared(self, pixels: np.ndarray) -> Prepared:
        digest = self._preparer.digest(pixels)
        return self._shared(digest, lambda: self._preparer.prepare(pixels, digest))

    def _shared(self, digest: bytes, make: Callable[[], Prepared]) -> Prepared:
        """Return what some request has of a digest, or make it."""
        with self._lock:
            known = self._alive.get(digest)
        if known is not None:
            return known
        image = make()
        with self._lock:
            return self._alive.setdefault(digest, image)

    def _marks(self, tokenizer: Tokenizer) -> Marks[str]:
        tokens = self.vision.tokens
        image, begin, end = ("" if id is None else self._name(tokenizer, id) for id in tokens)
        return marks_of(self.vision, image, begin, end, NEWLINES)

    def _name(self, tokenizer: Tokenizer, id: int) -> str:
        """Return the text of a special token."""
        name_of: Any = getattr(whole(tokenizer), "convert_ids_to_tokens", None)
        if name_of is None:
            raise RequestError(
                "a text with images takes a tokenizer of transformers, which names the tokens of "
                "images; pass prompt_token_ids"
            )
        return name_of(id)


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text without special tokens around them."""
    return [int(id) for id in whole(tokenizer).encode(text, add_special_tokens=False)]


def split_sources(messages: Messages, *, needs_sources: bool = True) -> tuple[Messages, Sources]:
    """Return messages whose parts with images and videos are {"type": "image"} and {"type":
    "video"}, as chat templates take them, and these images and videos in order. RequestError for a
    part whose image or video cannot be told. needs_sources: also for parts that have none where no
    part has one.

    A part may be {"type": "image", "image": source}, with "url", "path" or "base64" in place of
    "image" as in transformers, or OpenAI's {"type": "image_url", "image_url": {"url": source}}; for
    videos {"type": "video", "video": source}, in the same forms and with the options of Video, or
    vLLM's {"type": "video_url", "video_url": {"url": source}}.
    """
    sources, changed = Sources(), list[Message]()
    if not isinstance(messages, list | tuple):
        return messages, sources  # the template says what is wrong
    empty = {"image": 0, "video": 0}
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            changed.append(message)
            continue
        parts = list[Any]()
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("image", "image_url", "video", "video_url"):
                parts.append(part)
                continue
            kind = kind.removesuffix("_url")
            source = _source_of(part, kind)
            if source is None:
                empty[kind] += 1
            elif kind == "image":
                sources.images.append(source)
            else:
                with _naming(len(sources.videos)):
                    options = {name: part[name] for name in OPTIONS if name in part}
                    sources.videos.append(Video.of({"video": source, **options}))
            parts.append({"type": kind})
        changed.append({**message, "content": parts})
    for kind, keys, taken in (
        ("image", IMAGE_KEYS, sources.images),
        ("video", VIDEO_KEYS, sources.videos),
    ):
        if empty[kind] and (taken or needs_sources):
            raise RequestError(
                f"{empty[kind]} parts of type {kind!r} have no {kind}: "
                f"pass it under {', '.join(map(repr, keys))}"
            )
    return (changed, sources) if sources else (messages, sources)


def _source_of(part: Mapping[str, object], kind: str) -> ImageSource | None:
    """Return the image or the video of a part; None where it has none."""
    if part["type"] == f"{kind}_url":
        value = part.get(f"{kind}_url")
        source = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(source, str):
            raise RequestError(f"{kind}_url={source!r}: must be {{'url': str}} or a str")
        return source
    keys = IMAGE_KEYS if kind == "image" else VIDEO_KEYS
    named = [key for key in keys if part.get(key) is not None]
    if len(named) > 1:
        raise RequestError(f"a part of type {kind!r} has {', '.join(named)}: pass one of them")
    if not named:
        return None
    source = part[named[0]]
    return f"data:;base64,{source}" if named[0] == "base64" else source
