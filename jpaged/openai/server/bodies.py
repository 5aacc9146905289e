"""Bodies that only a server accepts: with streams, lists of prompts or echo, and those of /tokenize
and /detokenize.
"""

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, FailFast, Field, PrivateAttr, model_validator

from jpaged.openai.fields import Integer, Tokens, as_many, short
from jpaged.openai.protocol import (
    Body,
    BodyError,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    refuse,
)
from jpaged.request.inputs import Chat
from jpaged.sampling_params import SamplingParams

TOOL_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


# The bodies of the routes that generate text; response_bodies.py adds that of /v1/responses.
ROUTES: dict[str, type[Body]] = {}


class OfRoute(Body):
    """A body of one of ROUTES. A field that only another route has is refused by name, unless its
    value asks for nothing: the client expects an effect that it would not get.
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
    """Return the fields that other routes have and this kind of body lacks: by name, the route and
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
    """OpenAI's stream_options.

    include_usage: a last event reports the tokens used. continuous_usage_stats: every event reports
    the tokens of its completion so far (vLLM's). include_obfuscation: accepted; nothing is
    obfuscated.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Served(OfRoute, GenerationRequest):
    """The fields that a server adds to a request of a batch file. blamed: by a field of the chat,
    that of the body to blame for an error in it, where the body has another form.
    """

    blamed: ClassVar[Mapping[str, str]] = {}
    within: ClassVar[Mapping[str, type[Body]]] = {"stream_options": StreamOptions}

    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_are_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            refuse("stream_options needs stream=true", "stream_options", "invalid_value")
        return self

    @classmethod
    def blaming(cls, error: BodyError) -> BodyError:
        """Return an error in a chat as one in the body that it was made of."""
        param = cls.blamed.get(error.param or "", error.param)
        return BodyError(str(error), param=param, code=error.code)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every event reports its usage; as in vLLM, only together with include_usage."""
        options = self.stream_options
        return self.wants_usage and options is not None and options.continuous_usage_stats

    def prompts_for(self, llm: Any, params: SamplingParams) -> list[Any]:
        """Return the prompts in the form that LLM.add_request takes. Raises RequestError."""
        return [self.prompt_for(llm, params)]


class ServedChat(Served, ChatCompletionRequest):
    """The body of POST /v1/chat/completions, in which tools may be called.

    tool_choice: "auto", "none", "required" (at least one call), the function that must be called
    once, or OpenAI's allowed_tools: some of the tools that the model sees. answer_token_ids: the
    answer begins with these tokens, and the model goes on after them as if it had drawn them: the
    text has theirs, logprobs and token_ids have what was drawn.
    """

    within: ClassVar[Mapping[str, type[Body]]] = {**Served.within, **ChatCompletionRequest.within}

    parallel_tool_calls: bool = True
    answer_token_ids: Tokens | None = None

    @model_validator(mode="after")
    def _begun_answers_are_plain(self) -> Self:
        if self.answer_token_ids:
            for name in ("prompt_logprobs", "sampling_mask"):
                if getattr(self, name):
                    refuse(f"answer_token_ids does not work with {name}", name)
        return self

    def prompts_for(self, llm: Any, params: SamplingParams) -> list[Any]:
        if self.truncate_prompt_tokens is None:
            llm.session.inputs.check_chat(Chat(messages=self.conversation, **self._template))
        return super().prompts_for(llm, params)

    @property
    def _template(self) -> dict[str, Any]:
        """Return the fields of a Chat other than its messages."""
        asked = dict(self.template)
        return {"template_kwargs": asked.pop("chat_template_kwargs", None), **asked}

    @model_validator(mode="after")
    def _tools_are_only_described(self) -> Self:
        for tool in self.tools or ():
            name, schema = tool["function"].get("name"), tool["function"].get("parameters") or {}
            if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
                refuse(
                    f"tools: {short(name)} is not a valid name of a function",
                    "tools",
                    "invalid_value",
                )
            if not isinstance(schema, dict):
                refuse(
                    f"tools: the parameters of {name} must be a JSON schema",
                    "tools",
                    "invalid_value",
                )
        choice, names = self.tool_choice, [tool["function"]["name"] for tool in self.tools or ()]
        if self._chosen is not None:
            if self._chosen not in names:
                said = f"tool_choice={short(choice)}: there is no such tool"
                refuse(said, "tool_choice", "invalid_value")
        elif (allowed := self._allowed) is not None:
            if not allowed or not set(allowed) <= set(names):
                unknown = next((n for n in allowed if n not in names), None)
                what = "names no tool" if unknown is None else f"names {short(unknown)}, no tool"
                refuse(f"tool_choice: allowed_tools {what}", "tool_choice", "invalid_value")
        elif choice not in (None, "none", "auto", "required"):
            refuse(f"tool_choice={short(choice)} is not supported", "tool_choice")
        elif choice == "required" and not names:
            refuse('tool_choice="required" needs tools', "tool_choice", "invalid_value")
        if self.must_call and (self.forms or self.structured):
            refuse(
                "tool_choice asks for a call: it cannot be combined with another form",
                "tool_choice",
            )
        return self

    @property
    def forms(self) -> dict[str, dict[str, Any]]:
        """Return FormFields.forms. A response_format is that of a text: where the answer must be
        calls there is none, and their schemas hold alone.
        """
        forms = super().forms
        if self.must_call:
            forms.pop("response_format", None)
        return forms

    @property
    def _chosen(self) -> str | None:
        """Return the name of the function that tool_choice requires, or None."""
        choice = self.tool_choice
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        chosen, allowed = self._chosen, self._allowed
        named = [t for t in self.tools or () if chosen in (None, t["function"]["name"])]
        return [t for t in named if allowed is None or t["function"]["name"] in allowed]

    @property
    def _allowed(self) -> list[Any] | None:
        """Return the names of OpenAI's allowed_tools, to which calls are held although the model
        sees all tools; None if tool_choice is no such object.
        """
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return None
        allowed: Any = choice.get("allowed_tools")
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or allowed.get("mode") not in ("auto", "required"):
            said = 'tool_choice: allowed_tools needs a mode, "auto" or "required", and tools'
            refuse(said, "tool_choice", "invalid_value")
        functions = [tool.get("function") if isinstance(tool, dict) else tool for tool in tools]
        return [str(f.get("name") if isinstance(f, dict) else f) for f in functions]

    @property
    def limits_tools(self) -> bool:
        """Whether calls are held to some of the tools that the model sees."""
        return self._allowed is not None

    @property
    def must_call(self) -> bool:
        if self.limits_tools:
            return self.tool_choice["allowed_tools"]["mode"] == "required"
        return self.tool_choice == "required" or self._chosen is not None

    @property
    def may_call_again(self) -> bool:
        """Return whether there may be more than one call: a function that tool_choice names is
        called once.
        """
        return self.parallel_tool_calls and self._chosen is None


