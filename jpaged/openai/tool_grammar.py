"""Calls of tools as a grammar, in llguidance's Lark: what a model writes as a call is one, of a
tool that was offered, with arguments of its schema. And answers of a form where a model has
channels: the form is that of the last one's text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError
from jpaged.openai.parts import Style
from jpaged.structured.spec import (
    COMPACT,
    GUIDANCE,
    check,
    error,
    guidance_of,
    kind_of,
    own_guidance,
    schema_text,
)

# As templates write JSON: with any white space a small model may write nothing else to the end.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = "/(.|\\n)*/"
SPACE = "/\\s{0,8}/"  # between calls; bounded, since a model may write nothing else to the end
# Of GPT-OSS's channels: what comes before the answer, each ended by a message of its own.
ASIDES = [
    'asides: (aside <|end|> <|start|> "assistant")*',
    "aside: <|channel|> /analysis|commentary/ <|message|> text",
    f"text: {TEXT}",
]
FINAL = '<|channel|> "final" <|message|>'


def tool_grammar(
    tools: Sequence[dict[str, Any]],
    *,
    style: Style,
    needed: bool,
    many: bool,
    thinks: bool = False,
    is_thinking: bool = False,
) -> str | None:
    """Return the grammar of an answer that may call these tools, or must where they are `needed`;
    None for a style that has none.

    many: whether more than one call may come; where a model has channels, one ends the answer.
    thinks: reasoning may come first; is_thinking: it has begun in the prompt.
    """
    if style == "harmony":
        return _channels(tools, needed=needed)
    rules = [f"call_{i}: {_call(tool['function'], style)}" for i, tool in enumerate(tools)]
    any_call = "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))
    if style == "hermes":
        body = _tagged(needed=needed, many=many)
    elif style == "llama":
        body = _bare(needed=needed, many=many)
    else:
        return None
    thought = ""
    if needed and (thinks or is_thinking):
        thought = "thought " if is_thinking else "thought? "
        opening = "" if is_thinking else '"<think>" '
        rules.append(f"thought: {opening}thinking {SPACE}")
        rules.append(f'thinking[lazy]: {TEXT} "</think>"')
    # White space after a call must not oblige the model to another one.
    end = " /\\s{0,8}/" if style == "hermes" and needed and many else ""
    start = f"start: {thought}answer{end}"
    return "\n".join(["%llguidance {}", start, *body, any_call, *rules, ""])


def _tagged(*, needed: bool, many: bool) -> list[str]:
    """<tool_call> opens a call wherever it comes in a text."""
    tagged = 'tagged: "<tool_call>" call "</tool_call>"'
    if needed:
        more = f" ({SPACE} tagged)*" if many else ""
        return [f"answer: tagged{more}", tagged]
    opened = 'opened call "</tool_call>"'
    # Where one may come it ends the answer: what followed could read as another.
    answer = f"({opened})* rest" if many else f"{opened} | rest"
    return [
        f"answer: {answer}",
        f'opened[lazy]: {TEXT} "<tool_call>"',
        f"rest: {TEXT}",
    ]


def _bare(*, needed: bool, many: bool) -> list[str]:
    """An answer that begins with a brace is a call, or several."""
    more = f' (";" {SPACE} call)*' if many else ""
    calls = f"calls: call{more}"
    if needed:
        return ["answer: calls", calls]
    return ["answer: calls | rest", calls, "rest: /([^{](.|\\n)*)?/"]


def _channels(tools: Sequence[dict[str, Any]], *, needed: bool) -> str:
    """A message goes to a function by what is before its channel, or beside it."""
    calls = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        to = json.dumps(f" to=functions.{function['name']}")
        head = f"({to} <|channel|> channel | <|channel|> channel {to})"
        calls.append(f"call_{i}: {head} kind <|message|> {_arguments(function)}")
    ends = "call" if needed else f"call | aside | {FINAL} text"
    rules = [
        "%llguidance {}",
        f"start: asides ({ends})",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
        *calls,
        "channel: /commentary|analysis/",
        'kind: / ?(json|code)?/ | / ?/ <|constrain|> "json"',
        *ASIDES,
    ]
    return "\n".join([*rules, ""])


def form_of_channels(structured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of an answer whose last channel has a text of this form. RequestError where
    it is none, and for a grammar, which cannot be a part of another.
    """
    check(structured)
    kind = kind_of(structured)
    value = structured[kind]
    if kind in ("json_schema", "json_object"):
        try:
            schema = json.loads(schema_text(value)) if kind == "json_schema" else {"type": "object"}
            options = guidance_of(schema, compact=bool(structured.get(COMPACT)))
        except (ValueError, RecursionError) as e:
            raise error(kind, e) from e
        if not isinstance(schema, dict):
            raise error(kind, f"{schema!r}: must be an object")
        text = f"%json {json.dumps({**schema, GUIDANCE: options})}"
    elif kind == "choice":
        text = f"({' | '.join(map(json.dumps, value))})"
    elif kind == "regex":
        text = "/" + value.replace("/", "\\/").replace("\n", "\\n") + "/"
    else:
        raise RequestError("structured: grammar: not with a model that answers in channels")
    rules = ["%llguidance {}", f"start: asides {FINAL} form", f"form: {text}", *ASIDES, ""]
    return {"grammar": "\n".join(rules)}


def _arguments(function: dict[str, Any]) -> str:
    schema = {"type": "object", **(function.get("parameters") or {})}
    try:
        guidance = own_guidance(schema)
    except ValueError as e:
        raise error("json_schema", f"tool {function['name']}: {e}") from e
    return f"%json {json.dumps({**schema, GUIDANCE: {**WRITTEN, **guidance}})}"


def _call(function: dict[str, Any], style: Style) -> str:
    name = json.dumps(function["name"])
    key = "parameters" if style == "llama" else "arguments"
    space = "/\\n?/" if style == "hermes" else ""
    opening = json.dumps(f'{{"name": {name}, "{key}": ')
    return f'{space} {opening} {_arguments(function)} "}}" {space}'
