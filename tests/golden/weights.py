"""Weights of the tiny models, made from their names alone: the same in every environment, with
numpy and nothing else.

Bytes of SHAKE-128 rather than a random generator: numpy's streams may change between versions, a
hash may not. Every value is exact in float32, bfloat16 and float16, so one reference holds for a
checkpoint stored in any of them.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.golden.hybrids import GATED, scaled, with_delta
from tests.golden.kimi import FAMILIES as KIMI
from tests.golden.kimi import kimi_shapes, scaled_kimi
from tests.golden.latents import FAMILIES as LATENT
from tests.golden.latents import with_latents
from tests.golden.mambas import nemotron_shapes, scaled_mamba, with_mambas
from tests.golden.short_convs import scaled_conv, with_convs
from tests.golden.unequal import UNEQUAL, unequal_shapes

AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
NORMS = {
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm", *AFTER),
    "gemma3_text": ("input_layernorm", "pre_feedforward_layernorm", *AFTER),
    "gemma4_text": AFTER,
    "gemma4_unified_text": AFTER,
    "olmo2": AFTER,
    "olmo3": AFTER,
    "olmo_hybrid": AFTER,
    "exaone4": AFTER,
    "glm4": (
        *("input_layernorm", "post_attention_layernorm"),
        *("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
}
QK_NORMS = (
    *("q_norm.weight", "k_norm.weight"),
    *("query_layernorm.weight", "key_layernorm.weight"),
)
QK_NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", "qwen3_vl_text", "qwen3_vl_moe_text")
COUNTS = ("num_experts", "n_routed_experts", "moe_num_experts")
CHOOSING_BIASES: dict[str, tuple[str, tuple[int, ...]]] = {  # and the axes before the experts'
    "glm4_moe": ("mlp.gate.e_score_correction_bias", ()),
    "solar_open": ("mlp.gate.e_score_correction_bias", ()),
    "deepseek_v3": ("mlp.gate.e_score_correction_bias", ()),
    "glm4_moe_lite": ("mlp.gate.e_score_correction_bias", ()),
    "deepseek_v32": ("mlp.gate.e_score_correction_bias", ()),
    "glm_moe_dsa": ("mlp.gate.e_score_correction_bias", ()),
    "minimax_m2": ("block_sparse_moe.e_score_correction_bias", ()),
    "lfm2_moe": ("mlp.expert_bias", ()),
    "ernie4_5_moe": ("mlp.moe_statics.e_score_correction_bias", (1,)),
}
FUSED_GATE_UP = ("phi3", "glm4")
# Whether queries, keys and values have a bias, and what attention gives, where a config is silent.
QKV_BIASED = ("qwen2", "qwen2_moe", "qwen2_5_vl_text", "gpt_oss")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor in the checkpoint of a Hugging Face config
    dict.
    """
    if "text_config" in config:
        shapes = tensor_shapes(text_part(config))
        return {k.replace("model.", "model.language_model."): v for k, v in shapes.items()}
    if config["model_type"] == "nemotron_h":
        return nemotron_shapes(config)
    if config["model_type"] in UNEQUAL:
        return unequal_shapes(config)
    if config["model_type"] in KIMI:
        return kimi_shapes(config)
    family, e, f = config["model_type"], config["hidden_size"], config.get("intermediate_size", 0)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or e // heads
    q_bias, out_bias, mlp_bias = biases(config)
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
            if q_bias:
                shapes[f"{attention}{name}.bias"] = (width,)
        shapes[attention + "o_proj.weight"] = (e, heads * d)
        if out_bias:
            shapes[attention + "o_proj.bias"] = (e,)
        if family == "gpt_oss":
            shapes[attention + "sinks"] = (heads,)
        if family in (*QK_NORMED, *GATED) or (family == "glm4_moe" and config.get("use_qk_norm")):
            shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (d,)
        if family == "hunyuan_v1_dense":
            shapes |= {attention + f"{x}_layernorm.weight": (d,) for x in ("query", "key")}
        if family in ("olmo2", "olmo3", "minimax_m2", "olmo_hybrid"):
            shapes[attention + "q_norm.weight"] = (heads * d,)
            shapes[attention + "k_norm.weight"] = (kv_heads * d,)
        if is_mixture(config, i):
            shapes |= {layer + name: shape for name, shape in mixture_shapes(config).items()}
        else:
            widths = {"gate_proj": f, "up_proj": f}
            if family in FUSED_GATE_UP:
                widths = {"gate_up_proj": 2 * f}
            widths = {name: (width, e) for name, width in widths.items()} | {"down_proj": (e, f)}
            for name, shape in widths.items():
                shapes[f"{layer}mlp.{name}.weight"] = shape
                if mlp_bias:
                    shapes[f"{layer}mlp.{name}.bias"] = shape[:1]
        norms = NORMS.get(family, ("input_layernorm", "post_attention_layernorm"))
        shapes |= {f"{layer}{norm}.weight": (e,) for norm in norms}
    shapes = with_mambas(config, with_latents(config, shapes))
    return with_convs(config, with_delta(config, shapes))


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model of text, or of the text part of a model of text and images."""
    whole = dict(config)
    return whole | whole.pop("text_config", {})


def biases(config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether queries, keys and values have a bias, what attention gives, and MLPs."""
    family = config["model_type"]
    if family.startswith(("ernie", "internlm")):
        return (config.get("use_bias", config.get("bias", False)),) * 3
    qkv = config.get("qkv_bias", config.get("attention_bias", family in QKV_BIASED))
    out = config.get("attention_bias", family == "gpt_oss")
    if family in ("seed_oss", "glm4", "glm4_moe", "solar_open"):
        out = config.get("attention_out_bias", False)
    return qkv, out, config.get("mlp_bias", False)


