"""BlockFiles: blocks of the KV cache in the files of a folder, whole or absent, within a number of
bytes, for any number of processes at once.

    FOLDER/lock                           held while room is made; the bytes that files take
    FOLDER/IDENTITY/ab/abcd...-0.kv       a block of group 0, named by the digest of its content
    FOLDER/IDENTITY/ab/abcd...-0.kv.SEED  one that is being written

IDENTITY stands for all that KV depends on beside the tokens (see Pool). A file is written under
another name, whose lock its writer holds, and then renamed: a writer that is killed leaves a file
that nobody reads and whoever makes room next deletes. A file says what it holds and has a checksum
over that, so a file that is cut short, overwritten or of another content is found out when it is
read, and deleted. What was used least recently (its time of modification) goes first. Files of any
other name are nobody's here: they are neither counted nor touched, whatever folder this is.
"""

import contextlib
import dataclasses
import os
import re
import secrets
import struct
from collections.abc import Buffer, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import xxhash

LAYOUT = 1  # of a file, and of what the bytes in it mean: another number finds nothing old
MAGIC = b"jpagedKV" + bytes([LAYOUT])
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16
# After magic and checksum: digest, the parent's digest, group, bytes of tokens, bytes of data.
HEAD = struct.Struct(f"<{DIGEST_BYTES}s{DIGEST_BYTES}sHIQ")
SUFFIX = ".kv"
TRASH = re.compile(r"\.trash-[0-9a-f]{16}")
IDENTITY, PART = re.compile(r"[0-9a-f]+"), re.compile(r"[0-9a-f]{2}")
FILE = re.compile(rf"([0-9a-f]{{2}})[0-9a-f]+-[0-9]+\{SUFFIX}(\.[0-9a-f]{{16}})?")
LOW = 0.9  # of the bytes that files may take is what is left of them once room had to be made

Read = Literal["read", "absent", "bad", "unreadable"]
Written = Literal["written", "held", "refused", "failed"]
BlockKey = tuple[str, bytes, int]  # identity, digest and group of a BlockName


class BlockName(NamedTuple):
    """What a block is found by. identity: see the module. digest, parent: of its content and of the
    one before. token_ids: the bytes that the content stands for (see Sequence.stored_bytes).
    """

    identity: str
    digest: bytes
    parent: bytes
    group: int
    token_ids: bytes

    @property
    def key(self) -> BlockKey:
        return self.identity, self.digest, self.group


class PackedBlocks(Protocol):
    """Keeps blocks as the bytes of a file of theirs, whatever they are of, within a number of
    bytes: a folder, or the memory of a server (see block_server.py). Any thread may call; nothing
    is raised.
    """

    num_bytes: int
    evicted_blocks: int

    def has_key(self, key: BlockKey) -> bool:
        """Return whether there is a block."""
        ...

    def used_bytes(self) -> int:
        """Return the bytes that all blocks take."""
        ...

    def read_packed(self, key: BlockKey) -> tuple[Read, Buffer | None]:
        """Return the bytes of a block, as they were written."""
        ...

    def write_packed(
        self, key: BlockKey, pieces: Sequence[Buffer], used_at: float | None = None
    ) -> Written:
        """Keep the bytes of a block (see `packed`). used_at: seconds since 1970, None is now."""
        ...

    def packed_bytes(self, key: BlockKey) -> int:
        """Return how many bytes `read_packed` would return, 0 where there is nothing."""
        ...

    def touch_key(self, key: BlockKey, used_at: float) -> bool:
        """Count a block as used at this time. Return whether it is there."""
        ...

    def drop_key(self, key: BlockKey) -> None:
        """Delete a block."""
        ...

    def forget(self, identity: str) -> bool:
        """Delete all blocks of an identity. Return whether there are none now."""
        ...


@dataclasses.dataclass(frozen=True)
class Found:
    """A file of the folder. is_block: others are what a killed process has left."""

    path: str
    used_at: int  # nanoseconds
    num_bytes: int
    is_block: bool


