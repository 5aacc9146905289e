"""MiMo V2 Flash."""

from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.by_kind import WINDOW, layer_kinds, read_rope, write_kinds
from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.switches import ACTIVATIONS
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.norm import NormConfig
from jpaged.models.layers.router import RouterConfig

DENSE, SPARSE = "dense", "sparse"  # in mlp_layer_types
PARTIAL_ROTARY_FACTOR = 0.334  # where a config.json has none


class MiMo:
    """The `Family.description`: layers with a window have twice the KV heads, and sinks."""

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        if unknown := set(hf["mlp_layer_types"]) - {DENSE, SPARSE}:
            raise ConfigError(f"mlp_layer_types {sorted(unknown)} are not supported")
        if hf["hidden_act"] not in ACTIVATIONS:
            built = ", ".join(ACTIVATIONS)
            raise ConfigError(f"hidden_act={hf['hidden_act']!r} is not supported ({built} are)")
        kinds = zip(layer_kinds(hf), hf["mlp_layer_types"], strict=True)
        return {"layers": tuple(_layer(hf, kind, mlp) for kind, mlp in kinds)}

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        layers: tuple[LayerConfig, ...] = config.layers
        mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig)]
        full = next((mixer for mixer in mixers if mixer.window is None), None)
        mixer = full or mixers[0]
        mlps = [x.ffn for x in layers if isinstance(x.ffn, MLPConfig)]
        experts = [x.ffn for x in layers if isinstance(x.ffn, ExpertsConfig)]
        raw: dict[str, Any] = {
            **write_kinds(layers, config.max_position_embeddings),
            "num_hidden_layers": len(layers),
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads // (1 if full else 2),
            "head_dim": mixer.head_dim,
            "v_head_dim": mixer.value_width,
            "attention_value_scale": mixer.value_scale,
            "attention_bias": mixer.qkv_bias,
            "rms_norm_eps": config.norm.eps,
            "mlp_layer_types": [DENSE if isinstance(x.ffn, MLPConfig) else SPARSE for x in layers],
            "hidden_act": {v: k for k, v in ACTIVATIONS.items()}[(mlps or experts)[0].activation],
        }
        if mlps:
            raw["intermediate_size"] = mlps[0].intermediate_size
        if experts:
            router = experts[0].router
            raw |= {
                "n_routed_experts": experts[0].num_experts,
                "num_experts_per_tok": experts[0].experts_per_token,
                "moe_intermediate_size": experts[0].expert_size,
                "n_group": router.num_groups,
                "topk_group": router.chosen_groups,
                "norm_topk_prob": router.normalized,
                "routed_scaling_factor": router.scale,
            }
        return raw


def _layer(hf: dict[str, Any], kind: str, mlp: str) -> LayerConfig:
    norm, is_window = NormConfig(eps=hf["rms_norm_eps"]), kind == WINDOW
    value_dim = hf["v_head_dim"]
    scale = hf["attention_value_scale"]
    mixer = AttentionConfig(
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"] * (2 if is_window else 1),
        head_dim=hf["head_dim"],
        value_dim=None if value_dim == hf["head_dim"] else value_dim,
        value_scale=1.0 if scale is None else scale,
        window=hf["sliding_window"] if is_window else None,
        rope=read_rope(hf, kind, hf["head_dim"], PARTIAL_ROTARY_FACTOR),
        sinks=is_window,
        qkv_bias=bool(hf["attention_bias"]),
        norm=norm,
    )
    activation = ACTIVATIONS[hf["hidden_act"]]
    if mlp == DENSE:
        ffn = MLPConfig(intermediate_size=hf["intermediate_size"], activation=activation)
        return LayerConfig(mixer=mixer, ffn=ffn, norm=norm)
    normalized = bool(hf["norm_topk_prob"])
    experts = ExpertsConfig(
        num_experts=hf["n_routed_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        expert_size=hf["moe_intermediate_size"],
        router=RouterConfig(
            score="sigmoid",
            has_bias=True,
            num_groups=hf["n_group"],
            chosen_groups=hf["topk_group"],
            normalized=normalized,
            eps=1e-20 if normalized else 0.0,
            scale=hf["routed_scaling_factor"],
        ),
        activation=activation,
    )
    return LayerConfig(mixer=mixer, ffn=experts, norm=norm)


MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    description=MiMo(),
    names=in_layers(attention__sinks="self_attn.attention_sink_bias"),
    unread=r"model\.mtp\.",  # layers that guess further tokens
)
