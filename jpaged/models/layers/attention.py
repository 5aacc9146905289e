"""Grouped-query attention (arXiv:2305.13245)."""

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least, positive
from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.last import Last
from jpaged.models.layers.arithmetic import multiplied, rounded
from jpaged.models.layers.heads import Heads
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import PLAIN_NORM, NormConfig, RMSNorm
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part
from jpaged.models.record import Field, Record
from kernels_pallas.paged_attention.interface import AttentionOptions

QKV = (
    Part("q", "K G D, E", "self_attn.q_proj.weight"),  # "K G+G D, E" where it has gates
    Part("k", "K 1 D, E", "self_attn.k_proj.weight"),
    Part("v", "K 1 D, E", "self_attn.v_proj.weight"),
)
QKV_BIAS = (
    Part("q_bias", "K G D", "self_attn.q_proj.bias"),
    Part("k_bias", "K 1 D", "self_attn.k_proj.bias"),
    Part("v_bias", "K 1 D", "self_attn.v_proj.bias"),
)
V, V_BIAS = "self_attn.v_proj.weight", "self_attn.v_proj.bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of num_heads H queries over num_kv_heads K keys and values of head_dim D.

    window: tokens that a query sees, itself included; None is all before it. rope: None rotates
    nothing. Scores are multiplied by multiplier; where that is None, divided by the root of
    query_pre_attn_scalar, by default D. soft_cap: c, a score s becomes c * tanh(s / c). sinks: each
    head has one more score, a parameter, which takes its share of the softmax alone. gate: what a
    head attends to is multiplied by the sigmoid of a gate, one a channel of the head, which the
    projection of the queries gives as well (arXiv:2505.06708). qk_norm:
    queries and keys are normed, each head by itself or all heads together; qk_norm_after_rope: once
    they are rotated.

    value_dim: Dv, the width of a value; None is D. value_is_key: values are the product of the
    keys, before their norm and rotation, and no product is theirs. value_norm: values of each head
    are normed, without a scale. value_scale: what values are multiplied by. keys_of: the index of
    an earlier layer of the model whose keys and values it attends to; None: it has some of its own.
    is_causal: a query sees nothing after itself; otherwise the whole sequence, or, with a window,
    as many tokens after itself as before.

    sees_images: a token of an image also sees those after it that are of the same image.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    rope: RopeConfig | None = None
    multiplier: float | None = None
    query_pre_attn_scalar: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    gate: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    qk_norm_after_rope: bool = False
    norm: NormConfig = PLAIN_NORM
    value_dim: int | None = None
    value_is_key: bool = False
    value_norm: bool = False
    value_scale: float = 1.0
    keys_of: int | None = None
    is_causal: bool = True
    sees_images: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "num_heads", "num_kv_heads")
        at_least(2, self, "head_dim")
        if self.value_dim is not None:
            at_least(1, self, "value_dim")
        if self.value_is_key and self.value_width != self.head_dim:
            raise ConfigError(
                f"value_dim={self.value_dim} with value_is_key: must be head_dim={self.head_dim}"
            )
        if self.keys_of is not None and self.qk_norm == "whole":
            raise ConfigError(f"keys_of={self.keys_of} with qk_norm='whole' is not supported")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        positive(
            attention_multiplier=self.multiplier,
            query_pre_attn_scalar=self.query_pre_attn_scalar,
            attn_logit_softcapping=self.soft_cap,
            value_scale=self.value_scale,
        )

    @property
    def group_size(self) -> int:
        """G: query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_width(self) -> int:
        """Dv: the width of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        if self.multiplier is not None:
            return self.multiplier
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def options(self) -> AttentionOptions:
        """What the view of a step passes on to the kernel."""
        return AttentionOptions(
            scale=self.scale,
            soft_cap=self.soft_cap,
            window=self.window,
            value_dim=None if self.value_width == self.head_dim else self.value_width,
            sinks=self.sinks,
            causal=self.is_causal,
            ends=self.sees_images,
        )

    @property
    def unfused(self) -> str | None:
        """Say why no kernel can norm, rotate and write queries and keys at once; None: one can."""
        if self.qk_norm == "whole":
            return "norms over all heads together"
        if self.qk_norm is not None and self.qk_norm_after_rope:
            return "norms after the rotation"
        if self.value_is_key or self.value_norm or self.value_scale != 1.0:
            return "values that are keys, normed or scaled"
        return "values of another width" if self.value_width != self.head_dim else None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        sizes = {"K": self.num_kv_heads, "G": self.group_size, "D": self.head_dim}
        return sizes if self.value_dim is None else sizes | {"Dv": self.value_dim}

    @property
    def _num_fused(self) -> int:
        """How many of q, k and v lie in one weight: all, or fewer where values are of another width
        or keys, or another layer has keys and values.
        """
        if self.keys_of is not None:
            return 1
        return 2 if self.value_is_key or self.value_width != self.head_dim else 3

    @property
    def _has_v(self) -> bool:
        """Whether values have a weight of their own."""
        return self.keys_of is None and self.value_width != self.head_dim

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer. Query, key and value of one KV head lie
        together: a split over KV heads is contiguous, and the product yields the pool's pairs of K
        and V. Where there are gates, each follows its query, as in files.
        """
        q_norm, k_norm = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
        count, queries = self._num_fused, "G+G" if self.gate else "G"
        heads = f"K {queries} D" if count == 1 else f"K {queries}+{count - 1} D"
        fused = self._as_stored(QKV)[:count]
        specs = [ParamSpec("attention.qkv", f"{heads}, E", fused, "normal", "K")]
        if self._has_v:
            specs.append(ParamSpec("attention.v", "K Dv, E", V, "normal", "K"))
        if self.qkv_bias:
            fused = self._as_stored(QKV_BIAS)[:count]
            specs.append(ParamSpec("attention.qkv_bias", heads, fused, "zeros", "K"))
            if self._has_v:
                specs.append(ParamSpec("attention.v_bias", "K Dv", V_BIAS, "zeros", "K"))
        if self.qk_norm is not None:
            axes, split = ("K ", "K") if self.qk_norm == "whole" else ("", None)
            q_axes, init = axes and f"{axes}G ", self.norm.init
            specs.append(ParamSpec("attention.q_norm.scale", f"{q_axes}D", q_norm, init, split))
            if self.keys_of is None:
                name = "attention.k_norm.scale"
                specs.append(ParamSpec(name, f"{axes}D", k_norm, init, split))
        out, width = "self_attn.o_proj.weight", "D" if self.value_dim is None else "Dv"
        specs.append(ParamSpec("attention.out", f"E, K G {width}", out, "residual", "K"))
        if self.sinks:
            specs.append(ParamSpec("attention.sinks", "K G", "self_attn.sinks", "zeros", "K"))
        if self.out_bias:
            specs.append(ParamSpec("attention.out_bias", "E", "self_attn.o_proj.bias", "zeros"))
        return tuple(specs)

    def _as_stored(self, qkv: tuple[Part, Part, Part]) -> tuple[Part, ...]:
        """Return the parts of queries, keys and values in the order of rows that files have."""
        if self.gate:
            q, k, v = qkv
            qkv = (q._replace(axes=q.axes.replace("G", "G+G")), k, v)
        if self.rope is None or not self.rope.interleaved:
            return qkv
        q, k, v = qkv
        pairs = self.rope.dim
        return q._replace(interleaved=pairs), k._replace(interleaved=pairs), v

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds of each token for it; () where another layer has its keys."""
        if self.keys_of is not None:
            return ()
        keys = Field("keys", (self.num_kv_heads, self.head_dim), split=0)
        values = Field("values", (self.num_kv_heads, self.value_width), split=0)
        return (Record(fields=(keys, values)),)

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it. XLA:CPU shares the results of no two layers'
        attention.
        """
        heads, kv_heads = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        gates = 2 * heads if self.gate else 0
        kept = (2 * step.tokens + step.short) * heads * step.itemsize
        return Scratch(shared=step.rows * 4 * (heads + gates + 2 * kv_heads), kept=kept)

    def served(self, devices: int) -> Self:
        """Return an equal attention that so many devices can share: KV heads are repeated until
        they divide. ConfigError where heads cannot divide.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if kv_heads % devices == 0:
            return self
        check_combination(Facts(heads=(heads, kv_heads), devices=devices))
        return dataclasses.replace(self, num_kv_heads=devices)

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of a served one."""
        heads, kv_heads = self.num_heads // devices, self.num_kv_heads // devices
        return dataclasses.replace(self, num_heads=heads, num_kv_heads=kv_heads)

    def build(self, weights: Parameters) -> "Attention":
        """Return the module of these parameters."""
        sinks = weights.get("attention.sinks")
        return Attention(
            qkv=Linear.of(weights["attention.qkv"], weights.get("attention.qkv_bias")),
            q_norm=RMSNorm.of(self.norm, weights.get("attention.q_norm.scale")),
            k_norm=RMSNorm.of(self.norm, weights.get("attention.k_norm.scale")),
            v=Linear.of(weights["attention.v"], weights.get("attention.v_bias"))
            if self._has_v
            else None,
            out=Linear.of(weights["attention.out"], weights.get("attention.out_bias")),
            sinks=None if sinks is None else sinks.value,
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """qkv: the projections of each KV head and its G query heads, together: [..., K, G+2, D];
    [..., K, G+1, D] where values are keys or `v` [..., K, Dv] makes them; [..., K, G, D] where
    another layer has the keys and values. Where there are gates, each follows its query, and G+G
    stands for G. sinks: [K, G] or None.
    """

    qkv: Linear
    v: Linear | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: Linear
    sinks: Array | None
    config: AttentionConfig = dataclasses.field(metadata={"static": True})

    def __call__(
        self,
        x: Array,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
        last: Last | None = None,
    ) -> tuple[Array, KVView]:
        """x [..., E]; rotary: of config.rope. places: where the cache holds what `keeps` says, or
        what the layer that has the keys keeps. last: the tokens that attend; None is all.
        """
        (place,) = places
        config = self.config
        heads = Heads(
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            rotary=rotary,
            v_norm=RMSNorm(scale=None, config=config.norm) if config.value_norm else None,
            value_scale=config.value_scale,
            value_is_key=config.value_is_key,
            mean_over=None if self.q_norm is None else step.axis_over(self.q_norm.split),
            norms_after=config.qk_norm_after_rope,
        )
        with jax.named_scope("qkv"):
            product, gate = self.qkv(x, step), None
            if config.gate:
                product, gate = split_gates(product, config.group_size)
            qkv = product if self.v is None else (product, self.v(x, step))
        if config.keys_of is None:
            q, kv = kv.write(place, qkv, heads)  # q, k, v = heads(qkv), of which k and v are kept
        else:
            q = heads.queries(product)
        sinks, seen = None if self.sinks is None else self.sinks.reshape(-1), kv
        if last is not None:
            q, gate = jax.tree.map(last.rows_of, (q, gate))
            step, seen = last.step, last.view(kv)
        o = seen.attend(place, q, config.options, sinks)
        with jax.named_scope("out"):
            if gate is not None:
                gate = rounded(step.apply("sigmoid", gate.astype(jnp.float32)), o.dtype)
                o = multiplied(o, gate)
            return self.out(o.reshape(*o.shape[:-2], -1), step), kv


def split_gates(product: Array, group_size: int) -> tuple[Array, Array]:
    """Return [..., K, G+2, D] of a product [..., K, G+G+2, D], without the gates, and these
    [..., H, D].
    """
    q, gate = (product[..., i : 2 * group_size : 2, :] for i in (0, 1))
    others = product[..., 2 * group_size :, :]
    gate = gate.reshape(*gate.shape[:-3], -1, gate.shape[-1])
    return jnp.concatenate([q, others], axis=-2), gate
