"""Runner: the one object that owns arrays: params, pool, device slots, compiled steps. It makes
every transfer.
"""

import dataclasses
import functools
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.engine.buckets import Bucket, bucket_table, input_sections, padded_blocks
from jpaged.engine.packing import Batch, unpack_result
from jpaged.engine.plan import StepResult
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import kv_groups
from jpaged.models.layout import param_specs
from jpaged.runtime import kv_cache
from jpaged.runtime.attention import Kernel, choose_kernel
from jpaged.runtime.compiled_steps import compile_step
from jpaged.runtime.memory import explained
from jpaged.runtime.steps import COUNTS_CHUNK, make_step, set_counts

log = logging.getLogger("jpaged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where arrays live: one device, or a mesh with KV heads over `axis` (None: everything is
    replicated).
    """

    mesh: Mesh | None
    axis: str | None
    device: Any  # jax.Device

    @property
    def axis_size(self) -> int:
        return 1 if self.mesh is None or self.axis is None else self.mesh.shape[self.axis]

    def sharding(self, spec: PartitionSpec) -> NamedSharding | SingleDeviceSharding:
        return (
            SingleDeviceSharding(self.device)
            if self.mesh is None
            else NamedSharding(self.mesh, spec)
        )

    @property
    def replicated(self) -> NamedSharding | SingleDeviceSharding:
        return self.sharding(PartitionSpec())


def pool_layout(
    model: ModelConfig, config: EngineConfig, where: Placement, dtype: Any, num_blocks: int
) -> tuple[Kernel, kv_cache.Layout]:
    """The attention kernel of a resolved config, and the pool's layout for it."""
    group = kv_groups(model)[0]  # they differ by their windows alone
    kernel = choose_kernel(model, group, config, dtype, where.device, where.axis_size)
    size = {"num_blocks": num_blocks, "block_size": config.block_size, "dtype": jnp.dtype(dtype)}
    layout = kv_cache.layout(model, token=kernel.pool_layout, shards=where.axis_size, **size)
    return kernel, layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handle:
    """A step in flight. outs: what comes back of it; done: ready when the step is."""

    batch: Batch
    outs: tuple[Array, ...]
    done: Array


@dataclasses.dataclass
class Usage:
    """How often a compiled step ran, and over how many tokens (of a draw: rows), with and without
    padding.
    """

    hits: int = 0
    tokens: int = 0
    padded: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketReport:
    """One shape of the table of steps (see engine.batch.Bucket): how often it ran, and what it
    costs.

    padding_waste: share of the tokens that it ran over (of a draw: rows) that were padding.
    compile_seconds and bytes are None until it is compiled; temp_bytes: of temporaries while it
    runs.
    """

    phase: str
    tokens: int
    rows: int
    blocks: int
    steps: int
    features: str
    hits: int
    padding_waste: float
    compile_seconds: float | None
    executable_bytes: int | None
    temp_bytes: int | None


