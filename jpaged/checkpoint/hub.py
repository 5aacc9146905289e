"""Models of the Hugging Face Hub by name: fetched, or found in its cache, as a folder."""

import importlib
import os
import re
from pathlib import Path

from jpaged.checkpoint.tensors import first_line
from jpaged.checkpoint.tokenizer import GENERATION_CONFIG, TOKENIZER_FILES
from jpaged.demo import MODELS
from jpaged.errors import CheckpointError
from jpaged.images.prepare import IMAGE_FILES, VIDEO_FILE

HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = (
    *("config.json", GENERATION_CONFIG, *TOKENIZER_FILES, "additional_chat_templates/*"),
    *("modules.json", "*_Pooling/config.json", "*_Dense/config.json"),  # of sentence-transformers
    *IMAGE_FILES,
    VIDEO_FILE,
)
# Only these names: a repository may hold the same weights in other layouts as well.
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "*_Dense/model.safetensors")


def local_folder(name: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """Return the absolute folder of a model: `name` itself if there is such a folder; else the
    embedded model of that name; else the snapshot that huggingface_hub has cached or fetches if it
    has the form OWNER/NAME or OWNER/NAME@REVISION, and `name` itself if not.

    huggingface_hub's settings for cache, token, mirror and offline mode apply (HF_HOME, HF_TOKEN,
    HF_ENDPOINT, HF_HUB_OFFLINE). weights=False fetches only what describes the model and its
    tokenizer. Raises CheckpointError with advice.
    """
    folder = Path(name).expanduser().absolute()
    model = HUB_ID.fullmatch(name) if isinstance(name, str) else None
    if folder.exists():
        return folder
    if isinstance(name, str) and name in MODELS:
        return MODELS[name]
    if model is None:
        return folder
    hub = importlib.import_module("huggingface_hub")  # slow, so only where it is needed
    errors = importlib.import_module("huggingface_hub.errors")
    constants = importlib.import_module("huggingface_hub.constants")
    asked = f"{name}: no such folder, and as a model of the Hugging Face Hub"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        path = hub.snapshot_download(
            model["id"],
            revision=model["revision"],
            allow_patterns=[*FILES, *(WEIGHTS if weights else ())],
        )
    except errors.GatedRepoError as e:
        reason = f"it is gated: accept its terms on its page there, and {log_in}"
        raise CheckpointError(f"{asked} {reason}") from e
    except errors.RepositoryNotFoundError as e:
        raise CheckpointError(f"{asked} it is not there, or private: then {log_in}") from e
    except errors.RevisionNotFoundError as e:
        raise CheckpointError(f"{asked} it has no revision {model['revision']!r}") from e
    # A failed connection, a full disk and a file that ends early are errors of several libraries.
    except Exception as e:
        cache = constants.HF_HUB_CACHE
        reason = f"it is not whole in the cache {cache} and cannot be fetched ({first_line(e)})"
        raise CheckpointError(f"{asked} {reason}; {_without_network(model['id'])}") from e
    # Offline, huggingface_hub returns a snapshot even if it is not complete.
    if weights and not any(Path(path).glob(WEIGHTS[0])):
        raise CheckpointError(f"{asked} {path} has no safetensors; {_without_network(model['id'])}")
    return Path(path)


def _without_network(model: str) -> str:
    return (
        f"without network, run `hf download {model}` where there is one, and copy that cache here "
        "or pass the folder that it prints"
    )
