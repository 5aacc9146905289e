"""Compiles the C++ kernels of this folder when they are first needed, and registers them with XLA.

The library is kept in the user's cache directory, named by a hash of all that it depends on: it is
compiled once. Where it cannot be had, `unavailable` says why and the XLA implementations serve.
"""

import concurrent.futures
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

log = logging.getLogger(__name__)

# Without contraction a multiplication and an addition are rounded as they are written, by any
# compiler.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra")
HANDLERS = (
    *("jpaged_activated", "jpaged_experts", "jpaged_function", "jpaged_gated_delta"),
    *("jpaged_group_attention", "jpaged_head_write", "jpaged_linear", "jpaged_low_rank"),
    *("jpaged_mamba2", "jpaged_mlp", "jpaged_norm", "jpaged_paged_attention"),
    *("jpaged_panels", "jpaged_quantize", "jpaged_quantized", "jpaged_zeros"),
)
SECONDS = 600  # a compile takes about 60 on two cores, more on a machine that is busy
SWITCH = "JPAGED_NATIVE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """Kernels for a kind of processor: the folder of its name.

    needs: words of /proc/cpuinfo. flags: the compiler's. uses: files of lesser levels that its
    level.cc calls. activations: what x becomes in products with int8 and int4 weights where
    nobody chose it (see quantized.ACTIVATIONS): what the processor is fastest with. panels: the
    dtypes whose products of many rows are made by packed panels (see panels.h): bf16 too where no
    instruction multiplies it. interleaved: the activations with which it multiplies interleaved
    weights (TakesInterleaved of its level.cc). rounded: those with which it rounds products with
    weights in 8 and 4 bits to bf16 as it writes them. tiles: whether it asks Linux for AMX's tiles.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    activations: str
    panels: tuple[str, ...] = ("float32",)
    uses: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ("int16",)
    rounded: tuple[str, ...] = ()
    tiles: bool = False

    @property
    def sources(self) -> list[Path]:
        """The files of its folder, and those that it uses of others."""
        here = Path(__file__).parent
        return [*sorted((here / self.name).glob("*.cc")), *(here / name for name in self.uses)]


AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"})
# GCC 12 warns of its own header (bug 105593).
AVX512_FLAGS = (
    *("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
# What levels use of lesser ones.
AVX512_FILES = (
    *("avx512/delta.cc", "avx512/e4m3.cc", "avx512/integers.cc", "avx512/norms.cc"),
    *("avx512/panels.cc", "avx512/scan.cc"),
)
AVX2_FILES = ("avx2/attend_8_bits.cc", "avx2/int16.cc", "avx2/low_rank.cc")
LEVELS = (  # the best first
    Level(
        name="amx",
        needs=AVX512 | {"avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"},
        flags=(*AVX512_FLAGS, "-mavx512vbmi", "-mprfchw", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        activations="plain",
        uses=(*AVX512_FILES, *AVX2_FILES),
        interleaved=("int8", "int16"),
        rounded=("plain",),
        tiles=True,
    ),
    Level(
        name="avx512",
        needs=AVX512,
        flags=AVX512_FLAGS,
        activations="int8",
        uses=AVX2_FILES,
        interleaved=("int8", "int16"),
    ),
    Level(
        name="avx2",
        needs=frozenset({"avx2", "fma"}),
        flags=("-march=x86-64-v3",),
        activations="int16",
        panels=("float32", "bfloat16"),
    ),
    # The base of ARMv8-A, which every processor of 64 bits has: no bfdot, no dotprod, no SVE.
    Level(
        name="neon",
        needs=frozenset({"asimd"}),
        flags=(),
        activations="plain",
        panels=("float32", "bfloat16"),
    ),
)


def level() -> Level | None:
    """The best kernels for this processor, or those that JPAGED_NATIVE names; None where there are
    none. ValueError for a name that is not known.
    """
    wanted = os.environ.get(SWITCH, "1")
    if wanted == "0":
        return None
    if wanted not in ("1", *(known.name for known in LEVELS)):
        names = ", ".join(known.name for known in LEVELS)
        raise ValueError(f"{SWITCH}={wanted!r}: must be 0, 1, or one of {names}")
    here = _processor()
    named = (known for known in LEVELS if wanted in ("1", known.name) and known.needs <= here)
    return next((known for known in named if not known.tiles or _grants_tiles()), None)


def unavailable() -> str | None:
    """Why the kernels cannot run in this process, or None once they are compiled and registered."""
    result = registered()
    return result if isinstance(result, str) else None


@functools.cache
def registered() -> Path | str:
    """The library, compiled and registered with XLA, or why it cannot run in this process.

    It needs x86-64 with AVX2 and FMA under Linux, or ARM of 64 bits, and a C++ compiler (CXX, c++,
    g++ or clang++). JPAGED_NATIVE=0 turns them off, a level's name chooses it. A compiler that
    fails is logged as a warning.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch == "0":
        return f"{SWITCH}=0"
    if (backend := jax.default_backend()) != "cpu":
        return f"jax's default backend is {backend}"
    if (chosen := level()) is None:
        known = [known for known in LEVELS if switch in ("1", known.name)]
        wanted = " or ".join(" and ".join(sorted(known.needs)) for known in known)
        return f"it needs a processor with {wanted}"
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None
    )
    if compiler is None:
        return "it needs a C++ compiler: install g++ or clang++, or name one in CXX"
    try:
        path = _compiled(compiler, chosen)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as e:
        detail = (e.stderr if isinstance(e, subprocess.CalledProcessError) else str(e)).strip()
        log.warning(
            "the CPU kernels did not compile, XLA's own serve (%s=0 for no attempt): %s",
            SWITCH,
            detail,
        )
        return f"{compiler} failed"
    for name in HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return path


def _compiled(compiler: str, level: Level) -> Path:
    """The library of a level's sources, compiled now or before."""
    here, flags = Path(__file__).parent, (*FLAGS, *level.flags)
    calls = sorted(here.glob("*.cc"))
    headers = sorted(here.rglob("*.h"))
    parts = [
        compiler,
        importlib.metadata.version("jaxlib"),
        platform.platform(),
        *flags,
        *(p.read_text() for p in (*calls, *level.sources, *headers)),
    ]
    name = f"kernels-{level.name}-{hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jpaged" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to: for this process alone
        folder = Path(tempfile.mkdtemp(prefix="jpaged-native-"))
    library = folder / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            units = [*_joined(calls, Path(work)), *level.sources]
            objects = {str(unit): str(Path(work) / f"{i}.o") for i, unit in enumerate(units)}
            # -isystem: warnings are of our own files.
            to_object = [compiler, *flags, "-isystem", jax.ffi.include_dir(), "-c"]
            commands = [[*to_object, source, "-o", made] for source, made in objects.items()]
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, commands))
            made = Path(work) / name
            sanitizers = [flag for flag in flags if flag.startswith("-fsanitize")]
            _run([compiler, "-shared", *sanitizers, *objects.values(), "-o", str(made)])
            made.replace(library)  # at once: others may be compiling the same
    return library


def _joined(sources: list[Path], folder: Path) -> list[Path]:
    """Two files in a folder that include all sources: what XLA calls is compiled together, so that
    its header is read, and its templates are instantiated, twice in place of once a source.
    """
    files = [folder / "calls_0.cc", folder / "calls_1.cc"]
    for i, file in enumerate(files):
        file.write_text("".join(f'#include "{source}"\n' for source in sources[i :: len(files)]))
    return files


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)


@functools.cache
def _processor() -> frozenset[str]:
    """Return the processor's features by Linux's names ("flags" on x86, "Features" on ARM);
    elsewhere those that the architecture requires.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset({"asimd"} if platform.machine() in ("arm64", "aarch64") else ())
    flags = (line.split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, []))


@functools.cache
def _grants_tiles() -> bool:
    """Whether Linux lets this process use AMX's tiles, which it asks for."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
