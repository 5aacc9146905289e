"""Checks of what callers pass, shared by every part that takes something from outside."""

import dataclasses
import json
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeGuard, get_args

from jpaged.errors import ConfigError, JpagedError, RequestError

# Names, numbers, lists and more such objects.
type JsonObject = dict[str, Any]

FLOAT32_MAX = 3.4028234e38  # controls travel as float32
# The least and the largest temperature that draws divide by: differences of logits, and reciprocals
# of these, stay numbers of float32.
TEMPERATURES = (1e-30, 1e30)
# With biases up to this and repetition penalties in this range, logits stay numbers of float32 that
# a draw can subtract and divide.
MAX_LOGIT_BIAS = 1e30
REPETITION_PENALTIES = (1e-6, 1e6)


def check_real(name: str, value: object, low: float, high: float = FLOAT32_MAX) -> None:
    if not is_scalar(value, int | float, "iufV"):  # V: bfloat16
        raise RequestError(f"{name}={value!r}: must be a number")
    value = value if isinstance(value, int) else float(value)  # an int may be past a float's range
    if not low <= value <= high:  # false for NaN too
        raise RequestError(f"{name}={value}: must be a finite number between {low} and {high}")


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if not is_scalar(value):
        raise RequestError(f"{name}={value!r}: must be an integer")
    value = int(value)  # a jax scalar compares with numbers of its dtype alone
    if value < low or (high is not None and value > high):
        raise RequestError(
            f"{name}={value}: must be at least {low}"
            + ("" if high is None else f" and at most {high}")
        )


def check_choice(name: str, value: object, choices: object) -> None:
    """RequestError unless it is one of the values of a Literal."""
    if value not in get_args(choices):
        *first, last = map(repr, get_args(choices))
        raise RequestError(f"{name}={value!r}: must be {', '.join(first)} or {last}")


def check_seed(value: object) -> None:
    """RequestError unless it is an integer of 64 bits, with or without a sign."""
    check_whole("seed", value, -(2**63), 2**64 - 1)


def store_address(store: str) -> tuple[str, int] | None:
    """Return the host and the port of a block server, None where a prefix_store is a folder;
    ConfigError where it is neither.
    """
    if "://" not in store:
        return None
    try:
        parts = urllib.parse.urlsplit(store)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ConfigError(f"prefix_store={store!r}: {e}") from e
    extra = (parts.path.rstrip("/"), parts.query, parts.fragment, parts.username)
    if parts.scheme != "tcp" or not host or not port or any(extra):
        raise ConfigError(f"prefix_store={store!r}: must be a folder or tcp://HOST:PORT")
    return host, port


def settings_of[T](kind: type[T], name: str, value: object) -> T:
    """Return the settings that were passed as a dict of their fields, or as they are. kind: their
    dataclass. ConfigError, which calls them `name`, for anything else.
    """
    if isinstance(value, kind):
        return value
    names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    if not isinstance(value, Mapping) or set(value) - set(names):
        raise ConfigError(f"{name}={value!r}: must be a dict of {', '.join(names)}")
    return kind(**value)


def parsed_settings[T](kind: type[T], name: str, text: str) -> T | None:
    """Parse a flag: a dict of the fields as JSON, or "none". See settings_of."""
    try:
        return None if text == "none" else settings_of(kind, name, json.loads(text))
    except ValueError as e:
        raise ConfigError(f"{name}={text!r}: {e}") from e


def is_scalar(
    value: object, types: type | UnionType = int, kinds: str = "iu"
) -> TypeGuard[int | float]:
    """Return whether a value is of Python's types (bool is none of them), or a numpy or jax scalar
    of these dtype kinds.
    """
    if isinstance(value, types):
        return not isinstance(value, bool)
    dtype = getattr(value, "dtype", None)
    return dtype is not None and getattr(value, "ndim", None) == 0 and dtype.kind in kinds


def at_least(least: int, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r}: must be an integer of at least {least}")


def read_json(path: Path, error: type[JpagedError] = ConfigError) -> JsonObject:
    """Return a JSON object from a file; `error` names the file when it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except (OSError, ValueError) as e:
        raise error(f"{path}: {e}") from e
    if not isinstance(value, dict):
        raise error(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def positive(**values: object) -> None:
    """ConfigError that names the first value which is neither None nor a number above 0."""
    for name, value in values.items():
        if value is not None and not (is_scalar(value, int | float, "") and value > 0):
            raise ConfigError(f"{name}={value!r}: must be a number above 0")
