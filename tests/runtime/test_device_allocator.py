"""A pool on a device whose memory an allocator gives in pieces, with other arrays between them.

No card has recorded these figures: the names, and what each counts, are those of XLA's
bfc_allocator.cc (GPUs) and of a TPU's memory_stats() in issue 1491 of jax.
"""

import dataclasses
import logging
import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jpaged
from jpaged import ConfigError, EngineConfig, SamplingParams, gpu_share
from jpaged import served_pool as pools
from jpaged.llm import LLM
from jpaged.models.forward import bind
from jpaged.models.params import param_shapes
from jpaged.runtime import footprint, kv_cache, memory
from jpaged.runtime.memory import LARGEST, Limits, MemoryPlan, Needs, largest_block
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from tests.tiny import CONFIG, make_params, make_prompts

MIB = 1 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=1)  # no decode compiles


class Allocator:
    """A best-fit allocator with coalescing over one region, as XLA's of a GPU. tells_largest: as
    its versions since 2026; earlier ones leave 0.
    """

    def __init__(self, limit: int, tells_largest: bool = True):
        self.chunks: list[list[int]] = [[limit, 0]]  # size, and whether it is in use
        self.limit, self.tells_largest = limit, tells_largest
        self.failures = 0

    def take(self, size: int) -> list[int]:
        free = [chunk for chunk in self.chunks if not chunk[1] and chunk[0] >= size]
        if not free:
            self.failures += 1
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {size} bytes."
            )
        chunk = min(free, key=lambda chunk: chunk[0])
        at = next(i for i, other in enumerate(self.chunks) if other is chunk)
        if chunk[0] > size:
            self.chunks.insert(at + 1, [chunk[0] - size, 0])
        chunk[:] = [size, 1]
        return chunk

    def give(self, chunk: list[int]) -> None:
        chunk[1] = 0
        merged: list[list[int]] = []
        for other in self.chunks:
            if merged and not merged[-1][1] and not other[1]:
                merged[-1][0] += other[0]
            else:
                merged.append(other)
        self.chunks = merged

    def memory_stats(self) -> dict[str, int]:
        in_use = sum(size for size, used in self.chunks if used)
        largest = max((size for size, used in self.chunks if not used), default=0)
        return {
            "num_allocs": len(self.chunks),
            "bytes_in_use": in_use,
            "peak_bytes_in_use": self.limit,
            "largest_alloc_size": self.limit,
            "bytes_limit": self.limit,
            "bytes_reserved": 0,
            "peak_bytes_reserved": 0,
            "largest_free_block_bytes": largest if self.tells_largest else 0,
            "pool_bytes": self.limit,
            "peak_pool_bytes": self.limit,
        }

    def train(self, *sizes: int) -> None:
        """Leave what a training step leaves: of these arrays in a row every second stays, the
        others (activations, gradients) are gone.
        """
        taken = [self.take(size) for size in sizes]
        for chunk in taken[1::2]:
            self.give(chunk)


def test_the_largest_array_that_an_allocator_can_give() -> None:
    of_a_tpu = {
        "bytes_in_use": 76288,
        "bytes_limit": 33014415360,
        "bytes_reservable_limit": 33014415360,
        "largest_free_block_bytes": 33014338560,
    }
    assert largest_block(of_a_tpu) == 33014338560
    fresh = Allocator(100).memory_stats() | {"pool_bytes": 0, "largest_free_block_bytes": 0}
    assert largest_block(fresh) == 100, "nothing is taken of the device yet"
    growing = fresh | {"pool_bytes": 60, "bytes_in_use": 50, "largest_free_block_bytes": 7}
    assert largest_block(growing) == 40, "what it may still take of the device"
    assert largest_block(growing | {"pool_bytes": 96}) == 7
    full = fresh | {"pool_bytes": 100, "bytes_in_use": 100}
    assert largest_block(full) == 0
    for unknown in (0, -1):
        assert largest_block(growing | {"largest_free_block_bytes": unknown}) is None
    assert largest_block({"bytes_limit": 100, "bytes_in_use": 50, "pool_bytes": -1}) is None


class Card:
    """What is asked of a jax.Device."""

    platform, compute_capability, device_kind = "gpu", "9.0", "card"

    def __init__(self, allocator: Allocator):
        self.memory_stats = allocator.memory_stats


