"""PagedKV: one step's view of the KV cache, which the layers write to and attend through."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.kv_view import Place
from jpaged.models.layers.heads import Heads
from jpaged.runtime.kv_cache import Pool, PoolSpec, num_rows
from kernels_pallas.paged_attention.interface import AttentionOptions


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
class PagedKV:
    """A KVView over block tables; threaded through the layers and returned with the pools updated
    in place.

    context_lens_S: tokens of each row once this step is written. query_start_loc_S1: int32 [S+1],
    where each row's tokens begin in the packed T. is_decode: one token a row.
    """

    pools: tuple[Pool, ...]
    groups: tuple[GroupView, ...]
    context_lens_S: Array
    query_start_loc_S1: Array
    specs: tuple[PoolSpec, ...] = dataclasses.field(metadata={"static": True})
    is_decode: bool = dataclasses.field(metadata={"static": True})

    def write(self, place: Place, qkv: Array, heads: Heads) -> tuple[Array, Self]:
        """See models.kv_view.KVView."""
        at, spec, view = place.group, self.specs[place.group], self.groups[place.group]
        q, written = spec.kernel.write(
            qkv,
            heads,
            spec.operand(self.pools[at]),
            place.index,
            view.slot_mapping_T,
            num_layers=spec.num_layers,
        )
        pool = spec.written(self.pools[at], written)
        pools = (*self.pools[:at], pool, *self.pools[at + 1 :])
        return q, dataclasses.replace(self, pools=pools)

    def attend(self, place: Place, q: Array, options: AttentionOptions, sinks: Any = None) -> Array:
        """See models.kv_view.KVView."""
        spec, view = self.specs[place.group], self.groups[place.group]
        assert options.window == spec.group.window, "what was prepared is for the group's window"
        kernel, pool = spec.kernel, spec.operand(self.pools[place.group])
        rows = (view.block_table_SM, self.context_lens_S)
        call: Any = {"options": kernel.options(options, spec.num_layers), "sinks_H": sinks}
        with jax.named_scope("paged_attention"):
            if self.is_decode:
                o = kernel.module.decode(q, pool, place.index, *rows, **call)
            else:
                rows = (*rows, self.query_start_loc_S1, view.prepared)
                o = kernel.module.prefill(q, pool, place.index, *rows, **call)
        return o[..., : spec.group.value_dim]  # values of fewer dimensions than keys are padded


class Packed(NamedTuple):
    """The tokens of a step, those of a row together: tables and lengths as PagedKV has them.
    num_rows: int32 scalar, tokens that are real, before the padding.
    """

    tokens_T: Array
    block_tables_GSM: Array
    context_lens_S: Array
    query_start_loc_S1: Array
    num_rows: Array


def view_of(
    specs: tuple[PoolSpec, ...],
    pools: tuple[Pool, ...],
    packed: Packed,
    row_T: Array,
    positions_T: Array,
    *,
    is_decode: bool,
) -> PagedKV:
    """Return the view of a step over packed tokens at these rows and positions (-1: padding)."""
    groups = []
    rows = (packed.query_start_loc_S1, packed.context_lens_S)
    for spec, pool, table_SM in zip(specs, pools, packed.block_tables_GSM, strict=True):
        prepared = None
        if not is_decode:
            prepared = spec.kernel.module.prepare(
                *rows,
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
        specs=specs,
        is_decode=is_decode,
    )


def locate(start_loc_S1: Array, context_lens_S: Array, num_tokens: int) -> tuple[Array, Array]:
    """Return the row and position of each packed token; row S and position -1 for padding."""
    ends_S = start_loc_S1[1:]
    tokens_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.sum(ends_S[None, :] <= tokens_T[:, None], axis=1, dtype=jnp.int32)
    offset_S = context_lens_S - ends_S  # the row's last token ends both its chunk and its context
    positions_T = tokens_T + jnp.take(offset_S, row_T, mode="clip")
    return row_T, jnp.where(row_T < ends_S.shape[0], positions_T, -1)


def slot_mapping(
    row_T: Array, positions_T: Array, block_table_SM: Array, block_size: int, rows: int
) -> Array:
    """Where each token's KV goes, as block * P + slot; padding goes past the end of the pool. rows:
    of the pool.
    """
    flat = row_T * block_table_SM.shape[1] + positions_T // block_size
    block_T = jnp.take(block_table_SM.reshape(-1), flat, mode="clip")
    slots_T = block_T * block_size + positions_T % block_size
    return jnp.where(positions_T >= 0, slots_T, rows * block_size)
