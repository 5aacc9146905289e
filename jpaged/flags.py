"""Command lines: a parser with a short usage and a help of one screen, and fields of EngineConfig
as flags in groups.
"""

import argparse
import copy
import dataclasses
import difflib
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import IO, Any, Literal, NoReturn

from jpaged.config import EngineConfig, Group, Speculative
from jpaged.errors import ConfigError
from jpaged.images.limits import ImageLimits
from jpaged.types import Settings

HELP_START, HELP_WIDTH = 35, 44  # columns of a help of one screen, of 80
METAVARS = {int: "N", float: "X", str: "TEXT"}


# Flags of other servers (vLLM, SGLang, llama.cpp, uvicorn) by ours that do the same, where the
# spelling does not lead there, or would lead elsewhere.
OTHER_NAMES = {
    "--allowed-origins": "--allowed-origin",
    "--attention-backend": "--attention",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--cpu-offload-gb": "--swap-space-gib",
    "--ctx-size": "--max-model-len",
    "--cuda-graph-sizes": "--token-buckets",
    "--disable-access-log": "--no-access-log",
    "--disable-log-requests": "--no-access-log",
    "--disable-radix-cache": "--no-prefix-caching",
    "--disable-uvicorn-access-log": "--no-access-log",
    "--dp-size": "--data-parallel-size",
    "--enable-expert-parallel": "--expert-parallel",
    "--enable-log-requests": "--access-log",
    "--enable-lora": "--max-loras",
    "--enable-prefix-caching": "--prefix-caching",
    "--ep-size": "--expert-parallel",
    "--gpu-memory-utilization": "--memory-utilization",
    "--input-file": "input",
    "--kv-cache-size": "--num-blocks",
    "--lora": "--adapter",
    "--lora-modules": "--adapter",
    "--lora-paths": "--adapter",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--memory-utilization",
    "--model-path": "model",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--num-gpu-blocks-override": "--num-blocks",
    "--num-speculative-tokens": "--speculative",
    "--output-file": "--output",
    "--page-size": "--block-size",
    "--parallel": "--max-num-seqs",
    "--reasoning-parser": "--reasoning",
    "--speculative-config": "--speculative",
    "--ssl-cert": "--ssl-certfile",
    "--ssl-key": "--ssl-keyfile",
    "--swap-space": "--swap-space-gib",
    "--tool-call-parser": "--tool-style",
    "--tp-size": "--tensor-parallel-size",
    "--unix-socket": "--uds",
    "--uvicorn-log-level": "--log-level",
    "-c": "--max-model-len",
    "-dp": "--data-parallel-size",
    "-i": "input",
    "-np": "--max-num-seqs",
    "-o": "--output",
    "-tp": "--tensor-parallel-size",
}


class Parser(argparse.ArgumentParser):
    """A parser whose usage is two lines, and which names the flag that an unknown one is near to.

    error_status: the exit status where the arguments cannot work. common: the arguments that
    --help shows, which fit a screen; --help-all shows all. Without them --help shows all.
    """

    def __init__(
        self, *, error_status: int = 2, common: Sequence[str] = (), **settings: Any
    ) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)
        self.error_status, self.common = error_status, tuple(common)
        if self.common and self.add_help:
            self.add_argument("--help-all", action=_HelpAll, help="show every flag and exit")

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

    def format_short(self) -> str:
        """Return the help of one screen: the first paragraph of the description, and the common
        arguments with the first clause of what they mean.
        """
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=HELP_START)
        usage = self.format_usage().splitlines()[0].removeprefix("usage: ")
        formatter.add_usage(usage.replace("%", "%%"), self._actions, [])
        first = " ".join((self.description or "").split("\n\n")[0].split())
        formatter.add_text(textwrap.fill(first.rstrip(":"), HELP_START + HELP_WIDTH))
        sections: dict[str, list[argparse.Action]] = {}
        for group in self._action_groups:
            # One section for all groups of the engine; remarks in a title are for the whole help.
            title = re.split(r": |, | \(", group.title or "")[0]
            common = filter(self._is_common, group._group_actions)
            sections.setdefault(title, []).extend(map(_shortened, common))
        for title, shown in sections.items():
            if shown:
                formatter.start_section(title)
                formatter.add_arguments(shown)
                formatter.end_section()
        formatter.add_text(f"{self.prog} --help-all shows all {len(self._flags())} flags.")
        return formatter.format_help()

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """Print what --help shows."""
        text = self.format_short() if self.common else self.format_help()
        self._print_message(text, file or sys.stdout)

    def _is_common(self, action: argparse.Action) -> bool:
        return any(name in self.common for name in action.option_strings or [action.dest])

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
        meant = self._meant(name.replace("_", "-"))
        return f"unknown argument {name}" + (f": did you mean {meant}?" if meant else "")

    def _meant(self, name: str) -> str | None:
        """Return the argument that does what one of this name does elsewhere, else the nearest."""
        positional = {action.dest: action.dest.upper() for action in self._get_positional_actions()}
        known = {**positional, **{flag: flag for flag in self._flags()}}
        if (ours := known.get(OTHER_NAMES.get(name, ""))) is not None:
            return ours
        return next(iter(difflib.get_close_matches(name, self._flags(), n=1)), None)


class _HelpAll(argparse.Action):
    """Prints the whole help and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, "help", nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def _shortened(action: argparse.Action) -> argparse.Action:
    """Return an argument for a help of one screen: its help is as much of the first clause, with
    the default, as a line has room for.
    """
    short, text = copy.copy(action), action.help or ""
    clause, _, default = text.partition(" (default: ")
    parts = re.split(r"[;:] ", clause)[0].split(", ")
    shorter = [", ".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if default not in ("", "None)"):
        shorter = [f"{part} (default: {default}" for part in shorter] + shorter
    short.help = next((part for part in shorter if len(part) <= HELP_WIDTH), shorter[-1])
    if isinstance(action, argparse.BooleanOptionalAction):
        short.option_strings = action.option_strings[:1]
    if short.nargs in ("+", "*") and isinstance(short.metavar, str):
        short.nargs = None
    if short.choices is not None and short.metavar is None:
        short.metavar = "|".join(map(str, short.choices))
    return short


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


def parse_resources(texts: Sequence[str]) -> dict[str, float]:
    """Return {name: count} of texts "NAME=COUNT". Raises ConfigError."""
    counts = dict[str, float]()
    for text in texts:
        name, _, count = text.partition("=")
        try:
            counts[name] = float(count)
        except ValueError:
            raise ConfigError(f"--replica-resources {text}: must be NAME=COUNT (GPU=1)") from None
    return counts


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
    if kind in (Speculative, ImageLimits):
        return {"type": kind.parse, "metavar": "JSON"}
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if typing.get_origin(item) is Literal:
            return {"choices": typing.get_args(item), "nargs": "+"}
        return {"type": item, "nargs": "+", "metavar": METAVARS[item]}
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
