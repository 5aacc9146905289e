"""Calls of tools as a grammar, in llguidance's Lark: what a model writes as a call is one, of a
tool that was offered, with arguments of its schema.
"""

import json
from collections.abc import Sequence
from typing import Any

from jpaged.openai.parts import Style

# As templates write JSON: with any white space a small model may write nothing else to the end.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = "/(.|\\n)*/"


def tool_grammar(
    tools: Sequence[dict[str, Any]],
    *,
    style: Style,
    needed: bool,
    many: bool,
    thinks: bool = False,
    is_thinking: bool = False,
) -> str | None:
    """The grammar of an answer that may call these tools, or must where they are `needed`; None for
    a style that has none.

    many: whether more than one call may come. thinks: reasoning may come first; is_thinking: it
    has begun in the prompt.
    """
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
        rules.append(f"thought: {opening}thinking /\\s*/")
        rules.append(f'thinking[lazy]: {TEXT} "</think>"')
    return "\n".join(["%llguidance {}", f"start: {thought}answer", *body, any_call, *rules, ""])


def _tagged(*, needed: bool, many: bool) -> list[str]:
    """<tool_call> opens a call wherever it comes in a text."""
    tagged = 'tagged: "<tool_call>" call "</tool_call>"'
    if needed:
        more = " (/\\s*/ tagged)*" if many else ""
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
    more = ' (";" /\\s*/ call)*' if many else ""
    calls = f"calls: call{more}"
    if needed:
        return ["answer: calls", calls]
    return ["answer: calls | rest", calls, "rest: /([^{](.|\\n)*)?/"]


def _call(function: dict[str, Any], style: Style) -> str:
    name = json.dumps(function["name"])
    key = "parameters" if style == "llama" else "arguments"
    space = "/\\n?/" if style == "hermes" else ""
    opening = json.dumps(f'{{"name": {name}, "{key}": ')
    schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": WRITTEN}
    return f'{space} {opening} %json {json.dumps(schema)} "}}" {space}'
