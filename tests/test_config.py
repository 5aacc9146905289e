"""ModelConfig and EngineConfig: round trips, and refusals that name what they refuse."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig, RopeScaling
from jpaged.models.families import FAMILIES
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.rope import RopeConfig

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0} | {
    "original_max_position_embeddings": 64
}

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3, 4.5]}


def hf(family: str, **change: Any) -> dict[str, Any]:
    return {**BASE, "model_type": family, **change}


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (
            hf("qwen3", head_dim=16),
            {"qk_norm": True, "qkv_bias": False, "head_dim": 16, "rms_norm_eps": 1e-6},
        ),
        (hf("qwen3", head_dim=16, attention_bias=True), {"qkv_bias": True, "out_bias": True}),
        (hf("qwen2"), {"qk_norm": False, "qkv_bias": True, "out_bias": False, "head_dim": 8}),
        (
            hf("qwen2", head_dim=10, tie_word_embeddings=True),
            {"head_dim": 10, "tie_word_embeddings": True},
        ),
        (hf("llama", rope_theta=5e5), {"rope_theta": 5e5, "qkv_bias": False, "rope_scaling": None}),
        (
            hf("llama", attention_bias=True, head_dim=6),
            {"qkv_bias": True, "out_bias": True, "head_dim": 6},
        ),
        (
            hf("llama", sliding_window=4),
            {"sliding_windows": ()},
        ),  # transformers' llama knows no windows
        (hf("mistral", sliding_window=None), {"sliding_windows": ()}),
        (hf("mistral", sliding_window=16), {"sliding_windows": (16, 16, 16)}),
        (
            hf("mistral", attention_bias=True),
            {"qkv_bias": False, "out_bias": False},
        ),  # nor its mistral biases
        (hf("qwen2", sliding_window=16), {"sliding_windows": ()}),
        (
            hf("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1),
            {"sliding_windows": (None, 16, 16)},
        ),
        (
            hf("qwen3", sliding_window=16, use_sliding_window=True, max_window_layers=3),
            {"sliding_windows": ()},
        ),
        (
            hf("qwen3", sliding_window=8, use_sliding_window=True)
            | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            {"sliding_windows": (None, 8, None)},
        ),
        (hf("llama", eos_token_id=7), {"eos_token_ids": (7,)}),
        (hf("llama", eos_token_id=[7, 9]), {"eos_token_ids": (7, 9)}),
        (hf("llama"), {"eos_token_ids": ()}),  # its default is not the checkpoint's word
        (
            hf("llama", rope_theta=5e5, rope_scaling=LLAMA3),
            {
                "rope_scaling": RopeScaling(
                    kind="llama3", factor=8, original_max_position=64, high_freq_factor=2
                )
            },
        ),
        (
            hf("qwen2", rope_scaling=YARN),
            {
                "rope_scaling": RopeScaling(
                    kind="yarn",
                    factor=4,
                    original_max_position=32,
                    attention_factor=1.138629436111989,
                )
            },
        ),
        (
            hf(
                "qwen3",
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 2.0,
                    "attention_factor": 1.5,
                },
            ),
            {"rope_theta": 1e6}
            | {
                "rope_scaling": RopeScaling(
                    kind="yarn", factor=2, original_max_position=128, attention_factor=1.5
                )
            },
        ),
        (
            hf("llama", rope_scaling={"type": "linear", "factor": 2.0}),
            {"rope_scaling": RopeScaling(kind="linear", factor=2, original_max_position=128)},
        ),
        (hf("llama", mlp_bias=True), {"mlp_bias": True}),
        (hf("llama", hidden_act="gelu_pytorch_tanh"), {"activation": "gelu_tanh"}),
        (
            hf("gemma2", head_dim=10, query_pre_attn_scalar=7, sliding_window=9)
            | {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"},
            {
                "score_scale": 7**-0.5,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "sliding_windows": (9, None, 9),
                "embedding_scale": 32**0.5,
                "activation": "gelu_tanh",
                "tie_word_embeddings": True,
            },
        ),
        (
            hf("gemma3_text", head_dim=10, sliding_window=9, rope_theta=5e5)
            | {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {
                "sliding_windows": (9, None, 9),
                "local_rope_theta": 10000.0,
                "rope_theta": 5e5,
                "rope_scaling": RopeScaling(kind="linear", factor=8, original_max_position=128),
                "attn_logit_softcapping": None,
                "qk_norm": True,
            },
        ),
        (
            hf("phi3", rope_scaling=LONGROPE, original_max_position_embeddings=32)
            | {"partial_rotary_factor": 0.5, "sliding_window": 6},
            {
                "partial_rotary_factor": 0.5,
                "sliding_windows": (6, 6, 6),
                "rope_scaling": RopeScaling(
                    kind="longrope",
                    factor=4,
                    original_max_position=32,
                    attention_factor=1.4**0.5,
                    short_factor=(1, 2),
                    long_factor=(3, 4.5),
                ),
            },
        ),
        (
            hf("smollm3", no_rope_layer_interval=2),
            {"no_rope_layers": (1,), "sliding_windows": (), "tie_word_embeddings": True},
        ),
        (
            hf("smollm3", no_rope_layers=[1, 1, 0], use_sliding_window=True, sliding_window=5),
            {"no_rope_layers": (2,), "sliding_windows": (None, None, 5)},
        ),
        (
            hf("granite", embedding_multiplier=12, attention_multiplier=0.5, logits_scaling=8.0),
            {"embedding_scale": 12, "score_scale": 0.5, "residual_multiplier": 1.0},
        ),
        (
            hf("qwen3_moe", head_dim=8, num_experts=6, num_experts_per_tok=2)
            | {"moe_intermediate_size": 12, "norm_topk_prob": True, "decoder_sparse_step": 2},
            {
                "num_experts": 6,
                "experts_per_token": 2,
                "expert_size": 12,
                "norm_topk_prob": True,
                "dense_layers": (0, 2),
            },
        ),
        (
            hf("qwen2_moe", num_experts=6, shared_expert_intermediate_size=20, qkv_bias=False),
            {"shared_expert_size": 20, "qkv_bias": False, "norm_topk_prob": False},
        ),
        (
            hf("mixtral", num_local_experts=3, sliding_window=4),
            {"num_experts": 3, "expert_size": 48, "experts_per_token": 2, "norm_topk_prob": True},
        ),
        (
            hf("gpt_oss", head_dim=16, num_local_experts=5, rope_theta=1e5, sliding_window=6)
            | {"rope_scaling": YARN | {"truncate": False}},
            {
                "attention_sinks": True,
                "activation": "clamped",
                "expert_bias": True,
                "out_bias": True,
                "num_experts": 5,
                "experts_per_token": 4,
                "sliding_windows": (6, None, 6),
            },
        ),
        (hf("olmo2"), {"qk_norm_whole": True, "qk_norm": False, "pre_norms": False}),
        (
            hf("olmo3", sliding_window=5, rope_scaling=YARN | {"rope_type": "yarn"})
            | {"layer_types": KINDS},
            {"sliding_windows": (5, None, 5), "local_rope_theta": 5e5, "rope_theta": 5e5},
        ),
    ],
)
def test_model_config_round_trip(raw: dict[str, Any], want: dict[str, Any]) -> None:
    before = copy.deepcopy(raw)
    config = ModelConfig.from_hf(raw)
    assert raw == before
    parts = (config.switches, config)
    read = {name: next(getattr(p, name) for p in parts if hasattr(p, name)) for name in want}
    assert read == want
    back = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert back == config and back.eos_token_ids == config.eos_token_ids


LATENT = {"num_key_value_heads": 4}
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# What the least config.json of a family needs beside BASE.
LEAST: dict[str, dict[str, Any]] = {
    "gemma4_text": {"vocab_size_per_layer_input": 64},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_expand": 2,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), DELTA),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), LATENT | DELTA),
    **dict.fromkeys(("mistral4", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), LATENT),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_json_that_says_little_reads_back(family: str) -> None:
    """All else is what transformers fills in for models of other sizes."""
    config = ModelConfig.from_hf(hf(family) | LEAST.get(family, {}))
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("family", "dim", "sections"),
    [
        ("qwen2_5_vl_text", 128, (16, 24, 24)),
        ("qwen3_vl_text", 128, (24, 20, 20)),
        ("qwen3_vl_moe_text", 128, (24, 20, 20)),
        ("qwen3_5_text", 64, (11, 11, 10)),
        ("qwen3_5_moe_text", 64, (11, 11, 10)),
    ],
)
def test_sections_of_a_family_are_of_its_own_dimensions(
    family: str, dim: int, sections: tuple[int, int, int]
) -> None:
    """A rope of other dimensions has none unless the file says so."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    raw = hf(family) | LEAST.get(family, {}) | {"rope_parameters": rope}
    fitting = ModelConfig.from_hf(raw | {"head_dim": dim})
    assert fitting.rope.sections == sections and fitting.has_axes
    assert fitting.rope.alternating_sections == (family != "qwen2_5_vl_text")
    other = ModelConfig.from_hf(raw | {"head_dim": 16})
    assert other.rope == RopeConfig(dim=16, theta=1e4) and not other.has_axes
    assert "mrope_section" not in other.to_hf()["rope_parameters"]
    said = raw | {"head_dim": 16, "rope_parameters": rope | {"mrope_section": [2, 3, 3]}}
    assert ModelConfig.from_hf(said).rope.sections == (2, 3, 3)
    for config in (fitting, other, ModelConfig.from_hf(said)):
        assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_what_no_switch_sets_stays_where_switches_change() -> None:
    changes = {"num_hidden_layers": 2, "num_attention_heads": 2, "n_routed_experts": 16}
    raw = hf("glm4_moe", n_group=4, topk_group=2, routed_scaling_factor=3.0, norm_topk_prob=False)
    ours = {"num_layers": 2, "num_heads": 2, "num_experts": 16, "head_dim": 8}
    changed = dataclasses.replace(ModelConfig.from_hf(raw | {"head_dim": 8}), **ours)
    assert changed == ModelConfig.from_hf(raw | changes | {"head_dim": 8})
    assert "('num_groups', 4)" in repr(changed)
    for family in ("glm4", "hunyuan_v1_dense"):
        wide = ModelConfig.from_hf(hf(family, head_dim=8, num_key_value_heads=1))
        made = dataclasses.replace(ModelConfig.from_hf(hf(family, head_dim=8)), num_kv_heads=1)
        assert made == wide


