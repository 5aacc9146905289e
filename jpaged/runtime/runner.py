"""Runner: the one object that owns arrays: params, pools, device rows. It makes every transfer."""

import dataclasses
import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jpaged.config import EngineConfig
from jpaged.engine.cache.kinds import GroupSize, Replay
from jpaged.engine.packing import PAD_TOKEN, Batch, pack_replays, unpack
from jpaged.engine.plan import StepResult
from jpaged.engine.scoring import States
from jpaged.engine.shapes import (
    DecodeShape,
    PrefillShape,
    ReplayShape,
    Shape,
    StepShapes,
    moved_blocks,
    padded_blocks,
)
from jpaged.engine.spans import Piece
from jpaged.models.config import ModelConfig
from jpaged.models.forward import Forward
from jpaged.models.head_modules import Head
from jpaged.runtime import kv_cache
from jpaged.runtime.adapter_tables import AdapterTables
from jpaged.runtime.block_bytes import BlockBytes
from jpaged.runtime.choices import Choices, activations_of, choose, layer_kernels
from jpaged.runtime.compiled_steps import CompiledSteps
from jpaged.runtime.device_state import COUNTS_CHUNK, DeviceState, RowState
from jpaged.runtime.embedding_pool import EmbeddingPool
from jpaged.runtime.image_rows import ImageRows
from jpaged.runtime.kv_cache import Pool, PoolSpec, pool_specs
from jpaged.runtime.memory import explained, memory_error
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import Peers, put
from jpaged.runtime.stand_ins import StandIns
from jpaged.runtime.step_table import Usage
from jpaged.runtime.steps import StepSetting, Uses, uses
from jpaged.runtime.transfers import Sent, Transfers
from jpaged.runtime.vocabulary import WHOLE, Vocabulary
from kernels_pallas.implementation import CUDA

DraftOf = tuple[ModelConfig, Forward | Head]  # a draft model (or head) and its modules


class Handle(NamedTuple):
    """A step in flight. outs: what comes back of it; done: ready when the step is. weight_version:
    of the weights that it ran with, its draw included. undrawn: the hidden states and inputs of a
    draw that has not started. compared: over processes, whether all run this step. replayed: what
    `replay` takes, of a prefill. states: the hidden states of all tokens, where some are to stay on
    the device.
    """

    batch: Batch
    outs: tuple[Array, ...]
    done: Array
    weight_version: int
    undrawn: tuple[Array, Array] | None = None
    compared: Array | None = None
    replayed: tuple[Any, ...] = ()
    states: Array | None = None


@dataclasses.dataclass(frozen=True)
class BlocksRead:
    """Blocks of a replica on their way to the host. arrived: by group. under_way: of a group, so
    many blocks, still on the device.
    """

    replica: int
    arrived: list[list[Any]]
    under_way: list[tuple[int, int, Any]]


class ReadyStep(NamedTuple):
    """A compiled step that has run, which parameters it takes, and over how much it ran."""

    step: Any
    needs: Uses
    usage: Usage


