"""The body of POST /v1/messages, Anthropic's form of a chat, and its translation to ours."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, get_args

from pydantic import BeforeValidator, FailFast, Field, model_validator

from jpaged.openai.fields import (
    ImagePart,
    Integer,
    Number,
    TextPart,
    image_part,
    merged,
    short,
)
from jpaged.openai.protocol import Body, BodyError, refuse
from jpaged.openai.server.bodies import TOOL_NAME, Translated

# Fields of Anthropic's servers that change no answer here.
HARMLESS = frozenset(
    {
        *("metadata", "service_tier", "inference_geo", "cache_control", "diagnostics", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)
# Fields that are not built, each with the values that ask for nothing (null always does).
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
}
# vLLM's fields, which have the same names in a chat.
PASSED = (
    *("seed", "min_p", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("chat_template_kwargs", "cache_salt", "priority"),
)
# The field here to blame for an error in a field of the chat.
BLAMED = {"stop": "stop_sequences", "response_format": "output_config"}
MediaType = Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
MEDIA_TYPES: tuple[MediaType, ...] = get_args(MediaType)
FROM_MODEL = ("text", "thinking", "redacted_thinking", "tool_use")


def _system(value: Any) -> Any:
    """Return the text of a system prompt, which may be a list of blocks of text."""
    try:
        return _text(value) if isinstance(value, list) else value
    except KeyError as e:  # which pydantic takes for a bug of ours
        raise ValueError(f"a block needs {e}") from None


class Thinking(Body):
    """Whether the model is to think before it answers, for chat templates that have a switch.

    budget_tokens: read and not enforced, since the model decides when it has thought enough;
    max_tokens bounds both.
    """

    harmless: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Integer, Field(ge=1)] | None = None


class ToolChoice(Body):
    """Which tools the answer may call. any: at least one; tool: the one of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_its_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type tool needs a name, and no other type takes one")
        return self

    @property
    def of_a_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class OutputFormat(Body):
    """The form of the answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer, and how long the model is to think."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


def _tool(tool: Any) -> Any:
    """Return a function in the form of a chat. Anthropic's own tools run on its servers."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise ValueError(f"{short(kind)} is not supported: only tools of the client's are")
    name = tool.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ValueError(f"{short(name)} is not a valid name of a tool")
    if not isinstance(tool.get("input_schema"), dict):
        raise ValueError(f"{name} needs an input_schema")
    function = {"name": name, "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


Functions = Annotated[list[Annotated[dict[str, Any], BeforeValidator(_tool)]], FailFast()]


class TextBlock(TypedDict):
    """A block of content that is text."""

    type: Literal["text"]
    text: str


class Base64Source(TypedDict):
    """An image in a request itself."""

    type: Literal["base64"]
    media_type: MediaType
    data: str


class URLSource(TypedDict):
    """An image at an http or https URL of a host that is listed."""

    type: Literal["url"]
    url: str


class ImageBlock(TypedDict):
    """A block of content that is an image."""

    type: Literal["image"]
    source: Base64Source | URLSource


class UserMessage(TypedDict):
    """A message of a user."""

    role: Literal["user"]
    content: str | list[TextBlock | ImageBlock]


# What a message says, is looked at when the chat is made of it.
AnyMessage = Annotated[
    dict[str, Any],
    BeforeValidator(lambda message: message, json_schema_input_type=UserMessage | dict[str, Any]),
]


class CountedMessages(Body):
    """The body of POST /v1/messages/count_tokens, whose fields an answer has too."""

    harmless: ClassVar[frozenset[str]] = HARMLESS
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_BUILT
    within: ClassVar[Mapping[str, type[Body]]] = {"thinking": Thinking, "tool_choice": ToolChoice}

    model: str | None = None
    messages: Annotated[list[AnyMessage], FailFast(), Field(min_length=1)]
    system: Annotated[
        str | None,
        BeforeValidator(_system, json_schema_input_type=str | list[dict[str, Any]] | None),
    ] = None
    tools: Functions = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def forget_sources(self) -> None:
        """Give up the messages, which may have images."""
        self.messages = []

    @property
    def chat(self) -> dict[str, Any]:
        """Return the body of a chat that asks for the same."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for place, message in enumerate(self.messages):
            try:
                messages += _messages(message)
            except (KeyError, TypeError, ValueError) as e:
                said = f"needs {e}" if isinstance(e, KeyError) else str(e)
                raise BodyError(f"messages: message {place}: {said}", param="messages") from None
        # A last message of the assistant is the beginning of the answer.
        goes_on = messages[-1]["role"] == "assistant"
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "continue_final_message": goes_on or None,
            "tools": self.tools or None,
        }
        if self.tool_choice is not None and self.tools:
            body["tool_choice"] = self.tool_choice.of_a_chat
            body["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
            body["chat_template_kwargs"] = {"enable_thinking": is_on}
        if self.output_config is not None:
            body["reasoning_effort"] = self.output_config.effort
            if (form := self.output_config.format) is not None:
                schema = {"name": "answer", "schema": form.schema_}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in body.items() if value is not None}


class MessagesBody(CountedMessages):
    """The body of POST /v1/messages."""

    harmless: ClassVar[frozenset[str]] = HARMLESS.union(PASSED)  # the chat's body has PASSED

    max_tokens: Annotated[Integer, Field(ge=1)]
    stop_sequences: Annotated[list[str], FailFast()] | None = None
    stream: bool = False
    temperature: Number | None = None
    top_k: Integer | None = None
    top_p: Number | None = None

    @model_validator(mode="after")
    def _choice_has_tools(self) -> Self:
        choice = "auto" if self.tool_choice is None else self.tool_choice.type
        if choice in ("any", "tool") and not self.tools:
            refuse(f"tool_choice of type {choice} needs tools", "tool_choice", "invalid_value")
        return self

    @property
    def chat(self) -> dict[str, Any]:
        more = {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }
        return super().chat | {name: value for name, value in more.items() if value is not None}


class ServedMessage(Translated):
    """A chat that was made from a body of /v1/messages. asked: that body."""

    asked_kind: ClassVar[type[Body]] = MessagesBody
    passed: ClassVar[tuple[str, ...]] = PASSED
    blamed: ClassVar[Mapping[str, str]] = BLAMED

    @classmethod
    def read(cls, data: Any) -> Self:
        body = super().read(data)
        asked = body.asked
        assert isinstance(asked, MessagesBody)
        if asked.thinking is not None and asked.thinking.budget_tokens is not None:
            body._unused = ("thinking.budget_tokens",)
        return body


class CountedMessage(Translated):
    """A chat that was made from a body of /v1/messages/count_tokens."""

    asked_kind: ClassVar[type[Body]] = CountedMessages
    blamed: ClassVar[Mapping[str, str]] = BLAMED


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat that say the same: the results of tools are messages of their
    own. Raises KeyError or ValueError for one that is wrong.
    """
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant", "system"):
        raise ValueError(f"role {short(role)} is not supported")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ValueError("content must be a text or a list of blocks")
    blocks = [(_kind(block), block) for block in content]
    if role == "assistant":
        return [_of_model(blocks)]
    results = [_result(block) for kind, block in blocks if kind == "tool_result"]
    others = [block for kind, block in blocks if kind != "tool_result"]
    if others or not results:
        results.append({"role": role, "content": _content(others)})
    return results


def _kind(block: Any) -> Any:
    if not isinstance(block, dict):
        raise ValueError("a block of content must be an object")
    return block.get("type")


def _of_model(blocks: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    """Return one message of the assistant. Thoughts that only Anthropic can read are left out."""
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts = list[str](), list[str]()
    for kind, block in blocks:
        if kind not in FROM_MODEL:
            raise ValueError(f"a block of type {short(kind)} is not supported")
        if kind == "text":
            texts.append(_text([block]))
        elif kind == "thinking":
            thoughts.append(_string(block["thinking"], "thinking"))
        elif kind == "tool_use":
            if not isinstance(block["input"], dict):
                raise ValueError("the input of a tool must be an object")
            function = {"name": _string(block["name"], "name"), "arguments": block["input"]}
            call = {"id": block["id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    content = content if isinstance(content, str) else _content(content)
    if block.get("is_error") is True:
        if not isinstance(content, str):
            raise ValueError("an error of a tool cannot have an image")
        content = f"Error: {content}"
    name = _string(block["tool_use_id"], "id")
    return {"role": "tool", "content": content, "tool_call_id": name}


def _content(blocks: Any) -> Any:
    """Return the content of a chat's message that says what a list of blocks does: a text, or parts
    where there are images.
    """
    if not isinstance(blocks, list):
        raise ValueError("content must be a text or a list of blocks")
    parts: list[TextPart | ImagePart] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "image":
            parts.append(image_part(_url_of(block["source"])))
        elif kind == "text":
            parts.append({"type": "text", "text": _string(block["text"], "text")})
        else:
            raise ValueError(f"a block of type {short(kind)} is not supported here")
    return merged(parts)


def _url_of(source: Any) -> str:
    """Return the URL of an image's source, a data: URL where the source has the image itself."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        url = _string(source["url"], "url")
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(f"the url of an image is {short(url)}: must be http or https")
        return url
    if kind != "base64":
        raise ValueError(
            f"a source of type {short(kind)} is not supported: only base64 and url are"
        )
    media = source["media_type"]
    if media not in MEDIA_TYPES:
        raise ValueError(f"media_type {short(media)}: must be one of {', '.join(MEDIA_TYPES)}")
    return f"data:{media};base64,{_string(source['data'], 'data')}"


def _text(blocks: Any) -> str:
    """Return the text of a list of blocks. Raises ValueError for a block that is none."""
    if isinstance(blocks, list) and any(_kind(block) == "image" for block in blocks):
        raise ValueError("a block of type 'image' is not supported here")
    return _content(blocks)


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value
