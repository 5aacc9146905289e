"""A folder's tokenizer as transformers made it, kept from one start to the next: to import
transformers takes a second of a start, and most requests need nothing of it.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpaged.checkpoint.tokenizer import TOKENIZER_FILES, load_tokenizer
from jpaged.models.hf_defaults import cache_folder, replace_text


class KeptTokenizer:
    """What requests need of a tokenizer; whatever else is asked of it, transformers' own does.

    backend: tokenizers' text form of the tokenizer that transformers made of the folder's files.
    """

    def __init__(self, folder: Path, backend: str, eos_token_id: int | None):
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_str(backend)
        self.backend_tokenizer.no_truncation()  # as transformers encodes, whatever a file says
        self.backend_tokenizer.no_padding()
        self.eos_token_id = eos_token_id
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        return self.backend_tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def whole(self) -> Any:
        """transformers' tokenizer."""
        return load_tokenizer(self._folder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)


def whole(tokenizer: Any) -> Any:
    """transformers' tokenizer of one that may be kept."""
    return tokenizer.whole if isinstance(tokenizer, KeptTokenizer) else tokenizer


def kept_tokenizer(folder: Path) -> Any:
    """What load_tokenizer gives, or what is kept of it.

    Kept in the user's cache directory, by the content of the files that transformers reads and by
    its version. Raises what load_tokenizer raises.
    """
    file = cache_folder("tokenizers") / f"{_digest(folder)}.json"
    # None yet, or one that is broken, for which tokenizers raises plain Exception.
    with contextlib.suppress(Exception):
        return KeptTokenizer(folder, **json.loads(file.read_text()))
    tokenizer = load_tokenizer(folder)
    if _is_plain(tokenizer):
        kept = {
            "backend": tokenizer.backend_tokenizer.to_str(),
            "eos_token_id": tokenizer.eos_token_id,
        }
        replace_text(file, json.dumps(kept))
    return tokenizer


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for package in ("transformers", "tokenizers"):
        digest.update(f"{package} {importlib.metadata.version(package)} ".encode())
    for name in ("config.json", *TOKENIZER_FILES):  # the config names a class
        file = folder / name
        if file.is_file():
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{name} {content} ".encode())
    return digest.hexdigest()[:24]


def _is_plain(tokenizer: Any) -> bool:
    """Whether its fast tokenizer does all the work: texts are not cleaned up afterwards, special
    tokens are not split.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return False
    return not (tokenizer.clean_up_tokenization_spaces or tokenizer.split_special_tokens)
