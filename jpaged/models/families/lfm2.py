"""LFM2, whose layers are partly attention and partly short convolutions."""

import dataclasses
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.switches import Switches
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.conv import ConvConfig

CONV, FULL = "conv", "full_attention"
SWITCHES = Switches(always={"qk_norm": True})


class ShortConvolutions:
    """A family that names the mixer of each layer in `layer_types`: its `Family.description`."""

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        kinds = hf["layer_types"]
        if unknown := set(kinds) - {CONV, FULL}:
            raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
        if len(kinds) != hf["num_hidden_layers"]:
            layers = f"num_hidden_layers={hf['num_hidden_layers']}"
            raise ConfigError(f"{len(kinds)} layer_types for {layers}")
        sizes = {"intermediate_size": _intermediate_size(hf), "rms_norm_eps": hf["norm_eps"]}
        arguments = SWITCHES.read(hf | sizes)
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
        raw = SWITCHES.write(dataclasses.replace(config, layers=alike))
        raw |= {"norm_eps": raw.pop("rms_norm_eps"), "block_auto_adjust_ff_dim": False}
        raw |= {"conv_L_cache": conv.width, "conv_bias": conv.bias}
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


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    description=ShortConvolutions(),
    names=in_layers(
        input_norm__scale="operator_norm.weight",
        post_norm__scale="ffn_norm.weight",
        attention__q_norm__scale="self_attn.q_layernorm.weight",
        attention__k_norm__scale="self_attn.k_layernorm.weight",
        attention__out="self_attn.out_proj.weight",
        mlp__gate="feed_forward.w1.weight",
        mlp__up="feed_forward.w3.weight",
        mlp__down="feed_forward.w2.weight",
    )
    | {"norm.scale": "model.embedding_norm.weight"},
)
