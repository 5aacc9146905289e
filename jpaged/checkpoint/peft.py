"""Reads folders of adapters that PEFT wrote: adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.hf import (
    OF_TEXT,
    Entry,
    Stored,
    map_entry,
    plain_name,
    read_header,
    stored_names,
)
from jpaged.checkpoint.tensors import DTYPES
from jpaged.checks import read_json
from jpaged.errors import CheckpointError
from jpaged.models.config import LM_HEAD, ModelConfig
from jpaged.models.lora import (
    EMBEDDING,
    EXTRA,
    HEAD,
    Pair,
    Pairs,
    adapted_specs,
    shaped_pair,
    targets,
)

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
SIDE = re.compile(
    r"base_model\.model\.(.+)\.lora_(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?)"
)
# PEFT also stores the base model's weights of an adapted embedding or head.
BASE = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")
# Methods that change the base weights, so that the adapter does not fit the plain ones.
CHANGE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Fields of the config that must be off, and what they stand for.
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
    """Return the pairs of a folder, scaled by alpha / r, or by alpha / sqrt(r) with rslora.
    CheckpointError if it is damaged, does not fit the model or is no plain LoRA.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG, CheckpointError)
    _check(folder, config)
    if not (folder / FILE).is_file() and (folder / "adapter_model.bin").is_file():
        raise CheckpointError(f"{folder}: adapter_model.bin is a pickle; save it as safetensors")
    sides: dict[str, dict[str, np.ndarray]] = {}
    stored = stored_names(model)
    head = LM_HEAD.placed(model.sizes)
    stored.setdefault(HEAD, [Stored(head.parts[0].hf_name, head.shape, (), 0)])
    for name, entry in read_header(folder / FILE).items():
        if (base := BASE.fullmatch(name)) is not None:
            _check_base(folder, _module(base[1], model), entry, stored)
            continue
        match = SIDE.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{folder / FILE}: {name} is no lora_A or lora_B of a weight")
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{folder / FILE}: {name} is of dtype {entry.dtype}")
        side = match[2] or match[3]
        sides.setdefault(_module(match[1], model), {})[side] = map_entry(entry, entry.shape)
    return _pairs(folder, config, sides, stored, model)


def _module(name: str, model: ModelConfig) -> str:
    """Return the name that a module has in a model of text alone."""
    text = OF_TEXT.sub(r"\1", name + ".weight").removesuffix(".weight")
    return plain_name(text, model)


def _check_base(
    folder: Path, module: str, entry: Entry, stored: Mapping[str, list[Stored]]
) -> None:
    known = {place.name: place.shape for name in (EMBEDDING, HEAD) for place in stored[name]}
    wanted = known.get(f"{module}.weight")
    if entry.shape != wanted:
        raise CheckpointError(
            f"{folder / FILE}: {module}.base_layer is of shape {entry.shape}, the model's is of "
            f"{wanted}: a base that was changed cannot be served"
        )


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    file = f"{folder / CONFIG}"
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{file}: peft_type={kind!r}: only LORA can be served")
    for name, what in OFF.items():
        if config.get(name):
            raise CheckpointError(f"{file}: {name}={config[name]!r}: {what} cannot be served")
    if (bias := config.get("bias", "none")) != "none":
        raise CheckpointError(f"{file}: bias={bias!r}: trained biases cannot be served")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(CHANGE_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights={start!r} changes the base weights; convert the adapter to "
            "plain LoRA when it is saved"
        )


def _pairs(
    folder: Path,
    config: Mapping[str, Any],
    sides: dict[str, dict[str, np.ndarray]],
    stored: Mapping[str, list[Stored]],
    model: ModelConfig,
) -> Pairs:
    adapted: Pairs = {}
    parts, taken = targets(model, EXTRA), set()

    def pair_of(place: Stored) -> Pair | None:
        module = place.name.removesuffix(".weight")
        if module not in sides:
            return None
        taken.add(module)
        pair = sides[module]
        if missing := {"A", "B"} - pair.keys():
            raise CheckpointError(f"{folder / FILE}: {module} lacks lora_{missing.pop()}")
        scale = np.float32(_scale(folder, config, module, pair["A"].shape[0]))
        a, b = (np.asarray(pair[side], np.float32) for side in "AB")
        return Pair(a, b * scale)

    for ours, spec in adapted_specs(model, EXTRA).items():
        count = len(stored[ours]) // len(spec.parts)  # as many as there are experts, else one
        for i, part in enumerate(spec.parts):
            places, name = stored[ours][i * count : (i + 1) * count], spec.at(part.name)
            pairs = [pair_of(place) for place in places]
            if all(pair is None for pair in pairs):
                continue
            if ".experts." in name:
                pair = _of_experts(folder, name, pairs, places)
            else:
                (pair,), (place,) = pairs, places
                assert pair is not None
                if name != EMBEDDING:
                    pair = pair._replace(b=pair.b[place.rows])
            adapted[name] = shaped_pair(name, *pair, parts[name])
    if left := sorted(sides.keys() - taken):
        raise CheckpointError(
            f"{folder / FILE}: {left[0]} is no weight of this model that can have an adapter"
        )
    if not adapted:
        raise CheckpointError(f"{folder / FILE}: holds no adapter")
    return adapted


def _of_experts(folder: Path, name: str, pairs: list[Pair | None], places: list[Stored]) -> Pair:
    """Return one pair for all experts, of the largest rank, with zeros for experts that have
    none.
    """
    rank = max(pair.rank for pair in pairs if pair is not None)
    outputs, inputs = places[0].shape
    a = np.zeros((rank, len(pairs), inputs), np.float32)
    b = np.zeros((len(pairs), outputs, rank), np.float32)
    for x, pair in enumerate(pairs):
        if pair is None:
            continue
        if pair.a.shape[1:] != (inputs,) or pair.b.shape[:1] != (outputs,):
            shapes = f"A {pair.a.shape} and B {pair.b.shape}"
            raise CheckpointError(f"{folder / FILE}: {name} of expert {x}: {shapes}")
        a[: pair.rank, x], b[x, :, : pair.rank] = pair
    return Pair(a, b.reshape(-1, rank))


def _scale(folder: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _of_module(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    stated = _of_module(config.get("rank_pattern"), module, config.get("r"))
    if not isinstance(alpha, int | float) or stated != rank:
        raise CheckpointError(
            f"{folder}: {module} is of rank {rank}, by {CONFIG} r={stated} with lora_alpha={alpha}"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(pattern: Any, module: str, default: Any) -> Any:
    """Return the value of a pattern, {end of a name or regular expression: value}, for a module."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default
