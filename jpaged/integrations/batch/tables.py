"""Reads Parquet files and Hugging Face data sets as lines: a row becomes the bare object of its
columns, without nulls.
"""

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jpaged.integrations.batch.source import BatchError, LineError, Source, file_identity

ROWS = 256  # rows of a Parquet file that are turned into Python objects at once


class Table(Source):
    """The common part of both: columns, and rows as JSON lines."""

    def __init__(self, path: str, *, columns: list[str] | None, split: str | None):
        super().__init__(path)
        self._split = split
        pairs = [name.rpartition("=") for name in columns or []]
        # The field of a line for each column.
        self._fields = {column: field or column for field, _, column in pairs}
        if len(set(self._fields.values())) < len(pairs):
            said = "a column stands for one field, and a field has one column"
            raise BatchError(f"--columns {' '.join(columns or ())}: {said}")
        self._number = 0

    def __iter__(self) -> Iterator[tuple[int, bytes | LineError]]:
        for row in self._rows():
            self._number += 1
            yield self._number, as_line({self._fields.get(k, k): v for k, v in row.items()})

    def fraction(self) -> float | None:
        total = self.total()
        return None if total is None else self._number / max(total, 1)

    def identity(self) -> dict[str, Any]:
        return {"columns": {field: column for column, field in self._fields.items()}}

    def _rows(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _check(self, there: list[str]) -> list[str] | None:
        """Return the columns to read, None for all. Raises BatchError for a column that is
        missing.
        """
        if missing := sorted(set(self._fields) - set(there)):
            raise BatchError(f"--columns {missing[0]}: {self.path} has {', '.join(there)}")
        return list(self._fields) or None


class ParquetSource(Table):
    """A Parquet file, or a folder of them in the order of their names, read one row group at a
    time.
    """

    def __init__(self, path: str, *, columns: list[str] | None = None, split: str | None = None):
        super().__init__(path, columns=columns, split=split)
        if split is not None:
            raise BatchError(f"--split {split}: {path} is Parquet, which has no splits")
        try:
            import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
        except ImportError:
            said = "Parquet needs pyarrow: pip install 'jpaged[data]'"
            raise BatchError(f"cannot read {path}: {said}") from None
        self._paths = sorted(Path(path).glob("*.parquet")) if os.path.isdir(path) else [Path(path)]
        self._open = parquet.ParquetFile
        try:
            files = [self._open(p) for p in self._paths]
        except (OSError, ValueError) as e:  # the types of pyarrow's errors
            raise BatchError(f"cannot read {path}: {' '.join(str(e).split())}") from None
        self._total = sum(file.metadata.num_rows for file in files)
        self._names = [self._check(file.schema_arrow.names) for file in files]

    def total(self) -> int | None:
        return self._total

    def identity(self) -> dict[str, Any]:
        files = {path.name: file_identity(str(path)) for path in self._paths}
        return {"kind": "Parquet", "files": files, **super().identity()}

    def _rows(self) -> Iterator[dict[str, Any]]:
        for path, names in zip(self._paths, self._names, strict=True):
            with self._open(path, memory_map=True) as file:
                for batch in file.iter_batches(batch_size=ROWS, columns=names):
                    yield from batch.to_pylist(maps_as_pydicts="lossy")


class DatasetSource(Table):
    """A data set of the `datasets` library: a folder that save_to_disk wrote, or hf:NAME (or
    hf:FOLDER), which is streamed.
    """

    def __init__(self, path: str, *, columns: list[str] | None = None, split: str | None = None):
        super().__init__(path, columns=columns, split=split)
        if not path.startswith("hf:") and not os.path.isdir(path):
            said = "no such folder (hf:NAME streams a data set by its name)"
            raise BatchError(f"cannot read {path}: {said}")
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError:
            said = "data sets need datasets: pip install 'jpaged[data]'"
            raise BatchError(f"cannot read {path}: {said}") from None
        try:
            if path.startswith("hf:"):
                name = path.removeprefix("hf:")
                table: Any = datasets.load_dataset(name, split=split, streaming=True)
            else:
                table = datasets.load_from_disk(path)
        except Exception as e:  # the library raises many types
            raise BatchError(f"cannot read {path}: {' '.join(str(e).split())}") from e
        if isinstance(table, Mapping):
            there = ", ".join(map(str, table))
            if split is None and len(table) > 1:
                raise BatchError(f"{path} has the splits {there}: name one with --split")
            if split is not None and split not in table:
                raise BatchError(f"--split {split}: {path} has {there}")
            table = next(iter(table.values())) if split is None else table[split]
        elif split is not None and not path.startswith("hf:"):
            raise BatchError(f"--split {split}: {path} has no splits")
        if names := self._check(list(table.column_names or self._fields)):
            table = table.select_columns(names)
        self._data = table

    def total(self) -> int | None:
        return len(self._data) if hasattr(self._data, "__len__") else None

    def identity(self) -> dict[str, Any]:
        about: dict[str, Any] = {"kind": "a data set", "split": self._split, **super().identity()}
        if (rows := self.total()) is None:
            return {**about, "name": self.path}
        return {**about, "rows": rows, "fingerprint": self._data._fingerprint}

    def _rows(self) -> Iterator[dict[str, Any]]:
        return iter(self._data)


def as_line(row: Mapping[str, Any]) -> bytes | LineError:
    """Return a row as the bytes of a JSON line."""
    try:
        return json.dumps(_without_nulls(row), ensure_ascii=False, default=_plain).encode()
    except (TypeError, ValueError) as e:
        return LineError(
            f"a column holds a value that JSON cannot express: {e}", code="invalid_value"
        )


def _without_nulls(value: Any) -> Any:
    """Return a value without nulls: a column is null where a row has no value, and so are fields of
    objects that only other rows have.
    """
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r}")
