"""What the drivers of bench_peers.py share: a loop that reads a request a line from the standard
input and answers each with a line of JSON. It runs in every peer's own environment, so it imports
nothing but the standard library.

A request has `prompts` (lists of ids), `lengths` (how many tokens to draw for each, whatever they
are), `temperature`, `whole` and, at first, `warm`. With `whole` the engine's call for a batch is
timed; otherwise tokens are counted as they come, so that prefill and decode are told apart.
"""

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

New = list[tuple[int, list[int]]]  # the tokens that came, by the index of their prompt
LINE_BEGINS = "@peer "  # no engine prints that


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a driver serves. folder: a checkpoint in Hugging Face's layout; models: where it may
    write what it makes of that; weights: bf16, int8 or int4; tokens: what the cache holds, at least
    those of `rows` sequences at a time, none of which is longer than max_len; activations: the
    setting quantized_activations of jpaged.
    """

    folder: str
    models: str
    weights: str
    threads: int
    rows: int
    max_len: int
    tokens: int
    activations: str


class Engine(Protocol):
    """version: of the engine; form: what it calls the weights that it serves."""

    version: str
    form: str

    def warm(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        """Get ready for requests like this one: compile, or choose between ways. Not timed."""
        ...

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        """Return the tokens of each prompt, by the engine's call for a batch."""
        ...

    def stream(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> Iterator[New]:
        """Yield what each step draws."""
        ...


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a request and its tokens; of one that is not `whole` also the seconds
    until every prompt had a token (`first_s`), and how many there were by then (`first_tokens`).
    Nothing is timed of one that is `warm`.
    """
    prompts, lengths = request["prompts"], request["lengths"]
    temperature, first = request["temperature"], {}
    if request.get("warm"):
        engine.warm(prompts, lengths, temperature)
        return {}
    began = time.perf_counter()
    if request["whole"]:
        drawn = engine.generate(prompts, lengths, temperature)
    else:
        drawn: list[list[int]] = [[] for _ in prompts]
        waiting = set(range(len(prompts)))
        for new in engine.stream(prompts, lengths, temperature):
            for index, ids in new:
                drawn[index] += ids
                if ids:
                    waiting.discard(index)
            if not waiting and not first:
                first = {"first_s": time.perf_counter() - began}
                first["first_tokens"] = sum(map(len, drawn))
    seconds = time.perf_counter() - began
    counts = list(map(len, drawn))
    if counts != lengths:
        raise RuntimeError(f"{counts} tokens came where {lengths} were asked for")
    return {"seconds": seconds, "tokens": sum(counts), "ids": drawn[0][:8], **first}


def serve(make: Callable[[Setup], Engine]) -> int:
    """Make the engine that the flags ask for, and answer requests until the input ends."""
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Setup):
        kind = int if field.type in (int, "int") else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=True)
    setup = Setup(**vars(parser.parse_args()))
    out = _own_output()
    began = time.perf_counter()
    engine = make(setup)
    ready = {"version": engine.version, "form": engine.form}
    _print(out, ready | {"ready_s": time.perf_counter() - began})
    for line in sys.stdin:
        _print(out, answer(engine, json.loads(line)) | {"peak_gib": _peak_gib()})
    return 0


def _own_output() -> TextIO:
    """Return the standard output for this file alone: what engines print goes to the errors."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _print(out: TextIO, record: dict[str, Any]) -> None:
    print(LINE_BEGINS + json.dumps(record), file=out, flush=True)


def _peak_gib() -> float:
    """Return the most memory that this process has held: on Linux since it runs this program, since
    getrusage counts what the process that started it held before.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS counts bytes
