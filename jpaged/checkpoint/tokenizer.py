"""The tokenizer and the generation defaults of a checkpoint folder; local files only, no remote
code.
"""

import os
from pathlib import Path
from typing import Any

from jpaged.checkpoint.tensors import first_line
from jpaged.checks import read_json
from jpaged.errors import CheckpointError
from jpaged.models.hf_defaults import import_transformers

# One of these makes a tokenizer.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
GENERATION_CONFIG = "generation_config.json"


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """transformers' tokenizer of a folder, or None where the folder has none; CheckpointError when
    it is damaged.
    """
    if not any((Path(folder) / name).is_file() for name in VOCABULARIES):
        return None
    try:
        auto = import_transformers().AutoTokenizer
        tokenizer = auto.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    # tokenizers and transformers raise many types, plain Exception among them
    except Exception as e:
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded ({first_line(e)})") from e
    # Lengths are the engine's to check; transformers would warn and go on.
    tokenizer.model_max_length = 1 << 62
    return tokenizer


def load_generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The generation defaults that a folder ships (temperature, top_p, eos_token_id, ...); {} where
    it ships none.
    """
    file = Path(folder) / GENERATION_CONFIG
    values = read_json(file, CheckpointError) if file.is_file() else {}
    return {
        name: value
        for name, value in values.items()
        if name not in ("_from_model_config", "transformers_version")
    }
