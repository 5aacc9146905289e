"""Grouped-query attention (arXiv:2305.13245)."""

import dataclasses
from typing import Any

import jax
from jax import Array

from jpaged.models.kv_view import KVView
from jpaged.models.layers.heads import Heads
from jpaged.models.layers.linear import Linear
from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.rope import Rotary
from kernels_pallas.paged_attention.interface import AttentionOptions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """qkv: the projections of each KV head and its G query heads, together: [..., K, G+2, D].

    group: index into kv_groups, where this layer's keys and values are kept. options: scale, cap
    and window of the scores. sinks [K, G]: one more score of each query head, which takes its share
    of the softmax and adds nothing; None for a plain softmax.
    """

    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: Linear
    sinks: Array | None
    group: int = dataclasses.field(metadata={"static": True})
    options: AttentionOptions = dataclasses.field(metadata={"static": True})

    def __call__(
        self, x: Array, rotary: Rotary | None, kv: KVView, index: Any
    ) -> tuple[Array, KVView]:
        """x [..., E]; rotary: None where positions are not rotated in. index: this layer's place
        among those of its group.
        """
        with jax.named_scope("qkv"):
            qkv = self.qkv(x)
        heads = Heads(q_norm=self.q_norm, k_norm=self.k_norm, rotary=rotary)
        sinks = None if self.sinks is None else self.sinks.reshape(-1)
        # q, k, v = heads(qkv), which the view does as it keeps the keys and values.
        o, kv = kv.attend(self.group, index, qkv, heads, self.options, sinks)
        with jax.named_scope("out"):
            return self.out(o.reshape(*x.shape[:-1], -1)), kv
