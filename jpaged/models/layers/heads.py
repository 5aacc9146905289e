"""From a layer's first product to the queries, keys and values of its attention."""

import dataclasses

import jax
from jax import Array

from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.param_spec import MeshAxis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries and keys are normed, then rotated by their positions; None: they are not.

    mean_over: the mesh axis over which norms of all heads together are split. norms_after: they are
    normed once they are rotated. A backend may fuse all of this with the write to the cache; this
    is the reference.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rotary: Rotary | None
    mean_over: MeshAxis | None = dataclasses.field(default=None, metadata={"static": True})
    norms_after: bool = dataclasses.field(default=False, metadata={"static": True})

    def __call__(self, qkv: Array) -> tuple[Array, Array, Array]:
        """q [..., H, D], k and v [..., K, D] of the product [..., K, G+2, D]."""
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]  # [K, G, D], [K, D], [K, D]
        if not self.norms_after:
            q, k = self._normed(q, k)
        if self.rotary is not None:
            with jax.named_scope("rope"):
                q, k = self.rotary(q, k)
        if self.norms_after:
            q, k = self._normed(q, k)
        return q.reshape(*q.shape[:-3], -1, q.shape[-1]), k, v

    def _normed(self, q: Array, k: Array) -> tuple[Array, Array]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q, self.mean_over), self.k_norm(k, self.mean_over)
