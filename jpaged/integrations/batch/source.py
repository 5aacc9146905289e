"""Reads the lines of a run from files (plain or compressed) and pipes, and never holds more than
one line.

A source is iterated once and yields (number, line). Numbers begin at 1; blank lines are counted but
not yielded. A line is its bytes, or the LineError that it has caused.
"""

import codecs
import contextlib
import gzip
import importlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from jpaged.errors import JpagedError
from jpaged.openai.protocol import BodyError

SAMPLES, SAMPLE = (
    32,
    1 << 16,
)  # the digest of a file is made of this many samples, of this many bytes
PIECE = 1 << 16  # bytes of an over-long line that are read and dropped at once
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # what such a file begins with
COMPRESSED = (
    1 << 12
)  # bytes of .zst that are decompressed at once; repetitive text grows a thousandfold


class BatchError(JpagedError):
    """A run cannot start or go on. The message is the one sentence that the user reads."""


class LineError(BodyError):
    """A line cannot run. It says why, and which field is to blame."""


class Source:
    """The lines of one input: (number, bytes or an error)."""

    text = False  # whether each line is a prompt, as plain text

    def __init__(self, path: str):
        self.path = path

    def __iter__(self) -> Iterator[tuple[int, bytes | LineError]]:
        raise NotImplementedError

    def total(self) -> int | None:
        """Return the number of lines, if it is known without reading them."""
        return None

    def fraction(self) -> float | None:
        """Return how much of the input has been read, 0 to 1; None for a pipe."""
        return None

    def identity(self) -> dict[str, Any]:
        """Return what distinguishes this input from others, for the manifest."""
        raise NotImplementedError

    def close(self) -> None:
        return None


class LineSource(Source):
    """The lines of a file (plain, .gz or .zst) or of stdin ("-").

    A line of more than max_line_bytes is dropped while it is read, piece by piece. Raises
    BatchError if the input cannot be opened. Iterating raises OSError, EOFError or the
    decompressor's error if it is damaged.
    """

    def __init__(self, path: str, *, max_line_bytes: int, text: bool = False):
        super().__init__(path)
        self.text = text
        self._longest = max_line_bytes
        self._taken = 0  # bytes of the lines read so far
        self._newline = True  # whether the last of them was a whole one
        try:
            # Not sys.stdin: the thread that reads would hold its lock and block the exit.
            file: Any = 0 if path == "-" else path
            self._raw: io.BufferedReader = open(file, "rb", closefd=path != "-")  # noqa: SIM115
            info = os.fstat(self._raw.fileno())
        except OSError as e:
            raise BatchError(f"cannot read {path}: {e.strerror}") from None
        self._size = info.st_size if stat.S_ISREG(info.st_mode) else None
        suffix = "" if path == "-" else Path(path).suffix
        self._compressed = suffix in (".gz", ".zst")
        if self._size and not self._compressed and self._raw.peek(2)[:2] in UTF_16:
            self._raw.close()
            raise BatchError(f"cannot read {path}: it is UTF-16: write it as UTF-8 (iconv, say)")
        self._file: Any = self._raw
        if suffix == ".gz":
            self._file = gzip.GzipFile(fileobj=self._raw)
        elif suffix == ".zst":
            with contextlib.ExitStack() as stack:
                stack.callback(self.close)
                self._file = _open_zst(self._raw, path)
                stack.pop_all()

    def __iter__(self) -> Iterator[tuple[int, bytes | LineError]]:
        number, longest = 0, self._longest
        while line := self._file.readline(longest + 1):
            number += 1
            length = len(line)
            self._taken += length
            self._newline = line.endswith(b"\n")
            if length > longest and not self._newline:
                length += self._skip_line()
                message = f"{length} bytes are above --max-line-bytes {longest}"
                yield number, LineError(message, code="line_too_long")
            elif number == 1 and not line.removeprefix(codecs.BOM_UTF8).strip():
                pass  # blank, but for the mark that some editors begin a file with
            elif not line.isspace():
                yield number, line

    def _skip_line(self) -> int:
        """Read and drop the rest of an over-long line. Return the number of bytes."""
        length = 0
        while not self._newline and (piece := self._file.readline(PIECE)):
            length += len(piece)
            self._newline = piece.endswith(b"\n")
        self._taken += length
        return length

    def fraction(self) -> float | None:
        if not self._size:
            return None
        try:
            return min((self._raw.tell() if self._compressed else self._taken) / self._size, 1.0)
        except ValueError:  # closed
            return 1.0

    def identity(self) -> dict[str, Any]:
        if self._size is None:
            return {"kind": "a pipe"}
        if not self._compressed:
            return {"kind": "lines", **file_identity(self.path)}
        # Whether the text ends in a newline is known once all of it has been read.
        return {"kind": "compressed lines", **file_identity(self.path), "newline": self._newline}

    def close(self) -> None:
        if self.path != "-":  # closing stdin would wait for a thread that reads it
            self._raw.close()


def _open_zst(raw: IO[bytes], path: str) -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("compression.zstd").ZstdFile(raw)  # Python 3.14
    try:
        import zstandard
    except ImportError:
        needs = "needs Python 3.14 or the zstandard package: pip install 'jpaged[zstd]'"
        raise BatchError(f"cannot read {path}: .zst {needs}") from None
    return io.BufferedReader(_Zstd(raw, zstandard), PIECE)


class _Zstd(io.RawIOBase):
    """The decompressed bytes of consecutive frames. Raises EOFError if the last frame is
    incomplete.
    """

    def __init__(self, raw: IO[bytes], zstandard: Any):
        self._raw, self._new = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._input = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._input = self._input or self._raw.read(COMPRESSED)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the compressed file ends in the middle")
                return 0
            self._frame = self._frame or self._new()
            self._ready = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def file_identity(path: str, size: int | None = None) -> dict[str, Any]:
    """Return the size and digest of a file, or of its first `size` bytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        digest = xxhash.xxh3_64()
        last = max(size - SAMPLE, 0)
        for i in range(SAMPLES):
            file.seek(last * i // (SAMPLES - 1))
            digest.update(file.read(min(SAMPLE, size - file.tell())))
        file.seek(max(size - 1, 0))
        ended = size == 0 or file.read(1) == b"\n"
    return {"bytes": size, "digest": digest.hexdigest(), "newline": ended}
