"""Lines of a batch file to requests.

Three forms of line are read: OpenAI batch requests (`custom_id`, `method`, `url`, `body` for
/v1/chat/completions and /v1/completions), bare objects (`prompt` | `prompt_token_ids` | `messages`,
and any field of SamplingParams) and plain text. vLLM's extra fields work in all of them. A field is
known, harmless, or refused: none is ignored that could change an answer, unless the run says so.
Host only: nothing here runs a model, so a line is read the same way whoever feeds the engine.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from jpaged.integrations.batch import fields as check
from jpaged.integrations.batch.fields import LineError, short, take
from jpaged.integrations.seeds import stable_seed
from jpaged.request.sampling_params import SamplingParams

URLS: dict[str, Literal["chat", "completion"]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}
# Tokens a line may generate when neither it nor the run says: OpenAI's own defaults, and enough for
# a bare prompt.
MAX_TOKENS: dict[str, int | None] = {"chat": None, "completion": 16, "bare": 256}
HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "priority",
    "request_id",
    "spaces_between_special_tokens",
}
# Fields that are not built, each with the values that ask for nothing (null always does): anything
# else is refused.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "include_reasoning": (True,),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "max_repetition_pattern_size": (0,),
    "min_repetition_pattern_size": (0,),
    "repetition_min_count": (0,),
    "truncation_side": ("left",),
    "watermarking": (False,),
} | dict.fromkeys(
    (
        "stream_options",
        "audio",
        "prediction",
        "verbosity",
        "web_search_options",
        "allowed_token_ids",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "structured_outputs",
        "chat_template",
        "documents",
        "logits_processors",
        "mm_processor_kwargs",
        "add_special_tokens",
        "prompt_embeds",
        "logprob_token_ids",
        "thinking_token_budget",
        "repetition_detection",
    ),
    (),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run says about all its lines. A line's own fields win over `overrides`, which win over
    `defaults`.
    """

    defaults: SamplingParams  # the model's, from its generation_config
    model: str = ""  # the name that answers carry when the line has none
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the command line's
    seed: int = 0
    text: bool = False  # every line is a prompt as it stands
    ignore_unknown: bool = False  # run a line that has unknown fields, without them


