"""From a layer's first product to the queries, keys and values of its attention."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.arithmetic import rounded
from jpaged.models.layers.low_rank import LowRank
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
            v = rounded(v.astype(jnp.float32) * self.value_scale, v.dtype)
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """From the products of a layer of latent attention to queries of its latents (arXiv:2405.04434,
    absorbed): a query of a head and the key that the head would make of a latent have the product
    of the latent and of the query times `up`.

    norm: of latents. rotary: of the last part of queries and of the rotated key; None rotates
    nothing. up: [H, N, L], from a latent to the part of each head's key that is not rotated.
    adapters: what the rows' adapters have for the weight of which that is a part; None: nothing.
    """

    norm: RMSNorm
    rotary: Rotary | None
    up: Array
    adapters: LowRank | None = None

    def __call__(self, products: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Return queries [..., H, L + R], latents [..., 1, L] and rotated keys [..., 1, R] of the
        products of queries [..., H, N + R], and of latents and keys [..., L + R].
        """
        q, latent = products
        _, content, width = self.up.shape
        q, rotated_q = q[..., :content], q[..., content:]
        latent, rotated_k = self.norm(latent[..., :width]), latent[..., None, width:]
        if self.rotary is not None:
            with jax.named_scope("rope"):
                rotated_q, rotated_k = self.rotary(rotated_q, rotated_k)
                q = self.rotary.scaled(q)
        with jax.named_scope("absorb"):
            added = None if self.adapters is None else self.adapters.of_queries(q)
            q = _absorbed(q, self.up, added)
        return jnp.concatenate([q, rotated_q], axis=-1), latent[..., None, :], rotated_k


def by_head(form: str, x: Array, weight: Array, added: Array | None = None) -> Array:
    """Return an einsum of x and a weight [H, ...], accumulated in f32, in x's dtype. added: f32, to
    the product before it is rounded.
    """
    y = jnp.einsum(form, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return rounded(y if added is None else y + added, x.dtype)


def _absorbed(q: Array, up: Array, added: Array | None) -> Array:
    """Return queries [..., H, N] times up [H, N, L]; added: see by_head.

    XLA:CPU has no such product of 16 bits unless both sum over their last axis, and makes one of it
    again where nothing stands between.
    """

    def turned(q: Array, up: Array) -> Array:
        up = jax.lax.optimization_barrier(jnp.swapaxes(up, 1, 2))
        return by_head("...hn,hln->...hl", q, up, added)

    def plain(q: Array, up: Array) -> Array:
        return by_head("...hn,hnl->...hl", q, up, added)

    if q.dtype == jnp.float32:
        return plain(q, up)
    return jax.lax.platform_dependent(q, up, cpu=turned, default=plain)


def _flat(q: Array) -> Array:
    return q.reshape(*q.shape[:-3], -1, q.shape[-1])
