"""A Hugging Face config.json to the fields of ModelConfig, and back."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families import FAMILIES, ExpertKeys, Family
from jpaged.models.hf_defaults import filled
from jpaged.models.hf_quantization import Format, read_format
from jpaged.models.rope_scaling import ROPE_OPTIONS, RopeScaling

HF_NAMES = {  # of ModelConfig's sizes in a config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # a config.json's, and ours
CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of the activation of that name


def read_hf(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; transformers fills in the family's defaults.

    Raises ConfigError for any architecture or option outside the families, by name.
    """
    raw = _text_part(raw)
    model_type = str(raw.get("model_type"))
    family = FAMILIES.get(model_type)
    named = raw.get("architectures") or (family.architecture if family else model_type)
    architecture = named[0] if isinstance(named, list | tuple) else named
    if family is None or architecture != family.architecture:
        named = [(f.architecture, *(f.text_of or ())[1:]) for f in FAMILIES.values()]
        built = ", ".join(name for names in named for name in names)
        asked = f"architecture {architecture!r} (model_type {model_type!r})"
        raise ConfigError(f"{asked} is not supported; supported are {built}")
    format_of(raw)
    try:  # of a copy: the config classes write into nested dicts
        known = copy.deepcopy({k: v for k, v in raw.items() if k != "transformers_version"})
        hf = filled(model_type, known)
    except Exception as e:  # the config classes validate with errors of many types
        raise ConfigError(f"config.json of {architecture}: {' '.join(str(e).split())}") from e
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention: only causal attention is supported")
    if (activation := hf.get(family.activation) or "silu") not in ACTIVATIONS:
        built = ", ".join(ACTIVATIONS)
        raise ConfigError(f"{family.activation}={activation!r} is not supported ({built} are)")
    if family.always.get("activation") == "clamped":
        given = tuple(hf.get(key, default) for key, default in CLAMPED.items())
        if given != tuple(CLAMPED.values()):
            raise ConfigError(f"{', '.join(CLAMPED)}={given}: only {tuple(CLAMPED.values())} are")
    windows = () if family.windows == "none" else _sliding_windows(hf)
    # Not hf: some families default to an id that the file never named.
    eos = raw.get("eos_token_id")
    eos = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    if not all(isinstance(token, int) for token in eos):
        raise ConfigError(
            f"eos_token_id={raw['eos_token_id']!r}: must be an integer or a list of integers"
        )
    hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    switches = {ours: bool(hf.get(key)) for key, set_by in family.keys.items() for ours in set_by}
    numbers = {name: hf[name] for name in family.numbers if hf.get(name) is not None}
    own = {"activation": ACTIVATIONS[activation], **switches, **numbers, **family.always}
    return dict(
        **{ours: hf[theirs] for ours, theirs in HF_NAMES.items()},
        **own,
        **_rope(hf, family, windows),
        **({} if family.experts is None else _experts(hf, family.experts)),
        family=model_type,
        tie_word_embeddings=bool(hf["tie_word_embeddings"]),
        sliding_windows=windows,
        eos_token_ids=eos,
    )


def format_of(raw: Mapping[str, Any]) -> Format | None:
    """The format of weights that are not plain; ConfigError for one that is not read."""
    raw = _text_part(raw)
    family = FAMILIES.get(str(raw.get("model_type")))
    are_stacked = family is not None and family.experts is not None and family.experts.are_stacked
    return read_format(raw.get("quantization_config"), are_stacked=are_stacked)


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part where it is a model of text and images; else as it is."""
    named = raw.get("architectures") or [None]
    for family in FAMILIES.values():
        if family.text_of is None or raw.get("model_type") != family.text_of[0]:
            continue
        text = raw.get("text_config")
        if not isinstance(text, Mapping) or named[0] not in (None, family.text_of[1]):
            continue
        shared = ("eos_token_id", "tie_word_embeddings", "quantization_config")
        own = {"model_type": family.model_type, "architectures": [family.architecture]}
        return {**text, **{key: raw[key] for key in shared if key in raw}, **own}
    return raw


def write_hf(config: Any) -> dict[str, Any]:
    """The config.json that `read_hf` reads back to an equal ModelConfig.

    config: the ModelConfig.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    original: dict[str, Any] = {}
    if s := config.rope_scaling:
        rope |= {"rope_type": s.kind, "factor": s.factor}
        if s.kind != "linear" or s.original_max_position != config.max_position_embeddings:
            original = {"original_max_position_embeddings": s.original_max_position}
        rope |= {name: getattr(s, name) for name in ROPE_OPTIONS[s.kind]} | original
    if config.partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    family = FAMILIES[config.family]
    if family.rope_by_kind:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta or config.rope_theta}
        rope = {"full_attention": rope, "sliding_attention": local}
    theirs = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for ours, theirs in HF_NAMES.items()},
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        family.activation: theirs.get(config.activation, "silu"),
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    raw |= {key: getattr(config, switches[0]) for key, switches in family.keys.items()}
    raw |= {name: getattr(config, name) for name in family.numbers}
    if config.rope_scaling and config.rope_scaling.kind == "longrope":
        raw |= original  # there it counts
    if family.experts is not None:
        raw |= {theirs: getattr(config, ours) for ours, theirs in family.experts.sizes.items()}
        if family.experts.has_dense_layers:
            raw |= {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}
    if family.no_rope:
        raw[family.no_rope] = [
            int(i not in config.no_rope_layers) for i in range(config.num_layers)
        ]
    window = next((w for w in config.sliding_windows if w), None)
    if family.windows == "every layer":
        raw["sliding_window"] = window
    elif family.windows == "by layer":
        windows = config.sliding_windows or (None,) * config.num_layers
        kinds = ["sliding_attention" if w else "full_attention" for w in windows]
        on = {"use_sliding_window": True, "sliding_window": window} if window else {}
        raw |= on | {"layer_types": kinds}
    return raw


