"""Models that a command can name: a checkpoint, random weights of a size, and the sizes of
well-known checkpoints, for plans.
"""

import argparse
import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import jax

import jpaged
from jpaged.checks import read_json
from jpaged.errors import ConfigError
from jpaged.flags import Parser
from jpaged.models.config import ModelConfig, RopeScaling
from jpaged.models.params import param_shapes, param_table, random_params

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes, of the dtypes that models have


def make_parser(name: str, doc: str | None, **settings: Any) -> Parser:
    """Return a parser whose description is a module's docstring, line by line."""
    return Parser(prog=name, description=doc, **settings)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("checkpoint", nargs="?", help="checkpoint folder")
    names = ", ".join([*MODELS, *LARGE, *LARGE_FILES])
    add(
        "--random",
        metavar="SIZE",
        help=f"random weights of a size, such as 60m, instead: {names} or a config.json",
    )


def check_model_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if (args.checkpoint is None) == (args.random is None):
        parser.error("give either a checkpoint folder or --random")


def check_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if any(n is not None and n < 1 for n in values):
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")


def qwen3(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ModelConfig:
    """Return the config of a dense Qwen3 of these sizes, with tied embeddings."""
    return ModelConfig(
        family="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        qk_norm=True,
    )


MODELS = {
    "tiny": qwen3(128, 384, 4, 4, 2, 32, 2048),
    "60m": qwen3(512, 1536, 8, 8, 4, 64, 32000),
    "0.6b": qwen3(1024, 3072, 28, 16, 8, 128, 151936),
}


# Sizes by the names of checkpoints, for plans, which load no weight.
LARGE = {
    "Qwen2.5-3B": dataclasses.replace(
        qwen3(2048, 11008, 36, 16, 2, 128, 151936), family="qwen2", qk_norm=False, qkv_bias=True
    ),
    "Qwen3-32B": dataclasses.replace(
        qwen3(5120, 25600, 64, 64, 8, 128, 151936), tie_word_embeddings=False
    ),
    "Llama-3.3-70B": dataclasses.replace(
        qwen3(8192, 28672, 80, 64, 8, 128, 128256),
        family="llama",
        qk_norm=False,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        rope_theta=5e5,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=8192),
    ),
}


def _deepseek(**fields: Any) -> dict[str, Any]:
    """Return the config.json of a model of DeepSeek V3's widths and depth, its class's defaults."""
    base = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    base |= {"tie_word_embeddings": False, "max_position_embeddings": 163840}
    heads = {"num_key_value_heads": fields["num_attention_heads"]}
    return {**base, **heads, **fields}


def _granite_hybrid(**fields: Any) -> dict[str, Any]:
    """Return the config.json of a hybrid Granite 4 of 40 layers, 4 of them attention."""
    mamba, attention = "mamba", "attention"
    base = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "num_hidden_layers": 40,
        "layer_types": [attention if i % 10 == 5 else mamba for i in range(40)],
        "position_embedding_type": "nope",
        "mamba_d_state": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    return base | fields


# The same of models whose layers differ, as their config.json has them.
LARGE_FILES: dict[str, dict[str, Any]] = {
    "Qwen3.6-35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V3": _deepseek(num_attention_heads=128, vocab_size=129280),
    "Kimi-K2.6": _deepseek(
        num_attention_heads=64,
        vocab_size=163840,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=262144,
    ),
    "Mistral-Small-4": {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",  # sizes are its class's defaults
        "tie_word_embeddings": False,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",  # likewise
        "tie_word_embeddings": False,
    },
    "Nemotron-3-Nano-30B-A3B": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "Granite-4.0-H-Small": _granite_hybrid(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        mamba_n_heads=128,
        num_local_experts=72,
        num_experts_per_tok=10,
        intermediate_size=768,
        shared_intermediate_size=1536,
    ),
    "Granite-4.0-H-Tiny": _granite_hybrid(
        hidden_size=1536,
        num_attention_heads=12,
        num_key_value_heads=4,
        mamba_n_heads=48,
        num_local_experts=64,
        num_experts_per_tok=6,
        intermediate_size=512,
        shared_intermediate_size=1024,
    ),
    "Kimi-Linear-48B-A3B": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",  # likewise, but for the layers that attend
        "layer_types": [
            *([*["linear_attention"] * 3, "full_attention"] * 6),
            *("linear_attention", "linear_attention", "full_attention"),
        ],
    },
    "Ling-3.0-Flash": {
        "architectures": ["BailingHybridForCausalLM"],
        "model_type": "bailing_hybrid",  # likewise
    },
    "Gemma-4-31B": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
    },
}


def model_name(args: argparse.Namespace) -> str:
    return str(args.checkpoint) if args.checkpoint is not None else f"random {args.random}"


def model_config(args: argparse.Namespace) -> ModelConfig:
    if args.checkpoint is not None:
        return ModelConfig.coerce(args.checkpoint)
    if (known := (MODELS | LARGE).get(args.random)) is not None:
        return known
    if (raw := LARGE_FILES.get(args.random)) is not None:
        return ModelConfig.from_hf(raw)
    path = Path(args.random)
    if not path.exists():
        names = ", ".join([*MODELS, *LARGE, *LARGE_FILES])
        raise ConfigError(f"--random {path}: no such file, and no size: those are {names}")
    return ModelConfig.from_hf(read_json(path / "config.json" if path.is_dir() else path))


def load_model(args: argparse.Namespace, dtype: str | None) -> Any:
    """Return the params that the flags name. dtype: None keeps a checkpoint's own; random weights
    are then in bfloat16.
    """
    if args.checkpoint is not None:
        return jpaged.load_params(args.checkpoint, dtype=dtype)
    return random_params(model_config(args), dtype=dtype or "bfloat16")


def abstract_params(config: ModelConfig, dtype: str, sharding: Any = None) -> Any:
    """Return the parameter tree of a model as shapes alone."""

    def leaf(shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return jax.tree.map(leaf, param_shapes(config), is_leaf=lambda node: isinstance(node, tuple))


def num_weights(config: ModelConfig) -> int:
    """Return how many weights a decode step of one row reads: the matrices, without the embedding
    if it is untied, and without the experts that the row does not take.
    """
    total = 0
    for name, spec in param_table(config).items():
        size = math.prod(spec.shape) if "," in spec.axes else 0
        if ".experts." in name:
            size = size * config.experts_per_token // config.num_experts
        total += size if name != "embed.weight" or config.tie_word_embeddings else 0
    return total


def random_ids(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random ids. The lowest three are left out, since tokenizers use them for
    padding and ends.
    """
    rng = random.Random(0)
    ids = range(min(3, vocab_size - 1), vocab_size)
    return [rng.choices(ids, k=length) for _ in range(count)]
