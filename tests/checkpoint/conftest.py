"""Small checkpoints, made tensor by tensor from a Hugging Face config dict."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.golden.weights import tensor_shapes

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": [3, 5],
}
NUMPY_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def make_tensors(
    raw: Mapping[str, Any], dtype: str = "float32", seed: int = 0
) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face's names; no two values of a checkpoint are likely to be
    equal.
    """
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(raw)
    return {
        name: rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype])
        for name, shape in shapes.items()
    }


def write_folder(
    folder: Path, raw: Mapping[str, Any], tensors: dict[str, np.ndarray], shards: int = 1
) -> Path:
    """A Hugging Face folder: one model.safetensors, or as many shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    files = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    return folder


@pytest.fixture
def small() -> dict[str, Any]:
    """A config of its own for each test, to change at will."""
    return dict(SMALL)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(raw, dtype, shards) -> a new folder with random weights; `tensors` takes given ones."""

    def build(
        raw: Mapping[str, Any],
        dtype: str = "float32",
        shards: int = 1,
        tensors: dict[str, np.ndarray] | None = None,
        name: str = "hf",
    ) -> Path:
        return write_folder(tmp_path / name, raw, tensors or make_tensors(raw, dtype), shards)

    return build
