"""Conversations as prompts, rendered by a tokenizer's chat template."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """One conversation, a list of {"role", "content"}, and how the template is to render it.
    adapter: the name of the one that answers.
    """

    messages: Any
    template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    adapter: str | None = None


def as_chats(messages: Sequence[Any], **how: Any) -> list[Chat]:
    """A Chat of one conversation, or of each in a list of them; how: Chat's other fields."""
    is_one = messages and isinstance(messages[0], Mapping)
    return [Chat(messages=each, **how) for each in ([messages] if is_one else messages)]


def render(chat: Chat, tokenizer: Any) -> list[int]:
    """Token ids of a conversation; RequestError when there is no chat template or it refuses the
    messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "chat: the tokenizer has no chat template; render the prompt yourself and call generate"
        )
    goes_on = chat.continue_final_message
    try:
        rendered = tokenizer.apply_chat_template(
            chat.messages,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=chat.add_generation_prompt and not goes_on,
            continue_final_message=goes_on,
            **(chat.template_kwargs or {}),
        )
    # jinja and transformers raise many types for messages that a template does not take
    except Exception as e:
        raise RequestError(f"chat: the template refused the messages: {e}") from e
    return [int(t) for t in rendered]
