"""Tiny models of latent attention: their config dicts, and the tensors of their files.

Between them: queries with a latent of their own and without; three, five and six heads, which two
devices divide or not; interleaved rope and halves; YaRN with scores that are multiplied and queries
that grow with their position; first layers with an MLP, groups of experts, some of whose scores are
equal; experts one by one and stacked in the file; the text part of a model of images. And indexers
that choose 8 tokens, in every layer with halves or in some with interleaved rope, in no order of
layers with an MLP or experts.
"""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mistral4")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "num_hidden_layers": 3,
        "num_key_value_heads": fields["num_attention_heads"],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return base | fields


def _deepseek(**fields: Any) -> dict[str, Any]:
    return _config("deepseek_v3", "DeepseekV3ForCausalLM", **fields)


GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
}
MISTRAL4: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "rope_parameters": {
        **YARN,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    },
}
LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v3_h4_l32_groups": _deepseek(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        **GROUPS,
        rope_theta=10000.0,
        rope_scaling={  # as its files spell it, with a factor on cos and sin
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 3,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        eos_token_id=159,
    ),
    "deepseek_v3_h3_l40_halves_tied": _deepseek(
        vocab_size=151,
        hidden_size=56,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=3,
        q_lora_rank=None,
        kv_lora_rank=40,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=0,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        **(GROUPS | {"n_group": 1, "topk_group": 1, "n_shared_experts": 2}),
        rope_interleave=False,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,  # which latents do not take
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        eos_token_id=[150, 149],
    ),
    "deepseek_v3_h6_tied_groups": _deepseek(
        vocab_size=144,
        hidden_size=64,
        intermediate_size=80,
        num_attention_heads=6,
        q_lora_rank=32,
        kv_lora_rank=64,
        qk_nope_head_dim=8,
        qk_rope_head_dim=32,
        v_head_dim=40,
        first_k_dense_replace=2,
        attention_bias=True,
        routed_scaling_factor=1.5,
        **GROUPS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=143,
    ),
    "glm4_moe_lite_h5_l48": _config(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        vocab_size=160,
        hidden_size=80,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=5,
        q_lora_rank=24,
        kv_lora_rank=48,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=32,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        routed_scaling_factor=1.8,
        **(GROUPS | {"n_group": 1, "topk_group": 1}),
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        eos_token_id=[159, 158],
    ),
    "deepseek_v32_h4_l32_top8": _config(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        index_topk=8,
        index_n_heads=16,
        index_head_dim=20,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        **GROUPS,
        rope_theta=10000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        eos_token_id=159,
    ),
    "glm_moe_dsa_h6_l24_shared": _config(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        vocab_size=160,
        hidden_size=80,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_topk=12,
        index_n_heads=12,
        index_head_dim=32,
        indexer_types=["full", "shared", "full", "shared"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        routed_scaling_factor=2.5,
        **(GROUPS | {"n_group": 1, "topk_group": 1}),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        eos_token_id=[159, 158],
    ),
    "mistral4_h4_l24": _config(
        "mistral4",
        "Mistral4ForCausalLM",
        **MISTRAL4,
        routed_scaling_factor=1.5,
        eos_token_id=159,
    ),
    "mistral4_images": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "eos_token_id": 159,
        "text_config": _config("mistral4", "Mistral4ForCausalLM", **MISTRAL4),
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
    },
}


def with_latents(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of plain attention, with latent attention in its place."""
    if config["model_type"] not in FAMILIES:
        return dict(shapes)
    made = {name: shape for name, shape in shapes.items() if ".self_attn." not in name}
    for i in range(config["num_hidden_layers"]):
        attention = f"model.layers.{i}.self_attn."
        made |= {attention + name: shape for name, shape in attention_shapes(config).items()}
        if "index_topk" in config and config.get("indexer_types", ["full"] * (i + 1))[i] == "full":
            made |= {attention + name: shape for name, shape in indexer_shapes(config).items()}
    return made


def attention_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's attention, as files have them."""
    e, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    content, value = config["qk_nope_head_dim"], config["v_head_dim"]
    query, width = config["q_lora_rank"], heads * (content + rotated)
    shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (width, e)}
    if query is not None:
        shapes = {"q_a_proj.weight": (query, e), "q_b_proj.weight": (width, query)}
        shapes["q_a_layernorm.weight"] = (query,)
    shapes["kv_a_proj_with_mqa.weight"] = (latent + rotated, e)
    shapes["kv_a_layernorm.weight"] = (latent,)
    shapes["kv_b_proj.weight"] = (heads * (content + value), latent)
    shapes["o_proj.weight"] = (e, heads * value)
    if config.get("attention_bias"):
        shapes |= {"kv_a_proj_with_mqa.bias": (latent + rotated,), "o_proj.bias": (e,)}
        if query is not None:
            shapes["q_a_proj.bias"] = (query,)
    return shapes


def indexer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's indexer."""
    e, heads, width = (config[key] for key in ("hidden_size", "index_n_heads", "index_head_dim"))
    shapes: dict[str, tuple[int, ...]] = {"wq_b.weight": (heads * width, config["q_lora_rank"])}
    shapes |= {"wk.weight": (width, e), "k_norm.weight": (width,), "k_norm.bias": (width,)}
    shapes["weights_proj.weight"] = (heads, e)
    return {f"indexer.{name}": shape for name, shape in shapes.items()}
