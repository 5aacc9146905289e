"""Writes the answer to POST /v1/messages: its blocks as a whole, or as events while they grow."""

import json
from typing import Any, Literal

from jpaged.openai.parts import Delta, Reader
from jpaged.openai.server.events import total_usage
from jpaged.openai.server.wire import ApiError, encode
from jpaged.request.outputs import CompletionChunk, CompletionOutput, RequestOutput

Kind = Literal["thinking", "text", "tool_use"]
Event = tuple[str, dict[str, Any]]  # its type and its fields

# Anthropic's types of errors, by HTTP status.
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    """Return an error in Anthropic's form."""
    otherwise = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = ERRORS.get(error.status, otherwise)
    return encode({"type": "error", "error": {"type": kind, "message": str(error)}})


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream with an error."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


class Blocks:
    """The blocks of an answer, thoughts, texts and calls, in order. content: the blocks so far."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._open: Kind | None = None  # the kind of the last block, while it grows
        self._pieces: list[str] = []

    def push(self, delta: Delta) -> list[Event]:
        """Add a piece, and return its events."""
        events: list[Event] = []
        if text := delta.get("reasoning_content"):
            events += self._grow("thinking", {"type": "thinking_delta", "thinking": text}, text)
        if text := delta.get("content"):
            events += self._grow("text", {"type": "text_delta", "text": text}, text)
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                named = {"id": call["id"], "name": function["name"], "input": {}}
                events += self._begin("tool_use", named)
            if piece := function["arguments"]:
                events += self._grow(
                    "tool_use", {"type": "input_json_delta", "partial_json": piece}, piece
                )
        return events

    def finish(self) -> list[Event]:
        """End the answer, which has at least one block."""
        begun = [] if self.content else self._begin("text", {"text": ""})
        return begun + self._end()

    def _begin(self, kind: Kind, fields: dict[str, Any]) -> list[Event]:
        ended = self._end()
        block = {"type": kind, **fields}
        self.content.append(block)
        self._open, self._pieces = kind, []
        start = {"index": len(self.content) - 1, "content_block": dict(block)}
        return [*ended, ("content_block_start", start)]

    def _grow(self, kind: Kind, delta: dict[str, Any], text: str) -> list[Event]:
        empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
        begun = [] if self._open == kind else self._begin(kind, empty.get(kind, {}))
        self._pieces.append(text)
        return [*begun, ("content_block_delta", {"index": len(self.content) - 1, "delta": delta})]

    def _end(self) -> list[Event]:
        if self._open is None:
            return []
        block, whole, index = self.content[-1], "".join(self._pieces), len(self.content) - 1
        events: list[Event] = []
        if self._open == "tool_use":
            block["input"] = _input(whole)
        else:
            block[self._open] = whole
        if self._open == "thinking":  # nobody but this server checks what it wrote, so it is empty
            delta = {"type": "signature_delta", "signature": ""}
            events.append(("content_block_delta", {"index": index, "delta": delta}))
        self._open = None
        return [*events, ("content_block_stop", {"index": index})]


class MessageEvents:
    """One answer of /v1/messages, as server-sent events or as a whole. prompt_tokens: those of the
    prompt, which the first event has.
    """

    def __init__(self, *, name: str, model: str, reader: Reader, prompt_tokens: int):
        self._name, self._model, self._reader = name, model, reader
        self._prompt_tokens = prompt_tokens
        self._blocks = Blocks()
        self._has_begun = False

    def pieces(self, prompt: int, chunk: CompletionChunk) -> bytes:
        """Return the events of a chunk: none if there is nothing to send yet."""
        events = self._begun()
        deltas = self._reader.push(chunk.text_delta) if chunk.text_delta else []
        if chunk.finish_reason:
            deltas = deltas + self._reader.finish()
        for delta in deltas:
            events += self._blocks.push(delta)
        return _written(events)

    def end(self, outputs: list[RequestOutput]) -> bytes:
        """Return the events after the last chunk."""
        [done] = outputs[0].outputs
        events = self._begun() + self._blocks.finish()
        changed = {"delta": self._ending(done), "usage": _usage(outputs)}
        return _written([*events, ("message_delta", changed), ("message_stop", {})])

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        [done] = output.outputs
        for delta in [*self._reader.push(done.text or ""), *self._reader.finish()]:
            self._blocks.push(delta)
        self._blocks.finish()
        return self._message(self._ending(done), _usage([output]))

    def _begun(self) -> list[Event]:
        """Return the events before the first piece."""
        if self._has_begun:
            return []
        self._has_begun = True
        usage = {
            "input_tokens": self._prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        ending = {"stop_reason": None, "stop_sequence": None}
        return [("message_start", {"message": self._message(ending, usage)}), ("ping", {})]

    def _message(self, ending: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks.content),
            **ending,
            "usage": usage,
        }

    def _ending(self, done: CompletionOutput) -> dict[str, Any]:
        """Return why the answer ended."""
        stopped_by = done.stop_reason if isinstance(done.stop_reason, str) else None
        if done.finish_reason == "length":
            reason, stopped_by = "max_tokens", None
        elif self._reader.calls:
            reason, stopped_by = "tool_use", None
        else:
            reason = "end_turn" if stopped_by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped_by}


def _input(arguments: str) -> dict[str, Any]:
    """Return the input of a tool. One that was cut off within is kept as its text."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}


def _usage(outputs: list[RequestOutput]) -> dict[str, int]:
    """Return the tokens used; those of the prompt that the cache had are counted apart."""
    total = total_usage(outputs)
    cached = total["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": total["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": total["completion_tokens"],
    }


def _written(events: list[Event]) -> bytes:
    """Return events as bytes, each named by its type."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
        for kind, fields in events
    )
