"""The grammar of calls lets through what the reader reads as calls of these tools, no others."""

from typing import Any

import pytest

from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.errors import RequestError
from jpaged.openai.parts import Format, folded
from jpaged.openai.tool_grammar import form_of_channels, tool_grammar

pytest.importorskip("llguidance", reason="pip install 'jpaged[structured]'")
import llguidance  # pyright: ignore[reportMissingImports]
import llguidance.hf  # pyright: ignore[reportMissingImports]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "weather", "parameters": SCHEMA}},
    {"function": {"name": "any"}},
]
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
LLAMA = CALL.replace("arguments", "parameters")
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
FREE: dict[str, Any] = {"style": "hermes", "needed": False, "many": True}
NEEDED = FREE | {"needed": True}
FREE_LLAMA = FREE | {"style": "llama"}
THINKS = NEEDED | {"thinks": True}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL_PATH)


def accepted(tokenizer: Any, text: str, how: dict[str, Any]) -> tuple[str, bool]:
    """How much of a text may come, and whether it may end there."""
    vocabulary = llguidance.hf.from_tokenizer(tokenizer)
    matcher = llguidance.LLMatcher(vocabulary, tool_grammar(TOOLS, **how) or "", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text)
    count = matcher.try_consume_tokens(ids)
    return tokenizer.decode(ids[:count]), matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "how", "calls"),
    [
        ("just text <b", FREE, 0),
        (f"x\n{TAGGED}", FREE, 1),
        (f"<tool_call>{CALL}</tool_call>\n{TAGGED} and", FREE, 2),
        ('<tool_call>\n{"name": "any", "arguments": {"city": 3}}\n</tool_call>', FREE, 1),
        (TAGGED, FREE | {"many": False}, 1),
        (f"{TAGGED}\n{TAGGED}", NEEDED, 2),
        (f"<think>a <b> c</think>\n\n{TAGGED}", THINKS, 1),
        (TAGGED, THINKS, 1),
        (f"so</think>{TAGGED}", THINKS | {"is_thinking": True}, 1),
        (LLAMA, FREE_LLAMA, 1),
        (f"{LLAMA}; {LLAMA}", FREE_LLAMA, 2),
        ("text {", FREE_LLAMA, 0),
    ],
)
def test_what_may_come(tokenizer: Any, text: str, how: dict[str, Any], calls: int):
    assert accepted(tokenizer, text, how) == (text, True)
    format = Format(style=how["style"], thinks=how.get("thinks", False))
    reader = format.reader("<think>" if how.get("is_thinking") else "", tools=True)
    message = folded(reader.push(text) + reader.finish())
    assert len(message.get("tool_calls", [])) == reader.calls == calls


@pytest.mark.parametrize(
    ("text", "how", "until"),
    [
        ('<tool_call>\n{"name": "other"', FREE, '<tool_call>\n{"name": "'),
        (TAGGED.replace('"Rome"', "3"), FREE, '<tool_call>\n{"name": "weather", "arguments": {"c'),
        ("text", NEEDED, ""),
        (f"{TAGGED} more", NEEDED, TAGGED),
        (f"{TAGGED}\n{TAGGED}", NEEDED | {"many": False}, TAGGED),
        (f"{TAGGED}\n{TAGGED}", FREE | {"many": False}, TAGGED),
        ('{"a"', FREE_LLAMA, "{"),
        ("no", FREE_LLAMA | {"needed": True}, ""),
    ],
)
def test_what_may_not(tokenizer: Any, text: str, how: dict[str, Any], until: str):
    found, _ = accepted(tokenizer, text, how)
    assert found != text and found.startswith(until)


MARKS = ("channel", "message", "start", "end", "call", "return", "constrain")
ASIDE = "<|channel|>analysis<|message|>so <b {<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ARGUMENTS = '{"city": "Rome"}'


