"""The layers that keep a state or latents, and what a step launches beside, which gpu_timed times
beside attention: what has kernels and XLA's form by all of them, and these are compared.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from _launch_calls import launch_calls
from _state_calls import FULL, TINY, StateCall, calls
from gpu_jobs import Cases, Found
from gpu_seconds import seconds_of

MOST = {"float32": 1e-4, "bfloat16": 2e-2}  # between two ways, of the largest result


def states(dry: bool) -> Cases:
    """Return what times each layer's step and prompts, and what is launched beside, and compares
    several ways of one.
    """
    by_name: dict[str, dict[str, StateCall]] = {}
    for name, call in calls(TINY if dry else FULL).items():
        what, _, way = name.partition(", ")
        if way != "tpu":
            by_name.setdefault(what, {})[way or "xla"] = call
    by_name |= launch_calls(dry)
    return {what: functools.partial(found, ways, dry) for what, ways in by_name.items()}


def found(ways: dict[str, StateCall], dry: bool) -> Found:
    """Return of each way microseconds, and bytes that have to be moved over seconds; of several,
    the largest difference of results and states over the largest of XLA's.
    """
    record: Found = {}
    results: dict[str, Any] = {}
    for way, call in ways.items():
        record |= timed(way, call, results, dry)
    if len(ways) == 1:
        return record
    theirs = results.pop("xla")
    most = MOST[theirs[0].dtype.name]
    for way, ours in results.items():
        apart = max(map(difference, ours, theirs))
        record["difference"] = max(record.get("difference", 0.0), apart)
        if not apart <= most:  # NaN is wrong too
            record["wrong"] = f"{way} and xla differ by {apart:.1e}, over {most:.0e}"
    return record


def timed(way: str, call: StateCall, results: dict[str, Any], dry: bool) -> Found:
    """Return the figures of one way, and note what its first run gives, with what rows write."""
    pool, rest = jax.jit(call.values)()
    program = jax.jit(call.run, donate_argnums=0).lower(pool, *rest).compile()
    pool, result = program(pool, *rest)
    results[way] = result, pool[: FULL.rows].copy()
    held = [pool]

    def run() -> Any:
        held[0], result = program(held[0], *rest)
        return result

    seconds = seconds_of(run, jax.block_until_ready, dry)
    return {f"{way}_us": 1e6 * seconds, f"{way}_gb_s": call.moved / seconds / 1e9}


def difference(ours: Any, theirs: Any) -> float:
    ours, theirs = (x.astype(jnp.float32) for x in (ours, theirs))
    return float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))
