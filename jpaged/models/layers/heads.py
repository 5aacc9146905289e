"""From a layer's first product to the queries, keys and values of its attention."""

import dataclasses

import jax
from jax import Array

from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries and keys normed, then rotated by their positions; None where they are not.

    A view of a step may do so in one kernel with what it does next; this is what it is held to.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rotary: Rotary | None

    def __call__(self, qkv: Array) -> tuple[Array, Array, Array]:
        """q [..., H, D], k and v [..., K, D] of the product [..., K, G+2, D]."""
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]  # [K, G, D], [K, D], [K, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            with jax.named_scope("rope"):
                q, k = self.rotary(q, k)
        return q.reshape(*q.shape[:-3], -1, q.shape[-1]), k, v
