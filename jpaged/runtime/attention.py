"""What a layer does with the pool: write its keys and values, then attend through the block table."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.paged_attention.kv_write import write_kv
from kernels_pallas.paged_attention.xla import paged_attention, paged_attention_decode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCache:
    """The pool and one step's view of it; threaded through the layers and returned with the pool updated in place.

    pool: [L*N, P, 2*K, D]. block_table_SM: int32, padded with 0. context_lens_S: tokens of each row once this step is
    written. query_starts_S1: int32 [S+1], where each row's tokens begin in the packed T. slot_mapping_T: block * P +
    slot of each token, past the pool's end for padding. decode: one token a row. tensor_axis: the mesh axis that
    holds shares of the heads inside shard_map, or None.
    """

    pool: Array
    block_table_SM: Array
    context_lens_S: Array
    query_starts_S1: Array
    slot_mapping_T: Array
    num_layers: int = dataclasses.field(metadata={"static": True})
    decode: bool = dataclasses.field(metadata={"static": True})
    tensor_axis: str | None = dataclasses.field(metadata={"static": True})

    def write(self, layer: int, k_TKD: Array, v_TKD: Array) -> "PagedCache":
        """Put this step's keys and values into their slots of one layer."""
        kv = jnp.stack([k_TKD, v_TKD], axis=2).reshape(k_TKD.shape[0], -1, k_TKD.shape[-1]).astype(self.pool.dtype)
        with jax.named_scope("write_kv"):
            pool = write_kv(self.pool, layer, kv, self.slot_mapping_T, num_layers=self.num_layers)
        return dataclasses.replace(self, pool=pool)

    def attend(self, layer: int, q_THD: Array, *, scale: float, sliding_window: int | None) -> Array:
        """Attention of this step's queries over each row's whole context, in q's dtype."""
        args = (q_THD, self.pool, layer, self.block_table_SM, self.context_lens_S)
        options = {"num_layers": self.num_layers, "scale": scale, "sliding_window": sliding_window}
        with jax.named_scope("paged_attention"):
            if self.decode:
                return paged_attention_decode(*args, **options)
            return paged_attention(*args, self.query_starts_S1, **options)

    def sum_over_heads(self, x: Array) -> Array:
        """Sum the partial results of devices that hold shares of the heads (or of the FFN)."""
        return x if self.tensor_axis is None else jax.lax.psum(x, self.tensor_axis)
