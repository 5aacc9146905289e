"""jax's persistent compilation cache, on by default, so that a second start finds its steps compiled."""

import hashlib
import os
import platform
from pathlib import Path

import jax

LEAST_SECONDS = 0.1  # what compiles faster is not worth a file


def use_compilation_cache(folder: str | None) -> None:
    """Have jax keep what it compiles in `folder`; "auto": see default_folder, unless jax has one; None: as jax is set.

    The setting is jax's own, so it holds for the whole process.
    """
    if folder is None or (folder == "auto" and jax.config.jax_compilation_cache_dir is not None):
        return
    jax.config.update("jax_compilation_cache_dir", str(default_folder()) if folder == "auto" else folder)
    least = min(jax.config.jax_persistent_cache_min_compile_time_secs, LEAST_SECONDS)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def default_folder() -> Path:
    """A folder in the user's cache directory, one a kind of processor: home directories are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        features = platform.processor()
    kind = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jpaged" / "compiled" / kind
