"""Tiny models of Kimi Delta Attention beside latent attention: their config dicts, and the tensors
of their files.

Between them: heads of both kinds in different numbers, three, five and four; 3 and 4 taps; layers
of the rule first and last, or attention first; queries with a latent of their own and without;
decays with a bound and without one; first layers with an MLP and none; groups of experts; what a
config.json says in the keys of files on the Hub, and in transformers'.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

LINEAR, FULL = "linear_attention", "full_attention"
FAMILIES = ("kimi_linear", "bailing_hybrid")


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "num_key_value_heads": fields["num_attention_heads"],
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return base | fields


def _kimi(**fields: Any) -> dict[str, Any]:
    return _config("kimi_linear", "KimiLinearForCausalLM", **fields)


def _ling(**fields: Any) -> dict[str, Any]:
    return _config("bailing_hybrid", "BailingHybridForCausalLM", **fields)


KIMI: dict[str, dict[str, Any]] = {
    "kimi_linear_h3_c16": _kimi(  # as files on the Hub say it
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=5,
        num_attention_heads=5,
        model_max_length=256,
        q_lora_rank=None,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        head_dim=18,
        linear_attn_config={
            "kda_layers": [1, 2, 3, 5],
            "full_attn_layers": [4],
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        mla_use_nope=True,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=1,
        num_expert_group=1,
        topk_group=1,
        moe_intermediate_size=40,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        routed_scaling_factor=2.4,
        rope_theta=10000.0,
        eos_token_id=159,
    ),
    "kimi_linear_h4_c24_groups": _kimi(  # as transformers says it
        vocab_size=144,
        hidden_size=56,
        intermediate_size=88,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        q_lora_rank=32,
        kv_lora_rank=40,
        qk_nope_head_dim=12,
        qk_rope_head_dim=16,
        v_head_dim=16,
        layer_types=[FULL, LINEAR, LINEAR, FULL],
        linear_num_heads=4,
        linear_head_dim=24,
        linear_conv_kernel_dim=3,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        num_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=32,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        rms_norm_eps=0.01,  # large enough to show, but in latents
        eos_token_id=[143, 142],
    ),
    "ling_h4_c16": _ling(  # as files on the Hub say it
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        layer_group_size=3,
        short_conv_kernel_size=4,
        no_kda_lora=True,
        kda_safe_gate=True,
        kda_lower_bound=-5.0,
        gated_attention_proj_granularity_type="head_wise",
        first_k_dense_replace=2,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        score_function="sigmoid",
        routed_scaling_factor=2.5,
        rope_theta=10000.0,
        eos_token_id=159,
    ),
    "ling_h3_c24_no_bound": _ling(
        vocab_size=144,
        hidden_size=56,
        intermediate_size=88,
        num_hidden_layers=4,
        num_attention_heads=3,
        head_dim=24,
        max_position_embeddings=256,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=16,
        v_head_dim=16,
        layer_types=[LINEAR, FULL, FULL, LINEAR],
        short_conv_kernel_size=3,
        kda_safe_gate=False,
        mlp_layer_types=["sparse", "sparse", "dense", "sparse"],
        num_experts=6,
        num_experts_per_tok=2,
        num_shared_experts=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        eos_token_id=[143, 142],
    ),
}


def kimi_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor in the checkpoint of a Hugging Face config."""
    is_ling = config["model_type"] == "bailing_hybrid"
    e, vocab = config["hidden_size"], config["vocab_size"]
    embedding = "word_embeddings" if is_ling else "embed_tokens"
    shapes: dict[str, tuple[int, ...]] = {f"model.{embedding}.weight": (vocab, e)}
    shapes |= {"model.norm.weight": (e,), "lm_head.weight": (vocab, e)}
    for i in range(config["num_hidden_layers"]):
        attention = _delta(config) if is_linear(config, i) else _latents(config)
        node = "attention." if is_ling else "self_attn."
        own = {node + name: shape for name, shape in attention.items()}
        own |= _experts(config) if _is_sparse(config, i) else _mlp("mlp.", config, "intermediate")
        own |= {f"{x}.weight": (e,) for x in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def is_linear(config: Mapping[str, Any], i: int) -> bool:
    """Whether a layer has the gated delta rule."""
    if "layer_types" in config:
        return config["layer_types"][i] == LINEAR
    if "linear_attn_config" in config:  # counted from 1
        return i + 1 in config["linear_attn_config"]["kda_layers"]
    return (i + 1) % config["layer_group_size"] != 0


def _is_sparse(config: Mapping[str, Any], i: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return i >= config["first_k_dense_replace"] if kinds is None else kinds[i] == "sparse"


def _delta(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    e, sizes = config["hidden_size"], config.get("linear_attn_config", {})
    is_ling = config["model_type"] == "bailing_hybrid"
    if is_ling:
        heads, d = config["num_attention_heads"], config["head_dim"]
        taps = config["short_conv_kernel_size"]
    else:
        heads = sizes.get("num_heads", config.get("linear_num_heads"))
        d = sizes.get("head_dim", config.get("linear_head_dim"))
        taps = sizes.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim"))
    shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (heads * d, e) for x in "qkv"}
    shapes |= {f"{x}_conv1d.weight": (heads * d, 1, taps) for x in "qkv"}
    for x in "fg":
        if is_ling:
            shapes[f"{x}_proj.weight"] = (heads * d, e)
        else:
            shapes |= {f"{x}_a_proj.weight": (d, e), f"{x}_b_proj.weight": (heads * d, d)}
    shapes |= {"b_proj.weight": (heads, e), "dt_bias": (heads * d,), "o_norm.weight": (d,)}
    shapes["A_log"] = (heads,) if is_ling else (1, 1, heads, 1)
    return shapes | {"o_proj.weight": (e, heads * d)}


def _latents(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    e, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    content, value = config["qk_nope_head_dim"], config["v_head_dim"]
    query, width = config.get("q_lora_rank"), heads * (content + rotated)
    shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (width, e)}
    if query is not None:
        shapes = {"q_a_proj.weight": (query, e), "q_b_proj.weight": (width, query)}
        shapes["q_a_layernorm.weight"] = (query,)
    shapes |= {"kv_a_proj_with_mqa.weight": (latent + rotated, e)}
    shapes |= {"kv_a_layernorm.weight": (latent,)}
    shapes |= {"kv_b_proj.weight": (heads * (content + value), latent)}
    if config["model_type"] == "bailing_hybrid":
        return shapes | {"g_proj.weight": (heads, e), "dense.weight": (e, heads * value)}
    return shapes | {"o_proj.weight": (e, heads * value)}


def _experts(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    is_ling, e = config["model_type"] == "bailing_hybrid", config["hidden_size"]
    node = "mlp." if is_ling else "block_sparse_moe."
    count = config["num_experts"]
    bias = "expert_bias" if is_ling else "e_score_correction_bias"
    shapes: dict[str, tuple[int, ...]] = {f"{node}gate.weight": (count, e)}
    shapes[f"{node}gate.{bias}"] = (count,)
    for x in range(count):
        shapes |= _mlp(f"{node}experts.{x}.", config, "moe_intermediate", is_named=is_ling)
    num_shared = config.get("num_shared_experts", config.get("n_shared_experts"))
    return shapes | _mlp(f"{node}shared_experts.", config, "moe_intermediate", num_shared)


def _mlp(
    node: str, config: Mapping[str, Any], size: str, times: int = 1, *, is_named: bool = True
) -> dict[str, tuple[int, ...]]:
    e, f = config["hidden_size"], times * config[f"{size}_size"]
    names = ("gate_proj", "up_proj", "down_proj") if is_named else ("w1", "w3", "w2")
    shapes = ((f, e), (f, e), (e, f))
    return {f"{node}{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def scaled_kimi(key: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | None:
    """Values of a parameter that only these families have, or have in another form; None: as in
    other families.
    """
    if config["model_type"] not in FAMILIES:
        return None
    is_safe = config.get("kda_safe_gate", config["model_type"] == "bailing_hybrid")
    if key.endswith("A_log"):  # some heads remember a few tokens, others hundreds
        return 0.3 * x if is_safe else x - 2.0
    if key.endswith("dt_bias"):
        return 1.5 * x - 3.0 if is_safe else x
    if "conv1d" in key:
        return x * (1.5 / np.sqrt(x.shape[-1]))
    if key.endswith("word_embeddings.weight"):
        return x
    return None


def as_transformers(key: str) -> str:
    """The name that transformers has for a tensor of a file."""
    key = key.replace("word_embeddings", "embed_tokens").replace(".attention.", ".self_attn.")
    key = key.replace(".self_attn.dense.", ".self_attn.o_proj.")
    key = key.replace(".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias")
    for name in ("f_a_proj.", "f_b_proj.", "f_proj.", "dt_bias", "A_log"):
        key = key.replace(f".self_attn.{name}", f".self_attn.forget_gate.{name}")
    return key
