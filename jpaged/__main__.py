"""The command `jpaged`, also as python -m jpaged."""

import sys

USAGE = "usage: jpaged serve MODEL [...]      (jpaged serve --help lists the flags)"


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] != "serve":
        print(USAGE, file=sys.stderr)
        return 2
    try:
        from jpaged.openai.server.run import main as serve
    except ImportError as e:
        print(f"jpaged serve: {e}", file=sys.stderr)
        return 1
    return serve(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
