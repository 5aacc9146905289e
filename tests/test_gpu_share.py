"""Entry points that only serve have jax take nearly all of a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jaxlib import xla_client

from jpaged import gpu_share
from jpaged.integrations.batch import command as serve_batch
from jpaged.openai.server import run


@pytest.fixture(autouse=True)
def no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (gpu_share.VARIABLE, gpu_share.OLD_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards


def taken() -> float:
    """Return the share that jax itself reads from the environment."""
    options = xla_client.generate_pjrt_gpu_plugin_options()
    return float(str(options.get("memory_fraction", gpu_share.DEFAULT)))


def test_what_jax_reads_is_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken() == gpu_share.share() == 0.75 and not gpu_share.is_set()
    gpu_share.take_most()
    assert taken() == gpu_share.share() == 0.95
    for name in (gpu_share.VARIABLE, gpu_share.OLD_VARIABLE):
        with monkeypatch.context() as patch:
            patch.setenv(gpu_share.VARIABLE, "")
            patch.setenv(name, "0.4")
            gpu_share.take_most()
            assert taken() == gpu_share.share() == 0.4, "the user has decided"


def test_entry_points_take_most_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they load anything."""
    missing = str(tmp_path / "none")
    assert run.main([missing, "--port", "0"]) == 1
    assert gpu_share.share() == 0.95
    monkeypatch.setenv(gpu_share.VARIABLE, "")
    assert serve_batch.main([missing, "--model", missing]) == serve_batch.FATAL
    assert gpu_share.share() == 0.95 and missing in capsys.readouterr().err


def test_importing_entry_points_does_not_start_jax() -> None:
    """It would have read the share by then."""
    code = (
        "import jpaged.openai.server.run, jpaged.integrations.batch.command\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    root = Path(__file__).parents[1]
    paths = os.pathsep.join([str(root), str(root / "scripts")])
    environment = os.environ | {"PYTHONPATH": paths}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr[-2000:]
