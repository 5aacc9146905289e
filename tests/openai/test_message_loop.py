"""Whatever an answer holds is a message that the server takes, in every form in which a client
sends it back.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.request.outputs import CompletionChunk, CompletionOutput, Logprob, RequestOutput
from jpaged.sampling_params import SamplingParams

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.parts import Format, Reader, Style
from jpaged.openai.protocol import ChatCompletionRequest
from jpaged.openai.responses import AnswerForm
from jpaged.openai.server.answers import WholeAnswer
from jpaged.openai.server.asked import Asked
from jpaged.openai.server.bodies import ServedChat
from jpaged.openai.server.events import Events
from jpaged.openai.server.response_bodies import ServedResponse
from jpaged.openai.server.response_items import ResponseEvents

USER: dict[str, Any] = {"role": "user", "content": "so?"}
# What the openai package's types of a message, of a call and of an item have, and what its
# parse() and stream() put beside them: model_dump() writes all of them.
MESSAGE_FIELDS = (
    *("content", "refusal", "annotations", "audio", "function_call", "tool_calls", "parsed"),
    "reasoning",
)
ITEM_FIELDS = (
    *("encrypted_content", "phase", "namespace", "caller", "async_", "parsed_arguments", "status"),
)
Dump = Callable[[dict[str, Any]], dict[str, Any]]


def raw(message: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(message))


def with_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """As the package's model_dump() writes it."""
    calls = [
        call | {"function": call["function"] | {"parsed_arguments": None}, "index": place}
        for place, call in enumerate(message.get("tool_calls") or [])
    ]
    found = dict.fromkeys(MESSAGE_FIELDS) | message
    return raw(found | ({"tool_calls": calls} if calls else {}))


def without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """As model_dump(exclude_none=True)."""
    return {name: value for name, value in raw(message).items() if value is not None}


def renamed(message: dict[str, Any]) -> dict[str, Any]:
    """As a client of vLLM's newer servers writes the reasoning."""
    found = with_nulls(message)
    found["reasoning"] = found.pop("reasoning_content", None)
    return found


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """As parse() leaves it: the objects that it made beside their texts."""
    found = with_nulls(message) | {"parsed": {"city": "Rome"}, "annotations": []}
    for call in found["tool_calls"] or []:
        call["function"]["parsed_arguments"] = {"city": "Rome"}
    return found


DUMPS: tuple[Dump, ...] = (raw, with_nulls, without_nulls, renamed, parsed)

TEXT = st.text('ab<>{}[]"\\/ \n\u00e9\U0001f600', max_size=12)
ARGUMENTS = st.sampled_from(
    (
        '{"a": [1, {"b": null}]}',
        '{"a": "\\ud800"}',
        "{}",
        '"a string"',
        '"{\\"a\\": \\"\\\\ud800\\"}"',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": NaN}',
        '{"a": ' + "[" * 200 + "]" * 200 + "}",
        '{"a": ' + "[" * 4000,
    )
)
NAME = st.sampled_from(("weather", "", "two words", "\\ud800", "\\q", "caf\u00e9"))


def call_of(style: Style, name: str, arguments: str, *, name_first: bool) -> str:
    if style == "harmony":
        return f"<|channel|>commentary to=functions.{name}<|message|>{arguments}<|call|>"
    key = "parameters" if style == "llama" else "arguments"
    pairs = [f'"name": "{name}"', f'"{key}": {arguments}']
    body = "{" + ", ".join(pairs if name_first else pairs[::-1]) + "}"
    return body if style == "llama" else f"<tool_call>\n{body}\n</tool_call>"


@st.composite
def answers(draw: st.DrawFn) -> tuple[Style, bool, str, str]:
    """(style, whether it thinks, what the model wrote, what ended it)."""
    style: Style = draw(st.sampled_from(("hermes", "llama", "harmony", "none")))
    thinks = draw(st.booleans())
    parts: list[str] = []
    if draw(st.booleans()):
        thought = draw(TEXT)
        aside = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        parts.append(aside if style == "harmony" else f"<think>{thought}</think>\n")
    if draw(st.booleans()):
        said = draw(TEXT)
        parts.append(f"<|channel|>final<|message|>{said}<|end|>" if style == "harmony" else said)
    for _ in range(draw(st.integers(0, 2))):
        how = {"name": draw(NAME), "arguments": draw(ARGUMENTS), "name_first": draw(st.booleans())}
        parts.append(call_of(style, **how))
    text = (";" if style == "llama" else "").join(parts)
    if draw(st.booleans()):
        return style, thinks, text[: draw(st.integers(0, len(text)))], "length"
    return style, thinks, text, "stop"


def output_of(text: str | None, reason: Any, *, logprobs: bool) -> RequestOutput:
    entries = {65: Logprob(-0.5, 1, "A")}
    done = CompletionOutput(
        index=0,
        text=text,
        token_ids=[65],
        token_logprobs=np.array([-0.5], np.float32),
        cumulative_logprob=-0.5,
        logprobs=[entries] if logprobs else None,
        finish_reason=reason,
    )
    return RequestOutput(request_id="0", prompt="p", prompt_token_ids=[1], outputs=[done])


def chunks_of(text: str, reason: str, size: int) -> list[CompletionChunk]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    return [
        CompletionChunk(
            request_index=0,
            index=0,
            text_delta=piece,
            token_ids_delta=[65],
            token_logprobs_delta=[-0.5],
            logprobs_delta=[{65: Logprob(-0.5, 1, "A")}],
            finish_reason=reason if i == len(pieces) - 1 else None,
        )
        for i, piece in enumerate(pieces)
    ]


