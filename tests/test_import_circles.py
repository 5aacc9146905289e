"""No files and no packages import each other in a circle, imports for type checkers included."""

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jpaged", "kernels_pallas", "kernels_cpu")


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


def edges_of_files() -> dict[str, set[str]]:
    """Return which modules of the project each of them imports."""
    files = {name_of(f): f for package in PACKAGES for f in (ROOT / package).rglob("*.py")}
    return {
        name: imported(name, ast.parse(file.read_text(encoding="utf-8")), files)
        for name, file in files.items()
    }


def edges_of_packages(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return which packages import which. A package is a folder of jpaged with all below it, such
    as jpaged.engine; a module beside those folders, such as jpaged.session, counts as one.
    """

    def package_of(module: str) -> str:
        return ".".join(module.split(".")[: 2 if module.startswith("jpaged.") else 1])

    packages = {package_of(module): set[str]() for module in edges}
    for module, others in edges.items():
        packages[package_of(module)] |= {package_of(other) for other in others}
    return {package: others - {package} for package, others in packages.items()}


def test_no_circle_of_files() -> None:
    edges = edges_of_files()
    assert len(edges) > 150
    assert not circles(edges)


def test_no_circle_of_packages() -> None:
    edges = edges_of_packages(edges_of_files())
    assert edges["jpaged.request"] >= {"jpaged.engine", "jpaged.search"}
    assert not circles(edges)


def test_a_circle_of_packages_is_found() -> None:
    """One that no two files make: engine.a imports request.b, request.c imports engine.d."""
    edges = {
        "jpaged.engine.a": {"jpaged.request.b"},
        "jpaged.request.c": {"jpaged.engine.d", "jpaged.config"},
        "jpaged.request.b": set[str](),
        "jpaged.engine.d": set[str](),
        "jpaged.config": set[str](),
    }
    assert not circles(edges)
    assert circles(edges_of_packages(edges)) == {frozenset({"jpaged.engine", "jpaged.request"})}


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
