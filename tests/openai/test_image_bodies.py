"""Parts with images in the bodies of every form: what they become, and what is refused."""

from typing import Any

import pytest

from jpaged.openai.fields import content_text
from jpaged.openai.protocol import BodyError, ChatCompletionRequest

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.bodies import ServedChat
from jpaged.openai.server.message_bodies import ServedMessage
from jpaged.openai.server.response_bodies import ServedResponse

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": "what?"}
PLACED = [{"type": "image"}, TEXT]  # as the chat template takes them
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
}
INPUT = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what?"}]


def chat(content: Any, role: str = "user") -> ChatCompletionRequest:
    return ChatCompletionRequest.read({"messages": [{"role": role, "content": content}]})


def test_all_forms_are_one_chat() -> None:
    bodies = [
        chat([IMAGE, TEXT]),
        chat([{"type": "image_url", "image_url": URL}, TEXT]),
        chat([{**IMAGE, "image_url": {"url": URL, "detail": "high"}}, TEXT]),
        ServedResponse.read({"input": [{"role": "user", "content": INPUT}]}),
        ServedMessage.read(
            {"messages": [{"role": "user", "content": [BLOCK, TEXT]}], "max_tokens": 3}
        ),
    ]
    for body in bodies:
        assert body.image_sources == [URL]
        assert [m["content"] for m in body.conversation] == [PLACED]
        assert content_text(body.messages[0].content) == "[image]\nwhat?"
        body.forget_sources()
        assert body.image_sources == [""]
        assert [m["content"] for m in body.conversation] == [PLACED]


def test_text_alone_stays_text() -> None:
    body = chat([TEXT, {"type": "text", "text": "and?"}])
    assert body.messages[0].content == "what?\nand?" and body.image_sources == []


def test_results_of_tools() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": INPUT}
    body = ServedResponse.read({"input": [call, output]})
    assert body.conversation[1]["content"] == PLACED
    assert body.conversation[1]["tool_call_id"] == "c"
    result = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK, TEXT]}
    messages = [{"role": "user", "content": [result, {"type": "text", "text": "so?"}]}]
    body = ServedMessage.read({"messages": messages, "max_tokens": 3})
    assert [m["content"] for m in body.conversation] == [PLACED, "so?"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image_url", "image_url": {}}], "URL is None"),
        ([{"type": "image_url", "image_url": {"url": ""}}], "URL is ''"),
        ([{"type": "image_url"}], "URL is None"),
        ([{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}], "detail 'low'"),
        ([{"type": "image", "image": URL}], "neither text nor an image_url"),
        ([{"type": "file", "file": {}}], "neither text nor an image_url"),
    ],
)
def test_bad_parts(content: Any, said: str) -> None:
    with pytest.raises(BodyError, match=said) as caught:
        chat(content)
    assert caught.value.param == "messages"


def test_assistants_have_none() -> None:
    with pytest.raises(BodyError, match="assistant's message cannot have an image"):
        chat([IMAGE], "assistant")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"type": "file", "file_id": "x"}, "only base64 and url"),
        ({"type": "url", "url": "file:///etc/passwd"}, "must be http or https"),
        ({"type": "url", "url": URL}, "must be http or https"),
        ({"type": "base64", "media_type": "image/svg+xml", "data": "AA"}, "media_type"),
        ({"type": "base64", "media_type": "image/png"}, "needs 'data'"),
        ({"type": "base64", "media_type": "image/png", "data": 5}, "must be a text"),
        (None, "only base64 and url"),
    ],
)
def test_bad_sources(source: Any, said: str) -> None:
    block = {"type": "image", "source": source}
    with pytest.raises(BodyError, match=said):
        ServedMessage.read({"messages": [{"role": "user", "content": [block]}], "max_tokens": 3})


def test_files_are_not_kept() -> None:
    image = {"type": "input_image", "file_id": "file-1"}
    with pytest.raises(BodyError, match="keeps no files"):
        ServedResponse.read({"input": [{"role": "user", "content": [image]}]})


def test_errors_show_little_of_a_large_body() -> None:
    url = "data:image/png;base64," + "A" * 8_000_000
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    with pytest.raises(BodyError) as caught:
        ServedChat.read({"messages": [{"role": "user", "content": [part]}]})
    assert len(str(caught.value)) < 400
