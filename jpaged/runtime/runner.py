"""Runner: the one object that owns arrays: params, pools, device rows. It makes every transfer."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import Array

from jpaged.config import EngineConfig
from jpaged.engine.cache.block_manager import GroupSize
from jpaged.engine.packing import PAD_TOKEN, Batch, unpack
from jpaged.engine.plan import StepResult
from jpaged.engine.shapes import Shape, StepShapes, moved_blocks, padded_blocks
from jpaged.models.config import ModelConfig
from jpaged.models.eagle import Head
from jpaged.models.forward import Forward
from jpaged.models.served import served_config
from jpaged.runtime import kv_cache
from jpaged.runtime.adapter_tables import AdapterTables
from jpaged.runtime.choices import Choices, activations_of, choose
from jpaged.runtime.compiled_steps import CompiledSteps
from jpaged.runtime.device_state import COUNTS_CHUNK, DeviceState, RowState
from jpaged.runtime.kv_cache import PoolSpec, pool_specs
from jpaged.runtime.memory import explained
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import Peers, put
from jpaged.runtime.stand_ins import StandIns
from jpaged.runtime.step_table import Usage
from jpaged.runtime.steps import StepSetting, Uses, uses
from jpaged.runtime.transfers import Sent, Transfers
from jpaged.runtime.vocabulary import WHOLE, Vocabulary

DraftOf = tuple[ModelConfig, Forward | Head]  # a draft model (or head) and its modules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handle:
    """A step in flight. outs: what comes back of it; done: ready when the step is. undrawn: the
    hidden states and inputs of a draw that has not started.
    """

    batch: Batch
    outs: tuple[Array, ...]
    done: Array
    undrawn: tuple[Array, Array] | None = None
    weight_version: int  # of the weights that it ran with, its draw included
    compared: Array | None = None  # over processes: whether all run this step


@dataclasses.dataclass(frozen=True)
class BlocksRead:
    """Blocks of a replica on their way to the host. arrived: by group. under_way: of a group, so
    many blocks, still on the device.
    """

    replica: int
    arrived: list[list[Any]]
    under_way: list[tuple[int, int, Any]]


class Runner:
    """Runs compiled steps over the donated state of one engine, for each of its replicas.

    model, config: resolved, with num_blocks. params: the model's modules, an ordinary argument of
    every step, in whose place `serve` puts others of the same form. For a runner that is to compile
    and never to run, ShapeDtypeStructs with shardings may stand in place of arrays. draft: model
    and modules of a draft model, replaced with `params`. choices: what was chosen for the model and
    the draft when the engine started; None chooses here. peers: the other processes that serve the
    model, which each step is compared with and waits for.
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
        self.serve(params, draft_params)
        choices = choices or choose_for(model, config, placement, params, draft)
        setting = _setting(model, config, placement, choices)
        if self.draft_model is not None:
            assert choices.draft is not None, "chosen with the draft"
            of_draft = _setting(self.draft_model, config, placement, choices.draft)
            pools = (*setting.pools, *of_draft.pools)
            setting = dataclasses.replace(setting, pools=pools, draft=of_draft)
        self.pools = setting.pools
        self.steps = CompiledSteps(setting, placement, *map(_form, (params, draft_params)))
        self.stand_ins = StandIns(self.steps)
        self.transfers = Transfers(placement, peers)
        self.adapters = AdapterTables(setting.model, config, placement, params.dtype)
        self.usage: dict[Shape, Usage] = {}
        self._uses: dict[Shape, Uses] = {}  # of the steps that have run
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
        self.draft_params, self._draft_arrays = draft, jax.tree.leaves(draft)
        self.weight_version = self.weight_version if version is None else version

    @property
    def kv_groups(self) -> tuple[GroupSize, ...]:
        return tuple(pool.size for pool in self.pools)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take on each device now."""
        return 0 if self._state is None else bytes_of(self.pools)

    def fit(self, buckets: StepShapes) -> StepShapes:
        """Return what to run for these buckets: themselves if they are compiled, else see
        StandIns. Over processes they run themselves: which steps are compiled may differ.
        """
        if self.steps.is_sealed or self.peers is not None or not self._missing(buckets):
            return buckets
        return self.stand_ins.fit(buckets)

    def dispatch(self, batch: Batch) -> Handle:
        """Start a step, all but a draw under masks; the state is rebound to its result before this
        returns. CapacityError where memory runs out.
        """
        with explained(self.config), self.transfers.sending():
            self._prepare(batch)
            if self.peers is None:
                return self._dispatch(batch)
            return self._dispatch_with(self.peers, batch)

    def _dispatch_with(self, peers: Peers, batch: Batch) -> Handle:
        def dispatch() -> Handle:
            compared = peers.compare(*_what_must_agree(batch))
            return dataclasses.replace(self._dispatch(batch), compared=compared)

        return peers.call(dispatch, "dispatching a step")

    def draw(self, handle: Handle, masks_SW: np.ndarray) -> Handle:
        """Start the draw of a step: see engine.masks. masks_SW: of the rows of all replicas; each
        process makes the same masks of the same tokens, which are compared.
        """

        def start() -> Handle:
            with explained(self.config), self.transfers.sending():
                return self._draw(handle, self._put_masks(masks_SW))

        return start() if self.peers is None else self.peers.call(start, "dispatching a draw")

    def _dispatch(self, batch: Batch) -> Handle:
        for replica, part in enumerate(batch.each):
            for row, token_ids, prompt_len in part.counts:
                self._counts_RV = self._with_counts(replica, row, token_ids, prompt_len)
            for slot, adapter in part.loads:
                self.adapters.load(replica, slot, adapter.data)
        if batch.copies is not None:
            self._copy_blocks(self.transfers.put(batch.copies))
        packed, bucket = self.transfers.put(batch.packed), batch.bucket
        step, arrays = self._step(bucket, batch.num_tokens, batch.padded_tokens)
        state = self._lent(bucket)
        if bucket.draws is None:
            masks = () if batch.masks_TW is None else (self._put_masks(batch.masks_TW),)
            kv, hidden, packed, scored = step(arrays, state.kv, state.rows, packed, *masks)
            self._state = DeviceState(kv=kv, rows=state.rows)
            handle = Handle(
                batch=batch,
                outs=() if scored is None else (scored,),
                done=hidden,
                undrawn=(hidden, packed),
                weight_version=self.weight_version,
            )
            draws_now = batch.sample is not None and not batch.sample.masked
            return self._draw(handle) if draws_now else handle
        if bucket.phase == "draft":
            kv, out = step(arrays, state.kv, state.rows, packed)
            self._state = DeviceState(kv=kv, rows=state.rows)
        else:
            state, out = step(arrays, state, packed)
            self._take_back(state)
        return Handle(batch=batch, outs=(out,), done=out, weight_version=self.weight_version)

    def _draw(self, handle: Handle, *masks: Sent) -> Handle:
        batch, state = handle.batch, self._state
        assert batch.sample is not None and handle.undrawn is not None and state is not None
        hidden, packed = handle.undrawn
        padded = batch.sample.rows * len(batch.each)
        step, arrays = self._step(batch.sample, batch.num_rows, padded)
        rows, out = step(arrays, hidden, self._lent(batch.sample).rows, packed, *masks)
        self._take_back(DeviceState(kv=state.kv, rows=rows))
        return dataclasses.replace(
            handle, outs=(out, *handle.outs), undrawn=None, weight_version=self.weight_version
        )

    def _missing(self, buckets: StepShapes) -> list[Shape]:
        """Return those of the shapes of a dispatch that are not compiled."""
        return [b for b in buckets if b is not None and b not in self.steps]

    def _prepare(self, batch: Batch) -> None:
        """Make the arrays and the steps of a dispatch that are missing, side by side."""
        sample = batch.sample
        full = batch.bucket.is_full or (sample is not None and sample.is_full)
        full = full or bool([part for part in batch.each if part.counts])
        missing = self._missing((batch.bucket, sample))
        if self._state is not None and not missing:
            self.allocate(full=full)
            return
        with ThreadPoolExecutor() as threads:
            made = [threads.submit(self.allocate, full=full)]
            for bucket in missing:
                started = time.perf_counter()
                lowered = self.steps.lower(bucket)
                made.append(threads.submit(self.steps.compile, bucket, started, lowered))
            for future in made:
                future.result()

    def _put_masks(self, masks_SW: np.ndarray) -> Sent:
        """Send masks up, as wide as the padded vocabulary."""
        if padding := self.steps.setting.mask_words - masks_SW.shape[1]:
            masks_SW = np.pad(masks_SW, ((0, 0), (0, padding)))
        return self.transfers.put(masks_SW)

    def _with_counts(
        self, replica: int, row: int, token_ids: list[int], prompt_len: int
    ) -> Array | None:
        """Return the counts with those of one row set from scratch: what its last owner left is of
        no use to a sequence that was just admitted.
        """
        step, put, counts_RV = self.steps.set_counts(), self.transfers.put_for, self._counts_RV
        for start in range(0, len(token_ids), COUNTS_CHUNK):
            tokens = token_ids[start : start + COUNTS_CHUNK]
            chunk = _padded(tokens, COUNTS_CHUNK, int(PAD_TOKEN))
            none = self.config.max_num_seqs  # no row of the others
            args = ((row, none), (chunk, 0), (max(prompt_len - start, 0), 0), (start == 0, 0))
            placed = [put(replica, np.asarray(x, np.int32), fill) for x, fill in args]
            counts_RV = step(counts_RV, *placed)
        return counts_RV

    def _copy_blocks(self, copies_GC2: Sent) -> None:
        """Copy blocks within each group's pool, before a step writes to them."""
        assert self._state is not None
        kv = self.steps.copy_blocks()(self._state.kv, copies_GC2)
        self._state = dataclasses.replace(self._state, kv=kv)

    def _step(self, bucket: Shape, tokens: int, padded: int) -> tuple[Any, list[Array]]:
        """Return a step, whose run is counted here, and the leaves of its StepParams."""
        if bucket not in self.usage:
            self.usage[bucket] = Usage()
            self._uses[bucket] = uses(bucket, self.steps.setting)
        usage, needs = self.usage[bucket], self._uses[bucket]
        usage.hits += 1
        usage.tokens += tokens
        usage.padded += padded
        arrays = self._arrays if needs.model else []
        if needs.adapters:
            arrays = arrays + jax.tree.leaves(self.adapters.arrays)
        return self.steps[bucket], arrays + self._draft_arrays if needs.draft else arrays

    def _lent(self, bucket: Shape) -> DeviceState:
        """Return the state for a step: with the counts for one that needs them."""
        assert self._state is not None
        counts = self._counts_RV if bucket.is_full else None
        rows = dataclasses.replace(self._state.rows, counts_RV=counts)
        return dataclasses.replace(self._state, rows=rows)

    def _take_back(self, state: DeviceState) -> None:
        """Keep what a step made of `_lent`; counts apart, since they change between steps too."""
        if state.rows.counts_RV is not None:
            self._counts_RV = state.rows.counts_RV
        rows = dataclasses.replace(state.rows, counts_RV=None)
        self._state = dataclasses.replace(state, rows=rows)

    def fetch(self, handle: Handle) -> list[StepResult]:
        """Wait for a step and return the result of each replica: one buffer is read, or two where a
        prefill scored its prompts too.
        """

        def wait() -> list[np.ndarray]:
            if self.peers is not None:
                assert handle.compared is not None
                self.peers.check(handle.compared)
            handle.done.block_until_ready()
            return [self.transfers.get(out) for out in handle.outs]

        with explained(self.config):
            outs = wait() if self.peers is None else self.peers.call(wait, "waiting for a step")
        return unpack(handle.batch, self.config, outs, weight_version=handle.weight_version)

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
                move = self.steps.move("read_blocks", group, count)
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
        kv[group] = self.steps.move("write_blocks", group, count)(kv[group], places, sent)
        self._state = DeviceState(kv=tuple(kv), rows=rows)

    def _most_moved(self, group: int) -> int:
        """Return the blocks of one transfer of a group at most."""
        return moved_blocks(self.config, self.pools[group].group.record.per)

    def allocate(self, *, full: bool = False) -> None:
        """Have the pools and the device rows, and for full steps the counts; ConfigError where
        memory runs out.
        """
        rows, placement = self.config.max_num_seqs, self.placement
        if self._state is None:
            forms = self.steps.kv
            with explained(self.config, pool_bytes=sum(pool.nbytes for pool in self.pools)):
                kv = jax.tree.map(lambda x: kv_cache.zeros(x.shape, x.dtype, x.sharding), forms)
            zeros = np.zeros(placement.replicas * rows, np.int32)
            last, lens = (put(zeros, placement.sharding(placement.by_replica)) for _ in range(2))
            self._state = DeviceState(kv=kv, rows=RowState(last_token_R=last, context_len_R=lens))
        if full and self._counts_RV is None:
            form = self.steps.counts
            self._counts_RV = kv_cache.zeros(form.shape, form.dtype, form.sharding)

    def recover(self) -> None:
        """After an exception: state whose buffers went into a step that never came back is made
        anew (zeros).
        """
        if any(x.is_deleted() for x in jax.tree.leaves(self._state)):
            self._state = None
        if self._counts_RV is not None and self._counts_RV.is_deleted():
            self._counts_RV = None

    def release(self) -> None:
        """Free the state; executables stay, and the next dispatch allocates again."""
        self._state = self._counts_RV = self.adapters.arrays = None

    def seal(self) -> None:
        """From now on refuse every shape that is not compiled (strict mode)."""
        self.allocate(full=True)
        self.adapters.allocate()
        self.steps.seal()

    def report(self) -> dict[str, Any]:
        """Return what was compiled and moved so far."""
        seconds = self.steps.seconds.copy()  # at once: other threads add to it
        names = dict.fromkeys(p.kernel.name for p in self.pools if p.kernel is not None)
        return {
            "attention": "+".join(names) or None,
            "quantized_activations": activations_of(self.steps.setting.choices, self.params),
            "num_compiles": len(seconds),
            "compile_time_s": sum(seconds.values()),
            "buckets": [str(bucket) for bucket in seconds],
            "uploads": self.transfers.ups,
            "downloads": self.transfers.downs,
            "block_bytes": sum(pool.block_bytes for pool in self.pools),
            "data_parallel_size": self.placement.replicas,
        }


def _what_must_agree(batch: Batch) -> tuple[bytes, ...]:
    """Return all that a dispatch depends on, which is equal in all processes."""
    counts = [part.counts for part in batch.each]
    loads = [(slot, x.name, x.version) for part in batch.each for slot, x in part.loads]
    rest = repr((batch.bucket, batch.sample, counts, loads)).encode()
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
    served, axis = served_config(model, placement.axis_size), placement.tensor_axis
    return StepSetting(
        model=served,
        config=config,
        pools=pool_specs(
            served, config, placement, choices.attention, config.num_blocks, choices.dtype
        ),
        choices=choices,
        tensor_axis=axis,
        axis_size=placement.axis_size,
        vocabulary=WHOLE if axis is None else Vocabulary(axis=axis, size=model.vocab_size),
    )


def bytes_of(pools: tuple[PoolSpec, ...]) -> int:
    """Return the bytes of these pools on each device."""
    return sum(pool.num_blocks * pool.device_block_bytes for pool in pools)


def _padded(values: list[int], size: int, fill: int) -> np.ndarray:
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
