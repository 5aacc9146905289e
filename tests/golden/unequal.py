"""Tensors of the families whose layers differ in width, heads or kind: Gemma 4, MiMo."""

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]  # by name

UNEQUAL = ("gemma4_text", "gemma4_unified_text", "mimo_v2_flash")
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
EXPERT_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


def unequal_shapes(config: Mapping[str, Any]) -> Shapes:
    """Hugging Face name -> shape of every tensor in the checkpoint of a Hugging Face config."""
    e, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, e)}
    shapes["model.norm.weight"] = (e,)
    if p := config.get("hidden_size_per_layer_input"):
        width = p * config["num_hidden_layers"]
        shapes["model.embed_tokens_per_layer.weight"] = (vocab, width)
        shapes["model.per_layer_model_projection.weight"] = (width, e)
        shapes["model.per_layer_projection_norm.weight"] = (p,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, e)
    for i, kind in enumerate(config["layer_types"]):
        layer = _mimo_layer if config["model_type"] == "mimo_v2_flash" else _gemma4_layer
        own = layer(config, i, kind)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def _gemma4_layer(config: Mapping[str, Any], i: int, kind: str) -> Shapes:
    e, heads, is_full = config["hidden_size"], config["num_attention_heads"], kind[0] == "f"
    d = config["global_head_dim"] if is_full else config["head_dim"]
    kv_heads, values_are_keys = config["num_key_value_heads"], False
    if is_full and config.get("attention_k_eq_v"):
        kv_heads, values_are_keys = config["num_global_key_value_heads"], True
    is_shared = i >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    f = config["intermediate_size"] * (2 if is_shared and config.get("use_double_wide_mlp") else 1)
    widths = {"q_proj": heads * d}
    if not is_shared:
        widths |= {"k_proj": kv_heads * d} | ({} if values_are_keys else {"v_proj": kv_heads * d})
    shapes: Shapes = {f"self_attn.{name}.weight": (width, e) for name, width in widths.items()}
    shapes["self_attn.o_proj.weight"] = (e, heads * d)
    if config.get("attention_bias"):
        shapes |= {f"self_attn.{name}.bias": (width,) for name, width in widths.items()}
        shapes["self_attn.o_proj.bias"] = (e,)
    shapes["self_attn.q_norm.weight"] = (d,)
    if not is_shared:
        shapes["self_attn.k_norm.weight"] = (d,)
    shapes |= {"mlp.gate_proj.weight": (f, e), "mlp.up_proj.weight": (f, e)}
    shapes["mlp.down_proj.weight"] = (e, f)
    shapes |= {f"{norm}.weight": (e,) for norm in NORMS}
    shapes["layer_scalar"] = (1,)
    if p := config.get("hidden_size_per_layer_input"):
        shapes["per_layer_input_gate.weight"] = (p, e)
        shapes["per_layer_projection.weight"] = (e, p)
        shapes["post_per_layer_input_norm.weight"] = (e,)
    if config.get("enable_moe_block"):
        count, width = config["num_experts"], config["moe_intermediate_size"]
        shapes |= {"router.proj.weight": (count, e), "router.scale": (e,)}
        shapes["router.per_expert_scale"] = (count,)
        shapes["experts.gate_up_proj"] = (count, 2 * width, e)
        shapes["experts.down_proj"] = (count, e, width)
        shapes |= {f"{norm}.weight": (e,) for norm in EXPERT_NORMS}
    return shapes


def _mimo_layer(config: Mapping[str, Any], i: int, kind: str) -> Shapes:
    e, heads, is_window = config["hidden_size"], config["num_attention_heads"], kind[0] == "s"
    kv_heads = config["num_key_value_heads"] * (2 if is_window else 1)
    d, value = config["head_dim"], config["v_head_dim"]
    widths = {"q_proj": heads * d, "k_proj": kv_heads * d, "v_proj": kv_heads * value}
    shapes: Shapes = {f"self_attn.{name}.weight": (width, e) for name, width in widths.items()}
    shapes["self_attn.o_proj.weight"] = (e, heads * value)
    if config.get("attention_bias"):
        shapes |= {f"self_attn.{name}.bias": (width,) for name, width in widths.items()}
    if is_window:
        shapes["self_attn.attention_sink_bias"] = (heads,)
    shapes |= {f"{norm}.weight": (e,) for norm in ("input_layernorm", "post_attention_layernorm")}
    owners = {"mlp.": config["intermediate_size"]}
    if config["mlp_layer_types"][i] == "sparse":
        count, width = config["n_routed_experts"], config["moe_intermediate_size"]
        owners = {f"mlp.experts.{x}.": width for x in range(count)}
        shapes |= {"mlp.gate.weight": (count, e), "mlp.gate.e_score_correction_bias": (count,)}
    for owner, f in owners.items():
        names = {"gate_proj": (f, e), "up_proj": (f, e), "down_proj": (e, f)}
        shapes |= {f"{owner}{name}.weight": shape for name, shape in names.items()}
    return shapes
