"""Tools whose schemas hold the model to them, and answers of a form, over HTTP."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")
pytest.importorskip("llguidance", reason="pip install 'jpaged[structured]'")

from tests.openai.live import SIZES, TOOL_TEMPLATE, Live, serving

CHAT = "/v1/chat/completions"
F32: dict[str, Any] = SIZES | {"dtype": "float32"}
LLAMA = TOOL_TEMPLATE.replace("<tool_call>", "python_tag")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"properties": {}}}},
]
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Will it rain?"}],
    "tools": TOOLS,
    "max_tokens": 150,
    "temperature": 1.0,
}


def make_live(template: str) -> Any:
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = template
    return serving(LLM(str(MODEL_PATH), tokenizer=tokenizer, **F32))


@pytest.fixture(scope="module", params=[TOOL_TEMPLATE, LLAMA], ids=["hermes", "llama"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with make_live(request.param) as live:
        yield live
        live.assert_nothing_left()


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """OpenAI's tool_choice by which only these tools may be called."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(live: Live) -> None:
    """The model sees all tools, and calls those that are allowed; in a response too."""
    sizes = set[int]()
    for name in ("stop", "weather"):
        for seed in range(3):
            body = ASK | {"seed": seed, "tool_choice": allowed("required", name)}
            answer = live.post(CHAT, body)
            [choice] = answer["choices"]
            calls = choice["message"]["tool_calls"]
            assert {call["function"]["name"] for call in calls} == {name}
            sizes.add(answer["usage"]["prompt_tokens"])
    assert len(sizes) == 1
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "stop"}]}
    body = {"input": "Will it rain?", "tools": flat, "tool_choice": choice}
    items = live.post("/v1/responses", body | {"max_output_tokens": 60})["output"]
    assert {item["name"] for item in items if item["type"] == "function_call"} == {"stop"}


def check_call(call: dict[str, Any]) -> None:
    """Of a tool that was offered, with arguments of its schema."""
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "weather":
        assert set(arguments) == {"city", "days"} and arguments["city"] in ("Rome", "Oslo")
        assert type(arguments["days"]) is int and 1 <= arguments["days"] <= 9
    else:
        assert name == "stop" and isinstance(arguments, dict)


def test_a_call_that_is_demanded(live: Live):
    """Of any tool or of one; the same from a stream; one alone where no more may come."""
    one = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        body = ASK | {"seed": seed, "parallel_tool_calls": False, "tool_choice": one}
        [choice] = live.post(CHAT, body)["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather" and choice["message"]["content"] is None
        check_call(call)
        deltas = [event["choices"][0] for event in live.events(CHAT, body)]
        pieces = [c for d in deltas for c in d["delta"].get("tool_calls", [])]
        streamed = "".join(piece["function"]["arguments"] for piece in pieces)
        assert streamed == call["function"]["arguments"]
        assert deltas[-1]["finish_reason"] == "tool_calls"
    [choice] = live.post(CHAT, ASK | {"seed": 5, "tool_choice": "required"})["choices"]
    calls = choice["message"]["tool_calls"]
    for call in calls if choice["finish_reason"] == "tool_calls" else calls[:-1]:
        check_call(call)


def test_a_function_that_is_named_is_called_once(live: Live):
    """Though calls may come side by side: whole, as a stream, and by /v1/responses."""
    named = {"type": "function", "function": {"name": "weather"}}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for seed in range(4):
        body = ASK | {"seed": seed, "tool_choice": named}
        [choice] = live.post(CHAT, body)["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert choice["finish_reason"] == "tool_calls"
        check_call(call)
        deltas = [event["choices"][0]["delta"] for event in live.events(CHAT, body)]
        begun = [c for d in deltas for c in d.get("tool_calls", []) if "id" in c]
        assert [c["function"]["name"] for c in begun] == ["weather"]
        answer = live.post(
            "/v1/responses",
            {"input": "Will it rain?", "tools": flat, "seed": seed, "max_output_tokens": 150}
            | {"tool_choice": {"type": "function", "name": "weather"}, "temperature": 1.0},
        )
        [item] = answer["output"]
        assert (item["type"], item["name"]) == ("function_call", "weather")
        assert answer["status"] == "completed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "stop"}}])
def test_the_form_of_a_text_is_not_that_of_calls(live: Live, choice: Any) -> None:
    """A response_format beside a demanded call changes nothing, in a chat and in a response."""
    schema = {"name": "trip", "schema": SCHEMA, "strict": True}
    ask = ASK | {"tool_choice": choice, "seed": 5, "max_tokens": 40}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    called = [live.post(CHAT, ask | more)["choices"][0]["message"] for more in ({}, form)]
    names = [[call["function"] for call in message["tool_calls"]] for message in called]
    assert names[0] == names[1] and names[0]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": ASK["messages"], "tools": flat, "seed": 5, "max_output_tokens": 40}
    body["tool_choice"] = choice if choice == "required" else {"type": "function", "name": "stop"}
    text = {"text": {"format": {"type": "json_schema", **schema}}}
    items = [live.post("/v1/responses", body | more)["output"] for more in ({}, text)]
    calls = [[(item["name"], item["arguments"]) for item in output] for output in items]
    assert calls[0] == calls[1] and calls[0]


def test_calls_that_may_not_come_side_by_side(live: Live):
    """One at most where the model may call, one where it must."""
    for seed, choice in enumerate(("auto", "required") * 2):
        body = ASK | {"seed": seed, "tool_choice": choice, "parallel_tool_calls": False}
        for found in live.post(CHAT, body | {"n": 4, "max_tokens": 60})["choices"]:
            count = len(found["message"].get("tool_calls", []))
            assert count <= 1
            if choice == "required" and found["finish_reason"] != "length":
                assert count == 1


def test_a_call_that_may_come_is_one(live: Live):
    """Whatever the model writes at a high temperature, what reads as a call is one."""
    body = ASK | {"n": 8, "seed": 3, "temperature": 1.5, "max_tokens": 60}
    for choice in live.post(CHAT, body)["choices"]:
        calls = choice["message"].get("tool_calls", [])
        for call in calls if choice["finish_reason"] != "length" else calls[:-1]:
            check_call(call)
        assert calls or isinstance(choice["message"]["content"], str)


def test_what_cannot_be_demanded(live: Live):
    for body, param in (
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"function": 3}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": allowed("auto")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tool_choice": allowed("many", "stop")}, "tool_choice"),
        (
            {"tool_choice": "required", "structured_outputs": {"json": SCHEMA}},
            "tool_choice",
        ),
    ):
        status, answer, _ = live.request(CHAT, ASK | body)
        assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_schema_that_cannot_be_is_its_requests_error(live: Live):
    """Where it is demanded; else the model is left to itself, as without a grammar."""
    bad: dict[str, Any] = {"name": "f", "parameters": {"type": "no such"}}
    for body in ({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"strict": True}):
        tool = {
            "type": "function",
            "function": bad | ({"strict": True} if "strict" in body else {}),
        }
        more = {k: v for k, v in body.items() if k != "strict"}
        status, answer, _ = live.request(CHAT, ASK | {"tools": [tool]} | more)
        assert status == 400 and "structured" in answer["error"]["message"]
    free = {"tools": [{"type": "function", "function": bad}], "max_tokens": 3}
    assert live.request(CHAT, ASK | free)[0] == 200


