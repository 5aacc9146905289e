"""The body of POST /v1/responses, and its translation to a chat."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self, TypedDict

from pydantic import BeforeValidator, FailFast, Field, model_validator

from jpaged.openai import protocol
from jpaged.openai.fields import (
    ImagePart,
    Integer,
    Number,
    TextPart,
    image_part,
    merged,
    short,
)
from jpaged.openai.forms import Strict
from jpaged.openai.protocol import Body, BodyError, refuse
from jpaged.openai.server.bodies import ROUTES, OfRoute, ServedChat, Translated

# Fields that are not built, each with the values that ask for nothing (null always does).
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
    "n": (1,),
    "skip_special_tokens": (True,),
    "logprobs_mode": ("raw",),
    # Fields that need state between requests.
    "previous_response_id": (),
    "conversation": (),
    "store": (False,),
}
MOST_METADATA = 16  # OpenAI's limit
KEPT = ("previous_response_id", "conversation", "store")
HARMLESS = protocol.HARMLESS - {"metadata", *KEPT} | {"prompt_cache_options"}
# vLLM's fields, which have the same names in a chat.
PASSED = (
    *("seed", "top_k", "min_p", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("chat_template_kwargs", "cache_salt", "priority"),
)
# The field here to blame for an error in a field of the chat.
BLAMED = {
    "messages": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
}


class TextFormat(Strict):
    """The same as response_format, with the fields of the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.name is not None and self.schema_ is not None):
            raise ValueError("type json_schema needs name and schema, and no other type takes them")
        return self

    @property
    def of_a_chat(self) -> dict[str, Any]:
        """Return it as a chat's response_format."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class Text(Strict):
    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: str | None = None
    summary: None = None


def _function(tool: Any) -> Any:
    """Return a tool without its null fields."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError("must be a list of functions")
    return {name: value for name, value in tool.items() if value is not None}


def _few(metadata: Any) -> Any:
    if isinstance(metadata, dict) and len(metadata) > MOST_METADATA:
        raise ValueError(f"has {len(metadata)} entries; at most {MOST_METADATA} are allowed")
    return metadata


Functions = Annotated[list[Annotated[dict[str, Any], BeforeValidator(_function)]], FailFast()]


class InputText(TypedDict):
    """A part of an item's content that is text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(TypedDict):
    """A part that is an image: a data: URL, or a URL of a host that is listed."""

    type: Literal["input_image"]
    image_url: str
    detail: NotRequired[Literal["auto", "high", "original"] | None]


class InputMessage(TypedDict):
    """A message of a user, the system or a developer among the items of an input."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "system", "developer"]
    content: str | list[InputText | InputImage]


# What an item is, is looked at when the chat is made of it.
Item = Annotated[
    dict[str, Any],
    BeforeValidator(lambda item: item, json_schema_input_type=InputMessage | dict[str, Any]),
]


class ResponseStreamOptions(Body):
    """OpenAI's stream_options. include_obfuscation: accepted; nothing is obfuscated."""

    include_obfuscation: bool = False


