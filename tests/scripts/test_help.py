"""Help and errors of every script that has flags."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "scripts").glob("*.py")
    if "arser(" in path.read_text() and not path.name.startswith("_")
)


def test_there_are_scripts() -> None:
    assert {"bench_host", "sweep", "kernel_report"} <= set(SCRIPTS)


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


@pytest.mark.parametrize("name", ["serve_batch", "merge_shards", "plan_memory", "bench", "convert"])
def test_commands_as_scripts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They go by the script's name; serve_batch shows every flag, as it has always done."""
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    assert caught.value.code == 0 and out.startswith(f"usage: {name} ")
    assert name != "serve_batch" or "--peer-timeout-s" in out