class BlockFiles:
    """Reads and writes blocks in a folder, which is made here. num_bytes: that all files of it may
    take, those of other processes and identities too. OSError where the folder cannot be made or
    written to. Any thread may call.

    Methods raise nothing of what the file system may answer later: each returns what came of it.
    evicted_blocks: files that this process deleted to make room.
    """

    asks_ahead = False  # see StoredBlocks
    instance = b""

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int):
        self.folder, self.num_bytes = Path(folder), num_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.evicted_blocks = 0
        self._lock = self.folder / "lock"
        with self._locked() as ledger:
            self._make_room(ledger, 0)

    def path_of(self, name: BlockName) -> Path:
        """Return where a block's file is, if there is one."""
        return self._path(name.key)

    def has(self, name: BlockName) -> bool:
        """Return whether there is a file for a block; what it holds is not looked at."""
        return self.has_key(name.key)

    def has_all(self, names: Sequence[BlockName]) -> list[bool]:
        """Return for each block whether there is a file."""
        return [self.has_key(name.key) for name in names]

    def has_key(self, key: BlockKey) -> bool:
        """Return whether there is a file under a key."""
        try:
            os.stat(self._path(key))
        except OSError:
            return False
        return True

    def used_bytes(self) -> int:
        """Return the bytes that all files take, as the processes have counted them."""
        try:
            return int.from_bytes(self._lock.read_bytes()[:8], "little")  # waits for no lock
        except OSError:
            return 0

    def read(self, name: BlockName, num_bytes: int) -> tuple[Read, Buffer | None]:
        """Return the data of a block. num_bytes: that it has. A file of anything else is "bad" and
        deleted.
        """
        came, raw = self.read_packed(name.key)
        if raw is None:
            return came, None
        data = unpacked(raw, name, num_bytes)
        if data is None:
            self.drop_key(name.key)
            return "bad", None
        return "read", data

    def read_packed(self, key: BlockKey) -> tuple[Read, Buffer | None]:
        """Return the bytes of a file, whatever it holds."""
        try:
            return "read", self._path(key).read_bytes()
        except FileNotFoundError:
            return "absent", None
        except (OSError, MemoryError):
            return "unreadable", None

    def write(
        self, name: BlockName, data: Sequence[Buffer], used_at: float | None = None
    ) -> Written:
        """Keep the data of a block, in one or several pieces of bytes. used_at: seconds since 1970,
        None is now. "refused": it is larger than all files together may be, or its identity was
        forgotten meanwhile.
        """
        return self.write_packed(name.key, packed(name, data), used_at)

    def write_packed(
        self, key: BlockKey, pieces: Sequence[Buffer], used_at: float | None = None
    ) -> Written:
        """Keep the bytes of a file, as `packed` returns them; see `write`."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        whole = sum(view.nbytes for view in views)
        if whole > self.num_bytes:
            return "refused"
        path = self._path(key)
        try:
            if path.exists():
                return "held"
            with self._claimed(path, whole) as (fd, other):
                for view in views:
                    _write_all(fd, view)
                if used_at is not None:
                    os.utime(fd, (used_at, used_at))
                try:
                    os.replace(other, path)
                except FileNotFoundError:
                    return "refused"
        except (OSError, MemoryError):
            return "failed"
        return "written"

    def packed_bytes(self, key: BlockKey) -> int:
        """Return the bytes of a file, 0 where there is none."""
        try:
            return os.stat(self._path(key)).st_size
        except OSError:
            return 0

    def touch_all(self, names: Sequence[BlockName], used_at: float) -> list[bool]:
        """Count blocks as used at this time, seconds since 1970, each a microsecond before the one
        that it follows. Return for each whether it is there.
        """
        return [self.touch_key(name.key, used_at - i * 1e-6) for i, name in enumerate(names)]

    def touch_key(self, key: BlockKey, used_at: float) -> bool:
        """Count what is under a key as used at this time. Return whether there is anything."""
        try:
            os.utime(self._path(key), (used_at, used_at))
        except OSError:
            return False
        return True

    def drop_key(self, key: BlockKey) -> None:
        """Delete what is under a key."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def forget(self, identity: str) -> bool:
        """Delete all blocks of an identity: no process finds one from now on. Return whether that
        is so.
        """
        trash = self.folder / f".trash-{secrets.token_hex(8)}"
        try:
            os.rename(self.folder / identity, trash)
        except FileNotFoundError:
            return True  # there are none
        except OSError:
            return False
        with contextlib.suppress(OSError), self._locked() as ledger:
            self._make_room(ledger, 0)  # deletes it, and counts again
        return True

    def _path(self, key: BlockKey) -> Path:
        identity, digest, group = key
        text = digest.hex()
        return self.folder / identity / text[:2] / f"{text}-{group}{SUFFIX}"

    # Room

    @contextlib.contextmanager
    def _claimed(self, path: Path, size: int) -> Iterator[tuple[int, Path]]:
        """Inside the block there is a file of this size beside `path`, by its number and its path.
        It is deleted at the end unless it was renamed.
        """
        other = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        fd = -1
        try:
            with self._locked() as ledger:
                used = ledger.read()
                if used is None or used + size > self.num_bytes:
                    used = self._make_room(ledger, size)
                    if used + size > self.num_bytes:
                        raise OSError("what others are writing takes all the room")
                # First, so that a process which is killed here counts too much, never too little.
                ledger.write(used + size)
                fd = self._created(other)
                _held.add(fd)
                _lock(fd)  # while its writer lives
                os.ftruncate(fd, size)  # so that it counts, though it has no blocks yet
            yield fd, other
        finally:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    other.unlink()  # FileNotFoundError where it was renamed
                _release(fd)

    def _created(self, path: Path) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # the folder is not there yet, or was forgotten
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    @contextlib.contextmanager
    def _locked(self) -> Iterator["Ledger"]:
        """Inside the block no other process, and no other thread, makes room."""
        fd = os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o600)
        _held.add(fd)
        try:
            _lock(fd)
            yield Ledger(fd)
        finally:
            _release(fd)

    def _make_room(self, ledger: "Ledger", size: int) -> int:
        """Delete what killed processes have left and, where `size` more bytes do not fit, blocks
        until they do, or none are left. Return the bytes that are, which the ledger has then.
        """
        kept, used = list[Found](), 0
        for file in _files(self.folder):
            if not file.is_block and _is_abandoned(file.path) and _deleted(file.path):
                continue
            used += file.num_bytes
            if file.is_block:
                kept.append(file)
        if used + size > self.num_bytes:
            most = min(self.num_bytes - size, int(self.num_bytes * LOW))
            for file in sorted(kept, key=lambda file: file.used_at):
                if used <= most:
                    break
                if _deleted(file.path):
                    used -= file.num_bytes
                    self.evicted_blocks += 1
        ledger.write(used)
        return used


