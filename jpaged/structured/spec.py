"""The form that a request asks its answers to have (SamplingParams.structured), as a grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
COMPACT = "disable_any_whitespace"
# Of a schema, pattern or grammar: each step may look at all of a text that leaves no choice.
MOST_CHARACTERS = 250_000


def check(structured: Any) -> None:
    """Raise RequestError for what names no form, or has a value that its kind never has."""
    _kind(structured)


def grammar_of(structured: Mapping[str, Any]) -> str:
    """The form as llguidance's own notation, not yet compiled. RequestError where it is none."""
    import llguidance  # pyright: ignore[reportMissingImports]

    kind = _kind(structured)
    value = structured[kind]
    try:
        if kind in ("json_schema", "json_object"):
            schema = schema_text(value) if kind == "json_schema" else '{"type": "object"}'
            _check_size(kind, schema)
            compact: Any = {"whitespace_flexible": False} if structured.get(COMPACT) else {}
            text = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=compact)
        elif kind == "choice":
            _check_size(kind, choices := json.dumps(list(value)))
            text = llguidance.grammar_from("choice", choices)
        else:
            _check_size(kind, value)
            text = llguidance.grammar_from("regex" if kind == "regex" else "grammar", value)
    except (ValueError, TypeError, RecursionError) as e:
        raise error(kind, e) from e
    return text


def _check_size(kind: str, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise error(kind, f"{len(text)} characters are above {MOST_CHARACTERS}")


def error(kind: str, what: Any) -> RequestError:
    """What is wrong with a form, in the words of who found it."""
    lines = str(what).strip().splitlines() or ["no reason given"]
    return RequestError(f"structured: {kind}: {' '.join(line.strip() for line in lines)[:500]}")


def kind_of(structured: Mapping[str, Any]) -> str:
    """Which of KINDS it is."""
    return next(kind for kind in KINDS if kind in structured)


def _kind(structured: Any) -> str:
    if not isinstance(structured, Mapping):
        raise RequestError(f"structured={structured!r}: must be a dict with one of {_named()}")
    kinds = [key for key in structured if key != COMPACT]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise RequestError(f"structured: has {sorted(map(str, kinds))}: give one of {_named()}")
    kind: str = kinds[0]
    value = structured[kind]
    if kind == "choice":
        strings = isinstance(value, Sequence) and not isinstance(value, str)
        if not strings or not value or not all(isinstance(v, str) and v for v in value):
            raise error(kind, f"{value!r}: must be a list of strings that are not empty")
    elif kind == "json_object":
        if value is not True:
            raise error(kind, f"{value!r}: must be True")
    elif kind == "json_schema":
        if not isinstance(value, Mapping | str) and not hasattr(value, "model_json_schema"):
            raise error(kind, f"{value!r}: must be a dict, JSON text, or a pydantic model")
    elif not isinstance(value, str) or not value:
        raise error(kind, f"{value!r}: must be a string that is not empty")
    if not isinstance(compact := structured.get(COMPACT, False), bool):
        raise RequestError(f"structured: {COMPACT}={compact!r}: must be True or False")
    return kind


def _named() -> str:
    return ", ".join(KINDS)


def schema_text(value: Any) -> str:
    """The JSON of a schema: of what json_schema may be."""
    if isinstance(value, str):
        return value
    schema = value if isinstance(value, Mapping) else value.model_json_schema()
    return json.dumps(schema, default=dict)
