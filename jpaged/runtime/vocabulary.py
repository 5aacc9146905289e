"""Vocabulary: where its tokens lie, and how the devices that share it put together what each has.

The sampler and the logprobs are written once, for arrays [S, V] of which a device holds all
columns or an equal share of whole tiles. What passes between devices are maxima and sums of tiles,
candidates and single entries, never the logits.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from jpaged.models.params import MeshAxis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Whole (the defaults), or in shares over a mesh axis, inside shard_map.

    size: the tokens that there are; the last shares may be padded beyond them.
    """

    axis: MeshAxis | None = None
    size: int | None = None

    def tokens(self, a_SV: Array) -> int:
        """V, of an array that is this device's share of it."""
        return a_SV.shape[1] if self.size is None else self.size

    def first(self, a_SV: Array) -> Array | int:
        """Return the id of the first column."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * a_SV.shape[1]

    def ids(self, a_SV: Array) -> Array:
        """Return the id of each column, [S, V]."""
        ids_SV = lax.broadcasted_iota(jnp.int32, a_SV.shape, 1)
        return ids_SV if self.axis is None else ids_SV + self.first(a_SV)

    def columns(self, ids: Array, a_SV: Array) -> Array:
        """Return the columns of ids, past the end for those that are not here."""
        if self.axis is None:
            return ids
        at = ids - self.first(a_SV)
        return jnp.where((at >= 0) & (at < a_SV.shape[1]), at, a_SV.shape[1])

    def masked(self, logits_SV: Array) -> Array:
        """Logits, -inf where the padding is."""
        if self.axis is None:
            return logits_SV
        return jnp.where(self.ids(logits_SV) < self.tokens(logits_SV), logits_SV, -jnp.inf)

    def allowed(self, mask_SW: Array, a_SV: Array) -> Array:
        """bool [S, V]: the bits of a mask, int32, a bit a token of the whole vocabulary."""
        words = -(-a_SV.shape[1] // 32)
        if self.axis is not None:  # shares are of whole words
            first = lax.axis_index(self.axis) * words
            mask_SW = lax.dynamic_slice_in_dim(mask_SW, first, words, axis=1)
        bit_C = jnp.arange(32, dtype=jnp.int32)[None, None, :]
        bits_SWC = (mask_SW[:, :, None] >> bit_C) & 1
        return bits_SWC.reshape(mask_SW.shape[0], -1)[:, : a_SV.shape[1]] != 0

    def bits(self, mask_SW: Array, ids_SC: Array) -> Array:
        """bool [S, C]: the bits of these ids, the last word's for those past the end."""
        word_SC = jnp.minimum(ids_SC >> 5, mask_SW.shape[1] - 1)
        return (jnp.take_along_axis(mask_SW, word_SC, axis=1) >> (ids_SC & 31)) & 1 != 0

    def gather(self, x_SX: Array) -> Array:
        """Return what each device has of axis 1, one after the other."""
        return x_SX if self.axis is None else lax.all_gather(x_SX, self.axis, axis=1, tiled=True)

    def sum(self, x: Array) -> Array:
        """Added up over the devices."""
        return x if self.axis is None else lax.psum(x, self.axis)

    def take(self, a_SV: Array, ids_SC: Array) -> Array:
        """Return the entries of ids, all below V, whoever holds them."""
        if self.axis is None:
            return jnp.take_along_axis(a_SV, ids_SC, axis=1)
        at_SC = self.columns(ids_SC, a_SV)
        found_SC = jnp.take_along_axis(a_SV, jnp.minimum(at_SC, a_SV.shape[1] - 1), axis=1)
        return self.sum(jnp.where(at_SC < a_SV.shape[1], found_SC, jnp.zeros_like(found_SC)))

    def pick(self, a_SV: Array, id_S: Array) -> Array:
        """Return one entry of each row."""
        return self.take(a_SV, id_S[:, None])[:, 0]


WHOLE = Vocabulary()
