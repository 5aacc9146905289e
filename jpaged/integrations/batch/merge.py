"""Merges the shards of a run to one output file, in the order of the input."""

import glob
import re
from pathlib import Path
from typing import Any

from jpaged.integrations.batch import rows
from jpaged.integrations.batch.journal import shard_path
from jpaged.integrations.batch.manifest import check_same, manifest_path, read_manifest, write_json
from jpaged.integrations.batch.source import BatchError


def find_shards(output: str) -> list[str]:
    """Return the shards of an output, first to last: OUTPUT.i-of-N. Raises BatchError if one is
    missing.
    """
    path = Path(output)
    stem = str(path.with_name(path.stem))
    paths = glob.glob(f"{glob.escape(stem)}.*-of-*{glob.escape(path.suffix)}")
    names = [name[len(stem) + 1 :].removesuffix(path.suffix) for name in paths]
    counts = sorted({int(m[1]) for name in names if (m := re.fullmatch(r"\d+-of-(\d+)", name))})
    if len(counts) != 1:
        said = f"shards of {' and of '.join(map(str, counts))}" if counts else "no shards"
        example = shard_path(output, (0, 2))
        raise BatchError(f"{said} of {output} ({example} and so on): name the files")
    (count,) = counts
    return [shard_path(output, (i, count)) for i in range(count)]


def merge(shards: list[str], output: str, *, partial: bool = False) -> dict[str, Any]:
    """Write the rows of all shards to `output` by line number, atomically, with the manifest of an
    undivided run.

    partial: merge even if a shard is missing or has not finished. Returns the numbers of rows and
    failures, and what is missing. Raises BatchError for shards of different runs.
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
            said = "continue it with --resume (--partial merges what there is)"
            raise BatchError(f"{path} has not finished: {said}")
    taken = {manifest["shard"] for manifest in manifests}
    if len(taken) != len(present) or (len(taken) != int(count) and not partial):
        names = ", ".join(sorted(map(str, taken)))
        raise BatchError(f"shards {names} of {len(present)} files are no whole run")
    files = [rows.scan(path) for path in present]
    rows.rewrite(files, output, ordered=True)
    complete = not missing and all(manifest.get("complete") for manifest in manifests)
    end = {"complete": True, "lines": sum(m["lines"] for m in manifests)} if complete else {}
    kept = {k: v for k, v in whole.items() if k not in ("complete", "lines")}
    write_json(manifest_path(output), {**kept, **end})
    counts = {"rows": sum(f.answered for f in files), "failed": sum(f.failed for f in files)}
    return {**counts, "missing": missing}
