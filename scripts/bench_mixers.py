"""Time models that differ in what mixes tokens, of nearly the same size and random weights, one row
at several contexts, in turn.

    python scripts/bench_mixers.py [--contexts 512 4096 16384] [--rounds 3] [--hidden 256]
    python scripts/bench_mixers.py --models attention latent
    python scripts/bench_mixers.py --models attention hybrid --quantization int8

attention: grouped attention in every layer; latent: latent attention, whose row is half the hidden
size and a rotated key; hybrid, mamba: three of four layers are the gated delta rule or Mamba-2.

One line a context and model: milliseconds to the first token without a prefix hit and with one,
tokens a second of decode, what the cache holds of the row, and beside them the GB/s of a plain read
of memory in the same round. Medians over rounds. Then one JSON line for each.
"""

import dataclasses
import statistics
import sys
import time
from typing import Any

import _common as common
import jax

from jpaged import LLM, SamplingParams
from jpaged.models.config import ModelConfig
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig, MixerConfig
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.params import random_params

STEPS = 32  # tokens of a timed decode
NAMES = ("attention", "latent", "hybrid", "mamba")
SAID = ("attention", "gated_delta", "short_conv", "mamba2")  # stats: what computes


def models(hidden: int, longest: int) -> dict[str, ModelConfig]:
    """Return them by name: 4 layers with heads of 64, an MLP of 3 hidden sizes."""
    heads = hidden // 64
    attention = dataclasses.replace(
        common.qwen3(hidden, 3 * hidden, 4, heads, heads // 2, 64, 8192),
        max_position_embeddings=longest,
    )
    layer = attention.layers[0]
    assert isinstance(layer.mixer, AttentionConfig)
    latent = LatentConfig(
        num_heads=heads,
        latent_dim=hidden // 2,
        rope_dim=64,
        content_dim=64,
        value_dim=64,
        rope=layer.mixer.rope,
    )
    delta = DeltaConfig(num_key_heads=heads // 2, num_value_heads=heads, key_dim=64, value_dim=64)
    mamba = MambaConfig(num_heads=2 * heads, head_dim=64, state_dim=128)
    gated = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, gate=True))

    def with_mixers(family: str, mixers: list[MixerConfig], last: LayerConfig) -> ModelConfig:
        layers = (*(dataclasses.replace(layer, mixer=mixer) for mixer in mixers), last)
        return dataclasses.replace(attention, family=family, layers=layers)

    return {
        "attention": attention,
        "latent": with_mixers(
            "deepseek_v3", [latent] * 3, dataclasses.replace(layer, mixer=latent)
        ),
        "hybrid": with_mixers("qwen3_5_text", [delta] * 3, gated),
        "mamba": with_mixers("granitemoehybrid", [mamba] * 3, layer),
    }


def row_bytes(llm: LLM, context: int, block_size: int) -> int:
    """What the cache holds of a row of so many tokens."""
    return sum(
        group["block_bytes"] * (1 if group["per"] == "block" else -(-context // block_size))
        for group in llm.stats()["kv_groups"]
    )


def measure(llm: LLM, prompt: list[int]) -> dict[str, float]:
    """Return the seconds to a first token without a hit and with one, and those of a token more."""

    def seconds(tokens: list[int], count: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([tokens], sampling, use_tqdm=False)
        return time.perf_counter() - began

    llm.reset_prefix_cache()
    cold = seconds(prompt, 1)
    hit = seconds([*prompt, 5], 1)
    more = seconds([*prompt, 6], 1 + STEPS)
    return {"cold_s": cold, "hit_s": hit, "token_s": max(more - hit, 0.0) / STEPS}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = common.make_parser("bench_mixers.py", __doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of all weights")
    args = parser.parse_args(argv)
    common.check_positive(parser, args, "contexts", "rounds", "hidden")
    if args.hidden % 128:
        parser.error(f"--hidden {args.hidden}: must be a multiple of 128")
    longest, block_size = max(args.contexts) + 64, 16
    engines = {}
    known = models(args.hidden, longest)
    for name in args.models:
        params = random_params(known[name], dtype="bfloat16")
        llm = LLM(
            params,
            max_model_len=longest,
            max_num_seqs=1,
            block_size=block_size,
            max_num_batched_tokens=1024,
            token_buckets=(16, 1024),
            num_blocks=2 * longest // block_size,
            quantization=args.quantization,
        )
        llm.warmup(use_tqdm=False)
        engines[name] = llm
        weights = sum(leaf.size for leaf in jax.tree.leaves(params))
        said = {k: v for k, v in llm.stats().items() if k in SAID}
        print(f"{name}: {weights / 1e6:.1f}M parameters, {said}", flush=True)
    records, rows = [], []
    for context in args.contexts:
        (prompt,) = common.random_ids(1, context, 8192)
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        reads = []
        for i in range(args.rounds):
            reads.append(common.read_bandwidth())
            for name in list(engines)[:: -1 if i % 2 else 1]:
                figures[name].append(measure(engines[name], prompt))
        for name, runs in figures.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            record = {"model": name, "context": context, "read_gb_s": statistics.median(reads)}
            record |= middle | {"row_bytes": row_bytes(engines[name], context, block_size)}
            records.append(record)
            rows.append(
                (
                    *(str(context), name),
                    *(common.number(1000 * middle[key]) for key in ("cold_s", "hit_s")),
                    common.number(1 / middle["token_s"]),
                    *(
                        common.number(record["row_bytes"] / 2**20),
                        common.number(record["read_gb_s"]),
                    ),
                )
            )
    heads = (
        "context",
        "model",
        "first token\nms",
        "after a\nhit ms",
        "tok/s",
        "row MiB",
        "read\nGB/s",
    )
    print("\n".join(common.aligned(heads, rows)))
    for record in records:
        print(common.json_line(record))
    return records


if __name__ == "__main__":
    sys.exit(not main())
