"""Compiling steps: options that make them faster and leave their results as they are, and where
they are kept.
"""

import hashlib
import logging
import os
import platform
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger("jpaged")

LEAST_SECONDS = 0.1  # what compiles faster is not worth a file in the persistent cache
# Whole AVX-512 registers where XLA:CPU would use half of one: 0.94 of the time of decode attention,
# 0.97 of a step. Loops only get wider; no sum is reordered. A CPU without AVX-512 keeps its own
# width.
OPTIONS: dict[str, dict[str, int]] = {"cpu": {"xla_cpu_prefer_vector_width": 512}}


def compile_options(backend: str) -> dict[str, int]:
    """The `compiler_options` of a step on "cpu", "cuda", "tpu", ...: empty for most."""
    return dict(OPTIONS.get(backend, {}))


def compile_step(lowered: Any, backend: str) -> Any:
    """Compile a `jax.stages.Lowered` with this backend's options, or without where this jax does
    not know them.
    """
    options = compile_options(backend)
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as e:
        if not options or "No such compile option" not in str(e):
            raise
        log.warning(
            "jax %s does not know the compile options %s: left out", jax.__version__, options
        )
        return lowered.compile()


def use_compilation_cache(folder: str | None) -> None:
    """Have jax keep what it compiles in `folder`; "auto": see default_folder, unless jax has one;
    None: as jax is set.

    The setting is jax's own, so it holds for the whole process.
    """
    if folder is None or (folder == "auto" and jax.config.jax_compilation_cache_dir is not None):
        return
    jax.config.update(
        "jax_compilation_cache_dir", str(default_folder()) if folder == "auto" else folder
    )
    least = min(jax.config.jax_persistent_cache_min_compile_time_secs, LEAST_SECONDS)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def default_folder() -> Path:
    """A folder in the user's cache directory, one a kind of processor: home directories are shared
    between machines.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        features = platform.processor()
    kind = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jpaged" / "compiled" / kind
