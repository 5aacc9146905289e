"""A folder's tokenizer as transformers made it, kept from one start to the next: importing
transformers takes a second of every start, and most requests need nothing of it.
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
    """The methods of a tokenizer that requests need; transformers' tokenizer does everything else.

    backend: the JSON of tokenizers for the tokenizer that transformers made of the folder's files.
    """

    def __init__(self, folder: Path, backend: str, eos_token_id: int | None):
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_str(backend)
        # transformers encodes without the truncation and padding that a file may ask for.
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.eos_token_id = eos_token_id
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        return self.backend_tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def whole(self) -> Any:
        """transformers' tokenizer of the folder."""
        return load_tokenizer(self._folder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)


def whole(tokenizer: Any) -> Any:
    """Return transformers' tokenizer for one that may be a KeptTokenizer."""
    return tokenizer.whole if isinstance(tokenizer, KeptTokenizer) else tokenizer


def kept_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer: a KeptTokenizer if one is kept, else load_tokenizer's.

    The user's cache directory keeps them by the content of the files that transformers reads and by
    its version. Raises what load_tokenizer raises.
    """
    file = cache_folder("tokenizers") / f"{_digest(folder)}.json"
    # If none is kept, or it is broken: tokenizers raises plain Exception then.
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
    """Return whether the fast tokenizer does all the work: texts are not cleaned up afterwards and
    special tokens are not split.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return False
    return not (tokenizer.clean_up_tokenization_spaces or tokenizer.split_special_tokens)
