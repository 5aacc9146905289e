"""Tiny models without a vocabulary: classifiers, and models of embeddings; what both sides of
heads.npz take from the same place.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.golden.configs import CONFIGS, FULL, WINDOW
from tests.golden.weights import noise, state_dict

# By name: the model that it is made of, its architecture, and its labels; 0 has no head.
MODELS: dict[str, tuple[str, str, int]] = {
    "qwen3_reward": ("qwen3_g2_d32_tied", "Qwen3ForSequenceClassification", 1),
    "llama_labels": ("llama_g4_d64_llama3", "LlamaForSequenceClassification", 3),
    "qwen2_moe_labels": ("qwen2_moe_g2_d32_shared", "Qwen2MoeForSequenceClassification", 2),
    "gemma2_labels": ("gemma2_g2_d64_capped", "Gemma2ForSequenceClassification", 4),
    "qwen3_base": ("qwen3_g7_d80", "Qwen3Model", 0),
    "gemma3_both_ways": ("gemma3_g2_d32_linear", "Gemma3TextModel", 0),
}
BOTH_WAYS = "gemma3_both_ways"
LENGTHS = (1, 7, 45)  # of the prompts
DENSE = ((56, True, "torch.nn.modules.activation.Tanh"), (24, False, "torch.nn.Identity"))


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a model."""
    base, architecture, labels = MODELS[name]
    config = {**CONFIGS[base], "architectures": [architecture], "pad_token_id": None}
    if labels:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
        config["label2id"] = {f"LABEL_{i}": i for i in range(labels)}
    if name == BOTH_WAYS:
        kinds = [WINDOW, FULL] * config["num_hidden_layers"]
        window = {"sliding_window": 8, "layer_types": kinds[: config["num_hidden_layers"]]}
        config |= {"use_bidirectional_attention": True, **window}
    return config


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of its file: those of a base model have no model. before their names."""
    base, _, labels = MODELS[name]
    tensors = state_dict(base, CONFIGS[base])
    tensors.pop("lm_head.weight", None)
    if labels:
        score = _f32(f"{name}/score.weight", (labels, CONFIGS[base]["hidden_size"]))
        return tensors | {"score.weight": score}
    return {key.removeprefix("model."): x for key, x in tensors.items()}


def prompts_of(name: str) -> list[list[int]]:
    """Return the token ids of its prompts."""
    base = MODELS[name][0]
    rng = np.random.default_rng(len(name))
    most = CONFIGS[base]["vocab_size"] - 4
    return [rng.integers(0, most, length).tolist() for length in LENGTHS]


def dense_tensors(hidden_size: int) -> list[dict[str, np.ndarray]]:
    """Return the tensors of DENSE after pooling, in the files of sentence-transformers."""
    tensors: list[dict[str, np.ndarray]] = []
    width = hidden_size
    for i, (outputs, has_bias, _) in enumerate(DENSE):
        layer = {"linear.weight": _f32(f"dense.{i}.weight", (outputs, width))}
        if has_bias:
            layer["linear.bias"] = _f32(f"dense.{i}.bias", (outputs,))
        tensors.append(layer)
        width = outputs
    return tensors


def dense_configs(hidden_size: int) -> list[Mapping[str, Any]]:
    """Return their config.json."""
    widths = [hidden_size, *(outputs for outputs, _, _ in DENSE)]
    return [
        {
            "in_features": width,
            "out_features": outputs,
            "bias": bias,
            "activation_function": activation,
        }
        for width, (outputs, bias, activation) in zip(widths, DENSE, strict=False)
    ]


def _f32(key: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(noise(key, shape), np.float32)
