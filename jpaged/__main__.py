"""The command `jpaged`, also as python -m jpaged. A command is imported when it is called, so that
--help and --version answer at once.
"""

import difflib
import importlib
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING

from jpaged.streams import open_closed_streams

if TYPE_CHECKING:
    from jpaged.flags import Parser

# What each command does, and the module that has its `make_parser` and its `main`, by their groups.
GROUPS = {
    "Answer": {
        "serve": ("serve a model over HTTP by OpenAI's API", "jpaged.openai.server.run"),
        "chat": ("talk with a model in this terminal", "jpaged.cli.chat"),
        "batch": ("answer a file of prompts and lose nothing", "jpaged.integrations.batch.command"),
        "merge": ("merge the shards of a batch run", "jpaged.cli.merge"),
        "store": ("keep prefixes for engines on several machines", "jpaged.cli.store"),
    },
    "Prepare": {
        "plan": ("say how memory is divided and how many requests fit", "jpaged.cli.plan"),
        "convert": ("convert a Hugging Face folder to an Orbax one", "jpaged.cli.convert"),
        "bench": ("time the engine on a random workload", "jpaged.cli.bench"),
        "completion": ("print a script that completes commands and flags", "jpaged.cli.completion"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
PACKAGES = ("jax", "flax", "transformers")  # whose versions --version prints beside


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status, which is 141 if whoever read its output has gone."""
    open_closed_streams()
    try:
        status = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:  # of head, say
        # Otherwise the interpreter fails when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    return status


def run(argv: list[str]) -> int:
    """Run a command; the exit status."""
    name = argv[0] if argv else None
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version", "version"):
        print(version())
        return 0
    if name is None:
        print(usage(), file=sys.stderr)
        return 2
    if name not in COMMANDS:
        print(f"jpaged: {unknown(name)} (--help lists the commands)", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[name][1])
    except ImportError as e:
        print(f"jpaged {name}: {e}", file=sys.stderr)
        return 1
    return module.main(argv[1:], prog=f"jpaged {name}")


def usage() -> str:
    """Return the help: the commands in their groups."""
    lines = ["usage: jpaged COMMAND [...]", ""]
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<12}{what}" for name, (what, _) in commands.items()), ""]
    lines.append("jpaged COMMAND --help shows the usual flags of a command, --help-all every one;")
    lines.append("jpaged --version shows versions.")
    lines.append("Without a model serve, chat and batch take the embedded one.")
    return "\n".join(lines)


def unknown(name: str) -> str:
    """Return the sentence about a command that there is not."""
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"unknown command {name}" + (f": did you mean {near[0]}?" if near else "")


def version() -> str:
    """Return the versions of this package, of those that it stands on, and of Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    parts = [f"{name} {_version_of(name)}" for name in PACKAGES]
    return f"jpaged {_version_of('jpaged')} ({', '.join([*parts, f'Python {python}'])})"


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a checkout that was never installed
        return "unknown"


def parser_of(name: str) -> "Parser":
    """Return the parser of a command."""
    return importlib.import_module(COMMANDS[name][1]).make_parser(f"jpaged {name}")


if __name__ == "__main__":
    sys.exit(main())
