"""The grammar of calls lets through what the reader reads as calls of these tools, no others."""

from typing import Any

import pytest

from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.openai.parts import Format, folded
from jpaged.openai.tool_grammar import tool_grammar

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


def test_channels_have_none():
    assert tool_grammar(TOOLS, style="harmony", needed=False, many=True) is None
