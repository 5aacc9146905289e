"""PagedKV: one step's view of the KV cache, which the layers write to and attend through."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.kv_view import Place
from jpaged.models.layers.heads import Heads, LatentHeads
from jpaged.models.layers.indexer import IndexQueries
from jpaged.models.record import CHOSEN_EXPERTS, INDEX_KEY
from jpaged.models.rows import Rows, Slots, State
from jpaged.runtime.kv_cache import Pool, PoolSpec, num_rows
from kernels_pallas import sparse_attention
from kernels_pallas.paged_attention.interface import AttentionOptions
from kernels_pallas.paged_attention.kv_write import write_kv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupView:
    """What all layers of one group share in a step.

    block_table_SM int32, padded with 0. slot_mapping_T: block * P + slot of each token, past the
    pool's end for padding. prepared: what the kernel's `prepare` returned, None for a decode.
    """

    block_table_SM: Array
    slot_mapping_T: Array
    prepared: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StateView:
    """What all layers of a group with states share in a step.

    read_S: the block whose state each row begins with; -1 for a row that begins a sequence.
    written_S: the block that keeps its state after the step; -1 for padding, and for rows with
    guesses. replayed: what the first tokens of the step leave for a replay, arrays [L, tokens,
    *field.shape]; none where no step guesses.
    """

    rows: Rows
    read_S: Array
    written_S: Array
    replayed: State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKV:
    """A KVView over block tables; threaded through the layers and returned with the pools updated
    in place.

    context_lens_S: tokens of each row once this step is written. query_start_loc_S1: int32 [S+1],
    where each row's tokens begin in the packed T. is_decode: one token a row. located_T: the row
    and the position of each token, -1 for padding; None where no layer chooses. chosen_TC: the
    positions that each token chose last, see kernels_pallas.sparse_attention; None before that.
    routes_TX: see Packed.
    """

    pools: tuple[Pool, ...]
    groups: tuple[GroupView | StateView, ...]
    context_lens_S: Array
    query_start_loc_S1: Array
    located_T: tuple[Array, Array] | None = None
    chosen_TC: Array | None = None
    routes_TX: Array | None = None
    specs: tuple[PoolSpec, ...] = dataclasses.field(metadata={"static": True})
    is_decode: bool = dataclasses.field(metadata={"static": True})

    def write(self, place: Place, qkv: Any, heads: Heads | LatentHeads) -> tuple[Array, Self]:
        """See models.kv_view.KVView."""
        at, (spec, view) = place.group, self._keys_at(place)
        assert spec.kernel is not None
        q, written = spec.kernel.write(
            qkv,
            heads,
            spec.operand(self.pools[at]),
            place.index,
            view.slot_mapping_T,
            num_layers=spec.num_layers,
        )
        return q, self._with_pool(at, spec.written(self.pools[at], written))

    def attend(self, place: Place, q: Array, options: AttentionOptions, sinks: Any = None) -> Array:
        """See models.kv_view.KVView."""
        spec, view = self._keys_at(place)
        assert spec.kernel is not None
        is_prepared = options.causal  # for the group's window; layers that are not causal share one
        assert not is_prepared or options.window == spec.group.window
        assert options.sinks == (sinks is not None)
        kernel, pool = spec.kernel, spec.operand(self.pools[place.group])
        rows = (view.block_table_SM, self.context_lens_S)
        call: Any = {"options": kernel.options(options, spec.num_layers), "sinks_H": sinks}
        with jax.named_scope("paged_attention"):
            if self.is_decode:
                return kernel.module.decode(q, pool, place.index, *rows, **call)
            rows = (*rows, self.query_start_loc_S1, view.prepared if is_prepared else None)
            return kernel.module.prefill(q, pool, place.index, *rows, **call)

    def choose(self, place: Place, queries: IndexQueries) -> Self:
        """See models.kv_view.KVView. Where no context is longer than a choice, all is chosen, and
        index keys are not kept.
        """
        spec, view = self._keys_at(place)
        if self._chooses_all(spec, queries.count):
            return self
        assert self.located_T is not None
        pool, layers = self.pools[place.group], {"num_layers": spec.num_layers}
        with jax.named_scope("choose"):
            keys = write_kv(
                pool[INDEX_KEY], place.index, queries.key, view.slot_mapping_T, **layers
            )
            chosen_TC = sparse_attention.choose(
                queries.q,
                queries.weights,
                keys,
                place.index,
                view.block_table_SM,
                *self.located_T,
                count=queries.count,
                **layers,
            )
        kept = self._with_pool(place.group, pool | {INDEX_KEY: keys})
        return dataclasses.replace(kept, chosen_TC=chosen_TC)

    def attend_chosen(self, place: Place, q: Array, options: AttentionOptions, count: int) -> Array:
        """See models.kv_view.KVView."""
        spec, view = self._keys_at(place)
        if self._chooses_all(spec, count):
            return self.attend(place, q, options)
        assert spec.kernel is not None and self.located_T is not None
        assert self.chosen_TC is not None, "a layer before has chosen"
        with jax.named_scope("sparse_attention"):
            return sparse_attention.attend(
                q,
                spec.operand(self.pools[place.group]),
                place.index,
                view.block_table_SM,
                *self.located_T,
                self.chosen_TC,
                options=spec.kernel.options(options, spec.num_layers),
            )

    @staticmethod
    def _chooses_all(spec: PoolSpec, count: int) -> bool:
        """Whether the longest context that an engine takes is no longer than a choice."""
        assert spec.kernel is not None
        return spec.kernel.shapes.blocks_per_row * spec.block_size <= count

    def rows(self, place: Place) -> Rows:
        """See models.kv_view.KVView."""
        return self._states_at(place).rows

    def state(self, place: Place) -> State:
        """See models.kv_view.KVView."""
        with jax.named_scope("read_state"):
            return self.slots(place).read()

    def with_state(self, place: Place, new: State) -> Self:
        """See models.kv_view.KVView."""
        with jax.named_scope("write_state"):
            return self._with_pool(place.group, self.slots(place).written(new))

    def slots(self, place: Place) -> Slots:
        """See models.kv_view.KVView."""
        view, pool = self._states_at(place), self.pools[place.group]
        blocks, spec = (view.read_S, view.written_S), self.specs[place.group]
        read_S, written_S = (spec.slots(pool, place.index, block_S) for block_S in blocks)
        return Slots(pool=pool, read_S=read_S, written_S=written_S)

    def with_slots(self, place: Place, pool: State) -> Self:
        """See models.kv_view.KVView."""
        return self._with_pool(place.group, pool)

    def with_replayed(self, place: Place, tokens: State) -> Self:
        """See models.kv_view.KVView."""
        view = self._states_at(place)
        if not view.replayed:
            return self
        kept: State = {}
        for name, whole in view.replayed.items():
            part = tokens[name][: whole.shape[1]].astype(whole.dtype)
            kept[name] = jax.lax.dynamic_update_index_in_dim(whole, part, place.index, 0)
        view = dataclasses.replace(view, replayed=kept)
        groups = (*self.groups[: place.group], view, *self.groups[place.group + 1 :])
        return dataclasses.replace(self, groups=groups)

    def forced_experts(self, place: Place) -> Array | None:
        """See models.kv_view.KVView."""
        if self.routes_TX is None:
            return None
        layers = self.specs[place.group].num_layers
        by_layer = self.routes_TX.reshape(self.routes_TX.shape[0], layers, -1)
        return jax.lax.dynamic_index_in_dim(by_layer, place.index, 1, keepdims=False)

    def with_experts(self, place: Place, chosen: Array) -> Self:
        """See models.kv_view.KVView."""
        spec, view = self._keys_at(place)
        pool, layers = self.pools[place.group], {"num_layers": spec.num_layers}
        kept, slots_T = pool[CHOSEN_EXPERTS], view.slot_mapping_T
        kept = write_kv(kept, place.index, chosen.astype(kept.dtype), slots_T, **layers)
        return self._with_pool(place.group, pool | {CHOSEN_EXPERTS: kept})

    def of_tokens(self, index_R: Array, count: Array) -> Self:
        """Return the view in which each of these tokens of the step is a row of its own, as of a
        decode, for layers that keep nothing and read what was written.

        index_R: int32, places among the packed tokens. count: how many are real, before the
        padding.
        """
        size = index_R.shape[0]
        row_R, position_R = located(self.query_start_loc_S1, self.context_lens_S, index_R)
        is_real_R = jnp.arange(size, dtype=jnp.int32) < count
        groups: list[GroupView | StateView] = []
        for group in self.groups:
            if isinstance(group, GroupView):
                table_RM = jnp.take(group.block_table_SM, row_R, axis=0, mode="clip")
                group = dataclasses.replace(group, block_table_SM=table_RM, prepared=None)
            groups.append(group)
        return dataclasses.replace(
            self,
            groups=tuple(groups),
            context_lens_S=jnp.where(is_real_R, position_R + 1, 0),
            located_T=None,
            chosen_TC=None,
            routes_TX=None,
            query_start_loc_S1=jnp.arange(size + 1, dtype=jnp.int32),
            is_decode=True,
        )

    @property
    def replayed(self) -> tuple[State, ...]:
        """What each group with states keeps for a replay."""
        return tuple(view.replayed for view in self.groups if isinstance(view, StateView))

    def _with_pool(self, at: int, pool: Pool) -> Self:
        pools = (*self.pools[:at], pool, *self.pools[at + 1 :])
        return dataclasses.replace(self, pools=pools)

    def _keys_at(self, place: Place) -> tuple[PoolSpec, GroupView]:
        view = self.groups[place.group]
        assert isinstance(view, GroupView), "this group keeps states"
        return self.specs[place.group], view

    def _states_at(self, place: Place) -> StateView:
        view = self.groups[place.group]
        assert isinstance(view, StateView), "this group keeps keys and values"
        return view


class Packed(NamedTuple):
    """The tokens of a step, those of a row together: tables and lengths as PagedKV has them.
    num_rows: int32 scalar, tokens that are real, before the padding. guesses_S: rows that have
    guesses among their tokens; None where none has. routes_TX: int32 [T, L * A], the experts that
    tokens take, -1 where their routers choose; None where all do.
    """

    tokens_T: Array
    block_tables_GSM: Array
    context_lens_S: Array
    query_start_loc_S1: Array
    num_rows: Array
    guesses_S: Array | None = None
    routes_TX: Array | None = None


def view_of(
    specs: tuple[PoolSpec, ...],
    pools: tuple[Pool, ...],
    packed: Packed,
    row_T: Array,
    positions_T: Array,
    *,
    is_decode: bool,
    num_replayed: int = 0,
) -> PagedKV:
    """Return the view of a step over packed tokens at these rows and positions (-1: padding).
    num_replayed: tokens at most for which states that rows with guesses leave are made later.
    """
    starts_and_lens = (packed.query_start_loc_S1, packed.context_lens_S)
    kept = (field.name for spec in specs for field in spec.group.record.fields)
    has_index_keys = INDEX_KEY in kept
    rows: Rows | None = None
    groups: list[GroupView | StateView] = []
    for spec, pool, table_SM in zip(specs, pools, packed.block_tables_GSM, strict=True):
        if spec.group.record.per == "block":
            rows = rows or rows_of(*starts_and_lens, row_T, is_decode=is_decode)
            groups.append(_state_view(rows, packed, table_SM, spec, num_replayed))
            continue
        prepared = None
        if not is_decode and spec.kernel is not None:
            prepared = spec.kernel.module.prepare(
                *starts_and_lens,
                num_tokens=row_T.shape[0],
                shapes=spec.kernel.shapes,
                window=spec.group.window,
            )
        slots_T = slot_mapping(row_T, positions_T, table_SM, spec.block_size, num_rows(pool))
        group = GroupView(block_table_SM=table_SM, slot_mapping_T=slots_T, prepared=prepared)
        groups.append(group)
    return PagedKV(
        pools=pools,
        groups=tuple(groups),
        context_lens_S=packed.context_lens_S,
        query_start_loc_S1=packed.query_start_loc_S1,
        located_T=(row_T, positions_T) if has_index_keys else None,
        routes_TX=packed.routes_TX,
        specs=specs,
        is_decode=is_decode,
    )


def rows_of(start_loc_S1: Array, context_lens_S: Array, row_T: Array, *, is_decode: bool) -> Rows:
    """Return the rows of a step's packed tokens."""
    lens_S = start_loc_S1[1:] - start_loc_S1[:-1]
    return Rows(
        start_loc_S1=start_loc_S1,
        first_S=jnp.maximum(context_lens_S - lens_S, 0),
        row_T=row_T,
        length=1 if is_decode else None,
    )


