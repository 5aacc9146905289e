"""The manifest of an output file, which says what made it. A run resumes only an output that it
would have made itself.

Large files are identified by their size and a digest of samples, which include the first and the
last bytes: a changed checkpoint or input is detected without reading gigabytes, and an input that
has only grown still matches at its old size. Files that describe a model (configs, tokenizer,
template, headers of weights) are digested whole. judged.py says which settings are compared.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from jpaged.integrations.batch.judged import not_judged
from jpaged.integrations.batch.replacement import Replacement
from jpaged.integrations.batch.source import BatchError, file_identity

VERSION = 2
# Fields that check_same does not compare like the others: how the run and its input ended.
NOT_COMPARED = {"complete", "lines", "input.newline", "not_judged"}
# Endings and beginnings of names of files that describe a model or the layout of its weights.
DESCRIBING = (".json", ".jinja", ".model", ".txt", ".yaml", ".ocdbt", ".zarray")
DESCRIBING_NAMES = ("_METADATA", "_sharding", "_CHECKPOINT_METADATA", "chat_template")
WHOLE_BYTES = 256 << 20  # a larger file is digested in samples, like weights


def manifest_path(output: str) -> str:
    return f"{output}.manifest.json"


def make_manifest(
    *,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    shard: tuple[int, int] | None,
    adapters: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Return the manifest of a run.

    model: its model_identity. adapters: the model_identity of each adapter, by name. settings:
    everything else that an answer depends on beside its line, including the judged settings of
    judged.py.
    """
    shards = None if shard is None else "/".join(map(str, shard))
    return {
        "version": VERSION,
        "model": dict(model),
        "adapters": dict(adapters or {}),
        "run": dict(settings),
        "input": dict(source),
        "shard": shards,
        "not_judged": not_judged(),
    }


def model_identity(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the size and digest of every file of a checkpoint or adapter folder, by its path in
    the folder.

    Files that describe the model and the headers of safetensors files are digested whole, weights
    in samples. Links are followed; hidden files are left out.
    """
    digests = {}
    for path in _files_below(Path(folder), set()):
        identity = file_identity(str(path))
        parts = [f"{identity['bytes']} bytes", str(identity["digest"])]
        if (digest := _digest_of_description(path)) is not None:
            parts.append(digest)
        digests[str(path.relative_to(folder))] = ", ".join(parts)
    return digests


def _files_below(folder: Path, above: set[str]) -> Iterator[Path]:
    """Yield every file of a folder in the order of names, also through links. above: real paths of
    the enclosing folders, to which a link may lead back.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files_below(path, above | {real})
        elif path.is_file() and not path.name.startswith("."):
            yield path


def _digest_of_description(path: Path) -> str | None:
    """Return a digest of all of a file that describes a model, or of the header of a safetensors
    file; None for any other file.
    """
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            return f"header {xxhash.xxh3_64_hexdigest(file.read(min(length, WHOLE_BYTES)))}"
        is_describing = path.suffix in DESCRIBING or path.name.startswith(DESCRIBING_NAMES)
        if not is_describing or os.fstat(file.fileno()).st_size > WHOLE_BYTES:
            return None
        return f"whole {xxhash.xxh3_64_hexdigest(file.read())}"


def read_manifest(output: str) -> dict[str, Any]:
    """Return the manifest beside an output. Raises BatchError."""
    path = manifest_path(output)
    try:
        manifest = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise BatchError(
            f"{output} has no {path}, which would say what made it: start again with --overwrite"
        ) from None
    except (OSError, ValueError) as e:
        raise BatchError(f"cannot read {path}: {e}") from None
    if not isinstance(manifest, dict) or manifest.get("version") not in (1, VERSION):
        raise BatchError(f"{path} has another version: start again with --overwrite")
    if manifest["version"] == 1:
        raise BatchError(
            f"{path} was written by an earlier jpaged and does not say with which quantization, "
            "kv_cache_dtype and adapters the run began: finish the run with the jpaged that began "
            "it, or start again with --overwrite"
        )
    return manifest


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write a file of JSON, and replace an earlier one in one step."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    with Replacement(path) as file:
        # Names of files may hold bytes that are no UTF-8.
        file.write(f"{text}\n".encode(errors="backslashreplace"))


def check_same(
    old: Mapping[str, Any], new: Mapping[str, Any], output: str, source: str | None
) -> None:
    """Raise BatchError for the first field in which two manifests differ.

    source: path of a file of lines, which may since have grown by more lines; None if nothing may
    have changed.
    """
    left_out, judged = set(old.get("not_judged", ())), set(new["run"])
    if unknown := sorted(left_out & judged):
        raise BatchError(
            f"{output} was begun by an earlier jpaged, whose manifest does not say {unknown[0]}: "
            "finish the run with that version, or start again with --overwrite"
        )
    new = {**new, "input": dict(new["input"])}
    before = old["input"]
    whole_lines, size = before.get("newline"), new["input"].get("bytes", 0)
    if source is not None and whole_lines and size > before["bytes"]:
        new["input"] |= file_identity(source, before["bytes"])
    if (difference := first_difference(old, new)) is not None:
        name, was, now = difference
        raise BatchError(
            f"{output} belongs to another run: {name} is {was} there, {now} in this run "
            "(--overwrite starts again)"
        )


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first field in which two manifests differ, by its dotted name, and its two values
    as JSON; None if they belong to one run.
    """
    was, now = dict(_flat(old)), dict(_flat(new))
    for name in dict.fromkeys((*was, *now)):
        if name not in NOT_COMPARED and was.get(name) != now.get(name):
            return name, json.dumps(was.get(name)), json.dumps(now.get(name))
    return None


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