def events_in(stream: bytes) -> list[dict[str, Any]]:
    lines = stream.decode().split("\n")
    said = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [json.loads(text) for text in said]


def added_up(stream: bytes) -> dict[str, Any]:
    """The message of a chat's stream as the openai package accumulates it: indexes stay."""
    message: dict[str, Any] = {}
    for event in events_in(stream):
        for name, value in event["choices"][0]["delta"].items() if event["choices"] else ():
            if name != "tool_calls":
                is_text = isinstance(value, str) and name != "role"
                message[name] = message.get(name, "") + value if is_text else value
                continue
            calls = message.setdefault(name, [])
            for piece in value:
                if piece["index"] == len(calls):
                    calls.append(piece | {"function": dict(piece["function"])})
                else:
                    function = calls[piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
    return message


def told(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the chat template is given, without what differs from one answer to the next."""
    found = raw({"m": messages})["m"]
    for message in found:
        for call in message.get("tool_calls", []):
            call["id"] = ""
    return found


def sent_back(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What the template is given where a conversation goes on after the message."""
    body = {"messages": [USER, message, USER]}
    found = told(ServedChat.read(body).conversation)
    assert told(ChatCompletionRequest.read(body).conversation) == found  # a batch file's
    return found


@given(answers(), st.booleans(), st.integers(1, 30))
def test_an_answer_is_a_message(answer: Any, logprobs: bool, size: int) -> None:
    """Every dump of an answer, and of its stream, gives the template the same conversation."""
    style, thinks, text, reason = answer
    form = AnswerForm(top=0 if logprobs else None)
    output = output_of(text, reason, logprobs=logprobs)
    reader = lambda: Format(style=style, thinks=thinks).reader("", tools=True)  # noqa: E731
    [choice] = chat_answer(output, form, reader)["choices"]
    message = choice["message"]
    said = sent_back(raw(message))
    assert said[1]["content"] == (message["content"] or "")
    assert said[1].get("reasoning_content") == message.get("reasoning_content")
    calls = message.get("tool_calls", [])
    for taken, call in zip(said[1].get("tool_calls", []), calls, strict=True):
        assert taken.keys() == {"id", "type", "function"}
        assert taken["function"].keys() == {"name", "arguments"}
        assert taken["function"]["name"] == call["function"]["name"]
        arguments, written = taken["function"]["arguments"], call["function"]["arguments"]
        if isinstance(arguments, dict):
            assert json.dumps(arguments) == json.dumps(json.loads(written or "{}"))
        else:
            assert arguments == written
    for dump in DUMPS:
        assert sent_back(dump(message)) == said, dump
    events = Events(
        name="0", model="m", is_chat=True, form=form, n=1, with_usage=True, reader=reader
    )
    stream = b"".join(events.pieces(0, chunk) for chunk in chunks_of(text, reason, size))
    streamed = added_up(stream + events.end([output]))
    for dump in DUMPS:
        assert sent_back(dump(streamed)) == said, dump


def chat_answer(
    output: RequestOutput, form: AnswerForm, reader: Callable[[], Reader]
) -> dict[str, Any]:
    asked = Asked(
        body=ServedChat.read({"messages": [USER]}),
        params=SamplingParams(),
        prompts=["p"],
        form=form,
        model="m",
        name="0",
        echo=None,
        reader=reader,
    )
    answer, parts = WholeAnswer(asked, [output]), list[bytes]()
    while not answer.is_ended:
        parts.append(answer.next(None))
    return json.loads(b"".join(parts))


def test_an_answer_without_text_is_a_message() -> None:
    """A model without a tokenizer answers by token ids, and its message has null content."""
    output = output_of(None, "stop", logprobs=False)
    plain = Format(style="none", thinks=False)
    [choice] = chat_answer(output, AnswerForm(), lambda: plain.reader("", tools=False))["choices"]
    assert choice["message"]["content"] is None
    for dump in DUMPS:
        assert sent_back(dump(choice["message"]))[1] == {"role": "assistant", "content": ""}


@given(answers(), st.integers(1, 30))
def test_items_of_a_response_are_input(answer: Any, size: int) -> None:
    """The output of /v1/responses, whole and from the events of its stream, in every dump; the
    conversation is that of the chat's message.
    """
    style, thinks, text, reason = answer
    output = output_of(text, reason, logprobs=False)
    reader = lambda: Format(style=style, thinks=thinks).reader("", tools=True)  # noqa: E731
    body = ServedResponse.read({"input": "so?"})

    def events() -> ResponseEvents:
        how: Any = {"name": "0", "model": "m", "reader": reader(), "count": len}
        return ResponseEvents(asked=body.asked, params=SamplingParams(), **how)

    streamed = events()
    written = b"".join(streamed.pieces(0, chunk) for chunk in chunks_of(text, reason, size))
    written += streamed.end([output])
    ended = [e["item"] for e in events_in(written) if e["type"] == "response.output_item.done"]
    whole = events().whole(output)["output"]
    said = conversation_of(whole)
    for items in (whole, ended, events_in(written)[-1]["response"]["output"]):
        nulls = [dict.fromkeys(ITEM_FIELDS) | item for item in items]
        bare = [without_nulls(item) for item in items]
        unnamed = [
            {k: v for k, v in item.items() if k not in ("id", "status", "summary")}
            for item in items
        ]
        for dumped in (items, nulls, bare, unnamed):
            assert conversation_of(dumped) == said


def conversation_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    user = {"role": "user", "content": "so?"}
    return told(ServedResponse.read({"input": [user, *raw({"i": items})["i"], user]}).conversation)
