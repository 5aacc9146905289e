"""Trial: whether a form can be compiled at all, in bounded time and memory.

While a schema is compiled, alternatives of alternatives multiply, and so do the states of a number
that is a multiple of another; a long chain of references overflows the stack, which ends the
process. Two kilobytes are enough for any of these, so it is another process that tries first.
"""

import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.errors import ConfigError

MOST_SECONDS = 5  # of a processor
MOST_BYTES = 4 << 30
SHORT = 10_000  # characters; longer texts are tried whatever is in them
# What a short schema needs for any of it.
MULTIPLIES = re.compile(r'"(allOf|anyOf|oneOf|not|if|\$\w*[rR]ef|multipleOf|pattern\w*)"')


class Trial:
    """Compiles forms in a process of its own, which is started for the first of them and ends with
    this object. Threads may share it: they wait for each other.

    limits: of llguidance, as where the form is compiled to be used.
    """

    def __init__(self, limits: Mapping[str, Any]):
        self._settings = {"limits": limits, "seconds": MOST_SECONDS, "most_bytes": MOST_BYTES}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Any = None

    def ends(self, kind: str, text: str) -> bool:
        """Whether compiling a form, or refusing it, comes to an end within MOST_SECONDS and
        MOST_BYTES. kind: one of spec.KINDS. text: as llguidance has it. ConfigError where no
        process can be started.
        """
        is_known = kind in ("choice", "json_object")
        is_known |= kind == "json_schema" and MULTIPLIES.search(text) is None
        if is_known and len(text) <= SHORT:
            return True
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                print(json.dumps(text), file=process.stdin, flush=True)
                is_done = bool(process.stdout.readline())
            except BrokenPipeError:  # it ended before it had read all
                is_done = False
            if not is_done:
                self._end()
            return is_done

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            file, settings = Path(__file__).with_name("trial_process.py"), self._settings
            process = subprocess.Popen(
                [sys.executable, "-P", str(file), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a Ctrl-C is not for it
            )
            self._process, self._end = process, weakref.finalize(self, _end, process)
            assert process.stdout is not None
            if not process.stdout.readline():
                self._end()
                raise ConfigError(f"structured output: {sys.executable} cannot run {file}")
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()  # waits for it, and closes its pipes