class Ledger:
    """The bytes that files take, in a file whose lock is held."""

    def __init__(self, fd: int):
        self._fd = fd

    def read(self) -> int | None:
        """Return the bytes; None where nobody has counted them yet."""
        raw = os.pread(self._fd, 8, 0)
        return int.from_bytes(raw, "little") if len(raw) == 8 else None

    def write(self, num_bytes: int) -> None:
        """Note the bytes."""
        os.pwrite(self._fd, num_bytes.to_bytes(8, "little"), 0)


def packed(name: BlockName, data: Sequence[Buffer]) -> list[Buffer]:
    """Return the bytes of a block's file, in pieces: what it is of, a checksum, and its data."""
    pieces = [memoryview(piece).cast("B") for piece in data]
    tokens, size = name.token_ids, sum(piece.nbytes for piece in pieces)
    head = HEAD.pack(name.digest, name.parent, name.group, len(tokens), size) + tokens
    checksum = xxhash.xxh3_128(head)
    for piece in pieces:
        checksum.update(piece)
    return [b"".join((MAGIC, checksum.digest(), head)), *pieces]


def packed_size(name: BlockName, num_bytes: int) -> int:
    """Return the bytes of a block's file. num_bytes: those of its data."""
    return len(MAGIC) + CHECKSUM_BYTES + HEAD.size + len(name.token_ids) + num_bytes


