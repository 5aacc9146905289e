"""Tiny models with the gated delta rule: their config dicts, and the tensors that they have where
other families have attention.

Between them: one, two and three value heads a key head; keys and values of different widths; 3 and
4 taps; layers of the rule first, last and between; tied and untied embeddings; mixtures with dense
layers; rope on a part of a head and none at all.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

LINEAR, FULL = "linear_attention", "full_attention"
GATED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # whose norms are 1 + weight, too
FAMILIES = (*GATED, "olmo_hybrid")
OLMO_NORMS = {  # of layers with the rule, which come before and not after
    "post_attention_layernorm": "attention_layer_norm",
    "post_feedforward_layernorm": "feedforward_layer_norm",
}


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "linear_conv_kernel_dim": 4,
        "num_hidden_layers": len(fields["layer_types"]),
    }
    return base | fields


def _rope(theta: float, **fields: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25}
    return {"rope_parameters": rope | fields}


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_h2x3_c16_y24": _config(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        layer_types=[LINEAR, LINEAR, FULL, LINEAR],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        **_rope(1e7, mrope_section=[2, 1, 1], mrope_interleaved=True),
        eos_token_id=159,
    ),
    "qwen3_5_h3x1_c32_y16_tied": _config(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        vocab_size=151,
        hidden_size=88,
        intermediate_size=72,
        layer_types=[FULL, LINEAR, LINEAR],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        attention_bias=True,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=3,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,  # large enough to show
        **_rope(10000.0),
        eos_token_id=[150, 149],
    ),
    "qwen3_5_moe_h2x2_c16_y32": {  # with images, which are never used
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "eos_token_id": 143,
        "text_config": _config(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            vocab_size=144,
            hidden_size=56,
            layer_types=[LINEAR, FULL, LINEAR],
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            shared_expert_intermediate_size=24,
            **_rope(10000.0, mrope_section=[2, 1, 1], mrope_interleaved=True),
        ),
        "vision_config": {
            "model_type": "qwen3_5_moe_vision",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 56,
            "num_position_embeddings": 16,
        },
    },
    "qwen3_next_h4x2_c24_y16": _config(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        vocab_size=160,
        hidden_size=64,
        intermediate_size=88,
        layer_types=[LINEAR, LINEAR, FULL, LINEAR],
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=24,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        **_rope(1e6),
        eos_token_id=159,
    ),
    "olmo_hybrid_h3x1_c16_y40": _config(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        vocab_size=151,
        hidden_size=96,
        intermediate_size=72,
        layer_types=[LINEAR, FULL, LINEAR],
        num_attention_heads=3,
        num_key_value_heads=3,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=16,
        linear_value_head_dim=40,
        pad_token_id=0,
        rope_parameters=None,
        eos_token_id=150,
    ),
    "olmo_hybrid_h2x2_c24_y16_rope": _config(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        vocab_size=160,
        hidden_size=64,
        intermediate_size=104,
        layer_types=[LINEAR, LINEAR, FULL],
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=16,
        linear_allow_neg_eigval=False,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        eos_token_id=159,
    ),
}


def is_linear(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has the gated delta rule."""
    return config["model_type"] in FAMILIES and config["layer_types"][layer] == LINEAR


def with_delta(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of attention alone, with gates and the gated delta rule."""
    if config["model_type"] not in FAMILIES:
        return dict(shapes)
    made: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        _, _, rest = name.partition("model.layers.")
        number, _, short = rest.partition(".")
        if rest and is_linear(config, int(number)) and short.startswith("self_attn."):
            if short == "self_attn.q_proj.weight":
                layer = f"model.layers.{number}.linear_attn."
                made |= {layer + key: size for key, size in delta_shapes(config).items()}
            continue
        if config["model_type"] == "olmo_hybrid" and rest and is_linear(config, int(number)):
            for ours, theirs in OLMO_NORMS.items():
                name = name.replace(ours, theirs)
        if config["model_type"] in GATED and short.startswith("self_attn.q_proj."):
            shape = (2 * shape[0], *shape[1:])
        made[name] = shape
    return made


def delta_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's gated delta rule, as files have them."""
    e, taps = config["hidden_size"], config["linear_conv_kernel_dim"]
    values = config["linear_num_value_heads"]
    keys_width = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values_width = values * config["linear_value_head_dim"]
    channels = 2 * keys_width + values_width
    shapes: dict[str, tuple[int, ...]] = {"A_log": (values,), "dt_bias": (values,)}
    if config["model_type"] == "olmo_hybrid":
        widths = {"q": keys_width, "k": keys_width, "v": values_width}
        shapes |= {f"{x}_proj.weight": (width, e) for x, width in widths.items()}
        shapes |= {f"{x}_conv1d.weight": (width, 1, taps) for x, width in widths.items()}
        shapes |= {f"{x}_proj.weight": (values, e) for x in "ab"}
        shapes |= {"g_proj.weight": (values_width, e), "o_proj.weight": (e, values_width)}
        return shapes | {"o_norm.weight": (config["linear_value_head_dim"],)}
    shapes |= {"conv1d.weight": (channels, 1, taps), "out_proj.weight": (e, values_width)}
    shapes["norm.weight"] = (config["linear_value_head_dim"],)
    if config["model_type"] == "qwen3_next":
        in_out = {"in_proj_qkvz": channels + values_width, "in_proj_ba": 2 * values}
    else:
        in_out = {"in_proj_qkv": channels, "in_proj_z": values_width}
        in_out |= {"in_proj_b": values, "in_proj_a": values}
    return shapes | {f"{name}.weight": (width, e) for name, width in in_out.items()}


def scaled(key: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | None:
    """Values of a parameter that only these families have, or have in another form; None: as in
    other families.
    """
    if config["model_type"] not in FAMILIES:
        return None
    if key.endswith("A_log"):
        return x - 2.0  # some heads remember a few tokens, others hundreds
    if "conv1d" in key:
        return x * (1.5 / np.sqrt(x.shape[-1]))
    if key.endswith(("linear_attn.norm.weight", "linear_attn.o_norm.weight", "layer_norm.weight")):
        return 1.0 + 0.25 * x
    if key.endswith("norm.weight") and config["model_type"] in GATED:
        mean = 0.3 if key.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
        return mean + 0.25 * x
    if config["tie_word_embeddings"] and key.endswith("out_proj.weight"):
        return x * (2.0 / np.sqrt(x.shape[1]))
    return None
