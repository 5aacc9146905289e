"""Finished and failed requests to lines of the output, and what such a line says of itself when it
is read again.

Every line carries the number of its input line: `line` where the request was bare, else the digits
of `id`.
"""

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

from jpaged.errors import CapacityError, RequestError
from jpaged.integrations.batch.fields import SAMPLING, LineError
from jpaged.integrations.batch.lines import BatchRequest
from jpaged.request.outputs import CompletionOutput, Logprob, RequestOutput

ErrorStyle = Literal["openai", "vllm"]
ID = re.compile(r"batch_req_(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a line failed: an HTTP status, OpenAI's type and code of the error, the field to blame,
    and the sentence.
    """

    status: int
    kind: str
    code: str
    param: str | None
    message: str

    @classmethod
    def of(cls, error: BaseException | str) -> "Failure":
        status, kind = 400, "invalid_request_error"
        match error:
            case LineError():
                return cls(
                    status=status, kind=kind, code=error.code, param=error.param, message=str(error)
                )
            case CapacityError():
                return cls(
                    status=status,
                    kind=kind,
                    code="context_length_exceeded",
                    param=None,
                    message=str(error),
                )
            case RequestError():  # its message begins with the field
                message = str(error)
                param = next((n for n in SAMPLING if message.startswith((f"{n}=", f"{n}:"))), None)
                return cls(
                    status=status, kind=kind, code="invalid_value", param=param, message=message
                )
        message = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        return cls(
            status=500, kind="server_error", code="generation_failed", param=None, message=message
        )


def answer_line(request: BatchRequest, output: RequestOutput) -> dict[str, Any]:
    """The output line of a request that finished without an error: a choice a sample, their tokens
    summed.
    """
    usage: dict[str, Any] = {"prompt_tokens": len(output.prompt_token_ids)}
    usage["completion_tokens"] = sum(len(done.token_ids) for done in output.outputs)
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    usage["prompt_tokens_details"] = {"cached_tokens": output.num_cached_tokens}
    choices = [_choice(request, done) for done in output.outputs]
    extra = {}
    if output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = [entry and _by_id(entry) for entry in output.prompt_logprobs]
    if request.form == "bare":
        answer = choices[0] if request.params.n == 1 else {"choices": _indexed(choices)}
        return {**_bare(request), **answer, **extra, "usage": usage}
    if request.return_token_ids:
        extra["prompt_token_ids"] = [int(t) for t in output.prompt_token_ids]
    prefix, kind = (
        ("chatcmpl", "chat.completion") if request.form == "chat" else ("cmpl", "text_completion")
    )
    head = {
        "id": f"{prefix}-{request.number}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }
    return _batch_line(
        request, 200, {**head, "choices": _indexed(choices), "usage": usage, **extra}
    )


def error_line(
    request: BatchRequest, error: BaseException | str, style: ErrorStyle = "openai"
) -> dict[str, Any]:
    """The output line of a request that cannot run or that failed: always with its line number and
    the reason.

    style: of batch requests that could be read, OpenAI's (the error in the response's body) or that
    of vLLM's run_batch (no body, the error beside the response).
    """
    failure = Failure.of(error)
    message = f"line {request.number}: {failure.message}"
    if request.form == "unknown":
        body = {"code": failure.code, "message": message, "line": request.number}
        return {
            "id": f"batch_req_{request.number}",
            "custom_id": request.id,
            "response": None,
            "error": body,
        }
    details = {
        "message": message,
        "type": failure.kind,
        "param": failure.param,
        "code": failure.code,
    }
    if request.form == "bare":
        return {**_bare(request), "error": {**details, "line": request.number}}
    if style == "openai":
        return _batch_line(request, failure.status, {"error": details})
    details |= {
        "type": "BadRequestError" if failure.status == 400 else "InternalServerError",
        "code": failure.status,
    }
    return {**_batch_line(request, failure.status, None), "error": {"error": details}}


def row_number(row: Any) -> int | None:
    """The input line that an output line answers; None for what is no output line."""
    if not isinstance(row, dict):
        return None
    if type(row.get("line")) is int:
        return row["line"]
    found = ID.fullmatch(row["id"]) if isinstance(row.get("id"), str) else None
    return int(found[1]) if found is not None and "response" in row else None


def row_id(row: Mapping[str, Any]) -> str | int | None:
    """The id of the request that an output line answers."""
    return row.get("id") if "line" in row else row.get("custom_id")


def row_failed(row: Mapping[str, Any]) -> bool:
    """Whether an output line is an error."""
    return (
        row.get("error") is not None or (row.get("response") or {}).get("status_code", 200) != 200
    )


def encode_line(line: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON; escaped where an id or a text cannot be written as it is."""
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line).encode() + b"\n"


