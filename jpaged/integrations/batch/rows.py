"""Rows of an output file: which lines they answer, which of them count, and a file of those
alone.
"""

import dataclasses
import json
import os
from array import array
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import xxhash

from jpaged.integrations.batch.answers import row_failed, row_id, row_number
from jpaged.integrations.batch.compact import LineSet
from jpaged.integrations.batch.source import BatchError


@dataclasses.dataclass(kw_only=True)
class Found:
    """What an output file holds: a bit, a digest and no object a line.

    size: bytes up to the end of the last whole row. superseded: some line has several rows; the
    last one counts.
    """

    path: str
    done: LineSet = dataclasses.field(default_factory=LineSet)
    failed: LineSet = dataclasses.field(default_factory=LineSet)
    size: int = 0
    superseded: bool = False
    ascending: bool = True
    last: int = 0
    retried: LineSet = dataclasses.field(
        default_factory=LineSet
    )  # lines whose rows are to be superseded
    _ids: array = dataclasses.field(default_factory=lambda: array("I"))

    def check_id(self, number: int, request_id: str | int | None) -> None:
        """Raise BatchError when the input's line has another id than the row that answers it."""
        known = self._ids[number] if number < len(self._ids) else 0
        if known and known != _id_digest(request_id):
            raise BatchError(
                f"line {number} of the input has the id {request_id!r}, its row in "
                f"{self.path} another: the input has "
                "changed since (--overwrite starts again)"
            )

    def note(self, number: int, *, failed: bool) -> None:
        """A row is written, or found."""
        self.superseded |= number in self.done or number in self.retried
        self.ascending &= number > self.last
        self.last = number
        self.done.add(number)
        if failed:
            self.failed.add(number)
        else:
            self.failed.remove(number)

    def without_failed(self) -> "Found":
        """The same file, its lines that failed yet to be done; their old rows are superseded by new
        ones.
        """
        return dataclasses.replace(
            self, done=self.done - self.failed, failed=LineSet(), retried=self.failed
        )

    def note_id(self, number: int, request_id: str | int | None) -> None:
        if request_id is not None:
            if number >= len(self._ids):
                self._ids.extend([0] * (number + 1 - len(self._ids)))
            self._ids[number] = _id_digest(request_id)


def _id_digest(request_id: str | int | None) -> int:
    return xxhash.xxh32_intdigest(str(request_id).encode(errors="surrogatepass")) or 1


def scan(path: str) -> Found:
    """Read an output file row by row. What follows its last whole row is torn and no part of
    `size`.

    Raises BatchError for a row in the middle that is none.
    """
    found, torn = Found(path=path), 0
    with open(path, "rb") as file:
        for count, (offset, raw) in enumerate(_lines(file), 1):
            row = _row(raw)
            if row is None:
                torn = torn or count
                continue
            if torn:
                raise BatchError(
                    f"row {torn} of {path} is not of a batch run: start again with --overwrite"
                )
            number = row_number(row)
            assert number is not None
            found.note(number, failed=row_failed(row))
            found.note_id(number, row_id(row))
            found.size = offset + len(raw)
    return found


def _row(raw: bytes) -> dict[str, Any] | None:
    """The row, or None for what is torn or foreign."""
    if not raw.endswith(b"\n"):
        return None
    try:
        row = json.loads(raw)
    except ValueError:  # UnicodeDecodeError among them
        return None
    return row if row_number(row) is not None else None


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    offset = 0
    for raw in file:
        yield offset, raw
        offset += len(raw)


def offsets(path: str, table: array | None = None) -> array:
    """Where the last row of each line begins, by line number; -1 where there is none."""
    table = array("q") if table is None else table
    with open(path, "rb") as file:
        for offset, raw in _lines(file):
            row = _row(raw)
            if row is not None and (number := row_number(row)) is not None:
                if number >= len(table):
                    table.extend([-1] * (number + 1 - len(table)))
                table[number] = offset
    return table


def compact(path: str, *, ordered: bool) -> None:
    """Replace a file by its rows that count: atomically, in their order in the file or by line
    number.
    """
    last = np.frombuffer(offsets(path), np.int64)
    kept = last[last >= 0] if ordered else np.sort(last[last >= 0])
    with open(path, "rb") as old, Replacement(path) as new:
        for offset in kept:
            old.seek(offset)
            new.write(old.readline())


class Replacement:
    """A file written beside `path` that takes its place once it is whole and on the disk."""

    def __init__(self, path: str):
        self.path, self.part = path, f"{path}.part"

    def __enter__(self) -> IO[bytes]:
        self._file = open(self.part, "wb")
        return self._file

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is not None:
            os.unlink(self.part)
            return
        os.replace(self.part, self.path)
        sync_folder(self.path)


def sync_folder(path: str) -> None:
    """Make a rename last through a power cut."""
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