class Runner:
    """Runs compiled steps over the donated state of one engine, for each of its replicas.

    model, config: resolved, with num_blocks. params: the model's modules, an ordinary argument of
    every step, in whose place `serve` puts others of the same form. For a runner that is to compile
    and never to run, ShapeDtypeStructs with shardings may stand in place of arrays. draft: model
    and modules of a draft model, replaced with `params`. choices: what was chosen for the model and
    the draft when the engine started; None chooses here. peers: see PeerRunner.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        placement: Placement,
        params: Forward,
        draft: DraftOf | None = None,
        choices: Choices | None = None,
        peers: Peers | None = None,
    ):
        self.peers = peers
        self.model, self.config, self.placement = model, config, placement
        self.draft_model, draft_params = draft or (None, None)
        self.weight_version = 0
        leaves, structure = jax.tree.flatten(params)
        numbered: Any = jax.tree.unflatten(structure, range(len(leaves)))
        self._of_logits: list[int] = jax.tree.leaves(numbered.for_logits)  # places among the leaves
        self.serve(params, draft_params)
        choices = choices or choose_for(model, config, placement, params, draft)
        setting = _setting(model, config, placement, choices)
        if self.draft_model is not None:
            assert choices.draft is not None, "chosen with the draft"
            of_draft = _setting(self.draft_model, config, placement, choices.draft)
            pools = (*setting.pools, *of_draft.pools)
            setting = dataclasses.replace(setting, pools=pools, draft=of_draft)
        self.pools = setting.pools
        self.compiled = CompiledSteps(setting, placement, *map(_form, (params, draft_params)))
        self.stand_ins = StandIns(self.compiled)
        self.transfers = Transfers(placement, peers)
        self.adapters = AdapterTables(setting.model, config, placement, params.dtype)
        written = (self.transfers, self.compiled.seconds)
        self.embeddings = EmbeddingPool(setting.model, config, placement, params.dtype, *written)
        self.images = None
        if config.images and model.vision is not None:
            self.images = ImageRows(model.vision, config, placement, choices, *written)
        self._ready: dict[Shape, ReadyStep] = {}  # the steps that have run
        self._state: DeviceState | None = None
        self._counts_RV: Array | None = None  # only once a request needs the "full" step

    def serve(
        self,
        params: Forward | None,
        draft: Forward | Head | None = None,
        version: int | None = None,
    ) -> None:
        """Run steps with these modules of the model, and of a draft model, from now on. None lets
        go of them. version: that of the weights, which results carry; None leaves it as it is.
        """
        self.params, self._arrays = params, jax.tree.leaves(params)
        self._logits_arrays = [self._arrays[i] for i in self._of_logits] if self._arrays else []
        self.draft_params, self._draft_arrays = draft, jax.tree.leaves(draft)
        self.weight_version = self.weight_version if version is None else version

    @property
    def kv_groups(self) -> tuple[GroupSize, ...]:
        return tuple(pool.size for pool in self.pools)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take on each device now."""
        return 0 if self._state is None else bytes_of(self.pools)

    @property
    def usage(self) -> dict[Shape, Usage]:
        """How often each step ran, and over how much."""
        return {shape: ready.usage for shape, ready in self._ready.items()}

    def fit(self, buckets: StepShapes) -> StepShapes:
        """Return what to run for these buckets: themselves if they are compiled, else see
        StandIns.
        """
        bucket, sample = buckets
        if bucket in self._ready and (sample is None or sample in self._ready):
            return buckets
        if self.compiled.is_sealed or not self._missing(buckets):
            return buckets
        return self.stand_ins.fit(buckets)

    def steps_at_once(self, bucket: DecodeShape) -> int:
        """Return how many of its steps a decode that draws would run in one dispatch now."""
        return bucket.steps if bucket in self._ready else self.stand_ins.steps_at_once(bucket)

    def dispatch(self, batch: Batch) -> Handle:
        """Start a step, all but a draw that is a step of its own; the state is rebound to its
        result before this returns. CapacityError where memory runs out.
        """
        bucket, sample, version = batch.bucket, batch.sample, self.weight_version
        try:
            with self.transfers.sending():
                is_ready = bucket in self._ready and (sample is None or sample in self._ready)
                if self._state is None or not is_ready:
                    self._prepare(batch)
                for replica, part in enumerate(batch.each):
                    for row, token_ids, prompt_len in part.counts:
                        self._set_counts(replica, row, token_ids, prompt_len)
                    for slot, adapter in part.loads:
                        self.adapters.load(replica, slot, adapter.data)
                if [part for part in batch.each if part.embedded]:
                    for replica, pieces in self._encoded(batch):
                        self.embeddings.write(replica, pieces)
                if batch.copies is not None:
                    self._copy_blocks(self.transfers.put(batch.copies))
                packed, state = self.transfers.put(batch.packed), self._state
                assert state is not None
                step, arrays = self._step(bucket, batch.num_tokens, batch.padded_tokens)
                if bucket.sampler is None:
                    masks = () if batch.masks_TW is None else (self._put_masks(batch.masks_TW),)
                    args = arrays, state.kv, state.rows, packed, *masks
                    kv, hidden, packed, scored, replayed, states = step(*args)
                    self._state = DeviceState(kv=kv, rows=state.rows)
                    outs, undrawn = () if scored is None else (scored,), (hidden, packed)
                    if scored is not None:
                        self.transfers.start(scored)
                    return Handle(batch, outs, hidden, version, undrawn, None, replayed, states)
                if bucket.phase == "draft":
                    kv, out = step(arrays, state.kv, state.rows, packed)
                    self._state = DeviceState(kv=kv, rows=state.rows)
                else:
                    rows = self._lent(state.rows) if bucket.is_full else state.rows
                    state, out = step(arrays, DeviceState(kv=state.kv, rows=rows), packed)
                    rows = self._taken_back(state.rows) if bucket.is_full else state.rows
                    self._state = DeviceState(kv=state.kv, rows=rows)
                self.transfers.start(out)
                return Handle(batch, (out,), out, version)
        except (jax.errors.JaxRuntimeError, MemoryError) as e:
            if (error := memory_error(e, self.config)) is None:
                raise
            raise error from e

    def draw(self, handle: Handle, masks_SW: np.ndarray | None = None) -> Handle:
        """Start the draw of a step that leaves it to this one. masks_SW: see engine.masks, of the
        rows of all replicas. CapacityError where memory runs out.
        """
        batch, sample, state = handle.batch, handle.batch.sample, self._state
        assert sample is not None and handle.undrawn is not None and state is not None
        (hidden, packed), version = handle.undrawn, self.weight_version
        try:
            with self.transfers.sending():
                masks = () if masks_SW is None else (self._put_masks(masks_SW),)
                padded = sample.rows * len(batch.each)
                step, arrays = self._step(sample, batch.num_rows, padded)
                rows = self._lent(state.rows) if sample.is_full else state.rows
                rows, out = step(arrays, hidden, rows, packed, *masks)
                rows = self._taken_back(rows) if sample.is_full else rows
                self._state = DeviceState(kv=state.kv, rows=rows)
                self.transfers.start(out)
                outs = (out, *handle.outs)
                kept = handle.replayed, handle.states
                return Handle(batch, outs, handle.done, version, None, None, *kept)
        except (jax.errors.JaxRuntimeError, MemoryError) as e:
            if (error := memory_error(e, self.config)) is None:
                raise
            raise error from e

    def replay(self, handle: Handle, rounds: list[list[list[Replay]]]) -> None:
        """Write the states of a step with guesses: see Device.replay. CapacityError where memory
        runs out.
        """
        bucket = handle.batch.bucket
        assert isinstance(bucket, PrefillShape) and handle.replayed, "no step with guesses"
        shape = ReplayShape.after(bucket, self.config)
        with explained(self.config), self.transfers.sending():
            for replays in rounds:
                assert self._state is not None
                packed = self.transfers.put(pack_replays(replays, shape, self.config))
                count = sum(replay.num_tokens for part in replays for replay in part)
                step, arrays = self._step(shape, count, shape.tokens * len(replays))
                kv = step(arrays, self._state.kv, handle.replayed, packed)
                self._state = dataclasses.replace(self._state, kv=kv)

    def _encoded(self, batch: Batch) -> list[tuple[int, tuple[Piece, ...]]]:
        """Return the parts of spans of each replica that has any, with the embeddings of images:
        those of all replicas are encoded together.
        """
        parts = [(i, part.embedded) for i, part in enumerate(batch.each) if part.embedded]
        if self.images is None or self.params is None or self.params.vision is None:
            return parts
        pieces = tuple(itertools.chain.from_iterable(part for _, part in parts))
        made = iter(self.images.encoded(pieces, self.params.vision, self.weight_version))
        return [(i, tuple(itertools.islice(made, len(part)))) for i, part in parts]

    def _missing(self, buckets: StepShapes) -> list[Shape]:
        """Return those of the shapes of a dispatch that are not compiled."""
        return [b for b in buckets if b is not None and b not in self.compiled]

    def _prepare(self, batch: Batch) -> None:
        """Make the arrays and the steps of a dispatch that are missing: on a GPU one after another,
        since XLA tries products there, with memory and by the clock of the device; else side by
        side.
        """
        missing = self._missing((batch.bucket, batch.sample))
        if not missing or self.placement.device.platform in CUDA:
            self.allocate()
            for bucket in missing:
                _ = self.compiled[bucket]
            return
        with ThreadPoolExecutor() as threads:
            made = [threads.submit(self.allocate)]
            for bucket in missing:
                started = time.perf_counter()
                lowered = self.compiled.lower(bucket)
                made.append(threads.submit(self.compiled.compile, bucket, started, lowered))
            for future in made:
                future.result()

    def _put_masks(self, masks_SW: np.ndarray) -> Sent:
        """Send masks up, as wide as the padded vocabulary."""
        if padding := self.compiled.setting.mask_words - masks_SW.shape[1]:
            masks_SW = np.pad(masks_SW, ((0, 0), (0, padding)))
        return self.transfers.put(masks_SW)

    def _set_counts(self, replica: int, row: int, token_ids: list[int], prompt_len: int) -> None:
        """Set the counts of one row from scratch: what its last owner left is of no use to a
        sequence that was just admitted.
        """
        self.allocate(full=True)
        step, put = self.compiled.set_counts(), self.transfers.put_for
        for start in range(0, len(token_ids), COUNTS_CHUNK):
            tokens = token_ids[start : start + COUNTS_CHUNK]
            chunk = _padded(tokens, COUNTS_CHUNK, int(PAD_TOKEN))
            none = self.config.num_rows  # no row of the others
            args = ((row, none), (chunk, 0), (max(prompt_len - start, 0), 0), (start == 0, 0))
            placed = [put(replica, np.asarray(x, np.int32), fill) for x, fill in args]
            self._counts_RV = step(self._counts_RV, *placed)

    def _copy_blocks(self, copies_GC2: Sent) -> None:
        """Copy blocks within each group's pool, before a step writes to them."""
        assert self._state is not None
        kv = self.compiled.copy_blocks()(self._state.kv, copies_GC2)
        self._state = dataclasses.replace(self._state, kv=kv)

    def _step(self, bucket: Shape, tokens: int, padded: int) -> tuple[Any, list[Array]]:
        """Return a step, whose run is counted here, and the leaves of its StepParams."""
        ready = self._ready.get(bucket)
        if ready is None:
            needs = uses(bucket, self.compiled.setting)
            ready = self._ready[bucket] = ReadyStep(self.compiled[bucket], needs, Usage())
        usage, needs = ready.usage, ready.needs
        usage.hits += 1
        usage.tokens += tokens
        usage.padded += padded
        arrays = self._arrays if needs.model else []
        if needs.logits:
            arrays = self._logits_arrays
        if needs.adapters:
            arrays = arrays + jax.tree.leaves(self.adapters.arrays)
        if needs.draft:
            arrays = arrays + self._draft_arrays
        if needs.embeddings:
            if self.embeddings.array is None:
                self.embeddings.allocate()
            arrays = [*arrays, self.embeddings.array]
        return ready.step, arrays

    def _lent(self, rows: RowState) -> RowState:
        """Return the rows for a step that needs the counts, with them."""
        self.allocate(full=True)
        return dataclasses.replace(rows, counts_RV=self._counts_RV)

    def _taken_back(self, rows: RowState) -> RowState:
        """Keep the counts that a step made of those lent to it apart: they change between steps
        too. Return the rows without them.
        """
        self._counts_RV = rows.counts_RV
        return dataclasses.replace(rows, counts_RV=None)

    def fetch(self, handle: Handle) -> list[StepResult]:
        """Wait for a step and return the result of each replica: one buffer is read, or two where a
        prefill scored its prompts too.
        """
        try:
            handle.done.block_until_ready()
            outs = [self.transfers.get(out) for out in handle.outs]
        except (jax.errors.JaxRuntimeError, MemoryError) as e:
            if (error := memory_error(e, self.config)) is None:
                raise
            raise error from e
        results = unpack(handle.batch, self.config, outs, weight_version=handle.weight_version)
        if (states := handle.states) is None:
            return results
        tokens = handle.batch.bucket.tokens
        return [
            dataclasses.replace(result, states=(states, replica * tokens))
            for replica, result in enumerate(results)
        ]

    def join_states(self, parts: list[States], rows: int) -> Array:
        """Return the hidden states of a sequence, [rows, E]: those of its chunks, then zeros. They
        do not cross the host; each device has a copy.
        """
        sharding, count = self.placement.replicated, 0
        whole = kv_cache.zeros((rows, self.model.hidden_size), self.compiled.form.dtype, sharding)
        with self.transfers.sending():
            for part in parts:
                place = np.array([part.first, count, part.rows], np.int32)
                join = self.compiled.join_states(rows, part.array.shape[0])
                whole = join(whole, part.array, self.transfers.put_whole(place))
                count += part.rows
        return whole

    def block_codec(self) -> BlockBytes:
        """Return what makes bytes of the blocks that fetch_blocks gives, and blocks of bytes."""
        return BlockBytes(self.pools, self.transfers.shares_a_block)

    @property
    def shares_blocks(self) -> bool:
        """Whether what was read of one replica can be written to any other."""
        return self.transfers.shares_blocks

    def read_blocks(self, block_ids: list[list[int]], replica: int = 0) -> BlocksRead:
        """Start to copy blocks of each group to the host, as they are after the steps dispatched so
        far, and return a handle at once, unless they are too many for the device to hold beside the
        pools: then earlier ones are waited for.
        """
        self.allocate()
        assert self._state is not None
        read = BlocksRead(replica, [[] for _ in block_ids], [])
        for group, ids in enumerate(block_ids):
            most = self._most_moved(group)
            for first in range(0, len(ids), most):
                if read.under_way:
                    self._arrive(read)
                part = ids[first : first + most]
                count = padded_blocks(len(part))
                move = self.compiled.move("read_blocks", group, count)
                places = self.transfers.put_for(replica, _padded(part, count, -1), -1)
                blocks = move(self._state.kv[group], places)
                self.transfers.start_blocks(blocks, replica)
                read.under_way.append((group, len(part), blocks))
        return read

    def fetch_blocks(self, handle: BlocksRead) -> list[list[Any]]:
        """Wait for blocks that are being read. Returns each on the host, by group."""
        self._arrive(handle)
        return handle.arrived

    def _arrive(self, read: BlocksRead) -> None:
        for group, count, blocks in read.under_way:
            whole = self.transfers.get_blocks(blocks, read.replica)
            read.arrived[group] += kv_cache.split(whole, self.pools[group].num_layers, count)
        read.under_way.clear()

    def write_blocks(
        self, blocks: list[list[Any]], block_ids: list[list[int]], replica: int = 0
    ) -> None:
        """Put what fetch_blocks gave into these blocks, transfers of many blocks of a group."""
        self.allocate()
        for group, (data, ids) in enumerate(zip(blocks, block_ids, strict=True)):
            most = self._most_moved(group)
            for first in range(0, len(ids), most):
                part = slice(first, first + most)
                self._write(group, data[part], ids[part], replica)

    def _write(self, group: int, blocks: list[Any], block_ids: list[int], replica: int) -> None:
        assert self._state is not None
        count, pool = padded_blocks(len(block_ids)), self.pools[group]
        whole = kv_cache.joined(blocks, pool.num_layers, count)
        sent = self.transfers.put_blocks(whole, replica, pool, count)
        places = self.transfers.put_for(replica, _padded(block_ids, count, -1), -1)
        kv, rows = list(self._state.kv), self._state.rows
        kv[group] = self.compiled.move("write_blocks", group, count)(kv[group], places, sent)
        self._state = DeviceState(kv=tuple(kv), rows=rows)

    def _most_moved(self, group: int) -> int:
        """Return the blocks of one transfer of a group at most."""
        return moved_blocks(self.config, self.pools[group].group.record.per)

    def allocate(self, *, full: bool = False) -> None:
        """Have the pools and the device rows, and for full steps the counts; ConfigError where
        memory runs out.
        """
        rows, placement = self.config.num_rows, self.placement
        if self._state is None:
            with explained(self.config, pool_bytes=sum(pool.nbytes for pool in self.pools)):
                kv = tuple(
                    _zeros_of(form, pool.num_layers)
                    for form, pool in zip(self.compiled.kv, self.pools, strict=True)
                )
            zeros = np.zeros(placement.replicas * rows, np.int32)
            last, lens = (put(zeros, placement.sharding(placement.by_replica)) for _ in range(2))
            self._state = DeviceState(kv=kv, rows=RowState(last_token_R=last, context_len_R=lens))
        if full and self._counts_RV is None:
            form = self.compiled.counts
            self._counts_RV = kv_cache.zeros(form.shape, form.dtype, form.sharding)

    def recover(self) -> None:
        """Make the state anew (zeros) after an exception, if its buffers went into a step that
        never came back.
        """
        if any(x.is_deleted() for x in jax.tree.leaves(self._state)):
            self._state = None
        if self._counts_RV is not None and self._counts_RV.is_deleted():
            self._counts_RV = None

    def release(self) -> None:
        """Free the state; executables stay, and the next dispatch allocates again."""
        self._state = self._counts_RV = self.adapters.arrays = self.embeddings.array = None

    def seal(self) -> None:
        """Refuse every shape that is not compiled from now on (strict mode)."""
        self.allocate(full=True)
        self.adapters.allocate()
        self.embeddings.allocate()
        self.compile_tower()
        self.compiled.seal()

    def compile_tower(self) -> None:
        """Compile what encodes images, if prompts may have any; weights must be served."""
        if self.images is not None:
            assert self.params is not None and self.params.vision is not None
            self.images.warmup(self.params.vision)

    def report(self) -> dict[str, Any]:
        """Return what was compiled and moved so far."""
        seconds = self.compiled.seconds.copy()  # at once: other threads add to it
        names = dict.fromkeys(p.kernel.name for p in self.pools if p.kernel is not None)
        setting = self.compiled.setting
        choices = setting.choices
        return {
            "attention": "+".join(names) or None,
            **layer_kernels(setting.model, choices),
            "quantized_activations": activations_of(choices, self.params),
            "num_compiles": len(seconds),
            "compile_time_s": sum(seconds.values()),
            "buckets": [str(bucket) for bucket in seconds],
            "uploads": self.transfers.ups,
            "downloads": self.transfers.downs,
            "block_bytes": sum(pool.block_bytes for pool in self.pools),
            "data_parallel_size": self.placement.replicas,
            **({} if self.images is None else self.images.report()),
        }


