"""Reads the rows of an output file: which lines they answer and which of them are current; and
writes a file of the current ones.
"""

import contextlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from jpaged.integrations.batch.answers import row_code, row_failed, row_id, row_number
from jpaged.integrations.batch.replacement import Replacement
from jpaged.integrations.batch.source import BatchError

NONE, OK, FAILED, RETRIED = range(
    4
)  # a line without a row, with an answer, with an error, and with an error to replace
MOST_CODES = 255  # codes of errors that are told apart; further ones share the last
FIRST = 5  # line numbers that are kept for each code


class Found:
    """What an output file holds, in 14 bytes per line and without an object per line.

    size: bytes up to the end of the last whole row. superseded: whether some line has several rows,
    of which the last counts. ascending: whether the rows are in the order of line numbers.
    """

    def __init__(self, path: str):
        self.path, self.size = path, 0
        self.superseded, self.ascending = False, True
        self._last = 0
        # By line number: the state of its row, the row's offset, and a digest of its id (0: none).
        self._states, self.places, self._ids = bytearray(), array("q"), array("I")
        # By line number: the index of its error's code. Rows that this run writes have none.
        self._codes, self._code_names = bytearray(), [""]

    def __contains__(self, number: int) -> bool:
        """Return whether the line is done."""
        return number < len(self._states) and self._states[number] in (OK, FAILED)

    @property
    def failed(self) -> int:
        """Return how many lines have an error as their row."""
        return self._states.count(FAILED)

    @property
    def answered(self) -> int:
        """Return how many lines are done."""
        return self._states.count(OK) + self.failed

    def note(
        self,
        number: int,
        *,
        failed: bool,
        length: int,
        request_id: str | int | None = None,
        code: str = "",
    ) -> None:
        """Note a row of this many bytes, found or written after those before it. code: of its
        error.
        """
        if (more := number + 1 - len(self._states)) > 0:
            self._states.extend(bytes(more))
            self.places.extend([-1] * more)
            self._ids.extend([0] * more)
            self._codes.extend(bytes(more))
        self.superseded |= self._states[number] != NONE
        self.ascending &= number > self._last
        self._last = number
        self._states[number], self.places[number] = FAILED if failed else OK, self.size
        self._ids[number] = 0 if request_id is None else _id_digest(request_id)
        if code not in self._code_names and len(self._code_names) < MOST_CODES:
            self._code_names.append(code)
        is_named = code in self._code_names
        self._codes[number] = self._code_names.index(code) if is_named else 0
        self.size += length

    def errors(self) -> dict[str, tuple[int, list[int]]]:
        """Return the lines with errors by code, the most frequent first: how many, and the first
        line numbers.
        """
        failed = np.frombuffer(self._states, np.uint8) == FAILED
        codes, by_code = np.frombuffer(self._codes, np.uint8), {}
        for index, name in enumerate(self._code_names):
            lines = np.flatnonzero(failed & (codes == index))
            if len(lines):
                by_code[name or "unknown"] = len(lines), lines[:FIRST].tolist()
        return dict(sorted(by_code.items(), key=lambda item: -item[1][0]))

    def retry_failed(self) -> None:
        """Count failed lines as not done; new rows will supersede theirs."""
        self._states = self._states.replace(bytes([FAILED]), bytes([RETRIED]))

    def check_id(self, number: int, request_id: str | int | None) -> None:
        """Raise BatchError if a line of the input has another id than the row that answers it."""
        known = self._ids[number]
        if known and known != _id_digest(request_id):
            raise BatchError(
                f"line {number} of the input has the id {request_id!r}, its row in {self.path} "
                "another one: the input has changed since (--overwrite starts again)"
            )


def _id_digest(request_id: str | int | None) -> int:
    return xxhash.xxh32_intdigest(str(request_id).encode(errors="surrogatepass")) or 1


def scan(path: str) -> Found:
    """Read an output file row by row. Bytes after its last whole row were torn off, and do not
    count in `size`.

    Raises BatchError for a row that is not a batch run's.
    """
    rows, torn = Found(path), 0
    with open(path, "rb") as file:
        for count, raw in enumerate(file, 1):
            row = _row(raw)
            if row is None:
                torn = torn or count
                continue
            if torn:
                said = "was not written by a batch run: start again with --overwrite"
                raise BatchError(f"row {torn} of {path} {said}")
            number, failed = row_number(row), row_failed(row)
            assert number is not None
            names = {"request_id": row_id(row), "code": row_code(row)}
            rows.note(number, failed=failed, length=len(raw), **names)
    return rows


def _row(raw: bytes) -> dict[str, Any] | None:
    """Return the row, or None if it is torn or was not written by a batch run."""
    if not raw.endswith(b"\n"):
        return None
    try:
        row = json.loads(raw)
    except ValueError:  # UnicodeDecodeError is one too
        return None
    return row if row_number(row) is not None else None


def rewrite(files: Sequence[Found], target: str, *, ordered: bool) -> None:
    """Replace `target` by the current rows of all files, atomically: by line number if `ordered`,
    else in their order.
    """
    sizes = [len(rows.places) for rows in files]
    place = np.concatenate([np.asarray(rows.places) for rows in files])
    source, number = np.repeat(range(len(files)), sizes), np.concatenate([*map(np.arange, sizes)])
    order = np.lexsort((source, number)) if ordered else np.lexsort((place, source))
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open(rows.path, "rb")) for rows in files]
        new = stack.enter_context(Replacement(target))
        for i in order[place[order] >= 0]:
            file = opened[source[i]]
            file.seek(int(place[i]))
            new.write(file.readline())