class Translated(ServedChat):
    """A chat that was made from a body of another form. asked: that body.

    asked_kind: its type. passed: its fields that have the same names in a chat.
    """

    asked_kind: ClassVar[type[Body]]
    passed: ClassVar[tuple[str, ...]] = ()

    _asked: Any = PrivateAttr()
    _unused: tuple[str, ...] = PrivateAttr(default=())

    @property
    def asked(self) -> Any:
        return self._asked

    def forget_sources(self) -> None:
        super().forget_sources()
        self._asked.forget_sources()

    @property
    def ignored(self) -> tuple[str, ...]:
        return super().ignored + self._unused

    @classmethod
    def known(cls, data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        return cls.asked_kind.known(data)

    @classmethod
    def read(cls, data: Any) -> Self:
        asked: Any = cls.asked_kind.read(data)
        passed = {name: data[name] for name in cls.passed if name in data}
        chat = asked.chat
        for name in passed.keys() & chat.keys():  # variables of the template come from both
            if isinstance(chat[name], dict) and isinstance(passed[name], dict):
                chat[name] = passed[name] | chat[name]
        try:
            body = super().read(passed | chat)
        except BodyError as e:
            raise cls.blaming(e) from None
        body._asked = asked
        return body


class ServedCompletion(Served, CompletionRequest):
    """The body of POST /v1/completions.

    echo: the answer begins with the text of the prompt, and the logprobs with those of the prompt.
    max_tokens may then be 0, to get the prompt alone.
    """

    prompt: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        list[str | Tokens],
        FailFast(),
        BeforeValidator(as_many, json_schema_input_type=str | Tokens | list[str | Tokens]),
        Field(min_length=1),
    ]
    echo: bool = False

    @model_validator(mode="after")
    def _echo_has_its_logprobs_at_once(self) -> Self:
        if self.echo and self.stream and self.logprobs is not None:
            refuse("echo with logprobs does not work with stream=true", "stream")
        if self.max_tokens == 0 and not (self.echo and not self.stream):
            refuse("max_tokens=0 needs echo=true and no stream", "max_tokens", "invalid_value")
        return self

    @property
    def only_prompt(self) -> bool:
        return self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.only_prompt:
            fields["max_tokens"] = 1  # one token is drawn, and left out of the answer
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
    """The body of POST /tokenize with a conversation, which is tokenized in the same way as for an
    answer.
    """

    return_token_strs: bool = False


class Detokenize(Body):
    """The body of POST /detokenize. return_token_strs: return the text of each token by itself
    too.
    """

    tokens: Annotated[list[Annotated[Integer, Field(ge=0)]], Field(max_length=1 << 20)]
    model: str | None = None
    return_token_strs: bool = False
