"""RolloutModel: an LLM as the model that marin's rolloutengine asks for turns, by exact tokens.

    llm = jpaged.LLM(config, params=params, tokenizer=tokenizer)
    engine = ShellboxRolloutEngine(RolloutModel(llm, sampling_params), factories, ...)

rolloutengine (github.com/marin-community/marin, lib/rolloutengine) is in no package index: what it
has in `rolloutengine.contracts` is imported when a RolloutModel is made.
"""

import asyncio
import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from jpaged.errors import ConfigError, RequestError
from jpaged.llm import LLM
from jpaged.openai.parts import Format, folded
from jpaged.request.detokenizer import decode
from jpaged.request.embeddings import EmbeddingSpan
from jpaged.request.images import split_sources
from jpaged.request.inputs import Chat, may_have_images
from jpaged.request.served_turns import tokens_behind, told
from jpaged.sampling_params import SamplingParams

# What the options of a request may hold, beside `tools` and `chat_template_kwargs`, and what of it
# asks for nothing.
NOTHING = {"tool_choice": ("auto", "none", None), "parallel_tool_calls": (True, None)}
END_OF_PROMPT = 8  # tokens, which say whether the template has opened the reasoning


class ModelRequest(Protocol):
    """rolloutengine's request for one turn. prefix_token_ids: all that was served so far, empty at
    first. assistant_message_index: of the last message that was drawn, None at first.
    """

    messages: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    prefix_token_ids: tuple[int, ...]
    assistant_message_index: int | None


class RolloutModel:
    """A callable from rolloutengine's ModelRequest to the ModelTurn that an LLM draws. Turns join
    one batch with whatever else the LLM does, and a task that is cancelled aborts its turn.

    llm: with a tokenizer that has a chat template. sampling_params: of each turn; max_tokens is
    bounded by the rest of the context, and None takes all of it. n must be 1. Raises ConfigError.

    What was served is never rendered again: a later prompt is those tokens and, behind them, what
    the template writes after the last drawn message. Text is parsed into reasoning, content and
    tool calls as the server does it. Messages may have images where the LLM takes them: those of
    earlier turns are read again, and their places found among the served tokens.
    metadata["weight_versions"] of a turn has (version, start, end): which weights drew which tokens
    of the response.
    """

    def __init__(self, llm: LLM, sampling_params: SamplingParams):
        try:
            self._contracts = importlib.import_module("rolloutengine.contracts")
        except ImportError as e:
            raise ImportError(
                "jpaged.integrations.marin needs marin's rolloutengine: install lib/rolloutengine "
                "of github.com/marin-community/marin"
            ) from e
        if sampling_params.n != 1:
            raise ConfigError(f"n={sampling_params.n}: a turn is one completion")
        if not getattr(llm.tokenizer, "chat_template", None):
            raise ConfigError("RolloutModel needs an LLM whose tokenizer has a chat template")
        self.llm, self.sampling_params = llm, sampling_params
        self._tokenizer: Any = llm.tokenizer
        self._format = Format.of(llm.tokenizer)
        if self._format.style == "harmony":  # special tokens separate the parts of its answers
            self.sampling_params = dataclasses.replace(sampling_params, skip_special_tokens=False)

    async def __call__(self, request: ModelRequest) -> Any:
        """Return the ModelTurn. Raises GenerationLimitReached for a prompt that fills the context,
        RolloutContractError for messages that cannot follow the served tokens, RequestError for an
        option that is not supported.
        """
        variables = _variables(request.options)
        if may_have_images(Chat(messages=request.messages)):  # which take a while to read
            ids, images = await asyncio.to_thread(self._prompt, request, variables)
        else:
            ids, images = self._prompt(request, variables)
        longest = self.llm.engine_config.max_model_len
        assert longest is not None
        if len(ids) >= longest:
            raise self._contracts.GenerationLimitReached(tuple(ids))
        room, asked = longest - len(ids), self.sampling_params
        count = room if asked.max_tokens is None else min(asked.max_tokens, room)
        prompt = {"prompt_token_ids": ids, "embeddings": images}
        future = self.llm.submit(prompt, dataclasses.replace(asked, max_tokens=count))
        (completion,) = (await asyncio.wrap_future(future)).outputs
        end = decode(self._tokenizer, ids[-END_OF_PROMPT:], False)
        reader = self._format.reader(end, tools="tools" in variables)
        text = str(completion.text)
        message = folded(reader.push(text) + reader.finish())
        return self._contracts.ModelTurn(
            message={"role": "assistant", **message},
            prompt_token_ids=tuple(ids),
            response_token_ids=tuple(completion.token_ids),
            logprobs=tuple(completion.token_logprobs.tolist()),
            stop_reason=str(completion.finish_reason),
            text=text,
            metadata={"weight_versions": [tuple(span) for span in completion.weight_versions]},
        )

    def _prompt(
        self, request: ModelRequest, variables: dict[str, Any]
    ) -> tuple[list[int], dict[int, EmbeddingSpan] | None]:
        """Return the tokens of the prompt and the images among them: of the messages, or the served
        tokens and those of what follows the message that was drawn last.
        """
        inputs, index = self.llm.session.inputs, request.assistant_message_index
        if index is None:
            chat = Chat(messages=told(request.messages), template_kwargs=variables)
            return inputs.conversation(chat, needs_sources=False)
        served = list(request.prefix_token_ids)
        last_id = served[-1] if served else None
        try:
            behind, images = tokens_behind(inputs, request.messages, index, last_id, variables)
            placed = {len(served) + place: image for place, image in (images or {}).items()}
            _, sources = split_sources(request.messages[:index], needs_sources=False)
            if sources:
                ids, before = inputs.with_sources(served, sources, must_fit=False)
                if ids != served:
                    raise RequestError("the served tokens have not those of the messages' images")
                placed = before | placed
        except RequestError as e:
            raise self._contracts.RolloutContractError(str(e)) from e
        return served + behind, placed or None


def _variables(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the chat template is told; RequestError for an option that is not supported."""
    variables = dict(options.get("chat_template_kwargs") or {})
    if options.get("tools") and options.get("tool_choice") != "none":
        variables["tools"] = options["tools"]
    for name, value in options.items():
        if name in ("tools", "chat_template_kwargs") or value in NOTHING.get(name, ()):
            continue
        raise RequestError(f"options[{name!r}]={value!r}: RolloutModel does not support it")
    return variables
