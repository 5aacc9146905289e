"""Embedded: embeddings that stand in place of those of some tokens, as of an image."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedded:
    """row: int32 [..., T], for each token of a step the row of `rows` that takes the place of its
    embedding; -1 for a token that has its own. rows: [N, 1 + D, E], an embedding and what is added
    to it after each of the first D layers. Neither is scaled. ends: int32 [..., T], for each token
    of an image the position after its last token, else 0; None where nothing comes of it. In
    training alone: steps over a cache have it with their view.
    """

    row: Array
    rows: Array
    ends: Array | None = None

    @property
    def is_here(self) -> Array:
        """Whether each token's embedding is one of these, bool [..., T, 1]."""
        return (self.row >= 0)[..., None]

    def placed(self, x: Array) -> Array:
        """Return x [..., T, E], the embeddings of the tokens, with these in their places."""
        return jnp.where(self.is_here, self._taken(0).astype(x.dtype), x)

    def added(self, x: Array, layer: int) -> Array:
        """Return what leaves a layer, x [..., T, E], with what is added after it."""
        if layer + 1 >= self.rows.shape[1]:
            return x
        return jnp.where(self.is_here, x + self._taken(layer + 1).astype(x.dtype), x)

    def _taken(self, index: int) -> Array:
        return self.rows.at[jnp.maximum(self.row, 0), index].get(mode="clip")
