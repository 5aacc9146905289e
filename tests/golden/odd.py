"""Odd relatives of the tiny models: what real files rarely have and config.json allows.

Between them: three KV heads, which two devices do not divide; head dims that are no power of two;
windows shorter than a block; first dense layers, steps between experts and one expert a token;
groups of a router whose scores are equal, in every family that has groups; biases where others
have none and none where others have some; one key head for three value heads; taps of 2. Their
answers are stored with those of other weights (seeds.npz).
"""

from typing import Any

from tests.golden.configs import CONFIGS, FULL, WINDOW
from tests.golden.hybrids import LINEAR
from tests.golden.short_convs import CONV


def _like(name: str, **fields: Any) -> dict[str, Any]:
    """Return the config of a name with other values, of its text part where it has one."""
    raw = CONFIGS[name]
    if "text_config" not in raw:
        return raw | fields
    shared = {key: fields.pop(key) for key in ("tie_word_embeddings",) if key in fields}
    return raw | shared | {"text_config": raw["text_config"] | fields}


ODD: dict[str, dict[str, Any]] = {
    "ministral3_k3_d48_window5": _like(
        "ministral3_g4_d64_mscale_tied",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=48,
        sliding_window=5,
        tie_word_embeddings=False,
    ),
    "mistral3_k3_window5": _like(
        "mistral3_g2_d32", num_attention_heads=3, num_key_value_heads=3, sliding_window=5
    ),
    "glm4_k3_d48": _like(
        "glm4_g4_d32",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=48,
        attention_bias=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
    ),
    "seed_oss_k3_tied": _like(
        "seed_oss_g2_d32",
        num_attention_heads=3,
        num_key_value_heads=3,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
    ),
    "exaone4_k3_window5": _like(
        "exaone4_g2_d32_window",
        hidden_size=144,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        sliding_window=5,
        layer_types=[WINDOW, WINDOW, FULL],
    ),
    "exaone4_without_window": _like(
        "exaone4_g2_d32_window",
        sliding_window=None,
        sliding_window_pattern=None,
        layer_types=[FULL] * 3,
    ),
    "internlm3_k1_plain": _like(
        "internlm3_g1_d32_bias",
        num_attention_heads=4,
        num_key_value_heads=1,
        bias=False,
        qkv_bias=False,
    ),
    "ernie4_5_k3_d48": _like(
        "ernie4_5_g2_d32_bias_tied",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=48,
        use_bias=False,
        tie_word_embeddings=False,
    ),
    "ernie4_5_moe_k3_one_expert": _like(
        "ernie4_5_moe_g4_d32",
        hidden_size=96,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_hidden_layers=3,
        moe_k=1,
        moe_num_shared_experts=0,
        moe_layer_start_index=2,
        moe_layer_interval=1,
        moe_norm_min=1e-12,
    ),
    "hunyuan_k3_d24": _like(
        "hunyuan_g2_d32_alpha", num_attention_heads=6, num_key_value_heads=3, head_dim=24
    ),
    "qwen2_5_vl_k1": _like("qwen2_5_vl_g2_d32", num_key_value_heads=1),
    "qwen3_vl_k3_d24": _like(
        "qwen3_vl_g4_d32_tied",
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=24,
        rope_scaling={
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [4, 4, 4],
        },
    ),
    "qwen3_vl_moe_k3_every_other": _like(
        "qwen3_vl_moe_g2_d32",
        num_attention_heads=3,
        num_key_value_heads=3,
        num_hidden_layers=3,
        num_experts_per_tok=1,
        mlp_only_layers=[],
        decoder_sparse_step=2,
    ),
    "glm4_moe_k3_tied_groups": _like(
        "glm4_moe_g4_d32_groups",
        num_attention_heads=3,
        num_key_value_heads=3,
        use_qk_norm=False,
        attention_bias=False,
        first_k_dense_replace=2,
        num_experts_per_tok=4,
    ),
    "solar_open_tied_groups": _like(
        "solar_open_g1_d32",
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        attention_bias=False,
    ),
    "minimax_m2_k3_one_expert": _like(
        "minimax_m2_g2_d32",
        num_attention_heads=3,
        num_key_value_heads=3,
        rotary_dim=32,
        num_experts_per_tok=1,
    ),
    "gemma4_k3_window5": _like(
        "gemma4_k2_d32_k1_d64",
        num_attention_heads=6,
        num_key_value_heads=3,
        num_global_key_value_heads=2,
        global_head_dim=48,
        sliding_window=5,
        layer_types=[FULL, WINDOW, WINDOW, FULL],
    ),
    "gemma4_experts_k3_one": _like(
        "gemma4_experts",
        num_attention_heads=6,
        num_key_value_heads=3,
        num_global_key_value_heads=3,
        attention_k_eq_v=False,
        top_k_experts=1,
        sliding_window=5,
    ),
    "gemma4_shared_most": _like(
        "gemma4_shared_keys",
        num_hidden_layers=6,
        num_kv_shared_layers=4,
        use_double_wide_mlp=False,
        hidden_size_per_layer_input=8,
        sliding_window=5,
        layer_types=[WINDOW, FULL, FULL, WINDOW, WINDOW, FULL],
    ),
    "mimo_tied_groups_window5": _like(
        "mimo_d48_v32",
        v_head_dim=24,
        sliding_window=5,
        num_key_value_heads=2,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "mimo_k3_d32_v48": _like(
        "mimo_d64_v32_bias",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        v_head_dim=48,
        layer_types=[FULL, WINDOW],
    ),
    "qwen3_5_h1x3_c8_y40": _like(
        "qwen3_5_h2x3_c16_y24",
        layer_types=[LINEAR, FULL, FULL, LINEAR],
        num_attention_heads=3,
        num_key_value_heads=3,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        linear_key_head_dim=8,
        linear_value_head_dim=40,
        linear_conv_kernel_dim=2,
    ),
    "qwen3_5_moe_h1x2_one_expert": _like(
        "qwen3_5_moe_h2x2_c16_y32",
        layer_types=[FULL, LINEAR, LINEAR],
        num_key_value_heads=3,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts_per_tok=1,
    ),
    "qwen3_next_h3x1_every_other": _like(
        "qwen3_next_h4x2_c24_y16",
        num_attention_heads=6,
        num_key_value_heads=3,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_conv_kernel_dim=2,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[],
    ),
    "olmo_hybrid_h1x3_k3": _like(
        "olmo_hybrid_h3x1_c16_y40",
        num_attention_heads=6,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        linear_key_head_dim=24,
        linear_value_head_dim=8,
        layer_types=[FULL, LINEAR, LINEAR],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "lfm2_k3_w2": _like(
        "lfm2_c96_w3",
        num_attention_heads=6,
        num_key_value_heads=3,
        conv_L_cache=2,
        layer_types=[FULL, CONV, CONV, FULL],
        conv_bias=True,
    ),
    "lfm2_moe_k1_w4_one_expert": _like(
        "lfm2_moe_c80_w3",
        num_key_value_heads=1,
        num_dense_layers=2,
        num_experts_per_tok=1,
        conv_L_cache=4,
        norm_topk_prob=False,
        layer_types=[CONV, CONV, FULL, CONV],
    ),
}
