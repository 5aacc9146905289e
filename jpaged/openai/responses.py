"""Bodies of answers, and how they are made from the engine's outputs: one choice a sample, with the
tokens of all choices added up.

They are typed dictionaries and not pydantic models: what this module writes needs no check at run
time. The tests check it with a pydantic TypeAdapter.
"""

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NotRequired, TypedDict

import numpy as np

from jpaged.errors import CapacityError, RequestError
from jpaged.openai.protocol import SAMPLING, BodyError
from jpaged.request.outputs import CompletionOutput, Logprob, RequestOutput

LEAST = -9999.0  # JSON has no -inf and no NaN; OpenAI's API uses this number instead


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None  # None for a token that is only a part of a character


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Parallel lists with an entry for each token. text_offset counts the characters of the tokens
    before.
    """

    tokens: list[str]
    token_logprobs: list[float | None]  # None for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatMessage(TypedDict):
    role: str
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class Ending(TypedDict):
    """The fields that say how a choice ended."""

    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    sampling_mask: NotRequired[list[list[int]]]
    kept_logprobs: NotRequired[list[float]]


class ChatChoice(Ending):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Ending):
    index: int
    text: str | None
    logprobs: CompletionLogprobs | None


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class OfPrompt(TypedDict):
    """The fields about the prompt, which an answer has if the request asked for them."""

    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(OfPrompt):
    """The answer to /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatCompletion(OfPrompt):
    """The answer to /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class BatchAnswer(TypedDict):
    """A line of a batch's output. response holds status_code, request_id and body."""

    id: str
    custom_id: str | int | None
    response: dict[str, Any] | None
    error: dict[str, Any] | None


