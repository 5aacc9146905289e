"""Settings that every test runs under: 8 virtual CPU devices, strict promotion, no network
(warnings: pyproject).

What one test compiles, the next finds in jax's persistent cache, which lasts as long as the run.
Engines of the same shapes share their compiled steps besides, so that nothing is traced twice; not
in tests marked `own_steps`, which count what is compiled or change what a step does. `make test`
has XLA optimise less, except in tests marked `as_users` (as_users.txt): those keep their own steps.
"""

import atexit
import faulthandler
import os
import shutil
import tempfile

# Read when jax and transformers are imported, so set before either is.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jpaged-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Operations say the line that made them, without the frames that called it: a hundred of them, most
# of which are pytest's, are a twentieth of what tests take.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would say that there is no PyTorch

import dataclasses
import fnmatch
import gc
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

import jpaged
from jpaged.runtime import runner
from jpaged.runtime.compiled_steps import CompiledSteps
from jpaged.runtime.mesh import Placement
from jpaged.runtime.steps import StepSetting

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a property compiles. In CI the examples are the same each time.
hypothesis.settings.register_profile(
    "jpaged", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("jpaged")


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Standard dtype promotion in tests marked `train`; optax does not hold to the strict kind."""
    if request.node.get_closest_marker("train") is None:
        yield
    else:
        with jax.numpy_dtype_promotion("standard"):
            yield


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """No test reads what an entry point wrote to the environment when another test called it (the
    share of a GPU's memory is written there).

    Only what has changed is written back: setenv moves the table of the process, in which native
    threads may be reading, and a thread that reads a table that was moved crashes the worker.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value


# Fields of EngineConfig that no step reads (what they decide is in a bucket or in the pools).
HOST_SETTINGS = {
    "max_num_batched_tokens": 1,
    "token_buckets": None,
    "decode_steps": None,
    "stream_steps": None,
    "num_blocks": None,
    "num_states": None,
    "memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "swap_space_gib": 0.0,
    "swap_min_tokens": 0,
    "prefix_store": None,
    "prefix_store_gib": 1.0,
    "prefix_store_policy": "write_back",
    "max_n": 1,
    "max_image_tokens": None,
    "image_cache_gib": 1.0,
    "image_limits": None,
    "compilation_cache_dir": None,
    "peer_timeout_s": 1.0,
}
OPTIMISE_LESS = jax.config.read("jax_disable_most_optimizations")  # as the Makefile asks
KEPT_TABLES = 48  # each executable holds memory maps, of which a process may have 65,530
COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"
MANY_MAPS = 30_000  # after which a worker lets go of what it has compiled; without, it crashes
TOO_MANY_MAPS = 50_000  # within a file, whose engines then compile what they need again
LOOK_AFTER = 15  # executables, of up to 500 maps: to count 16,000 maps takes 20 ms


class SharedSteps:
    """Stands for CompiledSteps in the Runner: one table for all engines of one setting and form."""

    def __init__(self) -> None:
        self.is_on = True
        self.tables: OrderedDict[Any, CompiledSteps] = OrderedDict()

    def __call__(
        self, setting: StepSetting, where: Placement, form: Any, draft: Any = None
    ) -> CompiledSteps:
        if not self.is_on or setting.config.strict:  # a strict engine seals its table
            return CompiledSteps(setting, where, form, draft)
        config = dataclasses.replace(setting.config, **HOST_SETTINGS)
        leaves, treedef = jax.tree.flatten((form, draft))
        setting_of_all = dataclasses.replace(setting, config=config)
        level = jax.config.read("jax_disable_most_optimizations")
        key = (setting_of_all, level, where, tuple(leaves), treedef)
        if key not in self.tables:
            self.tables[key] = CompiledSteps(setting, where, form, draft)
            if len(self.tables) > KEPT_TABLES:
                self.tables.popitem(last=False)
        self.tables.move_to_end(key)
        return self.tables[key]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what middle.txt, slow.txt and as_users.txt name."""
    for mark in ("middle", "slow", "as_users"):
        lines = (Path(__file__).parent / f"{mark}.txt").read_text().splitlines()
        named: dict[str, list[str]] = {}
        for line in lines:
            if line and line[0] != "#":
                pattern = fnmatch.translate(line.replace("[", "[[]"))
                named.setdefault(line.split("::")[0], []).append(pattern)
        patterns = {file: re.compile("|".join(those)) for file, those in named.items()}
        for item in items:
            pattern = patterns.get(item.nodeid.split("::")[0])
            if pattern is not None and pattern.match(item.nodeid):
                item.add_marker(mark)


def pytest_collection_finish() -> None:
    """Spare later collections of garbage the modules and the tests, which stay until the end."""
    gc.collect()
    gc.freeze()


SHARED = SharedSteps()
setattr(runner, "CompiledSteps", SHARED)  # noqa: B010


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of any scope, which make engines too."""
    SHARED.is_on = item.get_closest_marker("own_steps") is None
    less = OPTIMISE_LESS and item.get_closest_marker("as_users") is None
    jax.config.update("jax_disable_most_optimizations", less)


class NewExecutables:
    """Counts what was compiled, or read from the persistent cache, since maps were last counted."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == COMPILED_EVENT


NEW = NewExecutables()


def _memory_maps() -> int:
    """Of this process; 0 where the system does not tell."""
    file = Path("/proc/self/maps")
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between files, when their engines are gone; within one where it can wait no longer."""
    is_last = nextitem is not None and nextitem.path != item.path
    if NEW.count < (1 if is_last else LOOK_AFTER):
        return
    NEW.count = 0
    if _memory_maps() > (MANY_MAPS if is_last else TOO_MANY_MAPS):
        SHARED.tables.clear()
        jpaged.release(compiled=True)
        jax.clear_caches()
        gc.collect()


def _crash_file(worker: str) -> Path:
    """Where the Python stacks of a worker are written when it crashes."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"], f"crash-{worker}.txt")


def pytest_sessionstart() -> None:
    """After pytest's own, which writes to a stream that no report shows."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        file = _crash_file(worker).open("w")
        atexit.register(file.close)
        faulthandler.enable(file)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Show where a worker of xdist was when it crashed: a signal and its stacks, or no word where
    it was killed.
    """
    worker = report.node.gateway.id  # pyright: ignore[reportAttributeAccessIssue]
    stacks = _crash_file(worker).read_text()
    report.longrepr = f"{report.longrepr}\n{stacks or 'killed from outside'}"