def doubling(times: int, *, by_reference: bool) -> dict[str, Any]:
    """Two of what is two of ...: by references, of which each is short, or written out."""
    deep: dict[str, Any] = {"type": "string"}
    defs: dict[str, Any] = {}
    for i in range(times):
        deep = {"anyOf": [{"type": "object", "properties": {"a": deep, "b": deep}}]}
        if by_reference:
            defs[f"d{i}"], deep = deep, {"$ref": f"#/$defs/d{i}"}
    return deep | ({"$defs": defs} if defs else {})


PAIRS = [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(12)]
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(6000)}
MULTIPLE = {"type": "integer", "multipleOf": 1_000_003}


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        (doubling(12, by_reference=False), None),
        (doubling(12, by_reference=True), False),
        ({"allOf": PAIRS}, True),  # whose alternatives multiply
        ({"$defs": CHAIN, "$ref": "#/$defs/d0"}, True),  # too deep for any thread's stack
        ({"properties": {"n": MULTIPLE}, "required": ["n"]}, True),
    ],
    ids=["written out", "by reference", "alternatives", "chain", "multiple"],
)
def test_a_tool_that_doubles_is_told_in_time(schema: dict[str, Any], is_refused: bool | None):
    """Refused with an error of its own, or served; in a bounded time of a processor (not by the
    clock, which runs on while the machine does something else), and others are served meanwhile.
    """
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = ASK | {"tools": [tool], "max_tokens": 5}
    demanded = body | {"tool_choice": "required"}
    other = ASK | {"tools": None, "max_tokens": 5, "seed": 1}
    with make_live(TOOL_TEMPLATE) as live, ThreadPoolExecutor() as threads:
        live.patience_s = 600.0
        expected = live.post(CHAT, other)["choices"]
        began = time.process_time()
        asked = [threads.submit(live.request, CHAT, demanded) for _ in range(5)]
        assert live.post(CHAT, other)["choices"] == expected
        for found in asked:
            status, answer, _ = found.result()
            if status != 200:
                assert status == 400 and answer["error"]["param"] == "tools"
                assert answer["error"]["message"].startswith("tools: structured: grammar: ")
            assert is_refused in (None, status == 400), answer
        # Not demanded, it is no reason to refuse.
        assert live.request(CHAT, body)[0] == 200
        assert time.process_time() - began < 30
        live.assert_nothing_left()


def test_a_form_is_that_of_the_library():
    """response_format over HTTP draws the tokens that SamplingParams.structured does."""
    with make_live(TOOL_TEMPLATE) as live:
        body = {k: v for k, v in ASK.items() if k != "tools"}
        body |= {"seed": 7, "top_k": 0, "top_p": 1.0}
        ids = live.post("/tokenize", {"messages": ASK["messages"]})["tokens"]
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        compact = {"json_schema": SCHEMA, "disable_any_whitespace": True}
        for field, form in (
            ({"response_format": named}, {"json_schema": SCHEMA}),
            ({"structured": compact}, compact),
        ):
            [choice] = live.post(CHAT, body | field)["choices"]
            text = choice["message"]["content"]
            events = live.events(CHAT, body | field)
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text
            asked = SamplingParams(seed=7, max_tokens=150, temperature=1.0, structured=form)
            [output] = live.call(partial(LLM.generate, prompts=[ids], sampling_params=asked))
            assert output.outputs[0].text == text
        check_call({"function": {"name": "weather", "arguments": text}})
        live.assert_nothing_left()
