"""Latent attention (arXiv:2405.04434): of a token the cache holds one latent vector, of which each
head would make a key and a value, and one key that is rotated.

It is served and trained absorbed: queries are multiplied by what makes keys of latents, and what a
head attends to, itself a latent, by what makes values of them. No key or value of a head is made.
"""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least
from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.arithmetic import multiplied, rounded
from jpaged.models.layers.heads import LatentHeads, by_head
from jpaged.models.layers.indexer import Indexer, IndexerConfig
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import PLAIN_NORM, NormConfig, RMSNorm
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part
from jpaged.models.record import LATENT, Field, Record
from kernels_pallas.paged_attention.interface import AttentionOptions

UP = "latent.up"  # from latents to keys and values of each head


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Attention of num_heads H heads over latents of latent_dim L numbers.

    A head's key has content_dim N numbers that come of the latent, and rope_dim R that are rotated
    and shared by all heads; its value has value_dim. query_latent_dim: queries come of a latent of
    their own, of so many numbers, which is normed; None: of x. rope: the rotation of R dimensions;
    None rotates nothing. mscale: m, which multiplies scores by (0.1 * m * ln(factor) + 1)^2 where
    rope is scaled by a factor; 0 does not. bias: of the products that take x, and of the last one.
    gate: what a head attends to is multiplied by the sigmoid of a number, which comes of x. norm:
    of latents.

    chosen: how many tokens of its context a query attends to; None: all. indexer: what chooses
    them; None: those that the last layer before with an indexer has chosen.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    content_dim: int
    value_dim: int
    query_latent_dim: int | None = None
    rope: RopeConfig | None = None
    mscale: float = 0.0
    bias: bool = False
    gate: bool = False
    norm: NormConfig = PLAIN_NORM
    chosen: int | None = None
    indexer: IndexerConfig | None = None
    window: None = None

    def __post_init__(self) -> None:
        at_least(1, self, "num_heads", "latent_dim", "content_dim", "value_dim")
        at_least(2, self, "rope_dim")
        if self.query_latent_dim is not None:
            at_least(1, self, "query_latent_dim")
        if self.rope is not None and self.rope.dim != self.rope_dim:
            raise ConfigError(f"rope of {self.rope.dim} dimensions: rope_dim={self.rope_dim}")
        if not 0 <= self.mscale < math.inf:
            raise ConfigError(f"mscale_all_dim={self.mscale!r}: must be a number of at least 0")
        if self.chosen is not None:
            at_least(1, self, "chosen")
        if self.indexer is not None:
            if self.chosen is None or self.query_latent_dim is None:
                raise ConfigError("an indexer needs chosen= and query_latent_dim=")
            self.indexer.check(self.rope_dim)

    @property
    def scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        scaling = None if self.rope is None else self.rope.scaling
        factor = 1.0 if scaling is None else scaling.factor
        by = 0.1 * self.mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
        return (self.content_dim + self.rope_dim) ** -0.5 * by**2

    @property
    def options(self) -> AttentionOptions:
        """What the view of a step passes on to the kernel."""
        return AttentionOptions(scale=self.scale, value_dim=self.latent_dim, latent=True)

    @property
    def unfused(self) -> str:
        """Say why no kernel can norm, rotate and write at once."""
        return "latents"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        widths = {"N": self.content_dim, "Dr": self.rope_dim, "Dv": self.value_dim}
        sizes = {"H": self.num_heads, "L": self.latent_dim} | widths
        if self.query_latent_dim is not None:
            sizes |= {"Lq": self.query_latent_dim}
        return sizes if self.indexer is None else sizes | self.indexer.sizes

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer. Rotated rows are the last of each head,
        and of latents with their key.
        """
        pairs = self.rope_dim if self.rope is not None and self.rope.interleaved else 0

        def rotated(name: str, axes: str, source: str, first: int) -> tuple[Part, ...]:
            return (Part(name, axes, f"self_attn.{source}", pairs, first),)

        init, specs = self.norm.init, list[ParamSpec]()
        q_inputs, q_source = "E", "q_proj"
        if self.query_latent_dim is not None:
            q_inputs, q_source = "Lq", "q_b_proj"
            source = "self_attn.q_a_proj.weight"
            specs.append(ParamSpec("latent.q_a", "Lq, E", source, is_quantized=True))
            if self.bias:
                source = "self_attn.q_a_proj.bias"
                specs.append(ParamSpec("latent.q_a_bias", "Lq", source, "zeros"))
            source = "self_attn.q_a_layernorm.weight"
            specs.append(ParamSpec("latent.q_norm.scale", "Lq", source, init))
        axes = f"H N+Dr, {q_inputs}"
        q = rotated("q", axes, f"{q_source}.weight", self.content_dim)
        specs.append(ParamSpec("latent.q", axes, q, "normal", "H"))
        kv = rotated("kv", "L+Dr, E", "kv_a_proj_with_mqa.weight", self.latent_dim)
        specs.append(ParamSpec("latent.kv", "L+Dr, E", kv, is_quantized=True))
        if self.bias:
            kv = rotated("kv_bias", "L+Dr", "kv_a_proj_with_mqa.bias", self.latent_dim)
            specs.append(ParamSpec("latent.kv_bias", "L+Dr", kv, "zeros"))
        norm, up = "self_attn.kv_a_layernorm.weight", "self_attn.kv_b_proj.weight"
        out = "self_attn.o_proj.weight"
        specs += [
            ParamSpec("latent.norm.scale", "L", norm, init),
            ParamSpec(UP, "H N+Dv, L", up, "normal", "H", is_always_plain=True),
            ParamSpec("latent.out", "E, H Dv", out, "residual", "H"),
        ]
        if self.gate:
            gate = "self_attn.g_proj.weight"
            specs.append(ParamSpec("latent.gate", "H, E", gate, "normal", "H", is_quantized=False))
        if self.bias:
            specs.append(ParamSpec("latent.out_bias", "E", "self_attn.o_proj.bias", "zeros"))
        if self.indexer is not None:
            specs += self.indexer.params(self.rope_dim)
        return tuple(specs)

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds of each token for it, whole on every device."""
        latent, rotated_key = LATENT
        fields = (Field(latent, (self.latent_dim,)), Field(rotated_key, (self.rope_dim,)))
        if self.indexer is not None:
            fields = (*fields, self.indexer.keeps)
        return (Record(fields=fields),)

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it: products, queries of latents and latents that are
        attended to. XLA:CPU shares the results of no two layers' attention.
        """
        width, latent = self.latent_dim + self.rope_dim, self.latent_dim
        heads = self.num_heads * (self.content_dim + self.rope_dim + width + latent)
        heads += self.num_heads * self.value_dim
        shared = step.rows * 4 * (heads + 2 * width + (self.query_latent_dim or 0))
        if step.adapter_rank:  # what they add to queries and to values, twice; one's own B
            added = 2 * (latent + self.value_dim) + step.adapter_rank
            outputs = self.content_dim + self.value_dim
            shared += 4 * self.num_heads * (step.rows * added + step.adapter_rank * outputs)
        kept = (2 * step.tokens + step.short) * self.num_heads * width * step.itemsize
        scratch = Scratch(shared=shared, kept=kept)
        return scratch if self.indexer is None else scratch + self.indexer.scratch(step)

    def served(self, devices: int) -> Self:
        """Itself, if so many devices can share its heads; else ConfigError."""
        check_combination(Facts(heads=(self.num_heads, self.num_heads), devices=devices))
        return self

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of a served one."""
        return dataclasses.replace(self, num_heads=self.num_heads // devices)

    def build(self, weights: Parameters) -> "Latent":
        """Return the module of these parameters."""
        q_a, norm = weights.get("latent.q_a"), RMSNorm.of(self.norm, weights["latent.norm.scale"])
        assert norm is not None
        gate = weights.get("latent.gate")
        return Latent(
            q_a=None if q_a is None else Linear.of(q_a, weights.get("latent.q_a_bias")),
            q_norm=RMSNorm.of(self.norm, weights.get("latent.q_norm.scale")),
            q=Linear.of(weights["latent.q"]),
            kv=Linear.of(weights["latent.kv"], weights.get("latent.kv_bias")),
            norm=norm,
            up=weights[UP].value,
            gate=None if gate is None else Linear.of(gate),
            indexer=None if self.indexer is None else self.indexer.build(weights),
            out=Linear.of(weights["latent.out"], weights.get("latent.out_bias")),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """q_a, q_norm: to the latents of queries, where these have some. q: [..., H, N + R]. kv: a
    latent and the key that is rotated, [..., L + R]. norm: of latents. up: from latents to keys and
    values of each head, [H, N + Dv, L]. gate: [..., H], where heads have some. indexer: see
    LatentConfig.
    """

    q_a: Linear | None
    q_norm: RMSNorm | None
    q: Linear
    kv: Linear
    norm: RMSNorm
    up: Array
    gate: Linear | None
    out: Linear
    indexer: Indexer | None
    config: LatentConfig = dataclasses.field(metadata={"static": True})

    def __call__(
        self,
        x: Array,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
    ) -> tuple[Array, KVView]:
        """x [..., E]. rotary: of config.rope. places: where the cache holds what `keeps` says."""
        (place,) = places
        up_k, up_v = jnp.split(self.up, [self.config.content_dim], axis=1)
        with jax.named_scope("qkv"):
            latent_q = x if self.q_a is None else self.q_a(x, step)
            if self.q_norm is not None:
                latent_q = self.q_norm(latent_q)
            products = self.q(latent_q, step), self.kv(x, step)
        adapters = step.low_rank(UP)
        heads = LatentHeads(norm=self.norm, rotary=rotary, up=up_k, adapters=adapters)
        q, kv = kv.write(place, products, heads)
        if (chosen := self.config.chosen) is None:
            o = kv.attend(place, q, self.config.options)
        else:
            if self.indexer is not None:
                queries = self.indexer(x, latent_q, step, rotary, chosen)
                kv = kv.choose(place, queries)
            o = kv.attend_chosen(place, q, self.config.options, chosen)
        with jax.named_scope("out"):
            first = self.config.content_dim
            added = None if adapters is None else adapters.of_latents(o, first)
            o = by_head("...hl,hvl->...hv", o, up_v, added)
            if self.gate is not None:
                gate = step.apply("sigmoid", self.gate(x, step).astype(jnp.float32))
                o = multiplied(o, rounded(gate, o.dtype)[..., None])
            return self.out(o.reshape(*x.shape[:-1], -1), step), kv
