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
from jpaged.errors import CheckpointError, ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.families import FAMILIES
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.conv import ConvConfig
from jpaged.models.layers.delta import GatedDeltaConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.mamba import MambaConfig
from tests.golden.configs import CONFIGS
from tests.golden.reference import load

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
    """What a file holds. layer: of every layer; window: of those with one; indexer: of those that
    choose what they attend to; attention, delta, mamba, conv: of those that have it, or the gated
    delta rule, Mamba-2, a short convolution; dense, mixture: of those with an MLP, with experts.
    norm: after the last layer. others: of no layer of the model, which no part of it takes. {x} is
    an expert, {L} the number of layers.
    """

    layer: list[str]
    window: list[str] = dataclasses.field(default_factory=list)
    indexer: list[str] = dataclasses.field(default_factory=list)
    conv: list[str] = dataclasses.field(default_factory=list)
    attention: list[str] = dataclasses.field(default_factory=list)
    delta: list[str] = dataclasses.field(default_factory=list)
    mamba: list[str] = dataclasses.field(default_factory=list)
    dense: list[str] = dataclasses.field(default_factory=lambda: MLP)
    mixture: list[str] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)
    text: str = "model."
    embed: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    head: str | None = "lm_head.weight"

    def names(self, config: ModelConfig) -> list[str]:
        """Return all names in a file of a model."""
        names = [self.text + self.embed, self.text + self.norm]
        for i, layer in enumerate(config.layers):
            ffn = layer.ffn
            count = ffn.num_experts if isinstance(ffn, ExpertsConfig) else 0
            has_window = isinstance(layer.mixer, AttentionConfig) and layer.mixer.window is not None
            of_ffn = self.mixture if count else self.dense
            of_kind = [*(of_ffn if ffn is not None else []), *(self.window * has_window)]
            if isinstance(layer.mixer, LatentConfig) and layer.mixer.indexer is not None:
                of_kind += self.indexer
            kinds = [
                (GatedDeltaConfig, self.delta),
                (ConvConfig, self.conv),
                (MambaConfig, self.mamba),
            ]
            of_mixer = (names for kind, names in kinds if isinstance(layer.mixer, kind))
            of_kind += next(of_mixer, self.attention) if layer.mixer is not None else []
            for name in [*self.layer, *of_kind]:
                copies = range(count) if "{x}" in name else [0]
                names += [f"{self.text}layers.{i}.{name.replace('{x}', str(x))}" for x in copies]
        names += [name.replace("{L}", str(config.num_layers)) for name in self.others]
        return names if self.head is None else [*names, self.head]


