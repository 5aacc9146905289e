"""What commands and scripts that measure share: timing in turn, records and tables."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds until all arrays of the call's result have been computed."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def in_turn[T](calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the results of each call in rounds in which all take turns, so that all run under the
    same conditions.

    The first round, which compiles, is left out; every other round goes backwards.
    """
    results: dict[str, list[T]] = {name: [] for name in calls}
    for i in range(1 + rounds):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            result = calls[name]()
            if i:
                results[name].append(result)
    return results


def read_bandwidth() -> float:
    """Return the GB/s at which a reduction reads 256 MB on the default device, the best of five.
    This bounds decode's reads of weights.
    """
    x = jnp.ones((8, 1 << 23), jnp.float32)
    largest = jax.jit(lambda x: x.max(axis=1))
    runs = in_turn({"read": lambda: seconds_of(lambda: largest(x))}, 5)
    return x.nbytes / min(runs["read"]) / 1e9


def environment() -> dict[str, Any]:
    """Return the facts about the machine that a record has."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def json_line(record: Mapping[str, Any]) -> str:
    """Return one line of JSON, with floats to six digits."""
    short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
    return json.dumps(short)


def number(value: float | None) -> str:
    """Return a number to three significant digits, with all digits before the point and at most two
    after it.
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.{0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2}f}"


def aligned(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0) -> list[str]:
    """Return lines of right-aligned columns, the first `left` of which are left-aligned. A head may
    have several lines.
    """
    stacked = [head.split("\n") for head in heads]
    depth = max(map(len, stacked))
    cells = [[head[i] if i < len(head) else "" for head in stacked] for i in range(depth)]
    cells += [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        sized = zip(row, widths, strict=True)
        padded = [f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(sized)]
        lines.append(" ".join(padded).rstrip())
    return lines
