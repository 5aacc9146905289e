"""Videos: lists of frames, as patches and as the text that stands around them in a prompt.

Qwen2.5-VL takes a video as one grid, whose frames are apart on the time axis of positions as they
are in seconds. Qwen3-VL and Qwen 3.5 take each pair of frames as an image of its own, with its time
as text before it. Both put two frames into one patch. Sizes, pixels, patches, times and text are
those of transformers' processors (Qwen2VLVideoProcessor, Qwen3VLVideoProcessor, Qwen3VLProcessor).
"""

import dataclasses
import hashlib
import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checks import read_json
from jpaged.errors import ConfigError, RequestError, UnsupportedError
from jpaged.images.limits import DEFAULT_LIMITS, ImageLimits
from jpaged.images.prepare import VIDEO_FILE, ImagePreparer
from jpaged.images.resize import resized
from jpaged.images.sources import ImageSource, load_image
from jpaged.images.spans import Prepared
from jpaged.models.vision.qwen import Qwen25VisionConfig, QwenVisionConfig
from jpaged.models.vision.tower import Grid

MOST_RATIO = 200  # of the longer to the shorter side


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedVideo:
    """A video as a tower takes it. pieces: what stands in the prompt one after another. times: of
    each piece, in seconds; None where the model is told times by positions instead.
    """

    pieces: tuple[Prepared, ...]
    times: tuple[float, ...] | None


def prepare_video(
    preparer: ImagePreparer,
    frames: Sequence[ImageSource],
    *,
    fps: float,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> PreparedVideo:
    """Return the patches of a video. frames: images of one size, in order; an odd one at the end is
    taken twice. fps: how many of them there are a second. RequestError for frames that cannot be
    taken; UnsupportedError for a model whose videos are not read: pass it frames as images.
    """
    vision = preparer.config
    if not isinstance(vision, QwenVisionConfig):
        raise UnsupportedError(
            f"videos of {type(vision).__name__}: pass their frames as images, one after another"
        )
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise RequestError(f"fps={fps!r}: must be a number of frames a second above 0")
    if len(frames) < vision.frames:
        raise RequestError(f"{len(frames)} frames: a video has at least {vision.frames}")
    pixels = [load_image(frame, limits) for frame in frames]
    if len(shapes := {x.shape for x in pixels}) > 1:
        raise RequestError(f"frames of {len(shapes)} sizes in one video: they must have one")
    height, width = _size(preparer, len(pixels), *pixels[0].shape[:2])
    pixels = [resized(x, height, width) for x in pixels]
    pixels += pixels[-1:] * (-len(pixels) % vision.frames)
    times = [i / fps for i in range(len(frames))]
    times += times[-1:] * (len(pixels) - len(times))
    pairs = [pixels[i : i + vision.frames] for i in range(0, len(pixels), vision.frames)]
    starts = range(0, len(times), vision.frames)
    if isinstance(vision, Qwen25VisionConfig):
        interval = float(np.float32(vision.tokens_per_second) * np.float32(vision.frames / fps))
        piece = _prepared(preparer, pairs, interval)
        return PreparedVideo(pieces=(piece,), times=None)
    middles = tuple((times[i] + times[i + vision.frames - 1]) / 2 for i in starts)
    pieces = tuple(_prepared(preparer, [pair], 1.0) for pair in pairs)
    return PreparedVideo(pieces=pieces, times=middles)


def _prepared(
    preparer: ImagePreparer, pairs: Sequence[Sequence[np.ndarray]], interval: float
) -> Prepared:
    """Return pairs of frames as patches of one grid."""
    vision = preparer.config
    assert isinstance(vision, QwenVisionConfig)
    made: list[np.ndarray] = []
    for pair in pairs:
        # Of a still image a patch has the same frame again and again.
        stills = [preparer.patches_of(frame) for frame in pair]
        shape = (-1, 3, vision.frames, vision.patch_size**2)
        moving = [x.reshape(shape)[:, :, i] for i, x in enumerate(stills)]
        made.append(np.stack(moving, axis=2).reshape(len(stills[0]), -1))
    height, width = (n // vision.patch_size for n in pairs[0][0].shape[:2])
    pixels = np.stack([frame for pair in pairs for frame in pair])
    content = hashlib.blake2b(preparer.digest(pixels), digest_size=32)
    content.update(repr(interval).encode())
    return Prepared(
        patches=np.concatenate(made),
        grid=Grid(len(pairs), height, width),
        digest=content.digest(),
        time_interval=interval,
    )


def _size(preparer: ImagePreparer, count: int, height: int, width: int) -> tuple[int, int]:
    """Return the height and width that frames are resized to."""
    vision, settings = preparer.config, _settings(preparer)
    assert isinstance(vision, QwenVisionConfig)
    factor, least, most = vision.patch_size * vision.merge, *_edges(settings, vision)
    if isinstance(vision, Qwen25VisionConfig):
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


def _settings(preparer: ImagePreparer) -> Mapping[str, Any]:
    """Return what the folder says of videos; ConfigError where it is not what the tower takes."""
    vision, file = preparer.config, Path(preparer.folder) / VIDEO_FILE
    assert isinstance(vision, QwenVisionConfig)
    settings = read_json(file) if file.is_file() else {}
    if settings.get("cap_pixels_per_frame"):
        raise UnsupportedError(f"{file}: cap_pixels_per_frame=True is not read")
    image = preparer.processor
    wanted = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.frames,
        "merge_size": vision.merge,
        "image_mean": list(image.image_mean),
        "image_std": list(image.image_std),
    }
    for name, value in wanted.items():
        if settings.get(name, value) != value:
            raise ConfigError(
                f"{file}: {name}={settings[name]!r} is not {value!r}, which images have"
            )
    return settings


def _edges(settings: Mapping[str, Any], vision: QwenVisionConfig) -> tuple[int, int]:
    """Return the least and the most pixels: of a frame of Qwen2.5-VL, otherwise of all frames."""
    side = 28 if isinstance(vision, Qwen25VisionConfig) else 32
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or 128 * side**2
    most = settings.get("max_pixels") or size.get("longest_edge") or 768 * side**2
    return int(least), int(most)
