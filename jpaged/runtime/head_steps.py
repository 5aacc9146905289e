"""HeadSteps: how the steps of an engine run a head (models/head_modules.py) over its pool.

Entry p of a row needs the hidden state of position p and the token after it. A step that computes
tokens [a, b) therefore stores the hidden states of positions [a, b) in the pool, and writes entries
[a - 1, b - 1). The hidden state of position a - 1 is in the pool already: an earlier step stored
it, or the row that wrote the block of a prefix hit. Devices that share the model each store a share
of a hidden state.

Entries that are missing or stale (after a prompt's last token, a prefix hit, a fork, a preemption
or a refused guess) are written by the row's next step. Two rows whose contexts part at the very end
of a block that they share overwrite that one entry in turn; guesses may change by it, tokens never
do.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.draft_head import TARGET_HIDDEN
from jpaged.models.forward import Forward
from jpaged.models.head_modules import Head
from jpaged.models.layers.linear import StepContext
from jpaged.runtime.kv_cache import Pool, num_rows
from jpaged.runtime.paged_kv import GroupView, Packed, PagedKV, locate, slot_mapping, view_of
from kernels_pallas.paged_attention.kv_write import write_kv


@dataclasses.dataclass(frozen=True)
class HeadSteps:
    """A head in the steps of one engine.

    setting: the StepSetting of the head. target: the model that the head guesses for.
    """

    setting: Any
    head: Head
    target: Forward

    def context(self, num_rows: Array) -> StepContext:
        """Return the context of the head's layer in a step with this many real rows."""
        return self.setting.context(num_rows)

    def follow(self, packed: Packed, states: list[Array], pool: Pool, *, is_decode: bool) -> Pool:
        """Return the pool after a step of the model has computed these tokens.

        states: the model's hidden states [T, E] of the tokens, from each of the layers that the
        head reads.
        """
        with jax.named_scope("head"):
            hidden_TE = self.head.joined(states, self.context(packed.num_rows))
            if is_decode:
                before = _shifted(packed)
                pool = self._with_hidden(pool, packed, hidden_TE, is_decode=True)
                hidden_SE = self._hidden_at(pool, packed, before.context_lens_S - 1)
                return self._entries(before, hidden_SE, pool, is_decode=True)[1]
            pool = self._with_hidden(pool, packed, hidden_TE, is_decode=False)
            lens_S = packed.query_start_loc_S1[1:] - packed.query_start_loc_S1[:-1]
            first_SE = self._hidden_at(pool, packed, packed.context_lens_S - lens_S - 1)
            before, from_T, row_T = _without_firsts(packed, lens_S)
            is_first_T = from_T == jnp.take(packed.query_start_loc_S1, row_T, mode="clip")
            hidden_TE = jnp.where(
                is_first_T[:, None],
                jnp.take(first_SE, row_T, axis=0, mode="clip"),
                jnp.take(hidden_TE, from_T - 1, axis=0, mode="clip"),
            )
            return self._entries(before, hidden_TE, pool, is_decode=False)[1]

    def guess(self, packed: Packed, pool: Pool) -> tuple[Array, Pool]:
        """Guess once for each row: return the outputs of the head's layer [S, E], and the pool in
        which they stand for the hidden states of these tokens, for the next guess to go on from.
        """
        before = _shifted(packed)
        hidden_SE = self._hidden_at(pool, packed, before.context_lens_S - 1)
        x_SE, pool = self._entries(before, hidden_SE, pool, is_decode=True)
        return x_SE, self._with_hidden(pool, packed, x_SE, is_decode=True)

    def _entries(
        self, packed: Packed, hidden_TE: Array, pool: Pool, *, is_decode: bool
    ) -> tuple[Array, Pool]:
        """Return the outputs of the head's layer for entries, and the pool with their keys and
        values.
        """
        row_T, positions_T = _places(packed, is_decode=is_decode)
        at = (packed, row_T, positions_T)
        view = view_of(self.setting.pools, (pool,), *at, is_decode=is_decode)
        (group,) = view.groups
        assert isinstance(group, GroupView)
        slots_T = _once(group.slot_mapping_T, packed.query_start_loc_S1)
        group = dataclasses.replace(group, slot_mapping_T=slots_T)
        view = dataclasses.replace(view, groups=(group,))
        x_TE, written = self.head(
            self.target,
            packed.tokens_T,
            jnp.maximum(positions_T, 0),
            hidden_TE,
            view,
            self.context(packed.num_rows),
        )
        assert isinstance(written, PagedKV)
        return x_TE, written.pools[0]

    def _with_hidden(
        self, pool: Pool, packed: Packed, hidden_TE: Array, *, is_decode: bool
    ) -> Pool:
        """Return the pool with a hidden state stored for each token."""
        row_T, positions_T = _places(packed, is_decode=is_decode)
        at = (packed.block_tables_GSM[-1], self.setting.config.block_size, num_rows(pool))
        slots_T = slot_mapping(row_T, positions_T, *at)
        hidden_TE = self.context(packed.num_rows).share(hidden_TE)
        return pool | {TARGET_HIDDEN: write_kv(pool[TARGET_HIDDEN], 0, hidden_TE, slots_T)}

    def _hidden_at(self, pool: Pool, packed: Packed, position_S: Array) -> Array:
        """Return the hidden state of one position of each row; arbitrary where a row has none."""
        rows_S = jnp.arange(position_S.shape[0], dtype=jnp.int32)
        at = (packed.block_tables_GSM[-1], self.setting.config.block_size, num_rows(pool))
        slots_S = slot_mapping(rows_S, jnp.maximum(position_S, 0), *at)
        hidden = pool[TARGET_HIDDEN]
        flat = hidden.reshape(-1, hidden.shape[-1])
        hidden_SE = jnp.take(flat, slots_S, axis=0, mode="clip")
        step = self.context(packed.num_rows)
        return step.gathered(hidden_SE, self.setting.model.hidden_size)


