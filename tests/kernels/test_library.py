"""Compiling the CPU kernels: once, and where that cannot be, a reason and XLA's own instead."""

import logging
import shutil
from pathlib import Path

import pytest

from kernels_cpu import library

AVX2 = frozenset({"avx2", "fma"})
BY_NAME = {level.name: level for level in library.LEVELS}
LEVEL = BY_NAME["avx2"]
afresh = library.registered.__wrapped__  # the function itself, under its cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache that holds nothing yet, on a processor that would do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JPAGED_NATIVE", raising=False)
    monkeypatch.setattr(library, "_processor", lambda: AVX2)
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
    made = library._compiled(compiler, LEVEL)
    assert made.parent == folder and made.read_text() == "x\n" and list(folder.iterdir()) == [made]
    calls = log.read_text().splitlines()
    sources = 2 + len(LEVEL.sources)  # what XLA calls is compiled as two
    assert [" -c " in call for call in calls] == [*[True] * sources, False]
    assert library._compiled(compiler, LEVEL) == made and log.read_text().splitlines() == calls
    other = library._compiled(shutil.copy(compiler, f"{compiler}-2"), LEVEL)
    assert other != made and len(log.read_text().splitlines()) == 2 * (sources + 1)


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
    monkeypatch.setattr(library, "_processor", lambda: frozenset({"avx2"}))
    assert "avx512_bf16" in str(afresh()) and "avx2 and fma" in str(afresh())
    monkeypatch.setattr(library, "_processor", lambda: AVX2)
    monkeypatch.setenv("JPAGED_NATIVE", "avx512")
    assert "avx512_bf16" in str(afresh()) and "fma" not in str(afresh())
    monkeypatch.setenv("JPAGED_NATIVE", "0")
    assert afresh() == "JPAGED_NATIVE=0"


def test_a_home_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = library._compiled(
        fake_compiler(tmp_path, 'for last; do :; done; echo x > "$last"'), LEVEL
    )
    assert made.parent.name.startswith("jpaged-native-") and made.exists()


def test_the_level_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPAGED_NATIVE", raising=False)
    amx, avx512, avx2, neon = (BY_NAME[name] for name in ("amx", "avx512", "avx2", "neon"))
    for words, grants, expected in (
        (AVX2 | amx.needs, True, amx),
        (AVX2 | amx.needs, False, avx512),
        (AVX2 | avx512.needs, True, avx512),
        (AVX2, True, avx2),
        (AVX2 | amx.needs - {"avx512_bf16"}, True, avx2),
        (frozenset({"avx2"}), True, None),
        (frozenset({"fp", "asimd", "bf16"}), True, neon),
    ):
        monkeypatch.setattr(library, "_processor", lambda words=words: words)
        monkeypatch.setattr(library, "_grants_tiles", lambda grants=grants: grants)
        assert library.level() is expected
    monkeypatch.setattr(library, "_processor", lambda: AVX2 | amx.needs)
    monkeypatch.setattr(library, "_grants_tiles", lambda: True)
    for value, expected in {
        "1": amx,
        "0": None,
        "avx2": avx2,
        "avx512": avx512,
        "amx": amx,
        "neon": None,
    }.items():
        monkeypatch.setenv("JPAGED_NATIVE", value)
        assert library.level() is expected
    monkeypatch.setenv("JPAGED_NATIVE", "sse2")
    with pytest.raises(ValueError, match="JPAGED_NATIVE='sse2': must be 0, 1, or one of amx"):
        library.level()


@pytest.mark.parametrize(
    ("text", "machine", "expected"),
    [
        ("processor : 0\nflags\t: fpu avx2 fma\n", "x86_64", {"avx2", "fma"}),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", "aarch64", {"fp", "asimd", "bf16"}),
        (None, "arm64", {"asimd"}),  # macOS has no such file
        (None, "x86_64", set()),
    ],
)
def test_what_a_processor_has(
    text: str | None, machine: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        assert path == Path("/proc/cpuinfo")
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert expected <= library._processor.__wrapped__()
    assert ("asimd" in library._processor.__wrapped__()) == (machine != "x86_64")
