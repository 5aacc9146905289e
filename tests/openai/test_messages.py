"""/v1/messages: Anthropic's form of a chat, its blocks, and the events that add up to them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM
from tests.text_model import make_tokenizer, write_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.protocol import BodyError
from jpaged.openai.server.message_bodies import ServedMessage
from tests.openai.live import Live, serving
from tests.openai.test_tools import CALL, CHAT, SETTINGS, TEMPLATE, THOUGHT, WEATHER, write

MESSAGES = "/v1/messages"
SCHEMA = WEATHER["function"]["parameters"]
TOOL = {"name": "weather", "input_schema": SCHEMA}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "so?"}], "max_tokens": 30}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("messages") / "tiny")
    with serving(LLM(folder, tokenizer=make_tokenizer(TEMPLATE), **SETTINGS)) as live:
        yield live
        live.assert_nothing_left()


def events_of(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, text, headers = live.request(MESSAGES, body | {"stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    *events, end = text.split("\n\n")
    assert end == ""
    read = []
    for event in events:
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make, as Anthropic's clients add them up."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message, partial = dict(events[0]["message"]), ""
    assert message["content"] == []
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                partial = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "input_json_delta":
                        partial += delta["partial_json"]
                        continue
                    case "text_delta":
                        name = "text"
                    case "thinking_delta":
                        name = "thinking"
                    case _:
                        assert delta["type"] == "signature_delta"
                        name = "signature"
                block[name] += delta[name]
            case "content_block_stop":
                if message["content"][event["index"]]["type"] == "tool_use":
                    message["content"][event["index"]]["input"] = json.loads(partial or "{}")
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
            case kind:
                assert kind == "ping"
    return message


def alike(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in ("id", "usage")}
    kept["content"] = [{k: v for k, v in b.items() if k != "id"} for b in message["content"]]
    return kept


def test_the_chats_tokens(live: Live) -> None:
    """The same text as a chat with the same seed; the stream adds up to the whole."""
    more = {"seed": 5, "temperature": 1.0, "system": [{"type": "text", "text": "be odd"}]}
    answer = live.post(MESSAGES, ASK | more | {"stop_sequences": ["q"], "model": "tiny"})
    chat = {
        "messages": [{"role": "system", "content": "be odd"}, *ASK["messages"]],
        **{"seed": 5, "temperature": 1.0, "max_tokens": 30, "stop": ["q"]},
    }
    whole = live.post(CHAT, chat)
    [choice] = whole["choices"]
    assert answer["content"] == [{"type": "text", "text": choice["message"]["content"]}]
    assert answer["type"] == "message" and answer["id"].startswith("msg_")
    usage = answer["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert read == whole["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == whole["usage"]["completion_tokens"]
    streamed = events_of(live, ASK | more | {"stop_sequences": ["q"]})
    assert streamed[0]["message"]["usage"]["input_tokens"] == read
    assert alike(added_up(streamed)) == alike(answer)
    count = live.post("/v1/messages/count_tokens", ASK | more)
    assert count == {"input_tokens": read}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_tokens": 40, "stop_sequences": list("abcdefghij")}, "stop_sequence"),
    ],
)
def test_why_it_ended(live: Live, more: Any, reason: str) -> None:
    for seed in range(20):
        answer = live.post(MESSAGES, ASK | more | {"seed": seed, "temperature": 1.0})
        if answer["stop_reason"] == reason:
            assert (answer["stop_sequence"] is not None) == (reason == "stop_sequence")
            return
    pytest.fail(f"no answer ended by {reason}")


def test_thoughts_and_a_call(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write(live, monkeypatch, THOUGHT + CALL)
    body = ASK | {"tools": [TOOL], "tool_choice": {"type": "auto"}}
    answer = live.post(MESSAGES, body)
    thought, text, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "It rains.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["name"], call["input"]) == ("weather", {"a": [1, 2]})
    assert answer["stop_reason"] == "tool_use" and answer["stop_sequence"] is None
    assert prompts[0].startswith("weather,")
    streamed = added_up(events_of(live, body))
    assert alike(streamed) == alike(answer)
    # The answer goes back as it came, with the result of the tool.
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "dry"}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    live.post(MESSAGES, body | {"messages": messages})
    wanted = "weather,u:so?;a:Let me see.<tool_call>weather[1, 2]</tool_call>;t:dry;u:and?;a:"
    assert prompts[-1] == wanted


def test_a_call_that_is_cut_off(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    write(live, monkeypatch, CALL[:-20], reason="length")
    answer = live.post(MESSAGES, ASK | {"tools": [TOOL]})
    assert answer["stop_reason"] == "max_tokens"
    [raw] = answer["content"][-1]["input"].values()
    assert raw and CALL.find(raw) > 0


def translated(body: dict[str, Any]) -> dict[str, Any]:
    return ServedMessage.read(ASK | body).asked.chat


def test_bodies() -> None:
    """What is asked for in Anthropic's words is what a chat asks for in OpenAI's."""
    tools: dict[str, Any] = {"tools": [TOOL | {"description": "d"}]}
    function = {"name": "weather", "description": "d", "parameters": SCHEMA}
    assert translated(tools)["tools"] == [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "weather"}}
    choices = {"auto": "auto", "any": "required", "none": "none"}
    for kind, wanted in choices.items():
        chat = translated(tools | {"tool_choice": {"type": kind}})
        assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (wanted, True)
    one = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    chat = translated(tools | {"tool_choice": one})
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (named, False)
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 100}}
    assert translated(thinking)["chat_template_kwargs"] == {"enable_thinking": True}
    assert ServedMessage.read(ASK | thinking).ignored == ("thinking.budget_tokens",)
    off = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"tone": "dry"}}
    both = {"tone": "dry", "enable_thinking": False}
    assert ServedMessage.read(ASK | off).chat_template_kwargs == both
    begun = [*ASK["messages"], {"role": "assistant", "content": "It"}]
    assert translated({"messages": begun})["continue_final_message"] is True
    schema = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    chat = translated({"output_config": schema})
    assert chat["response_format"]["json_schema"]["schema"] == SCHEMA
    assert chat["reasoning_effort"] == "low"
    failed = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": "no"}
    talk = [*ASK["messages"], {"role": "user", "content": [failed]}]
    message = translated({"messages": talk})["messages"][1]
    assert message == {"role": "tool", "content": "Error: no", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
        ({"tools": [{"name": "a"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [TOOL]}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"system": [{"type": "text"}]}, "system"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        ServedMessage.read({k: v for k, v in (ASK | body).items() if v is not None})
    assert caught.value.param == param


def test_errors_have_anthropics_form(live: Live) -> None:
    status, answer, _ = live.request(MESSAGES, ASK | {"max_tokens": 0})
    assert status == 400 and answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in answer["error"]["message"]
    status, answer, _ = live.request(MESSAGES, ASK | {"model": "claude"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer, _ = live.request("/v1/messages/count_tokens", {"messages": "x"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_fields_of_its_servers_change_nothing(live: Live) -> None:
    plain = live.post(MESSAGES, ASK | {"seed": 4})
    cached = {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}
    more = {"metadata": {"user_id": "u"}, "service_tier": "auto"}
    body = ASK | {"seed": 4, "messages": [{"role": "user", "content": [cached]}]} | more
    assert alike(live.post(MESSAGES, body)) == alike(plain)


def test_a_key_may_be_in_anthropics_header(tmp_path: Any) -> None:
    folder = write_folder(tmp_path / "tiny")
    with serving(LLM(folder, **SETTINGS), api_keys=("let-me",)) as live:
        status, answer, _ = live.request(MESSAGES, ASK)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert live.request(MESSAGES, ASK, **{"x-api-key": "let-me"})[0] == 200
        assert live.request(MESSAGES, ASK, **{"x-api-key": "let-you"})[0] == 401
        assert live.request(MESSAGES, ASK, key="let-me")[0] == 200
