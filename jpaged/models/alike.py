"""Alike: layers of attention that are alike, or differ only by window, rope and experts, as one set
of switches: how most families of models are described, and their config.json's too.

A field of a layer's config needs no switch here: `rope`, `attention`, `experts` and `router` have
all that no switch sets, and keep it where switches change.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from jpaged.checks import at_least, positive
from jpaged.errors import ConfigError
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import Activation, MLPConfig
from jpaged.models.layers.norm import NormConfig
from jpaged.models.layers.rope import RopeConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.models.rope_scaling import RopeScaling

type Options = tuple[tuple[str, Any], ...]  # fields of a config, and their values

# Fields of a layer's configs that switches set.
OF_ROPE = ("dim", "theta", "scaling")
OF_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "window", "rope", "multiplier", "norm"),
    *("query_pre_attn_scalar", "soft_cap", "sinks", "qkv_bias", "out_bias", "qk_norm"),
)
OF_EXPERTS = (
    *("num_experts", "experts_per_token", "expert_size", "shared_expert_size"),
    *("bias", "activation", "router"),
)
OF_ROUTER = ("normalized",)
OPTIONS = ("rope", "attention", "experts", "router")  # fields of Alike with all the others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alike:
    """The switches, and other fields of all layers' configs. `layers` makes the layers, `of` reads
    all of it back.
    """

    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # of layers with a window, which are then not scaled
    no_rope_layers: tuple[int, ...] = ()
    partial_rotary_factor: float = 1.0  # the share of a head's dimensions that is rotated
    qk_norm: bool = False  # of each head
    qk_norm_whole: bool = False  # of all heads together
    attention_sinks: bool = False  # one more score of each head, a parameter
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    pre_norms: bool = True  # normalise what attention and the MLP take
    post_norms: bool = False  # normalise what they give
    norm_offset: bool = False  # norms multiply by 1 + scale
    norm_in_f32: bool = False  # norms apply their scale in f32, before they round
    activation: Activation = "silu"
    residual_multiplier: float = 1.0  # of what attention and the MLP add
    attention_multiplier: float | None = None  # of the scores
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    attn_logit_softcapping: float | None = None  # c: a score s becomes c * tanh(s / c)
    num_experts: int = 0  # X: 0 is none
    experts_per_token: int = 0
    expert_size: int = 0  # I
    shared_expert_size: int = 0  # R: of the expert that every token takes; 0 is none
    expert_bias: bool = False  # of the router, too
    norm_topk_prob: bool = False  # the weights of a token's experts sum up to 1
    dense_layers: tuple[int, ...] = ()  # those of a mixture that have an MLP
    sliding_windows: tuple[int | None, ...] = ()  # one a layer; () is full attention everywhere
    rope: Options = ()
    attention: Options = ()
    experts: Options = ()
    router: Options = ()

    def __post_init__(self) -> None:
        at_least(1, self, "num_layers", "intermediate_size")
        at_least(2, self, "head_dim")
        positive(
            local_rope_theta=self.local_rope_theta,
            partial_rotary_factor=self.partial_rotary_factor,
        )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.sliding_windows)} sliding windows for num_layers={self.num_layers}"
            )
        if not (self.pre_norms or self.post_norms):
            raise ConfigError("pre_norms=False and post_norms=False: layers need one of them")
        if self.qk_norm and self.qk_norm_whole:
            raise ConfigError("qk_norm=True and qk_norm_whole=True: take one of them")

    @property
    def norm(self) -> NormConfig:
        """All norms."""
        return NormConfig(
            eps=self.rms_norm_eps, has_offset=self.norm_offset, in_f32=self.norm_in_f32
        )

    def layers(self) -> tuple[LayerConfig, ...]:
        """Return the layers; ConfigError for switches that fit no layer."""
        return tuple(map(self._layer, range(self.num_layers)))

    def _layer(self, i: int) -> LayerConfig:
        norms: Literal["pre", "post", "both"] = "pre" if self.pre_norms else "post"
        return LayerConfig(
            mixer=self._attention(i),
            ffn=self._ffn(i),
            norms="both" if self.pre_norms and self.post_norms else norms,
            norm=self.norm,
            residual_multiplier=self.residual_multiplier,
        )

    def _attention(self, i: int) -> AttentionConfig:
        window = self.sliding_windows[i] if self.sliding_windows else None
        rope = RopeConfig(
            dim=int(self.head_dim * self.partial_rotary_factor),
            theta=self.rope_theta,
            scaling=self.rope_scaling,
            **dict(self.rope),
        )
        if window is not None and self.local_rope_theta is not None:
            rope = dataclasses.replace(rope, theta=self.local_rope_theta, scaling=None)
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=window,
            rope=None if i in self.no_rope_layers else rope,
            multiplier=self.attention_multiplier,
            query_pre_attn_scalar=self.query_pre_attn_scalar,
            soft_cap=self.attn_logit_softcapping,
            sinks=self.attention_sinks,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm="whole" if self.qk_norm_whole else "head" if self.qk_norm else None,
            norm=self.norm,
            **dict(self.attention),
        )

    def _ffn(self, i: int) -> MLPConfig | ExpertsConfig:
        if not self.num_experts or i in self.dense_layers:
            return MLPConfig(
                intermediate_size=self.intermediate_size,
                activation=self.activation,
                bias=self.mlp_bias,
            )
        return ExpertsConfig(
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_size=self.expert_size,
            shared_expert_size=self.shared_expert_size,
            bias=self.expert_bias,
            router=RouterConfig(normalized=self.norm_topk_prob, **dict(self.router)),
            activation=self.activation,
            **dict(self.experts),
        )

    @classmethod
    def of(cls, layers: Sequence[LayerConfig]) -> Self:
        """Return the switches of layers; ConfigError where switches cannot describe them. Those
        that no layer takes are at their defaults (intermediate_size, of a mixture in all layers:
        the width of an expert).
        """
        mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig)]
        mlps = {i: x.ffn for i, x in enumerate(layers) if isinstance(x.ffn, MLPConfig)}
        experts = [layer.ffn for layer in layers if isinstance(layer.ffn, ExpertsConfig)]
        if len(mixers) < len(layers) or len(mlps) + len(experts) < len(layers):
            raise ConfigError("layers of several kinds: read config.layers")
        plain, mixer = layers[0], mixers[0]
        ffn = next(iter(mlps.values()), None)
        others: dict[str, Any] = _rope(mixers)
        if experts:
            first = experts[0]
            others |= {
                "num_experts": first.num_experts,
                "experts_per_token": first.experts_per_token,
                "expert_size": first.expert_size,
                "shared_expert_size": first.shared_expert_size,
                "expert_bias": first.bias,
                "norm_topk_prob": first.router.normalized,
                "dense_layers": tuple(mlps),
                "experts": _options(first, OF_EXPERTS),
                "router": _options(first.router, OF_ROUTER),
            }
        windows = tuple(mixer.window for mixer in mixers)
        switches = cls(
            intermediate_size=ffn.intermediate_size if ffn else experts[0].expert_size,
            num_layers=len(layers),
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            rms_norm_eps=plain.norm.eps,
            qk_norm=mixer.qk_norm == "head",
            qk_norm_whole=mixer.qk_norm == "whole",
            attention_sinks=mixer.sinks,
            qkv_bias=mixer.qkv_bias,
            out_bias=mixer.out_bias,
            mlp_bias=ffn is not None and ffn.bias,
            pre_norms=plain.norms != "post",
            post_norms=plain.norms != "pre",
            norm_offset=plain.norm.has_offset,
            norm_in_f32=plain.norm.in_f32,
            activation=(ffn or experts[0]).activation,
            residual_multiplier=plain.residual_multiplier,
            attention_multiplier=mixer.multiplier,
            query_pre_attn_scalar=mixer.query_pre_attn_scalar,
            attn_logit_softcapping=mixer.soft_cap,
            sliding_windows=windows if any(windows) else (),
            attention=_options(mixer, OF_ATTENTION),
            **others,
        )
        for i, (layer, again) in enumerate(zip(layers, switches.layers(), strict=True)):
            if layer != again:
                raise ConfigError(f"layer {i} differs from the others: read config.layers")
        return switches


def _options(config: Any, switched: Sequence[str]) -> Options:
    """Return the fields of a config that no switch sets, where they are not at their defaults."""
    fields = [field for field in dataclasses.fields(config) if field.name not in switched]
    values = [(field, getattr(config, field.name)) for field in fields]
    return tuple((field.name, value) for field, value in values if value != field.default)


def _rope(mixers: Iterable[AttentionConfig]) -> dict[str, Any]:
    """Return the switches of rotary embeddings."""
    mixers = list(mixers)
    ropes = [(mixer, mixer.rope) for mixer in mixers if mixer.rope is not None]
    if not ropes:
        return {"no_rope_layers": tuple(range(len(mixers)))}
    wide = [rope for mixer, rope in ropes if mixer.window is None]
    local = next((rope for mixer, rope in ropes if mixer.window is not None), None)
    rope = wide[0] if wide else ropes[0][1]
    return {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "local_rope_theta": None if local in (None, rope) else local.theta,
        "partial_rotary_factor": rope.dim / mixers[0].head_dim,
        "no_rope_layers": tuple(i for i, mixer in enumerate(mixers) if mixer.rope is None),
        "rope": _options(rope, OF_ROPE),
    }
