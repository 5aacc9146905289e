"""Standard streams: those that whoever started a command has closed; what a terminal is shown."""

import os
import sys


def open_closed_streams() -> None:
    """Have /dev/null in place of each standard stream that is closed. Otherwise the next file that
    is opened takes its number, and what a library writes to stderr goes into that file.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of the numbers that are taken
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def shown(text: str) -> str:
    """Return a text without control characters, by which it could steer a terminal."""
    return "".join(
        c if c >= " " and c != "\x7f" and not "\x80" <= c < "\xa0" else _plain(c) for c in text
    )


def _plain(character: str) -> str:
    return character if character in "\n\t" else "\ufffd"


def was_closed(stream: object) -> bool:
    """Return whether a standard stream was closed when the command began."""
    return getattr(stream, "name", None) == os.devnull
