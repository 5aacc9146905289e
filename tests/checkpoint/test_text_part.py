"""Models of text and images: their text part, under the names of two times."""

import copy
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jpaged
from jpaged import CheckpointError, ConfigError, ModelConfig
from tests.golden.configs import CONFIGS
from tests.golden.reference import load

GOLDEN = load("gemma3_g2_d32_linear")
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        key: value
        for key, value in GOLDEN.config.items()
        if key not in ("architectures", "eos_token_id", "tie_word_embeddings")
    }
    | {"model_type": "gemma3_text"},
    "vision_config": {"model_type": "siglip_vision_model"},
    "eos_token_id": [159, 106],
    "torch_dtype": "bfloat16",
}
IMAGES = {"vision_tower.vision_model.embeddings.patch_embedding.weight": (4, 3, 2, 2)}
IMAGES |= {"multi_modal_projector.mm_input_projection_weight": (4, 72)}


def write(folder: Path, spelling: str, **more: tuple[int, ...]) -> Path:
    """With "language_model.model.layers" or "model.language_model.layers"."""
    new = spelling == "new"
    text, images = ("model.language_model.", "model.") if new else ("language_model.model.", "")
    tensors = {text + k.removeprefix("model."): v for k, v in GOLDEN.tensors().items()}
    for name, shape in IMAGES.items():
        tensors[images + name] = np.zeros(shape, np.float32)
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in more.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_the_text_part_is_the_model(tmp_path: Path, spelling: str) -> None:
    found = jpaged.load_params(write(tmp_path / "both", spelling))
    wanted = jpaged.load_params(GOLDEN.write(tmp_path / "text"))
    assert found.config == wanted.config
    assert found.config.eos_token_ids == (159, 106)
    jax.tree.map(np.testing.assert_array_equal, dict(found), dict(wanted))


def test_what_is_of_neither_part_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "both", "old", **{"other_tower.weight": (2, 2)})
    with pytest.raises(CheckpointError, match=r"1 not in this architecture \(other_tower"):
        jpaged.load_params(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "Gemma3ForSequenceClassification"),
        ({"text_config": None}, "architecture 'Gemma3ForConditionalGeneration'"),
        ({"model_type": "paligemma"}, "model_type 'paligemma'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(CONFIG | change)


def test_the_family_of_a_text_part_is_what_it_says() -> None:
    raw = copy.deepcopy(CONFIGS["mistral3_g2_d32"])
    assert ModelConfig.from_hf(raw).family == "mistral"
    raw["text_config"]["model_type"] = "ministral3"
    assert ModelConfig.from_hf(raw).family == "ministral3"
    said = r"of mistral3: model_type='mistral9' is not supported \(mistral4, mistral, ministral3"
    with pytest.raises(ConfigError, match=said):
        raw["text_config"]["model_type"] = "mistral9"
        ModelConfig.from_hf(raw)


def test_an_older_file_has_the_keys_of_text_beside_those_of_images() -> None:
    raw = copy.deepcopy(CONFIGS["qwen2_5_vl_g2_d32"])
    flat = {**raw, **raw["text_config"], "model_type": "qwen2_5_vl"}
    del flat["text_config"]
    assert ModelConfig.from_hf(flat) == ModelConfig.from_hf(raw)
