"""The C++ kernels of every level, built without Python: without a warning, under the sanitizers,
and for ARM under qemu; a run of cpu_driver.cc holds every kernel to a definition in plain C++.

What a machine lacks is skipped by name: a level's instructions (but those of AMX's tiles, which
amx_emulation.h has), the sanitizers' runtime, a cross compiler (Debian: g++-aarch64-linux-gnu) or
qemu-aarch64 (qemu-user).
"""

import concurrent.futures
import fcntl
import functools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pytest

from kernels_cpu import library

pytestmark = pytest.mark.middle  # a compile of all kernels each

LEVELS = {level.name: level for level in library.LEVELS}
SOURCES = Path(library.__file__).parent
DRIVER = Path(__file__).with_name("cpu_driver.cc")
EMULATION = Path(__file__).with_name("amx_emulation.h")
EMULATED = ("-include", str(EMULATION))
TILES = {"amx_tile", "amx_bf16", "amx_int8"}
SANITIZE = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CASES = 478


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


def compile_objects(
    name: str,
    work: Path,
    *extra: str,
    sources: Path = SOURCES,
    only: Collection[str] | None = None,
) -> dict[str, str]:
    """The objects of the driver and of a level's kernels, by the names of their sources. extra:
    flags. only: names of those to compile.
    """
    level, compiler = LEVELS[name], compiler_of(name)
    work.mkdir(exist_ok=True)
    flags = [*flags_of(name, *extra), "-Werror", f"-I{sources}"]
    if "-Wno-error" in extra:
        flags.remove("-Werror")
    kernels = (SOURCES / "parallel_for.cc", *level.sources)
    files = [DRIVER, *(sources / source.relative_to(SOURCES) for source in kernels)]
    names = [str(file.relative_to(sources)) if file != DRIVER else file.name for file in files]
    wanted = {n: f for n, f in zip(names, files, strict=True) if only is None or n in only}
    made = {n: str(work / f"{i}.o") for i, n in enumerate(wanted)}

    def to_object(source: str) -> None:
        # The driver's definitions are most of a run: where kernels are not optimised, they are.
        more = ["-O1"] if wanted[source] == DRIVER and "-O0" in extra else []
        done = run([compiler, *flags, *more, "-c", str(wanted[source]), "-o", made[source]])
        assert done.returncode == 0, f"{source}: {done.stderr}"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(to_object, made))
    return made


def flags_of(name: str, *extra: str) -> list[str]:
    flags = [*library.FLAGS, *LEVELS[name].flags, *extra]
    if name == "amx" and not LEVELS["amx"].needs <= library._processor():
        flags += EMULATED
    return flags


def link(name: str, work: Path, objects: Mapping[str, str], *extra: str) -> Path:
    """The driver of these objects."""
    static = ["-static"] if name == "neon" else []
    program = work / "driver"
    command = [compiler_of(name), *flags_of(name, *extra), *static, "-pthread", *objects.values()]
    done = run([*command, "-o", str(program)])
    assert done.returncode == 0, done.stderr
    return program


def build(name: str, work: Path, *extra: str) -> Path:
    """The driver with a level's kernels. extra: flags."""
    return link(name, work, compile_objects(name, work, *extra), *extra)


def results(program: Path, name: str) -> dict[str, str]:
    """Hashes of the results' bits, by case."""
    done = run([*(["qemu-aarch64"] if name == "neon" else []), str(program)])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


ResultsOf = Callable[[str], dict[str, str]]


