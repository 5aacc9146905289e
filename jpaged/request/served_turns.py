"""What a chat template writes behind turns whose tokens are known: the tokens that were served stay
as they are, and only what comes after them is rendered.
"""

import json
import secrets
from collections.abc import Iterable
from typing import Any

from jpaged.checks import JsonObject
from jpaged.errors import RequestError
from jpaged.request.detokenizer import decode
from jpaged.request.embeddings import EmbeddingSpan
from jpaged.request.images import split_sources
from jpaged.request.inputs import Chat, Inputs
from jpaged.types import Message, Messages


def told(messages: Iterable[Message]) -> list[JsonObject]:
    """Return messages as templates take them: the arguments of calls are objects, no JSON text."""
    taken = list[JsonObject]()
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": _parsed(call["function"])} for call in calls
            ]
        taken.append(message)
    return taken


def tokens_behind(
    inputs: Inputs,
    messages: Messages,
    index: int,
    last_id: int | None,
    variables: JsonObject,
) -> tuple[list[int], dict[int, EmbeddingSpan] | None]:
    """Return the tokens that a prompt has behind the drawn message of this index, whose last token
    is `last_id`: the rest of its end, the messages after it and the beginning of the next answer;
    and the images and videos of these messages by their places among those tokens, None where there
    are none. RequestError where they cannot be told from what the template writes.
    """
    _, sources = split_sources(messages[index + 1 :], needs_sources=False)
    # The drawn message stands as a mark: however the template would write it again, its end is the
    # first end of a turn after the mark.
    tokenizer: Any = inputs.need_tokenizer("chat")
    mark, messages = f"drawn{secrets.token_hex(8)}", told(messages)
    messages[index] = _unread_calls(messages[index]) | {"role": "assistant", "content": mark}
    text = inputs.render_text(Chat(messages=messages, template_kwargs=variables))
    ends = {id: decode(tokenizer, [id], False) for id in inputs.eos_ids}
    last = None if last_id is None else ends.get(last_id)
    _, *tails = text.split(mark)
    tail = tails[0] if len(tails) == 1 else ""
    written = [end for end in ([last] if last else ends.values()) if end in tail]
    if not written:
        raise RequestError(
            f"message {index}: the chat template writes it {len(tails)} times, or without "
            f"{last or 'an end'!r} behind it, so that nothing can follow what was served"
        )
    end = min(written, key=tail.index)
    rest = tail.partition(end)[2]
    if last is None:  # it was cut: its end comes from the template
        rest = end + rest
    return inputs.written(rest, sources)


def check_is_prefix(
    inputs: Inputs,
    messages: Messages,
    count: int,
    variables: JsonObject,
) -> None:
    """RequestError where the template writes the first `count` messages otherwise once the others
    follow, as some do that leave out the reasoning of earlier turns; it names the first token that
    differs.
    """
    messages = told(messages)
    before = Chat(messages=messages[:count], template_kwargs=variables, add_generation_prompt=False)
    after = Chat(messages=messages, template_kwargs=variables)
    if inputs.render_text(after).startswith(inputs.render_text(before)):
        return
    ours, theirs = inputs.render(before), inputs.render(after)
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))

    def named(ids: list[int]) -> str:
        if place >= len(ids):
            return "nothing"
        return f"{decode(inputs.need_tokenizer('chat'), [ids[place]], False)!r} ({ids[place]})"

    raise RequestError(
        f"token {place} of the {count} earlier messages is {named(ours)}, and {named(theirs)} once "
        f"{len(messages) - count} more follow: the chat template writes earlier turns anew; "
        "rewritten='keep' leaves what was served as it is"
    )


def _parsed(function: Message) -> JsonObject:
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    return {**function, "arguments": json.loads(arguments) if is_text else arguments}


def _unread_calls(message: Message) -> JsonObject:
    """Return the tool calls of a message without their arguments, which might hold the end of a
    turn as text.
    """
    calls = [
        {**call, "function": {**call["function"], "arguments": {}}}
        for call in message.get("tool_calls") or ()
    ]
    return {"tool_calls": calls} if calls else {}