@pytest.fixture(scope="module")
def channels() -> Any:
    """A tokenizer with GPT-OSS's marks; the last of a message end it."""
    tokenizer = load_tokenizer(MODEL_PATH)
    marks = [f"<|{name}|>" for name in MARKS]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def channels_accept(tokenizer: Any, text: str, grammar: str) -> tuple[str, bool]:
    ends = tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, eos_token=ends)
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = matcher.try_consume_tokens(ids)
    return tokenizer.decode(ids[:count]), matcher.is_accepting()


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}", 1),
        (f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}", 1),
        (f'{ASIDE} to=functions.any<|channel|>commentary<|message|>{{"x": [1]}}', 1),
        (f"{ASIDE}{ASIDE}{FINAL}Sunny.", 0),
        (f"{FINAL}text", 0),
    ],
)
def test_channels(channels: Any, text: str, calls: int, needed: bool):
    grammar = tool_grammar(TOOLS, style="harmony", needed=needed, many=True)
    found = channels_accept(channels, text, grammar or "")
    assert (found == (text, True)) == (calls > 0 or not needed)
    reader = Format(style="harmony", thinks=False).reader("", tools=True)
    message = folded(reader.push(text) + reader.finish())
    assert len(message.get("tool_calls", [])) == reader.calls == calls
    if ARGUMENTS in text:
        assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("<|channel|>commentary to=functions.other", "<|channel|>commentary to=functions."),
        (' to=functions.weather<|channel|>commentary<|message|>{"town', None),
        (f" to=functions.weather<|channel|>commentary<|message|>{ARGUMENTS} and", None),
        ("text", ""),
        (f"{ASIDE}text", ASIDE),
    ],
)
def test_what_may_not_come_in_channels(channels: Any, text: str, until: str | None):
    grammar = tool_grammar(TOOLS, style="harmony", needed=False, many=True)
    found, _ = channels_accept(channels, text, grammar or "")
    assert len(found) < len(text) and (until is None or found == until)


def test_a_form_is_that_of_the_last_channel(channels: Any):
    forms: list[tuple[dict[str, Any], str, str]] = [
        ({"json_schema": SCHEMA, "disable_any_whitespace": True}, '{"city":"Rome"}', '{"a'),
        ({"json_schema": '{"type": "boolean"}'}, "true", "maybe"),
        ({"json_object": True}, '{"a": 1}', "[1]"),
        ({"choice": ["yes", 'say "no"']}, 'say "no"', "perhaps"),
        ({"regex": "[0-9]+/[0-9]+"}, "12/7", "12-7"),
    ]
    for form, right, wrong in forms:
        grammar = form_of_channels(form)["grammar"]
        for before in ("", ASIDE):
            text = before + FINAL + right
            assert channels_accept(channels, text, grammar) == (text, True)
            found, is_whole = channels_accept(channels, before + FINAL + wrong, grammar)
            assert found.startswith(before + FINAL) and not is_whole
            assert len(found) < len(before + FINAL + wrong)
    for bad in ({"grammar": 'start: "a"'}, {"json_schema": "{"}, {}, {"choice": []}):
        with pytest.raises(RequestError, match="structured"):
            form_of_channels(bad)


def test_white_space_of_a_form_in_channels_is_bounded(channels: Any):
    """As anywhere else; the schema's own options win."""
    own = {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]{1,9}"}}
    for form, most in (({"json_object": True}, 1), ({"json_schema": own}, 9)):
        grammar = form_of_channels(form)["grammar"]
        for count in (0, most, most + 1, 40):
            text = f'{FINAL}{{"a":{" " * count}1}}'
            assert channels_accept(channels, text, grammar)[1] == (count <= most), count
    compact = form_of_channels({"json_schema": own, "disable_any_whitespace": True})["grammar"]
    assert not channels_accept(channels, FINAL + '{"a": 1}', compact)[1]
    for bad in ({"json_schema": {"x-guidance": 3}}, {"json_schema": "[1]"}):
        with pytest.raises(RequestError, match=r"^structured: json_schema: "):
            form_of_channels(bad)


def test_white_space_of_calls_is_bounded(tokenizer: Any):
    for space, whole in (("", True), (" " * 8, True), (" " * 9, False), ("\n" * 40, False)):
        for text, how in (
            (f"{TAGGED}{space}{TAGGED}", NEEDED),
            (f"<think>a</think>{space}{TAGGED}", THINKS),
            (f"{LLAMA};{space}{LLAMA}", FREE_LLAMA | {"needed": True}),
        ):
            assert (accepted(tokenizer, text, how) == (text, True)) == whole


def test_a_tool_may_say_how_its_arguments_are_written(tokenizer: Any):
    """A schema's x-guidance wins over what templates write."""

    def may_be(arguments: str, guidance: Any) -> bool:
        parameters = SCHEMA | ({} if guidance is None else {"x-guidance": guidance})
        tools = [{"function": {"name": "weather", "parameters": parameters}}]
        grammar = tool_grammar(tools, style="hermes", needed=True, many=True)
        matcher = llguidance.LLMatcher(llguidance.hf.from_tokenizer(tokenizer), grammar or "")
        head = '<tool_call>\n{"name": "weather", "arguments": '
        ids = tokenizer.encode(head + arguments + "}\n</tool_call>")
        return matcher.try_consume_tokens(ids) == len(ids)

    written, spaced = '{"city": "Rome"}', '{  "city":   "Rome"}'
    assert may_be(written, None) and not may_be(spaced, None)
    own = {"whitespace_flexible": True, "key_separator": ":"}
    assert may_be(written, own) and may_be(spaced, own)
    with pytest.raises(RequestError, match="tool weather: x-guidance=3: must be"):
        may_be(written, 3)
