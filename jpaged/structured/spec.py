"""The form that a request asks its answers to have (SamplingParams.structured), as a grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.checks import JsonObject
from jpaged.errors import RequestError
from jpaged.types import Structured

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
COMPACT = "disable_any_whitespace"
GUIDANCE = "x-guidance"  # llguidance's options in a schema
# Between JSON's tokens, as llama.cpp bounds it: a model that has begun to write white space may see
# no reason to end it.
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})"
# Of a schema, pattern or grammar: each step may look at all of a text that leaves no choice.
MOST_CHARACTERS = 250_000


def check(structured: object) -> None:
    """Raise RequestError for what names no form, or has a value that its kind never has."""
    _kind(structured)


def grammar_of(structured: Structured) -> str:
    """Return the form as llguidance's own notation, not yet compiled. RequestError where it is
    none.
    """
    import llguidance  # pyright: ignore[reportMissingImports]

    kind = _kind(structured)
    value = structured[kind]
    try:
        if kind in ("json_schema", "json_object"):
            schema = schema_text(value) if kind == "json_schema" else '{"type": "object"}'
            _check_size(kind, schema)
            # Only such a text can hold the name.
            is_guided = "guidance" in schema or "\\u" in schema
            parsed = json.loads(schema) if is_guided else {}
            options: Any = guidance_of(parsed, compact=bool(structured.get(COMPACT)))
            text = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
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


def error(kind: str, what: object) -> RequestError:
    """Return what is wrong with a form, in the words of who found it."""
    lines = str(what).strip().splitlines() or ["no reason given"]
    return RequestError(f"structured: {kind}: {' '.join(line.strip() for line in lines)[:500]}")


def kind_of(structured: Structured) -> str:
    """Return which of KINDS it is."""
    return next(kind for kind in KINDS if kind in structured)


def _kind(structured: object) -> str:
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


def guidance_of(schema: object, *, compact: bool = False) -> JsonObject:
    """Return the options (x-guidance) under which a schema becomes a grammar: its own, and white
    space of a bounded length unless they say something of white space. compact: none at all.

    Raises ValueError where the schema's own are no options.
    """
    guidance = own_guidance(schema)
    if compact:  # a pattern would win over whitespace_flexible
        return {**guidance, "whitespace_flexible": False, "whitespace_pattern": None}
    if "whitespace_pattern" in guidance or "whitespace_flexible" in guidance:
        return guidance
    return {**guidance, "whitespace_pattern": WHITE_SPACE}


def own_guidance(schema: object) -> JsonObject:
    """Return the options that a schema has; ValueError where they are none."""
    guidance = schema.get(GUIDANCE, {}) if isinstance(schema, Mapping) else {}
    if not isinstance(guidance, Mapping):
        raise ValueError(f"{GUIDANCE}={guidance!r}: must be an object of llguidance's options")
    return dict(guidance)


def _named() -> str:
    return ", ".join(KINDS)


def schema_text(value: Any) -> str:
    """Return the JSON of a schema: of what json_schema may be."""
    if isinstance(value, str):
        return value
    schema = value if isinstance(value, Mapping) else value.model_json_schema()
    return json.dumps(schema, default=dict)
