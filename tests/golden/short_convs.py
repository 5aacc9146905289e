"""Tiny models with short convolutions: their config dicts, and the tensors of their files.

Between them: taps of 3 and 4, with and without biases; convolutions first, last and between; tied
and untied embeddings; a width of the MLP that is said as it is, and one that follows from a rule; a
mixture of experts with a dense layer.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

CONV, FULL = "conv", "full_attention"
NAMES = {  # of what other families have, in a layer's names
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.": "feed_forward.",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
FAMILIES = ("lfm2", "lfm2_moe")


def _config(**fields: Any) -> dict[str, Any]:
    base = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "max_position_embeddings": 256,
        "num_hidden_layers": len(fields["layer_types"]),
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    return base | fields


SHORT_CONVS: dict[str, dict[str, Any]] = {
    "lfm2_c96_w3": _config(
        vocab_size=160,
        hidden_size=96,
        intermediate_size=200,
        block_multiple_of=8,
        layer_types=[CONV, CONV, FULL, CONV],
        num_attention_heads=6,
        num_key_value_heads=2,
        conv_L_cache=3,
        eos_token_id=159,
    ),
    "lfm2_c64_w4_bias_tied": _config(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=104,
        block_auto_adjust_ff_dim=False,
        layer_types=[FULL, CONV, CONV],
        num_attention_heads=2,
        num_key_value_heads=2,
        conv_L_cache=4,
        conv_bias=True,
        norm_eps=0.01,  # large enough to show
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=[150, 149],
    ),
    "lfm2_moe_c80_w3": _config(
        architectures=["Lfm2MoeForCausalLM"],
        model_type="lfm2_moe",
        vocab_size=144,
        hidden_size=80,
        intermediate_size=104,
        layer_types=[CONV, FULL, CONV, CONV],
        num_attention_heads=5,
        num_key_value_heads=5,
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        routed_scaling_factor=1.5,
        conv_L_cache=3,
        eos_token_id=143,
    ),
}


def mlp_width(config: Mapping[str, Any]) -> int:
    """The width of the MLP."""
    size = config["intermediate_size"]
    if config["model_type"] != "lfm2" or not config.get("block_auto_adjust_ff_dim", True):
        return size
    multiple = config["block_multiple_of"]
    return -(-int(2 * size / 3) // multiple) * multiple


def with_convs(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of attention alone, as files of this family have them."""
    if config["model_type"] not in FAMILIES:
        return dict(shapes)
    made: dict[str, tuple[int, ...]] = {}
    size, width = config["hidden_size"], mlp_width(config)
    head = size // config["num_attention_heads"]
    for name, shape in shapes.items():
        if name == "model.norm.weight":
            name = "model.embedding_norm.weight"
        if not name.startswith("model.layers."):
            made[name] = shape
            continue
        layer, short = name[: name.index(".", 13) + 1], name[name.index(".", 13) + 1 :]
        is_conv = config["layer_types"][int(layer.split(".")[2])] == CONV
        if short == "self_attn.q_proj.weight":
            parts = conv_shapes(config) if is_conv else dict.fromkeys(QK_NORMS, (head,))
            made |= {layer + key: value for key, value in parts.items()}
        if is_conv and short.startswith("self_attn."):
            continue
        if short.startswith("mlp.") and "experts" not in short:
            shape = tuple(width if n == config["intermediate_size"] else n for n in shape)
        for theirs, ours in NAMES.items():
            short = short.replace(theirs, ours)
        made[layer + short] = shape
    return made


QK_NORMS = ("self_attn.q_layernorm.weight", "self_attn.k_layernorm.weight")


def conv_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's convolution."""
    size = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "conv.in_proj.weight": (3 * size, size),
        "conv.conv.weight": (size, 1, config["conv_L_cache"]),
        "conv.out_proj.weight": (size, size),
    }
    if config.get("conv_bias"):
        shapes |= {"conv.in_proj.bias": (3 * size,), "conv.conv.bias": (size,)}
        shapes["conv.out_proj.bias"] = (size,)
    return shapes


def scaled_conv(key: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | None:
    """Values of what only these families have; None: as in other families."""
    if config["model_type"] not in FAMILIES:
        return None
    if key.endswith("conv.conv.weight"):
        return x * (1.5 / np.sqrt(x.shape[-1]))
    if key.endswith(QK_NORMS):
        return 1.3 + 0.25 * x
    if config["tie_word_embeddings"] and key.endswith("out_proj.weight"):
        return x * (2.0 / np.sqrt(x.shape[1]))
    return None
