"""Files of videos: the frames that are decoded, and files that mean ill."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import ConfigError, ImageLimits, RequestError
from jpaged.images import video_files
from jpaged.images.limits import DEFAULT_LIMITS
from jpaged.images.video_files import VideoFile
from jpaged.images.videos import Video, open_video
from tests.video_files import av, frames_of, video

FORMS: list[tuple[str, str]] = [
    ("mp4", "libx264"),
    ("matroska", "libx264"),
    ("webm", "libvpx-vp9"),
    ("avi", "mjpeg"),
]


@pytest.mark.parametrize(("container", "codec"), FORMS)
def test_frames_are_those_of_a_whole_decode(container: str, codec: str) -> None:
    """Also those that repeat, and those behind key frames that decoding begins at."""
    data = video(container=container, codec=codec, count=14)
    whole = frames_of(data)
    file = VideoFile(data, DEFAULT_LIMITS, "it")
    assert (file.total, file.fps, file.height, file.width) == (14, 4.0, 32, 32)
    assert len(whole) == 14
    for numbers in ([0, 0, 3, 9, 13], [13], range(14), [2, 2]):
        picked = list(file.pick(numbers))
        assert len(picked) == len(numbers)
        for number, pixels in zip(numbers, picked, strict=True):
            np.testing.assert_array_equal(pixels, whole[number])
    file.close()


def test_frames_that_nobody_asks_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of frames that hold no picked frame are not decoded."""
    file = VideoFile(video(count=40, key_every=4), DEFAULT_LIMITS, "it")
    looked: list[int] = []
    monkeypatch.setattr(file, "_check_time", looked.append)
    assert len(list(file.pick([1, 38]))) == 2
    assert len(looked) < 12
    file.close()


def test_frames_are_counted_where_times_are_wrong() -> None:
    data = video(count=12)
    file = VideoFile(data, DEFAULT_LIMITS, "it")
    file._times = [x + 1 for x in file._times]
    (pixels,) = file.pick([7])
    np.testing.assert_array_equal(pixels, frames_of(data)[7])
    file.close()


def test_sound_is_left_out_and_a_stream_without_duration_is_read() -> None:
    for data in (video(sound=True), video(container="matroska", options={"live": "1"})):
        file = VideoFile(data, DEFAULT_LIMITS, "it")
        assert file.total == 10 and file.fps == pytest.approx(4.0)
        assert len(list(file.pick([0, 9]))) == 2
        file.close()


def sound_alone(picture: bool = False) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16_000)
        cover = file.add_stream("mjpeg", rate=1) if picture else None
        if cover is not None:
            cover.width = cover.height = 16
            cover.pix_fmt = "yuvj420p"
            cover.disposition = av.stream.Disposition.attached_pic
        heard = av.AudioFrame.from_ndarray(
            np.zeros((1, 4096), np.float32), format="fltp", layout="mono"
        )
        heard.sample_rate = 16_000
        packets = [*stream.encode(heard), *stream.encode()]
        if cover is not None:
            still = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
            packets += [*cover.encode(still), *cover.encode()]
        file.mux(packets)
    return out.getvalue()


def faststart() -> bytes:
    """A file that says what is in it before it has it."""
    return video(count=30, size=(64, 64), options={"movflags": "faststart"})


def claims(width: int, height: int) -> bytes:
    """A file whose header says a size, and of whose stream the frames are small."""
    data = bytearray(video())
    for name in (b"avc1",):
        at = data.rindex(name) + 4 + 24
        data[at : at + 4] = struct.pack(">HH", width, height)
    at = data.index(b"tkhd")
    data[at + 4 + 76 : at + 4 + 84] = struct.pack(">II", width << 16, height << 16)
    return bytes(data)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile '/etc/passwd'\n"

BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no video": (lambda: b"<html>", {}, "is no video of video_formats mov, matroska, avi"),
    "a playlist": (lambda: PLAYLIST, {}, "is no video of video_formats"),
    "a list of files": (lambda: CONCAT, {}, "is no video of video_formats"),
    "another container": (lambda: video(container="mpegts"), {}, "is no video of video_formats"),
    "sound alone": (sound_alone, {}, "holds no pictures, and no video"),
    "a cover": (lambda: sound_alone(True), {}, "holds a picture that is attached, and no video"),
    "cut before its table": (lambda: video()[:-700], {}, "holds no pictures"),
    "cut behind its table": (lambda: faststart()[:-900], {}, "truncated"),
    "large frames": (video, {"max_video_pixels": 1000}, "the limit is max_video_pixels=1,000"),
    "a long side": (video, {"max_side": 20}, "the limit is max_side=20"),
    "many frames": (video, {"max_video_frames": 9}, "more frames than max_video_frames=9"),
    "a long video": (video, {"max_video_seconds": 2.0}, "lasts 2.5 seconds: the limit is"),
    "a slow one": (video, {"video_timeout_s": 1e-9}, "video_timeout_s=1e-09"),
    "many bytes": (video, {"max_video_bytes": 99}, "more bytes than max_video_bytes=99"),
    "nothing": (lambda: b"", {}, "holds no bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_taken_is_named(name: str) -> None:
    make, limits, said = BAD[name]
    with pytest.raises(RequestError, match=said):
        frames = open_video(Video(source=make()), ImageLimits.of(limits))
        list(frames.pick(range(frames.total)))


def test_a_header_that_lies_decodes_nothing_large() -> None:
    """What the decoder is told to refuse is no larger than the limit, whatever a header says."""
    with pytest.raises(RequestError):
        file = VideoFile(claims(50_000, 50_000), DEFAULT_LIMITS, "it")
        assert file.height * file.width < 2000  # the stream itself says another size
        file.close()
        raise RequestError("taken as what it is")


def test_damaged_files_are_errors_of_requests() -> None:
    """At random: whatever is read is an image of the right size, and nothing else is raised."""
    rng = np.random.default_rng(0)
    limits = ImageLimits(video_timeout_s=5.0)
    whole = [
        video(),
        faststart(),
        video(container="matroska"),
        video(container="avi", codec="mjpeg"),
    ]
    refused = 0
    for turn in range(40):
        data = bytearray(whole[turn % len(whole)])
        for place in rng.integers(0, len(data), 12):
            data[place] = rng.integers(256)
        data = data[: rng.integers(len(data) // 2, len(data) + 1)]
        try:
            file = VideoFile(bytes(data), limits, "it")
            for pixels in file.pick(range(0, file.total, 3)):
                assert pixels.shape == (file.height, file.width, 3)
            file.close()
        except RequestError:
            refused += 1
    assert refused


def test_paths_and_urls_of_videos(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(video())
    assert open_video(Video(source=path), DEFAULT_LIMITS).total == 10
    closed = ImageLimits(local_paths=False)
    for source, said in (
        (str(path), r"paths of this machine are not read \(local_paths=False\)"),
        ("https://a.org/b.mp4", "video URL: none are fetched unless hosts lists theirs"),
        ("ftp://a.org/b.mp4", "must begin with data:, http:// or https://"),
        ("data:image/png;base64,AAAA", "of type 'image/png': must be of a video"),
    ):
        with pytest.raises(RequestError, match=said):
            open_video(Video(source=source), closed)


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video()

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(video_files.importlib, "import_module", missing)
    with pytest.raises(RequestError, match=r"pip install 'jpaged\[videos\]'"):
        VideoFile(data, DEFAULT_LIMITS, "it")


@pytest.mark.parametrize("name", ["max_video_bytes", "max_video_frames", "max_video_seconds"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ImageLimits.of({name: 0})
