"""Bodies that only a server takes: streams, lists of prompts, echo, and those of /tokenize."""

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from jpaged.openai.fields import Integer, Tokens, short
from jpaged.openai.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    refuse,
)
from jpaged.request.inputs import Chat
from jpaged.sampling_params import SamplingParams

TOOL_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


# The bodies of the routes that answer with completions; response_bodies.py adds its own.
ROUTES: dict[str, type[Body]] = {}


class OfRoute(Body):
    """A body of one of ROUTES. A field that another route has, and this one has not, is refused by
    name unless it asks for nothing: whoever sends it wants another answer than he would get.
    """

    @classmethod
    def names(cls) -> set[str]:
        return super().names() | _of_others(cls).keys()

    @model_validator(mode="before")
    @classmethod
    def _without_fields_of_others(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        others = _of_others(cls)
        for name in others.keys() & data.keys():
            url, default = others[name]
            if data[name] and data[name] != default:
                refuse(f"{name}={short(data[name])}: a field of {url}, not of this route", name)
        return {name: value for name, value in data.items() if name not in others}


@functools.cache
def _of_others(kind: type[Body]) -> dict[str, tuple[str, Any]]:
    """The fields that other routes have and a body of this kind has not: by name, the route and
    the field's default there.
    """
    known = {*kind.model_fields, *kind.harmless, *kind.not_built}
    return {
        name: (url, field.default)
        for url, other in ROUTES.items()
        for name, field in other.model_fields.items()
        if name not in known
    }


class StreamOptions(Body):
    """What a stream has beside its pieces.

    include_usage: an event at its end says what was used. continuous_usage_stats: and every event,
    what its completion has used so far (vLLM's). include_obfuscation: nothing is obfuscated.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Served(OfRoute, GenerationRequest):
    """What a server adds to a request of a batch file."""

    within: ClassVar[Mapping[str, type[Body]]] = {"stream_options": StreamOptions}

    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_are_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            refuse("stream_options needs stream=true", "stream_options", "invalid_value")
        return self

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """As vLLM has it: only beside include_usage."""
        options = self.stream_options
        return self.wants_usage and options is not None and options.continuous_usage_stats

    def prompts_for(self, llm: Any, params: SamplingParams) -> list[Any]:
        """Return the prompts, as LLM.add_request takes them. Raises RequestError."""
        return [self.prompt_for(llm, params)]


class ServedChat(Served, ChatCompletionRequest):
    """The body of POST /v1/chat/completions: tools may be called here.

    tool_choice: "auto", "none", "required" (one call or more), or the function that is to be called
    once.
    """

    within: ClassVar[Mapping[str, type[Body]]] = {**Served.within, **ChatCompletionRequest.within}

    parallel_tool_calls: bool = True

    def prompts_for(self, llm: Any, params: SamplingParams) -> list[Any]:
        if self.truncate_prompt_tokens is None:
            llm.session.inputs.check_chat(Chat(messages=self.conversation, **self._template))
        return super().prompts_for(llm, params)

    @property
    def _template(self) -> dict[str, Any]:
        """The fields of a Chat beside its messages."""
        asked = dict(self.template)
        return {"template_kwargs": asked.pop("chat_template_kwargs", None), **asked}

    @model_validator(mode="after")
    def _tools_are_only_described(self) -> Self:
        for tool in self.tools or ():
            name, schema = tool["function"].get("name"), tool["function"].get("parameters") or {}
            if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
                refuse(f"tools: {short(name)} is no name of a function", "tools", "invalid_value")
            if not isinstance(schema, dict):
                refuse(f"tools: parameters of {name} must be a schema", "tools", "invalid_value")
        choice, names = self.tool_choice, [tool["function"]["name"] for tool in self.tools or ()]
        if self._chosen is not None:
            if self._chosen not in names:
                said = f"tool_choice={short(choice)}: there is no such tool"
                refuse(said, "tool_choice", "invalid_value")
        elif choice not in (None, "none", "auto", "required"):
            refuse(f"tool_choice={short(choice)} is not supported", "tool_choice")
        elif choice == "required" and not names:
            refuse('tool_choice="required" needs tools', "tool_choice", "invalid_value")
        if self.must_call and (self.forms or self.structured):
            refuse("a call of a tool cannot have another form as well", "tool_choice")
        return self

    @property
    def _chosen(self) -> str | None:
        """The function that tool_choice names."""
        choice = self.tool_choice
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Those that the answer may call."""
        if self.tool_choice == "none":
            return []
        chosen = self._chosen
        return [t for t in self.tools or () if chosen in (None, t["function"]["name"])]

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or self._chosen is not None

    @property
    def may_call_again(self) -> bool:
        """Whether more than one call may come: a function that is named is called once."""
        return self.parallel_tool_calls and self._chosen is None


def _many_prompts(value: Any) -> Any:
    """Return one prompt as a list of one. Lists of texts and of token ids are many, a list of ids
    one.
    """
    if isinstance(value, list) and value and all(isinstance(v, str | list) for v in value):
        return value
    return [value]


class ServedCompletion(Served, CompletionRequest):
    """The body of POST /v1/completions.

    echo: the prompt's text before the completion, with logprobs the prompt's too; then max_tokens
    may be 0, for these alone.
    """

    prompt: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        list[str | Tokens], FailFast(), BeforeValidator(_many_prompts), Field(min_length=1)
    ]
    echo: bool = False

    @model_validator(mode="after")
    def _echo_has_its_logprobs_at_once(self) -> Self:
        if self.echo and self.stream and self.logprobs is not None:
            refuse("echo with logprobs cannot be a stream", "stream")
        if self.max_tokens == 0 and not (self.echo and not self.stream):
            refuse("max_tokens=0 needs echo=true and no stream", "max_tokens", "invalid_value")
        return self

    @property
    def only_prompt(self) -> bool:
        return self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.only_prompt:
            fields["max_tokens"] = 1  # drawn, and left out of the answer
        if self.echo and self.logprobs is not None:
            fields.setdefault("prompt_logprobs", self.logprobs)
        return fields

    def prompts_for(self, llm: Any, params: SamplingParams) -> list[Any]:
        return [self.fitted(prompt, llm, params) for prompt in self.prompt]


ROUTES |= {"/v1/chat/completions": ServedChat, "/v1/completions": ServedCompletion}


class Tokenize(Body):
    """The body of POST /tokenize with a text."""

    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {"add_special_tokens": (True,)}

    prompt: str
    model: str | None = None
    return_token_strs: bool = False


class TokenizeChat(ServedChat):
    """The body of POST /tokenize with a chat: counted as it would be answered."""

    return_token_strs: bool = False


class Detokenize(Body):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[Integer, Field(ge=0)]], Field(max_length=1 << 20)]
    model: str | None = None
