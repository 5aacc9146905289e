"""Images over HTTP: in every form of a chat, what is refused and how, and clients that mean ill."""

import contextlib
import gc
import http.server
import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jpaged import LLM, SamplingParams
from jpaged.images.limits import ImageLimits
from tests.text_model import write_folder
from tests.vision_folder import (
    ENGINE,
    ROWS,
    data_url,
    part,
    picture,
    png,
    seen,
    write_vision_folder,
)

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.bodies import Served
from tests.openai.live import Live, same_tops, serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DRAWN: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3}
TEXT = {"type": "text", "text": "what?"}
LOW = {"type": "image_url", "image_url": {"url": data_url(), "detail": "low"}}
HEY = {"role": "user", "content": "hey"}
LARGE = picture(size=(300, 300))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    llm = LLM(write_vision_folder(tmp_path_factory.mktemp("seeing")), **ENGINE)
    limits = {"max_pixels": 200_000, "max_bytes": 300_000}
    llm.session.inputs.images.limits = ImageLimits.of(limits)  # pyright: ignore[reportOptionalMemberAccess]
    # Compiled before anybody waits for an answer.
    llm.chat(seen(), SamplingParams(max_tokens=2, logprobs=1), use_tqdm=False)
    llm.chat([HEY], SamplingParams(max_tokens=2), use_tqdm=False)
    with serving(llm, keep_responses_s=60.0, max_images=3) as live:
        images = live.server._generation.images
        images.limits = ImageLimits.of(limits | {"local_paths": False, "max_images": 3})
        live.llm.limit_images(images.limits)
        yield live
        live.assert_nothing_left()
        assert images._room.used == 0


@pytest.fixture(autouse=True)
def _others_are_served(live: Live) -> Iterator[None]:
    body = {"messages": [HEY], **DRAWN}
    before = live.post(CHAT, body)["choices"]
    yield
    assert live.post(CHAT, body)["choices"] == before


def prompt_size(message: Any) -> int:
    """How many tokens the prompt of Anthropic's form had."""
    return message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]


class TestForms:
    def test_an_image_is_seen(self, live: Live) -> None:
        answer = live.post(CHAT, {"messages": seen(), **DRAWN})
        assert answer["usage"]["prompt_tokens"] == len("u:what?;a:") + 2 + ROWS
        other = live.post(CHAT, {"messages": seen(data_url(png(picture(2)))), **DRAWN})
        assert not same_tops(other, answer)
        again = live.post(CHAT, {"messages": seen(), **DRAWN})
        assert same_tops(again, answer)

    def test_streams_and_samples(self, live: Live) -> None:
        body = {"messages": seen(), "max_tokens": 5, "seed": 3, "n": 2, "ignore_eos": True}
        whole = live.post(CHAT, body)
        texts = ["", ""]
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        events = live.events(CHAT, body | options)
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == [choice["message"]["content"] for choice in whole["choices"]]
        assert events[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]

    def test_all_forms_are_one(self, live: Live) -> None:
        """The tokens of the prompt, and what is drawn, are equal."""
        chat = live.post(CHAT, {"messages": seen(), **DRAWN})
        text = chat["choices"][0]["message"]["content"]
        image = {"type": "input_image", "image_url": data_url(), "detail": "auto"}
        items = [{"role": "user", "content": [image, {"type": "input_text", "text": "what?"}]}]
        drawn = {"temperature": 0, "max_output_tokens": 4}
        response = live.post(RESPONSES, {"input": items, **drawn})
        assert response["output"][0]["content"][0]["text"] == text
        assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        source = {"type": "base64", "media_type": "image/png", "data": data_url().split(",")[1]}
        blocks = [{"type": "image", "source": source}, TEXT]
        asked = {"messages": [{"role": "user", "content": blocks}]}
        message = live.post(MESSAGES, {**asked, "max_tokens": 4, "temperature": 0})
        assert message["content"][0]["text"] == text
        assert prompt_size(message) == chat["usage"]["prompt_tokens"]
        count = live.post("/v1/messages/count_tokens", asked)["input_tokens"]
        assert count == chat["usage"]["prompt_tokens"]
        assert live.post("/v1/responses/input_tokens", {"input": items})["input_tokens"] == count
        assert live.post("/tokenize", {"messages": seen()})["count"] == count

    def test_a_kept_response_keeps_its_images(self, live: Live) -> None:
        def ask(*content: Any, **more: Any) -> Any:
            body = {"input": [{"role": "user", "content": [*content]}], "temperature": 0}
            return live.post(RESPONSES, body | more)

        image = {"type": "input_image", "image_url": data_url()}
        text = {"type": "input_text", "text": "what?"}
        first = ask(image, text, max_output_tokens=2)
        second = ask(text, previous_response_id=first["id"], max_output_tokens=2)
        more = second["usage"]["input_tokens"] - first["usage"]["input_tokens"]
        assert more >= len("u:what?;a:") and second["usage"]["input_tokens_details"]

    def test_tools_and_their_results(self, live: Live) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        talk = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [part(), TEXT]},
        ]
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        body = {"messages": talk, "tools": [tool], "tool_choice": "none", **DRAWN}
        chat = live.post(CHAT, body)
        source = {"type": "base64", "media_type": "image/png", "data": data_url().split(",")[1]}
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1"}
        result["content"] = [{"type": "image", "source": source}, TEXT]
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{**tool_use(), "input": {}}]},
            {"role": "user", "content": [result]},
        ]
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        asked = {"messages": messages, "tools": tools, "tool_choice": {"type": "none"}}
        count = live.post("/v1/messages/count_tokens", asked)["input_tokens"]
        assert count == chat["usage"]["prompt_tokens"]

    def test_answers_that_begin(self, live: Live) -> None:
        body = {"messages": seen(), "max_tokens": 6, "seed": 5, "ignore_eos": True}
        whole = live.post(CHAT, body | {"return_token_ids": True})["choices"][0]
        begun = live.post(CHAT, body | {"answer_token_ids": whole["token_ids"][:3]})
        assert begun["choices"][0]["message"]["content"] == whole["message"]["content"]

    def test_prefixes_are_of_the_image(self, live: Live) -> None:
        def cached(shade: int) -> int:
            url = data_url(png(picture(shade, (32, 32))))
            body = {"messages": seen(url, text="a long question about it"), **DRAWN}
            return live.post(CHAT, body)["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert (cached(8), cached(9), cached(8)) == (0, 0, 40)

    def test_status_says_what_is_taken(self, live: Live) -> None:
        images = live.request("/status")[1]["images"]
        assert images["refused"] is None and images["max_images"] == 3 and not images["hosts"]
        schemas = live.request("/openapi.json")[1]["components"]["schemas"]
        for name in ("ImagePart", "InputImage", "ImageBlock"):
            assert name in schemas


def tool_use() -> dict[str, Any]:
    return {"type": "tool_use", "id": "c1", "name": "look"}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says a size, whatever is in it."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(data, 9))
    return b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b"")


