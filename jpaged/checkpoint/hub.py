"""Models of the Hugging Face Hub by name: fetched, or found in its cache, as a folder."""

import importlib
import os
import re
from pathlib import Path

from jpaged.checkpoint.tensors import first_line
from jpaged.checkpoint.tokenizer import GENERATION_CONFIG, TOKENIZER_FILES
from jpaged.errors import CheckpointError

HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ("config.json", GENERATION_CONFIG, *TOKENIZER_FILES, "additional_chat_templates/*")
# By these names alone: a repository may hold the same weights in other layouts beside them.
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def local_folder(name: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The folder of a model, absolute: `name` itself where there is such a folder, or where it is
    no OWNER/NAME or OWNER/NAME@REVISION of the Hub; else the snapshot that huggingface_hub has or
    fetches.

    Cache, token, mirror and offline mode are huggingface_hub's own (HF_HOME, HF_TOKEN, HF_ENDPOINT,
    HF_HUB_OFFLINE). weights=False fetches what describes the model and its tokenizer alone. Raises
    CheckpointError that says what to do.
    """
    folder = Path(name).expanduser().absolute()
    found = HUB_ID.fullmatch(name) if isinstance(name, str) else None
    if found is None or folder.exists():
        return folder
    hub = importlib.import_module("huggingface_hub")  # takes its time
    errors = importlib.import_module("huggingface_hub.errors")
    constants = importlib.import_module("huggingface_hub.constants")
    asked = f"{name}: no such folder, and as a model of the Hugging Face Hub"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        path = hub.snapshot_download(
            found["id"],
            revision=found["revision"],
            allow_patterns=[*FILES, *(WEIGHTS if weights else ())],
        )
    except errors.GatedRepoError as e:
        said = f"it is gated: accept its terms on its page there, and {log_in}"
        raise CheckpointError(f"{asked} {said}") from e
    except errors.RepositoryNotFoundError as e:
        raise CheckpointError(f"{asked} it is not there, or private: then {log_in}") from e
    except errors.RevisionNotFoundError as e:
        raise CheckpointError(f"{asked} it has no revision {found['revision']!r}") from e
    # A failed connection, a full disk, a file that ends early, in types of several libraries.
    except Exception as e:
        where = constants.HF_HUB_CACHE
        said = f"it is not whole in the cache {where} and cannot be fetched ({first_line(e)})"
        raise CheckpointError(f"{asked} {said}; {_without_network(found['id'])}") from e
    # Offline, a snapshot is taken as it is.
    if weights and not any(Path(path).glob(WEIGHTS[0])):
        raise CheckpointError(f"{asked} {path} has no safetensors; {_without_network(found['id'])}")
    return Path(path)


def _without_network(model: str) -> str:
    return (
        f"without network, run `hf download {model}` where there is one, and copy that cache here "
        "or pass the folder that it prints"
    )
