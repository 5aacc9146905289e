"""Replaces files in one step: whatever happens, a path has its old content or its new one."""

import errno
import os
from types import TracebackType
from typing import IO


class Replacement:
    """A file that is written beside `path`, and that replaces it once it is complete and on disk;
    if the block raises, it is removed. Where `path` is a link, what it leads to is replaced.

    A device or a pipe cannot be replaced: it is written to, at once.
    """

    def __init__(self, path: str):
        self._is_stream = _is_stream(path)
        self._path = path if self._is_stream else os.path.realpath(path)
        self._part = path if self._is_stream else f"{self._path}.part"

    def __enter__(self) -> IO[bytes]:
        self._file = open(self._part, "ab" if self._is_stream else "wb")
        return self._file

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_stream:
            self._file.close()
            return
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except BaseException:  # the disk is full, say
            os.unlink(self._part)
            raise
        if kind is not None:
            os.unlink(self._part)
            return
        os.replace(self._part, self._path)
        _sync_folder(self._path)


def _is_stream(path: str) -> bool:
    """Return whether a path is a device, a pipe, or a name of what a process has open, which may be
    a file that it goes on writing to. A file in the memory of /dev/shm is a file.
    """
    is_open = os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return is_open or (os.path.exists(path) and not os.path.isfile(path))


def _sync_folder(path: str) -> None:
    """Make a rename survive a power failure, where the file system can."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as e:
        if e.errno != errno.EINVAL:  # else folders cannot be synced there
            raise
    finally:
        os.close(folder)
