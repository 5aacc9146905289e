"""Bodies that only a server takes: streams, lists of prompts, echo, and those of /tokenize."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from jpaged.openai.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Integer,
    Tokens,
    refuse,
    short,
)
from jpaged.request.sampling_params import SamplingParams

TOOL_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


class StreamOptions(Body):
    """What a stream has beside its pieces."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class Served(GenerationRequest):
    """What a server adds to a request of a batch file."""

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

    def prompts_for(self, llm: Any, params: SamplingParams) -> list[Any]:
        """The prompts, as LLM.add_request takes them. Raises RequestError."""
        return [self.prompt_for(llm, params)]


class ServedChat(Served, ChatCompletionRequest):
    """The body of POST /v1/chat/completions: tools may be called here."""

    @model_validator(mode="after")
    def _tools_are_only_described(self) -> Self:
        for tool in self.tools or ():
            name, schema = tool["function"].get("name"), tool["function"].get("parameters", {})
            if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
                refuse(f"tools: {short(name)} is no name of a function", "tools", "invalid_value")
            if not isinstance(schema, dict):
                refuse(f"tools: parameters of {name} must be a schema", "tools", "invalid_value")
        choice = self.tool_choice
        if choice not in (None, "none", "auto"):
            refuse(f"tool_choice={short(choice)} is not supported", "tool_choice")
        return self

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def _many_prompts(value: Any) -> Any:
    """One prompt as a list of one. Lists of texts and of token ids are many, a list of ids one."""
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
        given = super().sampling()
        if self.only_prompt:
            given["max_tokens"] = 1  # drawn, and left out of the answer
        if self.echo and self.logprobs is not None:
            given.setdefault("prompt_logprobs", self.logprobs)
        return given

    def prompts_for(self, llm: Any, params: SamplingParams) -> list[Any]:
        return [self.fitted(prompt, llm, params) for prompt in self.prompt]


class Tokenize(Body):
    """The body of POST /tokenize with a text; with messages it is a Conversation."""

    prompt: str
    model: str | None = None
    return_token_strs: bool = False


class Detokenize(Body):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[Integer, Field(ge=0)]], Field(max_length=1 << 20)]
    model: str | None = None
