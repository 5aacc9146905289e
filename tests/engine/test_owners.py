"""Who assigns the attributes of a Sequence: sequence.py, and for each attribute that its docstring
names one other file.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from jpaged.engine.sequence import Sequence

ROOT = Path(__file__).parents[2]
HOME = "engine/sequence.py"
SLOTS = {name for name in Sequence.__slots__ if not name.startswith("__")}


def owners() -> dict[str, str]:
    """The file that each attribute belongs to, as the docstring of Sequence has it."""
    table = re.findall(r"^ {4}(\S+\.py) +(.+)$", inspect.getdoc(Sequence) or "", re.M)
    assert table, "the docstring has no table of owners"
    stated = {name: file for file, names in table for name in names.split(", ")}
    assert set(stated) <= SLOTS, set(stated) - SLOTS
    return dict.fromkeys(SLOTS, HOME) | stated


def assigned(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Attributes that are assigned, deleted or set by name on anything but `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ("setattr", "__setattr__", "delattr") and len(node.args) > 1:
                named = node.args[1]
                yield (str(named.value) if isinstance(named, ast.Constant) else "?"), node.lineno


def strangers(source: str, file: str) -> list[str]:
    """Assignments in a file to attributes of a Sequence that belong to another."""
    stated = owners()
    return [
        f"{file}:{line} assigns {name}, which belongs to {stated[name]}"
        for name, line in assigned(ast.parse(source))
        if stated.get(name, file) != file
    ]


def test_one_file_assigns_each_attribute_of_a_sequence():
    # The text of an HTTP answer and the place of an output, which are no Sequences.
    allowed = {
        ("openai/server/generation.py", "text"),
        ("openai/server/pooling.py", "text"),
        ("session.py", "index"),
        ("llm.py", "index"),
        ("rollout.py", "index"),
    }
    stated, found = owners(), []
    for path in sorted((ROOT / "jpaged").rglob("*.py")):
        file = str(path.relative_to(ROOT / "jpaged"))
        names = {name for name, _ in assigned(ast.parse(path.read_text(encoding="utf-8")))}
        found += [(file, name) for name in sorted(names) if stated.get(name, file) != file]
    assert set(found) == allowed


def test_every_stated_owner_assigns_what_it_owns():
    for name, file in owners().items():
        source = (ROOT / "jpaged" / file).read_text(encoding="utf-8")
        assert file == HOME or name in {attr for attr, _ in assigned(ast.parse(source))}, name


def test_a_stranger_is_caught():
    file = "engine/commit.py"
    assert strangers("seq.num_dispatched = 3", file) == [
        "engine/commit.py:1 assigns num_dispatched, which belongs to engine/sequence.py"
    ]
    for source in ("seq.pending -= 1", "a, seq.epoch = 1, 2", 'setattr(seq, "status", 1)'):
        assert len(strangers(source, file)) == 1, source
    assert len(strangers("for seq.index in range(3): pass", file)) == 1
    assert strangers("seq.controls = row", "engine/packing.py") == []
    assert strangers("self.status = 1; seq.other = 2", file) == []
