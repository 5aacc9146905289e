"""Help and errors of every script that has flags."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "scripts").glob("*.py")
    if "arser(" in path.read_text() and not path.name.startswith("_")
)


def test_there_are_scripts() -> None:
    assert {"serve_batch", "merge_shards", "bench", "kernel_report"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_usage_is_two_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(name).main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0 and lines[0].startswith("usage: ")
    assert lines[1].endswith("--help lists the flags") and lines[2] == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_misspelled_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named with the flag that was meant, also where a required argument is missing."""
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(name).main(["--hlep"])
    assert caught.value.code in (1, 2)
    assert "unknown argument --hlep: did you mean --help?" in capsys.readouterr().err