class PeerRunner(Runner):
    """The runner of one process of several that serve a model together. `peers` are the others:
    what is dispatched is compared with what they dispatch, and what waits for them does so for a
    limited time.
    """

    def fit(self, buckets: StepShapes) -> StepShapes:
        """Return these buckets: which steps are compiled may differ between processes."""
        return buckets

    def steps_at_once(self, bucket: DecodeShape) -> int:
        """Return all of its steps: what is not compiled is compiled at once."""
        return bucket.steps

    def dispatch(self, batch: Batch) -> Handle:
        assert self.peers is not None
        peers, dispatch = self.peers, super().dispatch
        has_images = any(x.span.image is not None for part in batch.each for x in part.embedded)
        with explained(self.config):
            self._prepare(batch)  # as long as it takes: nobody waits meanwhile
            if has_images:
                self._compile_tower(batch)

        def start() -> Handle:
            compared = peers.compare(*_what_must_agree(batch))
            if has_images:  # all wait for the tower before the step is fetched
                peers.check(compared)
            return dispatch(batch)._replace(compared=compared)

        return peers.call(start, "dispatching a step")

    def _compile_tower(self, batch: Batch) -> None:
        """Compile what encodes the images of a step, as long as it takes."""
        assert self.images is not None and self.params is not None
        tower = self.params.vision
        assert tower is not None
        for part in batch.each:
            self.images.compile(part.embedded, tower, self.weight_version)

    def draw(self, handle: Handle, masks_SW: np.ndarray | None = None) -> Handle:
        """Start a draw: see Runner.draw. All processes make the same masks of the same tokens,
        which are compared.
        """
        assert self.peers is not None
        start = functools.partial(super().draw, handle, masks_SW)
        return self.peers.call(start, "dispatching a draw")._replace(compared=handle.compared)

    def replay(self, handle: Handle, rounds: list[list[list[Replay]]]) -> None:
        """Write states: see Runner.replay. Every process makes the same rounds of equal tokens."""
        assert self.peers is not None
        start = functools.partial(super().replay, handle, rounds)
        self.peers.call(start, "dispatching a replay")

    def fetch(self, handle: Handle) -> list[StepResult]:
        assert self.peers is not None and handle.compared is not None
        peers, compared, fetch = self.peers, handle.compared, super().fetch

        def wait() -> list[StepResult]:
            peers.check(compared)
            return fetch(handle)

        return peers.call(wait, "waiting for a step")


