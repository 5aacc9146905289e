"""Tiny random models that transformers' answers are stored for: Hugging Face config dicts, nothing
but data.

Between them: GQA ratios 1, 2, 4, 7; head_dim 32, 64, 80, 128; tied and untied embeddings; YaRN,
llama3, linear and long rope scaling, rope of another base in layers with a window, on part of a
head, and in some layers alone; sliding windows on all layers, on some by `layer_types` and by
`max_window_layers`; every bias, soft cap and multiplier there is; config.json's old spelling
(`rope_theta`, `rope_scaling`, head_dim left out) and its new one (`rope_parameters`). Widths are
odd on purpose: a swapped pair of dimensions must not fit.
"""

from typing import Any


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return base | fields


def _qwen3(**fields: Any) -> dict[str, Any]:
    return _config("qwen3", "Qwen3ForCausalLM", **fields)


def _qwen2(**fields: Any) -> dict[str, Any]:
    return _config("qwen2", "Qwen2ForCausalLM", **fields)


def _llama(**fields: Any) -> dict[str, Any]:
    return _config("llama", "LlamaForCausalLM", **fields)


def _mistral(**fields: Any) -> dict[str, Any]:
    return _config("mistral", "MistralForCausalLM", **fields)


def _phi3(**fields: Any) -> dict[str, Any]:
    return _config("phi3", "Phi3ForCausalLM", **({"pad_token_id": 0} | fields))


def _smollm3(**fields: Any) -> dict[str, Any]:
    return _config("smollm3", "SmolLM3ForCausalLM", **({"pad_token_id": 0} | fields))


def _granite(**fields: Any) -> dict[str, Any]:
    return _config("granite", "GraniteForCausalLM", **fields)


def _olmo2(**fields: Any) -> dict[str, Any]:
    return _config("olmo2", "Olmo2ForCausalLM", **fields)


def _olmo3(**fields: Any) -> dict[str, Any]:
    return _config("olmo3", "Olmo3ForCausalLM", **fields)


def _qwen3_moe(**fields: Any) -> dict[str, Any]:
    return _config("qwen3_moe", "Qwen3MoeForCausalLM", **fields)


def _qwen2_moe(**fields: Any) -> dict[str, Any]:
    return _config("qwen2_moe", "Qwen2MoeForCausalLM", **fields)


def _mixtral(**fields: Any) -> dict[str, Any]:
    return _config("mixtral", "MixtralForCausalLM", **fields)


def _gpt_oss(**fields: Any) -> dict[str, Any]:
    return _config("gpt_oss", "GptOssForCausalLM", **fields)


