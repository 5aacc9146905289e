"""Trial: whether a form can be compiled and used at all, in bounded time and memory.

While a schema is compiled, alternatives of alternatives multiply, and so do the states of a number
that is a multiple of another; a long chain of references overflows the stack, which ends the
process; and a pattern of sixty bytes unfolds into gigabytes when its first mask is made. Two
kilobytes are enough for any of these, so it is another process that tries first: it compiles the
form, makes the masks of its first tokens and says how much memory that took.
"""

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.errors import ConfigError

MOST_SECONDS = 5  # of a processor
MOST_BYTES = 1 << 30  # of the trial's process, all of its address space
MOST_FORM_BYTES = 64 << 20  # what a form may hold after its first masks
SHORT = 10_000  # characters; longer texts are tried whatever is in them
# What a form holds that is not tried, a character: twice what schemas of many integer ranges took,
# the largest that were seen.
BYTES_A_CHARACTER = 1200
# What a short schema needs for any of it.
MULTIPLIES = re.compile(r'"(allOf|anyOf|oneOf|not|if|\$\w*[rR]ef|multipleOf|pattern\w*)"')


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of trying a form. refusal: why it cannot be served, or None. num_bytes: what it
    holds after its first masks; measured, or estimated where it was not tried.
    """

    refusal: str | None
    num_bytes: int


class Trial:
    """Tries forms in a process of its own, which is started for the first of them and ends with
    this object. Threads may share it: they wait for each other.

    limits: of llguidance, as where the form is compiled to be used. vocab_size, special, eos_id: of
    the model's tokens; special: names by id of those that a grammar may name.
    """

    def __init__(
        self,
        limits: Mapping[str, int],
        *,
        vocab_size: int = 257,
        special: Mapping[int, str] | None = None,
        eos_id: int = 256,
    ):
        named = {eos_id: "<eos>", **(special or {})}
        self._settings = {
            "limits": limits,
            "seconds": MOST_SECONDS,
            "most_bytes": MOST_BYTES,
            "vocab_size": vocab_size,
            "special": named,
            "eos_id": eos_id,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Any = None

    def judge(self, kind: str, text: str) -> Verdict:
        """Return whether a form can be served: it is compiled, or refused, and its first masks are
        made, within MOST_SECONDS, MOST_BYTES and MOST_FORM_BYTES. kind: one of spec.KINDS. text: in
        llguidance's notation. Raises ConfigError where no process can be started.
        """
        is_known = kind in ("choice", "json_object")
        is_known |= kind == "json_schema" and MULTIPLIES.search(text) is None
        if is_known and len(text) <= SHORT:
            return Verdict(None, BYTES_A_CHARACTER * len(text))
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                print(json.dumps(text), file=process.stdin, flush=True)
                line = process.stdout.readline()
            except BrokenPipeError:  # it ended before it had read all
                line = ""
            if not line:
                process.wait()
                self._end()
                return Verdict(_why_it_ended(process.returncode), 0)
            answer = json.loads(line)
            if answer["is_last"]:
                self._end()
        error, num_bytes = answer["error"], answer["bytes"]
        if error is None and num_bytes > MOST_FORM_BYTES:
            error = f"holds {num_bytes >> 20} MiB, above {MOST_FORM_BYTES >> 20}"
        return Verdict(error, num_bytes)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            file = Path(__file__).with_name("trial_process.py")
            process = subprocess.Popen(
                [sys.executable, "-P", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a Ctrl-C is not for it
            )
            self._process, self._end = process, weakref.finalize(self, _end, process)
            assert process.stdin is not None and process.stdout is not None
            try:
                print(json.dumps(self._settings), file=process.stdin, flush=True)
                is_ready = bool(process.stdout.readline())
            except BrokenPipeError:
                is_ready = False
            if not is_ready:
                self._end()
                raise ConfigError(f"structured output: {sys.executable} cannot run {file}")
        return self._process


def _why_it_ended(status: int) -> str:
    """Return what a form took too much of, by the exit status of the process that tried it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if status == -signal.SIGXCPU:
        return f"takes more than {MOST_SECONDS} s of a processor to compile"
    if status == -signal.SIGKILL and hard != resource.RLIM_INFINITY:
        return f"takes more of a processor to compile than this process's limit of {hard} s leaves"
    stack_or_memory = f"a thread's stack or {MOST_BYTES >> 30} GiB"
    return f"takes more than {stack_or_memory} to compile"


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):  # of what it has not read
        process.communicate()  # waits for it, and closes its pipes
