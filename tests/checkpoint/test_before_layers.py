"""A checkpoint written when ModelConfig was a flat set of switches, before it held layers: names,
shapes and values are still those.

`before_layers/mixture` was saved by jpaged at 4e0cc61; `paths.json` lists its leaves: the path that
jax gives, the shape, the dtype and the float64 sum.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import ModelConfig, SamplingParams, generate
from jpaged.checkpoint import load_params, save_params
from jpaged.errors import CheckpointError
from jpaged.models.params import Params

FOLDER = Path(__file__).parent / "before_layers"


def described(params: Params) -> dict[str, list[Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path): [
            list(x.shape),
            str(x.dtype),
            float(np.asarray(x, np.float64).sum()),
        ]
        for path, x in leaves
    }


def test_it_loads_as_it_was_saved(tmp_path: Path) -> None:
    params = load_params(FOLDER / "mixture")
    wanted: dict[str, list[Any]] = json.loads((FOLDER / "paths.json").read_text())
    assert list(described(params)) == list(wanted), "the same leaves in the same order"
    assert described(params) == wanted
    first, second = (layer.ffn for layer in params.config.layers)
    assert type(first) is not type(second), "experts in one layer, an MLP in the other"
    save_params(params, tmp_path / "again")
    again = load_params(tmp_path / "again")
    assert described(again) == wanted and again.config == params.config
    assert ModelConfig.coerce(FOLDER / "mixture") == params.config


def test_it_is_served() -> None:
    (out,) = generate(
        load_params(FOLDER / "mixture"),
        [[1, 2, 3]],
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    )
    assert len(out.outputs[0].token_ids) == 4


def test_a_model_of_other_layers_does_not_take_it(tmp_path: Path) -> None:
    """The control: names follow from the layers."""
    raw = json.loads((FOLDER / "mixture" / "config.json").read_text())
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | {"mlp_only_layers": [0]}))
    (folder / "params").symlink_to(FOLDER / "mixture" / "params", target_is_directory=True)
    with pytest.raises(CheckpointError, match="missing"):
        load_params(folder)