def _rope(hf: dict[str, Any], family: Family, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """ModelConfig's fields of rotary embeddings."""
    rope = hf["rope_parameters"]  # transformers moves every older name into it
    local = rope.get("sliding_attention") if family.rope_by_kind else None
    rope = rope["full_attention"] if family.rope_by_kind else rope
    fraction = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if fraction != 1.0 and not family.partial_rotary:
        raise ConfigError(f"rope_parameters={rope}: partial rotary is not supported")
    fields: dict[str, Any] = {
        "rope_theta": float(rope["rope_theta"] or 10000.0),
        "rope_scaling": _rope_scaling(rope, hf["max_position_embeddings"]),
        "partial_rotary_factor": float(fraction),
    }
    if family.no_rope:
        uses = hf[family.no_rope]
        fields["no_rope_layers"] = tuple(i for i in range(hf["num_hidden_layers"]) if not uses[i])
    if local is not None and any(windows):
        if local["rope_type"] != "default":
            raise ConfigError(
                f"rope_type={local['rope_type']!r} of layers with a window is not supported"
            )
        theta = float(local["rope_theta"] or 10000.0)
        if theta != fields["rope_theta"] or fields["rope_scaling"] is not None:
            fields["local_rope_theta"] = theta
    return fields


def _experts(hf: dict[str, Any], keys: ExpertKeys) -> dict[str, Any]:
    """ModelConfig's fields of a mixture."""
    if "num_experts" not in hf:  # some config classes rename it
        hf = hf | {"num_experts": hf["num_local_experts"]}
    fields: dict[str, Any] = {ours: hf[theirs] for ours, theirs in keys.sizes.items()}
    if keys.has_dense_layers:
        step, layers = hf["decoder_sparse_step"], range(hf["num_hidden_layers"])
        dense = [i for i in layers if i in hf["mlp_only_layers"] or (i + 1) % step]
        fields["dense_layers"] = tuple(dense)
    return fields


def _rope_scaling(rope: dict[str, Any], max_position: int) -> RopeScaling | None:
    kind = rope["rope_type"]
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ConfigError(f"rope_parameters={rope}: mscale is not supported")
    if kind == "default":
        return None
    if kind not in ROPE_OPTIONS:
        raise ConfigError(
            f"rope_type={kind!r} is not supported (default, {', '.join(ROPE_OPTIONS)} are)"
        )
    original = rope.get("original_max_position_embeddings") or max_position
    options = {name: rope[name] for name in ROPE_OPTIONS[kind] if rope.get(name) is not None}
    options["factor"] = factor = rope.get("factor") or max_position / original
    lists = {k: tuple(v) for k, v in options.items() if isinstance(v, list | tuple)}
    numbers = [(k, v) for k, v in options.items() if k not in lists]
    numbers += [(k, v) for k, found in lists.items() for v in found]
    if bad := {k: v for k, v in numbers if not isinstance(v, int | float) or not math.isfinite(v)}:
        raise ConfigError(f"rope_parameters={bad}: must be numbers")
    options |= lists
    if "attention_factor" not in options and factor > 1:
        if kind == "yarn":
            options["attention_factor"] = 0.1 * math.log(factor) + 1.0
        elif kind == "longrope":
            options["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(kind=kind, original_max_position=original, **options)


def _sliding_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """One window a layer; () where every layer attends to everything."""
    window, kinds = hf.get("sliding_window"), hf.get("layer_types")
    kinds = ["sliding_attention"] * hf["num_hidden_layers"] if kinds is None else kinds
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
