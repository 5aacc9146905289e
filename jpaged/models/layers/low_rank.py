"""Low-rank adapters of a product (arXiv:2106.09685), several at once: each row takes its own."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

Product = Callable[[Array, Array, DTypeLike], Array]  # x [T, E], weight [N, E], dtype -> [T, N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterRows:
    """The adapters of a step. tables: a nested dict of the canonical tree's names, at each weight
    that has adapters {"a": [parts, slots, rank, *inputs], "b": ([*outputs, slots, rank] of each
    part, ...)}. slot_T: int32, the slot of each token's adapter, `slots` where it has none.
    """

    tables: Any
    slot_T: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """The adapters of one weight: two products over all slots, those of other rows masked between
    them, so that their cost depends on the number of slots and on nothing else.

    a, b, slot_T: of AdapterRows. joined: the axis of the outputs that parts follow each other on.
    """

    a: Array
    b: tuple[Array, ...]
    slot_T: Array
    joined: int = dataclasses.field(metadata={"static": True})

    def __call__(self, x_TE: Array, product: Product) -> Array:
        """What the adapters add to the product of x, f32 [T, *outputs]."""
        tokens, (parts, slots, rank, *inputs) = x_TE.shape[0], self.a.shape
        a = self.a.reshape(parts * slots * rank, math.prod(inputs))
        h = product(x_TE, a, x_TE.dtype).reshape(tokens, parts, slots, rank)
        return self._outputs(h, product)

    def of_index(self, at_T: Array, product: Product) -> Array:
        """So of one input that is 1, the others 0: what the embedding of a token gains. Zeros past
        either end, where another device has the input.
        """
        is_here = (at_T >= 0) & (at_T < self.a.shape[-1])
        h = jnp.take(self.a, at_T, axis=-1, mode="clip")  # [parts, slots, rank, T]
        h = jnp.where(is_here, h, jnp.zeros_like(h))
        return self._outputs(jnp.moveaxis(h, -1, 0), product)

    def _outputs(self, h: Array, product: Product) -> Array:
        """From [T, parts, slots, rank] on."""
        tokens, parts, slots, rank = h.shape
        is_own = self.slot_T[:, None] == jnp.arange(slots, dtype=jnp.int32)[None, :]
        h = jnp.where(is_own[:, None, :, None], h, jnp.zeros_like(h))
        h = h.reshape(tokens, parts, slots * rank)
        added = [
            product(h[:, i], b.reshape(-1, slots * rank), jnp.float32).reshape(
                tokens, *b.shape[:-2]
            )
            for i, b in enumerate(self.b)
        ]
        return jnp.concatenate(added, axis=1 + self.joined)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLowRank:
    """The adapters of one weight of all experts of a layer.

    a: [parts, slots, rank, X, inputs]. b: of each part [X, *outputs, slots, rank]. slot_T, joined:
    as LowRank has them, joined among the axes with X.
    """

    a: Array
    b: tuple[Array, ...]
    slot_T: Array
    joined: int = dataclasses.field(metadata={"static": True})

    def of_expert(self, expert: Any, rows: Array) -> LowRank:
        """Those of one expert, for the tokens at `rows`."""
        return LowRank(
            a=jax.lax.dynamic_index_in_dim(self.a, expert, 3, keepdims=False),
            b=tuple(b[expert] for b in self.b),
            slot_T=jnp.take(self.slot_T, rows, mode="clip"),
            joined=max(self.joined - 1, 0),
        )