def _bare(request: BatchRequest) -> dict[str, Any]:
    return {"line": request.number} | ({} if request.id is None else {"id": request.id})


def _indexed(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"index": i, **choice} for i, choice in enumerate(choices)]


def _choice(request: BatchRequest, done: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
    if request.return_token_ids or done.text is None:
        choice["token_ids"] = [int(t) for t in done.token_ids]
    asked = request.params.logprobs is not None
    if request.form == "bare":
        return {"text": done.text, **choice} | (
            {"logprobs": _chat_logprobs(request, done)} if asked else {}
        )
    if request.form == "chat":
        choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
        choice["logprobs"] = (
            {"content": _chat_logprobs(request, done), "refusal": None} if asked else None
        )
    else:
        choice["text"] = done.text
        choice["logprobs"] = _completion_logprobs(request, done) if asked else None
    return choice


def _batch_line(request: BatchRequest, status: int, body: dict[str, Any] | None) -> dict[str, Any]:
    # Ids count lines: a resumed or repeated run writes the same ones.
    response = {"status_code": status, "request_id": f"req_{request.number}", "body": body}
    return {
        "id": f"batch_req_{request.number}",
        "custom_id": request.id,
        "response": response,
        "error": None,
    }


def _finite(logprob: float) -> float:
    return max(
        float(logprob), -9999.0
    )  # JSON has no -inf; the figure is the one that OpenAI's API uses


def _token(request: BatchRequest, token_id: int, entry: Logprob | None) -> str:
    text = None if entry is None or request.tokens_as_ids else entry.decoded_token
    return f"token_id:{token_id}" if text is None else text


def _ranked(entries: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: -item[1].logprob)


def _by_id(entries: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(t): {"logprob": _finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
        for t, e in entries.items()
    }


def _chat_logprobs(request: BatchRequest, done: CompletionOutput) -> list[dict[str, Any]]:
    """OpenAI's chat form: one object a token, each with its alternatives, best first."""

    def described(token_id: int, entry: Logprob | None, logprob: float) -> dict[str, Any]:
        text = None if entry is None else entry.decoded_token
        known = (
            None if text is None or "\ufffd" in text else list(text.encode())
        )  # else part of a character
        return {
            "token": _token(request, token_id, entry),
            "logprob": _finite(logprob),
            "bytes": known,
        }

    top = request.params.logprobs or 0
    content = []
    for token_id, logprob, entries in zip(
        done.token_ids, done.token_logprobs, done.logprobs or [], strict=True
    ):
        alternatives = [described(t, e, e.logprob) for t, e in _ranked(entries)[:top]]
        content.append(
            {**described(token_id, entries.get(token_id), logprob), "top_logprobs": alternatives}
        )
    return content


def _completion_logprobs(request: BatchRequest, done: CompletionOutput) -> dict[str, Any]:
    """OpenAI's completions form: parallel lists; offsets are in the characters of the tokens
    before.
    """
    logprobs = done.logprobs or []
    tokens = [
        _token(request, t, entries.get(t))
        for t, entries in zip(done.token_ids, logprobs, strict=True)
    ]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(p) for p in done.token_logprobs],
        "top_logprobs": [
            {_token(request, t, e): _finite(e.logprob) for t, e in _ranked(entries)[::-1]}
            for entries in logprobs
        ],
        "text_offset": offsets[:-1],
    }