class Runner:
    """Compiles one executable a Bucket and runs it over the donated pool.

    model, config: resolved, with num_blocks. dtype: of the pool (and of the params). `params` is
    set by the owner before a dispatch: the serving tree, an ordinary argument of every step.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, placement: Placement, dtype: Any):
        assert config.num_blocks is not None
        self.model, self.config, self.placement = model, config, placement
        self.kernel, self.layout = pool_layout(model, config, placement, dtype, config.num_blocks)
        self.params: Any = None
        self.uploads = self.downloads = 0  # transfers since the start
        self.usage: dict[Bucket, Usage] = {}
        self.compile_seconds: dict[Bucket | str, float] = {}
        self._steps: dict[Bucket, Any] = {}
        self._set_counts: Any = None
        self._moves: dict[
            tuple[str, int], Any
        ] = {}  # compiled read_blocks and write_blocks, by number of blocks
        self._pool: Array | None = None
        self._last_R: Array | None = None
        self._counts_RV: Array | None = None  # only once a request needs the "full" step
        self._sealed = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool in all layers, on all devices together."""
        return self.layout.block_bytes

    def dispatch(self, batch: Batch) -> Handle:
        """Start a step; the pool is rebound to its result before this returns. CapacityError where
        memory runs out.
        """
        with explained(self.config):
            return self._dispatch(batch)

    def _dispatch(self, batch: Batch) -> Handle:
        buckets = [bucket for bucket in (batch.bucket, batch.sample) if bucket is not None]
        self._prepare(
            buckets, full=bool(batch.count_rows) or any(bucket.is_full for bucket in buckets)
        )
        for slot, token_ids, prompt_len in batch.count_rows:
            self._enter_counts(slot, token_ids, prompt_len)
        packed = self.put(batch.packed)
        outs: list[Array] = []
        if batch.bucket.phase == "decode":
            outs = [self._draw(batch.bucket, batch, packed)]
            return Handle(batch=batch, outs=tuple(outs), done=outs[0])
        step = self._ran(batch.bucket, batch.num_tokens, batch.bucket.tokens)
        self._pool, hidden, packed, scored = step(self.params, self._pool, packed)
        if batch.sample is not None:
            outs.append(self._draw(batch.sample, batch, packed, hidden))
        if scored is not None:
            outs.append(scored)
        return Handle(batch=batch, outs=tuple(outs), done=hidden)

    def _prepare(self, buckets: list[Bucket], *, full: bool) -> None:
        """Have the arrays and the steps of a dispatch: what is missing of them is made side by
        side.
        """
        missing = [bucket for bucket in buckets if bucket not in self._steps]
        if self._pool is not None and not missing:
            self.allocate(full=full)
            return
        with ThreadPoolExecutor() as threads:
            made = [threads.submit(self.allocate, full=full)]
            made += [
                threads.submit(self._compile, bucket, time.perf_counter(), self.lower(bucket))
                for bucket in missing
            ]
            for future in made:
                future.result()

    def _draw(
        self, bucket: Bucket, batch: Batch, packed: Array, hidden: Array | None = None
    ) -> Array:
        """Run the step that draws: a whole decode, or what follows a prefill's hidden states."""
        real = batch.num_tokens if hidden is None else batch.num_rows
        step = self._ran(bucket, real, bucket.rows * batch.steps)
        counts = self._counts_RV if bucket.is_full else None
        if hidden is None:
            self._pool, self._last_R, counts, out = step(
                self.params, self._pool, self._last_R, counts, packed
            )
        else:
            self._last_R, counts, out = step(self.params, hidden, self._last_R, counts, packed)
        if counts is not None:
            self._counts_RV = counts
        return out

    def _ran(self, bucket: Bucket, tokens: int, padded: int) -> Any:
        usage = self.usage.setdefault(bucket, Usage())
        usage.hits, usage.tokens, usage.padded = (
            usage.hits + 1,
            usage.tokens + tokens,
            usage.padded + padded,
        )
        return self._steps[bucket]

    def fetch(self, handle: Handle) -> StepResult:
        """Wait for a step and read what it returns: one buffer, or two where a prefill scored its
        prompts too.
        """
        with explained(self.config):
            handle.done.block_until_ready()
            outs = [self.get(out) for out in handle.outs]
        return unpack_result(handle.batch, self.config, outs)

    def read_blocks(self, block_ids: list[int]) -> Any:
        """Copy blocks to the host in one transfer, padded to a power of two: into pinned memory
        where there is any.
        """
        if not block_ids:
            return None
        self.allocate()
        size = padded_blocks(len(block_ids))
        blocks = self._move("read_blocks", size)(self._pool, self.put(_padded(block_ids, size)))
        if "pinned_host" not in {
            memory.kind for memory in self.placement.device.addressable_memories()
        }:
            return self.get(blocks)
        self.downloads += 1
        return jax.device_put(blocks, self._pool_sharding().with_memory_kind("pinned_host"))

    def write_blocks(self, data: Any, block_ids: list[int]) -> None:
        """Put what read_blocks gave into these blocks, in one transfer; ids of -1 are left out."""
        if data is None:
            return
        self.allocate()
        size = padded_blocks(len(block_ids))
        self.uploads += 1
        blocks = jax.device_put(data, self._pool_sharding())
        self._pool = self._move("write_blocks", size)(
            self._pool, self.put(_padded(block_ids, size)), blocks
        )

    def recover(self) -> None:
        """After an exception: state whose buffers went into a step that never came back is made
        anew (zeros).
        """
        for name in ("_pool", "_last_R", "_counts_RV"):
            array = getattr(self, name)
            if array is not None and array.is_deleted():
                setattr(self, name, None)

    def release(self) -> None:
        """Free the pool and the device slots; executables stay. The next dispatch allocates
        again.
        """
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
    def pool_bytes(self) -> int:
        """Bytes that the pool takes on each device now."""
        return (
            0
            if self._pool is None
            else self.layout.num_blocks * self.block_bytes // self.placement.axis_size
        )

    def put(self, array: np.ndarray) -> Array:
        """The only way up: one explicit, counted transfer."""
        self.uploads += 1
        return jax.device_put(array, self.placement.replicated)

    def get(self, array: Array) -> np.ndarray:
        """The only way down: one explicit, counted transfer."""
        self.downloads += 1
        return jax.device_get(array)

    def executable(self, bucket: Bucket) -> Any:
        """The compiled step of a bucket."""
        step = self._steps.get(bucket)
        return (
            self._compile(bucket, time.perf_counter(), self.lower(bucket)) if step is None else step
        )

    def _compile(self, bucket: Bucket, started: float, lowered: Any) -> Any:
        step = self._steps[bucket] = compile_step(lowered, self.placement.device.platform)
        self.compile_seconds[bucket] = time.perf_counter() - started
        log.info("compiled %s in %.1f s", bucket, self.compile_seconds[bucket])
        return step

    def lower(self, bucket: Bucket) -> Any:
        """The lowered (not yet compiled) step of a bucket; an error once the table is sealed."""
        if self._sealed:
            raise ConfigError(f"strict=True: {bucket} is not in the table of compiled shapes")
        axis = self.placement.axis if self.placement.axis_size > 1 else None
        step = make_step(bucket, self.model, self.config, axis, self.kernel)
        assert self.config.seq_buckets is not None
        most, slots, vocab = (
            self.config.seq_buckets[-1],
            self.config.max_num_seqs,
            self.model.vocab_size,
        )
        # Each argument as (shape, dtype, its share of a mesh), or None; what is donated comes back
        # in its place.
        pool, counts = (self.layout.shape, self.layout.dtype, kv_cache.spec(axis)), None
        if bucket.is_full:
            counts = ((slots, vocab), jnp.int32, PartitionSpec())
        state = [((slots,), jnp.int32, PartitionSpec()), counts]
        hidden = (
            (most, self.model.hidden_size),
            self.params["embed"]["weight"].dtype,
            PartitionSpec(),
        )
        packed = ((input_sections(bucket, self.config)[1],), jnp.int32, PartitionSpec())
        own, donated, num_outs = {
            "prefill": ([pool, packed], (1,), 4),
            "sample": ([hidden, *state, packed], (2, 3), 3),
            "decode": ([pool, *state, packed], (1, 2, 3), 4),
        }[bucket.phase]
        out_specs = [
            pool[2] if i == 0 and bucket.phase != "sample" else PartitionSpec()
            for i in range(num_outs)
        ]
        if (
            axis is not None
        ):  # XLA cannot partition a Pallas call, so the whole step runs a device at a time
            step = jax.shard_map(
                step,
                mesh=self.placement.mesh,
                in_specs=(
                    param_specs(self.model, axis, self.placement.axis_size),
                    *(PartitionSpec() if x is None else x[2] for x in own),
                ),
                out_specs=tuple(out_specs),
                check_vma=False,
            )
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.params
        )
        where = self.placement.sharding
        arguments = [
            None if x is None else jax.ShapeDtypeStruct(x[0], x[1], sharding=where(x[2]))
            for x in own
        ]
        outs = tuple(where(spec) for spec in out_specs)
        return jax.jit(step, donate_argnums=donated, out_shardings=outs).lower(params, *arguments)

    def buckets(self) -> list[BucketReport]:
        """Every shape of the table, compiled or not, smallest first."""
        reports = []
        for bucket in sorted(bucket_table(self.config)):
            usage, step = self.usage.get(bucket, Usage()), self._steps.get(bucket)
            memory = None if step is None else step.memory_analysis()
            report = BucketReport(
                **dataclasses.asdict(bucket),
                hits=usage.hits,
                padding_waste=1 - usage.tokens / usage.padded if usage.padded else 0.0,
                compile_seconds=self.compile_seconds.get(bucket),
                executable_bytes=None if memory is None else memory.generated_code_size_in_bytes,
                temp_bytes=None if memory is None else memory.temp_size_in_bytes,
            )
            reports.append(report)
        return reports

    def warmup(
        self, *, tokens: int | None = None, rows: int | None = None, use_tqdm: bool = False
    ) -> float:
        """Compile whatever of the table (see bucket_table) is not compiled yet, several at once;
        seconds it took.
        """
        started = time.perf_counter()
        sizes = {padded_blocks(n) for n in range(1, self.config.max_blocks_per_seq + 1)}
        moves: list[Literal["read_blocks", "write_blocks"]] = ["read_blocks", "write_blocks"]
        table = bucket_table(self.config, tokens=tokens, rows=rows)
        jobs = [
            functools.partial(self.executable, bucket) for bucket in sorted(table, reverse=True)
        ]
        jobs += [
            functools.partial(self._move, m, n)
            for m in moves
            for n in sizes
            if self.config.swap_space_gib
        ]
        jobs.append(functools.partial(self._counts_step))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = as_completed([pool.submit(job) for job in jobs])
            for future in tqdm(
                done, total=len(jobs), unit="step", desc="compiling", disable=not use_tqdm
            ):
                future.result()
        return time.perf_counter() - started

    def seal(self) -> None:
        """Let no shape in that is not compiled (strict mode)."""
        self._sealed = True

    def allocate(self, *, full: bool = False) -> None:
        """Have the pool and the device slots, and for full steps the counts; CapacityError where
        memory runs out.
        """
        where, slots = self.placement.replicated, self.config.max_num_seqs
        if self._pool is None:
            with explained(self.config, pool_bytes=self.layout.num_blocks * self.block_bytes):
                self._pool = kv_cache.zeros(
                    self.layout.shape, self.layout.dtype, self._pool_sharding()
                )
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
            move = (
                jax.jit(function, donate_argnums=donated, out_shardings=where)
                .lower(*arguments)
                .compile()
            )
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
        """Set a slot's token counts from scratch: its last owner's are of no use to a row just
        admitted.
        """
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
