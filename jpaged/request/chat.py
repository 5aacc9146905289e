"""Conversations as prompts, rendered by a tokenizer's chat template."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError
from jpaged.request.length import CHARACTERS_A_TOKEN, check_length


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
    return [int(t) for t in _rendered(chat, tokenizer, tokenize=True)]


def check_rendered_length(chat: Chat, tokenizer: Any, most: int) -> None:
    """Raise CapacityError for a long conversation of `most` tokens or more, before it is tokenized
    whole. Raises what `render` raises.
    """
    if _num_characters(chat.messages) > CHARACTERS_A_TOKEN * most:
        check_length(_rendered(chat, tokenizer, tokenize=False), most, tokenizer.encode)


def _rendered(chat: Chat, tokenizer: Any, *, tokenize: bool) -> Any:
    """The text of a conversation, or its token ids."""
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "chat: the tokenizer has no chat template; render the prompt yourself and call generate"
        )
    goes_on = chat.continue_final_message
    try:
        return tokenizer.apply_chat_template(
            chat.messages,
            tokenize=tokenize,
            return_dict=False,
            add_generation_prompt=chat.add_generation_prompt and not goes_on,
            continue_final_message=goes_on,
            **(chat.template_kwargs or {}),
        )
    # jinja and transformers raise many types for messages that a template does not take
    except Exception as e:
        raise RequestError(f"chat: the template refused the messages: {e}") from e


def _num_characters(messages: Any) -> int:
    """About how long a conversation is."""
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    return sum(len(content) for content in contents if isinstance(content, str))
