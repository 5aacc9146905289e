"""ModelConfigs of published EAGLE-3 heads. Their folders have the layout of the EAGLE project, a
config.json of one Llama layer with `draft_vocab_size`, or that of speculators, in which
`transformer_layer_config` describes the layer.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.hf import INDEX, SINGLE, Entry, find_entries, head_entries, read_raw
from jpaged.errors import CheckpointError, ConfigError, UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.draft_head import STATES, HeadConfig
from jpaged.models.families import FAMILIES
from jpaged.models.hf_config import read_hf

EAGLE_3 = re.compile(r"eagle-?_?3", re.IGNORECASE)
# Other ways to guess, by the architecture, model_type or algorithm in their config.json.
OTHERS = re.compile(r"medusa|eagle|hydra|mlp_?speculator|dflash|nextn|mtp", re.IGNORECASE)
LAYERS = ("llama", "qwen3")  # families whose layers a head may have
# Settings of variants that are not supported.
VARIANTS = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting", "ptd_token_id")


def is_head(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes an EAGLE-3 head; UnsupportedError, which names it, for
    another kind of head.
    """
    named = [*(raw.get("architectures") or ()), raw.get("model_type")]
    named += [raw.get("speculators_model_type"), _speculators(raw).get("algorithm")]
    names = [str(name) for name in named if name is not None]
    if any(map(EAGLE_3.search, names)):
        return True
    if other := next(filter(OTHERS.search, names), None):
        raise UnsupportedError(f"{other!r} is not supported: of heads that guess, EAGLE-3's are")
    return "draft_vocab_size" in raw


def read_head(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture of the head in a folder; its tensors show which weights it does not
    share with its model. Raises ConfigError for options that are not supported, CheckpointError.
    """
    for name in VARIANTS:
        if raw.get(name):
            raise UnsupportedError(f"EAGLE-3 head with {name}={raw[name]!r}: that is not built")
    nested: Any = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedError("EAGLE-3 head with use_aux_hidden_state=False: that is not built")
    layer = raw.get("transformer_layer_config", raw)
    kind = layer.get("model_type")
    if kind not in LAYERS:
        raise UnsupportedError(f"EAGLE-3 head of {kind!r} layers: only of {', '.join(LAYERS)}")
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        raise CheckpointError(
            f"{folder}: an EAGLE-3 head in other files than safetensors: convert them"
        )
    entries = find_entries(folder)
    names = head_entries(entries)
    plain = {"architectures": [FAMILIES[kind].architecture], "tie_word_embeddings": False}
    fields = read_hf({**layer, **plain})
    if len(fields["layers"]) != 1:
        raise UnsupportedError(f"EAGLE-3 head of {len(fields['layers'])} layers: only of one")
    if fields["layers"][0].mixer.window is not None:
        raise UnsupportedError("EAGLE-3 head with a sliding window: that is not built")
    draft_vocab = raw.get("draft_vocab_size") or fields["vocab_size"]
    fields |= {"qk_norm": "model.layers.0.self_attn.q_norm.weight" in names, "eos_token_ids": ()}
    norm_first = raw.get("norm_before_residual", "speculators_config" in raw)
    head = HeadConfig(
        target_hidden_size=raw.get("target_hidden_size") or fields["hidden_size"],
        draft_vocab_size=draft_vocab,
        aux_layers=_layers(raw, nested),
        draft_tokens=_tokens(folder, entries, draft_vocab, fields["vocab_size"]),
        has_embed="model.embed_tokens.weight" in names,
        has_lm_head="lm_head.weight" in names,
        norm_before_residual=bool(norm_first),
    )
    return ModelConfig(**fields, draft_head=head)


def _speculators(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    config = raw.get("speculators_config")
    return config if isinstance(config, Mapping) else {}


def _layers(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose inputs the head takes, () if its config does not list them. Under
    `eagle_config` the list is of layers whose outputs it takes.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    asked, add = raw.get(name), 0
    if asked is None:
        asked, add = nested.get(name), 1
    if asked is None:
        return ()
    if not isinstance(asked, list) or not all(isinstance(i, int) for i in asked):
        raise ConfigError(f"{name}={asked!r}: must be a list of {STATES} layers")
    return tuple(i + add for i in asked)


def _tokens(folder: Path, entries: dict[str, Entry], draft_vocab: int, vocab: int) -> bytes:
    """Return the ids of the tokens that the head can guess as bytes of int32, b"" if it can guess
    all. A file's d2t has the difference of each id and its index.
    """
    entry = entries.get("d2t") or entries.get("model.d2t")
    if entry is None:
        if draft_vocab != vocab:
            raise CheckpointError(
                f"{folder}: draft_vocab_size={draft_vocab} of vocab_size={vocab}, and no d2t that "
                "says which tokens those are"
            )
        return b""
    if entry.dtype not in ("I64", "I32") or entry.shape != (draft_vocab,):
        raise CheckpointError(
            f"{folder}: d2t of {entry.dtype} {entry.shape}: must be integers of "
            f"draft_vocab_size={draft_vocab}"
        )
    ids = np.arange(draft_vocab) + read_raw("d2t", entry).astype(np.int64)
    if len(np.unique(ids)) < len(ids) or ids.min() < 0 or ids.max() >= vocab:
        raise CheckpointError(f"{folder}: d2t names a token twice or one past vocab_size={vocab}")
    return b"" if np.array_equal(ids, np.arange(vocab)) else ids.astype(np.int32).tobytes()
