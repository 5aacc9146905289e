"""LFM2, dense and mixtures of experts: layers are partly attention, partly short convolutions."""

import dataclasses
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.switches import ExpertKeys, FirstDenseLayers, Switches
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.conv import ConvConfig

CONV, FULL = "conv", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvolutions:
    """A family that names the mixer of each layer in `layer_types`: its `Family.description`.

    switches: of the layers of attention, and of all else that layers have. adjusts_width: a
    config.json may say the width of the MLP by a rule.
    """

    switches: Switches
    adjusts_width: bool = False

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        if (kinds := hf["layer_types"]) is None:
            raise ConfigError("layer_types: the config.json must say the kind of each layer")
        if unknown := set(kinds) - {CONV, FULL}:
            raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
        if len(kinds) != hf["num_hidden_layers"]:
            layers = f"num_hidden_layers={hf['num_hidden_layers']}"
            raise ConfigError(f"{len(kinds)} layer_types for {layers}")
        sizes = {"rms_norm_eps": hf["norm_eps"]}
        if self.adjusts_width:
            sizes["intermediate_size"] = _intermediate_size(hf)
        arguments = self.switches.read(hf | sizes)
        conv = ConvConfig(
            channels=hf["hidden_size"], width=hf["conv_L_cache"], bias=bool(hf["conv_bias"])
        )
        arguments["layers"] = tuple(
            dataclasses.replace(layer, mixer=conv) if kind == CONV else layer
            for layer, kind in zip(arguments["layers"], kinds, strict=True)
        )
        return arguments

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        full = next((x.mixer for x in config.layers if isinstance(x.mixer, AttentionConfig)), None)
        conv = next((x.mixer for x in config.layers if isinstance(x.mixer, ConvConfig)), None)
        if full is None or conv is None:
            raise ConfigError(f"{config.family}: layers of attention and of short convolutions")
        alike = tuple(dataclasses.replace(layer, mixer=full) for layer in config.layers)
        raw = self.switches.write(dataclasses.replace(config, layers=alike))
        raw |= {"norm_eps": raw.pop("rms_norm_eps")}
        raw |= {"conv_L_cache": conv.width, "conv_bias": conv.bias}
        if self.adjusts_width:
            raw["block_auto_adjust_ff_dim"] = False
        raw["layer_types"] = [
            CONV if isinstance(layer.mixer, ConvConfig) else FULL for layer in config.layers
        ]
        return raw


def _intermediate_size(hf: dict[str, Any]) -> int:
    """Return the width of the MLP, which a config.json may say by a rule."""
    size, multiplier = hf["intermediate_size"], hf["block_ffn_dim_multiplier"]
    if not hf["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if multiplier is None:
        return size
    multiple = hf["block_multiple_of"]
    return -(-int(multiplier * size) // multiple) * multiple


ALWAYS = {"qk_norm": True}
NAMES = {
    "input_norm__scale": "operator_norm.weight",
    "post_norm__scale": "ffn_norm.weight",
    "attention__q_norm__scale": "self_attn.q_layernorm.weight",
    "attention__k_norm__scale": "self_attn.k_layernorm.weight",
    "attention__out": "self_attn.out_proj.weight",
    "mlp__gate": "feed_forward.w1.weight",
    "mlp__up": "feed_forward.w3.weight",
    "mlp__down": "feed_forward.w2.weight",
}
EXPERT_NAMES = {
    "mlp__router": "feed_forward.gate.weight",
    "mlp__choosing_bias": "feed_forward.expert_bias",
    "mlp__experts__gate": "feed_forward.experts.{x}.w1.weight",
    "mlp__experts__up": "feed_forward.experts.{x}.w3.weight",
    "mlp__experts__down": "feed_forward.experts.{x}.w2.weight",
}
LAST_NORM = {"norm.scale": "model.embedding_norm.weight"}
LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    description=ShortConvolutions(switches=Switches(always=ALWAYS), adjusts_width=True),
    names=in_layers(**NAMES) | LAST_NORM,
)
LFM2_MOE = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    description=ShortConvolutions(
        switches=Switches(
            always=ALWAYS,
            keys={"norm_topk_prob": ("norm_topk_prob",)},
            experts=ExpertKeys(
                sizes={
                    "num_experts": "num_experts",
                    "experts_per_token": "num_experts_per_tok",
                    "expert_size": "moe_intermediate_size",
                },
                dense_layers=FirstDenseLayers("num_dense_layers"),
                router={"score": "sigmoid", "eps": 1e-6},
                router_keys={"has_bias": "use_expert_bias", "scale": "routed_scaling_factor"},
            ),
        )
    ),
    names=in_layers(**NAMES, **EXPERT_NAMES) | LAST_NORM,
)