class ResponseBody(OfRoute):
    """The body of POST /v1/responses. input: a text, or a list of items: messages, function calls,
    their outputs, and reasoning, in the form that answers have.
    """

    harmless: ClassVar[frozenset[str]] = HARMLESS.union(PASSED)  # the chat's body has PASSED
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {**ServedChat.not_built, **NOT_BUILT}
    within: ClassVar[Mapping[str, type[Body]]] = {"stream_options": ResponseStreamOptions}
    needs_state: ClassVar[tuple[str, ...]] = KEPT

    model: str | None = None
    input: str | Annotated[list[Item], FailFast(), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: Text = Text()
    tools: Functions = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _keeps_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.needs_state:
            if data.get(name) not in (None, False):
                said = "this server keeps no responses: send the whole conversation as input"
                refuse(f"{name}={short(data[name])}: {said}", name)
        return data

    @property
    def chat(self) -> dict[str, Any]:
        """Return the body of a chat that asks for the same."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "reasoning_effort": self.reasoning.effort,
            "tool_choice": _choice(self.tool_choice) if self.tools else None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if self.text.format.type != "text":
            body["response_format"] = self.text.format.of_a_chat
        if self.tools:
            body["tools"] = [
                {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
                for tool in self.tools
            ]
        return {name: value for name, value in body.items() if value is not None}

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return self.input

    def forget_sources(self) -> None:
        """Give up the input, which may have images; `items` that were taken before stay."""
        self.input = ""

    @property
    def _messages(self) -> list[dict[str, Any]]:
        begin = [] if self.instructions is None else [_message("system", self.instructions)]
        if isinstance(self.input, str):
            return [*begin, _message("user", self.input)]
        messages: list[dict[str, Any]] = begin
        for place, item in enumerate(self.input):
            try:
                _add(messages, item)
            except (KeyError, TypeError, ValueError) as e:
                said = f"needs {e}" if isinstance(e, KeyError) else str(e)
                raise BodyError(f"input: item {place}: {said}", param="input") from None
        return messages


ROUTES["/v1/responses"] = ResponseBody


class KeptResponseBody(ResponseBody):
    """The body of POST /v1/responses on a server that keeps responses. previous_response_id: the
    one whose items the input has begun with since the body was read.
    """

    needs_state: ClassVar[tuple[str, ...]] = ("conversation",)

    previous_response_id: str | None = None
    store: bool = True


class ServedResponse(Translated):
    """A chat that was made from a body of /v1/responses. asked: that body."""

    asked_kind: ClassVar[type[Body]] = ResponseBody
    passed: ClassVar[tuple[str, ...]] = PASSED
    blamed: ClassVar[Mapping[str, str]] = BLAMED


class ServedKeptResponse(ServedResponse):
    """The same on a server that keeps responses."""

    asked_kind: ClassVar[type[Body]] = KeptResponseBody


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item to the messages. Consecutive reasoning, text and calls of the assistant become
    one message. Raises KeyError or ValueError for an invalid item.
    """
    last = messages[-1] if messages else {}
    kind = item.get("type", "message")
    match kind:
        case "message" if item["role"] != "assistant":
            messages.append(_message(item["role"], _content(item["content"])))
            return
        case "function_call_output":
            output = _message("tool", _content(item["output"]))
            messages.append(output | {"tool_call_id": item["call_id"]})
            return
        case "message" | "function_call" | "reasoning":
            goes_on = last.get("role") == "assistant" and (
                kind == "function_call" or (kind == "message" and last.keys() == THOUGHT)
            )
            if not goes_on:
                messages.append(last := {"role": "assistant"})
        case _:
            raise ValueError(f"type {short(kind)} is not supported")
    if kind == "message":
        last["content"] = _text(item["content"] or [])
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        last["reasoning_content"] = _text(parts)
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)


THOUGHT = {"role", "reasoning_content"}
PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal")


def _content(content: Any) -> Any:
    """Return a content as that of a chat's message: a text, or parts where there are images.
    Raises ValueError for parts of other kinds.
    """
    if isinstance(content, str):
        return content
    parts: list[TextPart | ImagePart] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            if part.get("file_id") is not None:
                raise ValueError("has an image by file_id: this server keeps no files")
            parts.append(image_part(part.get("image_url"), part.get("detail")))
            continue
        if kind not in PARTS:
            raise ValueError("has a part that is neither text nor an input_image")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError("has a part without text")
        parts.append({"type": "text", "text": text})
    return merged(parts)


def _text(content: Any) -> str:
    """Return the text of what a model said. Raises ValueError for a part that is none."""
    said = _content(content)
    if not isinstance(said, str):
        raise ValueError("has a part that is not text")
    return said


def _choice(choice: Any) -> Any:
    """Return tool_choice in the form of a chat."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [{"function": tool} for tool in tools] if isinstance(tools, list) else tools
        allowed = {"mode": choice.get("mode"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice
