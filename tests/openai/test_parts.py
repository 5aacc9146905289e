"""Reasoning, content and calls as three families write them, in pieces of any size."""

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.openai.parts import (
    PIECE,
    Format,
    Harmony,
    JsonCalls,
    Plain,
    Reader,
    Tagged,
    folded,
    style_of,
)

ARGUMENTS = '{"city": "S\\u00e3o }\\" Paulo", "days": [1, {"a": 2}], "note": "</tool_call>"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
ONE = [("weather", ARGUMENTS)]


def tagged(**how: Any) -> Tagged:
    return Tagged(**{"thinks": True, "is_thinking": False, "tools": True, **how})


def thinking_llama(*, is_thinking: bool) -> Reader:
    end = "<think>" if is_thinking else ""
    return Format(style="llama", thinks=True).reader(end, tools=True)


def read(reader: Reader, pieces: list[str]) -> dict[str, Any]:
    """The message of a text in pieces, calls as (name, arguments)."""
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
    for delta in deltas:
        assert len(delta) == 1 and all(delta.values())
    message = folded(deltas)
    calls = message.pop("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls) <= reader.calls
    for call in calls:
        assert call["type"] == "function"
    return message | {"calls": [(c["function"]["name"], c["function"]["arguments"]) for c in calls]}


CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (Plain, " <think> as it is ", {"content": " <think> as it is "}),
    (tagged, "just text \n", {"content": "just text \n"}),
    (tagged, "  a < b, <think> later", {"content": "  a < b, <think> later"}),
    (
        tagged,
        "<think>\nwhy\nso\n</think>\n\nyes\n",
        {"reasoning_content": "why\nso", "content": "yes\n"},
    ),
    (tagged, "\n<think>only this", {"reasoning_content": "only this", "content": None}),
    (tagged, "<think>\n\n</think>\n\nno reasons", {"content": "no reasons"}),
    (
        lambda: tagged(is_thinking=True),
        "so\n</think>\nyes",
        {"reasoning_content": "so", "content": "yes"},
    ),
    (lambda: tagged(thinks=False), "<think>a</think>", {"content": "<think>a</think>"}),
    (tagged, f"<tool_call>\n{CALL}\n</tool_call>", {"content": None, "calls": ONE}),
    (
        tagged,
        f"<think>t</think>I will.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
        {"reasoning_content": "t", "content": "I will.", "calls": ONE * 2},
    ),
    (
        tagged,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> and so',
        {"content": "and so", "calls": [("f", '{"a": 1}')]},
    ),
    (tagged, "<tool_call>{no json}</tool_call>.", {"content": "<tool_call>{no json}</tool_call>."}),
    (tagged, '<tool_call>{"name": 3, "argu', {"content": '<tool_call>{"name": 3, "argu'}),
    (
        tagged,
        '<tool_call>{"name": "f", "arguments": {"a": "cut',
        {"content": None, "calls": [("f", '{"a": "cut')]},
    ),
    (
        lambda: tagged(tools=False),
        f"<tool_call>{CALL}</tool_call>",
        {"content": f"<tool_call>{CALL}</tool_call>"},
    ),
    (JsonCalls, LLAMA, {"content": None, "calls": ONE}),
    (JsonCalls, f"<|python_tag|>{LLAMA}; {LLAMA}", {"content": None, "calls": ONE * 2}),
    (JsonCalls, " plain {text}", {"content": " plain {text}"}),
    (JsonCalls, '{"not": "a call"} at all', {"content": '{"not": "a call"} at all'}),
    (JsonCalls, '{"name": ', {"content": '{"name": '}),
    (JsonCalls, "", {"content": None}),
    (
        Harmony,
        "<|channel|>analysis<|message|>hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        {"reasoning_content": "hm.", "content": "Yes."},
    ),
    (
        Harmony,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
        {"reasoning_content": "hm", "content": None, "calls": ONE},
    ),
    (
        Harmony,
        f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.weather"
        f"<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        {"content": "First.", "calls": ONE},
    ),
    # After what is no call, another may come.
    (
        tagged,
        '<tool_call>{"a": 1}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        {"content": '<tool_call>{"a": 1}</tool_call>', "calls": [("f", "{}")]},
    ),
    # A name with an escape that JSON has not, or with half of a surrogate pair.
    (
        JsonCalls,
        '{"name": "\\q", "parameters": {}}',
        {"content": '{"name": "\\q", "parameters": {}}'},
    ),
    (
        JsonCalls,
        '{"name": "\\ud800", "parameters": {}}',
        {"content": '{"name": "\\ud800", "parameters": {}}'},
    ),
    (
        JsonCalls,
        '{"parameters": {"a": "\\ud800"}, "name": "f"}',
        {"content": None, "calls": [("f", '{"a": "\\ud800"}')]},
    ),
    # A model of Llama's family that thinks.
    (
        lambda: thinking_llama(is_thinking=False),
        f"<think>why</think>\n\n{LLAMA}; {LLAMA}",
        {"reasoning_content": "why", "content": None, "calls": ONE * 2},
    ),
    (
        lambda: thinking_llama(is_thinking=True),
        "why</think>\n\nno call ",
        {"reasoning_content": "why", "content": "no call "},
    ),
    (lambda: thinking_llama(is_thinking=False), LLAMA, {"content": None, "calls": ONE}),
    (
        lambda: thinking_llama(is_thinking=True),
        "only this",
        {"reasoning_content": "only this", "content": None},
    ),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_parts(make: Any, text: str, expected: dict[str, Any]):
    expected = {"calls": [], "content": None} | expected
    assert read(make(), [text]) == expected
    assert read(make(), list(text)) == expected


@given(st.sampled_from(CASES), st.data())
def test_pieces_of_any_size(case: Any, data: st.DataObject):
    make, text, expected = case
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, 9))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert read(make(), pieces) == {"calls": [], "content": None} | expected


WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel|>", "<|message|>"]
WORDS += [
    "<|end|>",
    "to=functions.f",
    '{"name": "f", "arguments": {',
    "}}",
    '"',
    "\\",
    " ",
    "\n",
    "x",
]


@given(st.lists(st.sampled_from(WORDS), max_size=25), st.integers(1, 7))
def test_any_text_is_read_alike_in_any_pieces(words: list[str], size: int):
    """And raises nothing; the arguments of a call that has ended are balanced."""
    text = "".join(words)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    thinks = partial(thinking_llama, is_thinking=False)
    for make in (tagged, JsonCalls, Harmony, lambda: tagged(is_thinking=True), thinks):
        assert read(make(), pieces) == read(make(), [text])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (tagged, "<tool_call>" + '{"name": "' + "\\" * 200_000),
        (tagged, "<tool_call>" + "{" * 200_000),
        (tagged, "<tool_call" * 20_000),
        (tagged, '<tool_call>{"name": "f", "arguments": {' + " " * 200_000),
        (JsonCalls, '{"name": "f"' + " " * 200_000),
        (Harmony, "<|channel|>" + "to=functions." * 20_000),
        (JsonCalls, " " * 200_000),
    ],
    ids=range(7),
)
def test_hostile_text_is_read_in_one_pass(make: Any, text: str):
    """A quadratic reader would take minutes over these."""
    reader = make()
    for i in range(0, len(text), 4):
        reader.push(text[i : i + 4])
    reader.finish()


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (Harmony, "<|channel|>analysis<|message|>a<|end|><|start|>assistant"),
        (tagged, '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
        (JsonCalls, '{"name":"f","parameters":{}};'),
    ],
    ids=["harmony", "hermes", "llama"],
)
def test_many_parts_that_come_at_once(make: Any, part: str, monkeypatch: pytest.MonkeyPatch):
    """What waits to be read is short, however long the text: each part that is taken away costs as
    much as what waits.
    """
    reader, waited = make(), []
    read_on = reader._read

    def watched(*, is_last: bool) -> Any:
        waited.append(len(reader._text))
        return read_on(is_last=is_last)

    monkeypatch.setattr(reader, "_read", watched)
    deltas = reader.push(part * 2000) + reader.finish()
    assert len(deltas) >= 2000 and max(waited) <= PIECE + len(part)


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_a_long_call_that_is_cut_off(size: int):
    """It is a call, however much of it comes at once: a head is looked for in what is first."""
    arguments = '{"a": "' + "x" * 3000
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}'
    found = read(tagged(), [text[i : i + size] for i in range(0, len(text), size)])
    assert found == {"content": None, "calls": [("weather", arguments)]}


def test_which_family_a_template_is_of():
    assert style_of("... <tool_call> ...") == "hermes"
    assert style_of("<|start|>assistant<|channel|>analysis") == "harmony"
    assert style_of('{"name": f, "parameters": p} {{ tools }}') == "llama"
    assert style_of("{{ message.content }}") == "none"
    assert json.loads(ARGUMENTS)["days"]