def unpacked(raw: Buffer, name: BlockName, num_bytes: int) -> Buffer | None:
    """Return the data in the bytes of a file, None unless it is whole and of this block."""
    view = memoryview(raw)
    start = len(MAGIC) + CHECKSUM_BYTES
    data = start + HEAD.size + len(name.token_ids)
    if view.nbytes != data + num_bytes or view[: len(MAGIC)] != MAGIC:
        return None
    tokens = name.token_ids
    head = HEAD.pack(name.digest, name.parent, name.group, len(tokens), num_bytes) + tokens
    if view[start:data] != head or not _is_sound(view):
        return None
    return view[data:]


def is_packed(raw: Buffer, key: BlockKey) -> bool:
    """Return whether these bytes are a whole file under a key, as far as that can be seen without
    its tokens.
    """
    view, start = memoryview(raw), len(MAGIC) + CHECKSUM_BYTES
    if view.nbytes < start + HEAD.size or view[: len(MAGIC)] != MAGIC:
        return False
    digest, _, group, tokens, size = HEAD.unpack_from(view, start)
    is_long = view.nbytes == start + HEAD.size + tokens + size
    return is_long and (digest, group) == key[1:] and _is_sound(view)


def _is_sound(view: memoryview) -> bool:
    start = len(MAGIC) + CHECKSUM_BYTES
    return xxhash.xxh3_128_digest(view[start:]) == view[len(MAGIC) : start]


def _lock(fd: int, *, waits: bool = True) -> None:
    """Lock a file until it is closed, also by the end of the process; OSError where another has
    the lock and this one does not wait.
    """
    import fcntl  # which Windows does not have, where there is no prefix store

    fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


# Files whose locks this process holds, or waits for. A fork has them too, and with them the locks.
_held: set[int] = set()


def _release(fd: int) -> None:
    """Close a locked file. The lock goes first: while a fork has the file open, closing it here
    would not release it.
    """
    _held.discard(fd)
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _close_in_fork() -> None:
    """Let go of the locks of the process that was forked: they are released once it ends."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_fork)


def _write_all(fd: int, piece: memoryview) -> None:
    while piece.nbytes:
        piece = piece[os.write(fd, piece) :]


def _files(folder: Path) -> Iterator[Found]:
    """Yield the files of the identities' folders, and of what is to be deleted. Folders in which
    there is none go, so that those of old weights do not pile up; nobody makes one meanwhile.
    """
    for identity in _entries(folder):
        is_trash = TRASH.fullmatch(identity.name) is not None
        if not (is_trash or IDENTITY.fullmatch(identity.name)) or not _is_folder(identity):
            continue
        for part in _entries(identity.path):
            if not PART.fullmatch(part.name) or not _is_folder(part):
                continue
            for file in _entries(part.path):
                name = FILE.fullmatch(file.name)
                if name is None or name[1] != part.name:
                    continue
                with contextlib.suppress(OSError):  # it is gone meanwhile
                    stat = file.stat(follow_symlinks=False)
                    is_block = name[2] is None and not is_trash
                    yield Found(file.path, stat.st_mtime_ns, stat.st_size, is_block)
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(part.path)
        with contextlib.suppress(OSError):
            os.rmdir(identity.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_abandoned(path: str) -> bool:
    """Return whether nobody writes a file any more: its writer would hold its lock."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        _lock(fd, waits=False)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _deleted(path: str) -> bool:
    """Delete a file; return whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
