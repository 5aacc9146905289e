"""How many blocks fit: computed from what is free, never guessed."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jpaged import ConfigError, EngineConfig
from jpaged.runtime import kv_cache, memory
from tests.tiny import CONFIG, config

GIB = 1 << 30
CPU: Any = SimpleNamespace(platform="cpu", memory_stats=lambda: None)


def engine(**changes: Any) -> EngineConfig:
    changes = {"block_size": 16, "max_num_seqs": 4} | changes
    return EngineConfig(**changes).resolve(CONFIG)


def blocks(device: Any = CPU, block_bytes: int = 1 << 20, mesh_axis: int = 1, **changes: Any) -> int:
    return memory.default_num_blocks(engine(**changes), block_bytes, device, mesh_axis=mesh_axis)


def test_every_row_at_full_length_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 40)
    assert blocks() == 4 * 64 // 16
    assert blocks(max_model_len=33) == 4 * 3, "a part of a block is a block"
    assert blocks(max_num_seqs=8) == 32


def test_cpu_takes_at_most_4_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 40)
    assert blocks(block_bytes=1 << 30) == 4
    assert blocks(block_bytes=(1 << 30) + 1) == 3


def test_cpu_takes_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 20 << 20)
    assert blocks() == 10


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"no KV block of 1048576 bytes fits the 500 bytes.*block_size"):
        blocks()


def device(limit: int, used: int) -> Any:
    return SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": used})


def test_an_accelerator_is_filled_to_its_share() -> None:
    assert blocks(device(100 << 20, 30 << 20), memory_utilization=0.4) == 10
    assert blocks(device(100 << 20, 30 << 20), memory_utilization=0.9, max_num_seqs=999) == 60
    assert blocks(device(100 << 20, 30 << 20), memory_utilization=0.4, mesh_axis=2, max_num_seqs=999) == 20, "shares"
    with pytest.raises(ConfigError, match=r"no KV block.*fits the 0 bytes.*memory_utilization"):
        blocks(device(100 << 20, 95 << 20))


def files(monkeypatch: pytest.MonkeyPatch, **contents: str) -> None:
    known = {"/proc/meminfo": "meminfo", "/sys/fs/cgroup/memory.max": "limit", "/sys/fs/cgroup/memory.current": "used"}
    monkeypatch.setattr(memory, "_lines", lambda path: contents.get(known[path], "").splitlines())


MEMINFO = "MemTotal: 9 kB\nMemAvailable:    4194304 kB\n"


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.free_memory() > 1 << 20, "this machine's own"
    files(monkeypatch, meminfo=MEMINFO)
    assert memory.free_memory() == 4 * GIB
    files(monkeypatch, meminfo=MEMINFO, limit="max", used="1")
    assert memory.free_memory() == 4 * GIB, "a cgroup without a limit"
    files(monkeypatch, meminfo=MEMINFO, limit=str(3 * GIB), used=str(GIB))
    assert memory.free_memory() == 2 * GIB, "the cgroup's share is less"
    files(monkeypatch, meminfo=MEMINFO, limit=str(GIB), used=str(3 * GIB))
    assert memory.free_memory() == 0
    files(monkeypatch)
    assert memory.free_memory() > 0, "no /proc: the pages that sysconf knows"


def test_missing_files_are_no_error() -> None:
    assert memory._lines("/no/such/file") == []


def test_block_bytes() -> None:
    """4 tokens, 4 layers, 8 KV heads of 128, two bytes each."""
    model = config(num_layers=4, num_heads=8, num_kv_heads=8, head_dim=128)
    pool = kv_cache.layout(model, num_blocks=3, block_size=4, dtype=jnp.dtype(jnp.float16))
    assert pool.block_bytes == 2 * 4 * 4 * 8 * 128 * 2 == 65_536
    assert pool.shape == (4 * 3, 4, 16, 128)
    assert 3 * pool.block_bytes == int(np.prod(pool.shape)) * 2
    wider = dataclasses.replace(pool, dtype=jnp.dtype(jnp.float32))
    assert wider.block_bytes == 2 * pool.block_bytes


def test_a_fresh_pool_is_zeros_where_it_belongs() -> None:
    pool = kv_cache.layout(CONFIG, num_blocks=3, block_size=4, dtype=jnp.dtype(jnp.bfloat16))
    one = kv_cache.zeros(pool.shape, pool.dtype, SingleDeviceSharding(jax.devices()[2]))
    assert one.devices() == {jax.devices()[2]} and one.shape == pool.shape and one.dtype == jnp.bfloat16
    assert not np.asarray(one).any()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    shared = kv_cache.zeros(pool.shape, pool.dtype, NamedSharding(mesh, kv_cache.spec("tp")))
    assert shared.sharding.spec == PartitionSpec(None, None, "tp", None)  # pyright: ignore[reportAttributeAccessIssue]
    assert {shard.data.shape for shard in shared.addressable_shards} == {(6, 4, 2, 16)}, "K and V of one head"
    assert not np.asarray(shared).any()
    whole = kv_cache.zeros(pool.shape, pool.dtype, NamedSharding(mesh, kv_cache.spec(None)))
    assert whole.sharding.is_fully_replicated
