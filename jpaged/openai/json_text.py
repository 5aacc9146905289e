"""Parses the JSON of a request: one object, whose numbers are finite and whose strings are valid
Unicode.
"""

import json
from typing import Any

from jpaged.openai.fields import short
from jpaged.openai.protocol import BodyError


def json_object(text: str, *, max_depth: int | None = None) -> dict[str, Any]:
    """Return the object that a JSON text holds. max_depth: how deep lists and objects may be
    nested. Raises BodyError.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        body = json.loads(text, parse_constant=refuse)
        if "\\u" in text:  # half of a surrogate pair: no tokenizer accepts it
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "a string holds half of a surrogate pair, which is not valid Unicode"
        raise BodyError(message, code="invalid_encoding") from None
    except (ValueError, RecursionError) as e:
        raise BodyError(f"not JSON: {e}", code="invalid_json") from None
    # A text with fewer brackets cannot be nested deeper.
    if max_depth is not None and text.count("[") + text.count("{") > max_depth:
        _check_depth([body], max_depth)
    if not isinstance(body, dict):
        raise BodyError(f"{short(body)} is not a JSON object", code="invalid_json")
    return body


def _check_depth(level: list[Any], most: int) -> None:
    for _ in range(most + 1):
        nested = [x.values() if isinstance(x, dict) else x for x in level]
        level = [y for x in nested for y in x if isinstance(y, dict | list)]
        if not level:
            return
    raise BodyError(f"lists and objects are nested more than {most} deep", code="invalid_json")
