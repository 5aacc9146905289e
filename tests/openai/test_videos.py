"""Videos over HTTP and in batch files: what is seen, what is refused and how."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.images.limits import ImageLimits
from tests.video_files import frames_of, shown, video, video_url
from tests.vision_folder import ENGINE, data_url, part, write_vision_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.integrations.batch.images import LineImages
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.openai.protocol import BodyError
from tests.openai.live import Live, same_tops, serving

CHAT = "/v1/chat/completions"
DRAWN: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3}
GREEDY = SamplingParams(max_tokens=4, temperature=0)
LIMITS = {"max_video_pixels": 5000, "max_video_bytes": 100_000, "max_video_frames": 50}
LIMITS |= {"max_video_seconds": 20.0, "max_images": 3}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    llm = LLM(write_vision_folder(tmp_path_factory.mktemp("seeing")), **ENGINE)
    # Compiled before anybody waits for an answer.
    llm.chat(shown(video_url()), SamplingParams(max_tokens=2, logprobs=1), use_tqdm=False)
    with serving(llm, max_images=3) as live:
        images = live.server._generation.images
        images.limits = ImageLimits.of(LIMITS | {"local_paths": False})
        live.llm.limit_images(images.limits)
        yield live
        live.assert_nothing_left()
        assert images._room.used == 0


def usage(answer: Any) -> tuple[int, int]:
    told = answer["usage"]
    return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]


def test_a_video_is_seen_and_found_again(live: Live) -> None:
    """Two seconds and a half at two frames a second, two to a patch: two grids with their times."""
    first = live.post(CHAT, {"messages": shown(video_url(video(20))), **DRAWN})
    again = live.post(CHAT, {"messages": shown(video_url(video(20))), **DRAWN})
    other = live.post(CHAT, {"messages": shown(video_url(video(90))), **DRAWN})
    assert same_tops(again, first) and not same_tops(other, first)
    count, cached = usage(first)
    assert count > 40 and cached < 24  # the text before the video is the fixture's too
    assert usage(again)[1] >= 8 * ((count - 1) // 8) and usage(other)[1] < 24
    assert live.post("/tokenize", {"messages": shown(video_url(video(20)))})["count"] == count


def test_frames_of_a_caller_are_those_of_the_file(live: Live) -> None:
    data = video(40)
    answer = live.post(CHAT, {"messages": shown(video_url(data)), **DRAWN})
    frames = {"type": "video", "video": np.stack(frames_of(data)), "video_metadata": {"fps": 4.0}}
    asked = [{"role": "user", "content": [frames, {"type": "text", "text": "what?"}]}]
    ids, spans = live.llm._llm.session.inputs.conversation(_chat(asked))
    assert len(ids) == usage(answer)[0] and spans is not None and len(spans) > 1
    image = [part(data_url()), *shown(video_url(data))[0]["content"]]
    both = live.post(CHAT, {"messages": [{"role": "user", "content": image}], **DRAWN})
    assert usage(both)[0] == len(ids) + 2 + 4


def test_a_body_says_what_is_taken(live: Live) -> None:
    """Fewer frames, fewer tokens; the options of a processor that are others are refused."""
    body = {"messages": shown(video_url(video(60))), **DRAWN}
    every = usage(live.post(CHAT, body))[0]
    few = usage(live.post(CHAT, body | {"mm_processor_kwargs": {"num_frames": 2}}))[0]
    assert few < every
    status, answer, _ = live.request(CHAT, body | {"mm_processor_kwargs": {"fps": -1}})
    assert status == 400 and "fps" in answer["error"]["message"]
    status, answer, _ = live.request(CHAT, body | {"mm_processor_kwargs": {"max_pixels": 9}})
    assert status == 400 and answer["error"]["param"] == "mm_processor_kwargs"


def _chat(messages: Any) -> Any:
    from jpaged.request.inputs import Chat

    return Chat(messages=messages)


BAD: dict[str, tuple[Any, str, str]] = {
    "no video": (lambda: video_url(b"<html>"), "is no video of video_formats", "invalid_video"),
    "an image": (data_url, "must be of a video", "invalid_video"),
    "cut": (lambda: video_url(video()[:600]), "videos[1]", "invalid_video"),
    "pixels": (lambda: video_url(video(size=(80, 80))), "max_video_pixels=5,000", "invalid_video"),
    "frames": (lambda: video_url(video(count=51)), "max_video_frames=50", "invalid_video"),
    "seconds": (lambda: video_url(video(count=50, fps=1)), "max_video_seconds=20", "invalid_video"),
    "bytes": (lambda: video_url(bytes(100_001)), "max_video_bytes=100,000", "invalid_video"),
    "one frame": (lambda: video_url(video(count=1)), "at least 2", "invalid_video"),
    "a path": (lambda: "/etc/passwd", "must begin with data:", "invalid_video"),
    "a URL": (lambda: "http://169.254.169.254/", "unless hosts lists theirs", "invalid_video"),
    "no text": (lambda: "", "must be a text", "invalid_value"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_video_is_that_request_s_error(live: Live, name: str) -> None:
    make, said, code = BAD[name]
    status, answer, _ = live.request(CHAT, {"messages": shown(video_url(), make()), **DRAWN})
    assert status == 400, answer
    assert said in answer["error"]["message"] and answer["error"]["code"] == code, answer
    assert code == "invalid_value" or "videos[1]" in answer["error"]["message"]


def test_too_many_and_too_long(live: Live) -> None:
    messages = shown(*[video_url()] * 4)
    status, answer, _ = live.request(CHAT, {"messages": messages, **DRAWN})
    assert status == 400 and "4 images and videos in a prompt" in str(answer)
    status, answer, _ = live.request(
        CHAT, {"messages": shown(video_url()), "truncate_prompt_tokens": 4}
    )
    assert status == 400 and answer["error"]["param"] == "truncate_prompt_tokens"
    spoken = [{"role": "assistant", "content": shown(video_url())[0]["content"]}]
    status, answer, _ = live.request(CHAT, {"messages": spoken})
    assert status == 400 and "assistant's message cannot have" in str(answer)
    schemas = live.request("/openapi.json")[1]["components"]["schemas"]
    assert "VideoPart" in schemas and live.request("/status")[1]["images"]["videos_refused"] is None


def line(body: dict[str, Any]) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    return json.dumps(whole).encode()


def test_lines_of_a_batch(live: Live, tmp_path: Path) -> None:
    """In a chat, and bare; as a path below the input's folder, and not from elsewhere."""
    llm, reader = live.llm._llm, live.llm._llm.session.inputs.images
    assert reader is not None
    limits = reader.limits
    (tmp_path / "a.mp4").write_bytes(video(20))
    settings = Settings(
        defaults=GREEDY, images=LineImages.of(ImageLimits.of(LIMITS), folder=str(tmp_path))
    )

    def prompt_of(raw: bytes) -> Any:
        request = BatchRequest(number=1)
        request.parse(raw, settings)
        assert request.has_images
        return request.prompt_for(llm)

    try:
        sent = prompt_of(line({"messages": shown(video_url(video(20)))}))
        by_path = prompt_of(line({"messages": shown("a.mp4")}))
        text = "u:<vis><vid></vis>what?;a:"
        bare = prompt_of(json.dumps({"prompt": text, "videos": ["a.mp4"]}).encode())
        ids = sent["prompt_token_ids"]
        assert by_path["prompt_token_ids"] == bare["prompt_token_ids"] == ids
        digests = [[s.embeddings.digest for s in x["embeddings"].values()] for x in (sent, bare)]
        assert digests[0] == digests[1] and len(digests[0]) > 1
        for source, said in (("../a.mp4", "below the input's folder"), ("b.mp4", "No such file")):
            with pytest.raises(BodyError, match=rf"videos\[0\]: video '{source}': .*{said}"):
                prompt_of(line({"messages": shown(source)}))
    finally:
        live.llm.limit_images(limits)
