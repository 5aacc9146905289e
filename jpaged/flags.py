"""Command lines: a parser with a short usage, and fields of EngineConfig as flags in groups."""

import argparse
import dataclasses
import difflib
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn

from jpaged.config import EngineConfig, Group, Speculative
from jpaged.types import Settings

METAVARS = {int: "N", float: "X", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """A parser whose usage is two lines, and which names the flag that an unknown one is near to.

    error_status: the exit status where the arguments cannot work.
    """

    def __init__(self, *, error_status: int = 2, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)
        self.error_status = error_status

    def format_usage(self) -> str:
        """Return the two lines; the groups below them list the flags."""
        names = [
            f"[{action.metavar or action.dest}]" if action.nargs in ("?", "*") else action.dest
            for action in self._get_positional_actions()
        ]
        line = " ".join([self.prog, *names, "[--FLAG VALUE ...]"])
        return f"usage: {line}\n       {self.prog} --help lists the flags\n"

    def format_help(self) -> str:
        """Return the usage, the description and the flags in their groups."""
        self.usage = self.format_usage().removeprefix("usage: ").rstrip("\n").replace("%", "%%")
        return super().format_help()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse all arguments; exit where one is unknown, with the flag that was meant."""
        args = sys.argv[1:] if args is None else list(args)
        # A misspelled flag is named before one that is missing, which may be the same.
        if misspelled := [name for name in self._names(args) if name not in self._flags()]:
            self.error(self._unknown(misspelled))
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with one sentence."""
        self.exit(self.error_status, f"{self.prog}: {message} (--help lists the flags)\n")

    def _flags(self) -> list[str]:
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def _names(self, args: Sequence[str]) -> Iterator[str]:
        """Yield the flags among the arguments, up to those that are another program's."""
        for text in args:
            name = text.split("=")[0]
            if name == "--":
                return
            if name.startswith("--"):
                yield name
            action = self._option_string_actions.get(name)
            if action is not None and action.nargs == argparse.REMAINDER:
                return

    def _unknown(self, arguments: Sequence[str]) -> str:
        name = next((x for x in arguments if x.startswith("--")), arguments[0]).split("=")[0]
        near = difflib.get_close_matches(name.replace("_", "-"), self._flags(), n=1)
        meant = f": did you mean {near[0]}?" if near else ""
        return f"unknown argument {name}{meant}"


def add_engine_groups(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Add a flag for each field of EngineConfig, in groups. defaults: by field, a program's own."""
    fields = dataclasses.fields(EngineConfig)
    for title in typing.get_args(Group):
        names = [field.name for field in fields if field.metadata["group"] == title]
        group = parser.add_argument_group(f"engine: {title}")
        chosen = {name: value for name, value in defaults.items() if name in names}
        add_flags(group, EngineConfig, *names, **chosen)


def add_engine_flags(parser: argparse._ActionsContainer, *names: str, **defaults: object) -> None:
    """Add flags for these fields of EngineConfig, or for all, to a parser or a group of one."""
    add_flags(parser, EngineConfig, *names, **defaults)


def add_flags(
    parser: argparse._ActionsContainer, settings: type, *names: str, **defaults: object
) -> None:
    """Add a flag for each field of a dataclass of settings that has a help, or for those of the
    names. A field whose flag is left out is no attribute of the result.

    `enable_x` is --x and --no-x; "none" is None where a field may be None. defaults: by field,
    values of a program's own.
    """
    hints = typing.get_type_hints(settings)
    fields = {f.name: f for f in dataclasses.fields(settings) if "help" in f.metadata}
    for field in [fields[name] for name in names or fields]:
        default = defaults.get(field.name, field.default)
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        parser.add_argument(
            f"--{field.name.removeprefix('enable_').replace('_', '-')}",
            help=f"{field.metadata['help']} (default: {shown})",
            dest=field.name,
            default=defaults.get(field.name, argparse.SUPPRESS),
            **_values_of(hints[field.name]),
        )


def engine_settings(args: argparse.Namespace) -> Settings:
    """Return the fields of EngineConfig that flags have set."""
    return given_settings(args, EngineConfig)


def given_settings(args: argparse.Namespace, settings: type) -> Settings:
    """Return the fields of a dataclass of settings that flags have set."""
    names = (field.name for field in dataclasses.fields(settings))
    return {name: getattr(args, name) for name in names if name in args}


def _values_of(hint: Any) -> Settings:
    """Return how a flag takes the values of a type: a number, text, one of several words, a list of
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
        item = typing.get_args(kind)[0]
        if typing.get_origin(item) is Literal:
            return {"choices": typing.get_args(item), "nargs": "+"}
        return {"type": int, "nargs": "+", "metavar": "N"}
    if type(None) not in typing.get_args(hint):
        return {"type": kind, "metavar": METAVARS[kind]}
    words = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
    plain = str if words else kind

    def value(text: str) -> object:
        return None if text == "none" else plain(text)

    value.__name__ = plain.__name__  # argparse names it where a value is none
    if words is None:
        return {"type": value, "metavar": METAVARS[plain]}
    return {"type": value, "choices": (*words, None), "metavar": "|".join((*words, "none"))}
