"""From a layer's first product to the queries, keys and values of its attention."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.param_spec import MeshAxis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries and keys are normed, then rotated by their positions; values are normed and scaled;
    None: they are not.

    value_is_key: values are what keys are before their norm and rotation. mean_over: the mesh axis
    over which norms of all heads together are split. norms_after: queries and keys are normed once
    they are rotated. A backend may fuse all of this with the write to the cache; this is the
    reference.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rotary: Rotary | None
    v_norm: RMSNorm | None = None
    value_scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    value_is_key: bool = dataclasses.field(default=False, metadata={"static": True})
    mean_over: MeshAxis | None = dataclasses.field(default=None, metadata={"static": True})
    norms_after: bool = dataclasses.field(default=False, metadata={"static": True})

    def __call__(self, qkv: Array | tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Return q [..., H, D], k [..., K, D] and v [..., K, Dv] of the product [..., K, G+2, D];
        or of two products [..., K, G+1, D] and [..., K, Dv], the second of values; or where values
        are keys of one [..., K, G+1, D].
        """
        q, k, v = self._split(qkv)
        if not self.norms_after:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.rotary is not None:
            with jax.named_scope("rope"):
                q, k = self.rotary(q, k)
        if self.norms_after:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if self.value_scale != 1.0:
            v = (v.astype(jnp.float32) * self.value_scale).astype(v.dtype)
        return _flat(q), k, v

    def queries(self, q: Array) -> Array:
        """Return q [..., H, D] of a product [..., K, G, D] that has no keys and values."""
        if not self.norms_after:
            q = self._normed(q, self.q_norm)
        if self.rotary is not None:
            with jax.named_scope("rope"):
                q = self.rotary.queries(q)
        return _flat(self._normed(q, self.q_norm) if self.norms_after else q)

    def _normed(self, x: Array, norm: RMSNorm | None) -> Array:
        return x if norm is None else norm(x, self.mean_over)

    def _split(self, qkv: Array | tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Return the products of queries [..., K, G, D], keys [..., K, D] and values."""
        if isinstance(qkv, tuple):
            qk, v = qkv
            return qk[..., :-1, :], qk[..., -1, :], v
        if self.value_is_key:
            return qkv[..., :-1, :], qkv[..., -1, :], qkv[..., -1, :]
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]


def _flat(q: Array) -> Array:
    return q.reshape(*q.shape[:-3], -1, q.shape[-1])