@dataclasses.dataclass(kw_only=True)
class BatchRequest:
    """One line. Only `number` is known at first; `parse` fills in the rest as far as it gets: error
    lines use it.
    """

    number: int  # of the line, from 1, blank lines counted
    form: Literal["chat", "completion", "bare", "unknown"] = "unknown"
    id: str | int | None = None  # custom_id, or a bare line's id
    model: str = ""
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # keyword arguments of LLM.render_chat
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    truncate: int | None = (
        None  # keep this many tokens of the prompt's end; -1 as many as leave room for the answer
    )
    cache_salt: str | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # name tokens "token_id:N" among logprobs
    ignored: tuple[str, ...] = ()  # unknown fields that the run leaves out

    def parse(self, raw: bytes, settings: Settings) -> None:
        """Read one line. Raises LineError or RequestError; what was understood until then stays in
        the record.
        """
        self.model = settings.model
        text = decode(raw, self.number)
        if settings.text:
            self.form, fields = "bare", {"prompt": text}
        else:
            fields = self._fields(check.json_object(text), settings)
        self._read_prompt(fields)
        sampling = check.take_sampling(fields)
        self._leave_out(fields, settings)
        longest = {"max_tokens": MAX_TOKENS["chat" if self.messages is not None else self.form]}
        sampling = {**longest, **settings.overrides, **sampling}
        sampling.setdefault("seed", self._seed(settings.seed))
        self.params = dataclasses.replace(settings.defaults, **sampling)

    def prompt_for(self, llm: Any) -> Any:
        """The prompt that LLM.add_request takes: rendered, cut and salted as the line asks. Raises
        RequestError.
        """
        prompt: Any = self.prompt
        if self.messages is not None:
            prompt = llm.render_chat(self.messages, **self.template)
        if self.truncate is not None:
            ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            room = llm.engine_config.max_model_len - (self.params.max_tokens or 1)
            prompt = ids[-(self.truncate if self.truncate > 0 else max(room, 1)) :]
        if self.cache_salt is not None:
            name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            prompt = {name: prompt, "cache_salt": self.cache_salt}
        return prompt

    def _fields(self, line: dict[str, Any], settings: Settings) -> dict[str, Any]:
        """The fields that describe the request: the body of a batch request, the object itself
        where it is bare.
        """
        name = "custom_id" if "custom_id" in line else "id"
        if line.get(name) is not None:
            if type(line[name]) not in (str, int):
                raise LineError(f"{name}={short(line[name])}: must be a string", param=name)
            self.id = line[name]
        if not {"body", "url", "method"} & set(line):
            self.form = "bare"
            return {k: v for k, v in line.items() if k not in ("id", "custom_id")}
        url = line.get("url")
        self.form = URLS.get(url, "completion") if isinstance(url, str) else "completion"
        if not isinstance(self.id, str) or name != "custom_id":
            raise LineError("custom_id: a batch request needs one, a string", param="custom_id")
        if line.get("method") != "POST":
            raise LineError(f"method={short(line.get('method'))}: must be 'POST'", param="method")
        if not isinstance(url, str) or url not in URLS:
            raise LineError(
                f"url={short(url)}: must be one of {', '.join(URLS)}",
                param="url",
                code="unsupported_url",
            )
        unknown = {k: v for k, v in line.items() if k not in ("custom_id", "method", "url", "body")}
        self._leave_out(unknown, settings, " beside 'body'")
        if not isinstance(line.get("body"), dict):
            raise LineError(f"body={short(line.get('body'))}: must be an object", param="body")
        return dict(line["body"])

    def _leave_out(self, unknown: dict[str, Any], settings: Settings, where: str = "") -> None:
        if unknown and not settings.ignore_unknown:
            names = ", ".join(sorted(map(short, unknown)))
            raise LineError(
                f"unknown field {names}{where}", param=min(unknown)[:60], code="unknown_field"
            )
        self.ignored += tuple(name[:60] for name in unknown)

    def _read_prompt(self, fields: dict[str, Any]) -> None:
        """Take the prompt and everything that is not sampling out of `fields`."""
        for name in HARMLESS & set(fields):
            del fields[name]
        for name in NOT_BUILT.keys() & set(fields):
            value = fields.pop(name)
            if value is not None and not any(
                type(value) is type(v) and value == v for v in NOT_BUILT[name]
            ):
                only = " or ".join(json.dumps(v) for v in NOT_BUILT[name]) or "null"
                message = f"{name}={short(value)} is not supported (only {only})"
                raise LineError(message, param=name, code="unsupported_field")
        self.model = take(fields, "model", check.string, self.model)
        self.return_token_ids = take(fields, "return_token_ids", check.boolean, False)
        self.tokens_as_ids = take(fields, "return_tokens_as_token_ids", check.boolean, False)
        self.truncate = take(fields, "truncate_prompt_tokens", check.truncation)
        self.cache_salt = take(fields, "cache_salt", check.string)
        kinds = {"chat": ["messages"], "completion": ["prompt"]}.get(
            self.form, ["prompt", "prompt_token_ids", "messages"]
        )
        given = [kind for kind in kinds if fields.get(kind) is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "has none"
            raise LineError(
                f"a request needs {' or '.join(kinds)}; this one {found}", param=kinds[0]
            )
        for kind in kinds:
            if kind not in given:
                fields.pop(kind, None)
        variables = self._template_variables(fields)
        if given[0] == "messages":
            self.messages = take(fields, "messages", check.messages)
            variables |= take(fields, "chat_template_kwargs", check.template_kwargs, {})
            continued = take(fields, "continue_final_message", check.boolean, False)
            opened = take(fields, "add_generation_prompt", check.boolean, not continued)
            if continued and opened:
                raise LineError(
                    "continue_final_message and add_generation_prompt exclude each other"
                )
            self.template = {"chat_template_kwargs": variables or None}
            self.template |= {"add_generation_prompt": opened, "continue_final_message": continued}
        else:
            self.prompt = take(
                fields, given[0], check.prompt if given[0] == "prompt" else check.integers
            )
            self.return_token_ids |= self.form == "bare" and not isinstance(self.prompt, str)
        if self.form == "chat" or (self.form == "bare" and type(fields.get("logprobs")) is bool):
            on, top = (
                take(fields, "logprobs", check.boolean, False),
                take(fields, "top_logprobs", check.integer, 0),
            )
            if top and not on:
                raise LineError(f"top_logprobs={top} needs logprobs=true", param="top_logprobs")
            if on:
                fields["logprobs"] = top
        if (
            self.messages is not None
            and (longest := take(fields, "max_completion_tokens", check.integer)) is not None
        ):
            fields["max_tokens"] = longest  # OpenAI's new name of it, and the one that wins

    def _template_variables(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What fields of their own tell the chat template; tools may be described to the model but
        not called by it.
        """
        tools, choice = take(fields, "tools", check.tools, []), fields.pop("tool_choice", None)
        if choice not in (None, "none", "auto") or (tools and choice != "none"):
            name = "tools" if tools and choice in (None, "auto") else "tool_choice"
            message = f"{name}={short(tools if name == 'tools' else choice)} is not supported"
            raise LineError(
                f'{message} (tools only with tool_choice "none")',
                param=name,
                code="unsupported_field",
            )
        variables = {"reasoning_effort": take(fields, "reasoning_effort", check.string)}
        if any(variables.values()) and "messages" not in fields:
            raise LineError(
                "reasoning_effort needs messages",
                param="reasoning_effort",
                code="unsupported_field",
            )
        if tools and "messages" not in fields:
            raise LineError("tools need messages", param="tools", code="unsupported_field")
        return {
            name: value
            for name, value in {**variables, "tools": tools or None}.items()
            if value is not None
        }

    def _seed(self, seed: int) -> int:
        """A seed of the line's own: the same in a whole run, a resumed one and a shard."""
        key = f"line {self.number}" if self.id is None else f"id {self.id}"
        return stable_seed(seed, key)


def identify(raw: bytes, number: int) -> str | int | None:
    """The id of a line that is not to be answered here, as `parse` reads it; None where it has
    none.
    """
    if b'id"' not in raw and b"\\u" not in raw:
        return None
    try:
        line = check.json_object(decode(raw, number))
    except LineError:
        return None
    found = line.get("custom_id") if "custom_id" in line else line.get("id")
    return found if type(found) in (str, int) else None


def decode(raw: bytes, number: int) -> str:
    """The text of a line without its ending. Raises LineError when it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as e:
        raise LineError(
            f"not UTF-8: {e.reason} at byte {e.start}", code="invalid_encoding"
        ) from None
