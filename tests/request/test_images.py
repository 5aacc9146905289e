"""Parts of a conversation that have images and videos."""

from typing import Any

import pytest

from jpaged import RequestError
from jpaged.images.videos import Video
from jpaged.request.images import Sources, split_sources


def of_parts(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "video", "video": ["a.png", "b.png"]}, ["a.png", "b.png"]),
        ({"type": "video", "path": "a.mp4"}, "a.mp4"),
        ({"type": "video", "url": "https://a.org/b.mp4"}, "https://a.org/b.mp4"),
        ({"type": "video", "base64": "AAAA"}, "data:;base64,AAAA"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}, None),
    ],
)
def test_a_video_and_its_options(part: dict[str, Any], source: Any) -> None:
    source = part["video_url"]["url"] if source is None else source
    image = {"type": "image", "image": "c.png"}
    messages, sources = split_sources(of_parts(image, part | {"fps": 1.5}))
    assert messages == of_parts({"type": "image"}, {"type": "video"})
    assert sources == Sources(images=["c.png"], videos=[Video(source=source, fps=1.5)])


def test_parts_without_a_source() -> None:
    """They stay the template's placeholders where nothing is needed."""
    messages = of_parts({"type": "video"})
    assert split_sources(messages, needs_sources=False) == (messages, Sources())
    with pytest.raises(RequestError, match="1 parts of type 'video' have no video: pass it under"):
        split_sources(messages)
    with pytest.raises(RequestError, match="has video, url: pass one of them"):
        split_sources(of_parts({"type": "video", "video": "a", "url": "b"}))
    with pytest.raises(RequestError, match=r"videos\[0\]: num_frames=0: must be from 1"):
        split_sources(of_parts({"type": "video", "video": "a", "num_frames": 0}))
