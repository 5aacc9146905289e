"""The stored references are whole, belong to the weights that the tests make, and cover what they are said to cover."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from jpaged.config import ModelConfig
from tests.golden.configs import CONFIGS
from tests.golden.reference import load


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_is_whole(name: str) -> None:
    golden = load(name)
    config = ModelConfig.from_hf(golden.config)
    for tensor in golden.tensors().values():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, tensor.astype(np.float16).astype(np.float32))
    assert golden.min_gap > 0.01
    for prompt in golden.prompts:
        assert prompt.logits.shape == prompt.logits_bf16.shape == (len(prompt.positions), config.vocab_size)
        assert prompt.positions[-1] == len(prompt.token_ids) - 1
        assert prompt.logits[-1].argmax() == prompt.greedy[0]
        assert len(prompt.greedy) == 24 and not set(prompt.greedy) & set(config.eos_token_ids)
        assert np.abs(prompt.logits - prompt.logits_bf16).max() <= golden.bf16_max_diff


def test_configs_cover_the_families() -> None:
    configs = [ModelConfig.from_hf(raw) for raw in CONFIGS.values()]
    for family in ("qwen3", "qwen2", "llama", "mistral"):
        assert sum(c.family == family for c in configs) >= 3
    assert {c.group_size for c in configs} == {1, 2, 4, 7}
    assert {c.head_dim for c in configs} == {32, 64, 80, 128}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert {c.rope_scaling.kind if c.rope_scaling else None for c in configs} == {None, "linear", "llama3", "yarn"}
    assert any(None in c.sliding_windows and any(c.sliding_windows) for c in configs)
    longest = max(len(prompt.token_ids) for prompt in load("qwen3_g2_d32_tied").prompts)
    assert all(window < longest for c in configs for window in c.sliding_windows if window)


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("bfloat16", 3), ("float16", 2)])
def test_written_folder_holds_every_tensor(tmp_path: Path, dtype: str, shards: int) -> None:
    golden = load("qwen3_g2_d32_tied")
    folder = golden.write(tmp_path / "model", dtype, shards)
    if shards > 1:
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    else:
        weight_map = dict.fromkeys(golden.tensors(), "model.safetensors")
    assert len(set(weight_map.values())) == shards and set(weight_map) == set(golden.tensors())
    for name, expected in golden.tensors().items():
        with safe_open(folder / weight_map[name], "numpy") as file:
            assert np.array_equal(np.asarray(file.get_tensor(name), np.float32), expected)
