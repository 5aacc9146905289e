"""Files of blocks: whole or absent, whoever is killed, whatever becomes of the files, and within
their bytes, over several processes too.
"""

import contextlib
import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jpaged.engine.cache import block_files
from jpaged.engine.cache.block_files import HEAD, MAGIC, BlockFiles, BlockName

SIZE = 1000  # bytes of data
MIB = 1 << 20


def name_of(number: int, group: int = 0, identity: str = "aa") -> BlockName:
    digest = hashlib.blake2b(str(number).encode(), digest_size=32).digest()
    return BlockName(identity, digest, bytes(32), group, b"tokens %d" % number)


def data_of(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def sizes(folder: Path) -> int:
    """Bytes of all files in the folder but the lock; a file that is renamed meanwhile counts
    once.
    """
    files: dict[int, int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if path.is_file() and path.name != "lock":
                files[stat.st_ino] = stat.st_size
    return sum(files.values())


def others(folder: Path) -> list[Path]:
    """Files that are no blocks."""
    return [x for x in folder.rglob("*") if x.is_file() and x.suffix != ".kv" and x.name != "lock"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path / "store", MIB)
    assert files.read(name_of(1), SIZE) == ("absent", None) and not files.has(name_of(1))
    data = data_of(1)
    assert files.write(name_of(1), [data[:300], data[300:]]) == "written"
    came, raw = files.read(name_of(1), SIZE)
    assert came == "read" and raw is not None and bytes(raw) == data
    assert files.write(name_of(1), [data]) == "held"
    assert files.has(name_of(1)) and not others(tmp_path)
    again = BlockFiles(tmp_path / "store", MIB)
    assert again.read(name_of(1), SIZE)[0] == "read"
    assert again.used_bytes() == files.used_bytes() == sizes(tmp_path / "store") > SIZE
    for other in (name_of(2), name_of(1, group=1), name_of(1, identity="bb")):
        assert files.read(other, SIZE)[0] == "absent"


def damages() -> dict[str, Any]:
    whole = len(MAGIC) + 16 + HEAD.size + len(b"tokens 1") + SIZE
    cut = {f"cut to {n}": lambda raw, n=n: raw[:n] for n in (0, 5, 24, 30, whole - SIZE, whole - 1)}
    at = (0, len(MAGIC) - 1, len(MAGIC), 30, 60, 95, len(MAGIC) + 16 + HEAD.size, whole - 1)
    flip = {
        f"flipped at {n}": lambda raw, n=n: raw[:n] + bytes([raw[n] ^ 1]) + raw[n + 1 :] for n in at
    }
    zeros = {"zeros": lambda raw: bytes(len(raw)), "longer": lambda raw: raw + b"\0"}
    return cut | flip | zeros


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_is_noticed_and_deleted(tmp_path: Path, damage: str) -> None:
    files = BlockFiles(tmp_path, MIB)
    files.write(name_of(1), [data_of(1)])
    path = files.path_of(name_of(1))
    path.write_bytes(damages()[damage](path.read_bytes()))
    assert files.read(name_of(1), SIZE) == ("bad", None)
    assert not path.exists() and files.write(name_of(1), [data_of(1)]) == "written"
    assert files.read(name_of(1), SIZE)[0] == "read"


def test_another_blocks_file_is_noticed(tmp_path: Path) -> None:
    """A whole file, with a right checksum, under a wrong name; and one of other tokens or of
    another parent under the right digest, as a collision would be.
    """
    files = BlockFiles(tmp_path, MIB)
    for wrong in (
        name_of(2),
        name_of(1, group=1),
        name_of(1)._replace(token_ids=b"tokens 7"),
        name_of(1)._replace(parent=bytes([1]) * 32),
    ):
        files.write(wrong, [data_of(2)])
        here = files.path_of(name_of(1))
        here.parent.mkdir(exist_ok=True)
        os.replace(files.path_of(wrong), here)
        assert files.read(name_of(1), SIZE) == ("bad", None)
    assert files.read(name_of(1), SIZE) == ("absent", None)


def test_what_cannot_be_read_or_written_is_an_answer(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, MIB)
    files.path_of(name_of(1)).mkdir(parents=True)  # a folder in its place
    assert files.read(name_of(1), SIZE) == ("unreadable", None)
    assert files.write(name_of(1), [data_of(1)]) == "held"
    (tmp_path / "cc").write_bytes(b"")  # a file in the place of a folder
    assert files.write(name_of(1, identity="cc"), [data_of(1)]) == "failed"
    assert files.touch_all([name_of(3)], 1.0) == [False]
    with pytest.raises(OSError):
        BlockFiles(tmp_path / "cc" / "store", MIB)


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    one = 24 + 1 + HEAD.size + len(b"tokens 1") + SIZE
    files = BlockFiles(tmp_path, 10 * one)
    for number in range(10):
        assert files.write(name_of(number), [data_of(number)], used_at=1000 + number) == "written"
    assert files.touch_all([name_of(3), name_of(0)], 2001.0) == [True, True]
    assert files.write(name_of(11), [data_of(11)]) == "written"
    held = [number for number in range(12) if files.has(name_of(number))]
    assert held == [0, 3, 4, 5, 6, 7, 8, 9, 11][-len(held) :] or set(held) >= {0, 3, 9, 11}
    assert 1 not in held and files.evicted_blocks == 12 - 1 - len(held)
    assert files.used_bytes() == sizes(tmp_path) <= 10 * one
    assert files.write(name_of(12), [bytes(11 * one)]) == "refused"
    # Another process with a smaller bound makes room at once.
    assert BlockFiles(tmp_path, 2 * one).used_bytes() == sizes(tmp_path) <= 2 * one
    assert files.has(name_of(11))


def test_forget(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, MIB)
    files.write(name_of(1), [data_of(1)])
    files.write(name_of(1, identity="bb"), [data_of(1)])
    files.forget("aa")
    files.forget("nothing")
    assert not files.has(name_of(1)) and files.has(name_of(1, identity="bb"))
    assert files.used_bytes() == sizes(tmp_path) and not others(tmp_path)
    assert files.write(name_of(1), [data_of(1)]) == "written"


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """A folder that has other things in it, in places and with names like those of blocks."""
    digest = "ab" * 32
    foreign = [
        *("project/src/main.py", "notes.txt", "ab/ab/notes.kv", "ab/ab/notes.kv.1"),
        *(f"project/ab/{digest}-0.kv", f"aa/src/{digest}-0.kv", f"aa/cd/{digest}-0.kv"),
        *(
            f"aa/ab/{digest}-0.kv.part",
            f"aa/ab/{digest}-0.kv.bak",
            ".trash-old/ab/x",
            ".trash/ab/x",
        ),
    ]
    for path in foreign:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(bytes(5000))
    (tmp_path / "empty/of/others").mkdir(parents=True)
    files = BlockFiles(tmp_path, 2 * SIZE)
    assert files.used_bytes() == 0
    for number in range(4):
        assert files.write(name_of(number), [data_of(number)]) == "written"
    assert files.evicted_blocks == 3
    BlockFiles(tmp_path, 1)
    assert all((tmp_path / path).stat().st_size == 5000 for path in foreign)
    assert (tmp_path / "empty/of/others").is_dir()


def test_folders_of_old_weights_go(tmp_path: Path) -> None:
    """Else a trainer's store has 257 more with every version."""
    files = BlockFiles(tmp_path, 2 * SIZE)
    for version in range(5):
        name = name_of(version, identity=f"{version:02x}")
        assert files.write(name, [data_of(version)]) == "written"
    files.forget("04")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert files.write(name_of(5), [data_of(5)]) == "written"


def test_an_identity_forgotten_while_a_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process: no error of the disk, after which nothing is written for a while."""
    files, replace = BlockFiles(tmp_path, MIB), os.replace

    def later(*args: Any) -> None:
        BlockFiles(tmp_path, MIB).forget("aa")
        replace(*args)

    monkeypatch.setattr(os, "replace", later)
    assert files.write(name_of(1), [data_of(1)]) == "refused" and not files.has(name_of(1))
    monkeypatch.undo()
    assert files.write(name_of(1), [data_of(1)]) == "written"
    assert BlockFiles(tmp_path, MIB).used_bytes() == sizes(tmp_path) and not others(tmp_path)


def test_a_process_killed_while_it_claims_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any call of the kernel the ledger has at least what the files take."""
    calls, truncate = [], os.ftruncate
    files = BlockFiles(tmp_path, MIB)

    def look(*args: Any) -> None:
        truncate(*args)
        calls.append(files.used_bytes() - sizes(tmp_path))

    monkeypatch.setattr(os, "ftruncate", look)
    assert files.write(name_of(1), [data_of(1)]) == "written" and calls == [0]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what did not fit, and writes go on once there is room."""
    files, write = BlockFiles(tmp_path, MIB), os.write
    room = [1500]

    def limited(fd: int, piece: Any) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(fd, piece[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    assert files.write(name_of(1), [data_of(1)]) == "written"
    for _ in range(3):
        assert files.write(name_of(2), [data_of(2)]) == "failed"
    assert files.read(name_of(2), SIZE)[0] == "absent" and not others(tmp_path)
    room[0] = 10**9
    assert files.write(name_of(2), [data_of(2)]) == "written"
    assert files.read(name_of(1), SIZE)[0] == files.read(name_of(2), SIZE)[0] == "read"


WRITER = """
import hashlib, importlib.util, random, sys
spec = importlib.util.spec_from_file_location("block_files", sys.argv.pop(1))
module = sys.modules["block_files"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)  # by itself it is there in a moment
def name_of(number):
    digest = hashlib.blake2b(str(number).encode(), digest_size=32).digest()
    return module.BlockName("aa", digest, bytes(32), 0, b"tokens %d" % number)
def data_of(number, size):
    return random.Random(number).randbytes(size)
folder, bound, seed, size = sys.argv[1], *map(int, sys.argv[2:])
files, rng = module.BlockFiles(folder, bound), random.Random(seed)
print("ready", flush=True)
for _ in range(2000):
    number = rng.randrange(60)
    came = files.write(name_of(number), [data_of(number, size)])
    assert came in ("written", "held"), came
    number = rng.randrange(60)
    came, raw = files.read(name_of(number), size)
    assert came in ("read", "absent"), came
    assert raw is None or bytes(raw) == data_of(number, size)
"""


def writer(folder: Path, bound: int, seed: int, size: int) -> Any:
    source = block_files.__file__
    args = [source, str(folder), *map(str, (bound, seed, size))]
    process = subprocess.Popen([sys.executable, "-c", WRITER, *args], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


FORK = """
import os, signal, threading
locks = files._locked(), files._claimed(files.path_of(name_of(1)), 100)
is_held, go = threading.Event(), threading.Event()
def hold(lock):
    with lock:
        is_held.set()
        go.wait()
for lock in reversed(locks):
    is_held.clear()
    threading.Thread(target=hold, args=(lock,)).start()
    is_held.wait()
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
if killed:
    os.kill(os.getpid(), signal.SIGKILL)
go.set()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is killed"])
def test_a_fork_keeps_no_locks(tmp_path: Path, killed: bool) -> None:
    """Made while other threads have them; what it is left with would bar every process."""
    code = f"{WRITER.partition('print(')[0]}\nkilled = {killed}\n{FORK}"
    args = [block_files.__file__, str(tmp_path), str(MIB), "0", "0"]
    command = [sys.executable, "-W", "ignore", "-c", code, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.wait(60)
            look = f"{WRITER.partition('print(')[0]}\nprint(files.used_bytes())"
            out = subprocess.run(
                [sys.executable, "-c", look, *args], capture_output=True, timeout=60
            )
            assert out.stdout == b"0\n" and not others(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def check_all(folder: Path, size: int) -> int:
    """Every block of the folder is whole. Returns how many there are."""
    files, count = BlockFiles(folder, 1 << 40), 0
    for number in range(60):
        came, raw = files.read(name_of(number), size)
        assert came in ("read", "absent")
        if raw is not None:
            count += 1
            assert bytes(raw) == data_of(number, size)
    return count


def test_processes_share_a_folder_and_are_killed(tmp_path: Path) -> None:
    """Two at a time, each killed at a random moment; the bound holds at every look."""
    size, rng = 100_000, random.Random(0)
    bound = 30 * (size + 500)
    files = BlockFiles(tmp_path, bound)
    for turn in range(8):
        pair = [writer(tmp_path, bound, 2 * turn + i, size) for i in range(2)]
        try:
            for process in pair:
                until = time.monotonic() + rng.uniform(0.02, 0.3)
                while time.monotonic() < until:
                    with files._locked():  # nobody makes room between two files that are counted
                        assert sizes(tmp_path) <= bound
                process.send_signal(signal.SIGKILL)
        finally:
            for process in pair:
                process.kill()
                process.wait()
                process.stdout.close()
        check_all(tmp_path, size)
    assert check_all(tmp_path, size) > 0
    BlockFiles(tmp_path, bound)
    assert not others(tmp_path), "what killed processes have left is deleted"


def test_a_writer_that_lives_keeps_its_file(tmp_path: Path) -> None:
    """Another process that makes room leaves what is being written, and counts it."""
    files = BlockFiles(tmp_path, MIB)
    with files._claimed(files.path_of(name_of(1)), 5000) as (_, path):
        other = BlockFiles(tmp_path, MIB)
        assert path.exists() and other.used_bytes() == 5000
        files.forget("aa")
        assert len(others(tmp_path)) == 1
    BlockFiles(tmp_path, MIB)
    assert not others(tmp_path)
    left = files.path_of(name_of(2))
    left = left.with_name(f"{left.name}.0123456789abcdef")
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(bytes(7))
    assert BlockFiles(tmp_path, MIB).used_bytes() == 0 and not left.exists()


REFUSALS = [  # of a file system, by the call that it refuses
    ("open", errno.EROFS),
    ("ftruncate", errno.EFBIG),
    ("write", errno.EDQUOT),
    ("replace", errno.ENOSPC),
]


@pytest.mark.parametrize(("call", "code"), REFUSALS, ids=[call for call, _ in REFUSALS])
def test_a_file_system_that_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Whichever call is refused, the block is not kept, nothing is left of it, and what was kept
    before is read.
    """
    files, works, refused = BlockFiles(tmp_path, MIB), getattr(os, call), [0]
    assert files.write(name_of(1), [data_of(1)]) == "written"

    def refuses(target: Any, *args: Any) -> Any:
        if call == "open" and not args[0] & os.O_EXCL:
            return works(target, *args)  # that of the lock, which is there
        refused[0] += 1
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuses)
        for number in (2, 3):
            assert files.write(name_of(number), [data_of(number)]) == "failed"
    assert refused[0] == 2 and not others(tmp_path)
    assert files.read(name_of(1), SIZE)[0] == "read" and not files.has(name_of(2))
    assert files.write(name_of(2), [data_of(2)]) == "written"
    assert check_all(tmp_path, SIZE) == 2
