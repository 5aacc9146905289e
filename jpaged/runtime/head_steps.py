"""What the steps of an engine do of an EAGLE-3 head (models/eagle.py) and its pool.

Entry p of a row takes the hidden state of position p and the token after it. So a step that
computes tokens [a, b) keeps the hidden states of [a, b), each in the slot of its position, and
writes entries [a - 1, b - 1), for the first of which the pool has the hidden state: of an earlier
step, or of whoever wrote a block that was hit. What a prompt's last position, a hit, a fork, a
preemption or a refused guess leaves out or stale is thus what the next step of the row writes. Two
rows that part at the very end of a block that they share keep that one entry by turns: guesses may
differ by it, tokens never do.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.eagle import TARGET_HIDDEN, Head
from jpaged.models.forward import Forward
from jpaged.models.layers.linear import StepContext
from jpaged.runtime.kv_cache import Pool, num_rows
from jpaged.runtime.paged_kv import Packed, PagedKV, locate, slot_mapping, view_of
from kernels_pallas.paged_attention.kv_write import write_kv


@dataclasses.dataclass(frozen=True)
class HeadSteps:
    """setting: the head's own StepSetting. target: the model that the head guesses for."""

    setting: Any
    head: Head
    target: Forward

    def context(self, num_rows: Array) -> StepContext:
        """What the head's layer is given for so many rows."""
        return self.setting.context(num_rows)

    def follow(self, packed: Packed, states: list[Array], pool: Pool, *, is_decode: bool) -> Pool:
        """The pool once a step has computed these tokens, whose hidden states are given."""
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
        """What the layer gives of a token of each row, and the pool with it in the place of the
        hidden state of that token: a guess after it goes on from there.
        """
        before = _shifted(packed)
        hidden_SE = self._hidden_at(pool, packed, before.context_lens_S - 1)
        x_SE, pool = self._entries(before, hidden_SE, pool, is_decode=True)
        return x_SE, self._with_hidden(pool, packed, x_SE, is_decode=True)

    def _entries(
        self, packed: Packed, hidden_TE: Array, pool: Pool, *, is_decode: bool
    ) -> tuple[Array, Pool]:
        """What the layer gives of entries, and the pool with their keys and values."""
        row_T, positions_T = _places(packed, is_decode=is_decode)
        at = (packed, row_T, positions_T)
        view = view_of(self.setting.pools, (pool,), *at, is_decode=is_decode)
        (group,) = view.groups
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
        """The pool with a hidden state for each token."""
        row_T, positions_T = _places(packed, is_decode=is_decode)
        at = (packed.block_tables_GSM[-1], self.setting.config.block_size, num_rows(pool))
        slots_T = slot_mapping(row_T, positions_T, *at)
        return pool | {TARGET_HIDDEN: write_kv(pool[TARGET_HIDDEN], 0, hidden_TE, slots_T)}

    def _hidden_at(self, pool: Pool, packed: Packed, position_S: Array) -> Array:
        """The hidden state of one position of each row; anything where there is no such."""
        rows_S = jnp.arange(position_S.shape[0], dtype=jnp.int32)
        at = (packed.block_tables_GSM[-1], self.setting.config.block_size, num_rows(pool))
        slots_S = slot_mapping(rows_S, jnp.maximum(position_S, 0), *at)
        hidden = pool[TARGET_HIDDEN]
        flat = hidden.reshape(-1, hidden.shape[-1])
        return jnp.take(flat, slots_S, axis=0, mode="clip")


def _places(packed: Packed, *, is_decode: bool) -> tuple[Array, Array]:
    """Row and position of each token."""
    if is_decode:
        return jnp.arange(packed.tokens_T.shape[0], dtype=jnp.int32), packed.context_lens_S - 1
    where = (packed.query_start_loc_S1, packed.context_lens_S)
    return locate(*where, packed.tokens_T.shape[0])


def _shifted(packed: Packed) -> Packed:
    """The head's tables, and contexts that end before the row's last token."""
    own = packed.block_tables_GSM[-1:]
    lens_S = jnp.maximum(packed.context_lens_S - 1, 0)
    return packed._replace(block_tables_GSM=own, context_lens_S=lens_S)


def _without_firsts(packed: Packed, lens_S: Array) -> tuple[Packed, Array, Array]:
    """The tokens that have one before them, of as many as there are in the rows, packed anew; the
    place of each among all, and its row.
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
    """Slots of which none comes twice: the first entry of a row may lie in a block that it shares
    with another of the step. It is dropped then.
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
