"""How many KV blocks fit."""

import os
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError

CPU_POOL_BYTES = 4 << 30


def default_num_blocks(config: EngineConfig, block_bytes: int, device: Any, *, mesh_axis: int = 1) -> int:
    """Blocks of the default pool of a resolved config.

    block_bytes: of one block in all layers and on all devices; mesh_axis: devices that share them. On CPU the least
    of 4 GiB, max_num_seqs * max_model_len tokens, and half of what the machine or its cgroup has free; elsewhere what
    memory_utilization leaves of the device's memory, and no more than max_num_seqs * max_model_len tokens.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        budget = min(CPU_POOL_BYTES, free_memory() // 2)
    else:
        budget = (int(stats["bytes_limit"] * config.memory_utilization) - stats["bytes_in_use"]) * mesh_axis
    blocks = min(budget // block_bytes, config.max_num_seqs * config.max_blocks_per_seq)
    if blocks < 1:
        raise ConfigError(
            f"no KV block of {block_bytes} bytes fits the {max(budget, 0)} bytes left for the pool: "
            "lower block_size, or raise memory_utilization"
        )
    return int(blocks)


def free_memory() -> int:
    """Bytes that this process may still take: the machine's available memory or its cgroup's, whichever is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        free = min(free, max(int(limit[0]) - int(used[0]), 0))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux, or no cgroup: the caller has another source
        return []
