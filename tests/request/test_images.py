"""Parts of a conversation that have images, and those that no chat takes."""

from typing import Any

import pytest

from jpaged import RequestError
from jpaged.request.images import split_images


def of_parts(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": ["a.png", "b.png"]},
        {"type": "video", "path": "a.mp4"},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ],
)
def test_a_video_is_not_left_out_in_silence(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"a part of type '{part['type']}' has a video"):
        split_images(of_parts({"type": "image", "image": "c.png"}, part))


def test_a_placeholder_of_a_video_stays() -> None:
    """Its text is what video_prompt takes."""
    messages = of_parts({"type": "video"})
    assert split_images(messages) == (messages, [])
    images, sources = split_images(of_parts({"type": "video"}, {"type": "image", "url": "c.png"}))
    assert images == of_parts({"type": "video"}, {"type": "image"}) and sources == ["c.png"]