@pytest.fixture(scope="session")
def results_of(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> ResultsOf:
    """The results of a level's driver. It is built and run once in a run of tests: the first worker
    that asks does so, and others wait for what it keeps.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent

    @functools.cache
    def of_level(name: str) -> dict[str, str]:
        kept = shared / f"results-{name}.json"
        with (shared / f"results-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                with tempfile.TemporaryDirectory() as work:
                    kept.write_text(json.dumps(results(build(name, Path(work)), name)))
        return json.loads(kept.read_text())

    return of_level


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_builds_without_a_warning_and_is_as_defined(
    name: str, results_of: ResultsOf
) -> None:
    assert len(results_of(name)) == CASES


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "avx2"])
def test_arithmetic_of_a_name_has_the_bits_of_other_levels(
    name: str, results_of: ResultsOf
) -> None:
    """Products of integers, activations, functions, norms, heads and weights that are quantised, on
    every level; all that NEON has, which is built as AVX2 is.
    """
    ours, others = results_of(name), results_of("avx2")
    assert ours.keys() == others.keys()
    integers = [
        case
        for case in ours
        if case.startswith(("quantized int8", "quantized int16")) and "fp8" not in case
    ]
    assert len(integers) == 74
    plain = ("activation", "function", "heads", "norm", "quantize ")
    integers += [case for case in ours if case.startswith(plain)]
    if name == "avx512":  # by 8 lanes, as AVX2
        integers += [case for case in ours if case.startswith("attention int8")]
    equal = {case for case in ours if ours[case] == others[case]}
    assert equal >= set(ours if name == "neon" else integers)
    assert (len(equal) == CASES) == (name == "neon"), "a control: sums in f32 have other orders"


def test_emulated_tiles_have_the_bits_of_those_of_a_processor(
    tmp_path: Path, results_of: ResultsOf
) -> None:
    if not LEVELS["amx"].needs <= library._processor():
        pytest.skip("this processor has no AMX")
    assert results(build("amx", tmp_path, *EMULATED), "amx") == results_of("amx")


def skip_without_sanitizers(work: Path) -> None:
    source = work / "trivial.cc"
    source.write_text("int main() { return 0; }")
    flags = [compiler_of("avx2"), *SANITIZE, str(source), "-o", str(work / "trivial")]
    if run(flags).returncode or run([str(work / "trivial")]).returncode:
        pytest.skip("no runtime of -fsanitize=address,undefined")


def users_of(file: str, objects: Collection[str]) -> set[str]:
    """The sources among those of `objects` that include a file, themselves or by others."""

    def reaches(source: Path, seen: set[Path]) -> bool:
        if source == SOURCES / file:
            return True
        seen.add(source)
        names = re.findall(r'^#include "(.*)"', source.read_text(), re.MULTILINE)
        places = [folder / name for name in names for folder in (source.parent, SOURCES)]
        included = {place.resolve() for place in places if place.exists()}
        return any(reaches(place, seen) for place in included - seen)

    paths = {name: DRIVER if name == DRIVER.name else SOURCES / name for name in objects}
    return {name for name, path in paths.items() if reaches(path, set())}


def assert_seen(
    name: str,
    fault: tuple[str, str, str],
    seen: str,
    work: Path,
    objects: Mapping[str, str],
    *extra: str,
) -> None:
    """A level's driver fails with this text where a file has the fault: (file, old text, new text).
    objects: those without it.
    """
    file, old, new = fault
    sources = work / "kernels_cpu"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    users = users_of(file, objects)
    assert users, file
    changed = compile_objects(name, work / "changed", *extra, sources=sources, only=users)
    assert changed.keys() == users
    done = run([str(link(name, work, {**objects, **changed}, *extra))])
    assert done.returncode != 0 and seen in done.stdout + done.stderr, fault


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "neon"])
def test_under_the_sanitizers(name: str, tmp_path: Path) -> None:
    """No access outside of an array, and no undefined behaviour; they see one in the level that
    every machine builds.
    """
    skip_without_sanitizers(tmp_path)
    flags = (*SANITIZE, "-Wno-error")  # their checks confuse warnings
    objects = compile_objects(name, tmp_path, *flags)
    assert len(results(link(name, tmp_path, objects, *flags), name)) == CASES
    if name == "avx2":
        fault = ("int16_products.h", "is_half ? L::HalfOfWords(from) :", "")
        assert_seen(name, fault, "AddressSanitizer", tmp_path, objects, *flags)


Fault = tuple[tuple[str, str, str], str]  # and what the driver says
FAULTS: list[Fault] = [
    (("parallel_for.cc", "call(body, item);", ""), "FAILED linear"),
    (("zeros.h", "std::memset(last, 0, end - last)", "(void)0"), "FAILED zeros"),
    (("attend.h", "std::min(past - first", "std::min(past + 1 - first"), "FAILED attention"),
    (("attend.h", "row += L::kCount)", "row += 2 * L::kCount)"), "FAILED attention"),
    (("attend.h", "L::OrZero(seen.Lanes(i), weight_of(i))", "weight_of(i)"), "FAILED attention"),
    (("attend.h", "before, total * now", "before, total"), "FAILED attention"),
    (("attend.h", "item.span * rows * size", "item.span * size"), "FAILED attention in spans"),
    (("avx2/lanes.h", "0x0680048002800080", "0x0680048002800180"), "FAILED"),
    (("avx2/lanes.h", "0x0280808000808080", "0x0280808001808080"), "FAILED"),
    (("f32_tiles.h", "(2 * (head + i) + of)", "(2 * (head + i))"), "FAILED attention fp8"),
    (("int8_tiles.h", "most *= 2) steps", "most *= 4) steps"), "FAILED attention int8"),
    (("int8_tiles.h", "(2 * (head + i) + 1)", "(2 * (head + i))"), "FAILED attention int8"),
    (("int8_tiles.h", "weight_steps_[row + r]", "weight_steps_[row]"), "FAILED attention int8"),
    (("int8_tiles.h", "+ kBytes, L::ZipUpper", "+ kBytes, L::ZipLower"), "FAILED attention int8"),
    (("pool_slots.h", "scales[slot - 1] + apart", "scales[slot - 1]"), "FAILED attention"),
    (("f32_tiles.h", "= q_ + row * D;", "= q_;"), "FAILED attention"),
    (
        ("f32_delta.h", "L::Fma(of_key, change", "L::Fma(of_query, change"),
        "FAILED gated_delta",
    ),
    (("f32_scan.h", "L::Fma(of_x[i], key", "L::Fma(of_x[i], query"), "FAILED mamba2"),
    (("f32_tiles.h", "v_ + d % kWide * kTile;", "v_;"), "FAILED attention"),
    (("f32_tiles.h", "k_ + slot * D_ : k_", "k_ : k_"), "FAILED attention"),
    (("f32_tiles.h", "k + (begin - slot) * D_", "k"), "FAILED attention"),
    (("f32_tiles.h", "<= (r + n - 1) / p_.G", "<= r / p_.G"), "FAILED attention"),
    (
        ("f32_panels.h", "n = kWaiting - 1; n >= 0; --n", "n = 0; n < kWaiting; ++n"),
        "has other bits alone",
    ),
    (("f32_products.h", "gates[apart + i]", "gates[i]"), "FAILED mlp"),
    (("f32_products.h", "+ j % 2 * P::kRows", "+ (1 - j % 2) * P::kRows"), "FAILED mlp"),
    (("quantize.h", "is_interleaved ? 4 : kPacked / 2", "kPacked / 2"), "FAILED quantize int4"),
    (("quantize.h", "kInterleaved, numbers, values", "1, numbers, values"), "FAILED quantize int4"),
    (("f32_products.h", "x + all.Place(panel, sum)", "x + all.Place(panel, 0)"), "FAILED linear"),
    (
        ("f32_products.h", "blocks * (part + 1) / parts", "blocks * part / parts + 1"),
        "FAILED linear",
    ),
    (("f32_products.h", "all.panels.longer - panel, 0", "-panel, 0"), "FAILED linear"),
    (("f32_products.h", "x(first + std::min(i, rows - 1))", "x(first)"), "FAILED linear"),
    (("int8_products.h", "127.0f / largest", "126.0f / largest"), "FAILED quantized int8"),
    (
        ("interleaved_products.h", "pair < 2 ? L::And", "pair < 1 ? L::And"),
        "FAILED quantized int16 interleaved",
    ),
    (
        ("interleaved_products.h", "(pair * kCols + c) * 2", "pair * kCols * 2"),
        "FAILED quantized int16 interleaved int4",
    ),
    (
        ("interleaved_products.h", "-kExcess * total", "kExcess * total"),
        "FAILED quantized int16 interleaved",
    ),
    (
        ("interleaved_products.h", "(i + j) * together", "(i + j) * kRows"),
        "FAILED quantized int16 interleaved",
    ),
    (("mlp.h", "gate * Sigmoid(u) * up", "u * Sigmoid(u) * up"), "FAILED activation gelu"),
    (("functions.h", "(r + 1.0f)", "(r + 1.01f)"), "FAILED function exp"),
    (("functions.h", "1.0f / 3.0f;", "1.0f / 4.0f;"), "FAILED function softplus"),
    (("functions.h", "count * (item + 1) / items", "count / items"), "FAILED function"),
    (("f32_norms.h", "slot >= 0 && slot < p.slots", "slot < p.slots"), "FAILED heads"),
    (("f32_norms.h", "b[i] * cos[i] + a[i]", "b[i] * cos[i] - a[i]"), "FAILED heads 2x64"),
    (("f32_norms.h", "L::Add(L::Mul(b[j], c)", "L::Sub(L::Mul(b[j], c)"), "FAILED heads 1x32"),
    (("f32_norms.h", "k_scale, *factor,", "k_scale, 1,"), "FAILED heads"),
    (("f32_norms.h", "(t + 1, factors_after)", "(t, factors_after)"), "FAILED heads"),
    (("avx2/lanes.h", "halves(a1, a3);", "halves(a3, a1);"), "FAILED norm"),
    (("f32_norms.h", "L::Add(parts_[0], parts_[1])", "parts_[0]"), "FAILED norm"),
    (("f32_norms.h", "L::Add(even, even_added)", "even"), "FAILED norm of a sum"),
    (("f32_norms.h", "p.y + (t + i) * p.E", "p.y + t * p.E"), "FAILED norm"),
    (("f32_panels.h", "depth, out, N, e > 0", "depth, out, N, false"), "FAILED panels"),
    (("f32_group_attention.h", "alpha == 1.0f", "alpha != 1.0f"), "FAILED groups"),
    (("f32_group_attention.h", "if (!sees_all) Mask", "if (false) Mask"), "FAILED groups"),
]
FAULTS_OF_AMX: list[Fault] = [
    (
        ("amx/attend.cc", "slots_[first + slot] + offset", "slots_[first] + offset"),
        "FAILED attention",
    ),
    (
        ("amx/attend.cc", "is_seen ? p_.Stride() * int64_t{sizeof(bf16)} : 0", "0"),
        "FAILED attention",
    ),
    (
        ("amx/attend.cc", "first, scores_ + i * kSpan * kSide);", "first, scores_);"),
        "FAILED attention",
    ),
    (("amx/attend.cc", "weights + row, begin", "weights, begin"), "FAILED attention"),
    (("amx/attend.cc", "add(odd, slot + 1)", "add(even, slot + 1)"), "of a query alone"),
    (("amx/attend.cc", "    FlushDenormals in_this_thread;", ""), "of a query alone"),
    (
        ("amx/attend.h", "_mm512_set1_epi32(slot), low)", "_mm512_set1_epi32(slot), low - low)"),
        "FAILED attention",
    ),
    (("amx/attend.cc", "scores_ + kSpan * kSide, begin)", "scores_, begin)"), "FAILED attention"),
    (("amx/attend.cc", "_mm512_srli_epi32(bits, 16)", "bits"), "FAILED attention"),
    (("amx/attend.h", "add(sums + kSide, high)", "add(sums + kSide, low)"), "FAILED attention"),
    (("amx/attend.h", "block.all_end - first)", "block.end - first)"), "FAILED attention"),
    (
        ("amx/attend.h", "any_end = std::clamp(block.end", "any_end = std::clamp(block.all_end"),
        "FAILED attention",
    ),
    (("amx/attend.cc", "End() <= first + kSpan", "Begin() <= first + kSpan"), "FAILED attention"),
    (("amx/attend.cc", "half * 4 + i % 4", "i % 4"), "FAILED attention"),
    (
        ("amx/attend.cc", "factors.saw_before == 0 && factors.seen", "factors.seen"),
        "FAILED attention",
    ),
    (("amx/attend.h", "saw_before >> row & 1", "false && row"), "FAILED attention"),
    (("amx/attend_int8.cc", "factors.saw_before, to)", "0, to)"), "FAILED attention int8"),
    (("amx/attend.h", "span.total, now)", "span.total, before)"), "FAILED attention"),
    (("amx/attend.h", "(1u << end) - (1u << row) : 0", "0xffffu : 0"), "FAILED attention"),
    (("amx/attend_int8.cc", "_tile_dpbsud(3, 5", "_tile_dpbssd(3, 5"), "FAILED attention int8"),
    (("amx/attend_int8.cc", "_tile_dpbsud(3, 7", "_tile_dpbssd(3, 7"), "FAILED attention int8"),
    (("amx/attend_int8.cc", "most *= 2) steps", "most *= 4) steps"), "FAILED attention int8"),
    (("amx/attend_int8.cc", "% shared_) + part", "% shared_)"), "FAILED attention"),
    (("amx/attend_int8.cc", "[block * kSide + row]);", "[row]);"), "FAILED attention in spans"),
    (("amx/attend_int8.cc", "steps_ + block * kSide);", "steps_);"), "FAILED attention"),
    (("amx/attend_int8.cc", "_mm512_maskz_mov_ps(mask, P", "(P"), "FAILED attention int8"),
    (("amx/attend_int8.cc", ": 0xffffffff;", ": 0xffff;"), "FAILED attention int8"),
    (("amx/attend_int8.cc", "word(first + 2)", "word(first + 1)"), "FAILED attention int8"),
    (
        ("amx/attend_int8.cc", "scores_ + end * kSide", "scores_ + seen.end * kSide"),
        "FAILED attention int8",
    ),
    (("amx/attend_int8.cc", "is_first |= heads * tiles > 1;", ""), "FAILED attention int8"),
    (
        (
            "amx/attend_int8.cc",
            "has_second ? _mm512_loadu_si512(q + kDepth)",
            "has_second ? _mm512_loadu_si512(q)",
        ),
        "FAILED attention int8",
    ),
    (("avx512/lanes.h", "extractf32x8_ps(x, 1)", "castps512_ps256(x)"), "FAILED norm"),
    (
        ("avx512/lanes.h", "epi32(places, _mm512_set1_epi32(1))", "epi32(places, places)"),
        "FAILED norm",
    ),
    (("avx512/lanes.h", "halves(a2, a3);", "halves(a3, a2);"), "FAILED norm"),
    (("avx512/lanes.h", "0xaaaaaaaa, Rounded(odd)", "0x55555555, Rounded(odd)"), "FAILED norm"),
    (("avx512/lanes.h", "Rounded(x), 16)", "_mm512_castps_si512(x), 15)"), "FAILED norm"),
    (("amx/attend.cc", "unpacked[(i + 1) % 2]", "unpacked[i % 2]"), "FAILED attention"),
    (("amx/bf16_products.h", "x + tile * kSide * E, count", "x, count"), "FAILED linear"),
    (("amx/bf16_products.h", "{group, tile, count}", "{group, 0, count}"), "FAILED linear"),
    (("amx/bf16_products.h", "blocking.First(block + 1", "blocking.First(1"), "FAILED linear"),
    (
        ("amx/bf16_products.h", "PlaceOf(e / 2 + pair, order)", "PlaceOf(pair, order)"),
        "FAILED linear",
    ),
    (
        ("amx/bf16_products.h", "* kSide + piece * kQuarter, column", "* kSide, column"),
        "FAILED linear",
    ),
    (("amx/bf16_products.h", "lines[t][1] = row", "lines[t][0] = row"), "FAILED linear"),
    (
        ("amx/bf16_products.h", "kQuarter, T_ - first)", "kQuarter, T_ - first) - 1"),
        "FAILED linear",
    ),
    (("amx/bf16_products.h", "epi16(x[2], x[3]), d", "epi16(x[3], x[2]), d"), "FAILED linear"),
    (("amx/bf16_products.h", "_pbh(odd, even)", "_pbh(even, odd)"), "FAILED mlp"),
    (
        ("amx/bf16_products.h", "set1_epi32(i)), scales", "set1_epi32(0)), scales"),
        "FAILED quantized",
    ),
    (("amx/bf16_products.h", "set1_ps(scale[F_])", "set1_ps(scale[0])"), "FAILED mlp int8"),
    (("avx512/activation.h", "set(1.0f), is_below, e)", "e, is_below, e)"), "FAILED mlp silu"),
    (("avx512/activation.h", "set1_ps(1.59576912f)", "set1_ps(1.5957f)"), "FAILED mlp gelu"),
    (("amx/products.cc", "gate + F_ * E_", "gate + kSide * E_"), "FAILED mlp"),
    (("amx/products.cc", "[i] * kSide * E, first", "[0] * kSide * E, first"), "FAILED experts"),
    (("amx/bf16_products.h", "(pair & 4) >> 1", "(pair & 4)"), "FAILED quantized plain int4"),
    (("amx/bf16_products.h", "PlaceOf(piece, order_)", "piece"), "FAILED mlp int4"),
    (
        ("amx/bf16_products.h", "_tile_loadd(6, x, columns * 4)", "_tile_loadd(6, x, 64)"),
        "FAILED quantized plain",
    ),
    (("amx/widened.cc", "std::swap(now, next)", "next = now"), "FAILED quantized plain"),
    (("amx/widened.cc", "group + is_last, first", "group, first"), "FAILED quantized plain"),
    (("amx/widened.cc", "      Widen();\n      Widen();", "      Widen();"), "has other bits"),
    (
        ("amx/widened.cc", "from_ += bytes_, scales_ += S_", "from_ += bytes_"),
        "FAILED quantized plain",
    ),
    (("amx/widened.cc", "places[PlaceOf(pair, order)]", "places[pair]"), "has other bits"),
    (("amx/widened.cc", "scale += (block + 1)", "scale += (block + 2)"), "FAILED quantized plain"),
    (("amx/widened.cc", "std::max<int64_t>(2, ", "std::max<int64_t>(1, "), "FAILED mlp int8"),
    (("amx/widened.cc", "rows_.apart - kSide)", "0)"), "FAILED mlp"),
    (("amx/widened.cc", "? 0 : steps_ - 1", "? 0 : 0"), "FAILED quantized plain"),
    (
        ("amx/widened.cc", "to_ + b * 2 * kTileSize", "to_ + b * kTileSize"),
        "FAILED quantized plain",
    ),
    (("amx/widened.cc", "? 0x0100 : 0x2120", "? 0x0100 : 0x0100"), "FAILED quantized plain int4"),
    (
        ("amx/widened.cc", "0x17170f0f07073f3f)", "0x17170f0f07071f1f)"),
        "FAILED quantized plain int4",
    ),
    (("amx/tiles.h", "before_ | kFlush | kAreZeros", "before_"), "of a query alone"),
    (
        ("avx512/lanes.h", "odd, 0x3333333333333333", "odd, 0x1111111111111111"),
        "FAILED quantized plain int8",
    ),
    (
        ("avx512/integers.cc", "_mm512_storeu_si512(to + kCacheLine,", "_mm512_storeu_si512(to,"),
        "FAILED interleaved int8 int4",
    ),
]


@pytest.mark.parametrize(("name", "faults"), [("avx2", FAULTS), ("amx", FAULTS_OF_AMX)])
def test_the_driver_sees_faults(name: str, faults: Sequence[Fault], tmp_path: Path) -> None:
    """A fault a build: only what includes the file that has it is compiled again."""
    flags = ("-O0", "-Wno-error")
    objects = compile_objects(name, tmp_path / "whole", *flags)
    for i, (fault, seen) in enumerate(faults):
        (tmp_path / str(i)).mkdir()
        assert_seen(name, fault, seen, tmp_path / str(i), objects, *flags)