def is_mixture(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts, and not an MLP."""
    family = config["model_type"]
    if family in ("mixtral", "gpt_oss", "solar_open", "minimax_m2"):
        return True
    if family in ("glm4_moe", *LATENT):
        kinds = config.get("mlp_layer_types")
        first = config.get("first_k_dense_replace", 0)
        return layer >= first if kinds is None else kinds[layer] == "sparse"
    if family == "lfm2_moe":
        return layer >= config["num_dense_layers"]
    if family == "ernie4_5_moe":
        is_in_step = (layer + 1) % config["moe_layer_interval"] == 0
        return is_in_step and layer >= config["moe_layer_start_index"]
    is_in_step = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return "num_experts" in config and is_in_step and layer not in config.get("mlp_only_layers", [])


def mixture_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the experts of a layer, as the checkpoints on the hub have them."""
    e, family = config["hidden_size"], config["model_type"]
    if family == "gpt_oss":
        f, count, node = config["intermediate_size"], config["num_local_experts"], "mlp."
        return {
            f"{node}router.weight": (count, e),
            f"{node}router.bias": (count,),
            f"{node}experts.gate_up_proj": (count, e, 2 * f),
            f"{node}experts.gate_up_proj_bias": (count, 2 * f),
            f"{node}experts.down_proj": (count, f, e),
            f"{node}experts.down_proj_bias": (count, e),
        }
    if family == "qwen3_vl_moe_text":
        f, count = config["moe_intermediate_size"], config["num_experts"]
        return {
            "mlp.gate.weight": (count, e),
            "mlp.experts.gate_up_proj": (count, e, 2 * f),
            "mlp.experts.down_proj": (count, f, e),
        }
    if family == "qwen3_5_moe_text":
        f, count = config["moe_intermediate_size"], config["num_experts"]
        shared = config["shared_expert_intermediate_size"]
        return {
            "mlp.gate.weight": (count, e),
            "mlp.experts.gate_up_proj": (count, 2 * f, e),
            "mlp.experts.down_proj": (count, e, f),
            **{f"mlp.shared_expert.{x}_proj.weight": (shared, e) for x in ("gate", "up")},
            "mlp.shared_expert.down_proj.weight": (e, shared),
            "mlp.shared_expert_gate.weight": (1, e),
        }
    if family == "mistral4":
        f, count = config["moe_intermediate_size"], config["n_routed_experts"]
        shared = config["n_shared_experts"] * f
        return {
            "mlp.gate.weight": (count, e),
            "mlp.experts.gate_up_proj": (count, 2 * f, e),
            "mlp.experts.down_proj": (count, e, f),
            **{f"mlp.shared_experts.{x}_proj.weight": (shared, e) for x in ("gate", "up")},
            "mlp.shared_experts.down_proj.weight": (e, shared),
        }
    if family in ("mixtral", "minimax_m2"):
        node, names = "block_sparse_moe.", ("w1", "w3", "w2")
        f, count = config["intermediate_size"], config["num_local_experts"]
    else:
        node, names = "mlp.", ("gate_proj", "up_proj", "down_proj")
        f = config["moe_intermediate_size"]
        count = next(config[key] for key in COUNTS if key in config)
    shapes: dict[str, tuple[int, ...]] = {f"{node}gate.weight": (count, e)}
    if family in CHOOSING_BIASES:
        shapes |= {name: (*ones, count) for name, ones in [CHOOSING_BIASES[family]]}
    owners = {f"{node}experts.{x}.": f for x in range(count)}
    if shared := config.get("shared_expert_intermediate_size"):
        owners["mlp.shared_expert."] = shared
        shapes["mlp.shared_expert_gate.weight"] = (1, e)
    if shared := config.get("n_shared_experts", config.get("moe_num_shared_experts", 0)):
        owners["mlp.shared_experts."] = shared * f
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
    text, tensors = text_part(config), {}
    for key, shape in tensor_shapes(config).items():
        x = _tied(key, noise(f"{name}/{_source(key, name, text)}", shape), name, text)
        tensors[key] = _round(_scaled(key, x, text))
    return tensors


def _source(key: str, name: str, config: Mapping[str, Any]) -> str:
    """The name that a tensor's values are made from. In a model of tied groups, the experts of the
    second group are those of the first.
    """
    expert = re.search(r"\.experts\.(\d+)\.", key)
    if "tied_groups" not in name or expert is None:
        return key
    size, x = config["n_routed_experts"] // config["n_group"], int(expert[1])
    return key if not size <= x < 2 * size else key.replace(expert[0], f".experts.{x - size}.")


def _tied(key: str, x: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Values of a router: in a model of tied groups, the scores of its first two are equal,
    whatever the token.
    """
    if "tied_groups" not in name or ".mlp.gate." not in key:
        return x
    size = config["n_routed_experts"] // config["n_group"]
    return np.concatenate([x[:size], x[:size], x[2 * size :]])


def _scaled(key: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    for special in (scaled, scaled_conv, scaled_mamba, scaled_kimi):
        if (values := special(key, x, config)) is not None:
            return values
    if key.endswith("e_score_correction_bias"):
        return 0.3 * x  # sigmoids differ by as much
    if key.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale")):
        # q_norm and k_norm set the sharpness of attention, whatever the projections are
        mean = 1.3 if key.endswith(QK_NORMS) else 1.0
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
    if key.endswith("embed_tokens.weight"):
        return x * (3.0 / np.sqrt(x.shape[1]) if config["tie_word_embeddings"] else 1.0)
    gain = (
        3.0
        if key == "lm_head.weight"
        else 1.4
        if key.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "q_b_proj.weight"))
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
