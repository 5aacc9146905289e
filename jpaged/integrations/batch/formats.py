"""Chooses the source that reads a path, by a format or by the path's name."""

import os
from pathlib import Path

from jpaged.integrations.batch.source import BatchError, LineSource, Source
from jpaged.integrations.batch.tables import DatasetSource, ParquetSource


def open_source(
    path: str,
    *,
    format: str = "auto",
    max_line_bytes: int = 16 << 20,
    columns: list[str] | None = None,
    split: str | None = None,
) -> Source:
    """Return the source for a path: "-" for stdin, a file of lines, a Parquet file, a folder of
    Parquet files, or a data set.

    format: "jsonl", "text", "parquet", "dataset", or "auto", which goes by the name. columns: the
    columns of a table to read, each as NAME or FIELD=NAME. split: of a data set. Raises BatchError.
    """
    if format == "auto":
        format = guess_format(path)
    if format in ("parquet", "dataset"):
        kind = ParquetSource if format == "parquet" else DatasetSource
        return kind(path, columns=columns, split=split)
    for flag, value in (("--columns", columns), ("--split", split)):
        if value is not None:
            raise BatchError(f"{flag}: {path} is read as {format}, which has no {flag.strip('-')}")
    return LineSource(path, max_line_bytes=max_line_bytes, text=format == "text")


def guess_format(path: str) -> str:
    """Return the format that a name implies: "parquet", "dataset", "text" (.txt), else "jsonl"."""
    if path.startswith("hf:"):
        return "dataset"
    if os.path.isdir(path):
        if any(Path(path).glob("*.parquet")):
            return "parquet"
        saved = any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json"))
        return "dataset" if saved else "jsonl"
    names = Path(path).name.removesuffix(".gz").removesuffix(".zst")
    return {".parquet": "parquet", ".txt": "text"}.get(Path(names).suffix, "jsonl")
