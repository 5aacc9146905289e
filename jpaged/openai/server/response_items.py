"""Writes the answer to POST /v1/responses: its items as a whole, or as events while they grow."""

import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

from jpaged.openai.parts import Delta, Reader
from jpaged.openai.server.events import total_usage
from jpaged.openai.server.response_bodies import ResponseBody
from jpaged.openai.server.wire import encode
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.sampling_params import SamplingParams

Kind = Literal["reasoning", "message", "function_call"]
Event = tuple[str, dict[str, Any]]  # its type and its fields

PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
PART = {"reasoning": "reasoning_text", "message": "output_text"}


class Items:
    """The items of an answer: reasoning, messages and calls, in order. output: the items so far."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: Kind | None = None  # the kind of the last item, while it grows
        self._pieces: list[str] = []

    def push(self, delta: Delta) -> list[Event]:
        """Add a piece, and return its events."""
        events: list[Event] = []
        if text := delta.get("reasoning_content"):
            events += self._grow("reasoning", text)
        if text := delta.get("content"):
            events += self._grow("message", text)
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                named = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                events += self._begin("function_call", named)
            if function["arguments"]:
                events += self._grow("function_call", function["arguments"])
        return events

    def finish(self, *, is_whole: bool) -> list[Event]:
        """End the answer. is_whole: whether the last item is complete, or was cut off. An answer
        has at least one item.
        """
        begun = [] if self.output else self._begin("message", {})
        return begun + self._end("completed" if is_whole else "incomplete")

    @property
    def _where(self) -> dict[str, Any]:
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return place if self._open == "function_call" else place | {"content_index": 0}

    def _begin(self, kind: Kind, more: dict[str, Any]) -> list[Event]:
        ended = self._end("completed")
        item = {"id": f"{PREFIX[kind]}_{secrets.token_hex(12)}", "type": kind, **more}
        if kind == "reasoning":
            item |= {"summary": [], "content": []}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        item["status"] = "in_progress"
        self.output.append(item)
        self._open, self._pieces = kind, []
        # A copy, since the item grows.
        added = {"output_index": len(self.output) - 1, "item": dict(item)}
        events = [*ended, ("response.output_item.added", added)]
        if kind != "function_call":
            told = self._where | {"part": self._part("")}
            events.append(("response.content_part.added", told))
        return events

    def _grow(self, kind: Kind, text: str) -> list[Event]:
        begun = [] if self._open == kind else self._begin(kind, {})
        self._pieces.append(text)
        return [*begun, (f"{self._stem}.delta", self._where | {"delta": text} | self._logprobs)]

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, whole, place = self.output[-1], "".join(self._pieces), self._where
        events: list[Event]
        if self._open == "function_call":
            item["arguments"] = whole
            events = [(f"{self._stem}.done", place | {"arguments": whole, "name": item["name"]})]
        else:
            item["content"] = [self._part(whole)]
            events = [(f"{self._stem}.done", place | {"text": whole} | self._logprobs)]
            events.append(("response.content_part.done", place | {"part": self._part(whole)}))
        item["status"] = status
        self._open = None
        done = {"output_index": place["output_index"], "item": item}
        return [*events, ("response.output_item.done", done)]

    @property
    def _stem(self) -> str:
        stems = {"reasoning": "reasoning_text", "message": "output_text"}
        return f"response.{stems.get(self._open or '', 'function_call_arguments')}"

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._open == "message" else {}

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        part = {"type": PART[self._open], "text": text}
        return part | {"annotations": [], "logprobs": []} if self._open == "message" else part


class ResponseEvents:
    """One answer of /v1/responses, as server-sent events or as a whole.

    count: returns the tokens of a text, to count those of the reasoning. keep: gets the answer once
    it has ended, if it is to be kept.
    """

    def __init__(
        self,
        *,
        asked: ResponseBody,
        params: SamplingParams,
        name: str,
        model: str,
        reader: Reader,
        count: Callable[[str], int],
        keep: Callable[[dict[str, Any]], None] | None = None,
    ):
        self._asked, self._params, self._reader, self._count = asked, params, reader, count
        self._head = {"id": f"resp_{name}", "object": "response", "created_at": int(time.time())}
        self._model = model
        self._items, self._keep = Items(), keep
        self._number = 0

    def pieces(self, prompt: int, chunk: CompletionChunk) -> bytes:
        """Return the events of a chunk: none if there is nothing to send yet."""
        events = self._begun()
        deltas = self._reader.push(chunk.text_delta) if chunk.text_delta else []
        if chunk.finish_reason:
            deltas = deltas + self._reader.finish()
        for delta in deltas:
            events += self._items.push(delta)
        return self._written(events)

    def end(self, outputs: list[RequestOutput]) -> bytes:
        """Return the events after the last chunk."""
        [done] = outputs[0].outputs
        is_whole = done.finish_reason != "length"
        events = self._begun() + self._items.finish(is_whole=is_whole)
        status = "completed" if is_whole else "incomplete"
        response = self._ended(status, outputs)
        return self._written([*events, (f"response.{status}", {"response": response})])

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        [done] = output.outputs
        is_whole = done.finish_reason != "length"
        for delta in [*self._reader.push(done.text or ""), *self._reader.finish()]:
            self._items.push(delta)
        self._items.finish(is_whole=is_whole)
        return self._ended("completed" if is_whole else "incomplete", [output])

    def _ended(self, status: str, outputs: list[RequestOutput]) -> dict[str, Any]:
        response = self._response(status, outputs)
        if self._keep is not None:
            self._keep(response)
        return response

    def _begun(self) -> list[Event]:
        """Return the events before the first piece."""
        if self._number:
            return []
        response = {"response": self._response("in_progress", None)}
        return [("response.created", response), ("response.in_progress", response)]

    def _written(self, events: list[Event]) -> bytes:
        text = b""
        for kind, said in events:
            body = encode({"type": kind, "sequence_number": self._number} | said)
            text += b"event: %b\ndata: %b\n\n" % (kind.encode(), body)
            self._number += 1
        return text

    def _response(self, status: str, outputs: list[RequestOutput] | None) -> dict[str, Any]:
        asked, form = self._asked, self._asked.text.format
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": cut_off,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self._model,
            "output": [] if outputs is None else self._items.output,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": getattr(asked, "previous_response_id", None),
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "store": self._keep is not None,
            "temperature": self._params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": asked.tool_choice,
            "tools": [{"parameters": None, "strict": None} | tool for tool in asked.tools],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": None if outputs is None else self._usage(outputs),
        }

    def _usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        total = total_usage(outputs)
        thought = sum(
            self._count(part["text"])
            for item in self._items.output
            if item["type"] == "reasoning"
            for part in item["content"]
        )
        return {
            "input_tokens": total["prompt_tokens"],
            "input_tokens_details": total["prompt_tokens_details"],
            "output_tokens": total["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": total["total_tokens"],
        }
