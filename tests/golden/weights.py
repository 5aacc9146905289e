"""Weights of the tiny models, made from their names alone: the same in every environment, with
numpy and nothing else.

Bytes of SHAKE-128 rather than a random generator: numpy's streams may change between versions, a
hash may not. Every value is exact in float32, bfloat16 and float16, so one reference holds for a
checkpoint stored in any of them.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.golden.unequal import UNEQUAL, unequal_shapes

AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
NORMS = {
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm", *AFTER),
    "gemma3_text": ("input_layernorm", "pre_feedforward_layernorm", *AFTER),
    "gemma4_text": AFTER,
    "gemma4_unified_text": AFTER,
    "olmo2": AFTER,
    "olmo3": AFTER,
}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor in the checkpoint of a Hugging Face config
    dict.
    """
    if config["model_type"] in UNEQUAL:
        return unequal_shapes(config)
    family, e, f = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or e // heads
    is_qwen2_moe = family == "qwen2_moe"
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (e,)}
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], e)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], e)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention = layer + "self_attn."
        widths = {"q_proj": heads * d, "k_proj": kv_heads * d, "v_proj": kv_heads * d}
        if family == "phi3":
            widths = {"qkv_proj": sum(widths.values())}
        for name, width in widths.items():
            shapes[f"{attention}{name}.weight"] = (width, e)
            if (
                family == "qwen2"
                or config.get("attention_bias", family == "gpt_oss")
                or config.get("qkv_bias", is_qwen2_moe)
            ):
                shapes[f"{attention}{name}.bias"] = (width,)
        shapes[attention + "o_proj.weight"] = (e, heads * d)
        if config.get("attention_bias", family == "gpt_oss"):
            shapes[attention + "o_proj.bias"] = (e,)
        if family == "gpt_oss":
            shapes[attention + "sinks"] = (heads,)
        if family in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (d,)
        if family in ("olmo2", "olmo3"):
            shapes[attention + "q_norm.weight"] = (heads * d,)
            shapes[attention + "k_norm.weight"] = (kv_heads * d,)
        if is_mixture(config, i):
            shapes |= {layer + name: shape for name, shape in mixture_shapes(config).items()}
        else:
            widths = {"gate_up_proj": 2 * f} if family == "phi3" else {"gate_proj": f, "up_proj": f}
            widths = {name: (width, e) for name, width in widths.items()} | {"down_proj": (e, f)}
            for name, shape in widths.items():
                shapes[f"{layer}mlp.{name}.weight"] = shape
                if config.get("mlp_bias"):
                    shapes[f"{layer}mlp.{name}.bias"] = shape[:1]
        norms = NORMS.get(family, ("input_layernorm", "post_attention_layernorm"))
        shapes |= {f"{layer}{norm}.weight": (e,) for norm in norms}
    return shapes


def is_mixture(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts, and not an MLP."""
    if config["model_type"] in ("mixtral", "gpt_oss"):
        return True
    is_in_step = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return "num_experts" in config and is_in_step and layer not in config.get("mlp_only_layers", [])


def mixture_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the experts of a layer, as the checkpoints on the hub have them."""
    e = config["hidden_size"]
    if config["model_type"] == "gpt_oss":
        f, count, node = config["intermediate_size"], config["num_local_experts"], "mlp."
        return {
            f"{node}router.weight": (count, e),
            f"{node}router.bias": (count,),
            f"{node}experts.gate_up_proj": (count, e, 2 * f),
            f"{node}experts.gate_up_proj_bias": (count, 2 * f),
            f"{node}experts.down_proj": (count, f, e),
            f"{node}experts.down_proj_bias": (count, e),
        }
    if config["model_type"] == "mixtral":
        node, names = "block_sparse_moe.", ("w1", "w3", "w2")
        f, count = config["intermediate_size"], config["num_local_experts"]
    else:
        node, names = "mlp.", ("gate_proj", "up_proj", "down_proj")
        f, count = config["moe_intermediate_size"], config["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{node}gate.weight": (count, e)}
    owners = {f"{node}experts.{x}.": f for x in range(count)}
    if shared := config.get("shared_expert_intermediate_size"):
        owners["mlp.shared_expert."] = shared
        shapes["mlp.shared_expert_gate.weight"] = (1, e)
    for owner, width in owners.items():
        for name, shape in zip(names, ((width, e), (width, e), (e, width)), strict=True):
            shapes[f"{owner}{name}.weight"] = shape
    return shapes


def noise(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 of mean 0, deviation 1 and a bell's shape: four bytes of a hash of `key`, summed, for
    each value.
    """
    n = int(np.prod(shape))
    stream = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * n), np.uint8)
    centred = stream.reshape(n, 4).sum(axis=1, dtype=np.int64) - 510
    return (centred / np.sqrt(4 * (256**2 - 1) / 12)).reshape(shape)


def state_dict(name: str, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of the model called `name`, float32.

    Norm scales and biases are random too, so that each parameter shows in the logits. Queries and
    keys are scaled up so that attention is far from uniform: then one token dropped, or one angle
    off, moves the logits.
    """
    return {
        k: _round(_scaled(k, noise(f"{name}/{k}", shape), config))
        for k, shape in tensor_shapes(config).items()
    }


def _scaled(key: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    if key.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale")):
        # q_norm and k_norm set the sharpness of attention, whatever the projections are
        mean = 1.3 if key.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        if mean > 1 and config["model_type"].startswith("gemma4"):
            mean = 0.6  # its scores are not divided by the root of head_dim
        if config["model_type"] in NORMS and config["tie_word_embeddings"]:
            mean *= 8.0 if any(norm in key for norm in AFTER) else 1.0  # see "residual" below
        return mean - (config["model_type"] in ("gemma2", "gemma3_text")) + 0.25 * x
    if key.endswith(("layer_scalar", "per_expert_scale")):
        return 0.8 + 0.2 * x
    if key.endswith(("bias", "sinks")):
        return (1.0 if key.endswith(("sinks", "sink_bias")) else 0.4) * x
    if key.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [X, inputs, outputs]
        inputs = x.shape[2 if config["model_type"].startswith("gemma4") else 1]
        return x * ((1.0 if "gate_up" in key else 2.0) / np.sqrt(inputs))
    if key == "model.embed_tokens_per_layer.weight":
        return x / np.sqrt(config["hidden_size_per_layer_input"])
    if key == "model.embed_tokens.weight":
        return x * (3.0 / np.sqrt(x.shape[1]) if config["tie_word_embeddings"] else 1.0)
    gain = (
        3.0
        if key == "lm_head.weight"
        else 1.4
        if key.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight"))
        else 1.0
    )
    if key.endswith((".gate.weight", "router.weight", "shared_expert_gate.weight")):
        gain = 2.0  # experts differ in weight
    if key.endswith(("w2.weight", "down_proj.weight")) and "experts" in key:
        gain = 2.0  # a token's experts are added up with small weights
    if config["tie_word_embeddings"] and key.endswith(
        ("o_proj.weight", "down_proj.weight", "w2.weight")
    ):
        gain = (
            3.0 if "experts" in key else 2.0
        )  # else the input embedding rules the residual, and each token predicts itself
    return x * (gain / np.sqrt(x.shape[1]))


def _round(x: np.ndarray) -> np.ndarray:
    """To eight significant bits and multiples of 2**-24: bfloat16's precision within float16's
    range, as float32.
    """
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)  # nearest, ties to even
    return (np.round(bits.view(np.float32) * np.float32(2**24)) * np.float32(2**-24)).astype(
        np.float32
    )


def checksum(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names and float32 bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name], np.float32).tobytes())
    return digest.hexdigest()
