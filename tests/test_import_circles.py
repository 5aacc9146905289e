"""No two files import each other, directly or in a circle, imports for type checkers included."""

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jpaged", "kernels_pallas", "kernels_cpu")
# Sets of files that still have circles among them; they may only shrink.
KNOWN = (
    {f"jpaged.integrations.batch.{name}" for name in ("source", "tables")},
    {
        f"jpaged.engine.{name}"
        for name in (
            *("block_manager", "buckets", "drafting", "masks", "plan", "prefix_cache", "queues"),
            *("sequence", "swapping"),
        )
    },
)


def name_of(file: Path) -> str:
    """Return the name of a file's module."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(module: str, tree: ast.AST, modules: Iterable[str]) -> set[str]:
    """Return the modules among `modules` that a module imports anywhere, in functions too.

    Importing a name from a package is importing the package, unless the name is a module in it.
    """
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & set(modules) or {node.module}
    return found & set(modules) - {module}


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of two or more modules that all reach each other (Tarjan's algorithm)."""
    index, low = dict[str, int](), dict[str, int]()
    stack, found = list[str](), set[frozenset[str]]()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = frozenset(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.add(component)

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_no_circle_of_files() -> None:
    files = {name_of(f): f for package in PACKAGES for f in (ROOT / package).rglob("*.py")}
    assert len(files) > 150
    edges = {
        name: imported(name, ast.parse(file.read_text(encoding="utf-8")), files)
        for name, file in files.items()
    }
    new = [sorted(c) for c in circles(edges) if not any(c <= known for known in KNOWN)]
    assert not new, new


def test_a_circle_is_found() -> None:
    """Through a third file, and through an import that only a type checker sees."""
    sources = {
        "a": "import b",
        "b": "def f():\n    from c import x",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import y",
        "d": "import a",
    }
    edges = {name: imported(name, ast.parse(text), sources) for name, text in sources.items()}
    assert circles(edges) == {frozenset("abc")}
