"""Writes the chunks of completions as server-sent events."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from jpaged.openai import responses
from jpaged.openai.parts import Delta, Plain, Reader
from jpaged.openai.responses import AnswerForm, Usage
from jpaged.openai.server.begun import without
from jpaged.openai.server.wire import encode
from jpaged.request.outputs import CompletionChunk, CompletionOutput, RequestOutput, completion

DONE = b"data: [DONE]\n\n"
CONTENT = {"content"}


class Events:
    """Turns the chunks of one answer into events.

    echo: the text before the completions of each prompt, by the prompt's index. with_usage: whether
    a last event reports the tokens of all prompts. prompt_sizes: tokens of the prompts, if every
    event reports the usage so far. reader: makes the reader of a chat's answer. begun: tokens that
    the request gave for every completion to begin with.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        is_chat: bool,
        form: AnswerForm,
        n: int,
        with_usage: bool,
        prompt_sizes: list[int] | None = None,
        echo: list[str] | None = None,
        reader: Callable[[], Reader] = Plain,
        begun: int = 0,
    ):
        self._is_chat, self._form, self._n = is_chat, form, n
        self._with_usage, self._echo = with_usage, echo
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # All events begin alike, so that part is encoded once.
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._same_tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        # Events with nothing but text also end alike.
        self._opening = b',"finish_reason":null,"logprobs":null,'
        self._opening += b'"delta":{"content":' if is_chat else b'"text":'
        self._closing = b"}}" if is_chat else b"}"
        self._is_plain = form.top is None and not form.token_ids
        self._make_reader = reader
        self._begun = begun
        self._readers: dict[int, Reader] = {}  # by choice, once it has had an event
        self._echoed: set[int] = set()
        self._offsets: dict[int, int] = {}  # by choice, in characters of its tokens
        self._prompt_sizes = prompt_sizes
        self._drawn: Counter[int] = Counter()  # tokens by choice, if events report usage

    def pieces(self, prompt: int, chunk: CompletionChunk) -> bytes:
        """Return the events of a chunk: none if there is nothing to send yet."""
        choice, begun = prompt * self._n + chunk.index, b""
        if choice not in self._readers:
            self._readers[choice] = self._make_reader()
            if self._begun:
                chunk = without(chunk, self._begun)
            if self._is_chat:
                begun = self._event(choice, delta={"role": "assistant", "content": ""})
        if self._prompt_sizes is not None:
            self._drawn[choice] += len(chunk.token_ids_delta)
        is_text = self._is_text_alone(choice, chunk)
        if (
            is_text and type(self._readers[choice]) is Plain
        ):  # the usual case: there are no parts to find
            return begun + self._text_event(choice, chunk.text_delta or "")
        deltas = self._deltas(choice, chunk)
        if is_text and all(delta.keys() == CONTENT for delta in deltas):
            return begun + self._text_event(choice, "".join(d.get("content", "") for d in deltas))
        piece = self._piece(choice, chunk)
        if self._is_chat:
            if piece["finish_reason"] == "stop" and self._readers[choice].calls:
                piece["finish_reason"] = "tool_calls"
            *first, last = deltas or [{}]
            begun += b"".join(self._event(choice, delta=delta) for delta in first)
            told = bool(last)
            piece["delta"] = last
        else:
            text = "".join(delta.get("content", "") for delta in deltas)
            if self._echo is not None and self._echoes(choice):
                self._echoed.add(choice)
                text = self._echo[prompt] + text
            told = bool(text)
            piece["text"] = text
        has_lists = "token_ids" in piece or "sampling_mask" in piece
        if told or chunk.finish_reason or self._form.top is not None or has_lists:
            return begun + self._event(choice, **piece)
        return begun

    def _echoes(self, choice: int) -> bool:
        """Return whether the prompt must come before the next text of a choice."""
        return self._echo is not None and choice not in self._echoed

    def _is_text_alone(self, choice: int, chunk: CompletionChunk) -> bool:
        """Return whether an event of this chunk has nothing but text and the parts that a reader
        finds in it.
        """
        has_more = chunk.finish_reason is not None or chunk.text_delta is None
        has_more |= chunk.sampling_mask_delta is not None
        return self._is_plain and not has_more and not self._echoes(choice)

    def _text_event(self, choice: int, text: str) -> bytes:
        """Return an event that has text alone; b"" for an empty text."""
        middle = b'{"index":%d%b%b%b' % (choice, self._opening, encode(text), self._closing)
        return self._head + middle + self._tail(choice) if text else b""

    def _deltas(self, choice: int, chunk: CompletionChunk) -> list[Delta]:
        reader = self._readers[choice]
        deltas = reader.push(chunk.text_delta) if chunk.text_delta else []
        return deltas + reader.finish() if chunk.finish_reason else deltas

    def _piece(self, choice: int, chunk: CompletionChunk) -> dict[str, Any]:
        """Return the fields of an event other than its text."""
        piece: dict[str, Any] = {"logprobs": self._logprobs(choice, chunk)}
        piece["finish_reason"] = chunk.finish_reason
        if chunk.finish_reason is not None:
            piece["stop_reason"] = chunk.stop_reason
        if self._form.token_ids or chunk.text_delta is None:
            piece["token_ids"] = chunk.token_ids_delta
        if chunk.sampling_mask_delta is not None and chunk.kept_logprobs_delta is not None:
            piece["sampling_mask"] = responses.kept_ids(chunk.sampling_mask_delta)
            piece["kept_logprobs"] = chunk.kept_logprobs_delta.tolist()
        return piece

    def end(self, outputs: list[RequestOutput]) -> bytes:
        """Return the events after the last chunk."""
        if not self._with_usage:
            return DONE
        usage = encode(total_usage(outputs))
        return self._head + b'],"usage":' + usage + b"}\n\n" + DONE

    def _event(self, choice: int, **said: Any) -> bytes:
        whole = {"index": choice, "finish_reason": None} | said
        return self._head + encode(whole) + self._tail(choice)

    def _tail(self, choice: int) -> bytes:
        """Return the end of every event of a choice."""
        if self._prompt_sizes is None:
            return self._same_tail
        prompt, drawn = self._prompt_sizes[choice // self._n], self._drawn[choice]
        usage = (prompt, drawn, prompt + drawn)
        return (
            b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % usage
        )

    def _logprobs(self, choice: int, chunk: CompletionChunk) -> Any:
        if self._form.top is None:
            return None
        done = as_output(chunk)
        if self._is_chat:
            return {"content": responses.token_logprobs(done, self._form), "refusal": None}
        start = self._offsets.get(choice, 0)
        logprobs = responses.parallel_logprobs(done, self._form, start)
        self._offsets[choice] = start + sum(map(len, logprobs["tokens"]))
        return logprobs


def as_output(chunk: CompletionChunk) -> CompletionOutput:
    """Return a chunk as if it were a whole completion."""
    return completion(
        chunk.index,
        chunk.token_ids_delta,
        chunk.token_logprobs_delta,
        chunk.finish_reason,
        text=chunk.text_delta,
        tops=chunk.logprobs_delta,
    )


def total_usage(outputs: list[RequestOutput], *, generated: bool = True) -> Usage:
    """Return the tokens of several prompts together. generated: whether the drawn tokens are part
    of the answer.
    """
    usages = [responses.usage(output) for output in outputs]
    prompt = sum(u["prompt_tokens"] for u in usages)
    answer = sum(u["completion_tokens"] for u in usages) if generated else 0
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
