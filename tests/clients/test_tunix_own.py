"""tunix's own tests, with jpaged in the place of its rollout engine and of its sampler.

They are in no package: TUNIX_SOURCE=/path/to/tunix names a checkout of the version that is
imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("TUNIX_SOURCE")
ROOT = Path(__file__).parents[2]
SECONDS = 3000
# Files, and what of each does not apply.
FILES = {
    "tests/rl/grpo/grpo_learner_test.py": (
        # They mock what only its own or vLLM's engine has, or restore its toy's parameters.
        "vllm",
        "checkpoint",
    ),
    # A sampler of ours cannot be made without a model.
    "tests/experimental/rollout/vanilla_sampler_adapter_test.py": ("uninitialized",),
}
pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(SOURCE is None, reason="TUNIX_SOURCE names no checkout of tunix"),
]


@pytest.mark.parametrize("file", FILES)
def test_they_pass(file: str) -> None:
    path = Path(SOURCE or "") / file
    if not path.exists():
        pytest.skip(f"this tunix has no {file}")
    left_out = " and ".join(f"not {name}" for name in FILES[file])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.clients.in_tunix"]
    command += ["-p", "no:cacheprovider", "-k", left_out, str(path)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        cwd=SOURCE,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    last = done.stdout.strip().splitlines()[-2:]
    assert "calls of jpaged: {'" in done.stdout, last
