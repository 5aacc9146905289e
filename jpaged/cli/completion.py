"""Print a script that completes the commands and flags of jpaged in a shell, which shtab makes:

    jpaged completion bash > ~/.local/share/bash-completion/completions/jpaged
    jpaged completion zsh > ~/.zfunc/_jpaged          # a folder of fpath
    jpaged completion tcsh > ~/.jpaged.completion

pip install 'jpaged[completion]'
"""

import argparse
import sys

from jpaged.flags import Parser

SHELLS = ("bash", "zsh", "tcsh")


def make_parser(prog: str = "jpaged completion") -> Parser:
    """Return the parser of `jpaged completion`."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands; without those whose packages are not installed."""
    from jpaged.__main__ import COMMANDS, parser_of

    whole = argparse.ArgumentParser(prog="jpaged", description="LLM generation for JAX")
    whole.add_argument("--version", action="store_true", help="show versions")
    commands = whole.add_subparsers(dest="command", parser_class=argparse.ArgumentParser)
    for name, (what, _) in COMMANDS.items():
        try:
            parser = parser_of(name)
        except ImportError:
            continue
        commands.add_parser(
            name, help=what, parents=[parser], add_help=False, conflict_handler="resolve"
        )
    return whole


def main(argv: list[str] | None = None, prog: str = "jpaged completion") -> int:
    """Print the script. Return the exit status: 1 after one sentence on stderr."""
    args = make_parser(prog).parse_args(argv)
    try:
        import shtab
    except ImportError:
        print(f"{prog}: needs shtab: pip install 'jpaged[completion]'", file=sys.stderr)
        return 1
    print(shtab.complete(whole_parser(), shell=args.shell))
    return 0
