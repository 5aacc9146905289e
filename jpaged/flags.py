"""Every field of EngineConfig, or of other settings, as a flag of a command line."""

import argparse
import dataclasses
import typing
from typing import Any, Literal

from jpaged.config import EngineConfig, Speculative


def add_engine_flags(parser: argparse._ActionsContainer, *names: str, **defaults: object) -> None:
    """A flag for each field, or for those of the names, to a parser or a group of one."""
    add_flags(parser, EngineConfig, *names, **defaults)


def add_flags(
    parser: argparse._ActionsContainer, settings: type, *names: str, **defaults: object
) -> None:
    """A flag for each field of a dataclass of settings that has a help, or for those of the names.
    A field whose flag is left out is no attribute of the result.

    `enable_x` is --x and --no-x; "none" is None where a field may be None. defaults: by field,
    values of a program's own.
    """
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if (names and field.name not in names) or "help" not in field.metadata:
            continue
        default = defaults.get(field.name, field.default)
        told = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        parser.add_argument(
            f"--{field.name.removeprefix('enable_').replace('_', '-')}",
            help=f"{field.metadata['help']} (default: {told})",
            dest=field.name,
            default=defaults.get(field.name, argparse.SUPPRESS),
            **_values_of(hints[field.name]),
        )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that flags have set."""
    return given_settings(args, EngineConfig)


def given_settings(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The fields of a dataclass of settings that flags have set."""
    names = (field.name for field in dataclasses.fields(settings))
    return {name: getattr(args, name) for name in names if name in args}


def _values_of(hint: Any) -> dict[str, Any]:
    """How a flag takes the values of a type: a number, text, one of several words, a list of
    numbers, on or off; "none" where None is one of them.
    """
    is_one = typing.get_origin(hint) is tuple or not typing.get_args(hint)
    kinds = [hint] if is_one else [k for k in typing.get_args(hint) if k is not type(None)]
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    kind = kinds[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is Speculative:
        return {"type": Speculative.parse, "metavar": "JSON"}
    if typing.get_origin(kind) is tuple:
        each = typing.get_args(kind)[0]
        if typing.get_origin(each) is Literal:
            return {"choices": typing.get_args(each), "nargs": "+"}
        return {"type": int, "nargs": "+", "metavar": "N"}
    if type(None) not in typing.get_args(hint):
        return {"type": kind}
    words = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
    plain = str if words else kind

    def value(text: str) -> object:
        return None if text == "none" else plain(text)

    value.__name__ = plain.__name__  # argparse names it where a value is none
    if words is None:
        return {"type": value}
    return {"type": value, "choices": (*words, None), "metavar": "|".join((*words, "none"))}
