"""Shards of one run to one output file, in the order of the input."""

import glob
import json
from array import array
from pathlib import Path
from typing import Any

from jpaged.integrations.batch import rows
from jpaged.integrations.batch.journal import shard_path
from jpaged.integrations.batch.manifest import check_same, manifest_path, read_manifest, write_json
from jpaged.integrations.batch.source import BatchError


def find_shards(output: str) -> list[str]:
    """The shards of an output, first to last: OUTPUT.i-of-N. Raises BatchError for a set that is
    not whole.
    """
    path = Path(output)
    pattern = f"{glob.escape(str(path.with_name(path.stem)))}.*-of-*{glob.escape(path.suffix)}"
    counts = {
        name[len(str(path.with_name(path.stem))) + 1 :].split("-of-")[1]
        for name in glob.glob(pattern)
    }
    counts = {int(text) for c in counts if (text := c.removesuffix(path.suffix)).isdecimal()}
    if len(counts) != 1:
        found = (
            "no shards" if not counts else f"shards of {' and of '.join(map(str, sorted(counts)))}"
        )
        raise BatchError(
            f"{found} of {output} ({shard_path(output, (0, 2))} and so on): name the files"
        )
    (count,) = counts
    return [shard_path(output, (i, count)) for i in range(count)]


def merge(shards: list[str], output: str, *, partial: bool = False) -> dict[str, Any]:
    """Write the rows of all shards to `output` by line number, atomically, with the manifest of an
    undivided run.

    partial: also where a shard is missing or has not ended. Returns counts of rows and failures,
    and what is missing. Raises BatchError for shards of different runs.
    """
    present = [path for path in shards if Path(path).exists()]
    missing = [path for path in shards if path not in present]
    if not present:
        raise BatchError(f"no such file: {shards[0]}")
    if missing and not partial:
        raise BatchError(f"{missing[0]} is missing (--partial merges what there is)")
    manifests = [read_manifest(path) for path in present]
    count = manifests[0]["shard"].partition("/")[2] if manifests[0]["shard"] else "1"
    whole = {**manifests[0], "shard": None}
    for path, manifest in zip(present, manifests, strict=True):
        check_same({**manifest, "shard": None}, whole, path, None)
        if not manifest.get("complete") and not partial:
            raise BatchError(
                f"{path} has not ended: go on with it with --resume (--partial merges "
                "what there is)"
            )
    taken = {manifest["shard"] for manifest in manifests}
    if len(taken) != len(present) or (len(taken) != int(count) and not partial):
        raise BatchError(
            f"shards {', '.join(sorted(map(str, taken)))} of {len(present)} files are no whole run"
        )
    tables = [rows.offsets(path) for path in present]
    result = {"rows": 0, "failed": 0, "missing": missing}
    files = [open(path, "rb") for path in present]  # noqa: SIM115
    try:
        with rows.Replacement(output) as merged:
            for number in range(max((len(t) for t in tables), default=0)):
                for table, file in zip(tables, files, strict=True):
                    if (offset := _offset(table, number)) >= 0:
                        file.seek(offset)
                        raw = file.readline()
                        merged.write(raw)
                        result["rows"] += 1
                        result["failed"] += rows.row_failed(json.loads(raw))
    finally:
        for file in files:
            file.close()
    complete = not missing and all(manifest.get("complete") for manifest in manifests)
    end = {"complete": True, "lines": sum(m["lines"] for m in manifests)} if complete else {}
    kept = {k: v for k, v in whole.items() if k not in ("complete", "lines")}
    write_json(manifest_path(output), {**kept, **end})
    return result


def _offset(table: array, number: int) -> int:
    return table[number] if number < len(table) else -1
