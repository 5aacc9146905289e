"""The C++ kernels of every level, built without Python: without a warning, under the sanitizers,
and for ARM under qemu; a run of cpu_driver.cc holds every kernel to a definition in plain C++.

What a machine lacks is skipped by name: a level's instructions (but those of AMX's tiles, which
amx_emulation.h has), the sanitizers' runtime, a cross compiler (Debian: g++-aarch64-linux-gnu) or
qemu-aarch64 (qemu-user).
"""

import concurrent.futures
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import pytest

from kernels_cpu import library

pytestmark = pytest.mark.middle  # a compile of all kernels each

LEVELS = {level.name: level for level in library.LEVELS}
SOURCES = Path(library.__file__).parent
DRIVER = Path(__file__).with_name("cpu_driver.cc")
EMULATION = Path(__file__).with_name("amx_emulation.h")
TILES = {"amx_tile", "amx_bf16"}
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CASES = 151


def compiler_of(name: str) -> str:
    """The compiler of a level; skips the test where this machine cannot build or run it."""
    if name == "neon":
        for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
            if shutil.which(tool) is None:
                pytest.skip(f"no {tool}")
        return "aarch64-linux-gnu-g++"
    if missing := LEVELS[name].needs - TILES - library._processor():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    compiler = shutil.which("g++") or shutil.which("clang++")
    return compiler or pytest.skip("no C++ compiler")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


def build(name: str, work: Path, *extra: str, sources: Path = SOURCES) -> Path:
    """The driver with a level's kernels. extra: flags."""
    level, compiler = LEVELS[name], compiler_of(name)
    flags = [*library.FLAGS, *level.flags, "-Werror", *extra, f"-I{sources}"]
    flags += ["-isystem", jax.ffi.include_dir()]
    if name == "amx" and not LEVELS["amx"].needs <= library._processor():
        flags += ["-include", str(EMULATION)]
    files = [sources / source.relative_to(SOURCES) for source in level.sources]
    made = {source: str(work / f"{i}.o") for i, source in enumerate([DRIVER, *files])}

    def to_object(source: Path) -> None:
        done = run([compiler, *flags, "-c", str(source), "-o", made[source]])
        assert done.returncode == 0, f"{source}: {done.stderr}"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(to_object, made))
    static = ["-static"] if name == "neon" else []
    program = work / "driver"
    done = run([compiler, *flags, *static, "-pthread", *made.values(), "-o", str(program)])
    assert done.returncode == 0, done.stderr
    return program


def results(program: Path, name: str) -> dict[str, str]:
    """Hashes of the results' bits, by case."""
    done = run([*(["qemu-aarch64"] if name == "neon" else []), str(program)])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


@functools.cache
def results_of(name: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as work:
        return results(build(name, Path(work)), name)


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_builds_without_a_warning_and_is_as_defined(name: str) -> None:
    assert len(results_of(name)) == CASES


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "avx2"])
def test_arithmetic_of_a_name_has_the_bits_of_other_levels(name: str) -> None:
    """Products of integers on every level; all that NEON has, which is built as AVX2 is."""
    ours, others = results_of(name), results_of("avx2")
    assert ours.keys() == others.keys()
    integers = [
        case
        for case in ours
        if case.startswith(("quantized int8", "quantized int16")) and "fp8" not in case
    ]
    assert len(integers) == 44
    equal = {case for case in ours if ours[case] == others[case]}
    assert equal >= set(ours if name == "neon" else integers)
    assert (len(equal) == CASES) == (name == "neon"), "a control: sums in f32 have other orders"


def skip_without_sanitizers(work: Path) -> None:
    source = work / "trivial.cc"
    source.write_text("int main() { return 0; }")
    flags = [compiler_of("avx2"), *SANITIZE, str(source), "-o", str(work / "trivial")]
    if run(flags).returncode or run([str(work / "trivial")]).returncode:
        pytest.skip("no runtime of -fsanitize=address,undefined")


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "neon"])
def test_under_the_sanitizers(name: str, tmp_path: Path) -> None:
    """No access outside of an array, and no undefined behaviour."""
    skip_without_sanitizers(tmp_path)
    program = build(name, tmp_path, *SANITIZE, "-Wno-error")  # their checks confuse warnings
    assert len(results(program, name)) == CASES


@pytest.mark.parametrize(
    ("file", "old", "new", "flags", "seen"),
    [
        ("int16_products.h", "is_half ? L::HalfOfWords(from) :", "", SANITIZE, "AddressSanitizer"),
        ("attend.h", "position + 1 - first, ", "position + 2 - first, ", (), "FAILED attention"),
        ("avx2/lanes.h", "0x0680048002800080", "0x0680048002800180", (), "FAILED"),
        (
            "f32_delta.h",
            "L::Fma(of_key, change",
            "L::Fma(of_query, change",
            (),
            "FAILED gated_delta",
        ),
        ("int8_products.h", "127.0f / largest", "126.0f / largest", (), "FAILED quantized int8"),
    ],
)
def test_the_driver_sees_a_fault(
    file: str, old: str, new: str, flags: tuple[str, ...], seen: str, tmp_path: Path
) -> None:
    if flags:
        skip_without_sanitizers(tmp_path)
    sources = tmp_path / "kernels_cpu"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    program = build("avx2", tmp_path, "-O1", *flags, "-Wno-error", sources=sources)
    done = run([str(program)])
    assert done.returncode != 0 and seen in done.stdout + done.stderr
