"""scripts/find_python.sh takes a Python that runs and fits, and says in one line what is missing
when there is none.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_python.sh"


def find(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with one folder on PATH and no pyenv."""
    env = {"PATH": str(path), "HOME": str(path)} | environment
    return subprocess.run(
        ["/bin/sh", str(SCRIPT)], env=env, capture_output=True, text=True, check=False
    )


def command(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


REAL = f'exec "{sys.executable}" "$@"'
BROKEN = "echo 'pyenv: command not found' >&2; exit 127"


def test_a_shim_that_fails_is_passed_over(tmp_path: Path) -> None:
    command(tmp_path / "python3.13", BROKEN)
    command(tmp_path / "python3", REAL)
    result = find(tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{sys.executable}\n", "")


def test_pyenv_versions_are_looked_at(tmp_path: Path) -> None:
    command(tmp_path / "python3", BROKEN)
    command(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python", REAL)
    assert find(tmp_path, PYENV_ROOT=str(tmp_path / "pyenv")).stdout == f"{sys.executable}\n"


def test_uv_is_asked(tmp_path: Path) -> None:
    real = command(tmp_path / "uv-python" / "python", REAL)
    command(tmp_path / "uv", f'[ "$1 $2" = "python find" ] && echo "{real}"')
    assert find(tmp_path).stdout == f"{sys.executable}\n"


def test_none_is_one_line(tmp_path: Path) -> None:
    command(tmp_path / "python3", BROKEN)
    for environment in ({}, {"PYTHON": str(tmp_path / "python3")}):
        result = find(tmp_path, **environment)
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.count("\n") == 1 and "Python 3.12 or newer" in result.stderr
