"""How much code there is, and who leans on whom among the faces: budgets that DESIGN argues and no
change may pass unseen.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES_OF_A_CLASS = 200  # with docstrings, comments and blank lines
MOST_LINES_OF_A_FILE = 500

# Code lines (no comments, docstrings, blank lines) of a wing: what it may have. Lower one when a
# wing has shrunk; raise none without an argument in DESIGN.
WINGS = {
    # asked: 3500. What there was before what follows had 5950: of the lines now 1040 import, 450
    # close a bracket alone, as the formatter has it, and 380 raise errors that name value and knob.
    # 370 of the rest for Gemma, Phi, SmolLM, Granite and OLMo, 360 for mixtures of
    # experts, 490 for meshes and processes, 80 for determinism that is free and for flags, 440 for
    # replicas, 130 for a draw that decodes share and for steps that stand in for others, 215 for
    # weights in 8 and 4 bits, 20 for configs that are kept, 315 for AsyncLLM, 30 for keys and
    # values in 8 bits, 630 for adapters, 550 for answers of a given form, 185 for files in
    # 8 and 4 bits and for experts in them, 260 for drafts, 335 for draft models, 20 for modules of
    # nnx apart, 40 for first steps that wait for who is coming and for beams of a form, 65 for one
    # kernel that prepares attention on a GPU and for a plan that is measured once, 95 for products
    # with weights in 8 and 4 bits that XLA fuses and for plans of such files, 110 for forms that
    # are tried in a process of their own, 125 for adapters of the embedding, the head and experts,
    # 35 for replicas that guess, 300 for EAGLE-3 heads, 75 for a draw that reads the logits once
    # on a GPU, 60 for draws that are plain but for a mask, 20 for rows that read their own
    # adapters, 30 for what drafts cost beside steps that run ahead, 40 for drafts that no other row
    # waits for and for looking up within a share of the time, 10 for adapters of few rows,
    # 15 for drafts that met a slow moment, or caches that were cold, and are tried again soon,
    # 10 for arrays that go up with the call that takes them, 15 for products of fp8 by fp8,
    # 20 for experts in 8 and 4 bits that C++ multiplies
    "request path": 11605,
    # asked: 500; 50 of them for models by name, 90 to read in shares, 85 for experts in mxfp4, 75
    # for the trees of Gemma and of experts, 140 for adapters of PEFT and of other trees,
    # 240 for four formats in 8 and 4 bits, 50 for tokenizers that are kept, 5 to refuse what is not
    # finite in them, 55 for adapters of the embedding, the head and experts, 105 for EAGLE-3 heads
    "checkpoint": 1556,
    # With the bodies of openai/, which a server shares: 693 of them, 90 for the forms of answers.
    # asked: 1500; 80 of them for runs over processes, 25 for adapters, 5 to outlast JAX's own watch
    "batch": 2660,
    # A server with its parts of answers, and the command that starts it; 360 of them for
    # /v1/responses, 60 for calls and forms in channels, 25 for pieces that cost little, 5 for forms
    # that take long to compile, 5 for bodies that are packed or told twice.
    "server": 2105,
    # asked: 2200; 370 of them to check and model kernels on a card, 40 to time experts on CPU,
    # 50 for what a form of weights costs in quality, 10 for replicas on chips that are not there,
    # 70 to time adapters, 160 for a server under load, 190 to validate answers of a given form and
    # time their masks, 40 to time forms of weights on a card, 35 on a CPU, 85 to time drafts,
    # 50 to tell the server's processor time from the model's and the client's, 40 for the
    # official suite of schemas, 15 for a table of adapters' cost, 28 to time ways of adapters on a
    # card, 17 for products of fp8 by fp8 there, 35 for experts in 8 and 4 bits there
    "scripts": 3955,
}
KERNEL_FILE = 300

# Classes and files that are still too long, and how long they may be. None may be added.
LONG_CLASSES: dict[str, int] = {}
LONG_FILES: dict[str, int] = {}

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Lines with tokens other than comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= lines_of(node.body[0])
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def lines_of(node: ast.stmt) -> set[int]:
    assert node.end_lineno is not None
    return set(range(node.lineno, node.end_lineno + 1))


def sources(*folders: str) -> list[str]:
    """Python files below folders of the repository, by their path in it."""
    found = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return sorted(file.relative_to(ROOT).as_posix() for file in found)


SERVER = {
    *("jpaged/openai/parts.py", "jpaged/openai/tool_grammar.py"),
    *("jpaged/openai/__main__.py", "jpaged/__main__.py"),
}


def wing(file: str) -> str | None:
    """The wing of a file under jpaged or scripts; None for those without a budget."""
    if file.startswith("scripts/"):
        return "scripts"
    if file.startswith("jpaged/checkpoint/"):
        return "checkpoint"
    if file.startswith("jpaged/openai/server/") or file in SERVER:
        return "server"
    if file.startswith(("jpaged/integrations/batch/", "jpaged/openai/")):
        return "batch"
    if file.startswith(("jpaged/integrations/", "jpaged/demo/")):
        return None
    return "request path"


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def classes(file: str) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(ast.parse(read(file))) if isinstance(node, ast.ClassDef))


JPAGED = sources("jpaged")
KERNELS = sources("kernels_cpu", "kernels_pallas")
SCRIPTS = sources("scripts")


def test_the_counter() -> None:
    source = '"""Doc\nstring."""\n\nimport os  # why\n\n# a comment\ndef f():\n    """Doc."""\n'
    assert code_lines(source + '    return """a\nb"""\n') == 4
    assert code_lines("") == 0


def test_wings() -> None:
    """`pytest -s` prints the table."""
    totals = dict.fromkeys(WINGS, 0)
    for file in JPAGED + SCRIPTS:
        if (name := wing(file)) is not None:
            totals[name] += code_lines(read(file))
    for name, budget in WINGS.items():
        print(f"{name:14} {totals[name]:6} of {budget}")
    over = {name: total for name, total in totals.items() if total > WINGS[name]}
    assert not over, "code lines over their budget: make it simpler, or argue in DESIGN for more"


@pytest.mark.parametrize("file", KERNELS)
def test_a_kernel_file(file: str) -> None:
    assert code_lines(read(file)) <= KERNEL_FILE


@pytest.mark.parametrize("file", JPAGED + KERNELS + SCRIPTS)
def test_a_file_and_its_classes(file: str) -> None:
    assert len(read(file).splitlines()) <= LONG_FILES.get(file, MOST_LINES_OF_A_FILE)
    for found in classes(file):
        most = LONG_CLASSES.get(f"{file}::{found.name}", MOST_LINES_OF_A_CLASS)
        assert len(lines_of(found)) <= most, f"class {found.name}"


def test_the_exceptions_are_needed() -> None:
    """What has become short enough leaves the table."""
    lengths = {
        f"{file}::{found.name}": len(lines_of(found))
        for file in JPAGED + KERNELS + SCRIPTS
        for found in classes(file)
    }
    for name in LONG_CLASSES:
        assert lengths.get(name, 0) > MOST_LINES_OF_A_CLASS, f"{name} may leave LONG_CLASSES"
    for file in LONG_FILES:
        is_long = (ROOT / file).is_file() and len(read(file).splitlines()) > MOST_LINES_OF_A_FILE
        assert is_long, f"{file} may leave LONG_FILES"


# Faces


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
