"""The process of a Trial: reads its settings and then forms, a line of JSON each, and answers each
form with a line of JSON. Run as a file, it needs nothing of jpaged.
"""

import ctypes
import json
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

STACK_BYTES = 1 << 20  # the least that a thread has where the form will be used is twice as much
# A mask is made before each of so many tokens: a lexer fails when it is used, not when it is made.
TOKENS = 8
# What a process may still hold after a form before another takes its place.
MOST_LEFT_BYTES = 256 << 20


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


def heap_reader() -> Callable[[], int]:
    """Return a function that reads how many bytes this process has allocated: glibc's own count,
    else the largest that the process has been.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        unit = 1 if sys.platform == "darwin" else 1024
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    mallinfo2.restype = _MallInfo2

    def read() -> int:
        info = mallinfo2()
        return info.uordblks + info.hblkhd

    return read


def limit_processor(seconds: float) -> None:
    """Let the system end this process after so many more seconds of a processor, or at the hard
    limit that it was started under (`ulimit -t`), which no process can raise.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    last = math.ceil(time.process_time() + seconds)
    if hard != resource.RLIM_INFINITY:
        last = min(last, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (last, hard))


def limit_memory(most_bytes: int) -> None:
    """Bound this process's address space, and its core file to none."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # others know no such limit
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


class ByteTokenizer:
    """What llguidance asks of a tokenizer: a token for each byte, and those of a model that are
    special by their names, since a form may name them.

    special: names by id. eos_id: one of them. Ids below vocab_size that are neither are empty.
    """

    bos_token_id = None

    def __init__(self, vocab_size: int, special: Mapping[int, str], eos_id: int):
        self._bytes = [i for i in range(vocab_size + 256) if i not in special][:256]
        self.tokens = [b""] * (max(vocab_size - 1, self._bytes[-1], *special) + 1)
        for byte, token in enumerate(self._bytes):
            self.tokens[token] = bytes([byte])
        for token, name in special.items():
            self.tokens[token] = name.encode()
        self.eos_token_id, self.special_token_ids = eos_id, list(special)

    def __call__(self, text: bytes) -> list[int]:
        return [self._bytes[byte] for byte in text]


def try_form(lib: Any, tokenizer: Any, text: str, limits: Any) -> tuple[Any, str | None]:
    """Compile a form, and go the first steps in it: its matcher, and what is wrong with it or None.

    Each token that may come first is tried, and then the way that the lowest tokens lead. Where
    that comes to a place from which nothing goes on, others may not: it is the form's own matter.
    """

    def error_of(matcher: Any) -> str | None:
        error = matcher.get_error() if matcher.is_error() else None
        return None if error is None or error.startswith("NoExtension") else error

    matcher = lib.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    for step in range(TOKENS):
        if matcher.is_error():
            break
        mask = matcher.compute_bitmask()
        some = [(8 * i, byte) for i, byte in enumerate(mask) if byte]
        tokens = [first + bit for first, byte in some for bit in range(8) if byte >> bit & 1]
        tokens = [token for token in tokens if token != tokenizer.eos_token]
        for token in tokens if step == 0 else ():
            beside = matcher.deep_copy()
            beside.consume_token(token)
            if (error := error_of(beside)) is not None:
                return beside, error
        if not tokens or matcher.is_stopped():
            break
        matcher.consume_token(tokens[0])
    return matcher, error_of(matcher)


def serve(settings: Mapping[str, Any]) -> None:
    """Try each form that comes, and answer with a line of JSON. First a line says that all is well.

    `error`: what llguidance says of the form, or null. `bytes`: what the form took of memory.
    `is_last`: whether another process is to try the next one, since this one has too little left of
    its processor or holds too much memory.
    """
    import llguidance as lib  # pyright: ignore[reportMissingImports]

    special = {int(token): name for token, name in settings["special"].items()}
    vocabulary = ByteTokenizer(settings["vocab_size"], special, settings["eos_id"])
    tokenizer = lib.LLTokenizer(lib.TokenizerWrapper(vocabulary))
    limited, seconds = lib.LLParserLimits(**settings["limits"]), settings["seconds"]
    allocated = heap_reader()
    at_first = allocated()
    limit_processor(seconds)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        limit_processor(seconds)
        before = allocated()
        matcher, error = try_form(lib, tokenizer, json.loads(line), limited)
        answer: dict[str, Any] = {"error": error, "bytes": max(allocated() - before, 0)}
        del matcher
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        left = math.inf if hard == resource.RLIM_INFINITY else hard - time.process_time()
        answer["is_last"] = left < seconds + 1 or allocated() - at_first > MOST_LEFT_BYTES
        print(json.dumps(answer), flush=True)


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    limit_memory(settings["most_bytes"])
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(settings,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
