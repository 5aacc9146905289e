"""What transformers fills in where a config.json says nothing, kept from one start to the next."""

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def filled(model_type: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with the defaults of its transformers class, under all names
    that the class has for them.

    Kept in the user's cache directory, by content and transformers' version: to import transformers
    takes a second of a start. Raises what the class raises.
    """
    version = importlib.metadata.version("transformers")
    text = json.dumps([version, "all names", model_type, known], sort_keys=True, default=str)
    file = cache_folder("configs") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError, ValueError):  # none yet, or one that is broken
        return json.loads(file.read_text())
    kind = import_transformers().CONFIG_MAPPING[model_type]
    fields = kind.from_dict(known).to_dict()
    aliases = kind.attribute_map.items()
    fields |= {alias: fields[name] for alias, name in aliases if name in fields}
    made = json.dumps(fields, default=str)
    replace_text(file, made)
    return json.loads(made)


def cache_folder(name: str) -> Path:
    """Return a folder of ours in the user's cache directory."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "jpaged" / name


def replace_text(file: Path, text: str) -> None:
    """Write a file at once, since another process may be writing the same; nothing where there is
    nowhere to write to: the next start asks again.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)


def import_transformers() -> Any:
    """Return the transformers package, imported here alone: it takes a second, and would advise to
    install PyTorch.

    The environment is written at the first import alone: XLA's threads read it while steps run, and
    a read of a table that is being moved ends the process.
    """
    if "transformers" in sys.modules:
        return importlib.import_module("transformers")
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    is_set = quiet in os.environ
    os.environ.setdefault(quiet, "1")
    try:
        return importlib.import_module("transformers")
    finally:
        if not is_set:
            del os.environ[quiet]
