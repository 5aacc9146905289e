"""Names and docstrings are plain: a count of what is not, by package, that may only shrink."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANNED = {"how", "own", "each", "where", "found", "given"}  # as names of parameters and variables
FRAGMENTS = ("Of ", "So ", "So,")  # docstrings that lean on the line above them
# By package, how many of them there are at most. Lower a bound when you have removed some.
MOST: dict[str, int] = {}


def package_of(path: Path) -> str:
    """Return the package that a file counts for: jpaged/engine, scripts, or jpaged alone."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 2 if parts[0] == "jpaged" and len(parts) > 2 else 1])


def files() -> Iterator[Path]:
    for folder in ("jpaged", "kernels_cpu", "kernels_pallas", "scripts", "examples"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def faults(source: str) -> list[tuple[int, str]]:
    """Return line and text of every banned name and docstring."""
    listed = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.arg in BANNED:
            listed.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED:
            listed.append((node.lineno, node.id))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            ast.get_docstring(node) or ""
        ).startswith(FRAGMENTS):
            listed.append((node.lineno, f"docstring of {node.name}"))
    return listed


def test_packages() -> None:
    counts = Counter[str]()
    listed: dict[str, list[str]] = {}
    for path in files():
        package = package_of(path)
        lines = [
            f"{path.relative_to(ROOT)}:{line} {name}" for line, name in faults(path.read_text())
        ]
        counts[package] += len(lines)
        listed.setdefault(package, []).extend(lines)
    assert counts.keys() == MOST.keys(), "give a new package the bound 0"
    for package, most in MOST.items():
        assert counts[package] <= most, "\n".join(listed[package])


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(how): ...", 1),
        ("def f(*, given=1, **own): ...", 2),
        ("for each in x: ...", 1),
        ("y = [found for found in x]", 1),
        ('def f():\n    """Of a row."""', 1),
        ('class A:\n    """So for each."""', 1),
        ('def f(names):\n    """Return each row. Of all."""\n    return how(each)', 0),
    ],
)
def test_faults_are_seen(source: str, count: int) -> None:
    assert len(faults(source)) == count
