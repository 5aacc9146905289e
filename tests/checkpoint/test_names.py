"""The names of tensors in families' files on the hub, as their indices list them: each is read, or
known not to be, and none is missed.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.checkpoint.hf import stored_names
from jpaged.checkpoint.load import find_weights
from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.families import FAMILIES
from jpaged.models.layers.experts import ExpertsConfig
from tests.golden.configs import CONFIGS

QKVO = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
QKV_BIAS = [f"self_attn.{x}_proj.bias" for x in "qkv"]
QK_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
MLP = [f"mlp.{part}" for part in PARTS]
MLP_BIAS = [name.replace("weight", "bias") for name in MLP]
EXPERTS = [f"mlp.experts.{{x}}.{part}" for part in PARTS]
SHARED = [f"mlp.shared_experts.{part}" for part in PARTS]
BIASED = ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
VISUAL = ["blocks.0.attn.qkv.weight", "blocks.0.norm1.weight", "merger.mlp.0.weight"]
MORE_VISUAL = [*VISUAL, "deepstack_merger_list.0.norm.weight", "pos_embed.weight"]
PIXTRAL = [
    "vision_tower.patch_conv.weight",
    "vision_tower.transformer.layers.0.attention.q_proj.weight",
    "multi_modal_projector.linear_1.weight",
    "multi_modal_projector.norm.weight",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """What a file holds. layer: of every layer; dense, mixture: of those with an MLP, with experts.
    others: of no layer of the model, which no part of it takes. {x} is an expert, {L} the number of
    layers.
    """

    layer: list[str]
    dense: list[str] = dataclasses.field(default_factory=lambda: MLP)
    mixture: list[str] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)
    text: str = "model."
    head: str | None = "lm_head.weight"

    def names(self, config: ModelConfig) -> list[str]:
        """Return all names in a file of a model."""
        names = [self.text + "embed_tokens.weight", self.text + "norm.weight"]
        for i, layer in enumerate(config.layers):
            ffn = layer.ffn
            count = ffn.num_experts if isinstance(ffn, ExpertsConfig) else 0
            for name in [*self.layer, *(self.mixture if count else self.dense)]:
                copies = range(count) if "{x}" in name else [0]
                names += [f"{self.text}layers.{i}.{name.replace('{x}', str(x))}" for x in copies]
        names += [name.replace("{L}", str(config.num_layers)) for name in self.others]
        return names if self.head is None else [*names, self.head]


GUESSES = ["eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"]
INDICES = {
    "ministral3_g4_d64_mscale_tied": Index(
        layer=QKVO + NORMS, text="language_model.model.", others=PIXTRAL, head=None
    ),
    "mistral3_g2_d32": Index(
        layer=QKVO + NORMS,
        text="language_model.model.",
        others=PIXTRAL,
        head="language_model.lm_head.weight",
    ),
    "glm4_g4_d32": Index(
        layer=[
            *(QKVO + QKV_BIAS + NORMS),
            *("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
        ],
        dense=["mlp.gate_up_proj.weight", "mlp.down_proj.weight"],
    ),
    "seed_oss_g2_d32": Index(layer=[*QKVO, "self_attn.o_proj.bias", *NORMS], dense=MLP + MLP_BIAS),
    "exaone4_g2_d32_window": Index(
        layer=[*(QKVO + QK_NORMS), NORMS[1], "post_feedforward_layernorm.weight"]
    ),
    "internlm3_g1_d32_bias": Index(
        layer=[*(QKVO + QKV_BIAS), "self_attn.o_proj.bias", *NORMS], dense=MLP + MLP_BIAS
    ),
    "ernie4_5_g2_d32_bias_tied": Index(
        layer=[*(QKVO + QKV_BIAS), "self_attn.o_proj.bias", *NORMS], dense=MLP + MLP_BIAS
    ),
    "hunyuan_g2_d32_alpha": Index(
        layer=[*QKVO, *NORMS, *(f"self_attn.{x}_layernorm.weight" for x in ("query", "key"))]
    ),
    "qwen2_5_vl_g2_d32": Index(
        layer=QKVO + QKV_BIAS + NORMS, others=[f"visual.{name}" for name in VISUAL]
    ),
    "qwen3_vl_g4_d32_tied": Index(
        layer=QKVO + QK_NORMS + NORMS,
        text="model.language_model.",
        others=[f"model.visual.{name}" for name in MORE_VISUAL],
        head=None,
    ),
    "qwen3_vl_moe_g2_d32": Index(
        layer=QKVO + QK_NORMS + NORMS,
        mixture=["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        text="model.language_model.",
        others=[f"model.visual.{name}" for name in MORE_VISUAL],
    ),
    "glm4_moe_g4_d32_groups": Index(
        layer=QKVO + QKV_BIAS + QK_NORMS + NORMS,
        mixture=BIASED + EXPERTS + SHARED,
        others=[
            f"model.layers.{{L}}.{name}"
            for name in [*GUESSES, *QKVO, *BIASED, "embed_tokens.weight", "shared_head.head.weight"]
        ],
    ),
    "solar_open_g1_d32": Index(layer=QKVO + QKV_BIAS + NORMS, mixture=BIASED + EXPERTS + SHARED),
    "minimax_m2_g2_d32": Index(
        layer=QKVO + QK_NORMS + NORMS,
        mixture=[
            *("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"),
            *(f"block_sparse_moe.experts.{{x}}.{w}.weight" for w in ("w1", "w2", "w3")),
        ],
    ),
    "ernie4_5_moe_g4_d32": Index(
        layer=QKVO + NORMS,
        mixture=[
            *("mlp.gate.weight", "mlp.moe_statics.e_score_correction_bias"),
            *(EXPERTS + SHARED),
        ],
        others=[
            *("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
            *("model.mtp_linear_proj.0.weight", "model.mtp_block.0.self_attn.q_proj.weight"),
        ],
    ),
}


def write(folder: Path, raw: dict[str, Any], names: list[str]) -> Path:
    """A folder of tensors under these names, of the shapes that the model has of them."""
    config = ModelConfig.from_hf(raw)
    stored = [place for places in stored_names(config).values() for place in places]
    shapes = {place.name: place.shape for place in stored}
    for place in stored:  # the last part of a tensor ends it
        shapes[place.name] = (place.first + place.shape[0], *place.shape[1:])
    hidden = config.hidden_size
    tensors = {}
    for name in names:
        ours = name.replace("language_model.model.", "model.").replace("language_model.", "")
        shape = shapes.get(ours, (2, 2))
        if ours.endswith("mlp.experts.gate_up_proj"):
            shape = (config.num_experts, hidden, 2 * config.expert_size)
        elif ours.endswith("mlp.experts.down_proj"):
            shape = (config.num_experts, config.expert_size, hidden)
        tensors[name] = np.zeros(shape, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_every_family_that_renames_or_skips_has_an_index() -> None:
    families = {ModelConfig.from_hf(CONFIGS[name]).family for name in INDICES}
    assert {f.model_type for f in FAMILIES.values() if f.unread} <= families
    assert len(families) == len(INDICES)


@pytest.mark.parametrize("name", INDICES)
def test_an_index_is_read_whole(name: str, tmp_path: Path) -> None:
    raw, index = CONFIGS[name], INDICES[name]
    config = ModelConfig.from_hf(raw)
    if index.text.startswith("language_model.") and "text_config" not in raw:
        text = {key: value for key, value in raw.items() if key != "architectures"}
        named = ["Mistral3ForConditionalGeneration"]
        raw = {"architectures": named, "model_type": "mistral3", "text_config": text}
        raw |= {key: text[key] for key in ("eos_token_id", "tie_word_embeddings")}
    names = index.names(config)
    assert ModelConfig.from_hf(raw) == config and len(set(names)) == len(names)
    weights = find_weights(write(tmp_path / "whole", raw, names), config)
    assert all(weight.is_stored for weight in weights.values())
    with pytest.raises(CheckpointError, match=r"1 missing .*1 not in this architecture \(extra"):
        find_weights(write(tmp_path / "other", raw, ["extra", *names[1:]]), config)