def animated() -> bytes:
    out = io.BytesIO()
    frames = [Image.fromarray(picture(i)) for i in range(3)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


BAD: dict[str, tuple[str, str]] = {
    "50,000 x 50,000": (data_url(png_of(50_000, 50_000)), "max_pixels=200,000"),
    "a bomb": (data_url(png_of(5000, 5000, bytes(75_005_000))), "max_pixels=200,000"),
    "one side": (data_url(png_of(100_000, 1)), "max_side=30,000"),
    "truncated": (data_url(png(LARGE)[:-900]), "truncated or damaged"),
    "animated": (data_url(animated(), "image/gif"), "max_frames=1"),
    "no image": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "is no image of"),
    "a page": (data_url(b"<html>", "text/html"), "must be of an image"),
    "empty": ("data:image/png;base64,", "holds no bytes"),
    "wrong base64": ("data:image/png;base64,!!!!", "not base64"),
    "no base64": ("data:image/png,abc", "must have ;base64"),
    "too many bytes": (data_url(bytes(300_001)), "max_bytes=300,000"),
    "a path": ("/etc/passwd", "must begin with data:"),
    "a file URL": ("file:///etc/passwd", "must begin with data:"),
    "another scheme": ("ftp://a.org/x.png", "must begin with data:"),
    "a URL": ("https://example.com/x.png", "unless hosts lists theirs"),
    "the machine": ("http://169.254.169.254/latest/meta-data", "unless hosts lists theirs"),
    "no text": ("", "must be a text"),
}