def _places(packed: Packed, *, is_decode: bool) -> tuple[Array, Array]:
    """Return the row and the position of each token."""
    if is_decode:
        return jnp.arange(packed.tokens_T.shape[0], dtype=jnp.int32), packed.context_lens_S - 1
    num_tokens = packed.tokens_T.shape[0]
    return locate(packed.query_start_loc_S1, packed.context_lens_S, num_tokens)


def _shifted(packed: Packed) -> Packed:
    """Return the step with the head's block tables, and contexts without the row's last token."""
    tables_GSM = packed.block_tables_GSM[-1:]
    lens_S = jnp.maximum(packed.context_lens_S - 1, 0)
    return packed._replace(block_tables_GSM=tables_GSM, context_lens_S=lens_S)


def _without_firsts(packed: Packed, lens_S: Array) -> tuple[Packed, Array, Array]:
    """Pack anew the tokens that have another before them in their row. Return them, the place of
    each among all tokens of the step, and its row.
    """
    num_tokens = packed.tokens_T.shape[0]
    begins_S = (lens_S > 0) & (packed.context_lens_S == lens_S)
    left_S = jnp.cumsum(begins_S.astype(jnp.int32))
    starts_S1 = packed.query_start_loc_S1 - jnp.pad(left_S, (1, 0))
    before = _shifted(packed)._replace(query_start_loc_S1=starts_S1, num_rows=starts_S1[-1])
    row_T, _ = locate(starts_S1, before.context_lens_S, num_tokens)
    from_T = jnp.arange(num_tokens, dtype=jnp.int32) + jnp.take(left_S, row_T, mode="clip")
    from_T = jnp.minimum(from_T, num_tokens - 1)
    tokens_T = jnp.take(packed.tokens_T, from_T)
    return before._replace(tokens_T=tokens_T), from_T, row_T


def _once(slots_T: Array, start_loc_S1: Array) -> Array:
    """Return the slots without repetition. The first entry of a row may lie in a block that it
    shares with another row of the step; it is dropped then.
    """
    starts_S, ends_S = start_loc_S1[:-1], start_loc_S1[1:]
    token_T, none = jnp.arange(slots_T.shape[0], dtype=jnp.int32), slots_T.shape[0]
    is_first_T = jnp.zeros(slots_T.shape, bool)
    firsts_S = jnp.where(starts_S < ends_S, starts_S, none)
    is_first_T = is_first_T.at[firsts_S].set(True, mode="drop")
    own_S = jnp.take(slots_T, starts_S, mode="clip")
    goes_before_ST = ~is_first_T[None] | (token_T[None] < starts_S[:, None])
    is_twice_S = jnp.any((slots_T[None] == own_S[:, None]) & goes_before_ST, axis=1)
    past = jnp.iinfo(slots_T.dtype).max
    return slots_T.at[jnp.where(is_twice_S, firsts_S, none)].set(past, mode="drop")
