"""From an image wherever it is (bytes, a path, a data: URL, a URL of a listed host, an array, one
of Pillow's images) to its pixels in RGB.

Nothing is decoded before its format, size and number of frames are within the limits. `load_async`
does all of it in threads of its own, so that an event loop goes on.
"""

import base64
import binascii
import concurrent.futures
import importlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jpaged.errors import RequestError, UnsupportedError
from jpaged.images.fetch import fetch
from jpaged.images.limits import DEFAULT_LIMITS, IMAGE, ImageLimits, Kind

type ImageSource = Any  # bytes, str, Path, numpy or jax array, PIL.Image.Image

DATA = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<options>(;[\w.+=-]+)*),", re.IGNORECASE)
URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N")  # 16 bits a pixel
THREADS = 4


def pillow() -> Any:
    """Return Pillow's Image module; UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as e:
        raise UnsupportedError(
            "images need Pillow, which is not installed: pip install 'jpaged[images]'"
        ) from e


def load_image(source: ImageSource, limits: ImageLimits = DEFAULT_LIMITS) -> np.ndarray:
    """Return the pixels of an image, uint8 [height, width, 3], with the turn that its EXIF says and
    without transparency. RequestError says what is wrong with the source and which limit it breaks.
    """
    if (file := load_file(source, limits)) is not None:
        return _decoded(file.data, limits, file.label)
    if hasattr(source, "convert") and hasattr(source, "size") and hasattr(source, "mode"):
        _check_size(source.size, limits, "image")
        return _in_rgb(source, "image")
    if hasattr(source, "__array__"):
        return _of_array(np.asarray(source), limits)
    raise RequestError(
        f"an image of type {type(source).__name__}: pass bytes, a path, a data: URL, a numpy array "
        "[height, width, 3] or an image of Pillow's"
    )


class File(NamedTuple):
    """What a file holds, and what it is called in messages."""

    data: bytes
    label: str


def load_file(source: ImageSource, limits: ImageLimits, kind: Kind = IMAGE) -> File | None:
    """Return the file that a source is or names, None where it is something else: pixels. Raises
    RequestError.
    """
    name = kind.name
    if isinstance(source, bytes | bytearray | memoryview):
        file = File(bytes(source), f"{name} of bytes")
    elif isinstance(source, str) and (data := DATA.match(source)):
        file = File(_of_data_url(source, data, limits, kind), "data: URL")
    elif isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        file = File(fetch(source, limits, kind), shortened(source))
    elif isinstance(source, str) and source[:5].lower() == "data:" and not os.path.exists(source):
        raise RequestError(
            f"{name} {shortened(source)!r}: must be data:{name}/TYPE;base64, and then the {name}"
        )
    elif isinstance(source, str) and URL.match(source) and not os.path.exists(source):
        raise RequestError(
            f"{name} {shortened(source)!r}: a URL must begin with data:, http:// or https://"
        )
    elif isinstance(source, str | os.PathLike):
        file = File(_of_file(Path(source), limits, kind), str(source))
    else:
        return None
    if len(file.data) > (most := limits.most_bytes(kind)):
        raise RequestError(f"{file.label}: more bytes than {kind.bytes_limit}={most:,}")
    if not file.data:
        raise RequestError(f"{file.label}: holds no bytes")
    return file


class ImageLoader:
    """Loads images in threads of its own. limits: see ImageLimits. threads: images that are decoded
    at once; others wait.
    """

    def __init__(self, limits: ImageLimits = DEFAULT_LIMITS, threads: int = THREADS):
        self.limits = limits
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "jpaged-images")

    def apply_all[T](
        self, function: Callable[[np.ndarray], T], sources: Sequence[ImageSource]
    ) -> Iterator[T]:
        """Yield what a function makes of the pixels of several images, in order, a few at once in
        these threads. RequestError names the image that cannot be taken.
        """

        def run(source: ImageSource) -> T:
            return function(load_image(source, self.limits))

        for first in range(0, len(sources), THREADS):
            some = [self._pool.submit(run, source) for source in sources[first : first + THREADS]]
            for index, one in enumerate(some, start=first):
                try:
                    yield one.result()
                except RequestError as e:
                    raise type(e)(f"images[{index}]: {e}") from e

    def close(self) -> None:
        """End the threads once they have done what they were given."""
        self._pool.shutdown(wait=True)


def shortened(source: str) -> str:
    """Return a URL for a message."""
    return source if len(source) <= 80 else source[:77] + "..."


def _of_data_url(source: str, match: re.Match[str], limits: ImageLimits, kind: Kind) -> bytes:
    media_type, options = match["type"].lower(), match["options"].lower().split(";")
    if media_type and not media_type.startswith(f"{kind.name}/"):
        a = "an" if kind is IMAGE else "a"
        raise RequestError(f"data: URL of type {media_type!r}: must be of {a} {kind.name}")
    if "base64" not in options:
        raise RequestError("data: URL: must have ;base64 before the comma")
    count, most = (len(source) - match.end()) * 3 // 4, limits.most_bytes(kind)
    if count > most + 2:
        raise RequestError(
            f"data: URL of {count:,} bytes: the limit is {kind.bytes_limit}={most:,}"
        )
    try:
        return base64.b64decode(source[match.end() :], validate=True)
    except (binascii.Error, ValueError) as e:
        raise RequestError(f"data: URL: not base64 ({e})") from e


def _of_file(path: Path, limits: ImageLimits, kind: Kind) -> bytes:
    if not limits.local_paths:
        raise RequestError(
            f"{kind.name} {shortened(str(path))!r}: paths of this machine are not read "
            f"(local_paths=False); send the {kind.name} as a data: URL"
        )
    try:
        with path.open("rb") as file:
            data = file.read(limits.most_bytes(kind) + 1)
    except (OSError, ValueError) as e:
        raise RequestError(f"{kind.name} {path}: {getattr(e, 'strerror', None) or e}") from e
    return data


def _decoded(data: bytes, limits: ImageLimits, label: str) -> np.ndarray:
    """Return the pixels of a file's bytes."""
    with _opened(data, limits, label) as image:
        _check_size(image.size, limits, label)
        if not _is_animated(image, label):
            return _in_rgb(image, label)
        _check_frames(image, limits, label)
    with _opened(data, limits, label) as image:  # who has looked at later frames has their size
        return _in_rgb(image, label)


