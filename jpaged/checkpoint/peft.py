"""Folders of adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.hf import OF_TEXT, map_entry, read_header, stored_names
from jpaged.checks import read_json
from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.lora import Pairs, adapted_specs, fitted, targets

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
SIDE = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# What changes the base weights, so that an adapter on top of the plain ones is another model.
CHANGE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Fields of the config that must be off: what each would need.
OFF = {
    "use_dora": "DoRA (a magnitude of each output)",
    "modules_to_save": "modules that are saved whole",
    "lora_bias": "biases of adapters",
    "fan_in_fan_out": "weights stored as inputs by outputs",
    "layer_replication": "repeated layers",
    "target_parameters": "adapters of bare parameters",
    "trainable_token_indices": "trained tokens",
    "alora_invocation_tokens": "adapters that begin at a token",
}


def load_adapter(folder: str | Path, model: ModelConfig) -> Pairs:
    """The pairs of a folder, scaled by alpha / r, or by alpha / sqrt(r) with rslora.
    CheckpointError where it is damaged, does not fit the model or is no plain LoRA.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG, CheckpointError)
    _check(folder, config)
    if not (folder / FILE).is_file() and (folder / "adapter_model.bin").is_file():
        raise CheckpointError(f"{folder}: adapter_model.bin is a pickle; save it as safetensors")
    sides: dict[str, dict[str, np.ndarray]] = {}
    for name, entry in read_header(folder / FILE).items():
        match = SIDE.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{folder / FILE}: {name} is no lora_A or lora_B of a weight")
        module = OF_TEXT.sub(r"\1", match[1] + ".weight").removesuffix(".weight")
        sides.setdefault(module, {})[match[2]] = map_entry(entry, entry.shape)
    return _pairs(folder, config, sides, model)


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    said = f"{folder / CONFIG}"
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{said}: peft_type={kind!r}: only LORA can be served")
    for name, what in OFF.items():
        if config.get(name):
            raise CheckpointError(f"{said}: {name}={config[name]!r}: {what} cannot be served")
    if (bias := config.get("bias", "none")) != "none":
        raise CheckpointError(f"{said}: bias={bias!r}: trained biases cannot be served")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(CHANGE_BASE):
        raise CheckpointError(
            f"{said}: init_lora_weights={start!r} changes the base weights; convert the adapter to "
            "plain LoRA when it is saved"
        )


def _pairs(
    folder: Path,
    config: Mapping[str, Any],
    sides: dict[str, dict[str, np.ndarray]],
    model: ModelConfig,
) -> Pairs:
    found: Pairs = {}
    parts, stored = targets(model), stored_names(model)
    taken = set()
    for ours, spec in adapted_specs(model).items():
        for part, place in zip(spec.parts, stored[ours], strict=True):
            module = place.name.removesuffix(".weight")
            if module not in sides:
                continue
            taken.add(module)
            pair = sides[module]
            if missing := {"A", "B"} - pair.keys():
                raise CheckpointError(f"{folder / FILE}: {module} lacks lora_{missing.pop()}")
            rows = slice(place.first, place.first + place.shape[0])
            scale = np.float32(_scale(folder, config, module, pair["A"].shape[0]))
            name = spec.at(part.name)
            a, b = (np.asarray(pair[side], np.float32) for side in "AB")
            found[name] = fitted(name, a, b[rows] * scale, parts[name], model)
    if left := sorted(sides.keys() - taken):
        raise CheckpointError(
            f"{folder / FILE}: {left[0]} is no weight of this model that can have an adapter"
        )
    if not found:
        raise CheckpointError(f"{folder / FILE}: holds no adapter")
    return found


def _scale(folder: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _of_module(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    said = _of_module(config.get("rank_pattern"), module, config.get("r"))
    if not isinstance(alpha, int | float) or said != rank:
        raise CheckpointError(
            f"{folder}: {module} is of rank {rank}, by {CONFIG} r={said} with lora_alpha={alpha}"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(pattern: Any, module: str, default: Any) -> Any:
    """What a pattern, {end of a name or a regular expression: value}, says of a module."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default
