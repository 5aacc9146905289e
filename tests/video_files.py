"""Files of videos that tests make with PyAV, which they are skipped without."""

import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vision_folder import picture

av: Any = pytest.importorskip("av", reason="pip install 'jpaged[videos]'")


def video(
    shade: int = 0,
    *,
    count: int = 10,
    size: tuple[int, int] = (32, 32),
    fps: int = 4,
    container: str = "mp4",
    codec: str = "libx264",
    key_every: int = 4,
    options: dict[str, str] | None = None,
    sound: bool = False,
) -> bytes:
    """The file of a video of `count` frames of a size, of its own for each shade."""
    with (
        tempfile.NamedTemporaryFile() as out,  # some options read what was written
        av.open(out.name, "w", format=container, options=options or {}) as file,
    ):
        stream = file.add_stream(codec, rate=fps)
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = key_every
        talk = file.add_stream("aac", rate=16_000) if sound else None
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(picture(shade + i, size), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if talk is not None:
            noise = np.random.default_rng(0).uniform(-0.1, 0.1, (1, 16_000)).astype(np.float32)
            heard = av.AudioFrame.from_ndarray(noise, format="fltp", layout="mono")
            heard.sample_rate = 16_000
            file.mux(talk.encode(heard))
            file.mux(talk.encode())
        file.close()
        return Path(out.name).read_bytes()


def frames_of(file: bytes) -> list[np.ndarray]:
    """All frames of a file, as PyAV decodes them one after another."""
    with av.open(io.BytesIO(file)) as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]


def video_url(file: bytes | None = None, kind: str = "video/mp4") -> str:
    data = video() if file is None else file
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(*urls: str, text: str = "what?") -> list[dict[str, Any]]:
    """A conversation of one message: videos, then a text."""
    parts: list[Any] = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