class TestWhatIsRefused:
    @pytest.mark.parametrize("name", BAD)
    def test_a_bad_image(self, live: Live, name: str) -> None:
        url, said = BAD[name]
        status, answer, _ = live.request(CHAT, {"messages": seen(data_url(), url), **DRAWN})
        assert status == 400, answer
        error = answer["error"]
        assert said in error["message"] and error["param"] == "messages", error
        assert error["code"] == ("invalid_value" if name == "no text" else "invalid_image")
        if error["code"] == "invalid_image":
            assert "images[1]" in error["message"]

    def test_too_many(self, live: Live) -> None:
        status, answer, _ = live.request(CHAT, {"messages": seen(*[data_url()] * 4), **DRAWN})
        assert status == 400 and "4 images in a prompt: the limit is max_images=3" in str(answer)

    def test_errors_blame_the_field_of_the_route(self, live: Live) -> None:
        image = {"type": "input_image", "image_url": BAD["empty"][0]}
        body = {"input": [{"role": "user", "content": [image]}]}
        status, answer, _ = live.request(RESPONSES, body)
        assert status == 400 and answer["error"]["param"] == "input", answer
        source = {"type": "base64", "media_type": "image/png", "data": "!"}
        blocks = [{"type": "image", "source": source}]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 2}
        status, answer, _ = live.request(MESSAGES, body)
        assert status == 400 and answer["type"] == "error" and "base64" in str(answer)

    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            ([{"role": "assistant", "content": [part()]}], "assistant's message cannot have"),
            ([{"role": "user", "content": [part() | {"image_url": 5}]}], "must be a text"),
            ([{"role": "user", "content": [LOW]}], "detail 'low', which is not supported"),
            ([{"role": "user", "content": [{"type": "input_audio"}]}], "neither text nor"),
        ],
    )
    def test_a_bad_part(self, live: Live, messages: Any, said: str) -> None:
        status, answer, _ = live.request(CHAT, {"messages": messages})
        assert status == 400 and said in answer["error"]["message"], answer

    def test_a_prompt_that_is_cut(self, live: Live) -> None:
        body = {"messages": seen(), "truncate_prompt_tokens": 4}
        status, answer, _ = live.request(CHAT, body)
        assert status == 400 and answer["error"]["param"] == "truncate_prompt_tokens"

    def test_a_long_text(self, live: Live) -> None:
        """It is refused by its beginning, as one without images is."""
        status, answer, _ = live.request(CHAT, {"messages": seen(text="a" * 300_000)})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert "of its 3000" in answer["error"]["message"], answer

    def test_placeholders_in_the_text(self, live: Live) -> None:
        """A text that says what stands for an image is told that there is none."""
        messages = seen(text="<image><image>")
        status, answer, _ = live.request(CHAT, {"messages": messages})
        assert status == 400 and "placeholder" in answer["error"]["message"]

    def test_a_body_may_be_large(self, live: Live) -> None:
        assert live.server.settings.max_body_bytes == 32 << 20
        pixels = np.random.default_rng(0).integers(0, 256, (250, 300, 3), np.uint8)
        urls = [data_url(png(pixels + np.uint8(i))) for i in range(3)]
        answer = live.post(CHAT, {"messages": seen(*urls), **DRAWN})
        assert answer["usage"]["prompt_tokens"] < 3 * 16 + 30

    @pytest.mark.parametrize(
        "file",
        [
            png(format="JPEG"),
            png(format="WEBP"),
            png(format="GIF"),
            png(format="BMP"),
        ],
    )
    def test_formats(self, live: Live, file: bytes) -> None:
        live.post(CHAT, {"messages": seen(data_url(file, "image/x")), **DRAWN})

    def test_cmyk_and_exif(self, live: Live) -> None:
        out = io.BytesIO()
        Image.fromarray(picture()).convert("CMYK").save(out, "JPEG")
        live.post(CHAT, {"messages": seen(data_url(out.getvalue(), "image/jpeg")), **DRAWN})
        exif = Image.Exif()
        exif[0x0112] = 6  # a quarter turn
        wide = picture(size=(16, 32))
        turned = png(np.rot90(wide, 1).copy(), exif=exif)
        straight = live.post(CHAT, {"messages": seen(data_url(png(wide))), **DRAWN})
        answer = live.post(CHAT, {"messages": seen(data_url(turned)), **DRAWN})
        assert same_tops(answer, straight)


def test_a_model_that_sees_nothing_says_so(tmp_path: Path) -> None:
    sizes = {
        name: value for name, value in ENGINE.items() if name not in ("images", "max_model_len")
    }
    with serving(LLM(write_folder(tmp_path / "tiny"), **sizes)) as live:
        said = "--images (images=True of EngineConfig) reads one"
        status, answer, _ = live.request(CHAT, {"messages": seen()})
        assert status == 400 and answer["error"]["code"] == "unsupported_field"
        assert said in answer["error"]["message"]
        assert said in live.request("/status")[1]["images"]["refused"]
        assert live.server.settings.max_body_bytes == 4 << 20


