"""Peak host memory of load_params, measured in processes of their own on a 200 MB checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoint.conftest import SMALL, write_folder
from tests.golden.weights import tensor_shapes

ROOT = Path(__file__).parents[2]
RAW = SMALL | {
    "vocab_size": 40_000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
}

# VmHWM and not ru_maxrss: the latter starts at what the parent had, since a spawned child shares
# its memory until exec.
SCRIPT = """
import re, sys
from pathlib import Path
import jax, numpy, orbax.checkpoint, safetensors.numpy, tensorstore
from jpaged.checkpoint import load_params, save_params
from jpaged.checkpoint.load import read_params
from jpaged.models.config import ModelConfig

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

folder = Path(sys.argv[2])
ModelConfig.coerce(folder)  # imports transformers
jax.device_put(numpy.ones(3, numpy.float32)).block_until_ready()
before = peak()
if sys.argv[1] == "naive":
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    params = {name: jax.numpy.array(value) for name, value in tensors.items()}
elif sys.argv[1] == "int8":
    params = read_params(folder, quantization="int8")
    print(peak() - before - sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
    sys.exit()
else:
    params = load_params(folder)
print((peak() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
if sys.argv[1] == "save":
    save_params(params, sys.argv[3])
"""


def measure(*args: object) -> float:
    command = [sys.executable, "-c", SCRIPT, *map(str, args)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_is_within_1_3_of_the_checkpoint(tmp_path: Path) -> None:
    some = np.random.default_rng(0).standard_normal(2**20).astype(ml_dtypes.bfloat16)
    write_folder(
        tmp_path / "hf",
        RAW,
        {name: np.resize(some, shape) for name, shape in tensor_shapes(RAW).items()},
    )
    assert 200e6 < (tmp_path / "hf" / "model.safetensors").stat().st_size < 300e6
    assert measure("save", tmp_path / "hf", tmp_path / "orbax") <= 1.3
    assert measure("load", tmp_path / "orbax") <= 1.3
    assert measure("naive", tmp_path / "hf") > 1.5  # the meter can tell
    # XLA itself takes 60 MiB to compile. The embedding has 78 MiB, and 156 in f32.
    assert measure("int8", tmp_path / "hf") < 120 << 20
