"""Families whose layers are partly attention and partly the gated delta rule: Qwen3-Next, Qwen3.5
to 3.8 and OLMo Hybrid.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, MTPFiles, StackedExperts, in_layers
from jpaged.models.families.switches import BIASES, ExpertKeys, ListedDenseLayers, Switches
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.vision.qwen import Qwen3VisionConfig

SIZES = {  # of DeltaConfig, in a config.json
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
NO_ROPE = {"rope_type": "default", "rope_theta": None}
LINEAR, FULL = "linear_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """A family that names the mixer of each layer in `layer_types`: its `Family.description`.

    switches: of the layers of attention, and of all else that layers have. may_lack_rope: without a
    rope_theta, nothing is rotated. delta_norms: what layers of the delta rule normalise, where that
    differs. delta_eps: of the norm of the rule's outputs; None is that of the layers.
    allows_negative: the key that says whether changes may be twice as strong.
    """

    switches: Switches
    may_lack_rope: bool = False
    delta_norms: Literal["pre"] | None = None
    delta_eps: float | None = None
    allows_negative: str | None = None

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        kinds = read_kinds(hf)
        has_rope = not self.may_lack_rope or bool((hf["rope_parameters"] or {}).get("rope_theta"))
        if not has_rope:
            hf = hf | {"rope_parameters": NO_ROPE}
        arguments = self.switches.read(hf)
        layers = arguments["layers"]
        delta = DeltaConfig(
            **{ours: hf[theirs] for ours, theirs in SIZES.items()},
            allows_negative=bool(self.allows_negative and hf[self.allows_negative]),
            norm_eps=layers[0].norm.eps if self.delta_eps is None else self.delta_eps,
        )
        attention = layers[0].mixer
        if not has_rope:
            attention = dataclasses.replace(attention, rope=None)
        of_kind = {
            LINEAR: {"mixer": delta, "norms": self.delta_norms or layers[0].norms},
            FULL: {"mixer": attention},
        }
        arguments["layers"] = tuple(
            dataclasses.replace(layer, **of_kind[kind])
            for layer, kind in zip(layers, kinds, strict=True)
        )
        return arguments

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        full = next((x for x in config.layers if isinstance(x.mixer, AttentionConfig)), None)
        delta = next((x.mixer for x in config.layers if isinstance(x.mixer, DeltaConfig)), None)
        if full is None or delta is None:
            raise ConfigError(f"{config.family}: layers of attention and of the delta rule")
        alike = tuple(
            dataclasses.replace(layer, mixer=full.mixer, norms=full.norms)
            for layer in config.layers
        )
        raw = self.switches.write(dataclasses.replace(config, layers=alike))
        raw |= {theirs: getattr(delta, ours) for ours, theirs in SIZES.items()}
        if full.mixer.rope is None:
            raw["rope_parameters"] = None
        if self.allows_negative is not None:
            raw[self.allows_negative] = delta.allows_negative
        raw["layer_types"] = [
            LINEAR if isinstance(layer.mixer, DeltaConfig) else FULL for layer in config.layers
        ]
        return raw


def read_kinds(hf: Mapping[str, Any]) -> list[str]:
    """Return `layer_types`; ConfigError unless each layer has one of both kinds, and some layer
    attention.
    """
    kinds = hf["layer_types"]
    if unknown := set(kinds) - {LINEAR, FULL}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    if FULL not in kinds:
        raise ConfigError(f"layer_types={kinds}: none is {FULL!r}")
    if len(kinds) != hf["num_hidden_layers"]:
        layers = f"num_hidden_layers={hf['num_hidden_layers']}"
        raise ConfigError(f"{len(kinds)} layer_types for {layers}")
    return kinds


QWEN: Mapping[str, Any] = {"qk_norm": True, "norm_offset": True, "norm_in_f32": True}
AXES: tuple[int, int, int] = (11, 11, 10)
GATED: Mapping[str, Any] = {"gate": True}
GUESSES = r"mtp\."  # a layer that guesses a further token
MTP = MTPFiles(
    layer="mtp.layers.0.",
    embed_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    fc="mtp.fc.weight",
    norm="mtp.norm.weight",
)
EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_expert_size": "shared_expert_intermediate_size",
}
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    text_of=("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    vision=Qwen3VisionConfig.read,
    description=Hybrid(
        switches=Switches(
            always=QWEN,
            attention=GATED,
            keys=BIASES,
            partial_rotary=True,
            axes=AXES,
            alternating=True,
        )
    ),
    unread=GUESSES,
    mtp=MTP,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    text_of=("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    vision=Qwen3VisionConfig.read,
    description=Hybrid(
        switches=Switches(
            always={**QWEN, "norm_topk_prob": True},
            attention=GATED,
            keys=BIASES,
            partial_rotary=True,
            axes=AXES,
            alternating=True,
            experts=ExpertKeys(sizes=EXPERTS),
        ),
    ),
    stacked_experts=StackedExperts(alternate=False, transposed=False),
    unread=GUESSES,
    mtp=MTP,
)
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    description=Hybrid(
        switches=Switches(
            always=QWEN,
            attention=GATED,
            keys=BIASES | {"norm_topk_prob": ("norm_topk_prob",)},
            partial_rotary=True,
            experts=ExpertKeys(sizes=EXPERTS, dense_layers=ListedDenseLayers()),
        ),
    ),
    unread=GUESSES,
    mtp=MTP,
    # What belongs to a key head lies together in its files, too.
    names=in_layers(
        delta__qkvz="linear_attn.in_proj_qkvz.weight", delta__ba="linear_attn.in_proj_ba.weight"
    ),
)
OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    description=Hybrid(
        switches=Switches(
            always={
                **{"pre_norms": False, "post_norms": True},
                **{"norm_in_f32": True, "qk_norm_whole": True},
            },
            keys=BIASES,
        ),
        may_lack_rope=True,
        delta_norms="pre",
        delta_eps=1e-5,
        allows_negative="linear_allow_neg_eigval",
    ),
    names=in_layers(
        **{f"delta__{x}": f"linear_attn.{x}_proj.weight" for x in "qkvba"},
        **{f"delta__conv_{x}": f"linear_attn.{x}_conv1d.weight" for x in "qkv"},
        delta__z="linear_attn.g_proj.weight",
        delta__norm__scale="linear_attn.o_norm.weight",
        delta__out="linear_attn.o_proj.weight",
        input_norm__scale="attention_layer_norm.weight",
        post_norm__scale="feedforward_layer_norm.weight",
    ),
)