MOST = re.compile(r"max_model_len=(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a request failed. status: of HTTP. kind, code: OpenAI's type and code of the error.
    param: the field to blame. message: one sentence.
    """

    status: int
    kind: str
    code: str
    param: str | None
    message: str

    @classmethod
    def of(cls, error: BaseException | str) -> "Failure":
        code, param = "generation_failed", None
        match error:
            case BodyError():
                code, param = error.code, error.param
            case CapacityError():
                code = "context_length_exceeded"
            case RequestError():  # its message begins with the field
                code, begins = "invalid_value", re.match(r"(\w+)[=:]", str(error))
                param = begins[1] if begins and begins[1] in (*SAMPLING, "logprobs") else None
        if isinstance(error, RequestError):
            status, kind, message = 400, "invalid_request_error", str(error)
            if code == "context_length_exceeded" and (most := MOST.search(message)):
                # litellm, and others, know the error by OpenAI's sentence.
                message += f". This model's maximum context length is {most[1]} tokens"
        else:
            status, kind = 500, "server_error"
            message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return cls(status=status, kind=kind, code=code, param=param, message=message)

    def details(self, message: str) -> dict[str, Any]:
        return {"message": message, "type": self.kind, "param": self.param, "code": self.code}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """What a request wants in its answer.

    top: alternatives per token; None for no logprobs. token_ids: whether to return them beside the
    text. tokens_as_ids: whether logprobs name tokens as "token_id:N".
    """

    top: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False

    def token(self, token_id: int, entry: Logprob | None) -> str:
        text = None if entry is None or self.tokens_as_ids else entry.decoded_token
        return f"token_id:{token_id}" if text is None else text


def chat_completion(
    output: RequestOutput, form: AnswerForm, *, name: str, model: str
) -> ChatCompletion:
    choices: list[ChatChoice] = []
    for index, done in enumerate(output.outputs):
        logprobs: ChatLogprobs | None = None
        if form.top is not None:
            logprobs = {"content": token_logprobs(done, form), "refusal": None}
        message: ChatMessage = {"role": "assistant", "content": done.text, "refusal": None}
        choices.append(
            {"index": index, **ending(done, form), "message": message, "logprobs": logprobs}
        )
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(output),
        **_of_prompt(output, form),
    }


def completion(output: RequestOutput, form: AnswerForm, *, name: str, model: str) -> Completion:
    choices: list[CompletionChoice] = []
    for index, done in enumerate(output.outputs):
        logprobs = None if form.top is None else parallel_logprobs(done, form)
        choices.append(
            {"index": index, **ending(done, form), "text": done.text, "logprobs": logprobs}
        )
    return {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(output),
        **_of_prompt(output, form),
    }


def usage(output: RequestOutput) -> Usage:
    prompt, answer = len(output.prompt_token_ids), sum(len(d.token_ids) for d in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def ending(done: CompletionOutput, form: AnswerForm) -> Ending:
    """Return how a completion ended, with its sampling mask where it has one. Without a tokenizer
    there is no text, so the token ids are added as the answer.
    """
    end: Ending = {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
    if form.token_ids or done.text is None:
        end["token_ids"] = [int(t) for t in done.token_ids]
    if done.sampling_mask is not None and done.kept_logprobs is not None:
        end["sampling_mask"] = kept_ids(done.sampling_mask)
        end["kept_logprobs"] = done.kept_logprobs.tolist()
    return end


def kept_ids(sampling_mask: np.ndarray) -> list[list[int]]:
    """Return the ids of a sampling mask, a list for each token."""
    return [ids[ids >= 0].tolist() for ids in sampling_mask]


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """Return the logprobs of every prompt token by token id; None for the first token."""
    return list(each_prompt_logprobs(output))


def each_prompt_logprobs(output: RequestOutput) -> Iterator[dict[str, Any] | None]:
    """Yield the entries of `prompt_logprobs` one token at a time."""
    for entries in output.prompt_logprobs or []:
        yield None if entries is None else _by_id(entries)


def _by_id(entries: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(t): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
        for t, e in entries.items()
    }


def token_logprobs(done: CompletionOutput, form: AnswerForm) -> list[TokenLogprob]:
    """Return logprobs in the form of OpenAI's chats: an object per token with its alternatives, the
    likeliest first.
    """

    def described(token_id: int, entry: Logprob | None, logprob: float) -> TopLogprob:
        text = None if entry is None else entry.decoded_token
        whole = text is not None and "\ufffd" not in text
        return {
            "token": form.token(token_id, entry),
            "logprob": finite(logprob),
            "bytes": list(text.encode()) if whole and text is not None else None,
        }

    content: list[TokenLogprob] = []
    entries_of = done.logprobs or []
    for token_id, logprob, entries in zip(
        done.token_ids, done.token_logprobs, entries_of, strict=True
    ):
        best = [described(t, e, e.logprob) for t, e in _ranked(entries)[: form.top]]
        content.append(
            {**described(token_id, entries.get(token_id), logprob), "top_logprobs": best}
        )
    return content


def finite(logprob: float) -> float:
    return float(logprob) if logprob > LEAST else LEAST


def _of_prompt(output: RequestOutput, form: AnswerForm) -> OfPrompt:
    extra: OfPrompt = {}
    if output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = prompt_logprobs(output)
    if form.token_ids:
        extra["prompt_token_ids"] = [int(t) for t in output.prompt_token_ids]
    return extra


def _ranked(entries: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: -item[1].logprob)


def parallel_logprobs(
    done: CompletionOutput, form: AnswerForm, start: int = 0
) -> CompletionLogprobs:
    """Return logprobs in the form of /v1/completions. start: the text offset of the first token."""
    entries_of = done.logprobs or []
    tokens = [form.token(t, e.get(t)) for t, e in zip(done.token_ids, entries_of, strict=True)]
    offsets = [start]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [finite(p) for p in done.token_logprobs],
        "top_logprobs": [
            {form.token(t, e): finite(e.logprob) for t, e in _ranked(entries)[::-1]}
            for entries in entries_of
        ],
        "text_offset": offsets[:-1],
    }