@pytest.mark.parametrize(
    ("raw", "dense"),
    [
        (hf("glm4_moe", first_k_dense_replace=2), (0, 1)),
        (hf("glm4_moe", first_k_dense_replace=9), (0, 1, 2)),
        (hf("ernie4_5_moe", moe_layer_start_index=1), (0,)),
        (hf("ernie4_5_moe", moe_layer_interval=2, moe_layer_start_index=0), (0, 2)),
        (hf("ernie4_5_moe", moe_layer_start_index=0, moe_layer_end_index=0), (1, 2)),
        (hf("ernie4_5_moe", moe_layer_start_index=3), (0, 1, 2)),
    ],
)
def test_layers_of_a_mixture_that_have_an_mlp(raw: dict[str, Any], dense: tuple[int, ...]) -> None:
    config = ModelConfig.from_hf(raw)
    mlps = [i for i, layer in enumerate(config.layers) if isinstance(layer.ffn, MLPConfig)]
    assert tuple(mlps) == dense
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(("window", "kinds"), [(None, ["full_attention"] * 3), (5, KINDS)])
def test_exaone_rotates_in_windows_alone_where_there_are_such(window: Any, kinds: Any) -> None:
    raw = hf("exaone4", sliding_window=window, layer_types=kinds)
    for hybrid in (raw, raw | {"layer_types": ["full_attention"] * 3}):
        config = ModelConfig.from_hf(hybrid)
        mixers = [layer.mixer for layer in config.layers]
        assert all(isinstance(mixer, AttentionConfig) for mixer in mixers)
        turned = [mixer.rope is not None for mixer in mixers if isinstance(mixer, AttentionConfig)]
        full = [kind == "full_attention" for kind in hybrid["layer_types"]]
        assert turned == [window is None or not is_full for is_full in full]
        assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_equal_by_value_without_eos() -> None:
    a, b = (ModelConfig.from_hf(hf("llama", eos_token_id=eos)) for eos in (1, 2))
    assert a == b and hash(a) == hash(b) and a != ModelConfig.from_hf(hf("llama", rope_theta=3.0))


