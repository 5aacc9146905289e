"""A Hugging Face config.json to the arguments of ModelConfig, and back."""

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jpaged.errors import ConfigError, UnsupportedError
from jpaged.models.families import FAMILIES
from jpaged.models.families.family import Family
from jpaged.models.hf_defaults import filled
from jpaged.models.hf_quantization import Format, read_format
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.vision.tower import VisionConfig

BOTH_WAYS = "use_bidirectional_attention"
HF_NAMES = {  # of what every family has, in a config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "max_position_embeddings": "max_position_embeddings",
}

UNKNOWN = ("transformers_version", "num_deepstack")  # to transformers' config classes


def read_hf(raw: Mapping[str, Any], *, images: bool = False) -> dict[str, Any]:
    """Return the arguments of ModelConfig; transformers fills in the family's defaults. images:
    with the vision tower, UnsupportedError where there is none that is read.

    Raises ConfigError for any architecture or option outside the families, by name.
    """
    num_deepstack = _num_deepstack(raw)
    whole, raw = raw, _as_family(_text_part(raw))
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list | tuple) and named else named
    if raw.get("model_type") is None:
        like = [f.model_type for f in FAMILIES.values() if f.architecture == architecture]
        meant = " or ".join(map(repr, like)) or "such as 'qwen3'"
        raise ConfigError(f"the Hugging Face config has no 'model_type': its family, {meant}")
    model_type = str(raw["model_type"])
    family = FAMILIES.get(model_type)
    architecture = architecture or (family.architecture if family else model_type)
    heads = {} if family is None else _headless(family)
    if family is None or architecture not in (family.architecture, *family.named_also, *heads):
        named = [(f.architecture, *f.named_also, *(f.text_of or ())[1:]) for f in FAMILIES.values()]
        built = ", ".join(sorted({name for names in named for name in names}))
        asked = f"architecture {architecture!r} (model_type {model_type!r})"
        raise ConfigError(
            f"{asked} is not supported; supported are {built}, and the same with "
            "ForSequenceClassification or Model in place of ForCausalLM"
        )
    format_of(raw)
    try:  # of a copy: the config classes write into nested dicts
        known = copy.deepcopy({k: v for k, v in raw.items() if k not in UNKNOWN})
        numbers = (key for key in family.floats if type(known.get(key)) is int)
        known |= {key: float(known[key]) for key in numbers}
        hf = filled(model_type, known)
    except Exception as e:  # the config classes validate with errors of many types
        raise ConfigError(f"config.json of {architecture}: {' '.join(str(e).split())}") from e
    is_causal = (kind := hf.get(BOTH_WAYS)) in (None, False, "vision")
    if not is_causal and (kind is not True or model_type != "gemma3_text"):
        raise ConfigError(
            f"{BOTH_WAYS}={kind!r}: only causal attention is supported, 'vision', which is causal "
            "in text, and True of gemma3_text"
        )
    # Not hf: some families default to an id that the file never named.
    eos = raw.get("eos_token_id")
    eos = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    if not all(isinstance(token, int) for token in eos):
        raise ConfigError(
            f"eos_token_id={raw['eos_token_id']!r}: must be an integer or a list of integers"
        )
    num_labels = None
    if architecture in heads:
        num_labels = _num_labels(raw) if heads[architecture] else 0
    read = family.description.read(hf)
    if not is_causal:
        read["layers"] = tuple(map(_seeing_both_ways, read["layers"]))
    vision = {"vision": _read_vision(whole, family, hf["hidden_size"])} if images else {}
    return {
        **vision,
        **{ours: hf[theirs] for ours, theirs in HF_NAMES.items()},
        **read,
        "num_labels": num_labels,
        "family": model_type,
        # Some config classes of text parts have no such field: transformers then ties nothing.
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings")),
        "eos_token_ids": eos,
        "num_deepstack": num_deepstack,
    }


def _seeing_both_ways(layer: LayerConfig) -> LayerConfig:
    """Return a layer whose tokens see those after them too. The window of a file counts both sides
    of a token.
    """
    mixer = layer.mixer
    assert isinstance(mixer, AttentionConfig)
    window = None if mixer.window is None else mixer.window // 2 + 1
    return replace(layer, mixer=replace(mixer, is_causal=False, window=window))


def _headless(family: Family) -> dict[str, bool]:
    """Return the architectures of a family that have no vocabulary, and whether each has a head of
    labels. transformers puts Text before the end of some.
    """
    base = re.sub(r"For[A-Z][A-Za-z]*$", "", family.architecture)
    return {
        f"{base}{text}{end}": end != "Model"
        for text in ("", "Text")
        for end in ("ForSequenceClassification", "Model")
    }


