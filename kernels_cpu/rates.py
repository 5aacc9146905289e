"""How the native products stand against XLA's own on this processor: measured once, then kept
beside the library.

XLA's are not the same everywhere (with AMX they are four times those of AVX-512), so that no number
of rows from which they are the better ones would be right on every machine.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from kernels_cpu.library import level, registered
from kernels_cpu.linear import linear

ROWS = (1, 8, 32, 64, 128, 512)  # of x; one alone is what XLA:CPU may be worst at
N, E, WEIGHTS = 2048, 1024, 8  # weights of [N, E], in turn: they come from memory, as in a step
ROUNDS, PASSES = 3, 2  # what another program takes of one pass it does not of the next


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """ratios: by rows of x, the seconds of a native product over those of XLA's."""

    ratios: Mapping[int, float]

    @property
    def most_rows(self) -> int | None:
        """Up to how many rows the native product is to be taken: 0 for none, None for any number.

        Where that loses least over all numbers of rows: one of them may have been measured badly.
        """
        sizes = sorted(self.ratios)
        gains = [-math.log(self.ratios[rows]) for rows in sizes]
        totals = [0.0, *itertools.accumulate(gains)]
        count = max(range(len(totals)), key=lambda count: (totals[count], count))
        return None if count == len(sizes) else sizes[count - 1] if count else 0

    @property
    def worst(self) -> float:
        """The largest of the ratios: native products at their worst."""
        return max(self.ratios.values())

    @classmethod
    def measured(cls) -> Self:
        """Measures now: one to three seconds. The least of some rounds, in turn, counts."""
        rng = np.random.default_rng(0)
        weights = itertools.cycle([_random(rng, N) for _ in range(WEIGHTS)])
        operands = {rows: _random(rng, rows) for rows in ROWS}
        forms = tuple(jax.jit(form) for form in (_native, _plain))
        best = {rows: [math.inf, math.inf] for rows in ROWS}
        for _, rows in itertools.product(range(PASSES), ROWS):
            for turn in range(ROUNDS + 1):
                weight = next(weights)
                seconds = [_seconds(form, operands[rows], weight) for form in forms]
                if turn:  # the first round compiles
                    best[rows] = list(map(min, best[rows], seconds))
        return cls(ratios={rows: ours / theirs for rows, (ours, theirs) in best.items()})


@functools.cache
def rates() -> Rates:
    """Return this processor's rates: read from a file, measured where there is none. The library
    must be there (see library.unavailable).
    """
    library = registered()
    assert isinstance(library, Path), library
    file = library.with_name(f"{library.stem}-{_machine()}.json")
    try:
        kept = json.loads(file.read_text())
        return Rates(ratios={int(rows): float(ratio) for rows, ratio in kept.items()})
    except (OSError, ValueError):  # none yet, or one that is broken
        measured = Rates.measured()
        with contextlib.suppress(OSError):  # nowhere to write to: for this process alone
            _write(file, json.dumps(measured.ratios))
        return measured


def _native(x: jax.Array, weight: jax.Array) -> jax.Array:
    return linear(x, weight, x.shape[0], jnp.bfloat16)


def _plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    y = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(jnp.bfloat16)


def _seconds(product: Callable[..., Any], *operands: jax.Array) -> float:
    began = time.perf_counter()
    jax.block_until_ready(product(*operands))
    return time.perf_counter() - began


def _random(rng: np.random.Generator, rows: int) -> jax.Array:
    values = rng.standard_normal((rows, E), np.float32).astype(jnp.bfloat16)
    return jax.device_put(values, jax.local_devices(backend="cpu")[0])


def _machine() -> str:
    """Return a name for the kind of processor and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kind = sorted({line for line in lines if line.startswith("model")})
    words = "\n".join((*kind, platform.machine(), str(len(os.sched_getaffinity(0)))))
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def _write(file: Path, text: str) -> None:
    """At once: another process may be writing the same."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        new.write(text)
    os.replace(new.name, file)


if __name__ == "__main__":  # ahead of the first use
    chosen = level()
    if isinstance(reason := registered(), str) or chosen is None:
        print(f"CPU kernels: {reason}")
    else:
        most = rates().most_rows
        print(
            f"CPU kernels: compiled for {chosen.name}; products as fast as XLA's own for "
            f"{'any number of' if most is None else f'up to {most}'} rows"
        )