def plan_on(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> MemoryPlan:
    needs = Needs(temporaries=2 * MIB, is_measured=True)
    monkeypatch.setattr(footprint, "measured", lambda *_: needs)
    monkeypatch.setattr(footprint, "TRIAL_BYTES", 0)
    where = Placement(mesh=None, axis=None, device=Card(allocator))
    config = EngineConfig(block_size=16, max_num_seqs=1 << 14, attention="xla")
    shapes = jax.tree.leaves(param_shapes(CONFIG), is_leaf=lambda x: isinstance(x, tuple))
    allocator.take(4 * sum(map(math.prod, shapes)))  # the weights
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
        param_shapes(CONFIG),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return footprint.plan_pool(CONFIG, config.resolve(CONFIG), where, bind(CONFIG, form))


def test_beside_training_a_pool_fits_the_largest_free_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = plan_on(Allocator(100 * MIB), monkeypatch)
    assert whole.decided_by == "memory" and whole.account["pool"] > 60 * MIB
    allocator = Allocator(100 * MIB)
    allocator.train(10 * MIB, 20 * MIB, 10 * MIB, 25 * MIB, 5 * MIB)
    cut = plan_on(allocator, monkeypatch)
    stats = allocator.memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    assert cut.decided_by == LARGEST
    beside = cut.needs.total + cut.needs.autotuning
    left = stats["largest_free_block_bytes"] - cut.account["pool"] - beside
    assert 0 <= left < cut.block_bytes and stats["largest_free_block_bytes"] < free / 2
    allocator.take(cut.account["pool"])  # it does fit, and so do a step and a trial after it
    allocator.take(cut.needs.total)
    allocator.take(cut.needs.autotuning)
    old = Allocator(100 * MIB, tells_largest=False)
    old.train(10 * MIB, 20 * MIB, 10 * MIB, 25 * MIB, 5 * MIB)
    assert plan_on(old, monkeypatch).account["pool"] > cut.account["pool"]


def test_a_gpu_keeps_room_for_the_trials_of_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take what the largest product of a step needs, its results twice; on a CPU nothing."""
    plan = plan_on(Allocator(100 * MIB), monkeypatch)
    config = EngineConfig(block_size=16, max_num_seqs=1 << 14).resolve(CONFIG)
    assert config.token_buckets is not None and config.seq_buckets is not None
    rows, E, V = config.seq_buckets[-1], CONFIG.hidden_size, CONFIG.vocab_size
    head = 4 * (V * E + rows * E) + 8 * rows * V
    assert plan.needs.autotuning >= head
    found = footprint.autotuning_bytes(CONFIG, config, jnp.float32)
    assert found == plan.needs.autotuning
    wide = dataclasses.replace(CONFIG, vocab_size=100 * V)
    head = 4 * (100 * V * E + rows * E) + 8 * rows * 100 * V
    assert footprint.autotuning_bytes(wide, config, jnp.float32) == head
    cpu = jpaged.plan_memory(CONFIG, EngineConfig(block_size=16), compiled=False)
    assert cpu.needs.autotuning == 0


# Pools that are made: the arrays lie in the host's memory, the allocator says whether they fit.


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """The allocator of the device that engines think they run on."""
    allocator, make = Allocator(MIB // 2, tells_largest=False), kv_cache.zeros

    def zeros(shape: tuple[int, ...], dtype: Any, placement: Any, **more: Any) -> Any:
        chunk = allocator.take(math.prod(shape) * jnp.dtype(dtype).itemsize)
        array = make(shape, dtype, placement, **more)
        weakref.finalize(array, allocator.give, chunk)
        return array

    needs = Needs(temporaries=MIB // 32, is_measured=True)
    monkeypatch.setattr(kv_cache, "zeros", zeros)
    monkeypatch.setattr(memory, "allocator_stats", lambda device: allocator.memory_stats())
    monkeypatch.setattr(footprint, "measured", lambda *_: needs)
    yield allocator


SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
SIZES |= {"token_buckets": (64,), "seq_buckets": (8,)}


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(make_prompts(5, 9, 3), GREEDY, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outputs]


def test_a_pool_that_does_not_fit_in_one_piece_is_made_smaller(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is made and when it wakes; the tokens stay. One whose blocks are set is not."""
    monkeypatch.setattr(footprint, "bound", lambda *_: Needs(temporaries=1 << 40))  # measures
    params = make_params()
    allocator.train(*(n * MIB // 32 for n in (3, 2, 1, 2, 1)))
    llm = LLM(params, **SIZES)
    size, failures = llm.session.pool.size, allocator.failures
    assert size is not None and failures > 0, "the plan counted on what is free in pieces"
    assert llm.session.runner.config.num_blocks == size.num_blocks
    assert f"{size} is tried" in caplog.text and "ERROR" not in caplog.text
    first, pool_bytes = tokens_of(llm), llm.session.runner.pool_bytes
    llm.sleep()
    trainer = allocator.take(pool_bytes)
    llm.wake()
    smaller = llm.session.pool.size
    assert smaller is not None and smaller.num_blocks < size.num_blocks
    assert "does not fit any more: steps compile again" in caplog.text
    assert tokens_of(llm) == first
    llm.sleep()
    rest = [allocator.take(size) for size, used in list(allocator.chunks) if not used]
    with pytest.raises(ConfigError, match=r"does not fit the device|no KV block"):
        llm.wake()
    for chunk in (trainer, *rest):
        allocator.give(chunk)
    llm.wake()
    assert tokens_of(llm) == first, "it slept on"
    with pytest.raises(ConfigError, match=r"KV pool of .* bytes does not fit.*num_blocks=65536"):
        LLM(params, num_blocks=1 << 16, **SIZES)


def test_an_allocator_that_says_nothing_asks_for_num_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    with pytest.raises(ConfigError, match=r"\(XLA_PYTHON_CLIENT_ALLOCATOR=platform\).*set num_bl"):
        Limits.of(silent, 0.9)
    monkeypatch.setattr(memory, "allocator_stats", lambda device: {})
    params = make_params()
    with pytest.raises(ConfigError, match="num_blocks=None"):
        LLM(params, **SIZES)
    assert LLM(params, num_blocks=8, **SIZES).session.runner.pool_bytes > 0, "at once"


def test_on_a_gpu_steps_compile_one_by_one_after_the_pool() -> None:
    config = EngineConfig(**SIZES, num_blocks=8).resolve(CONFIG)
    where = Placement(mesh=None, axis=None, device=jax.devices()[0])
    runner, done = Runner(CONFIG, config, where, bind(CONFIG, make_params())), []

    class Steps(dict[str, str]):
        def __missing__(self, shape: str) -> str:
            done.append(shape)
            return shape

    fake: Any = SimpleNamespace(
        compiled=Steps(),
        placement=SimpleNamespace(device=SimpleNamespace(platform="gpu")),
        allocate=lambda: done.append("pool"),
        _missing=lambda shapes: runner._missing(shapes),
    )
    batch: Any = SimpleNamespace(bucket="prefill", sample="draw")
    Runner._prepare(fake, batch)
    assert done == ["pool", "prefill", "draw"]


def test_the_share_of_a_gpu_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_on(Allocator(100 * MIB), monkeypatch)
    config = EngineConfig()
    for name in (gpu_share.VARIABLE, gpu_share.OLD_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    pools._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jpaged"):
        for _ in range(2):
            pools._report_share(plan, config)
        (line,) = caplog.records
        assert line.levelno == logging.WARNING
        assert "jax takes 0.75 of the GPU" in line.message
        assert "set XLA_CLIENT_MEM_FRACTION=0.95 in the environment before jax" in line.message
        caplog.clear()
        monkeypatch.setenv(gpu_share.OLD_VARIABLE, "0.5")
        pools._report_share(plan, config)
        few = dataclasses.replace(plan, decided_by="max_num_seqs * max_model_len")
        monkeypatch.delenv(gpu_share.OLD_VARIABLE)
        pools._report_share(few, config)
        assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
        assert "jax takes 0.5 of the GPU" in caplog.text
    with pytest.raises(ConfigError, match=r"or set XLA_CLIENT_MEM_FRACTION=0\.95 in"):
        memory.plan(
            config.resolve(CONFIG), Limits(total=1, is_gpu=True), pool=plan.pool, needs=Needs()
        )
