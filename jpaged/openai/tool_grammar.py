"""Makes grammars for tool calls, in llguidance's dialect of Lark: whatever the model writes as a
call is a call of a tool that was offered, and its arguments follow that tool's schema. For models
that answer in channels, it also makes the grammar of an answer whose last channel has a certain
form.
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

# White space as templates write it in JSON: if any amount were allowed, a small model might write
# white space until its tokens run out.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = "/(.|\\n)*/"
SPACE = "/\\s{0,8}/"  # between calls; bounded for the same reason
# GPT-OSS's channels: messages that may come before the answer.
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
    """Return the grammar of an answer that may call these tools, or must call one if `needed`; None
    for a style without calls.

    many: whether there may be more than one call; a model with channels always makes one. thinks:
    whether reasoning may come first; is_thinking: whether the prompt has opened it.
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
    # White space after a call must not force the model to write another call.
    end = " /\\s{0,8}/" if style == "hermes" and needed and many else ""
    start = f"start: {thought}answer{end}"
    return "\n".join(["%llguidance {}", start, *body, any_call, *rules, ""])


def _tagged(*, needed: bool, many: bool) -> list[str]:
    """Return the rules of calls in tags: <tool_call> opens a call anywhere in the text."""
    tagged = 'tagged: "<tool_call>" call "</tool_call>"'
    if needed:
        more = f" ({SPACE} tagged)*" if many else ""
        return [f"answer: tagged{more}", tagged]
    opened = 'opened call "</tool_call>"'
    # If one call is allowed it ends the answer: text after it could look like another call.
    answer = f"({opened})* rest" if many else f"{opened} | rest"
    return [
        f"answer: {answer}",
        f'opened[lazy]: {TEXT} "<tool_call>"',
        f"rest: {TEXT}",
    ]


def _bare(*, needed: bool, many: bool) -> list[str]:
    """Return the rules of calls without tags: an answer that begins with a brace is one or more
    calls.
    """
    more = f' (";" {SPACE} call)*' if many else ""
    calls = f"calls: call{more}"
    if needed:
        return ["answer: calls", calls]
    return ["answer: calls | rest", calls, "rest: /([^{](.|\\n)*)?/"]


def _channels(tools: Sequence[dict[str, Any]], *, needed: bool) -> str:
    """Return the grammar of calls in channels: a message names its function before or after its
    channel.
    """
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
    """Return the grammar of an answer whose last channel has this form. Raises RequestError for an
    invalid form, and for a grammar, which cannot be embedded in another one.
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
        raise RequestError(
            "structured: 'grammar' is not supported where a model answers in channels"
        )
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
