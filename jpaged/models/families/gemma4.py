"""Gemma 4, the text models: E2B, E4B, 12B (unified), 26B-A4B and 31B."""

from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.by_kind import FULL, WINDOW, layer_kinds, read_rope, write_kinds
from jpaged.models.families.family import Family, StackedExperts, in_layers
from jpaged.models.families.switches import ACTIVATIONS
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.norm import NormConfig
from jpaged.models.layers.parallel_ffn import ParallelFFNConfig
from jpaged.models.layers.per_layer import PerLayerConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.models.vision.gemma4 import Gemma4VisionConfig
from jpaged.models.vision.unified import UnifiedVisionConfig


class Gemma4:
    """The `Family.description` of these models: layers with a window and layers without one differ
    in width and number of KV heads, and the last num_kv_shared_layers read the keys and values of
    the last layer of their kind before them.
    """

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        kinds, shared = layer_kinds(hf), hf["num_kv_shared_layers"] or 0
        first_shared = len(kinds) - shared
        sources = {kind: i for i, kind in enumerate(kinds[:first_shared])}
        if lost := set(kinds[first_shared:]) - set(sources):
            raise ConfigError(
                f"num_kv_shared_layers={shared}: no layer of {min(lost)} keeps its own keys"
            )
        layers = tuple(
            _layer(hf, i, None if i < first_shared else sources[kind])
            for i, kind in enumerate(kinds)
        )
        return {
            "layers": layers,
            "scaled_embedding": True,
            "final_logit_softcapping": hf["final_logit_softcapping"],
        }

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        layers: tuple[LayerConfig, ...] = config.layers
        mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig)]
        by_kind: dict[str, AttentionConfig] = {}
        for mixer in mixers:
            by_kind.setdefault(FULL if mixer.window is None else WINDOW, mixer)
        full, local = by_kind[FULL], by_kind.get(WINDOW, by_kind[FULL])
        mlps = [layer.ffns[0] for layer in layers]
        assert isinstance(mlps[0], MLPConfig)
        per_layer, shared = (
            layers[0].per_layer,
            sum(mixer.keys_of is not None for mixer in mixers),
        )
        return {
            **write_kinds(layers, config.max_position_embeddings),
            "num_hidden_layers": len(layers),
            "num_attention_heads": local.num_heads,
            "num_key_value_heads": local.num_kv_heads,
            "head_dim": local.head_dim,
            "global_head_dim": full.head_dim,
            "num_global_key_value_heads": full.num_kv_heads,
            "per_layer_config": {
                str(i): {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
                for i, mixer in enumerate(mixers)
                if mixer.window is None
            },
            "attention_k_eq_v": full.value_is_key,
            "attention_bias": full.qkv_bias,
            "rms_norm_eps": layers[0].norm.eps,
            "intermediate_size": mlps[0].intermediate_size,
            "hidden_activation": {v: k for k, v in ACTIVATIONS.items()}[mlps[0].activation],
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": mlps[-1] != mlps[0],
            "final_logit_softcapping": config.final_logit_softcapping,
            "vocab_size_per_layer_input": config.vocab_size,
            "hidden_size_per_layer_input": 0 if per_layer is None else per_layer.size,
            "use_bidirectional_attention": "vision" if config.sees_images else None,
            **_write_experts(layers[0]),
        }


def _layer(hf: dict[str, Any], i: int, keys_of: int | None) -> LayerConfig:
    """Return the i-th layer. keys_of: as of AttentionConfig."""
    kind, norm = hf["layer_types"][i], NormConfig(eps=hf["rms_norm_eps"], in_f32=True)
    special = _special(hf).get(i, {})
    if unknown := set(special) - {"head_dim", "num_key_value_heads"}:
        raise ConfigError(f"per_layer_config of layer {i}: {min(unknown)!r} is not supported")
    head_dim = special.get("head_dim", hf["head_dim"])
    activation = hf["hidden_activation"]
    if activation not in ACTIVATIONS:
        built = ", ".join(ACTIVATIONS)
        raise ConfigError(f"hidden_activation={activation!r} is not supported ({built} are)")
    mixer = AttentionConfig(
        num_heads=hf["num_attention_heads"],
        num_kv_heads=special.get("num_key_value_heads", hf["num_key_value_heads"]),
        head_dim=head_dim,
        window=hf["sliding_window"] if kind == WINDOW else None,
        rope=read_rope(hf, kind, head_dim),
        multiplier=1.0,
        qkv_bias=bool(hf["attention_bias"]),
        out_bias=bool(hf["attention_bias"]),
        qk_norm="head",
        norm=norm,
        value_is_key=bool(hf["attention_k_eq_v"]) and kind == FULL and keys_of is None,
        value_norm=keys_of is None,
        keys_of=keys_of,
        sees_images=kind == WINDOW and hf["use_bidirectional_attention"] == "vision",
    )
    is_double = keys_of is not None and hf["use_double_wide_mlp"]
    mlp = MLPConfig(
        intermediate_size=hf["intermediate_size"] * (2 if is_double else 1),
        activation=ACTIVATIONS[activation],
    )
    ffn, per_layer = mlp, None
    if hf.get("enable_moe_block"):
        experts = ExpertsConfig(
            num_experts=hf["num_experts"],
            experts_per_token=hf["top_k_experts"],
            expert_size=hf["moe_intermediate_size"],
            router=RouterConfig(normalized=True, norm=norm, has_expert_scales=True),
            activation=mlp.activation,
        )
        ffn = ParallelFFNConfig(mlp=mlp, experts=experts, norm=norm)
    if size := hf.get("hidden_size_per_layer_input"):
        if hf["vocab_size_per_layer_input"] != hf["vocab_size"]:
            raise ConfigError(
                f"vocab_size_per_layer_input={hf['vocab_size_per_layer_input']}: only that of "
                f"vocab_size={hf['vocab_size']} is supported"
            )
        per_layer = PerLayerConfig(size=size, activation=mlp.activation, norm=norm)
    return LayerConfig(
        mixer=mixer, ffn=ffn, norms="both", norm=norm, per_layer=per_layer, has_scalar=True
    )


def _special(hf: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return what differs from the other layers in some layers, by their numbers."""
    if "per_layer_config" in hf:  # its keys are padded with zeros: "05", "11"
        return {int(index): fields for index, fields in hf["per_layer_config"].items()}
    # transformers before 5.20 names two numbers of all full layers.
    fields = {"head_dim": hf["global_head_dim"]}
    if hf["attention_k_eq_v"]:
        fields["num_key_value_heads"] = hf["num_global_key_value_heads"]
    fields = {name: value for name, value in fields.items() if value is not None}
    return {i: fields for i, kind in enumerate(hf["layer_types"]) if kind == FULL}


def _write_experts(layer: LayerConfig) -> dict[str, Any]:
    if not isinstance(layer.ffn, ParallelFFNConfig):
        return {"enable_moe_block": False}
    experts = layer.ffn.experts
    return {
        "enable_moe_block": True,
        "num_experts": experts.num_experts,
        "top_k_experts": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_size,
    }


NAMES = in_layers(
    post_norm__scale="pre_feedforward_layernorm.weight", mlp__router="router.proj.weight"
)
GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    description=Gemma4(),
    text_of=("gemma4", "Gemma4ForConditionalGeneration"),
    vision=Gemma4VisionConfig.read,
    names=NAMES,
    stacked_experts=StackedExperts(alternate=False, transposed=False, node="experts"),
)
GEMMA4_UNIFIED = Family(
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    description=Gemma4(),
    text_of=("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"),
    vision=UnifiedVisionConfig.read,
    names=NAMES,
)
