"""Parser: argparse for the commands of this project.

--help has a usage of two lines, flags in groups with titles, and every default. An argument that
no flag takes is refused with the flag that its writer may have meant.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn


class Help(argparse.RawDescriptionHelpFormatter):
    """A description as it is written, and the default of a flag at the end of its help."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shows_default = action.option_strings and action.nargs != 0 and "default" not in text
        return f"{text} {default_of(action)}".strip() if shows_default else text


def default_of(action: argparse.Action) -> str:
    """Return "(default: ...)" for a flag, "" for one without a default."""
    default = action.default
    if default in (None, argparse.SUPPRESS) or action.nargs == 0:
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
    return f"(default: {shown.replace('%', '%%') or 'none'})"


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose usage is two lines and whose errors suggest flags.

    prog: the command as it is typed. doc: what --help shows first, usually the module's docstring.
    flags: the most used flags as the usage shows them, "--model DIR". status: exit status of an
    error on the command line. shows_usage: print the usage above that error.
    """

    def __init__(
        self,
        prog: str,
        doc: str | None = None,
        *,
        flags: str = "",
        status: int = 2,
        shows_usage: bool = True,
        **settings: Any,
    ):
        super().__init__(
            prog=prog,
            description=doc,
            formatter_class=Help,
            allow_abbrev=False,
            **settings,
        )
        self._flags, self._status, self._shows_usage = flags, status, shows_usage

    def format_usage(self) -> str:
        """Return the two lines: what a call looks like, and where the flags are listed."""
        return f"usage: {self._call()}\n       {self.prog} --help lists the flags\n"

    def format_help(self) -> str:
        """Return the usage, the description, and every group of flags."""
        for action in self._actions:
            if action.help is None:  # argparse would show no default without a help
                action.help = default_of(action)
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # typeshed has overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's; an unknown argument exits with the flag that comes nearest to it."""
        args = sys.argv[1:] if args is None else list(args)
        # A flag that is misspelled comes before one that is missing: it may be the same.
        for name in self._names(args):
            if name not in self._option_string_actions:
                self._refuse(name)
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return parsed

    def _names(self, args: Iterable[str]) -> Iterator[str]:
        """Yield the flags --x among the arguments, as far as they are this parser's."""
        for text in args:
            name = text.partition("=")[0]
            if name == "--":
                return
            if name.startswith("--"):
                yield name
            action = self._option_string_actions.get(name)
            if action is not None and action.nargs == argparse.REMAINDER:
                return  # the rest is another program's

    def _refuse(self, argument: str) -> NoReturn:
        """Exit because of an argument that no flag takes, with the flag that is nearest to it."""
        names = list(self._option_string_actions)
        near = difflib.get_close_matches(argument.replace("_", "-"), names, n=1)
        advice = f": did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {argument}{advice}")

    def error(self, message: str) -> NoReturn:
        """Exit with one sentence on stderr, below the usage if this command shows it."""
        usage = self.format_usage() if self._shows_usage else ""
        hint = "" if self._shows_usage else f" ({self.prog} --help lists the flags)"
        self.exit(self._status, f"{usage}{self.prog}: {message}{hint}\n")

    def _call(self) -> str:
        """Return a call: the positional arguments, the most used flags, and room for others."""
        words = [self.prog]
        for action in self._actions:
            name = str(action.metavar or action.dest).upper()
            if not action.option_strings:
                shown = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}
                words.append(shown.get(str(action.nargs), name))
            elif action.required:
                words.append(f"{action.option_strings[0]} {name}")
        return " ".join([*words, *([self._flags] if self._flags else []), "[FLAGS]"])
