"""Bodies of OpenAI's requests with vLLM's extra fields, as strict pydantic models.

A bool is not an integer, NaN is not a number, and null means "not given". A known field is one of
three: it is built; it is harmless (HARMLESS: any value is accepted, since none changes the answer);
or it is not built (NOT_BUILT: values that ask for nothing are accepted, all others refused by
name). `Body.read` refuses unknown fields; `Body.read_known` leaves them out and lists them.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, LiteralString, NoReturn, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jpaged.errors import CapacityError, RequestError
from jpaged.openai.fields import (
    Arguments,
    Biases,
    Content,
    Integer,
    Number,
    Prompt,
    Tokens,
    Tools,
    Truncation,
    Variables,
    VideoOptions,
    short,
)
from jpaged.openai.forms import FormFields
from jpaged.request.embeddings import as_mapping
from jpaged.request.inputs import Chat
from jpaged.sampling_params import SamplingParams

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "spaces_between_special_tokens",
        "prediction",  # makes OpenAI's servers faster, and changes no token
        "guided_decoding_backend",  # jpaged has one backend, which enforces every form
    }
)
# Fields that are not built, with the values that ask for nothing. Those are accepted, and so is
# null; any other value is refused.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "length_penalty": (1, 1.0),
    "include_reasoning": (True,),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "max_repetition_pattern_size": (0,),
    "min_repetition_pattern_size": (0,),
    "repetition_min_count": (0,),
    "truncation_side": ("left",),
    "watermarking": (False,),
    "stream_options": (),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "guided_whitespace_pattern": (),
    "chat_template": (),
    "documents": ([],),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True,),  # the tokenizer adds them to a text
    "prompt_embeds": (),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
}
MOST_FIELDS = 256
MOST_NAMES = 8  # unknown fields that an error lists at most
INVALID_IMAGE, INVALID_VIDEO = "invalid_image", "invalid_video"
# Of errors; others are an invalid value.
CODES = ("unsupported_field", "unsupported_url", "unknown_field")


class BodyError(RequestError):
    """A body that cannot be served. param: the field to blame. code: the reason, for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code


def refuse(message: str, param: str | None, code: LiteralString = "unsupported_field") -> NoReturn:
    """Raise the error of a validator of a whole body, and blame one field."""
    raise PydanticCustomError(code, "{message}", {"param": param, "message": message})


