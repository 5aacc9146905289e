"""Runner: the one object that owns arrays: params, pool, device slots, compiled steps. It makes every transfer."""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine.batch import (
    Batch,
    Bucket,
    StepResult,
    bucket_table,
    input_sections,
    padded_blocks,
    unpack_result,
)
from jpaged.errors import ConfigError
from jpaged.models.layout import param_specs
from jpaged.runtime import kv_cache
from jpaged.runtime.attention import Kernel, choose_kernel
from jpaged.runtime.steps import COUNTS_CHUNK, make_step, set_counts

log = logging.getLogger("jpaged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where arrays live: one device, or a mesh with KV heads over `axis` (None: everything is replicated)."""

    mesh: Mesh | None
    axis: str | None
    device: Any  # jax.Device

    @property
    def axis_size(self) -> int:
        return 1 if self.mesh is None or self.axis is None else self.mesh.shape[self.axis]

    def sharding(self, spec: PartitionSpec) -> NamedSharding | SingleDeviceSharding:
        return SingleDeviceSharding(self.device) if self.mesh is None else NamedSharding(self.mesh, spec)

    @property
    def replicated(self) -> NamedSharding | SingleDeviceSharding:
        return self.sharding(PartitionSpec())


def pool_layout(
    model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any, num_blocks: int
) -> tuple[Kernel, kv_cache.Layout]:
    """The attention kernel of a resolved config, and the pool's layout for it."""
    kernel = choose_kernel(model, config, dtype, where.device, where.axis_size)
    size = {"num_blocks": num_blocks, "block_size": config.block_size, "dtype": jnp.dtype(dtype)}
    return kernel, kv_cache.layout(model, attention=kernel.name, shards=where.axis_size, **size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handle:
    """A step in flight."""

    bucket: Bucket
    num_rows: int
    out: Array


class Runner:
    """Compiles one executable a Bucket and runs it over the donated pool.

    model, config: resolved, with num_blocks. dtype: of the pool (and of the params). `params` is set by the owner
    before a dispatch: the serving tree, an ordinary argument of every step.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, placement: Placement, dtype: Any):
        assert config.num_blocks is not None
        self.model, self.config, self.placement = model, config, placement
        self.kernel, self.layout = pool_layout(model, config, placement, dtype, config.num_blocks)
        self.params: Any = None
        self.uploads = self.downloads = 0  # transfers since the start
        self.compile_seconds: dict[Bucket | str, float] = {}
        self._steps: dict[Bucket, Any] = {}
        self._set_counts: Any = None
        self._moves: dict[tuple[str, int], Any] = {}  # compiled read_blocks and write_blocks, by number of blocks
        self._pool: Array | None = None
        self._last_R: Array | None = None
        self._counts_RV: Array | None = None  # only once a request needs the "full" step
        self._sealed = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool in all layers, on all devices together."""
        return self.layout.block_bytes

    def dispatch(self, batch: Batch, num_rows: int) -> Handle:
        """Start a step; the pool is rebound to its result before this returns."""
        self._allocate(full=batch.bucket.features != "plain")
        step = self.executable(batch.bucket)
        for slot, token_ids, prompt_len in batch.count_rows:
            self._enter_counts(slot, token_ids, prompt_len)
        counts = self._counts_RV if batch.bucket.features != "plain" else None
        pool, last, counts, out = step(self.params, self._pool, self._last_R, counts, self.put(batch.packed))
        self._pool, self._last_R = pool, last
        if counts is not None:
            self._counts_RV = counts
        return Handle(bucket=batch.bucket, num_rows=num_rows, out=out)

    def fetch(self, handle: Handle) -> StepResult:
        """Wait for a step and read its one output buffer."""
        return unpack_result(self.get(handle.out), handle.bucket, self.config, handle.num_rows)

    def read_blocks(self, block_ids: list[int]) -> Any:
        """Copy blocks to the host in one transfer, padded to a power of two: into pinned memory where there is any."""
        if not block_ids:
            return None
        self._allocate(full=False)
        size = padded_blocks(len(block_ids))
        blocks = self._move("read_blocks", size)(self._pool, self.put(_padded(block_ids, size)))
        if "pinned_host" not in {memory.kind for memory in self.placement.device.addressable_memories()}:
            return self.get(blocks)
        self.downloads += 1
        return jax.device_put(blocks, self._pool_sharding().with_memory_kind("pinned_host"))

    def write_blocks(self, data: Any, block_ids: list[int]) -> None:
        """Put what read_blocks gave into these blocks, in one transfer; ids of -1 are left out."""
        if data is None:
            return
        self._allocate(full=False)
        size = padded_blocks(len(block_ids))
        self.uploads += 1
        blocks = jax.device_put(data, self._pool_sharding())
        self._pool = self._move("write_blocks", size)(self._pool, self.put(_padded(block_ids, size)), blocks)

    def recover(self) -> None:
        """After an exception: state whose buffers went into a step that never came back is made anew (zeros)."""
        for name in ("_pool", "_last_R", "_counts_RV"):
            array = getattr(self, name)
            if array is not None and array.is_deleted():
                setattr(self, name, None)

    def release(self) -> None:
        """Free the pool and the device slots; executables stay. The next dispatch allocates again."""
        self._pool = self._last_R = self._counts_RV = None

    def report(self) -> dict[str, Any]:
        """What was compiled and moved so far."""
        return {
            "attention": self.kernel.name,
            "num_compiles": len(self.compile_seconds),
            "compile_time_s": sum(self.compile_seconds.values()),
            "buckets": [str(bucket) for bucket in self.compile_seconds],
            "uploads": self.uploads,
            "downloads": self.downloads,
            "block_bytes": self.block_bytes,
        }

    @property
    def holds_pool(self) -> bool:
        return self._pool is not None

    def put(self, array: np.ndarray) -> Array:
        """The only way up: one explicit, counted transfer."""
        self.uploads += 1
        return jax.device_put(array, self.placement.replicated)

    def get(self, array: Array) -> np.ndarray:
        """The only way down: one explicit, counted transfer."""
        self.downloads += 1
        return jax.device_get(array)

    def executable(self, bucket: Bucket) -> Any:
        """The compiled step of a bucket; compiling it now is logged, and an error once the table is sealed."""
        step = self._steps.get(bucket)
        if step is None:
            if self._sealed:
                raise ConfigError(f"strict=True: {bucket} is not in the table of compiled shapes")
            started = time.perf_counter()
            step = self._steps[bucket] = self.lower(bucket).compile()
            self.compile_seconds[bucket] = time.perf_counter() - started
            log.info("compiled %s in %.1f s", bucket, self.compile_seconds[bucket])
        return step

    def lower(self, bucket: Bucket) -> Any:
        """The lowered (not yet compiled) step of a bucket."""
        axis = self.placement.axis if self.placement.axis_size > 1 else None
        step = make_step(bucket, self.model, self.config, axis, self.kernel)
        where, pool_spec, pool_where = self.placement.replicated, kv_cache.spec(axis), self._pool_sharding()
        if axis is not None:  # XLA cannot partition a Pallas call, so the whole step runs a device at a time
            step = jax.shard_map(
                step,
                mesh=self.placement.mesh,
                in_specs=(param_specs(self.model, axis, self.placement.axis_size), pool_spec, *[PartitionSpec()] * 3),
                out_specs=(pool_spec, *[PartitionSpec()] * 3),
                check_vma=False,
            )
        slots, vocab = self.config.max_num_seqs, self.model.vocab_size
        full = bucket.features != "plain"
        arguments = (
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.params),
            jax.ShapeDtypeStruct(self.layout.shape, self.layout.dtype, sharding=pool_where),
            jax.ShapeDtypeStruct((slots,), jnp.int32, sharding=where),
            jax.ShapeDtypeStruct((slots, vocab), jnp.int32, sharding=where) if full else None,
            jax.ShapeDtypeStruct((input_sections(bucket, self.config)[1],), jnp.int32, sharding=where),
        )
        out = (pool_where, where, where if full else None, where)
        return jax.jit(step, donate_argnums=(1, 2, 3), out_shardings=out).lower(*arguments)

    def compile_table(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Compile every bucket of the table, and let no other in afterwards (strict mode)."""
        for bucket in bucket_table(self.config) if buckets is None else buckets:
            self.executable(bucket)
        self._counts_step()
        sizes = {padded_blocks(n) for n in range(1, self.config.max_blocks_per_seq + 1)}
        for size in sizes if self.config.swap_space_gib else ():
            self._move("read_blocks", size)
            self._move("write_blocks", size)
        self._sealed = True

    def _allocate(self, *, full: bool) -> None:
        where, slots = self.placement.replicated, self.config.max_num_seqs
        if self._pool is None:
            self._pool = kv_cache.zeros(self.layout.shape, self.layout.dtype, self._pool_sharding())
        if self._last_R is None:
            self._last_R = jax.device_put(np.zeros(slots, np.int32), where)
        if full and self._counts_RV is None:
            self._counts_RV = kv_cache.zeros((slots, self.model.vocab_size), jnp.int32, where)

    def _pool_sharding(self) -> NamedSharding | SingleDeviceSharding:
        return self.placement.sharding(kv_cache.spec(self.placement.axis))

    def _move(self, name: Literal["read_blocks", "write_blocks"], size: int) -> Any:
        """The compiled move of `size` blocks out of the pool or into it."""
        move = self._moves.get((name, size))
        if move is None:
            started = time.perf_counter()
            where, shape = self._pool_sharding(), self.layout.shape
            pool = jax.ShapeDtypeStruct(shape, self.layout.dtype, sharding=where)
            ids = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self.placement.replicated)
            blocks = (self.layout.num_layers * size, *shape[1:])
            arguments = [pool, ids]
            if name == "write_blocks":
                arguments.append(jax.ShapeDtypeStruct(blocks, self.layout.dtype, sharding=where))
            function = functools.partial(getattr(kv_cache, name), num_layers=self.layout.num_layers)
            donated = 0 if name == "write_blocks" else ()
            move = jax.jit(function, donate_argnums=donated, out_shardings=where).lower(*arguments).compile()
            self._moves[name, size] = move
            self.compile_seconds[f"{name} {size}"] = time.perf_counter() - started
        return move

    def _counts_step(self) -> Any:
        if self._set_counts is None:
            started = time.perf_counter()
            where = self.placement.replicated
            scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=where)
            shape = (self.config.max_num_seqs, self.model.vocab_size)
            self._set_counts = (
                jax.jit(set_counts, donate_argnums=0, out_shardings=where)
                .lower(
                    jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where),
                    scalar,
                    jax.ShapeDtypeStruct((COUNTS_CHUNK,), jnp.int32, sharding=where),
                    scalar,
                    scalar,
                )
                .compile()
            )
            self.compile_seconds["set_counts"] = time.perf_counter() - started
        return self._set_counts

    def _enter_counts(self, slot: int, token_ids: list[int], prompt_len: int) -> None:
        """Set a slot's token counts from scratch: its last owner's are of no use to a row just admitted."""
        step = self._counts_step()
        for start in range(0, len(token_ids), COUNTS_CHUNK):
            chunk = np.full(COUNTS_CHUNK, self.model.vocab_size, np.int32)
            tokens = token_ids[start : start + COUNTS_CHUNK]
            chunk[: len(tokens)] = tokens
            scalars = [np.int32(v) for v in (slot, max(prompt_len - start, 0), start == 0)]
            where, num_prompt, clear = (self.put(np.asarray(v)) for v in scalars)
            self._counts_RV = step(self._counts_RV, where, self.put(chunk), num_prompt, clear)


def _padded(block_ids: list[int], size: int) -> np.ndarray:
    padded = np.full(size, -1, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded
