"""Writes a whole answer as JSON in parts: a long answer takes many short turns of the event loop,
not one long one.
"""

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any

from jpaged.openai import responses
from jpaged.openai.parts import Reader, folded
from jpaged.openai.server.asked import Asked
from jpaged.openai.server.begun import drawn_alone
from jpaged.openai.server.bodies import ServedCompletion
from jpaged.openai.server.echo import put_prompt
from jpaged.openai.server.events import total_usage
from jpaged.openai.server.wire import encode
from jpaged.request.outputs import RequestOutput

PART_BYTES = 1 << 17  # about as much as one turn makes, which takes some milliseconds
ITEMS_AT_ONCE = 16  # items of a long list that one call encodes without interruption


class WholeAnswer:
    """The body of an answer that is not a stream, with the choices of all prompts one after the
    other.

    is_ended: whether `next` has returned the last part.
    """

    def __init__(self, asked: Asked, outputs: list[RequestOutput]):
        self._asked, self._outputs = asked, outputs
        self._pieces: Iterator[bytes] | None = None
        self.is_ended = False

    def next(self, llm: Any) -> bytes:
        """Return the next part. llm: the LLM, whose tokenizer is needed."""
        if self._pieces is None:
            self._pieces = self._body(llm)
        part, size = list[bytes](), 0
        for piece in self._pieces:
            part.append(piece)
            size += len(piece)
            if size >= PART_BYTES:
                return b"".join(part)
        self.is_ended = True
        return b"".join(part)

    def _body(self, llm: Any) -> Iterator[bytes]:
        asked, outputs = self._asked, self._outputs
        usage = total_usage(outputs)
        if asked.begun:
            outputs = self._outputs = [drawn_alone(output, asked.begun) for output in outputs]
        make: Any = responses.chat_completion if asked.body.is_chat else responses.completion
        only_prompt = isinstance(asked.body, ServedCompletion) and asked.body.only_prompt
        head = make(
            dataclasses.replace(outputs[0], outputs=[], prompt_logprobs=None),
            asked.form,
            **asked.how,
        )
        head["usage"] = total_usage(outputs, generated=False) if only_prompt else usage
        # The fields of a single prompt stand beside the choices; of several prompts, in the first
        # choice of each.
        of_prompt = [self._of_prompt(output) for output in outputs]
        if len(outputs) == 1:
            head |= of_prompt[0]
        else:
            head.pop("prompt_token_ids", None)
        yield b"{"
        for name, value in head.items():
            begin = b"" if name == "id" else b","
            if name == "choices":
                yield begin + b'"choices":['
                yield from self._choices(llm, make, of_prompt, only_prompt=only_prompt)
                yield b"]"
            else:
                yield begin + encode(name) + b":"
                yield from json_pieces(value)
        yield b"}"

    def _choices(
        self, llm: Any, make: Any, of_prompt: list[dict[str, Any]], *, only_prompt: bool
    ) -> Iterator[bytes]:
        """Yield the JSON of the choices, which are made one at a time."""
        asked, index = self._asked, 0
        for i, output in enumerate(self._outputs):
            for done in output.outputs:
                one = dataclasses.replace(output, outputs=[done], prompt_logprobs=None)
                choice = make(one, asked.form, **asked.how)["choices"][0]
                choice["index"] = index
                if asked.body.is_chat:
                    read_parts(choice, asked.reader())
                if asked.echo is not None:
                    texts = {"text": asked.echo[i], "only_prompt": only_prompt}
                    put_prompt(llm, choice, output, asked.form, **texts)
                if len(self._outputs) > 1 and done is output.outputs[0]:
                    choice |= of_prompt[i]
                yield b"," if index else b""
                yield from json_pieces(choice)
                index += 1

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields about a prompt that the request asked for; its logprobs are made while
        they are written.
        """
        parts: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            parts["prompt_logprobs"] = responses.each_prompt_logprobs(output)
        if self._asked.form.token_ids:
            parts["prompt_token_ids"] = [int(t) for t in output.prompt_token_ids]
        return parts


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces. An iterator is written as a list; iterators and long
    lists are encoded a few items at a time.
    """
    if isinstance(value, dict):
        separator = b"{"
        for name, item in value.items():
            yield separator + encode(name) + b":"
            yield from json_pieces(item)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator) or (isinstance(value, list) and len(value) > ITEMS_AT_ONCE):
        separator, items = b"[", iter(value)
        while batch := list(islice(items, ITEMS_AT_ONCE)):
            yield separator + encode(batch)[1:-1]
            separator = b","
        yield b"]" if separator == b"," else b"[]"
    else:
        yield encode(value)


def read_parts(choice: dict[str, Any], reader: Reader) -> None:
    """Split the message of a choice into its parts."""
    message = choice["message"]
    if message["content"] is None:
        return
    message |= folded(reader.push(message["content"]) + reader.finish())
    if message["content"] is None and not reader.calls:
        message["content"] = ""
    if reader.calls and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"
