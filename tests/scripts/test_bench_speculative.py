"""scripts/bench_speculative.py: a run with the MTP head that a checkpoint has."""

import json
import shutil
from pathlib import Path

import bench_speculative
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.checkpoint.hf import stored_names
from jpaged.demo import HYBRID_PATH
from jpaged.models.config import ModelConfig
from jpaged.models.families.hybrid import MTP
from jpaged.models.mtp import mtp_config

SMALL = "--rows 1 --tokens-ahead 2 --temperatures 0 --tokens 12 --repeat 1 --always"


def with_a_head(folder: Path) -> Path:
    """The embedded hybrid with an MTP head of random weights in its file."""
    shutil.copytree(HYBRID_PATH, folder)
    file, rng = folder / "model.safetensors", np.random.default_rng(0)
    names = {"embed_norm.weight": MTP.embed_norm, "hidden_norm.weight": MTP.hidden_norm}
    names |= {"fc.weight": MTP.fc, "model.norm.weight": MTP.norm}
    head = {}
    for stored in stored_names(mtp_config(ModelConfig.coerce(folder))).values():
        for name, shape, *_ in stored:
            theirs = names.get(name, name.replace("model.layers.0.", MTP.layer))
            x = 0.02 * rng.standard_normal(shape)
            head[theirs] = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_run_with_an_mtp_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints a line a text, whose tokens are those without the head."""
    folder = with_a_head(tmp_path / "model")
    records = bench_speculative.main([str(folder), "--mtp", *SMALL.split()])
    assert [record["text"] for record in records] == ["copies", "new"]
    for record, line in zip(records, capsys.readouterr().out.splitlines(), strict=True):
        assert json.loads(line)["drafted"] == record["drafted"] > 0
        assert record["equal"] == 1.0 and record["tok_s"] > 0
