"""Tiny models with Mamba-2: their config dicts, and the tensors of their files.

Between them: one, two and three groups; heads of other widths than states; 2 to 4 taps, with biases
and without; layers of Mamba-2 first, last, between and nowhere; mixtures and MLPs; rope and none;
tied and untied embeddings.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

MAMBA, ATTENTION = "mamba", "attention"
FAMILIES = ("granitemoehybrid", "nemotron_h", "falcon_h1")


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return base | fields


def _granite(**fields: Any) -> dict[str, Any]:
    base = {
        "num_hidden_layers": len(fields["layer_types"]),
        "hidden_act": "silu",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.8,
        "position_embedding_type": "nope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    return _config("granitemoehybrid", "GraniteMoeHybridForCausalLM", **(base | fields))


def _nemotron(pattern: str, **fields: Any) -> dict[str, Any]:
    base = {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
    }
    config = _config("nemotron_h", "NemotronHForCausalLM", **(base | fields))
    del config["rms_norm_eps"]
    return config


def _falcon(**fields: Any) -> dict[str, Any]:
    base = {
        "hidden_act": "silu",
        "pad_token_id": 0,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.75,
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
        "mlp_multipliers": [1.3, 0.6],
    }
    return _config("falcon_h1", "FalconH1ForCausalLM", **(base | fields))


MAMBAS: dict[str, dict[str, Any]] = {
    "granite_hybrid_h6_p24_n16": _granite(
        vocab_size=160,
        hidden_size=72,
        intermediate_size=104,
        shared_intermediate_size=88,
        layer_types=[MAMBA, MAMBA, ATTENTION, MAMBA],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=6,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
        eos_token_id=159,
    ),
    "granite_hybrid_experts_g2_tied": _granite(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=40,
        shared_intermediate_size=56,
        layer_types=[ATTENTION, MAMBA, MAMBA],
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=6,
        num_experts_per_tok=3,
        mamba_n_heads=8,
        mamba_d_state=24,
        mamba_n_groups=2,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        mamba_chunk_size=16,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        rms_norm_eps=0.01,  # large enough to show
        tie_word_embeddings=True,
        eos_token_id=[150, 149],
    ),
    "granite_hybrid_g3_rope_bias": _granite(
        vocab_size=144,
        hidden_size=48,
        intermediate_size=72,
        shared_intermediate_size=64,
        layer_types=[MAMBA, ATTENTION],
        num_attention_heads=3,
        num_key_value_heads=3,
        attention_bias=True,
        position_embedding_type="rope",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_local_experts=5,
        num_experts_per_tok=2,
        mamba_n_heads=12,
        mamba_d_state=40,
        mamba_n_groups=3,
        mamba_d_conv=2,
        mamba_conv_bias=False,
        mamba_expand=1,
        eos_token_id=143,
    ),
    "granite_hybrid_all_attention": _granite(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=72,
        shared_intermediate_size=104,
        layer_types=[ATTENTION] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        position_embedding_type="rope",
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        embedding_multiplier=0.5,
        residual_multiplier=1.0,
        tie_word_embeddings=True,
        eos_token_id=159,
    ),
    "nemotron_h_experts_g2": _nemotron(
        "MEM*E",
        vocab_size=160,
        hidden_size=72,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=24,
        n_groups=2,
        chunk_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=56,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        eos_token_id=159,
    ),
    "nemotron_h_latent_experts": _nemotron(
        "*EM-ME",
        vocab_size=151,
        hidden_size=64,
        intermediate_size=104,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=1,
        conv_kernel=3,
        use_bias=True,
        chunk_size=16,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=56,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=24,
        norm_topk_prob=False,
        layer_norm_epsilon=0.01,  # large enough to show
        eos_token_id=[150, 149],
    ),
    "nemotron_h_mlps_g3": _nemotron(
        "-M*-M",
        vocab_size=144,
        hidden_size=56,
        intermediate_size=120,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        mamba_num_heads=3,
        mamba_head_dim=40,
        ssm_state_size=32,
        n_groups=3,
        conv_kernel=2,
        use_conv_bias=False,
        eos_token_id=143,
    ),
    "falcon_h1_p24_n16": _falcon(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=1e6,
        mamba_d_ssm=144,
        mamba_n_heads=6,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
        eos_token_id=159,
    ),
    "falcon_h1_g2_norm_before": _falcon(
        vocab_size=151,
        hidden_size=72,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        mamba_d_ssm=96,
        mamba_n_heads=4,
        mamba_d_state=24,
        mamba_n_groups=2,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        projectors_bias=True,
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        rms_norm_eps=0.01,  # large enough to show
        eos_token_id=[150, 149],
    ),
    "falcon_h1_norm_after_tied": _falcon(
        vocab_size=144,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        mamba_d_ssm=None,
        mamba_n_heads=8,
        mamba_d_state=40,
        mamba_n_groups=4,
        mamba_d_conv=2,
        mamba_conv_bias=False,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        embedding_multiplier=0.6,
        tie_word_embeddings=True,
        eos_token_id=143,
    ),
}


def with_mambas(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of attention and MLPs alone, as files of these families have them."""
    if config["model_type"] == "falcon_h1":
        return falcon_shapes(config, shapes)
    if config["model_type"] != "granitemoehybrid":
        return dict(shapes)
    made = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}."
        if kind == MAMBA:
            made = {name: x for name, x in made.items() if f"{layer}self_attn." not in name}
            made |= {f"{layer}mamba.{name}": x for name, x in mamba_shapes(config).items()}
        made |= {layer + name: shape for name, shape in granite_ffn(config).items()}
    return made


