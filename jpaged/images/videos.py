"""Videos: as patches, with the times of their frames.

Qwen2.5-VL takes a video as one grid, whose frames are apart on the time axis of positions as they
are in seconds. Qwen3-VL and Qwen 3.5 take each pair of frames as an image of its own, with its time
as text before it. Both put two frames into one patch. Which frames are taken, their sizes, pixels,
patches and times are those of transformers' processors (Qwen2VLVideoProcessor,
Qwen3VLVideoProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor).
"""

import dataclasses
import hashlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jpaged.checks import read_json
from jpaged.errors import ConfigError, RequestError, UnsupportedError
from jpaged.images.limits import VIDEO, ImageLimits
from jpaged.images.prepare import IMAGE_FILES, VIDEO_FILE, ImagePreparer
from jpaged.images.resize import resized
from jpaged.images.sources import load_file, load_image
from jpaged.images.spans import Prepared
from jpaged.images.video_files import VideoFile
from jpaged.models.vision.qwen import Qwen25VisionConfig, QwenVisionConfig
from jpaged.models.vision.tower import Grid, VisionConfig

MOST_RATIO = 200  # of the longer to the shorter side
USUAL_FPS = 24  # of frames that nobody has told the rate of, as in transformers
LEAST_FRAMES, MOST_FRAMES = 4, 768  # that are taken, where the folder does not say
MOST_ASKED = 2**16  # of num_frames
MOST_TOKENS = {True: 128_000, False: 768}  # max_video_tokens; of Qwen2.5-VL: of all frames
OPTIONS = ("fps", "num_frames", "do_sample_frames", "video_metadata")
METADATA = ("fps", "frames_indices", "total_num_frames")

