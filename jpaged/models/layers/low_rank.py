"""Low-rank adapters of a product (arXiv:2106.09685), several at once: each row takes its own."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

Product = Callable[[Array, Array, Any], Array]  # x [T, E], weight [N, E], dtype -> [T, N]

PASSES = 3  # over the pair of a row that is copied: read, written, read again


class Adder(Protocol):
    """A module that adds what adapters give, reading those of a step's rows alone."""

    def adds(self, x: Array, a: Array, /) -> bool:
        """Return whether it can for x [T, E] and a [parts, slots, rank, E]."""
        ...

    def add_low_rank(
        self, y: Array, x: Array, a: Array, b: Any, slot_T: Array, count: Any, leads: int, /
    ) -> Array:
        """y [T, N], f32, with x a^T b of each row's slot added; see kernels_cpu.low_rank.add."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterTable:
    """The adapters of one weight, in slots.

    a: [parts, slots, rank, *inputs]. b: of each part [slots, rank, *outputs]; of experts' weights
    inputs and outputs begin with X. joined: the axis of the outputs along which parts are
    concatenated.
    """

    a: Array
    b: tuple[Array, ...]
    joined: int = dataclasses.field(metadata={"static": True})

    def rows(self, slot_T: Array) -> "LowRank":
        """Return what rows whose adapters are in these slots add."""
        return LowRank(a=self.a, b=self.b, slot_T=slot_T, joined=self.joined)

    def expert_rows(self, slot_T: Array) -> "ExpertLowRank":
        """Return the same for the weights of experts."""
        return ExpertLowRank(a=self.a, b=self.b, slot_T=slot_T, joined=self.joined)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """The adapters of one weight for the rows of a step.

    a, b, joined: of AdapterTable. slot_T: int32, the slot of each row's adapter, `slots` where it
    has none.
    """

    a: Array
    b: tuple[Array, ...]
    slot_T: Array
    joined: int = dataclasses.field(metadata={"static": True})

    def added(self, y: Array, x_TE: Array, product: Product, adder: Adder | None, n: Any) -> Array:
        """y, f32, of T rows, with what they add to the product of x. n: rows that are real.

        By an adder; or of few rows by a copy of each one's own pair; or by two products over all
        slots, other slots' part masked between them, whose cost depends on the number of slots.
        """
        a = self.a.reshape(*self.a.shape[:3], -1)
        if (kernel := self._by(adder, x_TE, a)) is not None:
            return kernel.add_low_rank(
                y, x_TE, a, self._flat_b(), self.slot_T, n, self._num_interleaved
            )
        return y + self(x_TE, product).reshape(y.shape)

    def added_of_index(self, y_TE: Array, at_T: Array, adder: Adder | None, n: Any) -> Array:
        """y, f32, with the embedding's adapter: for each token, column `at` of A times B is added.
        Nothing is added for ids outside this device's share.
        """
        slots, inputs = self.a.shape[1], self.a.shape[3]
        slot_T = jnp.where((at_T >= 0) & (at_T < inputs), self.slot_T, slots)
        h = self.a[:, jnp.minimum(slot_T, slots - 1), :, jnp.clip(at_T, 0, inputs - 1)]
        x, none = h.reshape(h.shape[0], -1), self.a[..., :0]  # h [T, parts, rank]
        if (kernel := self._by(adder, x, none)) is not None:
            return kernel.add_low_rank(
                y_TE, x, none, self._flat_b(), slot_T, n, self._num_interleaved
            )
        return y_TE + self._outputs(h[:, :, None], slot_T).reshape(y_TE.shape)

    def __call__(self, x_TE: Array, product: Product) -> Array:
        """Return what they add to the product of x, f32 [T, *outputs]."""
        tokens, (parts, slots, rank, *_) = x_TE.shape[0], self.a.shape
        if self._has_few(tokens):
            a_of_rows = self.a.reshape(parts, slots, rank, -1)[
                :, jnp.minimum(self.slot_T, slots - 1)
            ]
            h = jnp.einsum("te,ptre->tpr", x_TE, a_of_rows, preferred_element_type=jnp.float32)
            return self._outputs(h.astype(x_TE.dtype)[:, :, None], self.slot_T)
        h = product(x_TE, self.a.reshape(parts * slots * rank, -1), x_TE.dtype)
        return self._outputs(h.reshape(tokens, parts, slots, rank), self.slot_T)

    def of_queries(self, q_THN: Array) -> Array:
        """Return what they add to the queries of latents that a weight [H, N + Dv, L] makes of q by
        the first N outputs of each head, f32 [T, H, L].
        """
        count = q_THN.shape[-1]

        def add(a_RL: Array, b_RHX: Array) -> Array:
            h = self._sides("thn,rhn->thr", q_THN, b_RHX[..., :count])
            return jnp.einsum("thr,rl->thl", h, a_RL, preferred_element_type=jnp.float32)

        return self._by_slot(add, (*q_THN.shape[:-1], self.a.shape[-1]))

    def of_latents(self, o_THL: Array, first: int) -> Array:
        """Return what they add to the values that a weight [H, N + Dv, L] makes of latents of each
        head by its outputs from `first` (N) on, f32 [T, H, Dv].
        """

        def add(a_RL: Array, b_RHX: Array) -> Array:
            h = self._sides("thl,rl->thr", o_THL, a_RL)
            values = b_RHX[..., first:]
            return jnp.einsum("thr,rhv->thv", h, values, preferred_element_type=jnp.float32)

        return self._by_slot(add, (*o_THL.shape[:-1], self.b[0].shape[-1] - first))

    def _sides(self, form: str, x: Array, side: Array) -> Array:
        """Return the product with one side, in x's dtype as between the two of a Linear."""
        return jnp.einsum(form, x, side, preferred_element_type=jnp.float32).astype(x.dtype)

    def _by_slot(self, add: Callable[[Array, Array], Array], shape: tuple[int, ...]) -> Array:
        """Return the sum of what the slots of a weight of one part add to their own rows, f32 of
        this shape; slots of no row are not read.

        One slot after the other: with the heads between its sides, a product over all slots at once
        would need memory for each head and slot. No row's bits depend on its slot.
        """
        a, (b,) = self.a[0], self.b

        def of_slot(slot: Array, y: Array) -> Array:
            is_own = (self.slot_T == slot)[:, None, None]

            def added() -> Array:
                sides = (jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for x in (a, b))
                return y + jnp.where(is_own, add(*sides), jnp.float32(0))

            return jax.lax.cond(jnp.any(is_own), added, lambda: y)

        return jax.lax.fori_loop(0, a.shape[0], of_slot, jnp.zeros(shape, jnp.float32))

    def _has_few(self, tokens: int) -> bool:
        """Return whether to copy a pair for each of so many rows is less than to read all slots."""
        return PASSES * tokens <= self.a.shape[1]

    def _outputs(self, h: Array, slot_T: Array) -> Array:
        """From [T, parts, slots (or 1), rank] on."""
        tokens, parts, slots, rank = h.shape[0], *self.a.shape[:3]
        if self._has_few(tokens):
            is_of_row = (slot_T < slots)[:, None]
            slots_of_rows = jnp.minimum(slot_T, slots - 1)
            weights, dims = (
                [b.reshape(slots, rank, -1)[slots_of_rows] for b in self.b],
                "tr,trn->tn",
            )
        else:
            is_of_row = slot_T[:, None] == jnp.arange(slots, dtype=jnp.int32)[None, :]
            weights, dims = [b.reshape(slots * rank, -1) for b in self.b], "tr,rn->tn"
        h = jnp.where(is_of_row[:, None, :, None], h, jnp.zeros_like(h)).reshape(tokens, parts, -1)
        added = [
            jnp.einsum(dims, h[:, i], b, preferred_element_type=jnp.float32)
            for i, b in enumerate(weights)
        ]
        shaped = [y.reshape(tokens, *b.shape[2:]) for y, b in zip(added, self.b, strict=True)]
        return jnp.concatenate(shaped, axis=1 + self.joined)

    def _by(self, adder: Adder | None, x: Array, a: Array) -> Adder | None:
        """Return the adder, if it can."""
        return adder if adder is not None and adder.adds(x, a) else None

    @property
    def _num_interleaved(self) -> int:
        """How many pieces a part's outputs are interleaved in (q, k, v of each KV head: K)."""
        return math.prod(self.b[0].shape[2 : 2 + self.joined])

    def _flat_b(self) -> tuple[Array, ...]:
        return tuple(b.reshape(*b.shape[:2], -1) for b in self.b)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLowRank:
    """The adapters of one weight of all experts of a layer.

    a: [parts, slots, rank, X, inputs]. b: of each part [slots, rank, X, *outputs]. slot_T, joined:
    as LowRank has them, joined among the axes with X.
    """

    a: Array
    b: tuple[Array, ...]
    slot_T: Array
    joined: int = dataclasses.field(metadata={"static": True})

    def of_expert(self, expert: Any, rows: Array) -> LowRank:
        """Return those of one expert, for the tokens at `rows`."""

        def own(table: Array, axis: int) -> Array:
            return jax.lax.dynamic_index_in_dim(table, expert, axis, keepdims=False)

        return LowRank(
            a=own(self.a, 3),
            b=tuple(own(b, 2) for b in self.b),
            slot_T=jnp.take(self.slot_T, rows, mode="clip"),
            joined=max(self.joined - 1, 0),
        )
