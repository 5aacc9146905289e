"""Files that hold the pairs of rope side by side: rows of weights in any form are put in our order
wherever they are read.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.checkpoint import load_params, save_params
from jpaged.checkpoint.load import find_weights
from jpaged.checkpoint.tensors import flat
from jpaged.models.quantized import is_quantized
from tests.checkpoint.test_quantized import FORMATS
from tests.golden.configs import CONFIGS
from tests.golden.weights import state_dict

NAME = "glm4_g4_d32"  # of whose heads 16 of 32 dimensions are rotated
CONFIG, TENSORS = CONFIGS[NAME], state_dict(NAME, CONFIGS[NAME])


def write(folder: Path, config: dict[str, object], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    save_file(
        {k: np.ascontiguousarray(x) for k, x in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def test_rows_are_in_our_order(tmp_path: Path) -> None:
    """Row i of a head is the file's row 2i, row 8 + i its row 2i + 1; the rest and values stay."""
    folder = write(tmp_path / "plain", {}, TENSORS)
    params = flat(load_params(folder))
    theirs = [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32)]
    qkv, bias = (np.asarray(params[f"layers.1.attention.{x}"]) for x in ("qkv", "qkv_bias"))
    at = "model.layers.1.self_attn."
    for i in range(4):
        q = TENSORS[f"{at}q_proj.weight"][32 * i : 32 * (i + 1)]
        np.testing.assert_array_equal(qkv[0, i], q[theirs])
        q_bias = TENSORS[f"{at}q_proj.bias"][32 * i : 32 * (i + 1)]
        np.testing.assert_array_equal(bias[0, i], q_bias[theirs])
    np.testing.assert_array_equal(qkv[0, 4], TENSORS[f"{at}k_proj.weight"][theirs])
    np.testing.assert_array_equal(qkv[0, 5], TENSORS[f"{at}v_proj.weight"])
    # A share of it, as each of several processes reads.
    weight = find_weights(folder, load_params(folder).config)["layers.1.attention.qkv"]
    share = (slice(0, 1), slice(2, 5), slice(3, 30), slice(8, 40))
    np.testing.assert_array_equal(weight.read_share(share), qkv[share])
    # An Orbax folder has our order.
    save_params(load_params(folder), tmp_path / "orbax")
    again = load_params(tmp_path / "orbax")
    assert again.config == load_params(folder).config
    for name, array in flat(again).items():
        np.testing.assert_array_equal(array, params[name])


@pytest.mark.parametrize("form", ["fp8", "compressed_int8"])
def test_weights_of_8_bits(tmp_path: Path, form: str) -> None:
    make, _, config = FORMATS[form]
    rng, packed, plain = np.random.default_rng(0), dict(TENSORS), dict(TENSORS)
    for name in [name for name in TENSORS if name.endswith("_proj.weight")]:
        parts, exact = make(rng, *packed.pop(name).shape)
        packed |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in parts.items()}
        plain[name] = exact.astype(np.float32)
    folder = write(tmp_path / "packed", {"quantization_config": config}, packed)
    kept = flat(load_params(folder), is_quantized)
    wanted = flat(load_params(write(tmp_path / "plain", {}, plain)))
    for name in ("layers.0.attention.qkv", "layers.1.attention.qkv"):
        assert is_quantized(kept[name])
        whole = jax.jit(lambda leaf: leaf.whole())(kept[name])
        np.testing.assert_allclose(whole, wanted[name], rtol=1e-6)
