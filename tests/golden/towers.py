"""Tiny vision towers whose outputs transformers computes (make_golden_towers.py), with the images
that they are given. Weights and pixels are made from names, as those of weights.py.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.golden.weights import _round, noise

FILE = Path(__file__).parent / "towers.npz"
TEXT = {
    "vocab_size": 24,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 23,
    "pad_token_id": 0,
}
IDS = {"image_token_id": 17, "vision_start_token_id": 18, "vision_end_token_id": 19}
QWEN = IDS | {"video_token_id": 20}
GEMMA = {"image_token_id": 17, "boi_token_id": 18, "eoi_token_id": 19, "video_token_id": 20}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
BY_KIND = {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}


def _whole(
    model_type: str, architecture: str, text: dict[str, Any], vision: dict[str, Any], **more: Any
) -> dict[str, Any]:
    shared = {"tie_word_embeddings": True, "eos_token_id": 23}
    names = {"model_type": model_type, "architectures": [architecture]}
    return names | shared | more | {"text_config": TEXT | text, "vision_config": vision}


def _qwen_vision(model_type: str, **fields: Any) -> dict[str, Any]:
    base = {"depth": 3, "hidden_size": 40, "num_heads": 2, "intermediate_size": 28}
    base |= {"patch_size": 4, "out_hidden_size": 24}
    return {"model_type": model_type} | base | fields


def _mrope(*section: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {"rope_parameters": rope | {"mrope_interleaved": True}}


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4_unified": _whole(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        KINDS | {"model_type": "gemma4_unified_text", "global_head_dim": 12},
        {
            "model_type": "gemma4_unified_vision",
            "patch_size": 2,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 32,
            "mm_posemb_size": 9,
            "output_proj_dims": 32,
        },
        **GEMMA,
    ),
    "qwen3_vl": _whole(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {"model_type": "qwen3_vl_text"} | _mrope(2, 2, 2),
        _qwen_vision(
            "qwen3_vl_vision", num_position_embeddings=25, deepstack_visual_indexes=[0, 2]
        ),
        **QWEN,
    ),
    "qwen3_5": _whole(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        {
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "head_dim": 16,
            "rope_parameters": {
                **_mrope(1, 1, 0)["rope_parameters"],
                "partial_rotary_factor": 0.25,
            },
        },
        _qwen_vision("qwen3_5_vision", depth=2, num_heads=5, num_position_embeddings=36),
        **QWEN,
    ),
    "qwen2_5_vl": _whole(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 2, 2],
            },
        },
        _qwen_vision("qwen2_5_vl_vision", window_size=16, fullatt_block_indexes=[1]),
        **QWEN,
    ),
    "gemma3": _whole(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        KINDS | {"model_type": "gemma3_text"},
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 30,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 24,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=9,
        image_token_index=17,
        boi_token_index=18,
        eoi_token_index=19,
    ),
    "gemma4_clipped": _whole(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        KINDS
        | {
            "model_type": "gemma4_text",
            "vocab_size_per_layer_input": 24,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 12,
        },
        {
            "model_type": "gemma4_vision",
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "patch_size": 4,
            "position_embedding_size": 20,
            "use_clipped_linears": True,
        },
        **GEMMA,
    ),
    "gemma4_standardized": _whole(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        KINDS
        | {
            "model_type": "gemma4_text",
            "vocab_size_per_layer_input": 24,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 12,
        },
        {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 20,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "patch_size": 3,
            "position_embedding_size": 16,
            "standardize": True,
        },
        **GEMMA,
    ),
}
# The sizes of images in patches: frames, rows, columns.
GRIDS = {
    "gemma4_unified": [(1, 2, 3), (1, 1, 5), (1, 7, 2)],
    "qwen3_vl": [(1, 4, 6), (1, 2, 10), (2, 6, 4), (1, 2, 2)],
    "qwen3_5": [(1, 8, 4), (1, 2, 14)],
    "qwen2_5_vl": [(1, 6, 10), (1, 4, 4), (2, 10, 2)],
    "gemma3": [(1, 6, 6), (1, 6, 6)],
    "gemma4_clipped": [(1, 6, 3), (1, 3, 9), (1, 6, 6)],
    "gemma4_standardized": [(1, 2, 8), (1, 4, 6)],
}


class Golden(NamedTuple):
    """What transformers gives. shapes: of all tensors of the files that it writes, by their names.
    rows: of each image, [n, E]. deepstack: of each image, [J, n, E], or None.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    rows: list[np.ndarray]
    deepstack: list[np.ndarray] | None


def load(name: str) -> Golden:
    """Return what is stored of a tower."""
    with np.load(FILE, allow_pickle=False) as stored:
        meta = json.loads(str(stored[f"{name}/meta"]))
        count = len(GRIDS[name])
        rows = [stored[f"{name}/rows_{i}"] for i in range(count)]
        deep = None
        if f"{name}/deepstack_0" in stored:
            deep = [stored[f"{name}/deepstack_{i}"] for i in range(count)]
    shapes = {key: tuple(shape) for key, shape in meta["shapes"].items()}
    return Golden(meta["config"], shapes, rows, deep)


def features(config: dict[str, Any]) -> int:
    """Numbers of a patch."""
    vision = config["vision_config"]
    side = vision["patch_size"]
    if config["model_type"] == "gemma4_unified":
        side *= vision["pooling_kernel_size"]
    return 3 * side**2 * (2 if config["model_type"].startswith("qwen") else 1)


def patches(name: str) -> list[np.ndarray]:
    """The patches of each image, f32 [n, C]."""
    made = []
    for i, grid in enumerate(GRIDS[name]):
        shape = (int(np.prod(grid)), features(CONFIGS[name]))
        x = noise(f"{name}/pixels/{i}", shape)
        made.append(_round(0.5 + 0.2 * x if name.startswith("gemma4") else x))
    return made


def tensors(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Every tensor of a file, f32."""
    return {
        key: np.reshape(_round(np.atleast_1d(_value(name, key, shape))), shape)
        for key, shape in shapes.items()
    }


def _value(name: str, key: str, shape: tuple[int, ...]) -> np.ndarray:
    x = noise(f"{name}/{key}", shape)
    if key.endswith(("_min", "_max")):
        sign = 1 if key.endswith("_max") else -1
        return sign * (1.2 + 0.2 * np.abs(x))  # so near that they bound something
    if key.endswith("mm_soft_emb_norm.weight"):
        return 0.25 * x  # of a factor 1 + weight
    if key.endswith(("norm.weight", "std_scale", "ln_q.weight")) or ".norm" in key or "_ln" in key:
        return 0.4 * x if key.endswith("bias") else 1 + 0.25 * x
    if key.endswith("layernorm.weight") or "layer_norm" in key or "layernorm" in key:
        return 0.4 * x if key.endswith("bias") else 1 + 0.25 * x
    if key.endswith("bias") or len(shape) < 2:
        return 0.4 * x
    if "pos" in key:  # tables of positions
        return x
    if key.endswith("mm_input_projection_weight"):
        return x / np.sqrt(shape[0])
    gain = 2.0 if any(part in key for part in ("qkv", "q_proj", "k_proj")) else 1.0
    return gain * x / np.sqrt(np.prod(shape[1:]))
