"""Who imports whom: the host side runs without jax, the kernels know nothing of jpaged, imports
point downwards.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = sorted((ROOT / "jpaged/engine").rglob("*.py"))
DEVICE = {"jax", "jaxlib", "flax", "optax", "orbax"}


def imported(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it; TYPE_CHECKING blocks too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, packages: set[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def test_the_walk_sees_imports(tmp_path: Path):
    file = tmp_path / "some.py"
    file.write_text(
        "import os, jax.numpy as jnp\ndef f():\n    from jax import lax\n    import flax\n"
    )
    assert list(imported(file)) == ["os", "jax.numpy", "jax.lax", "flax"]
    assert [within(m, DEVICE) for m in imported(file)] == [False, True, True, True]


@pytest.mark.parametrize("file", ENGINE, ids=lambda f: f.name)
def test_the_engine_imports_nothing_of_the_device(file: Path):
    modules = set(imported(file))
    assert not [m for m in modules if within(m, DEVICE)]
    own = {m for m in modules if within(m, {"jpaged", "kernels_cpu", "kernels_pallas"})}
    below = {
        "jpaged.engine",
        "jpaged.config",
        "jpaged.checks",
        "jpaged.combinations",
        "jpaged.errors",
        "jpaged.sampling_params",
        "jpaged.search",
        "jpaged.structured",
    }
    assert all(within(m, below) for m in own), own


@pytest.mark.parametrize(
    "file",
    [
        ROOT / "jpaged" / name
        for name in (
            "config.py",
            "checks.py",
            "errors.py",
            "models/config.py",
            "sampling_params.py",
            "request/detokenizer.py",
            "search/beam.py",
            "structured/spec.py",
            "structured/grammars.py",
        )
    ],
    ids=lambda f: f.name,
)
def test_what_the_engine_stands_on(file: Path):
    assert not [m for m in imported(file) if within(m, DEVICE)]


def files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("file", files("kernels_cpu", "kernels_pallas"), ids=str)
def test_the_kernels_know_nothing_of_jpaged(file: Path):
    assert not [m for m in imported(file) if within(m, {"jpaged"})]


@pytest.mark.parametrize(
    "file", files("jpaged/models", "jpaged/runtime", "jpaged/checkpoint"), ids=str
)
def test_the_device_side_knows_nothing_of_the_api(file: Path):
    above = {
        "jpaged.api",
        "jpaged.llm",
        "jpaged.kept",
        "jpaged.session",
        "jpaged.served_model",
        "jpaged.served_pool",
        "jpaged.request",
        "jpaged.engine.engine",
        "jpaged.engine.scheduler",
    }
    assert not [m for m in imported(file) if within(m, above)]


def test_every_engine_module_runs_without_jax():
    """In a process where importing jax fails; the package's own __init__, which exports the API, is
    left out.
    """
    files = [file.relative_to(ROOT).with_suffix("") for file in ENGINE if file.stem != "__init__"]
    modules = [".".join(file.parts) for file in files]
    program = f"""
import importlib, sys, types
for name in {sorted(DEVICE)!r}:
    sys.modules[name] = None
package = types.ModuleType("jpaged")
package.__path__ = [{str(ROOT / "jpaged")!r}]
sys.modules["jpaged"] = package
for name in {modules!r}:
    importlib.import_module(name)
print("imported", len({modules!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == f"imported {len(modules)}\n", done.stderr
