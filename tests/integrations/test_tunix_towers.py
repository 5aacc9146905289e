"""What tunix's configs say of vision towers, in jpaged's terms; tests/clients has tunix itself."""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jpaged
from jpaged import ConfigError, ModelConfig
from tests.golden import towers


def _models() -> Any:
    """The module alone: its package needs tunix, and it does not."""
    file = Path(jpaged.__file__).parent / "integrations" / "tunix" / "models.py"
    spec = importlib.util.spec_from_file_location("models_of_tunix", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS = _models()


def expected(name: str, **changes: Any) -> Any:
    vision: Any = ModelConfig.from_hf(towers.CONFIGS[name], images=True).vision
    return dataclasses.replace(vision, **changes)


def siglip(**changes: Any) -> Any:
    fields = {
        "image_height": 24,
        "image_width": 24,
        "patch_size": (4, 4),
        "width": 30,
        "depth": 2,
        "num_heads": 3,
        "mlp_dim": 44,
        "num_mm_tokens_per_image": 9,
    }
    return SimpleNamespace(**fields | changes)


def test_gemma3() -> None:
    text, wanted = towers.CONFIGS["gemma3"]["text_config"], expected("gemma3")
    vision, rows = MODELS.siglip_tower(siglip())
    tokens = MODELS.GEMMA3_TOKENS | {"mm_tokens_per_image": rows}
    made = MODELS.with_tower(text, "gemma3", "Gemma3ForConditionalGeneration", vision, **tokens)
    assert made == dataclasses.replace(
        ModelConfig.from_hf(towers.CONFIGS["gemma3"]),
        vision=dataclasses.replace(wanted, tokens=(262144, 255999, 256000)),
    )
    assert MODELS.siglip_tower(siglip(mlp_dim=None))[0]["intermediate_size"] == 120
    with pytest.raises(ConfigError, match=r"images of 24 x 28 pixels in patches of \(4, 4\): only"):
        MODELS.siglip_tower(siglip(image_width=28))


@pytest.mark.parametrize("name", ["gemma4_clipped", "gemma4_standardized"])
def test_gemma4(name: str) -> None:
    raw = towers.CONFIGS[name]
    theirs = raw["vision_config"]
    tower = SimpleNamespace(
        patch_size=theirs["patch_size"],
        pooling_kernel_size=theirs.get("pooling_kernel_size", 3),
        d_model=theirs["hidden_size"],
        num_layers=theirs["num_hidden_layers"],
        num_heads=theirs["num_attention_heads"],
        ffw_hidden=theirs["intermediate_size"],
        pos_emb_shape_yx=(theirs["position_embedding_size"], 2),
        use_clipped_linears=theirs.get("use_clipped_linears", False),
        standardize_embeddings=theirs.get("standardize", False),
    )
    made = MODELS.with_tower(
        raw["text_config"],
        "gemma4",
        "Gemma4ForConditionalGeneration",
        MODELS.gemma4_tower(tower),
        **MODELS.GEMMA4_TOKENS,
    )
    heads = theirs["num_attention_heads"]
    tokens = (258880, 255999, 258882)
    assert made.vision == expected(name, num_kv_heads=heads, tokens=tokens)
