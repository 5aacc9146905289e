"""How many blocks fit: computed from what is free, never guessed."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from jpaged import CapacityError, ConfigError, EngineConfig, ModelConfig
from jpaged.models.forward import bind
from jpaged.runtime import footprint, kv_cache, memory
from jpaged.runtime.choices import choose
from jpaged.runtime.kv_cache import PoolSpec
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from tests.tiny import CONFIG, config, make_params

MIB, GIB = 1 << 20, 1 << 30
COST = memory.PoolCost((memory.GroupCost(MIB),))


def engine(**changes: Any) -> EngineConfig:
    changes = {"block_size": 16, "max_num_seqs": 4} | changes
    return EngineConfig(**changes).resolve(CONFIG)


def plan(total: int, pool: int | None = None, in_use: int = 0, **changes: Any) -> memory.MemoryPlan:
    how = {name: changes.pop(name) for name in ("weights", "needs", "pool_cost") if name in changes}
    limits, cost = memory.Limits(total=total, in_use=in_use, pool=pool), how.pop("pool_cost", COST)
    return memory.plan(engine(**changes), limits, pool=cost, **{"needs": memory.Needs(), **how})


def test_every_row_at_full_length_is_enough() -> None:
    assert plan(1 << 40).num_blocks == 4 * 64 // 16
    assert plan(1 << 40, max_model_len=33).num_blocks == 4 * 3, "a part of a block is a block"
    found = plan(1 << 40, max_num_seqs=8)
    assert found.num_blocks == 32 and found.decided_by == "max_num_seqs * max_model_len"


def test_the_pool_takes_what_is_left() -> None:
    needs = memory.Needs(temporaries=3 * MIB, code=2 * MIB, state=MIB)
    found = plan(21 * MIB + 5, in_use=7 * MIB, weights=5 * MIB, needs=needs, max_num_seqs=99)
    assert (found.num_blocks, found.decided_by, found.waste) == (8, "memory", 5)
    assert found.account == {
        "weights": 5 * MIB,
        "other": 2 * MIB,
        "temporaries": 3 * MIB,
        "code": 2 * MIB,
        "state": MIB,
        "pool": 8 * MIB,
    }
    assert sum(found.account.values()) + found.waste == found.limit


def test_cpu_leaves_half_to_others_unless_the_steps_need_it() -> None:
    assert plan(20 * MIB, pool=10 * MIB).num_blocks == 10
    found = plan(20 * MIB, pool=10 * MIB, needs=memory.Needs(temporaries=13 * MIB))
    assert (found.num_blocks, found.decided_by) == (7, "memory")


def test_a_pinned_pool_may_exceed_the_limit() -> None:
    found = plan(20 * MIB, weights=5 * MIB, num_blocks=30)
    assert (found.num_blocks, found.decided_by, found.waste) == (30, "num_blocks", -15 * MIB)


def test_nothing_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"no KV block of 1048576 bytes fits the 500 bytes.*lower block_size=16"
    ):
        plan(1000, pool=500)
    with pytest.raises(
        ConfigError, match=r"fits the 0 bytes left.*weights take 9.*max_num_batched_tokens=8192"
    ):
        plan(1000, weights=999, needs=memory.Needs(temporaries=5000))


def test_limits_of_the_devices_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 6 * GIB)
    cpu = SimpleNamespace(platform="cpu", memory_stats=lambda: None)
    assert memory.Limits.of(cpu, 0.9) == memory.Limits(total=6 * GIB, pool=3 * GIB)
    monkeypatch.setattr(memory, "free_memory", lambda: 100 * GIB)
    assert memory.Limits.of(cpu, 0.9).pool == 4 * GIB
    gpu = SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": 300}
    )
    card = {"whole": 1000, "is_gpu": True}
    assert memory.Limits.of(gpu, 0.4) == memory.Limits(total=400, in_use=300, **card)


def test_trials_of_a_compile_take_what_is_not_the_engine_s() -> None:
    """And only as far as that does not suffice some of its share."""
    needs, sizes = memory.Needs(temporaries=MIB, autotuning=3 * MIB), {"max_num_seqs": 99}

    def blocks(**limits: Any) -> int:
        limits = {"in_use": 2 * MIB} | limits
        config = engine(**sizes)
        return memory.plan(config, memory.Limits(**limits), pool=COST, needs=needs).num_blocks

    assert blocks(total=20 * MIB) == blocks(total=20 * MIB, whole=23 * MIB) == 17
    assert blocks(total=20 * MIB, whole=22 * MIB) == 16
    assert blocks(total=20 * MIB, whole=40 * MIB, block=12 * MIB) == 8


def files(monkeypatch: pytest.MonkeyPatch, **contents: str) -> None:
    known = {
        "/proc/meminfo": "meminfo",
        "/sys/fs/cgroup/memory.max": "limit",
        "/sys/fs/cgroup/memory.current": "used",
        "/sys/fs/cgroup/memory.stat": "stat",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "limit_1",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "used_1",
    }
    monkeypatch.setattr(
        memory, "_lines", lambda path: contents.get(known.get(path, ""), "").splitlines()
    )


MEMINFO = "MemTotal: 9 kB\nMemAvailable:    4194304 kB\n"


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.free_memory() > 1 << 20, "this machine's own"
    files(monkeypatch, meminfo=MEMINFO)
    assert memory.free_memory() == 4 * GIB
    files(monkeypatch, meminfo=MEMINFO, limit="max", used="1")
    assert memory.free_memory() == 4 * GIB, "a cgroup without a limit"
    files(
        monkeypatch,
        meminfo=MEMINFO,
        limit=str(3 * GIB),
        used=str(2 * GIB),
        stat=f"anon 7\ninactive_file {GIB}",
    )
    assert memory.free_memory() == 2 * GIB, (
        "the cgroup's share is less, and files that were read can go"
    )
    files(monkeypatch, meminfo=MEMINFO, limit=str(GIB), used=str(3 * GIB))
    assert memory.free_memory() == 0
    files(monkeypatch, meminfo=MEMINFO, limit_1=str(3 * GIB), used_1=str(GIB))
    assert memory.free_memory() == 2 * GIB, "cgroup version 1"
    files(monkeypatch, meminfo=MEMINFO, limit_1="9223372036854771712", used_1=str(GIB))
    assert memory.free_memory() == 4 * GIB, "its way to say none"
    files(monkeypatch)
    assert memory.free_memory() > 0, "no /proc: the pages that sysconf knows"


def test_missing_files_are_no_error() -> None:
    assert memory._lines("/no/such/file") == []


def pools(model: ModelConfig, dtype: Any, num_blocks: int, **changes: Any) -> tuple[PoolSpec, ...]:
    where = Placement(mesh=None, axis=None, device=jax.devices()[0])
    changes = {"block_size": 4, "max_num_seqs": 4} | changes
    settings = EngineConfig(**changes).resolve(model)
    kernels = choose(model, settings, where, dtype).attention
    return kv_cache.pool_specs(model, settings, where, kernels, num_blocks, dtype)


def test_block_bytes() -> None:
    """4 tokens, 4 layers, 8 KV heads of 128, two bytes each."""
    model = config(num_layers=4, num_heads=8, num_kv_heads=8, head_dim=128)
    (pool,) = pools(model, jnp.float16, 3)
    assert pool.block_bytes == 2 * 4 * 4 * 8 * 128 * 2 == 65_536
    assert pool.shape == (4 * 3, 4, 16, 128)
    assert 3 * pool.block_bytes == pool.nbytes == int(np.prod(pool.shape)) * 2
    wider = dataclasses.replace(pool, dtype=jnp.dtype(jnp.float32))
    assert wider.block_bytes == 2 * pool.block_bytes


def test_a_fresh_pool_is_zeros_where_it_belongs() -> None:
    (pool,) = pools(CONFIG, jnp.bfloat16, 3)
    one = kv_cache.zeros(pool.shape, pool.dtype, SingleDeviceSharding(jax.devices()[2]))
    assert (
        one.devices() == {jax.devices()[2]}
        and one.shape == pool.shape
        and one.dtype == jnp.bfloat16
    )
    assert not np.asarray(one).any()
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    where = Placement(mesh=mesh, axis="tp", device=jax.devices()[0])
    shared = kv_cache.zeros(pool.shape, pool.dtype, pool.shardings(where)["kv"])
    assert shared.sharding.spec == PartitionSpec(None, None, "tp")  # pyright: ignore[reportAttributeAccessIssue]
    assert {shard.data.shape for shard in shared.addressable_shards} == {(6, 4, 2, 16)}, (
        "K and V of one head"
    )
    assert not np.asarray(shared).any()


# Groups of layers: the pool of a window is as large as what can be in use of it, and no larger.

COSTS = st.lists(
    st.tuples(st.integers(1, 5000), st.none() | st.integers(1, 60)), min_size=1, max_size=4
).map(
    lambda groups: memory.PoolCost(
        (*(memory.GroupCost(*group) for group in groups), memory.GroupCost(7))
    )
)


@hypothesis.given(COSTS, st.integers(0, 300), st.integers(0, 1 << 20))
def test_the_blocks_within_bytes_are_the_most_that_fit(
    cost: memory.PoolCost, num_blocks: int, nbytes: int
) -> None:
    assert cost.within(cost.of(num_blocks)) == num_blocks
    assert cost.within(cost.of(num_blocks + 1) - 1) == num_blocks
    found = cost.within(nbytes)
    assert cost.of(found) <= nbytes < cost.of(found + 1)


def test_a_window_needs_few_blocks() -> None:
    """1 full layer and 5 of a window of 1,024, 8 rows of 128k tokens: little more than a sixth."""
    model = config(
        num_layers=6,
        sliding_windows=(None, *[1024] * 5),
        max_position_embeddings=128 << 10,
        head_dim=128,
    )
    sizes: dict[str, Any] = {"block_size": 64, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    blocks = 8 * (128 << 10) // 64
    full, local = pools(model, jnp.bfloat16, blocks, **sizes)
    assert (full.num_layers, local.num_layers) == (1, 5) and full.num_blocks == blocks
    assert local.num_blocks == 8 * (1024 // 64 + 3) + 2048 // 64
    (alike,) = pools(dataclasses.replace(model, sliding_windows=()), jnp.bfloat16, blocks, **sizes)
    found = full.nbytes + local.nbytes
    print(f"\npool: {found:,} bytes by groups, {alike.nbytes:,} as one")
    assert alike.nbytes == 6 * full.nbytes and 1 / 6 < found / alike.nbytes < 1.1 / 6

    settings = EngineConfig(**sizes).resolve(model)
    most = kv_cache.most_blocks(model, settings)
    assert most == [blocks, local.num_blocks] and kv_cache.widest_group(model, settings) == 0
    cost = memory.PoolCost(
        (memory.GroupCost(full.block_bytes), memory.GroupCost(local.block_bytes, local.num_blocks))
    )
    assert cost.of(blocks) == found
    limits = memory.Limits(total=found + full.block_bytes - 1)
    planned = memory.plan(settings, limits, pool=cost, needs=memory.Needs())
    assert (planned.num_blocks, planned.account["pool"]) == (blocks, found)


@pytest.mark.parametrize("windows", [(None, 7), (7, 7)], ids=["mixed", "all"])
def test_the_pools_are_as_planned(windows: tuple[int | None, ...]) -> None:
    """The arrays that a Runner makes, to the byte."""
    model = config(sliding_windows=windows)
    where = Placement(mesh=None, axis=None, device=jax.devices()[0])
    settings = EngineConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    settings = settings.resolve(model)
    params = bind(model, make_params(0, model))
    plan = footprint.plan_pool(model, settings, where, params)
    runner = Runner(model, dataclasses.replace(settings, num_blocks=plan.num_blocks), where, params)
    runner.allocate(full=True)
    assert runner._state is not None
    found = sum(x.nbytes for x in jax.tree.leaves(runner._state.kv))
    assert found == plan.account["pool"] == runner.pool_bytes
    rows = sum(x.nbytes for x in jax.tree.leaves((runner._state.rows, runner._counts_RV)))
    assert rows == plan.needs.state
    assert [p.num_blocks for p in runner.pools] == ([32, 14] if None in windows else [14])


# Out of memory: a typed error that names bytes and settings, raised from the original.

OOM = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory allocating 35184372088832 bytes."
)
TPU_OOM = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.50G. "
    "That was not possible."
)


def test_running_out_of_memory_names_what_to_lower() -> None:
    settings = engine(num_blocks=7, max_num_batched_tokens=16)
    wanted = pytest.raises(
        ConfigError, match=r"pool of 99 bytes.*num_blocks=7 or memory_utilization=0.9"
    )
    with wanted as caught, memory.explained(settings, pool_bytes=99):
        raise OOM
    assert caught.value.__cause__ is OOM
    knobs = (
        r"lower num_blocks=7, memory_utilization=0.9, max_num_batched_tokens=16 or max_num_seqs=4"
    )
    for error, size in (
        (OOM, "35184372088832 bytes"),
        (TPU_OOM, "1.50G"),
        (MemoryError(), "memory"),
    ):
        with (
            pytest.raises(CapacityError, match=f"could not get {size}: {knobs}"),
            memory.explained(settings),
        ):
            raise error


def test_other_errors_pass() -> None:
    for error in (jax.errors.JaxRuntimeError("INTERNAL: no"), ValueError("RESOURCE_EXHAUSTED")):
        with pytest.raises(type(error)) as caught, memory.explained(engine()):
            raise error
        assert caught.value is error


def test_a_real_allocation_that_fails() -> None:
    wanted = pytest.raises(ConfigError, match="KV pool of 70368744177664 bytes")
    with wanted, memory.explained(engine(), pool_bytes=1 << 46):
        kv_cache.zeros((1 << 46,), jnp.int8, SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize("sizes", [(1, 10, 512, 19), (4, 4, 2048, 5), (1, 1, 16, 15)])
def test_a_pool_is_divided_for_short_and_long_sequences(sizes: tuple[int, ...]) -> None:
    """The same share of the best that could be held of the shortest and of the longest ones, no
    less of any between, and more of the worst than equal numbers of blocks would hold.
    """
    full, local, longest, a_row = sizes
    budget = 1e6
    share = memory.window_share((full, longest), [(local, a_row)])

    def held(length: int, share: float) -> float:
        blocks = budget / (full + share * local)
        best = budget / (full * length + local * min(length, a_row))
        return min(blocks / length, share * blocks / min(length, a_row)) / best

    shares = [held(length, share) for length in range(1, longest + 1)]
    assert share < 1 and shares[0] == pytest.approx(shares[-1]) == pytest.approx(min(shares))
    for other in (1.0, 1.1 * share, share / 1.1):
        assert min(held(n, other) for n in (1, longest)) < min(shares)


def test_blocks_of_a_group_with_a_window() -> None:
    cost = memory.GroupCost(3, 40, least=10, share=0.25)
    assert [cost.count(n) for n in (4, 12, 41, 100, 1000)] == [4, 10, 11, 25, 40]
    assert memory.GroupCost(3).count(7) == 7
    assert memory.window_share((5, 9), []) == 1.0
