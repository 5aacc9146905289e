"""What ptxas says of the kernels that XLA compiles: registers of a thread, and bytes of spills.

XLA runs the ptxas that it finds on PATH. `noting` puts one before it that runs it, asks it to say
more, and keeps what it said.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Options first: XLA asks for the version, and what is supported.
SCRIPT = """#!/bin/sh
case "$1" in -*) exec {ptxas} "$@" ;; esac
{ptxas} "$@" -v 2> {folder}/$$.said
code=$?
cat {folder}/$$.said >&2
exit $code
"""
SAID = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """registers: of a thread. spills: bytes of stores and loads together."""

    registers: int
    spills: int


class Notes:
    """What was said since it was last asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def taken(self) -> dict[str, Taken]:
        """Return what kernels take, by their names, and forget it."""
        kernels = {}
        for file in self.folder.glob("*.said"):
            for name, stores, loads, registers in SAID.findall(file.read_text()):
                spills = int(stores) + int(loads)
                kernels[name] = Taken(registers=int(registers), spills=spills)
            file.unlink()
        return kernels


@contextlib.contextmanager
def noting() -> Iterator[Notes]:
    """Inside the block, XLA's ptxas is one that notes; to be entered before XLA compiles for CUDA,
    which may remember where it found one.
    """
    ptxas, path = shutil.which("ptxas"), os.environ["PATH"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if ptxas is not None:
            script = folder / "ptxas"
            script.write_text(SCRIPT.format(ptxas=ptxas, folder=folder))
            script.chmod(0o700)
            os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
        try:
            yield Notes(folder)
        finally:
            os.environ["PATH"] = path
