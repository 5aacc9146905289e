"""Functions that the scripts share: flags, models, random weights, timing, records, tables, absent
chips.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import jpaged
from jpaged.checks import read_json
from jpaged.errors import ConfigError
from jpaged.flags import Parser
from jpaged.models.config import ModelConfig, RopeScaling
from jpaged.models.params import param_shapes, param_table, random_params

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes, of the dtypes that models have

# ---- flags ----


def make_parser(name: str, doc: str | None, **settings: Any) -> Parser:
    """Return a parser whose description is a module's docstring, line by line."""
    return Parser(prog=name, description=doc, **settings)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("checkpoint", nargs="?", help="a checkpoint folder")
    names = ", ".join([*MODELS, *LARGE, *LARGE_FILES])
    add("--random", metavar="SIZE", help=f"random weights instead: {names} or a config.json")


def check_model_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if (args.checkpoint is None) == (args.random is None):
        parser.error("give either a checkpoint folder or --random")


def check_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if any(n is not None and n < 1 for n in values):
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")


# ---- models ----


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


# ---- timing ----


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds until all arrays of the call's result have been computed."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def in_turn[T](calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the results of each call in rounds in which all take turns, so that all run under the
    same conditions.

    The first round, which compiles, is left out; every other round goes backwards.
    """
    results: dict[str, list[T]] = {name: [] for name in calls}
    for i in range(1 + rounds):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            result = calls[name]()
            if i:
                results[name].append(result)
    return results


def read_bandwidth() -> float:
    """Return the GB/s at which a reduction reads 256 MB on the default device, the best of five.
    This bounds decode's reads of weights.
    """
    x = jnp.ones((8, 1 << 23), jnp.float32)
    largest = jax.jit(lambda x: x.max(axis=1))
    runs = in_turn({"read": lambda: seconds_of(lambda: largest(x))}, 5)
    return x.nbytes / min(runs["read"]) / 1e9


# ---- records and tables ----


def environment() -> dict[str, Any]:
    """Return the facts about the machine that a record has."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def json_line(record: Mapping[str, Any]) -> str:
    """Return one line of JSON, with floats to six digits."""
    short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
    return json.dumps(short)


def number(value: float | None) -> str:
    """Return a number to three significant digits, with all digits before the point and at most two
    after it.
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.{0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2}f}"


def aligned(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0) -> list[str]:
    """Return lines of right-aligned columns, the first `left` of which are left-aligned. A head may
    have several lines.
    """
    stacked = [head.split("\n") for head in heads]
    depth = max(map(len, stacked))
    cells = [[head[i] if i < len(head) else "" for head in stacked] for i in range(depth)]
    cells += [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        sized = zip(row, widths, strict=True)
        padded = [f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(sized)]
        lines.append(" ".join(padded).rstrip())
    return lines


# ---- chips that this machine lacks ----

H200 = ("NVIDIA H200", 132)  # its name, and how many cores it has


@dataclasses.dataclass(frozen=True)
class Card:
    """An NVIDIA card that can be compiled for. shared_memory: bytes of a thread block at most."""

    name: str
    cores: int
    capability: tuple[int, int]
    shared_memory: int


CARDS = {  # one of each architecture
    "sm_80": Card("NVIDIA A100", 108, (8, 0), 166912),
    "sm_89": Card("NVIDIA L4", 58, (8, 9), 101376),
    "sm_90a": Card(*H200, (9, 0), 232448),
    "sm_100": Card("NVIDIA B200", 148, (10, 0), 232448),
    "sm_120": Card("NVIDIA RTX PRO 6000", 188, (12, 0), 101376),
}
CHIPS = {"cuda": ("sm_90a",), "tpu": ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")}
# The environment of a process that compiles for TPUs that it lacks; libtpu reads it at first use.
LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3"}


def cannot_compile(platform: str) -> str | None:
    """Return why nothing can be compiled here for CUDA or TPUs, or None."""
    if platform == "tpu":
        missing = importlib.util.find_spec("libtpu") is None
        return "libtpu is not installed: pip install libtpu" if missing else None
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        packages = "jax-cuda13-plugin jax-cuda13-pjrt"
        return f"no CUDA plugin: pip install --no-deps {packages}, at jax's version"
    if shutil.which("ptxas") is None:
        return "no ptxas on PATH: it comes with CUDA's toolkit"
    return None


def absent_devices(platform: str, chip: str, count: int = 1) -> Sequence[Any]:
    """Return the devices of a chip's topology. count: of devices, for CUDA."""
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
    options = {"platform": "cuda", "topology": f"1x1x{count}", "target_config": target(CARDS[chip])}
    return topologies.get_topology_desc("", **options).devices


def target(card: Card) -> str:
    """Return a card as XLA describes it: what a compiler asks of it, the rest as an H200 has it."""
    (major, minor), text = card.capability, Path(__file__).with_name("h200.textproto").read_text()
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = {
        "core_count": str(card.cores),
        "shared_memory_per_block_optin": str(card.shared_memory),
        "cuda_compute_capability": f"{{ major: {major} minor: {minor}{features} }}",
        "name": f'"{card.name}"',
        "device_description_str": f'"{card.name}"',
    }
    for field, value in lines.items():
        separator = " " if value[0] == "{" else ": "
        line = rf"^(\s*){field}:? .*$"
        text, count = re.subn(line, rf"\g<1>{field}{separator}{value}", text, flags=re.MULTILINE)
        assert count == 1, field
    return text


def stay_on_cpu() -> None:
    """Keep jax from looking for devices other than the CPU, and libtpu for TPUs. To be called
    before jax is first used.
    """
    os.environ |= LIBTPU
    jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def hopper(device: tuple[str, int] = H200) -> Iterator[None]:
    """Inside the block, lowering treats its target as a GPU of this name and number of cores."""
    abstract_device = jax.sharding.AbstractDevice(*device, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract_device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def absent_device(platform: str, chip: str) -> Iterator[Any]:
    """A device of the chip; lowering inside takes it for the one at hand."""
    with absent_mesh(platform, chip, {}) as devices:
        yield devices[0]


@contextlib.contextmanager
def absent_mesh(platform: str, chip: str, shape: Mapping[str, int]) -> Iterator[Sequence[Any]]:
    """Yield the devices of a mesh of these axes, for lowering inside the block."""
    count = math.prod(shape.values())
    devices = absent_devices(platform, chip, count)[:count]
    if len(devices) < count:
        raise ConfigError(f"{chip} has {len(devices)} chips, not {count}")
    if platform == "cuda":
        with hopper((CARDS[chip].name, CARDS[chip].cores)):
            yield devices
        return
    sizes = shape or {"tp": 1}
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=kinds)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield devices
