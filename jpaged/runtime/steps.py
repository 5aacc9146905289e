"""The compiled steps: packed inputs -> model -> draw -> packed outputs.

A prefill computes packed rows of 1..n tokens and hands the hidden states at chosen positions to a
"sample" step, which draws. A decode is the same with one token a row: with the same draw after it,
or with one of its own, several times over in a loop on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.config import EngineConfig
from jpaged.engine.layout import CONTROLS, input_sections, output_sections
from jpaged.engine.packing import PAD_TOKEN
from jpaged.engine.shapes import (
    DecodeShape,
    DraftShape,
    PrefillShape,
    SampleShape,
    Shape,
    most_replayed,
)
from jpaged.models.config import ModelConfig
from jpaged.models.embedded import Embedded
from jpaged.models.forward import Forward
from jpaged.models.head_modules import Head
from jpaged.models.kv_view import KVView, Place
from jpaged.models.last import Last
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.low_rank import AdapterTable
from jpaged.models.param_spec import MeshAxis
from jpaged.models.rows import State
from jpaged.runtime.adapter_tables import own_tables
from jpaged.runtime.choices import Choices
from jpaged.runtime.device_state import STOPPED, DeviceState, RowState
from jpaged.runtime.head_steps import HeadSteps
from jpaged.runtime.kv_cache import Pool, PoolSpec
from jpaged.runtime.paged_kv import Packed, PagedKV, locate, view_of
from jpaged.runtime.sampler import (
    Controls,
    FullControls,
    Sampled,
    named,
    sample,
    token_logprobs,
)
from jpaged.runtime.step_params import StepParams
from jpaged.runtime.vocabulary import WHOLE, Vocabulary
from kernels_pallas.packed_rows import PackedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSetting:
    """What all steps of an engine are made for. model: as it is served (models/served.py).

    tensor_axis: the mesh axis of axis_size devices that hold shares of heads and vocabulary, or
    None. data_axes: those that replicas lie along. vocabulary: how the vocabulary lies on the
    devices of the tensor axis. draft: the setting of a draft model, whose pools come last among
    `pools`.
    """

    model: ModelConfig
    config: EngineConfig
    pools: tuple[PoolSpec, ...]
    choices: Choices
    tensor_axis: MeshAxis | None = None
    axis_size: int = 1
    data_axes: tuple[str, ...] = ()
    vocabulary: Vocabulary = WHOLE
    draft: "StepSetting | None" = None

    def context(
        self,
        num_rows: Array | None,
        slot_T: Array | None = None,
        adapters: Mapping[str, AdapterTable] | None = None,
    ) -> StepContext:
        """Return what the layers of a step with these rows take beside x; see StepContext."""
        return StepContext(
            num_rows=num_rows,
            slot_T=slot_T,
            adapters=adapters,
            max_len=self.config.max_model_len,
            products=self.choices.products,
            experts=self.choices.experts,
            delta=self.choices.delta,
            scan=self.choices.scan,
            tensor_axis=self.tensor_axis,
            axis_size=self.axis_size,
            data_axes=self.data_axes,
            in_order=bool(self.config.deterministic),
            in_fp8=self.choices.in_fp8,
        )

    @property
    def exchanges(self) -> bool:
        """Whether replicas share experts, so that all of them compute a layer at once."""
        ffns = (ffn for layer in self.model.layers for ffn in layer.ffns)
        return any(isinstance(ffn, ExpertsConfig) and ffn.replicas > 1 for ffn in ffns)

    @property
    def own_pools(self) -> tuple[PoolSpec, ...]:
        """The pools of the model itself, without those of the draft."""
        return self.pools if self.draft is None else self.pools[: -len(self.draft.pools)]

    @property
    def pools_by_model(self) -> tuple[tuple[PoolSpec, "StepSetting"], ...]:
        """Each pool, with the setting of the model whose layers it is of."""
        pools = tuple((pool, self) for pool in self.own_pools)
        return pools if self.draft is None else (*pools, *self.draft.pools_by_model)

    @property
    def num_replayed(self) -> int:
        """How many tokens of a step are kept for a replay of its states; 0 where nothing guesses,
        or no layer has a state.
        """
        has_state = any(pool.group.record.replayed for pool in self.pools)
        return most_replayed(self.config) if has_state else 0

    @property
    def replayed_bytes(self) -> int:
        """The bytes on a device of what one step keeps for a replay."""
        forms = [p.replayed(self.num_replayed, shards=p.shards) for p in self.pools]
        return sum(x.size * x.dtype.itemsize for form in forms for x in form.values())

    @property
    def copied_bytes(self) -> int:
        """The bytes on a device of the states that a draft model's guesses go on from."""
        pools = () if self.draft is None else self.draft.pools
        states = [pool.device_block_bytes for pool in pools if pool.group.record.per == "block"]
        assert self.config.seq_buckets is not None
        return self.config.seq_buckets[-1] * sum(states)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose inputs a head takes (models/eagle.py); () where it takes what leaves the
        model, normed (models/mtp.py).
        """
        head = None if self.draft is None else self.draft.model.draft_head
        return () if head is None else head.aux_layers

    @property
    def has_head(self) -> bool:
        """Whether the draft is a head, which guesses by the model's hidden states."""
        return self.draft is not None and self.draft.model.is_head

    @property
    def mask_words(self) -> int:
        """int32 words of a row's mask, which has a bit for each token and for padding."""
        return -(-self.model.vocab_size // 32)


class Uses(NamedTuple):
    """Which fields of StepParams a step takes. logits: of the model, Forward.for_logits alone: each
    array of a call takes time.
    """

    model: bool
    logits: bool
    adapters: bool
    draft: bool
    embeddings: bool


def uses(bucket: Shape, setting: StepSetting) -> Uses:
    """Return which parameters the step of a bucket takes. A draft model guesses by itself; a head
    also needs the model's embeddings. Neither takes part in a draw.
    """
    if bucket.phase == "replay":
        return Uses(model=False, logits=False, adapters=False, draft=False, embeddings=False)
    is_draft, draws = bucket.phase == "draft", bucket.phase == "sample"
    return Uses(
        model=not draws and (not is_draft or setting.has_head),
        logits=draws,
        adapters=bool(bucket.loras) and not is_draft,
        draft=setting.draft is not None and not draws,
        embeddings=bucket.phase == "prefill" and setting.config.max_embeddings > 0,
    )


def make_step(bucket: Shape, setting: StepSetting) -> Callable[..., Any]:
    """Return the step of one bucket; packed and out are int32, laid out by engine/layout.py.

    prefill(params, kv, rows, packed, mask_TW of prompts scored under masks)
        -> (kv, hidden_RE, packed of the sample step, out or None, replayed, states_TE or None)
    sample(params, hidden_RE, rows, packed, mask_SW of a draw under masks) -> (rows, out)
    decode(params, state, packed) -> (state, out)
    decode without its draw(params, kv, rows, packed) -> as of a prefill
    draft(params, kv, rows, packed) -> (kv, out); rows stay as they are
    replay(params, kv, replayed, packed) -> kv

    hidden_RE: final hidden states after which a token is drawn. states_TE: of all tokens. kv, rows,
    state: of DeviceState; rows without counts for plain buckets. What a step returns of them was
    donated to it. params: the StepParams that `uses` names. A draft model computes all that the
    model computes, so that each block of its pools is of the same tokens as the model's.

    replayed: by group with states, the draft model's too, what the tokens leave for a replay: rows
    with guesses write no state, until it is known which guesses are right. () where nothing
    guesses.
    """
    decode = _make_forward if bucket.sampler is None else _make_decode
    makers = {"prefill": _make_prefill, "sample": _make_sample, "decode": decode}
    makers |= {"draft": _make_draft, "replay": _make_replay}
    return makers[bucket.phase](_Step(bucket, setting))


@dataclasses.dataclass(frozen=True)
class _Step:
    """A bucket of a setting, and what its step does in any phase. is_draft: of a draft model."""

    bucket: Shape
    to: StepSetting
    is_draft: bool = False

    def unpack(self, packed: Array) -> dict[str, Array]:
        """Return the inputs by name, sliced as packing.pack laid them out."""
        sections, _ = input_sections(self.bucket, self.to.config)
        return {
            name: packed[s.offset : s.offset + int(np.prod(s.shape))].reshape(s.shape)
            for name, s in sections.items()
        }

    def drawn_lens(self, sample: Array) -> Array:
        """Return the lengths of the contexts after which the sample step draws, 0 for padding.
        sample: its inputs, packed.
        """
        assert self.to.config.seq_buckets is not None
        shape = SampleShape(rows=self.to.config.seq_buckets[-1])
        lens = input_sections(shape, self.to.config)[0]["context_lens"]
        return sample[lens.offset : lens.offset + lens.shape[0]]

    def pack(self, outputs: dict[str, Array]) -> Array:
        sections, _ = output_sections(self.bucket, self.to.config)
        return jnp.concatenate([_cast(outputs[name], np.int32).reshape(-1) for name in sections])

    def drawn(self) -> dict[str, Array]:
        """Return zeros in place of the fields that every step draws."""
        sections, _ = output_sections(self.bucket, self.to.config)
        kinds = {n: jnp.float32 if n.endswith("logprobs") else jnp.int32 for n in sections}
        return {n: jnp.zeros(s.shape, kinds[n]) for n, s in sections.items() if n != "num_drawn"}

    def context(
        self, params: StepParams, num_rows: Array | None, slot_T: Array | None = None
    ) -> StepContext:
        """Return what layers take beside x. num_rows: rows of products that are real, None where
        all are. slot_T: the slot of each token's adapter, where the step has adapters.
        """
        tables = None if params.adapters is None else own_tables(params.adapters)
        return self.to.context(num_rows, slot_T, tables)

    def skips_to_last(self, most: int) -> bool:
        """Return whether what follows the last keys and values leaves out tokens after which
        nothing is drawn. most: tokens after which something can be. Scores of prompts and heads
        take hidden states of all tokens.
        """
        bucket = self.bucket
        assert isinstance(bucket, PrefillShape)
        takes_all = bucket.scores or bucket.keeps_states or self.to.has_head
        return not takes_all and most < bucket.tokens

    @property
    def own(self) -> slice:
        """The slice of all pools, and of all block tables, that belongs to this model."""
        count = len(self.to.own_pools)
        return slice(-count, None) if self.is_draft else slice(count)

    def advance(
        self,
        params: StepParams,
        kv: tuple[Any, ...],
        packed: Packed,
        slot_T: Array | None = None,
        last: "_Places | None" = None,
    ) -> "_Advanced":
        """Run the model on these tokens. slot_T: as in context. last: the places of those whose
        hidden states are wanted; None is all of them.
        """
        assert params.model is not None
        view, _, positions_T = self.view(kv, packed)
        context = self.context(params, packed.num_rows, slot_T)
        wanted = None if last is None else self._last(params, last, slot_T)
        positions_T, embedded = jnp.maximum(positions_T, 0), None
        if packed.ahead_T is not None:
            positions_T += packed.ahead_T
        if packed.embedded_T is not None:
            assert params.embeddings is not None
            embedded = Embedded(row=packed.embedded_T, rows=params.embeddings[0])
        x_TE, written, states = params.model.tapped(
            packed.tokens_T,
            positions_T,
            view,
            self.to.taps,
            context,
            wanted,
            embedded=embedded,
            axes=packed.axes_XT,
        )
        assert isinstance(written, PagedKV)
        pools, replayed = written.pools, written.replayed
        if isinstance(params.draft, Head):
            head = HeadSteps(self.to.draft, params.draft, params.model)
            states = states or [x_TE]
            pools += (head.follow(packed, states, kv[-1], is_decode=view.is_decode),)
        elif params.draft is not None:  # computes the same tokens
            assert self.to.draft is not None
            step = _Step(dataclasses.replace(self.bucket, loras=0), self.to.draft, is_draft=True)
            with jax.named_scope("draft"):
                followed = step.advance(StepParams(model=params.draft), kv, packed)
            pools, replayed = pools + followed.pools, replayed + followed.replayed
        if view.is_decode or not self.to.num_replayed:
            replayed = ()
        return _Advanced(context, x_TE, pools, replayed)

    def _last(self, params: StepParams, last: "_Places", slot_T: Array | None) -> Last:
        """Return the tokens at these places, as layers that keep nothing take them."""
        index_R, count = last
        slot_R = None if slot_T is None else jnp.take(slot_T, index_R, mode="clip")

        def view(kv: KVView) -> KVView:
            assert isinstance(kv, PagedKV)
            return kv.of_tokens(index_R, count)

        return Last(index_R, self.context(params, count, slot_R), view)

    def one_each(
        self, fields: dict[str, Array], last_S: Array, context_lens_S: Array
    ) -> tuple[Packed, Array | None]:
        """Return the step's inputs with one token a row, and the slots of their adapters."""
        starts_S1 = jnp.arange(last_S.shape[0] + 1, dtype=jnp.int32)
        last_row = _last_row(context_lens_S)
        tokens_S = jnp.maximum(last_S, 0)
        inputs = Packed(tokens_S, fields["block_tables"], context_lens_S, starts_S1, last_row)
        if self.to.model.has_axes and "offsets" in fields:
            inputs = inputs._replace(ahead_T=fields["offsets"])
        return inputs, fields.get("adapters")

    def logits(self, params: StepParams, context: StepContext, x: Array) -> Array:
        """Return the logits of final hidden states: this device's share of each row."""
        assert params.model is not None
        return self.to.vocabulary.masked(params.model.logits(x, context))

    def view(self, kv: tuple[Pool, ...], packed: Packed) -> tuple[PagedKV, Array, Array]:
        """Return the step's view of the model's own pools, the first or (of a draft model) last of
        all, and the row and position (-1: padding) of each token.
        """
        is_decode = self.bucket.phase != "prefill"
        if is_decode:
            row_T = jnp.arange(self.bucket.rows, dtype=jnp.int32)
            positions_T = packed.context_lens_S - 1
        else:
            row_T, positions_T = locate(
                packed.query_start_loc_S1, packed.context_lens_S, self.bucket.tokens
            )
        packed = packed._replace(block_tables_GSM=packed.block_tables_GSM[self.own])
        pools = self.to.own_pools
        view = view_of(
            pools,
            kv[self.own],
            packed,
            row_T,
            positions_T,
            is_decode=is_decode,
            num_replayed=0 if is_decode else self.to.num_replayed,
        )
        return view, row_T, positions_T


class _Places(NamedTuple):
    """Places among a step's tokens, one for each draw; samples of a prompt have the same.
    num_real: so many are no padding.
    """

    index_R: Array
    num_real: Array


class _Advanced(NamedTuple):
    """What the model made of a step's tokens.

    context: of the step. x_TE: their hidden states, or those of the wanted ones. pools: all of
    them, with the tokens' keys, values and states. replayed: see make_step.
    """

    context: StepContext
    x_TE: Array
    pools: tuple[Any, ...]
    replayed: tuple[Any, ...] = ()


class _GuessStep(_Step):
    """The step of a draft model that guesses. Its guesses may be wrong, so they change no state of
    the pools: row i goes on from a copy, block i of `copied`.
    """

    def unpack(self, packed: Array) -> dict[str, Array]:
        """Return the inputs, with the blocks of the copies in the tables of groups with states."""
        fields = super().unpack(packed)
        tables_GSM = fields["block_tables"]
        for group in self._groups_of_states:
            row_SM = jax.lax.broadcasted_iota(jnp.int32, tables_GSM.shape[1:], 0)
            tables_GSM = tables_GSM.at[group].set(row_SM)
        return fields | {"block_tables": tables_GSM}

    def copied(self, kv: tuple[Pool, ...], rows: RowState, packed: Array) -> tuple[Pool, ...]:
        """Return the model's own pools, with a pool of the rows' states in place of each pool of
        states.
        """
        fields, pools = super().unpack(packed), list(kv)
        last_S, context_lens_S = _next_inputs(fields, rows)
        inputs, _ = self.one_each(fields, last_S, context_lens_S)
        view, _, _ = self.view(kv, inputs)
        for at, spec in enumerate(self.to.own_pools):
            if spec.group.record.per == "block":
                layers = [view.slots(Place(at, i)).read() for i in range(spec.num_layers)]
                pools[at] = jax.tree.map(lambda *states: jnp.concatenate(states), *layers)
        return tuple(pools)

    @property
    def _groups_of_states(self) -> list[int]:
        """The groups of states among all tables, of which a draft model's are the last."""
        groups = [spec.group.record.per == "block" for spec in self.to.own_pools]
        return [i - len(groups) for i, is_state in enumerate(groups) if is_state]


class _HeadStep(_Step):
    """The step of a head, which guesses beside the model that it takes embeddings from."""

    def advance(
        self,
        params: StepParams,
        kv: tuple[Any, ...],
        packed: Packed,
        slot_T: Array | None = None,
        last: "_Places | None" = None,
    ) -> _Advanced:
        assert isinstance(params.draft, Head) and params.model is not None
        assert slot_T is None and last is None
        (pool,) = kv
        x_SE, pool = HeadSteps(self.to, params.draft, params.model).guess(packed, pool)
        return _Advanced(self.to.context(packed.num_rows), x_SE, (pool,))

    def logits(self, params: StepParams, context: StepContext, x: Array) -> Array:
        assert isinstance(params.draft, Head) and params.model is not None
        return self.to.vocabulary.masked(params.draft.logits(params.model, x, context))


def _make_prefill(step: _Step) -> Callable[..., Any]:
    def prefill(
        params: StepParams,
        kv: tuple[Pool, ...],
        rows: RowState,
        packed: Array,
        mask_TW: Array | None = None,
    ):
        fields, tokens = step.unpack(packed), step.bucket.tokens
        start_loc_S1, context_lens_S = fields["query_start_loc"], fields["context_lens"]
        row_T, _ = locate(start_loc_S1, context_lens_S, tokens)
        tokens_T = fields["tokens"]
        # A token that is still in flight is known to the device alone.
        device_row_T = jnp.take(fields["device_rows"], row_T, mode="clip")
        last_T = jnp.maximum(jnp.take(rows.last_token_R, device_row_T, mode="clip"), 0)
        tokens_T = jnp.where(tokens_T < 0, last_T, tokens_T)
        slot_T = None
        if "adapters" in fields:
            slot_T = jnp.take(fields["adapters"], row_T, mode="clip")
        inputs = Packed(
            tokens_T,
            fields["block_tables"],
            context_lens_S,
            start_loc_S1,
            start_loc_S1[-1],
            fields.get("guesses"),
            fields.get("routes"),
            fields.get("embedded"),
            fields.get("axes") if step.to.model.has_axes else None,
            ends_T=fields.get("ends") if step.to.model.sees_images else None,
        )
        last = _Places(fields["logits_indices"], _last_row(step.drawn_lens(fields["sample"])))
        skips = step.skips_to_last(last.index_R.shape[0])
        _, x_TE, kv, replayed = step.advance(params, kv, inputs, slot_T, last if skips else None)
        # What follows does not fuse into the last norm: where serving is deterministic, a token's
        # bits are those of a prefill that scores its prompt.
        x_TE, out = jax.lax.optimization_barrier(x_TE), None
        assert isinstance(step.bucket, PrefillShape)
        if step.bucket.scores:
            out = step.pack(_score_prompt(step, params, x_TE, fields, row_T, slot_T, mask_TW))
        hidden_RE = x_TE if skips else jnp.take(x_TE, last.index_R, axis=0, mode="clip")
        states_TE = x_TE if step.bucket.keeps_states else None
        return kv, hidden_RE, fields["sample"], out, replayed, states_TE

    return prefill


def _make_replay(step: _Step) -> Callable[..., Any]:
    def replay(
        params: StepParams, kv: tuple[Pool, ...], replayed: tuple[State, ...], packed: Array
    ) -> tuple[Pool, ...]:
        fields, pools, kept = step.unpack(packed), list(kv), iter(replayed)
        for at, (spec, to) in enumerate(step.to.pools_by_model):
            if spec.group.record.per != "block":
                continue
            tokens, pool, start_loc = next(kept), pools[at], fields["query_start_loc"]
            blocks = (fields["read_blocks"][at], fields["written_blocks"][at])
            for index, layer in enumerate(spec.group.layers):
                mixer: Any = to.model.layers[layer].mixer
                read_S, written_S = (spec.slots(pool, index, block_S) for block_S in blocks)
                rows = PackedRows(start_loc, fields["starts"], read_S, written_S)
                of_layer = {
                    name: jnp.take(x[index], fields["places"], axis=0, mode="clip")
                    for name, x in tokens.items()
                }
                with jax.named_scope("replay"):
                    pool = mixer.replay(of_layer, pool, rows, to.context(None))
            pools[at] = pool
        return tuple(pools)

    return replay


def _make_sample(step: _Step) -> Callable[..., Any]:
    num_rows = step.bucket.rows

    def sample(
        params: StepParams,
        hidden_RE: Array,
        rows: RowState,
        packed: Array,
        mask_SW: Array | None = None,
    ):
        fields = {name: field[:num_rows] for name, field in step.unpack(packed).items()}
        context_lens_S, at_S = fields["context_lens"], fields["device_rows"]
        context = step.context(params, _last_row(context_lens_S), fields.get("adapters"))
        logits_SV = step.logits(params, context, hidden_RE[:num_rows])
        open_after_S = fields["open_after"]
        drawn = _draw(step, logits_SV, fields, context_lens_S, rows, open_after_S, mask_SW)
        # A row that stopped meanwhile draws no more.
        last_S = jnp.take(rows.last_token_R, at_S, mode="clip")
        draws_S = (fields["follows"] == 0) | (last_S != STOPPED)
        rows = _keep(step, rows, jnp.where(draws_S, at_S, _none(step)), drawn, context_lens_S)
        outputs = {name: field[None] for name, field in drawn.outputs.items()}
        return rows, step.pack(outputs | {"num_drawn": draws_S.astype(jnp.int32)})

    return sample


def _make_forward(step: _Step) -> Callable[..., Any]:
    rows_S = step.bucket.rows
    assert step.to.config.seq_buckets is not None
    padding = step.to.config.seq_buckets[-1] - rows_S

    def decode(params: StepParams, kv: tuple[Pool, ...], rows: RowState, packed: Array):
        fields = step.unpack(packed)
        last_S, context_lens_S = _next_inputs(fields, rows)
        context_lens_S = jnp.where(last_S < 0, 0, context_lens_S)  # of a row that has stopped
        inputs, slot_S = step.one_each(fields, last_S, context_lens_S)
        _, x_SE, kv, _ = step.advance(params, kv, inputs, slot_S)
        hidden_RE = jnp.pad(jax.lax.optimization_barrier(x_SE), ((0, padding), (0, 0)))
        return kv, hidden_RE, fields["sample"], None, (), None

    return decode


def _make_decode(step: _Step) -> Callable[..., Any]:
    def decode(params: StepParams, state: DeviceState, packed: Array):
        fields = step.unpack(packed)
        at_S = fields["device_rows"]

        def body(carry: Any) -> Any:
            """Step i of the rows that have more than i steps; others are as if padding."""
            i, last_S, steps_S, state, outputs = carry
            runs_S = i < steps_S
            context_lens_S = jnp.where(runs_S, first_lens_S + i, 0)
            inputs, slot_S = step.one_each(fields, last_S, context_lens_S)
            context, x_SE, kv, _ = step.advance(params, state.kv, inputs, slot_S)
            open_after_S = fields["open_after"] - i
            logits_SV = step.logits(params, context, x_SE)
            drawn = _draw(step, logits_SV, fields, context_lens_S, state.rows, open_after_S)
            kept_S = jnp.where(runs_S, at_S, _none(step))
            rows = _keep(step, state.rows, kept_S, drawn, context_lens_S)
            last_S = jnp.where(runs_S, drawn.last_S, last_S)
            steps_S = jnp.where(runs_S & drawn.stops_S, i + 1, steps_S)
            outputs = {name: outputs[name].at[i].set(x) for name, x in drawn.outputs.items()}
            return i + 1, last_S, steps_S, DeviceState(kv=kv, rows=rows), outputs

        last_S, first_lens_S = _next_inputs(fields, state.rows)
        # None for those that stopped in the dispatch before.
        steps_S = jnp.where(last_S < 0, 0, fields["steps"])
        carry = (jnp.int32(0), last_S, steps_S, state, step.drawn())
        if not isinstance(step.bucket, DecodeShape | DraftShape) or step.bucket.steps == 1:
            carry = body(carry)
        elif step.to.choices.counts_steps:
            carry = jax.lax.fori_loop(0, step.bucket.steps, lambda _, carry: body(carry), carry)
        else:
            carry = jax.lax.while_loop(functools.partial(_runs, step), body, carry)
        _, _, steps_S, state, outputs = carry
        return state, step.pack(outputs | {"num_drawn": steps_S})

    return decode


def _runs(step: _Step, carry: tuple[Any, ...]) -> Array:
    """Return whether a row is left that has a step to come; of any replica, where they share
    experts and so compute together.
    """
    i, _, steps_S, *_ = carry
    runs = jnp.any(i < steps_S)
    return jax.lax.pmax(runs, step.to.data_axes) if step.to.exchanges else runs


def _make_draft(step: _Step) -> Callable[..., Any]:
    assert step.to.draft is not None
    count = len(step.to.own_pools)
    kind = _HeadStep if step.to.has_head else _GuessStep
    guess = kind(step.bucket, step.to.draft, is_draft=True)
    decode = _make_decode(guess)

    def draft(params: StepParams, kv: tuple[Pool, ...], rows: RowState, packed: Array):
        before, guessing = kv[count:], params
        if isinstance(guess, _GuessStep):
            assert isinstance(params.draft, Forward)
            guessing = StepParams(model=params.draft)
            before = guess.copied(before, rows, packed)
        # What it keeps of its rows is nobody's.
        state, out = decode(guessing, DeviceState(kv=before, rows=rows), packed)
        written = [
            unchanged if spec.group.record.per == "block" else after
            for spec, unchanged, after in zip(guess.to.pools, kv[count:], state.kv, strict=True)
        ]
        return (*kv[:count], *written), out

    return draft


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """One token a row, whether it is a stop id that stops it, and what the host is told."""

    token_S: Array
    stops_S: Array
    outputs: dict[str, Array]

    @property
    def last_S(self) -> Array:
        """What a row keeps: its token, or that it stopped, so that a dispatch that is already under
        way leaves it out.
        """
        return jnp.where(self.stops_S, STOPPED, self.token_S)


def _draw(
    step: _Step,
    logits_SV: Array,
    fields: dict[str, Array],
    context_lens_S: Array,
    rows: RowState,
    open_after_S: Array,
    mask_SW: Array | None = None,
) -> _Drawn:
    """Draw the token that comes right after each row's context. open_after_S > 0: stop ids neither
    stop nor occur. mask_SW: see sampler.sample.
    """
    columns = {c.name: _cast(fields["controls"][:, i], c.dtype) for i, c in enumerate(CONTROLS)}
    stop_ids_SX = fields["controls"][:, len(CONTROLS) :]
    key_S2 = jnp.stack([columns["key_hi"], columns["key_lo"]], axis=1)
    controls = named(Controls, columns, key_S2=key_S2, position_S=context_lens_S)
    full = None
    if step.bucket.is_full:
        full = named(
            FullControls,
            columns,
            bias_ids_SB=fields["bias_ids"],
            bias_SB=_cast(fields["bias"], np.float32),
            ban_ids_SX=jnp.where(open_after_S[:, None] > 0, stop_ids_SX, PAD_TOKEN),
            counts_SV=jnp.take(rows.counts_RV, fields["device_rows"], axis=0, mode="clip"),
        )
    config = step.to.config
    with jax.named_scope("sample"):
        sampled = sample(
            logits_SV,
            controls,
            full,
            mask_SW,
            max_logprobs=config.max_logprobs if full is not None else 0,
            max_sampling_mask=config.max_sampling_mask,
            vocabulary=step.to.vocabulary,
            filters=step.bucket.sampler != "plain",
            one_pass=step.to.choices.one_pass,
        )
    is_stop_S = jnp.any(stop_ids_SX == sampled.token_S[:, None], axis=1)
    return _Drawn(sampled.token_S, is_stop_S & (open_after_S <= 0), _outputs(sampled))


def _keep(
    step: _Step, rows: RowState, at_S: Array, drawn: _Drawn, context_lens_S: Array
) -> RowState:
    """Return the rows after their draws; where at_S is past the end, nothing changes."""
    counts_RV = rows.counts_RV
    if counts_RV is not None:
        column_S = step.to.vocabulary.columns(drawn.token_S, counts_RV)
        counts_RV = counts_RV.at[at_S, column_S].add(jnp.int32(2), mode="drop")
    return RowState(
        last_token_R=rows.last_token_R.at[at_S].set(drawn.last_S, mode="drop"),
        context_len_R=rows.context_len_R.at[at_S].set(context_lens_S + 1, mode="drop"),
        counts_RV=counts_RV,
    )


def _next_inputs(fields: dict[str, Array], rows: RowState) -> tuple[Array, Array]:
    """Return for each row the token that it goes on from (STOPPED where the row has ended), and the
    length of its context with that token. Only the device knows a token that is still in flight.
    """
    is_here_S = fields["tokens"] < 0
    take = functools.partial(jnp.take, indices=fields["device_rows"], mode="clip")
    last_S = jnp.where(is_here_S, take(rows.last_token_R), fields["tokens"])
    return last_S, jnp.where(is_here_S, take(rows.context_len_R), fields["context_lens"])


def _none(step: _Step) -> int:
    """Return the number past the last device row; writes there are dropped."""
    return step.to.config.num_rows


def _last_row(context_lens_S: Array) -> Array:
    """Return the number of rows up to the last that is not padding."""
    rows_S = jnp.arange(1, 1 + context_lens_S.shape[0])
    return jnp.max(jnp.where(context_lens_S > 0, rows_S, 0)).astype(jnp.int32)


def _outputs(sampled: Sampled) -> dict[str, Array]:
    outputs = {"tokens": sampled.token_S, "logprobs": sampled.logprob_S}
    if sampled.allowed_logprob_S is not None:
        outputs["allowed_logprobs"] = sampled.allowed_logprob_S
    if sampled.rank_S is None:
        return outputs
    assert sampled.top_ids_SK is not None and sampled.top_logprobs_SK is not None
    outputs |= {"top_ids": sampled.top_ids_SK, "top_logprobs": sampled.top_logprobs_SK}
    if sampled.kept_ids_SK is not None and sampled.kept_logprob_S is not None:
        outputs |= {"kept_ids": sampled.kept_ids_SK, "kept_logprobs": sampled.kept_logprob_S}
    return outputs | {"ranks": sampled.rank_S}


def _score_prompt(
    step: _Step,
    params: StepParams,
    x_TE: Array,
    fields: dict[str, Array],
    row_T: Array,
    slot_T: Array | None,
    mask_TW: Array | None,
) -> dict[str, Array]:
    """Return the scores after the tokens that `scored` names, in its order."""
    shape = step.bucket
    assert isinstance(shape, PrefillShape)

    def logits(x: tuple[Array, Array | None]) -> Array:
        x_tE, slot_t = x
        return step.logits(params, step.context(params, None, slot_t), x_tE)

    take = functools.partial(jnp.take, indices=fields["scored"], axis=0, mode="clip")
    row_T = take(row_T)
    temperature_S, mode_S = _cast(fields["scoring"][:, 0], np.float32), fields["scoring"][:, 1]
    scored = token_logprobs(
        logits,
        jax.tree.map(take, (x_TE, slot_T)),
        fields["targets"],
        jnp.take(temperature_S, row_T, mode="clip"),
        jnp.take(mode_S, row_T, mode="clip"),
        None if mask_TW is None else take(mask_TW),
        candidates_TX=fields["candidates"],
        count=fields["num_scored"][0] if shape.skips else None,
        max_logprobs=shape.top or step.to.config.max_logprobs,
        with_entropy=shape.entropy,
        vocabulary=step.to.vocabulary,
        one_pass=step.to.choices.one_pass,
    )
    return {
        "prompt_logprobs": scored.logprob_T,
        "prompt_ranks": scored.rank_T,
        "prompt_top_ids": scored.top_ids_TK,
        "prompt_top_logprobs": scored.top_logprobs_TK,
        "prompt_candidate_logprobs": scored.candidate_logprobs_TX,
        "prompt_entropies": scored.entropy_T,
    }


def _cast(x: Array, dtype: Any) -> Array:
    """Return the same 32 bits under another type."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
