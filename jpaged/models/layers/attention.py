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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """qkv: the projections of each KV head and its G query heads, together: [..., K, G+2, D].

    group: of kv_groups, where this layer's keys and values are kept. scale: of the scores.
    soft_cap: c of c * tanh(score / c), or None. sinks: one more score of each head, [K, G], which
    takes its share of the softmax alone; or None.
    """

    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: Linear
    sinks: Array | None
    group: int = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(metadata={"static": True})

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
        options: dict[str, Any] = {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": sinks}
        # q, k, v = heads(qkv), which the view does as it keeps the keys and values.
        o, kv = kv.attend(self.group, index, qkv, heads, **options)
        with jax.named_scope("out"):
            return self.out(o.reshape(*x.shape[:-1], -1)), kv
