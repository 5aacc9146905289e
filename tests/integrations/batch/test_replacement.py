"""jpaged.integrations.batch.replacement: a file has its old content or its new one."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from jpaged.integrations.batch.replacement import Replacement


def fill(path: str, content: bytes) -> None:
    with Replacement(path) as file:
        file.write(content)


def test_a_file_is_replaced_by_what_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="half"), Replacement(str(path)) as file:
        file.write(b"new")
        raise ValueError("half")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["answers"]
    fill(str(path), b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["answers"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_file_in_memory_is_replaced_too() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for content in (b"a longer one", b"new"):
            fill(f"{folder}/answers", content)
        assert Path(folder, "answers").read_bytes() == b"new"


@pytest.mark.skipif(sys.platform == "win32", reason="no /dev/fd")
def test_what_a_process_has_open_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        fill(f"/dev/fd/{file.fileno()}", b"of it")
        assert os.fstat(file.fileno()).st_ino == path.stat().st_ino
    assert path.read_bytes() == b"of it"
