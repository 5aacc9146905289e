"""README and docs/ name files, flags, settings and names that exist."""

import argparse
import dataclasses
import functools
import inspect
import re
from pathlib import Path

import pytest

from jpaged import LLM, EngineConfig
from jpaged.flags import add_engine_flags, add_flags
from jpaged.openai.server.settings import ServerSettings

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


# Flags of other programs that pages show, by page; and names of theirs.
FOREIGN = {
    "batch.md": {"--gres", "--requeue", "--signal", "--array"},  # SLURM's sbatch
    "server.md": {  # `vllm bench serve`
        "--backend",
        "--dataset-name",
        "--ignore-eos",
        "--max-concurrency",
        "--num-prompts",
        "--random-input-len",
        "--random-output-len",
    },
    "research.md": {"xla_gpu_enable_split_k_autotuning"},  # of XLA_FLAGS
}


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


def known_flags() -> set[str]:
    """Return all flags of the commands, scripts and examples, also those made from fields."""
    folders = ("jpaged", "scripts", "examples", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pattern = re.compile(r"""["'](--[a-z][\w-]*)["']""")
    flags = {flag for path in files for flag in pattern.findall(path.read_text())}
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    add_flags(parser, ServerSettings)
    flags |= parser._option_string_actions.keys()
    return flags | {f"--no-{flag[2:]}" for flag in flags} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_flags_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", page.read_text()))
    missing = named - known_flags() - FOREIGN.get(page.name, set())
    assert not missing, f"{page.name} names {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_settings_that_are_passed_exist(page: Path) -> None:
    """LLM(...) and EngineConfig(...) take what is passed; other keywords are names in the code."""
    text = page.read_text()
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    known = fields | set(inspect.signature(LLM.__init__).parameters)
    calls = re.findall(r"\b(?:Async)?(?:LLM|EngineConfig)\(([^()]*)\)", text)
    passed = {name for call in calls for name in re.findall(r"\b([a-z]\w*)=", call)}
    assert not passed - known, f"{page.name} passes {sorted(passed - known)}"
    quoted = [quote for quote in re.findall(r"`([^`\n]+)`", text) if " --" not in f" {quote}"]
    named = {name for quote in quoted for name in re.findall(r"\b([a-z]\w*)=", quote)}
    missing = named - source_words() - FOREIGN.get(page.name, set())
    assert not missing, f"{page.name} names {sorted(missing)}"


@functools.cache
def source_words() -> set[str]:
    """Return every identifier in the code of the project."""
    folders = ("jpaged", "kernels_cpu", "kernels_pallas", "scripts", "examples", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {word for path in files for word in re.findall(r"[A-Za-z_]\w*", path.read_text())}


def test_readme_begins_with_what_a_reader_wants() -> None:
    """What it is, two commands, a run, at most five lines of code, where to go: on one screen."""
    first = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert first.index("make demo") < first.index("make test") < first.index("=== line")
    code = first.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 5 and "generate" in code
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"`docs/(\w+\.md)`", first)), "every page is in the table"
    assert len(first.splitlines()) <= 60
