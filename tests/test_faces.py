"""Who leans on whom among the faces."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sources(*folders: str) -> list[str]:
    """Python files below folders of the repository, by their path in it."""
    found = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return sorted(file.relative_to(ROOT).as_posix() for file in found)


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def classes(file: str) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(ast.parse(read(file))) if isinstance(node, ast.ClassDef))


JPAGED = sources("jpaged")


def imports_of(file: str) -> set[str]:
    """Modules that a file imports from, wherever in it."""
    nodes = list(ast.walk(ast.parse(read(file))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module
    }


def test_faces_know_nothing_of_each_other() -> None:
    for one, other in (("api", "llm"), ("llm", "api")):
        assert f"jpaged.{other}" not in imports_of(f"jpaged/{one}.py")
    below = ("calls", "session", "request/processor", "request/collect", "engine/engine")
    for file in below:
        assert not imports_of(f"jpaged/{file}.py") & {"jpaged", "jpaged.api", "jpaged.llm"}, file


def test_nothing_inherits_from_a_face() -> None:
    for file in JPAGED:
        for found in classes(file):
            bases = {ast.unparse(base).split(".")[-1] for base in found.bases}
            assert not bases & {"LLM", "Session", "Calls"}, f"{file}: {found.name}"


def test_faces_reach_into_no_privates() -> None:
    """A name with an underscore is used of `self` alone, or of the file's own functions."""
    for file in ("api", "llm", "calls", "session"):
        for node in ast.walk(ast.parse(read(f"jpaged/{file}.py"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                assert is_own or node.attr.startswith("__"), f"{file}: {ast.unparse(node)}"
