"""Lines of a batch file to requests, finished requests back to lines.

Three forms of line are read: OpenAI batch requests (`custom_id`, `method`, `url`, `body` for /v1/chat/completions and
/v1/completions), bare objects (`prompt` | `prompt_token_ids` | `messages`, and any field of SamplingParams) and plain
text. vLLM's extra fields work in all of them. A field is known, harmless, or refused: none is ignored that could change
an answer. Host only: nothing here runs a model, so a line is read and answered the same way whoever feeds the engine.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import xxhash

from jpaged.engine.sampling_params import SamplingParams
from jpaged.errors import CapacityError, RequestError
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput

URLS: dict[str, Literal["chat", "completion"]] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
# Tokens a line may generate when neither it nor the run says: OpenAI's own defaults, and enough for a bare prompt.
MAX_TOKENS: dict[str, int | None] = {"chat": None, "completion": 16, "bare": 256}
HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "priority"}
# Fields that are not built, each with the values that ask for nothing (null always does): anything else is refused.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",), "use_beam_search": (False,),
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "length_penalty": (1, 1.0), "bad_words": ([],), "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,), "include_reasoning": (True,),
} | dict.fromkeys((
    "stream_options", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "allowed_token_ids",
    "truncate_prompt_tokens", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "chat_template", "documents", "logits_processors", "mm_processor_kwargs", "add_special_tokens", "prompt_embeds",
), ())  # fmt: skip

# Arguments of apply_chat_template that are no variables of a template: templates come from the tokenizer only.
RESERVED = {
    "conversation", "chat_template", "tools", "documents", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "add_generation_prompt",
    "continue_final_message", "messages",
}  # fmt: skip


class LineError(Exception):
    """One line that cannot run: why, and which field. `code` is for programs that read the error line."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run says about all its lines. A line's own fields win over `overrides`, which win over `defaults`."""

    defaults: SamplingParams  # the model's, from its generation_config
    model: str = ""  # the name that answers carry when the line has none
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the command line's
    seed: int = 0
    text: bool = False  # every line is a prompt as it stands