def test_coerce(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(hf("qwen2"))
    (tmp_path / "config.json").write_text(json.dumps(hf("qwen2")))
    assert ModelConfig.coerce(config) is config
    for form in (hf("qwen2"), tmp_path, str(tmp_path)):
        assert ModelConfig.coerce(form) == config
    with pytest.raises(ConfigError, match="config=7"):
        ModelConfig.coerce(7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: no such file"):
        ModelConfig.coerce(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            hf("gpt2"),
            r"architecture 'gpt2'.*; supported are BailingHybridForCausalLM, .*"
            r"MiniMaxM2ForCausalLM, Ministral3ForCausalLM, Mistral3ForConditionalGeneration, "
            r"Mistral4ForCausalLM, ",
        ),
        ({}, "no 'model_type': its family, such as 'qwen3'"),
        (BASE, "no 'model_type'"),
        (BASE | {"architectures": ["Qwen3ForCausalLM"]}, "no 'model_type': its family, 'qwen3'$"),
        (
            hf("mamba2", architectures=["Mamba2ForCausalLM"]),
            "architecture 'Mamba2ForCausalLM'",
        ),
        (hf("gpt_oss", swiglu_limit=5.0), r"swiglu_limit=\(1.702, 5.0\)"),
        (hf("mixtral", num_local_experts=1), "experts_per_token=2 of num_experts=1"),
        (
            hf("qwen3", architectures=["Qwen3ForTokenClassification"]),
            "'Qwen3ForTokenClassification'",
        ),
        (hf("qwen3", architectures=5), "architecture 5"),
        (BASE | {"model_type": ["qwen3"]}, "not supported"),
        (
            hf("qwen3", quantization_config={"quant_method": "bitsandbytes"}),
            r"quantization_config \('bitsandbytes'\)",
        ),
        (hf("qwen3", hidden_act="gelu"), "hidden_act='gelu'"),
        (hf("gemma2", hidden_activation="relu"), "hidden_activation='relu'"),
        (hf("gemma2", use_bidirectional_attention=True), "only causal attention"),
        (hf("gemma2", query_pre_attn_scalar=0), "query_pre_attn_scalar=0: must be a number above"),
        (hf("granite", residual_multiplier=-1.0), "residual_multiplier=-1.0"),
        (
            hf("gemma3_text", rope_parameters={"sliding_attention": LLAMA3 | {"rope_theta": 1e4}}),
            "rope_type='llama3' of layers with a window",
        ),
        (hf("phi3", rope_scaling=LONGROPE | {"short_factor": [1.0]}), "short_factor"),
        (hf("llama", partial_rotary_factor=0.5), "partial"),
        (hf("llama", rope_scaling={"rope_type": "axial", "factor": 2.0}), "rope_type='axial'"),
        (hf("llama", rope_scaling=YARN | {"mscale": "1", "mscale_all_dim": 1.0}), "mscale': '1'"),
        (hf("llama", rope_scaling=YARN | {"factor": "4"}), "'4'"),
        (hf("llama", rope_scaling="yarn"), "rope_parameters"),
        (hf("llama", rope_scaling={"rope_type": "linear"}), "factor"),
        (hf("qwen3", hidden_size="32"), "hidden_size"),
        (hf("qwen3", hidden_size=0, head_dim=8), "hidden_size=0"),
        (hf("qwen3", head_dim=15), "even"),
        (hf("qwen3", num_attention_heads=5), "num_heads=5 is not a multiple of num_kv_heads=2"),
        (hf("qwen3", num_hidden_layers=2.5), "num_hidden_layers"),
        (
            hf("hunyuan_v1_dense", use_qk_norm=False),
            r"use_qk_norm=False is not supported \(True is",
        ),
        (hf("minimax_m2", scoring_func="softmax"), r"scoring_func='softmax' .* \('sigmoid' is\)"),
        (hf("ernie4_5_moe", use_bias=True), "use_bias=True is not supported"),
        (hf("glm4_moe", n_group=3), "n_group=3 does not divide 128 experts"),
        (hf("glm4_moe", n_group=4, topk_group=8), "topk_group=8 of n_group=4"),
        (
            hf("ministral3", rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1}),
            "llama_4_scaling_beta=0.1 without original_max_position_embeddings",
        ),
        (
            hf("ministral3", rope_parameters=YARN | {"llama_4_scaling_beta": "0.1"}),
            "llama_4_scaling_beta='0.1': must be a number",
        ),
        (
            hf("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": "9", "factor": 1.0}),
            "alpha='9': must be a number above 0",
        ),
        (hf("qwen3", eos_token_id=["a"]), "eos_token_id"),
    ],
)
def test_model_config_refusals(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ModelConfig.from_hf(raw)
    assert "\n" not in str(caught.value)


def test_model_config_checks_itself() -> None:
    good = vars(ModelConfig.from_hf(hf("qwen2")))
    for name, value in (
        ("num_layers", 0),
        ("vocab_size", "x"),
        ("head_dim", 0),
        ("sliding_windows", (4,)),
    ):
        with pytest.raises(ConfigError):
            ModelConfig(**{**good, name: value})


def test_engine_config_resolves_once() -> None:
    model = ModelConfig.from_hf(hf("qwen2"))
    config = EngineConfig(max_num_seqs=20, max_num_batched_tokens=100, block_size=16).resolve(model)
    assert (
        config.max_model_len == 128 and config.max_blocks_per_seq == 8 and config.decode_steps == 1
    )
    assert config.seq_buckets == (8, 16, 24) and config.token_buckets == (16, 32, 64, 96, 128)
    assert config.resolve(model) == config
    huge = EngineConfig(max_num_batched_tokens=20_000, max_num_seqs=1).resolve(model)
    assert huge.token_buckets and huge.token_buckets[-1] == 20_000 and huge.seq_buckets == (1,)
    guesses = EngineConfig(max_num_seqs=1, speculative={"method": "ngram"}).resolve(model)  # pyright: ignore[reportArgumentType]
    assert guesses.seq_buckets == (8,), "room to draw after each guess"
    assert EngineConfig(max_model_len=17, block_size=16).resolve(model).max_blocks_per_seq == 2
    assert EngineConfig(seq_buckets=[8, 256]).resolve(model).seq_buckets == (8, 256)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "on_cpu", "batched", "last"),
    [
        ({}, False, 8192, 8192),
        ({}, True, 1024, 1024),
        ({"max_num_batched_tokens": 4096}, True, 4096, 4096),
        ({"token_buckets": (512, 8192)}, True, 8192, 8192),
    ],
)
def test_the_tokens_of_a_step(
    change: dict[str, Any], on_cpu: bool, batched: int, last: int
) -> None:
    """A CPU takes fewer at a time, where nobody chose."""
    settings = EngineConfig(**change).resolve(ModelConfig.from_hf(hf("qwen2")), on_cpu=on_cpu)
    assert settings.max_num_batched_tokens == batched
    assert settings.token_buckets is not None and settings.token_buckets[-1] == last


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size": 1.5}, "block_size=1.5"),
        ({"block_size": True}, "block_size=True"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 129}, "max_model_len=129: the model has max_position_embeddings=128"),
        ({"num_blocks": -1}, "num_blocks=-1"),
        ({"max_logprobs": -1}, "max_logprobs=-1"),
        ({"memory_utilization": 0.0}, "memory_utilization=0.0"),
        ({"memory_utilization": 1.1}, "memory_utilization=1.1"),
        ({"token_buckets": ()}, "token_buckets"),
        ({"token_buckets": (32, 16)}, "token_buckets"),
        ({"seq_buckets": (8, 8)}, "seq_buckets"),
        ({"seq_buckets": (8, 16)}, "seq_buckets=.* end below max_num_seqs=256"),
        ({"token_buckets": (16,)}, "token_buckets=.* end below max_num_batched_tokens=8192"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"attention": "magic"}, "attention='magic'"),
    ],
)
def test_engine_config_refusals(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**change).resolve(ModelConfig.from_hf(hf("qwen2")))


def test_what_adapters_may_change() -> None:
    ends = ("embedding", "head")
    assert EngineConfig(lora_extra=("head", "embedding", "head")).lora_extra == ends
    for wrong in (("lm_head",), "head"):
        with pytest.raises(ConfigError, match=r"lora_extra=.*: must be a tuple of embedding, head"):
            EngineConfig(lora_extra=wrong)  # pyright: ignore[reportArgumentType]
