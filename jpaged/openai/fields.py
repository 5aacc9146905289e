"""The types of a body's fields, with the checks that pydantic alone does not make."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import AfterValidator, BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError

from jpaged.checks import FLOAT32_MAX

MOST_TOOLS = 1024
MOST_IDS, MOST_DIGITS = 2**31, 10  # token ids are int32 on a device
# Arguments of apply_chat_template that a request must not set as variables of the template: the
# template itself comes from the tokenizer only.
RESERVED = {
    "conversation",
    "chat_template",
    "tools",
    "documents",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "messages",
}


def short(value: Any) -> str:
    """Return the repr of a value for a message, with its middle cut out if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}"


def _biases(value: Any) -> Any:
    """Return a logit_bias with ids as keys. The first bad entry raises ValueError: pydantic would
    report every one of them.

    An int is its own hash modulo 2**61 - 1, so a sender could choose keys whose hashes are all
    equal, and a dict of those takes quadratic time. Ids of at most 31 bits cannot collide in this
    way; and the keys of JSON are strings, whose hashes nobody can predict.
    """
    if not isinstance(value, dict):
        return value
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        if isinstance(key, str):
            if not (key.isascii() and key.isdecimal()) or len(key) > MOST_DIGITS:
                raise ValueError(f"{short(key)} is not a token id")
            key = int(key)
        if type(key) is not int or not 0 <= key < MOST_IDS:
            raise ValueError(f"{short(key)} is not a token id")
        if type(bias) not in (int, float) or not abs(bias) <= FLOAT32_MAX:
            raise ValueError(f"{key}: {short(bias)} cannot be added to a logit")
        biases[key] = bias
    return biases


def _truncation(value: int) -> int:
    if value < -1 or value == 0:
        raise ValueError(
            "must be a positive integer, or -1 to keep as many tokens as leave room for the answer"
        )
    return value


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # OpenAI's list of prompts, of length one
    if isinstance(value, list) and any(isinstance(v, str | list) for v in value):
        raise ValueError("a request takes one prompt: send one request per prompt")
    return value


def as_many(value: Any) -> Any:
    """Return a list of prompts. A list of texts or of lists of ids has many prompts; a text, or a
    list of ids, is one.
    """
    if isinstance(value, list) and value and all(isinstance(v, str | list) for v in value):
        return value
    return [value]


class TextPart(TypedDict):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    """A part that is text too, as an assistant's message may have it."""

    type: Literal["refusal"]
    refusal: str


class ImageURL(TypedDict):
    """Where an image is: a data: URL, or an http or https URL of a host that is listed. detail:
    images are always seen in full, so that "low" is refused.
    """

    url: str
    detail: NotRequired[Literal["auto", "high", "original"] | None]


class ImagePart(TypedDict):
    """A part that is an image."""

    type: Literal["image_url"]
    image_url: ImageURL


class VideoURL(TypedDict):
    """Where a video is, as an image."""

    url: str


class VideoPart(TypedDict):
    """A part that is a video."""

    type: Literal["video_url"]
    video_url: VideoURL


Part = TextPart | ImagePart | VideoPart
VIDEO_OPTIONS = ("fps", "num_frames", "do_sample_frames")  # of jpaged.images.videos.Video
FULL_DETAIL = (None, "auto", "high", "original")


def image_part(url: Any, detail: Any = None) -> ImagePart:
    """Return the part of a message for an image at a URL. Raises ValueError for what is no text,
    and for a detail that would make the image another one.
    """
    if not isinstance(url, str) or not url:
        raise ValueError(f"has an image whose URL is {short(url)}: must be a text")
    if detail not in FULL_DETAIL:
        raise ValueError(
            f"has an image of detail {short(detail)}, which is not supported: images are seen in "
            'full ("auto" or "high")'
        )
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(url: Any) -> VideoPart:
    """Return the part of a message for a video at a URL. Raises ValueError for what is no text."""
    if not isinstance(url, str) or not url:
        raise ValueError(f"has a video whose URL is {short(url)}: must be a text")
    return {"type": "video_url", "video_url": {"url": url}}


def _joined(content: Any) -> Any:
    """Return the content of a message that is a list of parts: their text, where they are text
    alone, a refusal counted as text; else the parts.
    """
    if not isinstance(content, list):
        return content
    parts: list[Part] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "video_url"):
            value = part.get(kind)
            place = value if isinstance(value, dict) else {"url": value}
            url = place.get("url")
            is_image = kind == "image_url"
            parts.append(image_part(url, place.get("detail")) if is_image else video_part(url))
            continue
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise ValueError("has a part that is neither text nor an image_url or a video_url")
        parts.append({"type": "text", "text": text})
    return merged(parts)


def merged(parts: Sequence[Part]) -> Any:
    """Return the text of parts that are text alone, a line break between two; else the parts."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts) if len(texts) == len(parts) else list(parts)


def content_text(content: Any) -> str:
    """Return the text of a message's content, which has "[image]" or "[video]" where one is."""
    if not isinstance(content, list):
        return content or ""
    kinds = {"image_url": "[image]", "video_url": "[video]"}
    return "\n".join(p["text"] if p["type"] == "text" else kinds[p["type"]] for p in content)


def _arguments(value: Any) -> Any:
    """Return the arguments of a call as an object, since chat templates write the JSON themselves.
    A string that is not a JSON object stays a string: an answer may have been cut off within its
    arguments.
    """
    if not isinstance(value, str):
        return value or {}
    try:
        parsed = json.loads(value) if value else {}
        json.dumps(parsed, ensure_ascii=False).encode()  # what a template will do with it
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def _video_options(value: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be taken of a request's videos; other options would change the answer."""
    if not value.keys() <= set(VIDEO_OPTIONS):
        told = {"names": ", ".join(VIDEO_OPTIONS)}
        raise PydanticCustomError("unsupported_field", "may have {names} alone", told)
    return value


def _variables(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(RESERVED & set(value)):
        raise ValueError(f"{taken[0]!r} is not a variable that a request may set")
    return value


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("function"), dict):
        raise ValueError("must be a list of functions")
    return tool


Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Tokens = Annotated[list[Integer], FailFast()]
Tools = Annotated[
    list[Annotated[dict[str, Any], AfterValidator(_described)]],
    FailFast(),
    Field(max_length=MOST_TOOLS),
]
Prompt = Annotated[
    str | Tokens,
    BeforeValidator(_one_prompt, json_schema_input_type=str | Tokens | list[str | Tokens]),
]
Biases = Annotated[
    dict[int, float], BeforeValidator(_biases, json_schema_input_type=dict[str, float])
]
Truncation = Annotated[Integer, AfterValidator(_truncation)]
Arguments = Annotated[
    dict[str, Any] | str,
    BeforeValidator(_arguments, json_schema_input_type=dict[str, Any] | str | None),
]
Content = Annotated[
    str | list[dict[str, Any]],
    BeforeValidator(_joined, json_schema_input_type=str | list[RefusalPart | Part]),
]
Variables = Annotated[dict[str, Any], AfterValidator(_variables)]
VideoOptions = Annotated[dict[str, Any], AfterValidator(_video_options)]
