"""What families share whose config.json is read into layers one by one: windows and rope by the
kind of a layer, in `layer_types`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.switches import read_scaling
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.rope import RopeConfig
from jpaged.models.rope_scaling import ROPE_OPTIONS

WINDOW, FULL = "sliding_attention", "full_attention"


def layer_kinds(hf: Mapping[str, Any]) -> list[str]:
    """Return `layer_types`; ConfigError for a kind other than WINDOW and FULL."""
    if unknown := set(hf["layer_types"]) - {WINDOW, FULL}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    return hf["layer_types"]


def read_rope(
    hf: Mapping[str, Any], kind: str, head_dim: int, partial_rotary_factor: float = 1.0
) -> RopeConfig:
    """Return the rotation of the layers of a kind, by the parameters that the kind has.

    partial_rotary_factor: the family's default.
    """
    rope = hf["rope_parameters"][kind]
    fraction = rope.get("partial_rotary_factor") or partial_rotary_factor
    if rope["rope_type"] == "proportional":  # there it is an option of the scaling
        fraction = 1.0
    return RopeConfig(
        dim=int(head_dim * fraction),
        theta=float(rope["rope_theta"]),
        scaling=read_scaling(rope, hf["max_position_embeddings"]),
    )


def write_kinds(layers: Iterable[LayerConfig], max_position: int) -> dict[str, Any]:
    """Return what `layer_kinds` and `read_rope` read back, and `sliding_window`. max_position:
    max_position_embeddings.
    """
    kinds, ropes, windows = [], {}, []
    for layer in layers:
        assert isinstance(layer.mixer, AttentionConfig) and layer.mixer.rope is not None
        kind = FULL if layer.mixer.window is None else WINDOW
        kinds.append(kind)
        windows += [layer.mixer.window] if layer.mixer.window else []
        rope, scaling = layer.mixer.rope, layer.mixer.rope.scaling
        fraction = rope.dim / layer.mixer.head_dim
        if int(layer.mixer.head_dim * fraction) < rope.dim:
            fraction = math.nextafter(fraction, 1)
        raw = {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": fraction}
        if scaling is not None:
            raw |= {name: getattr(scaling, name) for name in ROPE_OPTIONS[scaling.kind]}
            raw |= {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.original_max_position != max_position:
                raw["original_max_position_embeddings"] = scaling.original_max_position
        if ropes.setdefault(kind, raw) != raw:
            raise ConfigError(f"layers of {kind!r} rotate in several ways: no config.json says so")
    if len(set(windows)) > 1:
        raise ConfigError(f"windows of {sorted(set(windows))}: no config.json says so")
    raw = {"layer_types": kinds, "rope_parameters": ropes}
    return raw | {"sliding_window": windows[0]} if windows else raw
