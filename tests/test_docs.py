"""README and docs/ name files, folders, flags and settings that exist."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from jpaged import EngineConfig
from jpaged.__main__ import COMMANDS, parser_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HOMES = [
    ROOT,
    *(
        ROOT / home
        for home in (
            "jpaged",
            "jpaged/runtime",
            "kernels_cpu",
            "kernels_pallas/paged_attention",
            "scripts",
        )
    ),
]  # what a path may be relative to
NAMED = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|cc|sh|md|ipynb)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    quoted = re.findall(r"`([^`\n]+)`", text) + re.findall(
        r"^ {4}(?:\w+=\S+ )*(?:python|bash|make) .*$", text, re.M
    )
    named = {path for quote in quoted for path in NAMED.findall(quote) if not path.isupper()}
    assert len(named) >= 2
    missing = sorted(
        path for path in named if not any((home / path).exists() for home in (*HOMES, page.parent))
    )
    assert not missing, f"{page.name} names {missing}"


FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])\b")
# Flags of other programs that pages name.
OTHERS = {
    *("array", "gres", "requeue", "signal"),  # sbatch
    "tasks",  # lm_eval
    "gpu-memory-utilization",  # vllm serve
    # vllm bench
    *("backend", "dataset-name", "ignore-eos", "max-concurrency", "num-prompts"),
    *("random-input-len", "random-output-len"),
}
# Settings in code: LLM(name=...), and flags are checked against the fields of these.
CALLED = re.compile(r"(?:EngineConfig|LLM)\(([^()]*)\)")


def known_flags() -> set[str]:
    """Every flag of the command lines: of each command, script and example."""
    known = {flag[2:] for name in COMMANDS for flag in parser_of(name)._option_string_actions} | {
        "version"
    }
    for file in [*(ROOT / "scripts").glob("*"), *(ROOT / "examples").glob("*.py")]:
        if file.suffix in (".py", ".sh"):
            known |= set(FLAG.findall(file.read_text()))
    known |= {f"no-{name}" for name in known}
    return known | OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_flags_that_are_named_exist(page: Path) -> None:
    missing = set(FLAG.findall(page.read_text())) - known_flags()
    assert not missing, f"{page.name} names --{', --'.join(sorted(missing))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_settings_that_are_passed_exist(page: Path) -> None:
    """Keyword arguments of `LLM(...)` and `EngineConfig(...)` in the text."""
    beside = {"params", "tokenizer", "mesh", "seed", "model"}
    fields: Any = {field.name for field in dataclasses.fields(EngineConfig)} | beside
    named = {
        name
        for arguments in CALLED.findall(page.read_text())
        for name in re.findall(r"\b(\w+)=", arguments)
    }
    assert named <= fields, f"{page.name} passes {sorted(named - fields)}"


def test_folders_of_the_architecture_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = re.findall(r"`([\w/]+/)`", page)
    assert len(folders) > 15 and all((ROOT / folder).is_dir() for folder in folders), folders
    packages = {path.parent.name for path in (ROOT / "jpaged").glob("*/__init__.py")}
    assert {f"jpaged/{name}/" for name in packages} <= set(folders)


def test_readme_names_every_page() -> None:
    first = (ROOT / "README.md").read_text().split("\n## ")[0]
    missing = {page.name for page in PAGES[1:]} - set(re.findall(r"`docs/(\w+\.md)`", first))
    assert not missing, f"no way leads from README to {sorted(missing)}"
    assert first.index("make demo") < first.index("make test") < first.index("=== line")