def _num_labels(raw: Mapping[str, Any]) -> int:
    """Return how many labels a classifier has, as transformers counts them."""
    names = raw.get("id2label")
    count = raw.get("num_labels", 2) if names is None else len(names)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"num_labels={count!r}: must be an integer of at least 1")
    return count


def _read_vision(raw: Mapping[str, Any], family: Family, hidden_size: int) -> VisionConfig:
    """Return the tower of a model of text and images."""
    model_type = raw.get("model_type")
    if family.vision is None or family.text_of is None or model_type != family.text_of[0]:
        built = ", ".join(f.text_of[0] for f in FAMILIES.values() if f.vision and f.text_of)
        raise UnsupportedError(
            f"images=True: no vision tower of model_type={model_type!r} is read (those of {built} "
            "are)"
        )
    known = copy.deepcopy({k: v for k, v in raw.items() if k != "transformers_version"})
    try:
        hf = filled(str(model_type), known)
    except Exception as e:  # see read_hf
        raise ConfigError(f"config.json of {model_type}: {' '.join(str(e).split())}") from e
    if not hf.get("vision_config"):
        raise UnsupportedError(f"images=True: this {model_type} has no vision_config")
    return family.vision(hf, hidden_size)


def format_of(raw: Mapping[str, Any]) -> Format | None:
    """The format of weights that are not plain; ConfigError for one that is not read."""
    raw = _as_family(_text_part(raw))
    family = FAMILIES.get(str(raw.get("model_type")))
    stacked = None if family is None else family.stacked_experts
    are_alternate = stacked is not None and stacked.alternate
    return read_format(raw.get("quantization_config"), are_alternate=are_alternate)


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text part where it is a model of text and images; else as it is."""
    parts = [f for f in FAMILIES.values() if f.text_of and f.text_of[0] == raw.get("model_type")]
    text = raw.get("text_config", raw)  # older files have its keys beside those of images
    if not parts or not isinstance(text, Mapping):
        return raw
    named = raw.get("architectures") or [None]
    parts = [f for f in parts if f.text_of and named[0] in (None, *f.text_of[1:])]
    if not parts:
        return raw
    model_type = parts[0].model_type if len(parts) == 1 else text.get("model_type")
    family = next((family for family in parts if family.model_type == model_type), None)
    if family is None:
        built = ", ".join(family.model_type for family in parts)
        raise ConfigError(
            f"text_config of {raw['model_type']}: model_type={model_type!r} is not supported "
            f"({built} are)"
        )
    shared = ("eos_token_id", "tie_word_embeddings", "quantization_config")
    names = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {**text, **{key: raw[key] for key in shared if key in raw}, **names}


def _num_deepstack(raw: Mapping[str, Any]) -> int:
    """Return after how many layers of text embeddings of images add something: as many as layers
    of the vision tower are named, or as `write_hf` has written.
    """
    vision = raw.get("vision_config")
    if "num_deepstack" in raw or not isinstance(vision, Mapping):
        return raw.get("num_deepstack", 0)
    return len(vision.get("deepstack_visual_indexes") or ())


def _as_family(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config under its family's model_type, where it has another one of the family's."""
    families = (f for f in FAMILIES.values() if raw.get("model_type") in f.also)
    family = next(families, None)
    return raw if family is None else {**raw, "model_type": family.model_type}


def write_hf(config: Any) -> dict[str, Any]:
    """Return the config.json that `read_hf` reads back to an equal ModelConfig.

    config: the ModelConfig.
    """
    family = FAMILIES[config.family]
    if config.vision is not None:
        return _write_whole(config, family)
    architecture, head = family.architecture, dict[str, Any]()
    written = family.description.write(config)
    if not config.is_causal:
        written[BOTH_WAYS] = True
        if (window := written.get("sliding_window")) is not None:
            written["sliding_window"] = 2 * (window - 1)
    if config.num_labels is not None:
        architecture = next(x for x, y in _headless(family).items() if y == bool(config.num_labels))
    if config.num_labels:
        head = {"id2label": {str(i): f"LABEL_{i}" for i in range(config.num_labels)}}
    return {
        "architectures": [architecture],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for ours, theirs in HF_NAMES.items()},
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        **head,
        **written,
        **({"num_deepstack": config.num_deepstack} if config.num_deepstack else {}),
    }


def _write_whole(config: Any, family: Family) -> dict[str, Any]:
    """Return the config.json of a model with its vision tower."""
    assert family.text_of is not None
    text = write_hf(replace(config, vision=None))
    del text["architectures"]
    shared = {key: text.pop(key) for key in ("tie_word_embeddings", "eos_token_id")}
    return {
        "architectures": [family.text_of[1]],
        "model_type": family.text_of[0],
        **shared,
        **config.vision.write(),
        "text_config": text,
    }