@dataclasses.dataclass(kw_only=True)
class BatchRequest:
    """One line. Only `number` is known at first; `parse` fills in the rest as far as it gets: error lines use it."""

    number: int  # of the line, from 1, blank lines counted
    form: Literal["chat", "completion", "bare", "unknown"] = "unknown"
    id: str | int | None = None  # custom_id, or a bare line's id
    model: str = ""
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = dataclasses.field(default_factory=dict)  # keyword arguments of LLM.render_chat
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    return_token_ids: bool = False

    def parse(self, raw: bytes, settings: Settings) -> None:
        """Read one line. Raises LineError or RequestError; what was understood until then stays in the record."""
        self.model = settings.model
        try:
            text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise LineError(f"not UTF-8: {e.reason} at byte {e.start}", code="invalid_encoding") from None
        if settings.text:
            self.form, fields = "bare", {"prompt": text}
        else:
            fields = self._fields(_json_object(text))
        self._read_prompt(fields)
        sampling = _sampling(fields)
        if fields:
            names = ", ".join(sorted(map(_short, fields)))
            raise LineError(f"unknown field {names}", param=min(fields)[:60], code="unknown_field")
        longest = {"max_tokens": MAX_TOKENS["chat" if self.messages is not None else self.form]}
        sampling = {**longest, **settings.overrides, **sampling}
        sampling.setdefault("seed", self._seed(settings.seed))
        self.params = dataclasses.replace(settings.defaults, **sampling)

    def _fields(self, line: dict[str, Any]) -> dict[str, Any]:
        """The fields that describe the request: the body of a batch request, the object itself where it is bare."""
        name = "custom_id" if "custom_id" in line else "id"
        if line.get(name) is not None:
            if type(line[name]) not in (str, int):
                raise LineError(f"{name}={_short(line[name])}: must be a string", param=name)
            self.id = line[name]
        if not {"body", "url", "method"} & set(line):
            self.form = "bare"
            return {k: v for k, v in line.items() if k not in ("id", "custom_id")}
        url = line.get("url")
        self.form = URLS.get(url, "completion") if isinstance(url, str) else "completion"
        if not isinstance(self.id, str) or name != "custom_id":
            raise LineError("custom_id: a batch request needs one, a string", param="custom_id")
        if line.get("method") != "POST":
            raise LineError(f"method={_short(line.get('method'))}: must be 'POST'", param="method")
        if not isinstance(url, str) or url not in URLS:
            raise LineError(f"url={_short(url)}: must be one of {', '.join(URLS)}", param="url", code="unsupported_url")
        if unknown := set(line) - {"custom_id", "method", "url", "body"}:
            names = ", ".join(sorted(map(_short, unknown)))
            raise LineError(f"unknown field {names} beside 'body'", param=min(unknown)[:60], code="unknown_field")
        if not isinstance(line.get("body"), dict):
            raise LineError(f"body={_short(line.get('body'))}: must be an object", param="body")
        return dict(line["body"])

    def _read_prompt(self, fields: dict[str, Any]) -> None:
        """Take the prompt and everything that is not sampling out of `fields`."""
        for name in HARMLESS & set(fields):
            del fields[name]
        for name in NOT_BUILT.keys() & set(fields):
            value = fields.pop(name)
            if value is not None and not any(type(value) is type(v) and value == v for v in NOT_BUILT[name]):
                only = " or ".join(json.dumps(v) for v in NOT_BUILT[name]) or "null"
                message = f"{name}={_short(value)} is not supported (only {only})"
                raise LineError(message, param=name, code="unsupported_field")
        self.model = _take(fields, "model", _string, self.model)
        self.return_token_ids = _take(fields, "return_token_ids", _bool, False)
        kinds = {"chat": ["messages"], "completion": ["prompt"]}.get(
            self.form, ["prompt", "prompt_token_ids", "messages"]
        )
        given = [kind for kind in kinds if fields.get(kind) is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "has none"
            raise LineError(f"a request needs {' or '.join(kinds)}; this one {found}", param=kinds[0])
        for kind in kinds:
            if kind not in given:
                fields.pop(kind, None)
        if given[0] == "messages":
            self.messages = _take(fields, "messages", _messages)
            self.template = {"chat_template_kwargs": _take(fields, "chat_template_kwargs", _template_kwargs)}
            continued = _take(fields, "continue_final_message", _bool, False)
            opened = _take(fields, "add_generation_prompt", _bool, not continued)
            if continued and opened:
                raise LineError("continue_final_message and add_generation_prompt exclude each other")
            self.template |= {"add_generation_prompt": opened, "continue_final_message": continued}
        else:
            self.prompt = _take(fields, given[0], _prompt if given[0] == "prompt" else _ints)
            self.return_token_ids |= self.form == "bare" and not isinstance(self.prompt, str)
        if self.form == "chat" or (self.form == "bare" and type(fields.get("logprobs")) is bool):
            on, top = _take(fields, "logprobs", _bool, False), _take(fields, "top_logprobs", _int, 0)
            if top and not on:
                raise LineError(f"top_logprobs={top} needs logprobs=true", param="top_logprobs")
            if on:
                fields["logprobs"] = top
        if self.messages is not None and (longest := _take(fields, "max_completion_tokens", _int)) is not None:
            fields["max_tokens"] = longest  # OpenAI's new name of it, and the one that wins

    def _seed(self, seed: int) -> int:
        """A seed of the line's own: the same in a whole run, a resumed one and a shard."""
        key = f"line {self.number}" if self.id is None else f"id {self.id}"
        return xxhash.xxh64_intdigest(f"{seed} {key}".encode()) >> 1  # 63 bits: a signed 64-bit seed holds it


# ---- checks of single fields: a bool is not an integer, NaN is not a number, null is "not given" ----


def _take(fields: dict[str, Any], name: str, check: Callable[[Any], Any], default: Any = None) -> Any:
    """Remove a field and return its checked value; the default where it is absent or null."""
    value = fields.pop(name, None)
    if value is None:
        return default
    try:
        return check(value)
    except ValueError as e:
        raise LineError(f"{name}={_short(value)}: {e}", param=name) from None


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of SamplingParams that the line sets; their ranges are SamplingParams' to judge."""
    values = {name: _take(fields, name, check) for name, check in SAMPLING.items() if name in fields}
    return {name: value for name, value in values.items() if value is not None}


def _int(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("must be an integer of at most 64 bits")
    return value


def _number(value: Any) -> float:
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError("must be a finite number")


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("must be a string")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


def _template_kwargs(value: Any) -> dict[str, Any]:
    if taken := sorted(RESERVED & set(_object(value))):
        raise ValueError(f"{taken[0]!r} is not a variable that a line may set")
    return value


def _ints(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must be a list of integers")
    return [_int(v) for v in value]


def _stop(value: Any) -> str | list[str]:
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        raise ValueError("must be a string or a list of strings")
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    for key in _object(value):
        if not (key.isascii() and key.isdecimal()):
            raise ValueError(f"{_short(key)} is not a token id")
    return {int(key): _number(bias) for key, bias in value.items()}


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # OpenAI's list of prompts, with one in it
    if isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(v, str | list) for v in value):
        raise ValueError("one prompt a line: write one line for each")
    return _ints(value)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} is not an object")
        if not isinstance(role := message.get("role"), str) or not role:
            raise ValueError(f"message {i} has no role")
        content = message.get("content")
        if isinstance(content, list):
            if not all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
            ):
                raise ValueError(f"message {i} has a part that is not text")
            content = "\n".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"message {i} has no content")
        extra = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
        for key, text in extra.items():
            if key not in ("name", "reasoning_content") or not isinstance(text, str):
                raise ValueError(f"message {i}: {_short(key)} is not supported")
        messages.append({"role": role, "content": content, **extra})
    return messages


SAMPLING: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _number),
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), _int),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), _bool),
    "stop": _stop,
    "stop_token_ids": _ints,
    "logit_bias": _logit_bias,
    "logprobs_mode": _string,
}


