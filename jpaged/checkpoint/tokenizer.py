"""The tokenizer and the generation defaults of a checkpoint folder. Only local files are read, and
no remote code runs.
"""

import os
from pathlib import Path
from typing import Any

from jpaged.checkpoint.tensors import first_line
from jpaged.checks import read_json
from jpaged.errors import CheckpointError
from jpaged.models.hf_defaults import import_transformers

# A folder with one of these has a tokenizer.
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
    """Return transformers' tokenizer of a folder, None if the folder has none; CheckpointError if
    it is damaged.
    """
    if not any((Path(folder) / name).is_file() for name in VOCABULARIES):
        return None
    try:
        auto = import_transformers().AutoTokenizer
        tokenizer = auto.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    # tokenizers and transformers raise many types, among them plain Exception
    except Exception as e:
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded ({first_line(e)})") from e
    # The engine checks lengths; transformers would only warn.
    tokenizer.model_max_length = 1 << 62
    return tokenizer


def load_generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the generation defaults of a folder (temperature, top_p, eos_token_id, ...), {} if it
    has none.
    """
    file = Path(folder) / GENERATION_CONFIG
    values = read_json(file, CheckpointError) if file.is_file() else {}
    return {
        name: value
        for name, value in values.items()
        if name not in ("_from_model_config", "transformers_version")
    }