DELTA = ["linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"]
DELTA += ["linear_attn.conv1d.weight", "linear_attn.out_proj.weight"]
DELTA_IN = [f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")]
SHARED_EXPERT = [f"mlp.shared_expert.{part}" for part in PARTS] + ["mlp.shared_expert_gate.weight"]
LATENT = [f"self_attn.{x}.weight" for x in ("q_a_proj", "q_a_layernorm", "q_b_proj")]
LATENT += [f"self_attn.{x}.weight" for x in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")]
LATENT += ["self_attn.o_proj.weight"]
INDEXER = [f"self_attn.indexer.{x}.weight" for x in ("wq_b", "wk", "k_norm", "weights_proj")]
INDEXER += ["self_attn.indexer.k_norm.bias"]
MTP = [f"mtp.{x}.weight" for x in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
MTP += [f"mtp.layers.0.{name}" for name in [*QKVO, *QK_NORMS, *NORMS]]
LFM2 = Index(
    layer=["operator_norm.weight", "ffn_norm.weight"],
    attention=[
        *(f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "out")),
        *("self_attn.q_layernorm.weight", "self_attn.k_layernorm.weight"),
    ],
    conv=[f"conv.{x}.weight" for x in ("in_proj", "conv", "out_proj")],
    dense=[f"feed_forward.{w}.weight" for w in ("w1", "w2", "w3")],
    norm="embedding_norm.weight",
)
MAMBA = [f"mamba.{x}" for x in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias")]
MAMBA += [f"mamba.{x}.weight" for x in ("in_proj", "norm", "out_proj")]
SHARED_MLP = ["shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"]
GRANITE_EXPERTS = ("router.layer", "input_linear", "output_linear")
# Of Kimi Linear's and Ling 3's, within a layer's attention.
KDA = [f"{x}_proj.weight" for x in "qkvbo"] + [f"{x}_conv1d.weight" for x in "qkv"]
KDA += ["A_log", "dt_bias", "o_norm.weight"]
KDA_LOW_RANK = [f"{x}_proj.weight" for x in ("f_a", "f_b", "g_a", "g_b")]
LING_LATENT = ["q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "dense", "g_proj"]
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
    "qwen3_5_h2x3_c16_y24": Index(
        layer=NORMS,
        attention=QKVO + QK_NORMS,
        delta=DELTA + DELTA_IN,
        others=MTP + [f"mtp.layers.0.{name}" for name in MLP],
    ),
    "qwen3_5_moe_h2x2_c16_y32": Index(
        layer=NORMS,
        attention=QKVO + QK_NORMS,
        delta=DELTA + DELTA_IN,
        mixture=[
            *("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
            *SHARED_EXPERT,
        ],
        text="model.language_model.",
        others=[
            *MTP,
            *(f"mtp.layers.0.mlp.experts.0.{part}" for part in PARTS),
            *(f"model.visual.{name}" for name in VISUAL),
        ],
    ),
    "qwen3_next_h4x2_c24_y16": Index(
        layer=NORMS,
        attention=QKVO + QK_NORMS,
        delta=[*DELTA, "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"],
        mixture=["mlp.gate.weight", *EXPERTS, *SHARED_EXPERT],
        others=MTP + [f"mtp.layers.0.mlp.experts.0.{part}" for part in PARTS],
    ),
    "olmo_hybrid_h3x1_c16_y40": Index(
        layer=[],
        attention=[*(QKVO + QK_NORMS), NORMS[1], "post_feedforward_layernorm.weight"],
        delta=[
            *("attention_layer_norm.weight", "feedforward_layer_norm.weight"),
            *("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.o_norm.weight"),
            *(f"linear_attn.{x}_proj.weight" for x in "qkvbago"),
            *(f"linear_attn.{x}_conv1d.weight" for x in "qkv"),
        ],
    ),
    "nemotron_h_latent_experts": Index(
        layer=["norm.weight"],
        attention=[name.replace("self_attn", "mixer") for name in QKVO],
        mamba=[
            *(name.replace("mamba", "mixer") for name in MAMBA),
            *("mixer.in_proj.bias", "mixer.out_proj.bias"),
        ],
        dense=["mixer.up_proj.weight", "mixer.down_proj.weight"],
        mixture=[
            *("mixer.gate.weight", "mixer.gate.e_score_correction_bias"),
            *("mixer.fc1_latent_proj.weight", "mixer.fc2_latent_proj.weight"),
            *(f"mixer.experts.{{x}}.{x}_proj.weight" for x in ("up", "down")),
            *(f"mixer.shared_experts.{x}_proj.weight" for x in ("up", "down")),
        ],
        others=["mtp.layers.0.norm.weight", "mtp.layers.0.mixer.q_proj.weight"],
        text="backbone.",
        embed="embeddings.weight",
        norm="norm_f.weight",
    ),
    "falcon_h1_p24_n16": Index(
        layer=["input_layernorm.weight", "pre_ff_layernorm.weight", *QKVO],
        attention=[name for name in MAMBA if name != "mamba.norm.weight"],
        dense=[f"feed_forward.{part}" for part in PARTS],
        norm="final_layernorm.weight",
    ),
    "granite_hybrid_experts_g2_tied": Index(
        layer=NORMS + SHARED_MLP,
        attention=QKVO,
        mamba=[*MAMBA, "mamba.in_proj.bias", "mamba.out_proj.bias"],
        mixture=[f"block_sparse_moe.{x}.weight" for x in GRANITE_EXPERTS],
        head=None,
    ),
    "lfm2_c96_w3": LFM2,
    "lfm2_moe_c80_w3": dataclasses.replace(
        LFM2,
        mixture=[
            *("feed_forward.gate.weight", "feed_forward.expert_bias"),
            *(f"feed_forward.experts.{{x}}.{w}.weight" for w in ("w1", "w2", "w3")),
        ],
    ),
    "deepseek_v3_h4_l32_groups": Index(
        layer=LATENT + NORMS,
        mixture=BIASED + EXPERTS + SHARED,
        others=[
            f"model.layers.{{L}}.{name}"
            for name in [
                *GUESSES,
                *LATENT,
                *BIASED,
                "embed_tokens.weight",
                "shared_head.head.weight",
            ]
        ],
    ),
    **{
        name: Index(
            layer=LATENT + NORMS,
            indexer=INDEXER,
            mixture=BIASED + EXPERTS + SHARED,
            others=[
                f"model.layers.{{L}}.{name}" for name in [*GUESSES, *LATENT, *INDEXER, *BIASED]
            ],
        )
        for name in ("deepseek_v32_h4_l32_top8", "glm_moe_dsa_h6_l24_shared")
    },
    "glm4_moe_lite_h5_l48": Index(
        layer=LATENT + NORMS,
        mixture=BIASED + EXPERTS + SHARED,
        others=[f"model.layers.{{L}}.{name}" for name in [*GUESSES, *LATENT, *BIASED]],
    ),
    "mistral4_h4_l24": Index(
        layer=LATENT + NORMS,
        mixture=[
            *("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
            *SHARED,
        ],
        text="language_model.model.",
        others=PIXTRAL,
        head="language_model.lm_head.weight",
    ),
    "kimi_linear_h3_c16": Index(
        layer=NORMS,
        attention=["self_attn.q_proj.weight", *LATENT[3:]],
        delta=[f"self_attn.{name}" for name in KDA + KDA_LOW_RANK],
        mixture=[
            *("block_sparse_moe.gate.weight", "block_sparse_moe.gate.e_score_correction_bias"),
            *(f"block_sparse_moe.experts.{{x}}.{w}.weight" for w in ("w1", "w2", "w3")),
            *(f"block_sparse_moe.shared_experts.{part}" for part in PARTS),
        ],
    ),
    "ling_h4_c16": Index(
        layer=NORMS,
        attention=[f"attention.{name}.weight" for name in LING_LATENT],
        delta=[f"attention.{name}" for name in (*KDA, "f_proj.weight", "g_proj.weight")],
        mixture=["mlp.gate.weight", "mlp.gate.expert_bias", *EXPERTS, *SHARED],
        others=[
            f"model.layers.{{L}}.{name}"
            for name in [*GUESSES[:3], "final_layernorm.weight", "attention.dense.weight", *NORMS]
        ],
        embed="word_embeddings.weight",
    ),
    "solar_open_g1_d32": Index(layer=QKVO + QKV_BIAS + NORMS, mixture=BIASED + EXPERTS + SHARED),
    "minimax_m2_g2_d32": Index(
        layer=QKVO + QK_NORMS + NORMS,
        mixture=[
            *("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"),
            *(f"block_sparse_moe.experts.{{x}}.{w}.weight" for w in ("w1", "w2", "w3")),
        ],
    ),
    "mimo_d48_v32": Index(
        layer=QKVO + NORMS,
        window=["self_attn.attention_sink_bias"],
        mixture=BIASED + EXPERTS,
        others=[f"model.mtp.layers.0.{name}" for name in [*GUESSES, *QKVO, *MLP]],
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
    stacked = FAMILIES[config.family].stacked_experts
    is_transposed = stacked is not None and stacked.transposed
    node, gate_up, down = ("", "", "")
    if stacked is not None:
        node, gate_up, down = stacked.node, stacked.gate_up, stacked.down
    tensors = {}
    for name in names:
        ours = name.replace("language_model.model.", "model.").replace("language_model.", "")
        ours = ours.replace("backbone.", "model.")
        shape = shapes.get(ours, (2, 2))
        if ours.endswith(f"{node}.{gate_up}"):
            one = (2 * config.expert_size, hidden)
            shape = (config.num_experts, *(one[::-1] if is_transposed else one))
        elif ours.endswith(f"{node}.{down}"):
            one = (hidden, config.expert_size)
            shape = (config.num_experts, *(one[::-1] if is_transposed else one))
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


def test_kimi_beside_images(tmp_path: Path) -> None:
    """Its text part says kimi_k2, as its models of text alone do, and is DeepSeek's."""
    name = "deepseek_v3_h4_l32_groups"
    kimi = CONFIGS[name] | {"model_type": "kimi_k2", "scoring_func": "sigmoid"}
    config = ModelConfig.from_hf(CONFIGS[name])
    assert ModelConfig.from_hf(kimi) == config
    raw = {"model_type": "kimi_k25", "text_config": kimi, "tie_word_embeddings": False}
    towers = ["vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"]
    index = dataclasses.replace(
        INDICES[name], text="language_model.model.", head="language_model.lm_head.weight"
    )
    others = [f"language_model.{name}" for name in index.others]
    index = dataclasses.replace(index, others=others + towers)
    for architecture in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"):
        whole = raw | {"architectures": [architecture]}
        assert ModelConfig.from_hf(whole) == config
        folder = write(tmp_path / architecture, whole, index.names(config))
        assert all(weight.is_stored for weight in find_weights(folder, config).values())
    with pytest.raises(ConfigError, match="scoring_func='softmax'"):
        ModelConfig.from_hf(kimi | {"scoring_func": "softmax"})


TOWERS = [
    "model.vision_tower.patch_embedder.input_proj.weight",
    "model.audio_tower.layers.0.self_attn.relative_k_proj.weight",
    "model.embed_vision.embedding_projection.weight",
    "model.embed_audio.embedding_projection.weight",
    "model.vision_embedder.patch_dense.weight",
]


@pytest.mark.parametrize("name", ["gemma4_shared_keys", "gemma4_experts", "gemma4_k2_d32_k1_d64"])
def test_gemma4_beside_images_and_sound(name: str, tmp_path: Path) -> None:
    """The text part as models of images and sound hold it. Files may have keys and values of layers
    that read others'.
    """
    golden = load(name)
    kind = golden.config["model_type"].removesuffix("_text")
    whole = "Gemma4Unified" if "unified" in kind else "Gemma4"
    text = {key: value for key, value in golden.config.items() if key != "architectures"}
    raw = {
        "architectures": [f"{whole}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": True,
    }
    config = ModelConfig.from_hf(raw)
    assert config == ModelConfig.from_hf(golden.config)
    assert config.eos_token_ids == ModelConfig.from_hf(golden.config).eos_token_ids
    tensors = {
        key.replace("model.", "model.language_model."): value
        for key, value in golden.tensors().items()
    }
    shared = golden.config.get("num_kv_shared_layers", 0)
    for i in range(len(config.layers) - shared, len(config.layers)):
        for part in ("k_proj", "v_proj", "k_norm"):
            unused = f"model.language_model.layers.{i}.self_attn.{part}.weight"
            assert unused not in tensors
            tensors[unused] = np.zeros(2, np.float32)
    tensors |= {key: np.zeros((2, 2), np.float32) for key in TOWERS}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    assert all(weight.is_stored for weight in find_weights(tmp_path, config).values())
    save_file(tensors | {"extra": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 not in this architecture \(extra"):
        find_weights(tmp_path, config)
