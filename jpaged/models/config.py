"""ModelConfig: the architecture, read from a Hugging Face config.json; frozen and compared by
value.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from jpaged.checks import at_least, is_scalar, read_json
from jpaged.errors import ConfigError
from jpaged.models.hf_config import read_hf, write_hf
from jpaged.models.rope_scaling import RopeScaling
from kernels_pallas.paged_attention.interface import AttentionOptions

POSITIVE = (
    "rope_theta",
    "local_rope_theta",
    "partial_rotary_factor",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attention_multiplier",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one decoder; every size and every family is flags of this one
    definition.

    Compared by value, without `eos_token_ids`: they ride along and change no shape and no number.
    """

    family: str  # one of FAMILIES
    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # of layers with a window, which are then not scaled
    no_rope_layers: tuple[int, ...] = ()
    partial_rotary_factor: float = 1.0  # of a head's dimensions, the share that is rotated
    tie_word_embeddings: bool = False
    qk_norm: bool = False  # of each head
    qk_norm_whole: bool = False  # of all heads together
    attention_sinks: bool = False  # one more score of each head, a parameter
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    pre_norms: bool = True  # of what attention and the MLP take
    post_norms: bool = False  # of what they give
    norm_offset: bool = False  # norms multiply by 1 + scale
    norm_in_f32: bool = False  # and do so before they round
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    scaled_embedding: bool = False  # by the root of hidden_size
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and the MLP add
    logits_scaling: float = 1.0  # logits are divided by it
    attention_multiplier: float | None = None  # of the scores
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    attn_logit_softcapping: float | None = None  # c: a score s becomes c * tanh(s / c)
    final_logit_softcapping: float | None = None  # and so a logit
    num_experts: int = 0  # X: 0 is none
    experts_per_token: int = 0
    expert_size: int = 0  # I
    shared_expert_size: int = 0  # R: of the expert that every token takes; 0 is none
    expert_bias: bool = False  # of the router, too
    norm_topk_prob: bool = False  # the weights of a token's experts sum up to 1
    dense_layers: tuple[int, ...] = ()  # of a mixture: those with an MLP
    sliding_windows: tuple[int | None, ...] = ()  # one a layer; () is full attention everywhere
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    # Whether it stands alone, or guesses for another as a HeadConfig of models/eagle.py does.
    is_model, is_head = True, False

    def __post_init__(self) -> None:
        at_least(
            1,
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        )
        at_least(2, self, "head_dim")
        at_least(1, self, "max_position_embeddings")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.num_experts:
            at_least(1, self, "num_experts", "experts_per_token", "expert_size")
            if self.experts_per_token > self.num_experts:
                most = f"num_experts={self.num_experts}"
                raise ConfigError(f"experts_per_token={self.experts_per_token} of {most}")
        if self.head_dim % 2 or self.rotary_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: rotary embeddings need an even head_dim")
        if (s := self.rope_scaling) and s.kind == "longrope":
            for factors in (s.short_factor, s.long_factor):
                if len(factors) != self.rotary_dim // 2:
                    raise ConfigError(
                        f"{len(factors)} longrope factors for {self.rotary_dim // 2} frequencies"
                    )
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not (is_scalar(value, int | float, "") and value > 0):
                raise ConfigError(f"{name}={value!r}: must be a number above 0")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.sliding_windows)} sliding windows for num_layers={self.num_layers}"
            )

    @property
    def has_embed(self) -> bool:
        """Whether tokens have a weight of their own."""
        return True

    @property
    def has_lm_head(self) -> bool:
        """Whether logits have a weight of their own."""
        return not self.tie_word_embeddings

    @property
    def has_draft_lm_head(self) -> bool:
        """Whether it has logits of a part of the vocabulary, as some heads do."""
        return False

    @property
    def more_axes(self) -> dict[str, int]:
        """Sizes of axes that a decoder does not have, by their letters."""
        return {}

    @property
    def embedding_scale(self) -> float:
        """What an embedding is multiplied by."""
        return self.hidden_size**0.5 if self.scaled_embedding else self.embedding_multiplier

    @property
    def score_scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def attention_options(self, layer: int) -> AttentionOptions:
        """Return what the attention of a layer computes: its scale, its cap and its window."""
        return AttentionOptions(
            scale=self.score_scale,
            soft_cap=self.attn_logit_softcapping,
            window=self.sliding_window(layer),
        )

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, and not experts."""
        return not self.num_experts or layer in self.dense_layers

    def has_mlp_bias(self, layer: int) -> bool:
        """Whether it has one with biases."""
        return self.mlp_bias and self.has_mlp(layer)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture."""
        return not self.has_mlp(layer)

    def has_expert_bias(self, layer: int) -> bool:
        """Whether it is one with biases."""
        return self.expert_bias and self.has_experts(layer)

    def has_shared_expert(self, layer: int) -> bool:
        """Whether it has an expert that every token takes."""
        return self.shared_expert_size > 0 and self.has_experts(layer)

    def rope_kind(self, layer: int) -> Literal["global", "local"] | None:
        """Which rotation a layer has: the model's, that of layers with a window, or none."""
        if layer in self.no_rope_layers:
            return None
        is_local = self.local_rope_theta is not None and self.sliding_window(layer) is not None
        return "local" if is_local else "global"

    @property
    def group_size(self) -> int:
        """G: query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    def sliding_window(self, layer: int) -> int | None:
        """The window of a layer in tokens (a query sees itself and window - 1 before it); None is
        full attention.
        """
        return self.sliding_windows[layer] if self.sliding_windows else None

    @classmethod
    def coerce(cls, config: "ModelConfig | Mapping[str, Any] | str | os.PathLike[str]") -> Self:
        """From a ModelConfig (as it is), a Hugging Face config dict, or a folder that holds a
        config.json.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            return cls.from_hf(config)
        if isinstance(config, str | os.PathLike):
            return cls.from_hf(read_json(Path(config) / "config.json"))
        raise ConfigError(
            f"config={config!r}: pass a ModelConfig, a Hugging Face config dict or a "
            "checkpoint folder"
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """From the dict of a Hugging Face config.json; transformers fills in the family's defaults.

        Raises ConfigError for any architecture or option outside the families, by name.
        """
        return cls(**read_hf(raw))

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` reads back to an equal ModelConfig."""
        return write_hf(self)
