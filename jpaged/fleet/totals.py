"""Totals: the stats of many engines as if of one."""

import collections
from collections.abc import Collection, Mapping
from typing import Any

from jpaged.engine.types import Report

# Entries of an engine's stats() that are not totals: values of now, or ratios.
OF_NOW = ("blocks_in_use", "num_blocks", "host_blocks_in_use", "host_blocks")
OF_NOW_TOO = ("sequences_running", "sequences_waiting", "store_pending_bytes")
NOT_TOTALS = (*OF_NOW, *OF_NOW_TOO, "block_bytes", "weight_version", "padding_waste")
NOT_TOTALS += ("prefix_hit_rate", "data_parallel_size", "store_bytes", "store_bytes_in_use")
# Engines compile, and read weights, side by side: of these the longest counts.
SLOWEST = ("compile_time_s", "weight_read_s")


def totals(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of LLM.stats() that only grow."""
    return {k: v for k, v in stats.items() if type(v) in (int, float) and k not in NOT_TOTALS}


def summed(past: Mapping[str, Any], engines: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the stats of engines and of past ones as if of a single one."""
    total: dict[str, Any] = dict(past)
    for stats in engines:
        now = {name: stats[name] for name in (*OF_NOW, *OF_NOW_TOO) if name in stats}
        for name in totals(stats) | now:
            total[name] = total.get(name, 0) + stats[name]
    for name in SLOWEST:
        total[name] = max((stats.get(name, 0.0) for stats in engines), default=0.0)
    # One folder of files may be shared, and weights are the fleet's.
    for name in ("store_bytes", "store_bytes_in_use", "weight_version"):
        if known := [stats[name] for stats in engines if name in stats]:
            total[name] = max(known)
    computed = total.get("prefill_tokens", 0) + total.get("decode_tokens", 0)
    padded, prompt = total.get("padded_tokens"), total.get("prompt_tokens")
    total["padding_waste"] = 1 - computed / padded if padded else 0.0
    total["prefix_hit_rate"] = total.get("cached_tokens", 0) / prompt if prompt else 0.0
    return total


class Totals:
    """The stats of a fleet's replicas as they were last seen, and the totals of those that are
    gone.
    """

    def __init__(self) -> None:
        self._past = collections.Counter[str]()
        self._now: dict[str, Report] = {}

    def take(self, stats: Mapping[str, Report]) -> None:
        """Take the stats of all replicas that run now, by name."""
        for name in set(self._now) - set(stats):
            self._past.update(totals(self._now[name]))
        self._now = dict(stats)

    def summed(self) -> Report:
        """Return them as if of one engine, with "replicas", which run."""
        return summed(self._past, list(self._now.values())) | {"replicas": len(self._now)}