def _gemma(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    tied = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    return _config(model_type, architecture, **(tied | fields))


def _gemma4(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    scalars = {"vocab_size_per_layer_input": fields["vocab_size"], "hidden_size_per_layer_input": 0}
    base = {"attention_k_eq_v": True, "final_logit_softcapping": 20.0, "pad_token_id": 0}
    if model_type == "gemma4_unified_text":
        scalars = {}
    return _gemma(model_type, architecture, **(base | scalars | fields))


WINDOW, FULL = "sliding_attention", "full_attention"

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_g2_d32_tied": _qwen3(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        rope_theta=1000000.0,
        eos_token_id=159,
    ),
    "qwen3_g7_d80": _qwen3(
        vocab_size=151,
        hidden_size=88,
        intermediate_size=120,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=80,
        rms_norm_eps=0.01,  # large enough to show
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=[150, 149],
    ),
    "qwen3_g4_d128_yarn_tied": _qwen3(
        vocab_size=160,
        hidden_size=96,
        intermediate_size=80,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        rope_theta=10000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        eos_token_id=159,
    ),
    "qwen3_g1_d64_bias_window": _qwen3(
        vocab_size=144,
        hidden_size=56,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        eos_token_id=143,
    ),
    "qwen2_g7_d32_tied": _qwen2(
        vocab_size=160,
        hidden_size=224,
        intermediate_size=136,
        num_attention_heads=7,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=8,  # off, as in Qwen2.5's files
        max_window_layers=1,
        rope_theta=1000000.0,
        eos_token_id=159,
    ),
    "qwen2_g2_d64_window_mix": _qwen2(
        vocab_size=147,
        hidden_size=256,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=[146],
    ),
    "qwen2_g4_d80_yarn": _qwen2(
        vocab_size=160,
        hidden_size=320,
        intermediate_size=88,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.1,
            "beta_fast": 3.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
        eos_token_id=159,
    ),
    "llama_g4_d64_llama3": _llama(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        eos_token_id=[159, 158, 157],
    ),
    "llama_g2_d32_llama3_tied": _llama(
        vocab_size=155,
        hidden_size=128,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 6.0,
            "original_max_position_embeddings": 40,
        },
        eos_token_id=154,
    ),
    "llama_g1_d128_bias": _llama(
        vocab_size=160,
        hidden_size=90,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        attention_bias=True,
        rope_theta=10000.0,
        eos_token_id=159,
    ),
    "llama_g7_d80_linear_tied": _llama(
        vocab_size=160,
        hidden_size=84,
        intermediate_size=112,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=80,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
        eos_token_id=159,
    ),
    "mistral_g4_d128_window": _mistral(
        vocab_size=160,
        hidden_size=88,
        intermediate_size=120,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        sliding_window=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        eos_token_id=159,
    ),
    "mistral_g1_d80_tied": _mistral(
        vocab_size=149,
        hidden_size=76,
        intermediate_size=104,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=80,
        sliding_window=None,
        tie_word_embeddings=True,
        rope_theta=1000000.0,
        eos_token_id=148,
    ),
    "mistral_g7_d32_window_yarn": _mistral(
        vocab_size=160,
        hidden_size=224,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=7,
        num_key_value_heads=1,
        sliding_window=24,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },  # beta_fast counts
        eos_token_id=159,
    ),
    "llama_g2_d64_mlp_bias": _llama(
        vocab_size=160,
        hidden_size=80,
        intermediate_size=104,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mlp_bias=True,
        rope_theta=10000.0,
        eos_token_id=159,
    ),
    "gemma3_g2_d32_linear": _gemma(
        "gemma3_text",
        "Gemma3ForCausalLM",
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=16,
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        eos_token_id=[159, 106],
    ),
    "gemma3_g4_d80_capped": _gemma(
        "gemma3_text",
        "Gemma3ForCausalLM",
        vocab_size=151,
        hidden_size=88,
        intermediate_size=96,
        num_hidden_layers=6,  # the last of which has no window, by default
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=80,
        query_pre_attn_scalar=80,
        sliding_window=21,
        final_logit_softcapping=12.0,
        attn_logit_softcapping=1.0,  # which Gemma 3 does not read
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
        eos_token_id=150,
    ),
    "gemma2_g2_d64_capped": _gemma(
        "gemma2",
        "Gemma2ForCausalLM",
        vocab_size=160,
        hidden_size=72,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=20,
        sliding_window=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=10.0,
        rope_theta=10000.0,
        eos_token_id=159,
    ),
    "gemma2_g1_d32_bias": _gemma(
        "gemma2",
        "Gemma2ForCausalLM",
        vocab_size=144,
        hidden_size=66,
        intermediate_size=80,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        attention_bias=True,
        query_pre_attn_scalar=32,
        sliding_window=4096,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        eos_token_id=143,
    ),
    "gemma4_k2_d32_k1_d64": _gemma4(  # as 12B and 31B: unequal D and K, keys as values
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=1,
        sliding_window=16,
        layer_types=[WINDOW, FULL, WINDOW, FULL],
        use_bidirectional_attention="vision",
        eos_token_id=[159, 106],
    ),
    "gemma4_k3_d64_bias": _gemma4(  # values of their own in every layer
        "gemma4_text",
        "Gemma4ForCausalLM",
        vocab_size=151,
        hidden_size=80,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        global_head_dim=32,
        attention_k_eq_v=False,
        attention_bias=True,
        sliding_window=21,
        layer_types=[WINDOW, WINDOW, FULL],
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        rope_parameters={
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 50000.0,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
            },
            WINDOW: {"rope_type": "default", "rope_theta": 20000.0},
        },
        eos_token_id=150,
    ),
    "gemma4_experts": _gemma4(  # as 26B-A4B: an MLP and experts side by side
        "gemma4_text",
        "Gemma4ForCausalLM",
        vocab_size=160,
        hidden_size=72,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=40,
        sliding_window=16,
        layer_types=[WINDOW, WINDOW, FULL],
        eos_token_id=159,
    ),
    "gemma4_shared_keys": _gemma4(  # as E2B: layers that read others' keys, per-layer embeddings
        "gemma4_text",
        "Gemma4ForCausalLM",
        vocab_size=155,
        hidden_size=64,
        intermediate_size=72,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        attention_k_eq_v=False,
        hidden_size_per_layer_input=24,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        sliding_window=16,
        layer_types=[WINDOW, FULL, WINDOW, FULL, WINDOW, WINDOW, FULL],
        eos_token_id=154,
    ),
    "phi3_g1_d64_window": _phi3(
        vocab_size=160,
        hidden_size=192,
        intermediate_size=104,
        num_attention_heads=3,
        num_key_value_heads=3,
        sliding_window=21,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        eos_token_id=[159, 158],
    ),
    "phi3_g2_d64_longrope_tied": _phi3(
        vocab_size=160,
        hidden_size=256,
        intermediate_size=120,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        rope_theta=10000.0,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0 + i / 20 for i in range(24)],
            "long_factor": [1.0 + i * i / 10 for i in range(24)],
        },
        eos_token_id=159,
    ),
    "smollm3_g4_d64_nope_tied": _smollm3(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=4,  # the last of which has no rope, by default
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
        rope_theta=50000.0,
        eos_token_id=159,
    ),
    "smollm3_g2_d32_bias_window": _smollm3(
        vocab_size=149,
        hidden_size=128,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=16,
        rope_theta=2000000.0,
        eos_token_id=148,
    ),
    "granite_g2_d32_tied": _granite(
        vocab_size=160,
        hidden_size=128,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        embedding_multiplier=0.3,
        attention_multiplier=0.25,
        residual_multiplier=1.5,
        logits_scaling=1.5,
        rope_theta=10000.0,
        eos_token_id=159,
    ),
    "granite_g4_d80_bias": _granite(
        vocab_size=151,
        hidden_size=320,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=12.0,
        attention_multiplier=0.1,
        residual_multiplier=3.0,
        logits_scaling=0.8,
        rope_theta=10000000.0,
        eos_token_id=150,
    ),
    "olmo2_g1_d64": _olmo2(
        vocab_size=160,
        hidden_size=192,
        intermediate_size=104,
        num_attention_heads=3,
        num_key_value_heads=3,
        rope_theta=500000.0,
        eos_token_id=159,
    ),
    "olmo2_g4_d32_bias": _olmo2(
        vocab_size=155,
        hidden_size=256,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        attention_bias=True,
        rope_theta=10000.0,
        eos_token_id=154,
    ),
    "olmo3_g2_d64_window_yarn": _olmo3(
        vocab_size=160,
        hidden_size=256,
        intermediate_size=104,
        num_hidden_layers=4,  # the last of which has no window, by default
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        eos_token_id=159,
    ),
    "qwen3_moe_g2_d32_normed": _qwen3_moe(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        rope_theta=1000000.0,
        eos_token_id=159,
    ),
    "qwen3_moe_g4_d64_window": _qwen3_moe(
        vocab_size=151,
        hidden_size=80,
        intermediate_size=88,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        attention_bias=True,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=56,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=21,
        rope_theta=10000.0,
        eos_token_id=150,
    ),
    "qwen2_moe_g2_d32_shared": _qwen2_moe(
        vocab_size=160,
        hidden_size=128,
        intermediate_size=104,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=56,
        norm_topk_prob=False,
        rope_theta=1000000.0,
        eos_token_id=159,
    ),
    "qwen2_moe_g1_d64_window": _qwen2_moe(
        vocab_size=147,
        hidden_size=192,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        qkv_bias=False,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_theta=10000.0,
        eos_token_id=146,
    ),
    "mixtral_g2_d64": _mixtral(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        eos_token_id=159,
    ),
    "mixtral_g4_d32_window_tied": _mixtral(
        vocab_size=155,
        hidden_size=128,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        eos_token_id=154,
    ),
    "gpt_oss_g2_d32_yarn": _gpt_oss(  # sizes in whole blocks of mxfp4
        vocab_size=160,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=3,  # windows in the first and the last, by default
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=16,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
        eos_token_id=[159, 158],
    ),
    "gpt_oss_g4_d64": _gpt_oss(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=21,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=150,
    ),
}

# One of each family, whose answers with other weights are stored too (seeds.npz).
SEEDED = (
    "gemma2_g2_d64_capped",
    "gemma3_g2_d32_linear",
    "gpt_oss_g4_d64",
    "granite_g2_d32_tied",
    "llama_g2_d32_llama3_tied",
    "mistral_g7_d32_window_yarn",
    "mixtral_g4_d32_window_tied",
    "olmo2_g4_d32_bias",
    "olmo3_g2_d64_window_yarn",
    "phi3_g2_d64_longrope_tied",
    "qwen2_g2_d64_window_mix",
    "qwen2_moe_g2_d32_shared",
    "qwen3_g2_d32_tied",
    "qwen3_moe_g4_d64_window",
    "smollm3_g4_d64_nope_tied",
)
SEEDS = (1, 2)