def _what_must_agree(batch: Batch) -> tuple[bytes, ...]:
    """Return all that a dispatch depends on, which is equal in all processes."""
    counts = [part.counts for part in batch.each]
    loads = [(slot, x.name, x.version) for part in batch.each for slot, x in part.loads]
    spans = [(place, x.digest, *part) for y in batch.each for place, x, *part in y.embedded]
    rest = repr((batch.bucket, batch.sample, counts, loads, spans)).encode()
    copies = b"" if batch.copies is None else batch.copies.tobytes()
    return batch.packed.tobytes(), copies, rest


def _form(params: Any) -> Any:
    """Return modules with ShapeDtypeStructs that have shardings in place of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )


def choose_for(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    params: Forward | Head,
    draft: DraftOf | None = None,
) -> Choices:
    """Return the choices for the modules of a model, and of a draft model if there is one."""
    choices = choose(model, config, placement, params.dtype, params.experts_are_plain)
    if draft is None:
        return choices
    return dataclasses.replace(choices, draft=choose_for(draft[0], config, placement, draft[1]))


def _setting(
    model: ModelConfig, config: EngineConfig, placement: Placement, choices: Choices
) -> StepSetting:
    assert config.num_blocks is not None
    served, axis = placement.served(model), placement.tensor_axis
    return StepSetting(
        model=served,
        config=config,
        pools=pool_specs(
            served, config, placement, choices.attention, config.num_blocks, choices.dtype
        ),
        choices=choices,
        tensor_axis=axis,
        axis_size=placement.axis_size,
        data_axes=placement.data_axes,
        vocabulary=WHOLE if axis is None else Vocabulary(axis=axis, size=model.vocab_size),
    )


def _zeros_of(form: Pool, num_layers: int) -> Pool:
    """Return the pool of these ShapeDtypeStructs."""
    return {
        name: kv_cache.zeros(x.shape, x.dtype, x.sharding, num_layers=num_layers)
        for name, x in form.items()
    }


def bytes_of(pools: tuple[PoolSpec, ...]) -> int:
    """Return the bytes of these pools on each device."""
    return sum(pool.num_blocks * pool.device_block_bytes for pool in pools)


def _padded(values: list[int], size: int, fill: int) -> np.ndarray:
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
