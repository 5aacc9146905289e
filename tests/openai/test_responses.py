"""/v1/responses: the items of an answer, which the events of its stream add up to, and its chat."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM
from tests.text_model import make_tokenizer, write_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.protocol import BodyError
from jpaged.openai.server.response_bodies import ServedResponse
from tests.openai.live import Live, serving
from tests.openai.test_tools import CALL, CHAT, SETTINGS, TEMPLATE, THOUGHT, WEATHER, write

RESPONSES = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
ASK: dict[str, Any] = {"input": "so?", "tools": [TOOL], "max_output_tokens": 40}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("responses") / "tiny")
    with serving(LLM(folder, tokenizer=make_tokenizer(TEMPLATE), **SETTINGS)) as live:
        yield live


def events_of(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream: each named by its type, and counted."""
    status, text, headers = live.request(RESPONSES, body | {"stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    *events, end = text.split("\n\n")
    assert end == ""
    found = []
    for number, event in enumerate(events):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an answer, by its deltas; what ends a part or an item says the same."""
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append({"item": event["item"], "text": ""})
            continue
        own = items[event["output_index"]]
        if "item_id" in event:
            assert event["item_id"] == own["item"]["id"]
        if kind.endswith(".delta"):
            own["text"] += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == own["text"]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == own["text"]
        elif kind == "response.output_item.done":
            parts = [part["text"] for part in event["item"].get("content", [])]
            assert "".join(parts) + event["item"].get("arguments", "") == own["text"]
            own["item"] = event["item"]
    return [own["item"] for own in items]


def alike(found: Any) -> Any:
    """An answer without what differs from one to the next."""
    if isinstance(found, dict):
        left_out = ("id", "call_id", "created_at")
        return {name: alike(value) for name, value in found.items() if name not in left_out}
    return [alike(value) for value in found] if isinstance(found, list) else found


def both(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """An answer, which its stream ends with and adds up to."""
    whole, events = live.post(RESPONSES, body), events_of(live, body)
    last = events[-1]["response"]
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert [e["response"]["output"] for e in events[:2]] == [[], []]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert alike(last) == alike(whole)
    assert added_up(events) == last["output"]
    return whole


def test_what_is_thought_said_and_called(live: Live, monkeypatch: pytest.MonkeyPatch):
    given = write(live, monkeypatch, THOUGHT + CALL)
    found = both(live, ASK | {"instructions": "Be short.", "metadata": {"a": "b"}})
    assert given == ["weather,s:Be short.;u:so?;a:"] * 2
    thought, said, call = found["output"]
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "It rains."}]
    assert said["content"][0]["text"] == "Let me see." and said["role"] == "assistant"
    assert (call["name"], call["arguments"]) == ("weather", '{"a": [1, 2]}')
    assert call["call_id"].startswith("call_") and call["id"].startswith("fc_")
    assert {item["status"] for item in found["output"]} == {found["status"]} == {"completed"}
    assert (found["metadata"], found["instructions"]) == ({"a": "b"}, "Be short.")
    usage = found["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_what_is_cut_off_and_what_is_empty(live: Live, monkeypatch: pytest.MonkeyPatch):
    write(live, monkeypatch, "Some words", "length")
    found = both(live, ASK)
    assert (found["status"], found["output"][0]["status"]) == ("incomplete", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    write(live, monkeypatch, " ")
    [said] = both(live, ASK)["output"]
    assert said["type"] == "message"


def test_the_chats_tokens(live: Live):
    """The model's own: as many, and the same, as a chat of the same messages has."""
    sampling = {"temperature": 0.9, "seed": 4, "top_p": 0.8, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "hey"}], "max_completion_tokens": 12}
    expected = live.post(CHAT, chat | sampling)
    found = both(live, {"input": "hey", "max_output_tokens": 12} | sampling)
    text = expected["choices"][0]["message"]["content"]
    assert found["output"][0]["content"][0]["text"] == text
    assert found["usage"]["output_tokens"] == 12 and found["status"] == "incomplete"
    assert (found["temperature"], found["top_p"], found["store"]) == (0.9, 0.8, False)
    live.assert_nothing_left()


def test_a_conversation_goes_on(live: Live, monkeypatch: pytest.MonkeyPatch):
    """An answer's items are an input."""
    write(live, monkeypatch, THOUGHT + 'So.\n<tool_call>{"name": "w", "arguments": {"a": 5}}')
    items = live.post(RESPONSES, ASK)["output"]
    given = write(live, monkeypatch, "Wet.")
    asked = {"role": "user", "content": [{"type": "input_text", "text": "so?"}]}
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "rain"}
    live.post(RESPONSES, ASK | {"input": [asked, *items, result]})
    assert given == ["weather,u:so?;a:So.<tool_call>w5</tool_call>;t:rain;a:"]


def test_what_a_chat_is_asked():
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    chosen = {"type": "function", "name": "weather"}
    body = ServedResponse.read(
        {"input": "a", "tools": [TOOL | {"strict": True}], "tool_choice": chosen, "store": False}
        | {"reasoning": {"effort": "low"}, "parallel_tool_calls": False, "user": "me"}
    )
    assert body.must_call and [t["function"]["name"] for t in body.callable_tools] == ["weather"]
    assert body.callable_tools[0]["function"]["strict"] is True
    assert body.reasoning_effort == "low" and body.parallel_tool_calls is False
    body = ServedResponse.read({"input": "a", "text": {"format": form}, "seed": 3})
    assert body.sampling()["structured"] == {"json_schema": schema} and body.seed == 3
    body = ServedResponse.read({"input": "a", "text": {"format": {"type": "json_object"}}})
    assert body.sampling()["structured"] == {"json_object": True}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"reasoning": {"summary": "auto"}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL | {"name": "two words"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"n": 2}, "n"),
    ],
    ids=str,
)
def test_what_is_refused(body: dict[str, Any], param: str):
    with pytest.raises(BodyError) as refused:
        ServedResponse.read(({} if "input" in body or not body else {"input": "a"}) | body)
    assert refused.value.param == param


def test_errors_have_openais_form(live: Live):
    for body, param in (
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "a", "temperature": -1.0}, "temperature"),
    ):
        status, answer, _ = live.request(RESPONSES, body)
        assert (status, answer["error"]["param"]) == (400, param)
    assert live.request(RESPONSES, {"input": "a", "model": "other"})[0] == 404
