"""Checks of single fields of a line: a bool is not an integer, NaN is not a number, null is "not
given".
"""

import json
import math
from collections.abc import Callable
from typing import Any

# Arguments of apply_chat_template that are no variables of a template: templates come from the
# tokenizer only.
RESERVED = {
    "conversation",
    "chat_template",
    "tools",
    "documents",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "messages",
}


class LineError(Exception):
    """One line that cannot run: why, and which field. `code` is for programs that read the error
    line.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code


def take(
    fields: dict[str, Any], name: str, check: Callable[[Any], Any], default: Any = None
) -> Any:
    """Remove a field and return its checked value; the default where it is absent or null."""
    value = fields.pop(name, None)
    if value is None:
        return default
    try:
        return check(value)
    except ValueError as e:
        raise LineError(f"{name}={short(value)}: {e}", param=name) from None


def take_sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of SamplingParams that the line sets; their ranges are SamplingParams' to
    judge.
    """
    values = {name: take(fields, name, check) for name, check in SAMPLING.items() if name in fields}
    return {name: value for name, value in values.items() if value is not None}


def integer(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("must be an integer of at most 64 bits")
    return value


def number(value: Any) -> float:
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError("must be a finite number")


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def string(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("must be a string")
    return value


def obj(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


def template_kwargs(value: Any) -> dict[str, Any]:
    if taken := sorted(RESERVED & set(obj(value))):
        raise ValueError(f"{taken[0]!r} is not a variable that a line may set")
    return value


def integers(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must be a list of integers")
    return [integer(v) for v in value]


def truncation(value: Any) -> int:
    if integer(value) < -1 or value == 0:
        raise ValueError(
            "must be a positive integer, or -1 for as many tokens as leave room for the answer"
        )
    return value


def stop_strings(value: Any) -> str | list[str]:
    if not isinstance(value, str) and not (
        isinstance(value, list) and all(isinstance(v, str) for v in value)
    ):
        raise ValueError("must be a string or a list of strings")
    return value


def logit_bias(value: Any) -> dict[int, float]:
    for key in obj(value):
        if not (key.isascii() and key.isdecimal()):
            raise ValueError(f"{short(key)} is not a token id")
    return {int(key): number(bias) for key, bias in value.items()}


def prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # OpenAI's list of prompts, with one in it
    if isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(v, str | list) for v in value):
        raise ValueError("one prompt a line: write one line for each")
    return integers(value)


def messages(value: Any) -> list[dict[str, Any]]:
    """A conversation; its tool calls and their results are the chat template's to write."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    return [_message(i, message) for i, message in enumerate(value)]


def _message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"message {i} is not an object")
    if not isinstance(role := message.get("role"), str) or not role:
        raise ValueError(f"message {i} has no role")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        if not all(
            isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
            for p in content
        ):
            raise ValueError(f"message {i} has a part that is not text")
        content = "\n".join(part["text"] for part in content)
    if content is None and role == "assistant" and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"message {i} has no content")
    extra = {
        k: v
        for k, v in message.items()
        if k not in ("role", "content", "tool_calls") and v is not None
    }
    for key, text in extra.items():
        if key not in ("name", "reasoning_content", "tool_call_id") or not isinstance(text, str):
            raise ValueError(f"message {i}: {short(key)} is not supported")
    if calls:
        extra["tool_calls"] = _tool_calls(i, calls)
    return {"role": role, "content": content, **extra}


def _tool_calls(i: int, calls: Any) -> list[dict[str, Any]]:
    """Calls that a model once made, their arguments as the object that templates write, not as its
    JSON.
    """
    made = []
    for call in calls if isinstance(calls, list) else [None]:
        call = call if isinstance(call, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {i} has a tool call without a function's name")
        given = function.get("arguments")
        try:
            arguments = json.loads(given) if isinstance(given, str) and given else given or {}
        except ValueError:
            raise ValueError(f"message {i} has a tool call whose arguments are not JSON") from None
        if not isinstance(arguments, dict):
            raise ValueError(f"message {i} has a tool call whose arguments are no object")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def tools(value: Any) -> list[dict[str, Any]]:
    """Functions that the chat template describes to the model."""
    named = isinstance(value, list) and all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) for t in value
    )
    if not named:
        raise ValueError("must be a list of functions")
    return value


SAMPLING: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), number),
    **dict.fromkeys(
        ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), integer
    ),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), boolean),
    "stop": stop_strings,
    "stop_token_ids": integers,
    "logit_bias": logit_bias,
    "logprobs_mode": string,
}


def short(value: Any) -> str:
    """A value for a message, cut in the middle when it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}"


def json_object(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        line = json.loads(text, parse_constant=refuse)
        if "\\u" in text:
            json.dumps(
                line, ensure_ascii=False
            ).encode()  # half of a surrogate pair: no tokenizer takes it
    except UnicodeEncodeError:
        raise LineError(
            "a string holds a lone surrogate, which is no text", code="invalid_encoding"
        ) from None
    except (ValueError, RecursionError) as e:
        raise LineError(f"not JSON: {e}", code="invalid_json") from None
    if not isinstance(line, dict):
        raise LineError(f"{short(line)} is not a JSON object", code="invalid_json")
    return line
