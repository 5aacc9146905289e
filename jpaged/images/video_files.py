"""VideoFile: the file of a video, of which those frames are decoded that somebody asks for.

FFmpeg reads files of anybody here, by the package av: containers and decoders that are listed
alone, from memory, with no way to another file or address; sizes are judged before and while
frames are decoded.
"""

import bisect
import importlib
import io
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jpaged.errors import RequestError
from jpaged.images.limits import ImageLimits

DECODERS = (
    "h264",
    "hevc",
    "vp8",
    "vp9",
    "libvpx",
    "libvpx-vp9",
    "av1",
    "libdav1d",
    "mpeg4",
    "mjpeg",
)
THREADS = 4  # of a decoder


def pyav() -> Any:
    """Return the package av; RequestError where it is not installed: others need it not."""
    try:
        return importlib.import_module("av")
    except ImportError as e:
        raise RequestError(
            "files of videos need PyAV, which is not installed: pip install 'jpaged[videos]'"
        ) from e


class VideoFile:
    """A video that was opened, of which all packets were read and no frame is decoded yet.

    total: frames. fps: how many there are a second. height, width: of a frame. RequestError for
    what is no video, and for one beyond the limits.
    """

    def __init__(self, data: bytes, limits: ImageLimits, label: str):
        self._av, self._data, self._limits, self._label = pyav(), data, limits, label
        self._ends = time.monotonic() + limits.video_timeout_s
        self._container: Any = None
        try:
            self._open()
            self._read_packets()
        except BaseException:
            self.close()
            raise

    def pick(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield frames by their numbers, which are in order and may repeat: uint8 [height, width,
        3]. RequestError for a damaged file, and where decoding takes too long.
        """
        taken, last = -1, None
        wanted = sorted(set(numbers))
        frames = self._frames(wanted)
        for number in numbers:
            if number != taken or last is None:
                last, taken = self._pixels(next(frames)), number
            yield last

    def close(self) -> None:
        """Give up the decoder."""
        if self._container is not None:
            self._container.close()
            self._container = None

    def _refused(self, what: str) -> RequestError:
        return RequestError(f"{self._label}: {what}")

    def _damaged(self, e: Exception) -> RequestError:
        text = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        return self._refused(f"a truncated or damaged video ({text})")

    def _open(self) -> None:
        limits = self._limits

        def refuse(url: str, flags: int, options: object) -> Any:
            raise OSError("a video names no other file")

        options = {
            "format_whitelist": ",".join(limits.video_formats),
            "codec_whitelist": ",".join(DECODERS),
            "protocol_whitelist": "",
            "max_pixels": str(limits.max_video_pixels),
            "threads": "1",
        }
        try:
            self._container = self._av.open(
                io.BytesIO(self._data),
                options=options,
                io_open=refuse,
                timeout=limits.video_timeout_s,
            )
        except Exception as e:  # of FFmpeg: InvalidDataError, OSError, ValueError, ...
            formats = ", ".join(limits.video_formats)
            raise self._refused(
                f"is no video of video_formats {formats}, or a damaged one ({e})"
            ) from e
        streams = self._container.streams.video
        moving = [
            s for s in streams if not s.disposition & self._av.stream.Disposition.attached_pic
        ]
        if not moving:
            what = "a picture that is attached" if streams else "no pictures"
            raise self._refused(f"holds {what}, and no video")
        stream = self._stream = moving[0]
        context = stream.codec_context
        if context is None:
            raise self._refused(f"its codec is none of those that are read: {', '.join(DECODERS)}")
        self.height, self.width = int(context.height), int(context.width)
        if self.height < 1 or self.width < 1:
            raise self._refused(f"frames of {self.width} x {self.height} pixels")
        if self.height * self.width > (most := limits.max_video_pixels):
            raise self._refused(
                f"frames of {self.width} x {self.height} pixels: the limit is "
                f"max_video_pixels={most:,}"
            )
        if max(self.height, self.width) > limits.max_side:
            raise self._refused(
                f"frames of {self.width} x {self.height} pixels: the limit is "
                f"max_side={limits.max_side:,}"
            )
        context.options = {"max_pixels": str(most), "codec_whitelist": ",".join(DECODERS)}
        context.thread_count = THREADS

    def _read_packets(self) -> None:
        """Count frames, and note when each is shown and at which decoding may begin."""
        limits, stream = self._limits, self._stream
        shown, keys, count = list[int | None](), list[int | None](), 0
        try:
            for packet in self._container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                count += 1
                if count > (most := limits.max_video_frames):
                    raise self._refused(
                        f"more frames than max_video_frames={most:,}: send a shorter video, or one "
                        "of fewer frames a second"
                    )
                self._check_time(count)
                shown.append(packet.pts)
                if packet.is_keyframe:
                    keys.append(packet.pts)
        except RequestError:
            raise
        except Exception as e:
            raise self._damaged(e) from e
        if not count:
            raise self._refused("holds no frames")
        if count < stream.frames:
            raise self._refused(
                f"a truncated video, of which {count} of {stream.frames} frames are there"
            )
        self.total = count
        times = sorted(x for x in shown if x is not None)
        self._can_seek = len(set(times)) == count
        self._times = times if self._can_seek else []
        self._keys = [bisect.bisect_left(times, x) for x in keys if x is not None]
        self._keys.sort()
        self.fps = self._rate(times)
        seconds = count / self.fps
        if seconds > limits.max_video_seconds:
            raise self._refused(
                f"lasts {seconds:,.1f} seconds: the limit is "
                f"max_video_seconds={limits.max_video_seconds:g}"
            )

    def _rate(self, times: Sequence[int]) -> float:
        """Return how many frames there are a second, as the file says or as they are shown."""
        stream = self._stream
        for rate in (stream.average_rate, stream.guessed_rate):
            if rate:
                return float(rate)
        if len(times) > 1 and times[-1] > times[0] and stream.time_base:
            return (len(times) - 1) / float((times[-1] - times[0]) * stream.time_base)
        raise self._refused("does not say how many frames it has a second")

    def _check_time(self, count: int) -> None:
        if time.monotonic() > self._ends:
            raise self._refused(
                f"not decoded within video_timeout_s={self._limits.video_timeout_s:g}, after "
                f"{count} frames"
            )

    def _frames(self, wanted: Sequence[int]) -> Iterator[Any]:
        """Yield frames by their numbers, in order; decoding begins anew at the last key frame
        before one, where that leaves out others.
        """
        done = 0
        if self._can_seek:
            for frame in self._sought(wanted):
                yield frame
                done += 1
        if done < len(wanted):  # times are not those of packets: count frames from the first on
            yield from self._counted(wanted[done:])

    def _sought(self, wanted: Sequence[int]) -> Iterator[Any]:
        """Yield frames by the times at which they are shown; end before one that is not there."""
        after, decoded = 0, None  # the number that follows what was decoded
        for number in wanted:
            at = bisect.bisect_right(self._keys, number)
            key = self._keys[at - 1] if at else 0
            if decoded is None or key > after:
                decoded = self._from(self._times[key])
            shown = self._times[number]
            for frame in decoded:
                self._check_time(number)
                if frame.pts is None or frame.pts > shown:
                    return
                if frame.pts == shown:
                    after = number + 1
                    yield frame
                    break
            else:
                return

    def _counted(self, wanted: Sequence[int]) -> Iterator[Any]:
        left = iter(wanted)
        number = next(left)
        for count, frame in enumerate(self._from(None)):
            self._check_time(count)
            if count == number:
                yield frame
                if (number := next(left, -1)) < 0:
                    return
        raise self._refused(f"a truncated or damaged video: frame {number} is not there")

    def _from(self, shown: int | None) -> Iterator[Any]:
        """Yield frames from the last key frame before a time on; None: from the first on."""
        try:
            if shown is None:
                first = self._times[0] if self._times else 0
                self._container.seek(min(first, 0), stream=self._stream)
            else:
                self._container.seek(shown, stream=self._stream)
            yield from self._container.decode(self._stream)
        except RequestError:
            raise
        except Exception as e:
            raise self._damaged(e) from e

    def _pixels(self, frame: Any) -> np.ndarray:
        if (frame.height, frame.width) != (self.height, self.width):
            raise self._refused("frames of several sizes: they must have one")
        if frame.is_corrupt:
            raise self._refused("a damaged video, of which a frame is not whole")
        try:
            return frame.to_ndarray(format="rgb24")
        except Exception as e:
            raise self._damaged(e) from e
