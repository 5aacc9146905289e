"""The manifest of an output file: what made it. A run resumes only what it would have made itself.

Files are known by their size and a digest of samples, the first and the last bytes among them: a
changed checkpoint or input is found without reading gigabytes, and an input that has only grown
still matches at its old size.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jpaged.integrations.batch.source import BatchError, file_identity

VERSION = 1
NOT_COMPARED = {"complete", "lines", "input.newline"}  # how the run and its input ended


def manifest_path(output: str) -> str:
    return f"{output}.manifest.json"


def make_manifest(
    *,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    shard: tuple[int, int] | None,
) -> dict[str, Any]:
    """The manifest of a run. settings: everything that an answer depends on beside the model and
    its line.
    """
    shards = None if shard is None else "/".join(map(str, shard))
    return {
        "version": VERSION,
        "model": dict(model),
        "run": dict(settings),
        "input": dict(source),
        "shard": shards,
    }


def model_identity(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Size and digest of every file of a checkpoint folder, by its name inside."""
    root, found = Path(folder), {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".")):
        identity = file_identity(str(path))
        found[str(path.relative_to(root))] = f"{identity['bytes']} bytes, {identity['digest']}"
    return found


def read_manifest(output: str) -> dict[str, Any]:
    """The manifest beside an output. Raises BatchError."""
    path = manifest_path(output)
    try:
        found = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise BatchError(
            f"{output} has no {path}, which says what made it: start again with --overwrite"
        ) from None
    except (OSError, ValueError) as e:
        raise BatchError(f"cannot read {path}: {e}") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise BatchError(f"{path} is not of this version: start again with --overwrite")
    return found


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write atomically: the old file or the whole new one is there, whatever happens."""
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def check_same(
    old: Mapping[str, Any], new: Mapping[str, Any], output: str, source: str | None
) -> None:
    """Raise BatchError naming the first field in which two manifests differ.

    source: path of a file of lines, which may have grown since by more lines; None where nothing
    may.
    """
    new = {**new, "input": dict(new["input"])}
    before = old["input"]
    whole_lines, size = before.get("newline"), new["input"].get("bytes", 0)
    if source is not None and whole_lines and size > before["bytes"]:
        new["input"] |= file_identity(source, before["bytes"])
    was, now = dict(_flat(old)), dict(_flat(new))
    for name in dict.fromkeys((*was, *now)):
        if name not in NOT_COMPARED and was.get(name) != now.get(name):
            values = f"{json.dumps(was.get(name))} there, {json.dumps(now.get(name))} in this run"
            raise BatchError(
                f"{output} is of another run: {name} is {values} (--overwrite starts again)"
            )


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