def test_the_event_loop_goes_on_while_an_image_is_decoded(live: Live) -> None:
    """Others are answered while a slow decoder runs."""
    began, ended = threading.Event(), threading.Event()
    images: Any = live.llm._llm.session.inputs.images
    preparer = images._preparer
    prepare = preparer.prepare

    def slow(pixels: np.ndarray, digest: bytes) -> Any:
        began.set()
        assert ended.wait(60)
        return prepare(pixels, digest)

    preparer.prepare = slow
    try:
        body = {"messages": seen(data_url(png(picture(77)))), **DRAWN}
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(live.request(CHAT, body)))
        thread.start()
        assert began.wait(60)
        for _ in range(3):
            assert live.request("/health")[0] == 200
        live.post(CHAT, {"messages": [HEY], **DRAWN})
        assert not answers
        ended.set()
        thread.join(60)
        assert answers[0][0] == 200
    finally:
        preparer.prepare = prepare
        ended.set()


class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(png())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_urls_of_listed_hosts(live: Live, elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is fetched once a request; a private address is refused, listed or not."""
    images = live.server._generation.images
    limits = images.limits
    url = f"http://{elsewhere}/a.png"
    try:
        images.limits = ImageLimits.of({"hosts": [elsewhere], "local_paths": False})
        status, answer, _ = live.request(CHAT, {"messages": seen(url)})
        assert status == 400 and "not public" in answer["error"]["message"]
        monkeypatch.setattr("jpaged.images.fetch.is_public", lambda address: True)
        Handler.asked = 0
        fetched = live.post(CHAT, {"messages": seen(url, url), **DRAWN})
        assert Handler.asked == 1
        sent = live.post(CHAT, {"messages": seen(data_url(), data_url()), **DRAWN})
        assert same_tops(fetched, sent)
        source = {"type": "url", "url": url}
        blocks = [{"type": "image", "source": source}, TEXT]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 2}
        assert prompt_size(live.post(MESSAGES, body)) == len("u:what?;a:") + 2 + ROWS
    finally:
        images.limits = limits


def test_settings_never_open_what_a_server_must_not(tmp_path: Path) -> None:
    """Paths of the machine and private addresses stay closed whatever the engine's limits say."""
    from jpaged import AsyncLLM
    from jpaged.openai.server.app import Server
    from jpaged.openai.server.settings import ServerSettings

    open_limits = {"private_addresses": True, "hosts": ["a.org"]}
    llm = LLM(write_vision_folder(tmp_path), **ENGINE, image_limits=open_limits)
    server = Server(AsyncLLM(llm), ServerSettings(models=("x",), image_hosts=("b.org",)))
    limits = server._generation.images.limits
    assert not limits.local_paths and not limits.private_addresses
    assert limits.hosts == ("a.org", "b.org") and limits.max_images == 16
    assert llm.session.inputs.images is not None and llm.session.inputs.images.limits == limits
    llm.close()


def test_many_at_once_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where images that wait would take too much, a request is told to come later."""
    room = live.server._generation.images._room
    monkeypatch.setattr(room, "most", 10)
    status, answer, headers = live.request(CHAT, {"messages": seen(), **DRAWN})
    assert status == 429 and headers["retry-after"] and "too many images" in str(answer)
    deadline = time.monotonic() + 10
    while room.used and time.monotonic() < deadline:
        time.sleep(0.01)
    assert room.used == 0


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_request_that_runs_holds_no_file(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A body's data: URLs are given up once the prompt is made."""
    bodies: list[Any] = []
    generation = live.server._generation
    kept = generation.images.kept

    def with_images() -> list[Served]:
        return [o for o in gc.get_objects() if isinstance(o, Served) and o.image_sources]

    earlier = with_images()  # what other tests of this process still hold
    others = set(map(id, earlier))

    def looked_at(prompts: Any) -> Any:
        bodies.extend(body for body in with_images() if id(body) not in others)
        return kept(prompts)

    monkeypatch.setattr(generation.images, "kept", looked_at)
    file = png(picture(9, (40, 40)))
    data = data_url(file).split(",")[1]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image = {"type": "input_image", "image_url": data_url(file)}
    asked: dict[str, Any] = {
        CHAT: {"messages": seen(data_url(file))},
        RESPONSES: {"input": [{"role": "user", "content": [image]}], "store": False},
        MESSAGES: {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 2,
        },
    }
    live.post(path, asked[path])
    assert bodies and all(body.image_sources == [""] for body in bodies)
    assert not any(data in str(body.__dict__) + str(body.__pydantic_private__) for body in bodies)