def _state_view(
    rows: Rows, packed: Packed, table_SM: Array, spec: PoolSpec, num_replayed: int
) -> StateView:
    """Return the blocks that a step's states are read from and written to: see engine.cache.kinds.
    Rows with guesses write none, and leave what a replay takes.
    """
    context_lens_S, size = packed.context_lens_S, spec.block_size

    def block_of(position_S: Array) -> Array:
        entry_S = jnp.maximum(position_S, 0) // size
        return jnp.take_along_axis(table_SM, entry_S[:, None], axis=1, mode="clip")[:, 0]

    is_written_S = (context_lens_S > 0) & (rows.lens_S > 0)
    if packed.guesses_S is not None:
        is_written_S &= packed.guesses_S == 0
    count, replayed = min(num_replayed, rows.num_tokens), {}
    if count:
        forms = spec.replayed(count, shards=spec.shards)
        replayed = {name: jnp.zeros(x.shape, x.dtype) for name, x in forms.items()}
    return StateView(
        rows=rows,
        replayed=replayed,
        read_S=jnp.where(rows.first_S > 0, block_of(rows.first_S - 1), -1),
        written_S=jnp.where(is_written_S, block_of(context_lens_S - 1), -1),
    )


def locate(start_loc_S1: Array, context_lens_S: Array, num_tokens: int) -> tuple[Array, Array]:
    """Return the row and position of each packed token; row S and position -1 for padding."""
    return located(start_loc_S1, context_lens_S, jnp.arange(num_tokens, dtype=jnp.int32))


def located(start_loc_S1: Array, context_lens_S: Array, index_R: Array) -> tuple[Array, Array]:
    """Return the same of the packed tokens at these places."""
    ends_S = start_loc_S1[1:]
    row_R = jnp.sum(ends_S[None, :] <= index_R[:, None], axis=1, dtype=jnp.int32)
    offset_S = context_lens_S - ends_S  # the row's last token ends both its chunk and its context
    positions_R = index_R + jnp.take(offset_S, row_R, mode="clip")
    return row_R, jnp.where(row_R < ends_S.shape[0], positions_R, -1)


def slot_mapping(
    row_T: Array, positions_T: Array, block_table_SM: Array, block_size: int, rows: int
) -> Array:
    """Return where each token's KV goes, as block * P + slot; padding goes past the end of the
    pool. rows: of the pool.
    """
    flat = row_T * block_table_SM.shape[1] + positions_T // block_size
    block_T = jnp.take(block_table_SM.reshape(-1), flat, mode="clip")
    slots_T = block_T * block_size + positions_T % block_size
    return jnp.where(positions_T >= 0, slots_T, rows * block_size)
