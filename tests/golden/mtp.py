"""The MTP heads of some tiny models: the tensors that their files have beside the model's own."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.golden.hybrids import FULL, GATED
from tests.golden.weights import noise, state_dict, text_part

HEADS = (
    "qwen3_5_h2x3_c16_y24",
    "qwen3_5_moe_h2x2_c16_y32",
    "qwen3_next_h4x2_c24_y16",
    "glm4_moe_g4_d32_groups",
    "deepseek_v3_h4_l32_groups",
    "deepseek_v32_h4_l32_top8",
    "glm_moe_dsa_h6_l24_shared",
    "glm4_moe_lite_h5_l48",
)
FULL_INDEX = "full"  # in indexer_types
GUESSED = 4  # tokens after a prompt that are stored


def choosing(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the model of which the head's layer is one: it has an indexer of its own also
    where the model's last layer takes another's choice.
    """
    kinds = config.get("indexer_types")
    return {**config} if kinds is None else {**config, "indexer_types": [FULL_INDEX] * len(kinds)}


def base_layer(config: Mapping[str, Any]) -> int:
    """The number of the model's layer that its head's is like."""
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [FULL] * count
    return max(i for i in range(count) if kinds[i] == FULL)


def layer_tensors(name: str, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of the head's layer by their names within it."""
    text = text_part(config)
    others = state_dict(f"{name}/mtp", choosing(config))
    begins = re.compile(rf"model\.(language_model\.)?layers\.{base_layer(text)}\.")
    return {begins.sub("", key): x for key, x in others.items() if begins.match(key)}


def joining_tensors(name: str, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What comes before and after the layer: three norms and a product."""
    text = text_part(config)
    size, mean = text["hidden_size"], 0.0 if text["model_type"] in GATED else 1.0
    tensors = {
        kind: mean + 0.25 * noise(f"{name}/mtp/{kind}", (size,))
        for kind in ("embed_norm", "hidden_norm", "norm")
    }
    tensors["fc"] = noise(f"{name}/mtp/fc", (size, 2 * size)) * (1.5 / np.sqrt(2 * size))
    return {kind: x.astype(np.float32) for kind, x in tensors.items()}


def file_tensors(name: str, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The head's tensors as published files name them. Experts are one by one there, also where
    those of the model are stacked; GLM's repeat the model's embedding and head.
    """
    text, tensors = text_part(config), dict[str, np.ndarray]()
    for key, x in layer_tensors(name, config).items():
        if key.endswith("experts.gate_up_proj"):
            for i, gate_up in enumerate(x):
                halves = zip(("gate", "up"), np.split(gate_up, 2), strict=True)
                tensors |= {f"mlp.experts.{i}.{part}_proj.weight": half for part, half in halves}
        elif key.endswith("experts.down_proj"):
            tensors |= {f"mlp.experts.{i}.down_proj.weight": down for i, down in enumerate(x)}
        else:
            tensors[key] = x
    joining = joining_tensors(name, config)
    if text["model_type"] in GATED:
        layer, names = (
            "mtp.layers.0.",
            ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        )
        begin = "mtp."
    else:
        layer = begin = f"model.layers.{text['num_hidden_layers']}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        shape = (text["vocab_size"], text["hidden_size"])
        tensors["embed_tokens.weight"] = np.zeros(shape, np.float32)
        tensors["shared_head.head.weight"] = np.zeros(shape, np.float32)
    found = {layer + key: np.ascontiguousarray(x) for key, x in tensors.items()}
    kinds = ("embed_norm", "hidden_norm", "fc", "norm")
    return found | {
        f"{begin}{theirs}.weight": joining[ours] for ours, theirs in zip(kinds, names, strict=True)
    }