def _opened(data: bytes, limits: ImageLimits, label: str) -> Any:
    """Return one of Pillow's images, of which the header was read and nothing was decoded."""
    pil = pillow()
    try:
        return pil.open(io.BytesIO(data), formats=limits.formats)
    except pil.UnidentifiedImageError as e:
        raise RequestError(
            f"{label}: is no image of the formats {', '.join(limits.formats)}, or a damaged one"
        ) from e
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as e:
        raise RequestError(f"{label}: {_too_large(limits)} ({e})") from e
    except Exception as e:  # a damaged header shows as anything
        raise RequestError(f"{label}: a damaged image ({_said(e)})") from e


def _check_size(size: tuple[int, int], limits: ImageLimits, label: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"{label} of {width} x {height} pixels: both must be at least 1")
    if width * height > limits.max_pixels or max(width, height) > limits.max_side:
        raise RequestError(f"{label} of {width} x {height} pixels: {_too_large(limits)}")


def _too_large(limits: ImageLimits) -> str:
    return f"the limits are max_pixels={limits.max_pixels:,} and max_side={limits.max_side:,}"


def _is_animated(image: Any, label: str) -> bool:
    """Return whether an image has frames. A camera's JPEG with previews or a second view behind it
    is a still image.
    """
    try:
        return image.format != "MPO" and getattr(image, "is_animated", False)
    except Exception as e:  # a GIF looks for its second frame
        raise RequestError(f"{label}: a damaged image ({_said(e)})") from e


def _check_frames(image: Any, limits: ImageLimits, label: str) -> None:
    """RequestError for an animation of more frames than may be, or of one that is too large; it
    looks no further than these. A frame is decoded when the one after it is sought.
    """
    try:
        for frame in range(1, limits.max_frames + 1):
            image.seek(frame)
            _check_size(image.size, limits, label)
    except EOFError:
        return
    except RequestError:
        raise
    except Exception as e:
        raise RequestError(f"{label}: a damaged animation ({_said(e)})") from e
    raise RequestError(
        f"{label}: an animation of more than max_frames={limits.max_frames} frames; send a still "
        "image, or frames as images"
    )


def _in_rgb(image: Any, label: str) -> np.ndarray:
    """Return the pixels of one of Pillow's images, turned as EXIF says."""
    transposed = importlib.import_module("PIL.ImageOps").exif_transpose
    try:
        image = transposed(image)
        if image.mode in DEEP_GREY:
            grey = (np.asarray(image).astype(np.uint32) // 257).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return np.array(image.convert("RGB"))
    except Exception as e:  # of decoders: OSError, SyntaxError, ValueError, zlib.error, ...
        raise RequestError(f"{label}: a truncated or damaged image ({_said(e)})") from e


def _of_array(pixels: np.ndarray, limits: ImageLimits) -> np.ndarray:
    """Return an array in RGB; RequestError for what is no image."""
    if pixels.dtype != np.uint8:
        raise RequestError(
            f"image of dtype {pixels.dtype}: an array must be uint8, [height, width, 3]"
        )
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise RequestError(
            f"image of shape {pixels.shape}: an array must be [height, width], [height, width, 3] "
            "or [height, width, 4]"
        )
    _check_size((pixels.shape[1], pixels.shape[0]), limits, "image")
    return np.array(pixels[:, :, :3])


def _said(e: Exception) -> str:
    """Return another library's message in one line."""
    text = (str(e).strip().splitlines() or [type(e).__name__])[0]
    return text[:200]