def mamba_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer of Mamba-2."""
    e, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * e
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (inner + channels + heads, e),
        "conv1d.weight": (channels, 1, config.get("mamba_d_conv", 4)),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        **({"norm.weight": (inner,)} if config.get("mamba_rms_norm", True) else {}),
        "out_proj.weight": (e, inner),
    }
    if config.get("mamba_conv_bias", True):
        shapes["conv1d.bias"] = (channels,)
    if config.get("mamba_proj_bias"):
        shapes |= {"in_proj.bias": (inner + channels + heads,), "out_proj.bias": (e,)}
    return shapes


def granite_ffn(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's MLP and experts."""
    e, shared = config["hidden_size"], config["shared_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "shared_mlp.input_linear.weight": (2 * shared, e),
        "shared_mlp.output_linear.weight": (e, shared),
    }
    if count := config["num_local_experts"]:
        width = config["intermediate_size"]
        shapes |= {
            "block_sparse_moe.router.layer.weight": (count, e),
            "block_sparse_moe.input_linear.weight": (count, 2 * width, e),
            "block_sparse_moe.output_linear.weight": (count, e, width),
        }
    return shapes


def nemotron_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a file of Nemotron-H."""
    e, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = (config[f"num_{x}_heads"] for x in ("attention", "key_value"))
    width = config["head_dim"]
    like_others = {
        "hidden_size": e,
        "mamba_n_heads": config["mamba_num_heads"],
        "mamba_d_ssm": config["mamba_num_heads"] * config["mamba_head_dim"],
        "mamba_n_groups": config["n_groups"],
        "mamba_d_state": config["ssm_state_size"],
        "mamba_d_conv": config.get("conv_kernel", 4),
        "mamba_conv_bias": config.get("use_conv_bias", True),
        "mamba_proj_bias": config.get("use_bias", False),
    }
    of_kind: dict[str, dict[str, tuple[int, ...]]] = {
        "M": mamba_shapes(like_others),
        "*": {
            "q_proj.weight": (heads * width, e),
            **{f"{x}_proj.weight": (kv_heads * width, e) for x in "kv"},
            "o_proj.weight": (e, heads * width),
        },
        "-": ungated(config.get("intermediate_size", 0), e),
        "E": nemotron_experts(config) if "E" in config["hybrid_override_pattern"] else {},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (vocab, e),
        "backbone.norm_f.weight": (e,),
        "lm_head.weight": (vocab, e),
    }
    for i, kind in enumerate(config["hybrid_override_pattern"]):
        layer = f"backbone.layers.{i}."
        shapes[f"{layer}norm.weight"] = (e,)
        shapes |= {f"{layer}mixer.{name}": shape for name, shape in of_kind[kind].items()}
    return shapes


def ungated(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of an MLP without gates."""
    return {"up_proj.weight": (width, hidden), "down_proj.weight": (hidden, width)}


def nemotron_experts(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's mixture."""
    e, count, latent = (config.get(x) for x in ("hidden_size", *NEMOTRON_COUNTS))
    assert e is not None and count is not None
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (count, e),
        "gate.e_score_correction_bias": (count,),
    }
    if latent is not None:
        shapes |= {"fc1_latent_proj.weight": (latent, e), "fc2_latent_proj.weight": (e, latent)}
    owners = {f"experts.{x}.": (config["moe_intermediate_size"], latent or e) for x in range(count)}
    owners["shared_experts."] = (config["moe_shared_expert_intermediate_size"], e)
    for owner, sizes in owners.items():
        shapes |= {owner + name: shape for name, shape in ungated(*sizes).items()}
    return shapes


NEMOTRON_COUNTS = ("n_routed_experts", "moe_latent_size")


def falcon_shapes(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of attention and MLPs, with Mamba-2 beside attention."""
    made = {}
    for name, shape in shapes.items():
        for theirs, ours in FALCON.items():
            name = name.replace(theirs, ours)
        made[name] = shape
    for i in range(config["num_hidden_layers"]):
        for name, shape in mamba_shapes(config).items():
            wanted = config.get("mamba_rms_norm", False)
            if wanted or name != "norm.weight":
                made[f"model.layers.{i}.mamba.{name}"] = shape
    return made


FALCON = {  # parts of names in other families' files, and here
    "model.norm.weight": "model.final_layernorm.weight",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    ".mlp.": ".feed_forward.",
}


def scaled_mamba(key: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | None:
    """Values of a parameter that only these families have, or have in another form; None: as in
    other families.
    """
    if config["model_type"] not in FAMILIES:
        return None
    if key.endswith("A_log"):
        return 1.5 * x - 1.0  # some heads remember a few tokens, others hundreds
    if key.endswith(".D"):
        return 1.0 + 0.25 * x
    if key.endswith("dt_bias"):
        # Above what transformers clamps Nemotron-H's time steps to where it scans in chunks.
        return 0.4 * x - 0.5
    if key.endswith(("norm_f.weight", "layernorm.weight")):
        return 1.0 + 0.25 * x
    if key.endswith("embeddings.weight"):
        return x
    if key.endswith("conv1d.weight"):
        return x * (1.5 / np.sqrt(x.shape[-1]))
    if key.endswith("router.layer.weight"):
        return x * (2.0 / np.sqrt(x.shape[-1]))
    if x.ndim == 3:  # experts
        return x * ((1.0 if "input" in key else 2.0) / np.sqrt(x.shape[-1]))
    if config["tie_word_embeddings"] and key.endswith(("out_proj.weight", "output_linear.weight")):
        return x * (2.0 / np.sqrt(x.shape[-1]))
    return None
