"""Compiling the CPU kernels: once, and where that cannot be, a reason and XLA's own instead."""

import logging
import shutil
from pathlib import Path

import pytest

from kernels_cpu import library
from kernels_cpu.library import unavailable

afresh = unavailable.__wrapped__  # the function itself, under its cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache that holds nothing yet, on a processor that would do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JPAGED_NATIVE", raising=False)
    monkeypatch.setattr(library, "_processor", lambda: ["avx512_bf16"])
    return tmp_path / "jpaged" / "native"


def fake_compiler(tmp_path: Path, script: str) -> str:
    compiler = tmp_path / "fake-c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler)


def test_it_is_compiled_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    compiler = fake_compiler(
        tmp_path, f'for last; do :; done; echo x > "$last"; echo "$@" >> {log}'
    )
    made = library._compiled(compiler)
    assert made.parent == folder and made.read_text() == "x\n" and list(folder.iterdir()) == [made]
    calls = log.read_text().splitlines()
    assert [" -c " in call for call in calls] == [True, True, False]
    assert library._compiled(compiler) == made and log.read_text().splitlines() == calls
    other = library._compiled(shutil.copy(compiler, f"{compiler}-2"))
    assert other != made and len(log.read_text().splitlines()) == 6


def test_a_compiler_that_fails_is_told_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = fake_compiler(tmp_path, "echo no such header >&2; exit 3")
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert afresh() == f"{compiler} failed"
    assert "no such header" in caplog.text and "JPAGED_NATIVE=0" in caplog.text
    assert not list(folder.iterdir())


def test_what_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "C++ compiler: install g++" in str(afresh())
    monkeypatch.setattr(library, "_processor", lambda: ["avx2"])
    assert "AVX-512 bf16" in str(afresh())
    monkeypatch.setenv("JPAGED_NATIVE", "0")
    assert afresh() == "JPAGED_NATIVE=0"


def test_a_home_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = library._compiled(fake_compiler(tmp_path, 'for last; do :; done; echo x > "$last"'))
    assert made.parent.name.startswith("jpaged-native-") and made.exists()
