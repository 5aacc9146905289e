"""Renderers of turns: the interface of PyPI's `renderers`, which has one for each of many models,
tested token by token; it is used where it is installed and knows the model.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from jpaged.checks import JsonObject
from jpaged.errors import RequestError
from jpaged.types import Message, Messages, Tokenizer

log = logging.getLogger("jpaged")

PACKAGE = "renderers"


class Rendered(Protocol):
    """What a renderer returns, as far as it is read."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the next prompt."""
        ...


class Renderer(Protocol):
    """Writes what comes behind a turn, as those of `renderers` do (0.1.12)."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[JsonObject],
        /,
        *,
        tools: list[JsonObject] | None = None,
    ) -> Rendered | None:
        """Return the tokens of the prompt and the completion, and behind them the new messages and
        the beginning of the next turn. None where it cannot be sure of that, or where the model's
        template would write the turn otherwise by now.
        """
        ...


def renderer_of(tokenizer: Tokenizer, variables: JsonObject) -> Renderer | None:
    """Return the renderer that `renderers` has for the model of this tokenizer, by its
    name_or_path. None where the package is not installed or does not list the model, or where its
    renderer does not take these variables of the chat template.
    """
    if getattr(tokenizer, "name_or_path", None) not in _known():
        return None
    package: Any = importlib.import_module(PACKAGE)
    try:
        return package.create_renderer(tokenizer, chat_template_kwargs=variables or None)
    except ValueError as e:
        log.info("the chat template is used, not the renderer of %s: %s", PACKAGE, e)
        return None


@functools.cache
def _known() -> frozenset[str]:
    """Return the models that `renderers` lists; none where it is not installed."""
    try:
        return frozenset(importlib.import_module(f"{PACKAGE}.base").MODEL_RENDERER_MAP)
    except ImportError:
        return frozenset()


def bridged(
    renderer: Renderer,
    prompt: Sequence[int],
    completion: Sequence[int],
    messages: Messages,
    tools: Sequence[Message] | None,
) -> list[int] | None:
    """Return what a renderer writes behind a prompt and the turn that was drawn after it: these
    messages and the beginning of the next turn. None where it leaves that to the template.
    RequestError where it refuses a message, or changes what was served: then it names the first
    token that differs.
    """
    specs = [dict(tool.get("function", tool)) for tool in tools or ()]
    served = [*prompt, *completion]
    try:
        made = renderer.bridge_to_next_turn(
            list(prompt), list(completion), [dict(message) for message in messages], tools=specs
        )
    except (KeyError, TypeError, ValueError) as e:
        raise RequestError(f"messages: {type(renderer).__name__} refuses them: {e}") from e
    if made is None:
        return None
    ids = [int(token) for token in made.token_ids]
    pairs = enumerate(zip(served, ids, strict=False))
    place = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(served), len(ids)))
    if place < len(served):
        theirs = ids[place] if place < len(ids) else "nothing"
        raise RequestError(
            f"token {place} was served as {served[place]}, and {type(renderer).__name__} has "
            f"{theirs} there: it would change what the model has seen; renderer=None renders by "
            "the chat template"
        )
    return ids[len(served) :]