def _short(value: Any) -> str:
    """A value for a message, cut in the middle when it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}"


def _json_object(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        line = json.loads(text, parse_constant=refuse)
        if "\\u" in text:
            json.dumps(line, ensure_ascii=False).encode()  # half of a surrogate pair: no tokenizer takes it
    except UnicodeEncodeError:
        raise LineError("a string holds a lone surrogate, which is no text", code="invalid_encoding") from None
    except (ValueError, RecursionError) as e:
        raise LineError(f"not JSON: {e}", code="invalid_json") from None
    if not isinstance(line, dict):
        raise LineError(f"{_short(line)} is not a JSON object", code="invalid_json")
    return line


# ---- answers ----


def answer_line(request: BatchRequest, output: RequestOutput) -> dict[str, Any]:
    """The output line of a request that finished without an error."""
    done = output.outputs[0]
    usage: dict[str, Any] = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(done.token_ids)}
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    usage["prompt_tokens_details"] = {"cached_tokens": output.num_cached_tokens}
    choice: dict[str, Any] = {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
    if request.return_token_ids or done.text is None:
        choice["token_ids"] = [int(t) for t in done.token_ids]
    asked = request.params.logprobs is not None
    extra = {}
    if output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = [entry and _by_id(entry) for entry in output.prompt_logprobs]
    if request.form == "bare":
        logprobs = {"logprobs": _chat_logprobs(request, done)} if asked else {}
        named = {"line": request.number} | ({} if request.id is None else {"id": request.id})
        return {**named, "text": done.text, **choice, **logprobs, **extra, "usage": usage}
    if request.form == "chat":
        choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
        choice["logprobs"] = {"content": _chat_logprobs(request, done), "refusal": None} if asked else None
    else:
        choice["text"] = done.text
        choice["logprobs"] = _completion_logprobs(done) if asked else None
    prefix, kind = ("chatcmpl", "chat.completion") if request.form == "chat" else ("cmpl", "text_completion")
    head = {"id": f"{prefix}-{request.number}", "object": kind, "created": int(time.time()), "model": request.model}
    return _batch_line(request, 200, {**head, "choices": [{"index": 0, **choice}], "usage": usage, **extra})


def error_line(request: BatchRequest, error: BaseException | str) -> dict[str, Any]:
    """The output line of a request that cannot run or that failed: always with its line number and the reason."""
    param = code = None
    status, kind, message = 400, "invalid_request_error", str(error)
    match error:
        case LineError():
            param, code = error.param, error.code
        case CapacityError():
            code = "context_length_exceeded"
        case RequestError():  # its message begins with the field
            code, param = "invalid_value", next((n for n in SAMPLING if message.startswith((f"{n}=", f"{n}:"))), None)
        case _:
            status, kind, code = 500, "server_error", "generation_failed"
            if isinstance(error, BaseException):
                message = f"{type(error).__name__}: {error}"
    message = f"line {request.number}: {message}"
    if request.form == "unknown":
        body = {"code": code, "message": message, "line": request.number}
        return {"id": f"batch_req_{request.number}", "custom_id": request.id, "response": None, "error": body}
    details = {"message": message, "type": kind, "param": param, "code": code}
    if request.form == "bare":
        named = {"line": request.number} | ({} if request.id is None else {"id": request.id})
        return {**named, "error": {**details, "line": request.number}}
    return _batch_line(request, status, {"error": details})


def encode_line(line: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON; escaped where an id or a text cannot be written as it is."""
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line).encode() + b"\n"


def _batch_line(request: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    # Ids count lines: a resumed or repeated run writes the same ones.
    response = {"status_code": status, "request_id": f"req_{request.number}", "body": body}
    return {"id": f"batch_req_{request.number}", "custom_id": request.id, "response": response, "error": None}


def _finite(logprob: float) -> float:
    return max(float(logprob), -9999.0)  # JSON has no -inf; the figure is the one that OpenAI's API uses


def _token(token_id: int, entry: Logprob | None) -> str:
    text = None if entry is None else entry.decoded_token
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
        token = _token(token_id, entry)
        known = (
            entry is not None and entry.decoded_token is not None and "\ufffd" not in token
        )  # else part of a character
        return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode()) if known else None}

    top = request.params.logprobs or 0
    content = []
    for token_id, logprob, entries in zip(done.token_ids, done.token_logprobs, done.logprobs or [], strict=True):
        alternatives = [described(t, e, e.logprob) for t, e in _ranked(entries)[:top]]
        content.append({**described(token_id, entries.get(token_id), logprob), "top_logprobs": alternatives})
    return content


def _completion_logprobs(done: CompletionOutput) -> dict[str, Any]:
    """OpenAI's completions form: parallel lists; offsets are in the characters of the tokens before."""
    logprobs = done.logprobs or []
    tokens = [_token(t, entries.get(t)) for t, entries in zip(done.token_ids, logprobs, strict=True)]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(p) for p in done.token_logprobs],
        "top_logprobs": [{_token(t, e): _finite(e.logprob) for t, e in _ranked(entries)[::-1]} for entries in logprobs],
        "text_offset": offsets[:-1],
    }
