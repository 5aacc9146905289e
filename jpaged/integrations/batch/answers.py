"""Makes lines of the output from finished and failed requests, and reads back what such a line says
of itself.

Every line has the number of its input line: in `line` if the request was bare, else in the digits
of `id`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jpaged.integrations.batch.lines import BatchRequest
from jpaged.openai import responses
from jpaged.openai.pooled import Task
from jpaged.openai.responses import BatchAnswer, Failure
from jpaged.request.outputs import RequestOutput

ErrorStyle = Literal["openai", "vllm"]
ID = re.compile(r"batch_req_(\d+)")


def answer_line(request: BatchRequest, output: RequestOutput) -> Mapping[str, Any]:
    """Return the output line of a request that finished without an error."""
    form, name = request.answer_form, str(request.number)
    if request.form == "chat":
        body = responses.chat_completion(output, form, name=name, model=request.model)
        return _batch_line(request, 200, body)
    if request.form == "completion":
        body = responses.completion(output, form, name=name, model=request.model)
        return _batch_line(request, 200, body)
    choices: list[dict[str, Any]] = []
    for done in output.outputs:
        choices.append({"text": done.text, **responses.ending(done, form)})
        if form.top is not None:
            choices[-1]["logprobs"] = responses.token_logprobs(done, form)
    indexed = [{"index": i, **choice} for i, choice in enumerate(choices)]
    line = _bare(request) | (choices[0] if request.params.n == 1 else {"choices": indexed})
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = responses.prompt_logprobs(output)
    return line | {"usage": responses.usage(output)}


def pooled_line(
    request: BatchRequest, task: Task, made: np.ndarray, lists: Sequence[Sequence[int]]
) -> Mapping[str, Any]:
    """Return the output line of a request for embeddings, scores or ranks. made: what the task gave
    of the tokens of its texts.
    """
    assert request.pooled is not None
    body = request.pooled.answer(task, made, lists, request.model)
    body["id"] = f"{body['id'].partition('-')[0]}-{request.number}"  # the same in each run
    return _batch_line(request, 200, body)


def error_line(
    request: BatchRequest, error: BaseException | str, style: ErrorStyle = "openai"
) -> Mapping[str, Any]:
    """Return the output line of a request that cannot run or that failed. It always has its line
    number and the reason.

    style: of batch requests that could be read: OpenAI's (the error in the response's body), or
    that of vLLM's run_batch (no body; the error beside the response).
    """
    failure = Failure.of(error)
    details = failure.details(f"line {request.number}: {failure.message}")
    if request.form == "bare":
        return _bare(request) | {"error": {**details, "line": request.number}}
    if request.form == "unknown":
        said = {"code": failure.code, "message": details["message"], "line": request.number}
        return {**_batch_line(request, failure.status, None), "response": None, "error": said}
    if style == "openai":
        return _batch_line(request, failure.status, {"error": details})
    kind = "BadRequestError" if failure.status == 400 else "InternalServerError"
    details |= {"type": kind, "code": failure.status}
    return {**_batch_line(request, failure.status, None), "error": {"error": details}}


def row_number(row: Any) -> int | None:
    """Return the number of the input line that an output line answers; None if it is not an output
    line.
    """
    if not isinstance(row, dict):
        return None
    if type(row.get("line")) is int:
        return row["line"]
    match = ID.fullmatch(row["id"]) if isinstance(row.get("id"), str) else None
    return int(match[1]) if match is not None and "response" in row else None


def row_id(row: Mapping[str, Any]) -> str | int | None:
    """Return the id of the request that an output line answers."""
    return row.get("id") if "line" in row else row.get("custom_id")


def row_failed(row: Mapping[str, Any]) -> bool:
    """Return whether an output line holds an error."""
    status = (row.get("response") or {}).get("status_code", 200)
    return row.get("error") is not None or status != 200


def row_code(row: Mapping[str, Any]) -> str:
    """Return the code of the error in an output line, as it was written; "" if there is none."""
    response = row.get("response") or {}
    error = (response.get("body") or {}).get("error") or row.get("error") or {}
    error = error.get("error", error) if isinstance(error, dict) else {}
    return str(error.get("code") or "unknown") if row_failed(row) else ""


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Return a line of JSON in UTF-8. An id or a text that UTF-8 cannot encode is escaped."""
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line).encode() + b"\n"


def _bare(request: BatchRequest) -> dict[str, Any]:
    return {"line": request.number} | ({} if request.id is None else {"id": request.id})


def _batch_line(request: BatchRequest, status: int, body: Any) -> BatchAnswer:
    # Ids count lines: a resumed or repeated run writes the same ones.
    number = request.number
    return {
        "id": f"batch_req_{number}",
        "custom_id": request.id,
        "response": {"status_code": status, "request_id": f"req_{number}", "body": body},
        "error": None,
    }
