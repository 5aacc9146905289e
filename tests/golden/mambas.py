"""Tiny models with Mamba-2: their config dicts, and the tensors of their files.

Between them: one, two and three groups; heads of other widths than states; 2 to 4 taps, with biases
and without; layers of Mamba-2 first, last, between and nowhere; mixtures and MLPs; rope and none;
tied and untied embeddings.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

MAMBA, ATTENTION = "mamba", "attention"
FAMILIES = ("granitemoehybrid",)


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return base | fields


def _granite(**fields: Any) -> dict[str, Any]:
    base = {
        "num_hidden_layers": len(fields["layer_types"]),
        "hidden_act": "silu",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.8,
        "position_embedding_type": "nope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    return _config("granitemoehybrid", "GraniteMoeHybridForCausalLM", **(base | fields))


MAMBAS: dict[str, dict[str, Any]] = {
    "granite_hybrid_h6_p24_n16": _granite(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        shared_intermediate_size=88,
        layer_types=[MAMBA, MAMBA, ATTENTION, MAMBA],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=6,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
        eos_token_id=159,
    ),
    "granite_hybrid_experts_g2_tied": _granite(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=40,
        shared_intermediate_size=56,
        layer_types=[ATTENTION, MAMBA, MAMBA],
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=6,
        num_experts_per_tok=3,
        mamba_n_heads=8,
        mamba_d_state=24,
        mamba_n_groups=2,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        mamba_chunk_size=16,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        rms_norm_eps=0.01,  # large enough to show
        tie_word_embeddings=True,
        eos_token_id=[150, 149],
    ),
    "granite_hybrid_g3_rope_bias": _granite(
        vocab_size=144,
        hidden_size=48,
        intermediate_size=72,
        shared_intermediate_size=64,
        layer_types=[MAMBA, ATTENTION],
        num_attention_heads=3,
        num_key_value_heads=3,
        attention_bias=True,
        position_embedding_type="rope",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_local_experts=5,
        num_experts_per_tok=2,
        mamba_n_heads=12,
        mamba_d_state=40,
        mamba_n_groups=3,
        mamba_d_conv=2,
        mamba_conv_bias=False,
        mamba_expand=1,
        eos_token_id=143,
    ),
    "granite_hybrid_all_attention": _granite(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=72,
        shared_intermediate_size=104,
        layer_types=[ATTENTION] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        position_embedding_type="rope",
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        embedding_multiplier=0.5,
        residual_multiplier=1.0,
        tie_word_embeddings=True,
        eos_token_id=159,
    ),
}


def with_mambas(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of attention and MLPs alone, as files of these families have them."""
    if config["model_type"] not in FAMILIES:
        return dict(shapes)
    made = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}."
        if kind == MAMBA:
            made = {name: x for name, x in made.items() if f"{layer}self_attn." not in name}
            made |= {f"{layer}mamba.{name}": x for name, x in mamba_shapes(config).items()}
        made |= {layer + name: shape for name, shape in granite_ffn(config).items()}
    return made


def mamba_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer of Mamba-2."""
    e, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config.get("mamba_expand", 2) * e
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (inner + channels + heads, e),
        "conv1d.weight": (channels, 1, config.get("mamba_d_conv", 4)),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        "norm.weight": (inner,),
        "out_proj.weight": (e, inner),
    }
    if config.get("mamba_conv_bias", True):
        shapes["conv1d.bias"] = (channels,)
    if config.get("mamba_proj_bias"):
        shapes |= {"in_proj.bias": (inner + channels + heads,), "out_proj.bias": (e,)}
    return shapes


def granite_ffn(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's MLP and experts."""
    e, shared = config["hidden_size"], config["shared_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "shared_mlp.input_linear.weight": (2 * shared, e),
        "shared_mlp.output_linear.weight": (e, shared),
    }
    if count := config["num_local_experts"]:
        width = config["intermediate_size"]
        shapes |= {
            "block_sparse_moe.router.layer.weight": (count, e),
            "block_sparse_moe.input_linear.weight": (count, 2 * width, e),
            "block_sparse_moe.output_linear.weight": (count, e, width),
        }
    return shapes


def scaled_mamba(key: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | None:
    """Values of a parameter that only these families have, or have in another form; None: as in
    other families.
    """
    if config["model_type"] not in FAMILIES:
        return None
    if key.endswith("A_log"):
        return 1.5 * x - 1.0  # some heads remember a few tokens, others hundreds
    if key.endswith(".D"):
        return 1.0 + 0.25 * x
    if key.endswith("dt_bias"):
        return 0.4 * x - 1.0
    if key.endswith("conv1d.weight"):
        return x * (1.5 / np.sqrt(x.shape[-1]))
    if key.endswith("router.layer.weight"):
        return x * (2.0 / np.sqrt(x.shape[-1]))
    if x.ndim == 3:  # experts
        return x * ((1.0 if "input" in key else 2.0) / np.sqrt(x.shape[-1]))
    if config["tie_word_embeddings"] and key.endswith(("out_proj.weight", "output_linear.weight")):
        return x * (2.0 / np.sqrt(x.shape[-1]))
    return None
