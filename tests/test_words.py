"""Plain words: docstrings that begin with "Of" or "So", and names that say nothing.

Such a docstring leans on the line above it; `how`, `own`, `each`, `where`, `found` and `given` as
names of parameters and variables leave a reader to guess. BOUNDS holds how many there still are in
each package; it may only shrink, and a package that is not in it has none.
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {"how", "own", "each", "where", "found", "given"}
BOUNDS: dict[str, int] = {
    "jpaged/checkpoint": 2,  # `each` of load_params, which callers name
}


def package_of(file: Path) -> str:
    """Return the folder that is counted: a package of jpaged, else the first folder."""
    parts = file.relative_to(ROOT).parts[:-1]
    return "/".join(parts[:2])


def faults(file: Path) -> list[str]:
    """Return what is wrong in a file, each with its line."""
    tree, wrong = ast.parse(file.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").split(" ")[0].strip(",:")
            if first in ("Of", "So"):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                wrong.append(f"{file}:{line}: a docstring begins with {first!r}")
        if isinstance(node, ast.arg) and node.arg in NAMES:
            wrong.append(f"{file}:{node.lineno}: a parameter is named {node.arg!r}")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            wrong.append(f"{file}:{node.lineno}: a variable is named {node.id!r}")
    return wrong


def test_faults_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('def f(how):\n    """Of a thing."""\n    own = how\n    return own\n')
    assert len(faults(file)) == 3
    file.write_text('def f(options):\n    """Offer a thing."""\n    return options\n')
    assert faults(file) == []


def test_words() -> None:
    counts: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    for folder in ("jpaged", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            package = package_of(file)
            lines = faults(file)
            counts[package] += len(lines)
            wrong.setdefault(package, []).extend(lines)
    for package, count in counts.items():
        most = BOUNDS.get(package, 0)
        listed = "\n".join(wrong[package])
        assert count <= most, f"{package} has {count} of at most {most}:\n{listed}"