class Body(BaseModel):
    """A strict body, in which null means "not given".

    harmless: fields that are accepted with any value, since none changes the answer. not_built:
    fields that are not built, with the values that ask for nothing (null always does). within:
    fields whose values are bodies themselves, or lists of bodies.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    harmless: ClassVar[frozenset[str]] = frozenset()
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    within: ClassVar[Mapping[str, "type[Body]"]] = {}

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the names of the fields that read_known left out; those of a nested body as
        "messages.NAME".
        """
        return self._ignored

    @classmethod
    def names(cls) -> set[str]:
        """Return the fields that are known: built, harmless, or not built."""
        return {*cls.model_fields, *cls.harmless, *cls.not_built}

    @model_validator(mode="before")
    @classmethod
    def _built(cls, data: Any) -> Any:
        """Return the fields that are built and given. Refuse a field that is not built, by name, if
        its value asks for something.
        """
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_FIELDS:
            refuse(f"{len(data)} fields are more than any request has", None, "unknown_field")
        built = cls.model_fields
        for name in cls.not_built.keys() & data.keys() - built.keys():
            value, allowed = data[name], cls.not_built[name]
            if value is None or any(type(value) is type(v) and value == v for v in allowed):
                continue
            only = " or ".join(json.dumps(v) for v in allowed) or "null"
            refuse(f"{name}={short(value)} is not supported (only {only})", name)
        left_out = (cls.harmless | cls.not_built.keys()) - built.keys()
        return {
            name: value
            for name, value in data.items()
            if name not in left_out and (value is not None or name not in built)
        }

    @classmethod
    def known(cls, data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the known fields of a body, and the names of the others."""
        names, kept, unknown = cls.names(), {}, dict[str, None]()
        for name, value in data.items():
            if name not in names:
                unknown[name] = None
            elif (body := cls.within.get(name)) is None:
                kept[name] = value
            elif isinstance(value, list):
                pairs = [body._known_within(member) for member in value]
                kept[name] = [member for member, _ in pairs]
                unknown |= dict.fromkeys(f"{name}.{n}" for _, more in pairs for n in more)
            else:
                kept[name], more = body._known_within(value)
                unknown |= dict.fromkeys(f"{name}.{n}" for n in more)
        return kept, tuple(unknown)

    @classmethod
    def _known_within(cls, value: Any) -> tuple[Any, tuple[str, ...]]:
        """Do the same for a nested body or a list of them. One with more fields than any body has
        is left as it is, and refused later.
        """
        is_one = isinstance(value, dict) and len(value) <= MOST_FIELDS
        return cls.known(value) if is_one else (value, ())

    @classmethod
    def read_known(cls, data: Any) -> Self:
        """Like `read`, but leave unknown fields out; `ignored` lists them."""
        data, names = cls._known_within(data)
        body = cls.read(data)
        body._ignored = names
        return body

    @classmethod
    def read(cls, data: Any) -> Self:
        """Return the checked body. Raises BodyError, which names the first wrong field and its
        value.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as e:
            raise _told(e, data) from None


def _told(error: ValidationError, data: Any) -> BodyError:
    errors = error.errors(include_url=False, include_input=False)
    wrong = [e for e in errors if e["type"] != "extra_forbidden"]
    if not wrong and all(len(e["loc"]) == 1 for e in errors):
        return unknown_fields([str(e["loc"][0]) for e in errors])
    first, *_ = wrong = wrong or errors
    if not first["loc"]:
        return BodyError(first["msg"], param=first.get("ctx", {})["param"], code=first["type"])
    param = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return BodyError(f"a request needs {param}; this one has none", param=param)
    # A union has an error for each of its types.
    reasons = dict.fromkeys(_reason(e) for e in wrong if e["loc"][0] == param)
    code = "unknown_field" if first["type"] == "extra_forbidden" else first["type"]
    code = code if code in CODES else "invalid_value"
    message = f"{param}={short(data.get(param))}: {' or '.join([*reasons][:2])}"
    return BodyError(message, param=param, code=code)


def _reason(error: Any) -> str:
    """Return pydantic's message, and the place inside the field that it is about."""
    places = [str(place) for place in error["loc"][1:] if "[" not in str(place) and place != "str"]
    message = error["msg"].removeprefix("Value error, ")
    return f"{'.'.join(places)}: {message}" if places else message


def unknown_fields(names: list[str], path: str = "") -> BodyError:
    """Return the error for unknown fields of a body, which lists the first MOST_NAMES of them."""
    told = ", ".join(sorted(map(short, sorted(names)[:MOST_NAMES])))
    if len(names) > MOST_NAMES:
        told += f" and {len(names) - MOST_NAMES} more"
    return BodyError(f"unknown field {told}{path}", param=min(names)[:60], code="unknown_field")


class SamplingFields(Body):
    """The fields of SamplingParams that every request takes; SamplingParams checks their ranges.

    longest: the value of max_tokens if neither the request nor a default sets one.
    """

    longest: ClassVar[int | None] = None

    n: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: str | Annotated[list[str], FailFast()] | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Integer | None = None
    logprobs_mode: str | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Biases | None = None
    bad_words: Annotated[list[str], FailFast()] | None = None
    allowed_token_ids: Tokens | None = None
    sampling_mask: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured: dict[str, Any] | None = None
    priority: Integer | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that the request sets."""
        return {name: getattr(self, name) for name in SAMPLING if name in self.model_fields_set}

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """Return the SamplingParams of the request. Its own fields take precedence over `more`, and
        those over `defaults`.
        """
        fields = {"max_tokens": self.longest, **more, **self.sampling()}
        return dataclasses.replace(defaults, **fields)


SAMPLING = tuple(SamplingFields.model_fields)


class GenerationRequest(SamplingFields, FormFields):
    """The fields that requests with a prompt and requests with a conversation share."""

    is_chat: ClassVar[bool] = False
    harmless: ClassVar[frozenset[str]] = HARMLESS
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_BUILT

    model: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    cache_salt: str | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    reasoning_effort: str | None = None

    _images: Sequence[Any] | None = PrivateAttr(default=None)
    _videos: Sequence[Any] | None = PrivateAttr(default=None)

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | _unless_none(structured=next(iter(self.forms.values()), None))

    @model_validator(mode="after")
    def _tools_are_only_described(self) -> Self:
        tools, choice = self.tools, self.tool_choice
        if choice not in (None, "none", "auto") or (tools and choice != "none"):
            name = "tools" if tools and choice in (None, "auto") else "tool_choice"
            said = f"{name}={short(getattr(self, name))} is not supported"
            refuse(f'{said} (tools are accepted only with tool_choice "none")', name)
        for name in ("reasoning_effort", "tools"):
            if getattr(self, name) and not self.is_chat:
                refuse(f"{name} needs messages", name)
        return self

    @property
    def image_sources(self) -> list[str]:
        """Where the images of the prompt are, in order: data: URLs, URLs, or paths."""
        return []

    @property
    def video_sources(self) -> list[str]:
        """Where the videos of the prompt are, as images."""
        return []

    @property
    def has_sources(self) -> bool:
        """Whether the prompt has images or videos."""
        return bool(self.image_sources or self.video_sources)

    def put_sources(self, images: Sequence[Any] | None, videos: Sequence[Any] | None) -> None:
        """Take the images and videos that the sources stand for, in order and in any form that a
        prompt takes; None: give them up again.
        """
        self._images, self._videos = images, videos

    def forget_sources(self) -> None:
        """Give up where images and videos are, which may be megabytes, once the prompt is made."""

    def given_prompt(self, llm: Any) -> Any:
        """Return the prompt as text or token ids; a conversation is rendered by the model's chat
        template. Where there are images or videos, it is a dict of token ids and what stands in
        their places.
        """
        raise NotImplementedError

    def prompt_for(self, llm: Any, params: SamplingParams) -> Any:
        """Return the prompt that LLM.add_request takes: rendered, cut and salted as the body asks.
        Raises RequestError.
        """
        return self.fitted(self.given_prompt(llm), llm, params)

    def fitted(self, prompt: Any, llm: Any, params: SamplingParams) -> Any:
        """Return a prompt after truncation, and with its salt, as the body asks."""
        if self.truncate_prompt_tokens is not None and self.has_sources:
            said = (
                "truncate_prompt_tokens does not work with images and videos, whose places it "
                "would cut"
            )
            raise BodyError(said, param="truncate_prompt_tokens", code="unsupported_field")
        if self.truncate_prompt_tokens is not None:
            ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            room = llm.engine_config.max_model_len - (params.max_tokens or 1)
            most = self.truncate_prompt_tokens
            prompt = ids[-(most if most > 0 else max(room, 1)) :]
        if self.cache_salt is not None and isinstance(prompt, dict):
            prompt = {**prompt, "cache_salt": self.cache_salt}
        elif self.cache_salt is not None:
            name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            prompt = {name: prompt, "cache_salt": self.cache_salt}
        return prompt


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    longest: ClassVar[int | None] = 16  # OpenAI's default

    prompt: Prompt
    logprobs: Integer | None = None

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | _unless_none(logprobs=self.logprobs)

    def given_prompt(self, llm: Any) -> Any:
        return self.prompt


class Function(BaseModel):
    """A function that a model called earlier in the conversation. Clients may send parsed_arguments
    beside the arguments; the template gets the arguments only.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: Arguments = {}
    parsed_arguments: Annotated[Any, Field(exclude=True)] = None


class ToolCall(BaseModel):
    """A tool call, in the form of an answer or of a stream's pieces added up. The latter has an
    index, which the template does not get.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    id: Any = None
    type: Any = None
    function: Function
    index: Annotated[Any, Field(exclude=True)] = None


class Message(Body):
    """One message of a conversation. The chat template writes its tool calls and their results.

    A message that a server has sent is accepted in any form in which a client may serialise it.
    annotations and parsed (of the openai package) repeat what the text says. A refusal is text of
    the assistant. reasoning is vLLM's newer name for reasoning_content.
    """

    harmless: ClassVar[frozenset[str]] = frozenset({"annotations", "parsed"})
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {"audio": (), "function_call": ()}

    role: Annotated[str, Field(min_length=1)]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast()] | None = None
    refusal: Annotated[str | None, Field(exclude=True)] = None
    reasoning: Annotated[str | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("has no content")
        if isinstance(self.content, list):
            if self.role == "assistant":
                raise ValueError("an assistant's message cannot have an image or a video")
        else:
            self.content = "\n".join(filter(None, (self.content, self.refusal)))
        if self.reasoning is not None:
            if self.reasoning_content not in (None, self.reasoning):
                raise ValueError("reasoning and reasoning_content differ: send only one of them")
            self.reasoning_content = self.reasoning
        self.tool_calls = self.tool_calls or None
        return self


class ChosenLogprobs(GenerationRequest):
    """logprobs as OpenAI's chats have it (true, with top_logprobs beside it) or as a number."""

    logprobs: bool | Integer | None = None
    top_logprobs: Integer | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and self.logprobs is not True:
            said = f"top_logprobs={self.top_logprobs} needs logprobs=true"
            refuse(said, "top_logprobs", "invalid_value")
        return self

    def sampling(self) -> dict[str, Any]:
        count = self.logprobs
        if isinstance(count, bool):
            count = self.top_logprobs or 0 if count else None
        return super().sampling() | _unless_none(logprobs=count)


class Conversation(ChosenLogprobs):
    """A conversation, and the options of rendering it with the chat template.

    mm_processor_kwargs: what is taken of its videos, by vLLM's name.
    """

    is_chat: ClassVar[bool] = True
    # The chat template writes the special tokens of a chat.
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_BUILT | {
        "add_special_tokens": (False,)
    }
    within: ClassVar[Mapping[str, type[Body]]] = {"messages": Message}

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: Integer | None = None  # OpenAI's new name for max_tokens, which wins
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: VideoOptions | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _continues_or_opens(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            said = "continue_final_message and add_generation_prompt exclude each other"
            refuse(said, None, "invalid_value")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages for the chat template, which writes a placeholder for {"type": "image"} and
        for {"type": "video"}.
        """
        return [
            message.model_dump(exclude_none=True, exclude={"content"})
            | {"content": _for_template(message.content)}
            for message in self.messages
        ]

    @property
    def image_sources(self) -> list[str]:
        return self._urls("image_url")

    @property
    def video_sources(self) -> list[str]:
        return self._urls("video_url")

    def forget_sources(self) -> None:
        for part in self._parts:
            if part["type"] in PLACEHOLDERS:
                part[part["type"]] = {"url": ""}

    def _urls(self, kind: str) -> list[str]:
        return [part[kind]["url"] for part in self._parts if part["type"] == kind]

    @property
    def _parts(self) -> list[dict[str, Any]]:
        contents = [message.content for message in self.messages]
        return [part for content in contents if isinstance(content, list) for part in content]

    @property
    def template(self) -> dict[str, Any]:
        """Return the keyword arguments of LLM.render_chat."""
        variables = _unless_none(reasoning_effort=self.reasoning_effort, tools=self.tools or None)
        opened = self.add_generation_prompt
        return {
            "chat_template_kwargs": variables | (self.chat_template_kwargs or {}) or None,
            "add_generation_prompt": not self.continue_final_message if opened is None else opened,
            "continue_final_message": self.continue_final_message,
        }

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | _unless_none(max_tokens=self.max_completion_tokens)

    def given_prompt(self, llm: Any) -> Any:
        if not self.has_sources:
            return llm.render_chat(self.conversation, **self.template)
        options = dict(self.template)
        chat = Chat(
            messages=self._with_their_sources(),
            template_kwargs=options.pop("chat_template_kwargs"),
            **options,
        )
        return placed(llm, chat)

    def _with_their_sources(self) -> list[dict[str, Any]]:
        """Return the conversation with the images and videos that `put_sources` has taken."""
        left = {"image": iter(self._images or ()), "video": iter(self._videos or ())}
        options = {"image": {}, "video": self.mm_processor_kwargs or {}}
        messages = self.conversation
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = [
                    part
                    if part["type"] == "text"
                    else part | options[part["type"]] | {part["type"]: next(left[part["type"]])}
                    for part in message["content"]
                ]
        return messages


class ChatCompletionRequest(Conversation):
    """The body of /v1/chat/completions."""

    @field_validator("logprobs")
    @classmethod
    def _is_a_switch(cls, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value


URLS: dict[str, type[GenerationRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}


PLACEHOLDERS = {"image_url": "image", "video_url": "video"}  # as a chat template knows them


def placed(llm: Any, prompt: Chat | dict[str, Any]) -> dict[str, Any]:
    """Return a prompt with images or videos as its token ids and what stands in their places, which
    have their final size then. Raises RequestError; BodyError for an image or a video that cannot
    be taken.
    """
    try:
        made = llm.session.inputs.prompt(prompt, must_fit=False)
    except CapacityError:
        raise
    except RequestError as e:
        for begin, code in (("images[", INVALID_IMAGE), ("videos[", INVALID_VIDEO)):
            if str(e).startswith(begin):
                raise BodyError(str(e), param="messages", code=code) from e
        raise
    return {"prompt_token_ids": list(made.ids), "embeddings": as_mapping(made.spans)}


def _for_template(content: Any) -> Any:
    """Return a message's content without what its images and videos are, which may be megabytes
    long.
    """
    if not isinstance(content, list):
        return content
    return [
        part if part["type"] == "text" else {"type": PLACEHOLDERS[part["type"]]} for part in content
    ]


def _unless_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