type VideoSource = (
    Any  # a file as of an image, or frames: an array [n, h, w, 3] or a list of images
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Video:
    """A video and what is taken of it, by the names that transformers has for it.

    source: the bytes of a file, a path, a data: URL or a URL; or frames, as an array [frames,
    height, width, 3] or a list of images. fps: frames that are taken a second of it. num_frames:
    frames that are taken. do_sample_frames: False takes all of them; None is what the model's files
    say, or True with fps or num_frames. video_metadata: of frames: "fps", how many there are a
    second of the video (24 where nobody says); "frames_indices", where they stand in a longer video
    that they were picked from, and "total_num_frames" of that one.
    """

    source: VideoSource
    fps: float | None = None
    num_frames: int | None = None
    do_sample_frames: bool | None = None
    video_metadata: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_rate("fps", self.fps)
        count = self.num_frames
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise RequestError(f"num_frames={count!r}: must be an integer")
        if count is not None and not 1 <= count <= MOST_ASKED:
            raise RequestError(f"num_frames={count}: must be from 1 to {MOST_ASKED}")
        if count is not None and self.fps is not None:
            raise RequestError(f"fps={self.fps} and num_frames={count}: pass one of them")
        if not isinstance(self.do_sample_frames, bool | None):
            raise RequestError(f"do_sample_frames={self.do_sample_frames!r}: must be True or False")
        metadata = self.video_metadata or {}
        if not isinstance(metadata, Mapping) or not set(metadata) <= set(METADATA):
            raise RequestError(
                f"video_metadata={metadata!r}: must be a dict of {', '.join(METADATA)}"
            )
        if metadata and isinstance(self.source, str | bytes | Path):
            raise RequestError("video_metadata of a file: it says so itself; pass it with frames")
        _check_rate("fps of video_metadata", metadata.get("fps"))
        self._check_indices(metadata)

    def _check_indices(self, metadata: Mapping[str, Any]) -> None:
        picked, total = metadata.get("frames_indices"), metadata.get("total_num_frames")
        if total is not None and (isinstance(total, bool) or not isinstance(total, int)):
            raise RequestError(f"total_num_frames={total!r} of video_metadata: must be an integer")
        if picked is None:
            if total is not None:
                raise RequestError("total_num_frames without frames_indices in video_metadata")
            return
        if self.fps is not None or self.num_frames is not None or self.do_sample_frames:
            raise RequestError("frames_indices in video_metadata: these frames were picked already")
        is_list = isinstance(picked, Sequence | np.ndarray)
        numbers: list[Any] = list(picked) if is_list else [None]
        whole = all(isinstance(x, int | np.integer) and x >= 0 for x in numbers)
        if not whole or numbers != sorted(numbers):
            raise RequestError("frames_indices of video_metadata: must be integers in order")
        if total is not None and numbers and total <= numbers[-1]:
            raise RequestError(
                f"total_num_frames={total} of video_metadata: frames_indices go to {numbers[-1]}"
            )

    @classmethod
    def of(cls, value: object) -> "Video":
        """Make one of a source, or of a dict of the fields with the source under "video"."""
        if isinstance(value, Video):
            return value
        if not isinstance(value, Mapping):
            return cls(source=value)
        if unknown := sorted(map(str, set(value) - {"video", *OPTIONS})):
            raise RequestError(
                f"a video with {', '.join(unknown)}: pass 'video' and any of {', '.join(OPTIONS)}"
            )
        if value.get("video") is None:
            raise RequestError("a video without 'video', its source")
        options = {name: value[name] for name in OPTIONS if value.get(name) is not None}
        return cls(source=value["video"], **options)


def _check_rate(name: str, rate: object) -> None:
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise RequestError(f"{name}={rate!r}: must be a number of frames a second above 0")


class Frames(Protocol):
    """The frames of a video: how many, how many a second (None: nobody says), and their size."""

    total: int
    height: int
    width: int

    @property
    def fps(self) -> float | None: ...

    def pick(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield frames by their numbers, which are in order: uint8 [height, width, 3]."""
        ...

    def close(self) -> None:
        """Give up what reads them."""
        ...


class FrameList:
    """Frames that a caller has as images."""

    def __init__(self, source: VideoSource, limits: ImageLimits, fps: float | None):
        is_array = hasattr(source, "__array__") and getattr(source, "ndim", 0) == 4
        if not is_array and not isinstance(source, list | tuple):
            kind = f"an array of {source.ndim} axes" if hasattr(source, "ndim") else type(source)
            kind = kind if isinstance(kind, str) else f"a video of type {kind.__name__}"
            raise RequestError(
                f"{kind}: pass a file (bytes, a path, a data: URL), a list of images, or an array "
                "[frames, height, width, 3]"
            )
        self._frames, self._limits, self.fps = source, limits, fps
        self.total = len(source)
        if not self.total:
            raise RequestError("a video of no frames")
        if self.total > (most := limits.max_video_frames):
            raise RequestError(f"{self.total:,} frames: the limit is max_video_frames={most:,}")
        self._first = self._load(0)
        self.height, self.width = self._first.shape[:2]

    def _load(self, number: int) -> np.ndarray:
        frame = load_image(self._frames[number], self._limits)
        if (count := frame.shape[0] * frame.shape[1]) > (most := self._limits.max_video_pixels):
            raise RequestError(
                f"a frame of {count:,} pixels: the limit is max_video_pixels={most:,}"
            )
        return frame

    def pick(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        for number in numbers:
            frame = self._load(number) if number else self._first
            if frame.shape[:2] != (self.height, self.width):
                raise RequestError("frames of several sizes in one video: they must have one")
            yield frame

    def close(self) -> None:
        pass


def open_video(video: Video, limits: ImageLimits) -> Frames:
    """Return the frames of a video, of which none is decoded yet. RequestError for what is none."""
    file = load_file(video.source, limits, VIDEO)
    if file is not None:
        return VideoFile(file.data, limits, file.label)
    return FrameList(video.source, limits, (video.video_metadata or {}).get("fps"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoPlan:
    """What is taken of a video. numbers: of the frames. times: of each piece of the prompt, in
    seconds; None where the model is told times by positions. interval: between two frames of a grid
    on the time axis. height, width: that frames are resized to. grids: of each piece, in patches.
    """

    numbers: tuple[int, ...]
    times: tuple[float, ...] | None
    interval: float
    height: int
    width: int
    grids: tuple[Grid, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedVideo:
    """A video as a tower takes it. pieces: what stands in the prompt one after another. times: of
    each piece, in seconds; None where the model is told times by positions instead.
    """

    pieces: tuple[Prepared, ...]
    times: tuple[float, ...] | None


def why_no_videos(vision: VisionConfig) -> str | None:
    """Return why a model takes no videos; None where it does."""
    if isinstance(vision, QwenVisionConfig):
        return None
    name = type(vision).__name__.removesuffix("VisionConfig")
    return f"videos are not read for a {name} vision tower: pass frames as images"


class VideoPreparer:
    """Makes patches of videos for one model. preparer: of its images. UnsupportedError for a model
    whose videos are not read, ConfigError where the folder's settings are not the tower's.
    """

    def __init__(self, preparer: ImagePreparer):
        if (why := why_no_videos(preparer.config)) is not None:
            raise UnsupportedError(why)
        assert isinstance(preparer.config, QwenVisionConfig)
        self.vision, self._preparer = preparer.config, preparer
        self._on_axis = isinstance(self.vision, Qwen25VisionConfig)
        self._settings, self._file = _settings(preparer.folder)
        self._check()

    def plan(self, frames: Frames, video: Video) -> VideoPlan:
        """Return what is taken of a video; RequestError for one that the model cannot take."""
        vision, metadata = self.vision, video.video_metadata or {}
        fps = USUAL_FPS if frames.fps is None else frames.fps
        total = frames.total
        if (indices := metadata.get("frames_indices")) is not None:
            numbers, places = list(range(total)), [int(x) for x in indices]
            if len(places) != total:
                raise RequestError(
                    f"{len(places)} frames_indices in video_metadata of {total} frames"
                )
            whole = metadata.get("total_num_frames")
        else:
            numbers = places = self._sampled(total, frames.fps, video)
            whole = total
        if (count := len(numbers)) < vision.frames and not self._on_axis:
            raise RequestError(f"{count} frames: a video has at least {vision.frames}")
        height, width = self._size(count, frames.height, frames.width)
        pairs = -(-count // vision.frames)
        rows, columns = height // vision.patch_size, width // vision.patch_size
        if self._on_axis:
            taken_fps = fps if whole is None else count / whole * fps
            interval = np.float32(vision.tokens_per_second) * np.float32(vision.frames / taken_fps)  # pyright: ignore[reportAttributeAccessIssue]
            times, interval, grids = None, float(interval), (Grid(pairs, rows, columns),)
        else:
            shown = [place / fps for place in places]
            shown += shown[-1:] * (pairs * vision.frames - count)
            starts = range(0, len(shown), vision.frames)
            times = tuple((shown[i] + shown[i + vision.frames - 1]) / 2 for i in starts)
            interval, grids = 1.0, (Grid(1, rows, columns),) * pairs
        return VideoPlan(
            numbers=tuple(numbers),
            times=times,
            interval=interval,
            height=height,
            width=width,
            grids=grids,
        )

    def prepare(
        self,
        frames: Frames,
        plan: VideoPlan,
        known: Callable[[bytes, Callable[[], Prepared]], Prepared] = lambda _, make: make(),
    ) -> PreparedVideo:
        """Return the patches of a video. known: returns the piece of a digest, or makes it."""
        small = [resized(x, plan.height, plan.width) for x in frames.pick(plan.numbers)]
        small += small[-1:] * (-len(small) % self.vision.frames)
        pieces, start = list[Prepared](), 0
        for grid in plan.grids:
            part = np.stack(small[start : start + grid.t * self.vision.frames])
            start += len(part)
            content = hashlib.blake2b(self._preparer.digest(part), digest_size=32)
            content.update(repr(plan.interval).encode())
            digest = content.digest()

            def make(
                part: np.ndarray = part, grid: Grid = grid, digest: bytes = digest
            ) -> Prepared:
                return Prepared(
                    patches=self._patches(part),
                    grid=grid,
                    digest=digest,
                    time_interval=plan.interval,
                )

            pieces.append(known(digest, make))
        return PreparedVideo(pieces=tuple(pieces), times=plan.times)

    def _patches(self, frames: np.ndarray) -> np.ndarray:
        """Return frames [n, height, width, 3] as patches of one grid."""
        vision, made = self.vision, list[np.ndarray]()
        shape = (-1, 3, vision.frames, vision.patch_size**2)
        for start in range(0, len(frames), vision.frames):
            # Of a still image a patch has the same frame again and again.
            pair = frames[start : start + vision.frames]
            stills = [self._preparer.patches_of(frame) for frame in pair]
            moving = [x.reshape(shape)[:, :, i] for i, x in enumerate(stills)]
            made.append(np.stack(moving, axis=2).reshape(len(stills[0]), -1))
        return np.concatenate(made)

    def _sampled(self, total: int, fps: float | None, video: Video) -> list[int]:
        """Return the numbers of the frames that are taken."""
        settings, asked = self._settings, video.fps is not None or video.num_frames is not None
        samples = video.do_sample_frames
        if samples is None:
            samples = asked or settings.get("do_sample_frames", not self._on_axis)
        if not samples:
            return list(range(total))
        rate, count = video.fps, video.num_frames
        if not asked:
            count = settings.get("num_frames")
            rate = settings.get("fps", None if self._on_axis else 2) if count is None else None
        least = settings.get("min_frames") or LEAST_FRAMES
        most = settings.get("max_frames") or MOST_FRAMES
        fps = USUAL_FPS if fps is None else fps
        if not self._on_axis:
            if count is None and rate is not None:
                count = min(max(int(total / fps * rate), least), most, total)
            if count is None:
                count = min(max(total, least), most)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        pair = self.vision.frames
        if count is not None:
            count = round(count / pair) * pair
        elif rate is not None:
            most = min(most, total) // pair * pair
            count = math.floor(min(max(total / fps * rate, least), most, total) / pair) * pair
        else:
            return list(range(total))
        if not 0 < count <= total:
            raise RequestError(f"{count} frames to be taken of {total}: fps or num_frames says so")
        # torch's arange has float32 as its result.
        return np.arange(0, total, total / count).astype(np.float32).astype(int).tolist()

    def _size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that frames are resized to."""
        vision, (least, most) = self.vision, self._edges(count)
        factor = vision.patch_size * vision.merge
        if self._on_axis:
            module = importlib.import_module(
                "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
            )
            try:
                return module.smart_resize(height, width, factor, least, most)
            except ValueError as e:
                raise RequestError(f"frames of {width} x {height} pixels: {e}") from e
        return resized_frames(
            count, height, width, factor=factor, frames=vision.frames, least=least, most=most
        )

    def _edges(self, count: int) -> tuple[int, int]:
        """Return the least and the most pixels: of a frame of Qwen2.5-VL, otherwise of all
        frames.
        """
        settings, on_axis = self._settings, self._on_axis
        side, factor = 28 if on_axis else 32, self.vision.patch_size * self.vision.merge
        size = settings.get("size") or {}
        least = int(settings.get("min_pixels") or size.get("shortest_edge") or 128 * side**2)
        most = int(settings.get("max_pixels") or size.get("longest_edge") or 768 * side**2)
        if settings.get("cap_pixels_per_frame"):
            tokens = settings.get("max_video_tokens") or MOST_TOKENS[on_axis]
            if on_axis:
                share = int(tokens * factor**2 * 0.9) * self.vision.frames // count
                most = max(min(most, share), int(least * 1.05))
            else:
                share = min(tokens * factor**2, most // count)
                most = max(share, int(least * 1.05)) * count
        if (rows := self._preparer.max_rows) is not None:
            pairs = -(-count // self.vision.frames)
            most = min(
                most, rows // (pairs if on_axis else 1) * factor**2 * (1 if on_axis else count)
            )
            least = min(least, most)
        return least, most

    def _check(self) -> None:
        vision, image = self.vision, self._preparer.processor
        wanted = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.frames,
            "merge_size": vision.merge,
            "image_mean": list(image.image_mean),
            "image_std": list(image.image_std),
        }
        for name, value in wanted.items():
            if self._settings.get(name, value) != value:
                raise ConfigError(
                    f"{self._file}: {name}={self._settings[name]!r} is not {value!r}, which images "
                    "have"
                )


def _settings(folder: Path) -> tuple[Mapping[str, Any], Path]:
    """Return what a folder says of videos and the file that says it, as transformers finds it."""
    processor = folder / IMAGE_FILES[1]
    if processor.is_file() and (settings := read_json(processor).get("video_processor")):
        return settings, processor
    for file in (folder / VIDEO_FILE, folder / IMAGE_FILES[0]):
        if file.is_file():
            return read_json(file), file
    return {}, folder / VIDEO_FILE


def resized_frames(
    count: int, height: int, width: int, *, factor: int, frames: int, least: int, most: int
) -> tuple[int, int]:
    """Return the height and width that Qwen3-VL resizes the frames of a video to: multiples of
    `factor`, with from `least` to `most` pixels in all frames together. frames: in a patch. Source:
    smart_resize of transformers' video_processing_qwen3_vl.
    """
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MOST_RATIO:
        raise RequestError(
            f"frames of {width} x {height} pixels: one side is over {MOST_RATIO} times the other"
        )
    rows, columns = (round(n / factor) * factor for n in (height, width))
    total = round(count / frames) * frames * rows * columns
    if total > most:
        shrink = math.sqrt(count * height * width / most)
        rows, columns = (
            max(factor, math.floor(n / shrink / factor) * factor) for n in (height, width)
        )
    elif total < least:
        grow = math.sqrt(least / (count * height * width))
        rows, columns = (math.ceil(n * grow / factor) * factor for n in (height, width))
    return rows, columns
