"""Compiles the C++ kernels of this folder when they are first needed, and registers them with XLA.

The library is kept in the user's cache directory, named by a hash of all that it depends on: it is
compiled once. Where it cannot be had, `unavailable` says why and the XLA implementations serve.
"""

import concurrent.futures
import ctypes
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

FLAGS = ("-O3", "-std=c++17", "-march=x86-64-v4", "-mavx512bf16", "-fPIC", "-w")
HANDLERS = ("jpaged_linear", "jpaged_paged_attention")
SECONDS = 120  # a compile takes about 3
SWITCH = "JPAGED_NATIVE"


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot run in this process, or None once they are compiled and registered.

    They need x86-64 with AVX-512 bf16 under Linux and a C++ compiler (CXX, c++, g++ or clang++);
    JPAGED_NATIVE=0 turns them off. A compiler that fails is logged as a warning.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0"
    if (backend := jax.default_backend()) != "cpu":
        return f"jax's default backend is {backend}"
    if "avx512_bf16" not in _processor():
        return "it needs a processor with AVX-512 bf16, under Linux"
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None
    )
    if compiler is None:
        return "it needs a C++ compiler: install g++ or clang++, or name one in CXX"
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
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
    return None


def _compiled(compiler: str) -> Path:
    """The library of these sources, compiled now or before."""
    here = Path(__file__).parent
    sources, headers = sorted(here.glob("*.cc")), sorted(here.glob("*.h"))
    parts = [
        compiler,
        importlib.metadata.version("jaxlib"),
        platform.platform(),
        *FLAGS,
        *(p.read_text() for p in (*sources, *headers)),
    ]
    name = f"kernels-{hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jpaged" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to: for this process alone
        folder = Path(tempfile.mkdtemp(prefix="jpaged-native-"))
    library = folder / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            objects = {str(source): str(Path(work) / f"{source.stem}.o") for source in sources}
            to_object = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", "-c"]
            with concurrent.futures.ThreadPoolExecutor() as pool:
                list(
                    pool.map(
                        _run, ([*to_object, source, "-o", made] for source, made in objects.items())
                    )
                )
            made = Path(work) / name
            _run([compiler, "-shared", *objects.values(), "-o", str(made)])
            made.replace(library)  # at once: others may be compiling the same
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)


def _processor() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.split() for line in lines if line.startswith("flags")), [])


if __name__ == "__main__":  # ahead of the first use
    print(f"CPU kernels: {unavailable() or 'compiled'}")
