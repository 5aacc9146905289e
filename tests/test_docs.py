"""README and docs/ name files that exist."""

import re
from pathlib import Path

import pytest

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
